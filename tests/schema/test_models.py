"""Requests, plans, activity and responses: round trips, and errors that name the field."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import (
    ConfigurationError,
    DialogueStage,
    DialogueState,
    InvalidRequestError,
    Principal,
    RetrievalRequest,
    schema,
)
from llama_index_agentic_kb.schema import (
    Condition,
    ImageContent,
    Intent,
    Message,
    PendingWrite,
    QueryPlan,
    Reference,
    RetrievalResponse,
    SourceData,
    SourceParams,
    SubQuery,
    TopicShift,
)
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.request import MAX_GROUPS, MAX_NAME

USER = {"messages": [{"role": "user", "content": "Who?"}]}


def source(**fields: Any) -> dict[str, Any]:
    return {**USER, "knowledgeSourceParams": [{"knowledgeSourceName": "a", **fields}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "messages: a request needs a user message with text, or intents"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages: a request needs a user message"),
        ({"messages": [{"role": "user", "content": "  "}]}, "messages: a request needs a user message"),
        ({**USER, "intents": [{"search": "a"}]}, "messages and intents exclude each other"),
        ({"intents": [{"search": ""}]}, r"intents\.0\.search: "),
        ({**USER, "maxRuntimeInSeconds": 1e300}, "maxRuntimeInSeconds: .* 86400"),
        ({**USER, "maxOutputSize": 0}, "maxOutputSize"),
        ({**USER, "maxOutputDocuments": 2**31}, "maxOutputDocuments: .* 10000"),
        (source(maxOutputDocuments=2**31), "maxOutputDocuments: .* 10000"),
        (source(filters={"key": "b", "value": 2**63}), "a whole one within 64 bits"),
        ({**USER, "retrievalReasoningEffort": {"kind": "high"}}, "retrievalReasoningEffort: "),
        ({**USER, "maxOutputTokens": 3}, "maxOutputTokens: "),
        ({**USER, "knowledgeSourceParams": [{}]}, r"knowledgeSourceParams\.0\.knowledgeSourceName: "),
        (
            {**USER, "knowledgeSourceParams": [{"knowledgeSourceName": "a"}] * 2},
            "knowledgeSourceParams: a is named twice",
        ),
        (source(alwaysQuerySource=True, neverQuerySource=True), r"neverQuerySource exclude each other \(a\)"),
        (source(includeReferences=False, includeReferenceSourceData=True), "needs includeReferences to be true"),
        (source(rerankerThreshold=4.1), "rerankerThreshold"),
        (source(rerankerThreshold=2, resultsProcessing="none"), r"needs resultsProcessing to be 'rerank' \(a\)"),
        ({**source(rerankerThreshold=2), "resultsProcessing": "none"}, r"needs resultsProcessing to be 'rerank' \(a\)"),
        ([], "request: "),
        ("{", "request: "),
        (None, "request: "),
    ],
)
def test_errors_name_the_field(data: Any, message: str) -> None:
    """A request at fault is refused with the field's name on the wire, and the remedy."""
    with pytest.raises(InvalidRequestError, match=message):
        RetrievalRequest.parse(data)


def test_questions_and_history() -> None:
    """The last user message with text is the question, what stands before it the history."""
    texts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
    contents = ["First", "Yes", texts, [{"type": "image", "image": {"url": "u"}}]]
    roles = ["user", "assistant", "user", "user"]
    said = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    request = RetrievalRequest.parse({"messages": said})
    assert request.question == "a \nb"
    assert [message.text for message in request.history] == ["First", "Yes"]
    assert isinstance((request.messages or [])[3].content[0], ImageContent)
    intents = RetrievalRequest(intents=[Intent(search="a"), Intent(search="b")])
    assert (intents.question, intents.history) == ("a\nb", [])
    assert intents.params_for("x") == SourceParams(knowledge_source_name="x")


def test_anything_in_metadata_can_be_sent() -> None:
    """Metadata that JSON has no type for is written as text; what is no number as null."""

    class Odd:
        def __str__(self) -> str:
            return "odd"

    data = SourceData(doc_key="k", title="t", content="c", metadata={"odd": Odd(), "nan": math.nan, "set": {1}})
    reference = Reference(
        id="0", activity_source=0, knowledge_source_name="s", doc_key="k", title="t", node_id="n", source_data=data
    )
    response = RetrievalResponse(references=[reference])
    for written in (response.to_dict(), json.loads(response.to_json())):
        assert written["references"][0]["sourceData"]["metadata"] == {"odd": "odd", "nan": None, "set": [1]}


def test_extracts() -> None:
    """Extracted data is read back; an answer, or JSON of another shape, has none."""
    text = json.dumps([{"ref_id": 0, "title": "T", "content": "C"}])
    (extract,) = RetrievalResponse(response=[Message(role="assistant", content=text)]).extracts
    assert (extract.ref_id, extract.title, extract.terms, extract.content) == (0, "T", None, "C")
    for other in ("An answer.", "[1]", '{"ref_id": 0}', "", '[{"title": "T"}]'):
        assert RetrievalResponse(response=[Message(role="assistant", content=other)]).extracts == []
    assert str(RetrievalResponse(response=[Message(content="a"), Message(content="b")])) == "a\nb"


STATE = DialogueState(
    turn=3,
    stage=DialogueStage.CONFIRMING,
    tool="returns",
    slots={"order": "A-4711", "items": 2},
    pending=PendingWrite(token="t", tool="returns", arguments={"order": "A-4711"}, asked_of="x"),
    shift=TopicShift(from_tool="orders", to_tool="returns", kept=("order",)),
)


def test_callers_can_not_send_a_state() -> None:
    """It comes from the program that keeps the conversation, like the principal, and is kept as JSON."""
    messages = [{"role": "user", "content": "yes"}]
    with pytest.raises(InvalidRequestError, match="dialogue can't be sent in a request"):
        RetrievalRequest.parse({"messages": messages, "dialogue": STATE.to_dict()})
    assert DialogueState.parse(STATE.to_json()) == STATE == DialogueState.parse(STATE.to_dict())
    request = RetrievalRequest.parse({"messages": messages, "dialogue": STATE})
    assert request.dialogue == STATE
    assert "dialogue" not in request.to_dict()


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
    for data in (wire, json.dumps(wire)):
        with pytest.raises(InvalidRequestError, match="principal can't be sent in a request"):
            RetrievalRequest.parse(data)
    alice = Principal(tenant="acme", user="alice")
    request = RetrievalRequest.parse({**wire, "principal": alice})
    assert request.principal == alice
    assert "alice" not in request.to_json()
    assert "principal" not in request.to_dict()


Kind = TypeVar("Kind")
FROZEN = Path(__file__).with_name("public_names.json")


def names() -> dict[str, list[str]]:
    """The JSON names of each model's fields, and each enumeration's values."""
    for module in pkgutil.iter_modules(schema.__path__, f"{schema.__name__}."):
        importlib.import_module(module.name)
    models = {
        kind.__name__: sorted(field.alias or name for name, field in kind.model_fields.items())
        for kind in _below(Model)
    }
    enums = {kind.__name__: sorted(str(one) for one in kind) for kind in _below(StrEnum)}
    return dict(sorted({**models, **enums}.items()))


def _below(kind: type[Kind]) -> Iterator[type[Kind]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith(f"{schema.__name__}.") and not child.__name__.startswith("_"):
            yield child
        yield from _below(child)


def test_names_that_others_read_stay() -> None:
    """A name of this file is a contract: Azure's, Google's, or that of stored sessions and recordings."""
    assert names() == json.loads(FROZEN.read_text())


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(str.strip)
USER = {"messages": [{"role": "user", "content": "Who?"}]}
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "retrieval_reasoning_effort": st.sampled_from(["minimal", "low", "medium", "auto"]),
        "output_mode": st.sampled_from(["extractiveData", "answerSynthesis"]),
        "include_activity": st.booleans(),
        "max_runtime_in_seconds": st.floats(0.1, 86_400),
        "max_output_size_in_tokens": st.integers(1, 10**6),
        "max_output_documents": st.integers(1, 10**3),
        "results_processing": st.sampled_from(["rerank", "none"]),
        "knowledge_source_params": st.lists(
            st.builds(
                SourceParams,
                knowledge_source_name=WORDS,
                filters=st.one_of(st.none(), st.builds(Condition, key=WORDS, value=WORDS)),
                fail_on_error=st.booleans(),
                reranker_threshold=st.one_of(st.none(), st.floats(0, 4)),
                results_processing=st.just("rerank"),
            ),
            max_size=3,
            unique_by=lambda params: params.knowledge_source_name,
        ),
    },
).flatmap(
    lambda fields: st.one_of(
        st.lists(st.builds(Intent, search=WORDS), min_size=1, max_size=3).map(lambda it: {**fields, "intents": it}),
        WORDS.map(lambda text: {**fields, "messages": [Message(content=text)]}),
    )
)


@settings(max_examples=40, deadline=None)
@given(REQUESTS)
def test_a_request_survives_the_wire(fields: dict[str, Any]) -> None:
    """Parsing what was written gives the same request, from data, from JSON text and from bytes."""
    request = RetrievalRequest(**fields)
    assert RetrievalRequest.parse(request.to_dict()) == request
    assert RetrievalRequest.parse(request.to_json()) == request
    assert RetrievalRequest.parse(json.dumps(request.to_dict()).encode()) == request


SUB_QUERIES = st.lists(st.fixed_dictionaries({"query": WORDS, "sources": st.lists(WORDS, max_size=3)}), max_size=3)


@settings(max_examples=40, deadline=None)
@given(SUB_QUERIES)
def test_a_plan_survives_the_wire(sub_queries: list[dict[str, Any]]) -> None:
    """Parsing what was written gives the same plan."""
    plan = QueryPlan(sub_queries=[SubQuery(id="q1", **fields) for fields in sub_queries])
    assert QueryPlan.parse(plan.to_dict()) == plan
