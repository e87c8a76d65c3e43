"""Resource names of all three parents, read and written."""

from __future__ import annotations

import pytest

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.wire.google_names import (
    SessionName,
    parse_answer_name,
    parse_parent,
    parse_serving_config,
    parse_session_name,
)

PARENTS = [
    "projects/p/locations/global/dataStores/d",
    "projects/123/locations/eu/collections/default_collection/dataStores/d-1",
    "projects/p/locations/us/collections/c/engines/e_2",
]


@pytest.mark.parametrize("parent", PARENTS)
def test_names_are_written_as_they_were_read(parent: str) -> None:
    """A parent, and what stands under it, is read into its parts and written back."""
    assert str(parse_parent(parent)) == parent
    assert parse_parent(parent).engine == ("engines" in parent)
    assert str(parse_serving_config(f"{parent}/servingConfigs/default")) == parent
    session = parse_session_name(f"{parent}/sessions/s")
    assert str(session) == f"{parent}/sessions/s"
    session, answer = parse_answer_name(f"{parent}/sessions/-/answers/a")
    assert (session, answer) == (SessionName(parse_parent(parent), "-"), "a")
    assert session.answer("a") == f"{parent}/sessions/-/answers/a"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "projects/p",
        "projects/p/locations/l/dataStores/",
        "projects/p/locations/l/dataStores/d/",
        "projects/p/locations/l/dataStores/d\n",
        "projects/p/locations/l/dataStores/a b",
        "projects/p/locations/l/engines/e",
        "projects//locations/l/dataStores/d",
        "projects/p/locations/l/dataStores/" + "d" * 251,
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    """Neither a part of a name nor one with an empty part passes; the field is named."""
    with pytest.raises(InvalidRequestError):
        parse_parent(name)
    with pytest.raises(InvalidRequestError, match=r"^session: |an engine is named"):
        parse_session_name(f"{name}/sessions/s")
    with pytest.raises(InvalidRequestError, match=r"^name: "):
        parse_answer_name(f"{PARENTS[0]}/sessions/s")
    with pytest.raises(InvalidRequestError, match=r"^name: "):
        parse_answer_name(f"{PARENTS[0]}/servingConfigs/s/answers/a")
