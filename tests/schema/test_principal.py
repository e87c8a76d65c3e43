from __future__ import annotations

import json
from typing import Any

import pytest

from llama_index_agentic_kb import ConfigurationError, InvalidRequestError, Principal, RetrievalRequest
from llama_index_agentic_kb.schema.request import MAX_GROUPS, MAX_NAME


def test_groups_have_no_order() -> None:
    """Two principals with the same groups are one, whatever the order, and can be keys."""
    assert Principal(groups=["b", "a", "a"]) == Principal(groups=("a", "b"))
    assert len({Principal(user="x"), Principal(user="x"), Principal(user="X")}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give a tenant, a user or groups"),
        ({"tenant": " "}, "Principal.tenant: a name must not be empty"),
        ({"user": 7}, "Principal.user: expected text, got int"),
        ({"groups": "managers"}, "Principal.groups: expected several names, got one text"),
        ({"groups": ["a", ""]}, "Principal.groups: a name must not be empty"),
        ({"user": "a" * (MAX_NAME + 1)}, f"at most {MAX_NAME}"),
        ({"groups": map(str, range(MAX_GROUPS + 1))}, f"at most {MAX_GROUPS}"),
        ({"tenant": "acme\u200b"}, "hidden characters"),
        ({"user": "\ud800"}, "hidden characters"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_names_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    """A principal that says nothing, or in names that look like others, is refused by field."""
    with pytest.raises(ConfigurationError, match=message):
        Principal(**fields)


@pytest.mark.parametrize("sent", [{"tenant": "acme"}, "acme", ["acme"], 1, {}], ids=repr)
def test_a_request_cannot_bring_one(sent: Any) -> None:
    """What is read from wire data is no proof of who asks; what Python gives is taken, and never written."""
    wire = {"messages": [{"content": "rain"}], "principal": sent}
    for given in (wire, json.dumps(wire)):
        with pytest.raises(InvalidRequestError, match="principal can't be sent in a request"):
            RetrievalRequest.parse(given)
    alice = Principal(tenant="acme", user="alice")
    request = RetrievalRequest.parse({**wire, "principal": alice})
    assert request.principal == alice
    assert "alice" not in request.to_json()
    assert "principal" not in request.to_dict()
