"""Requests, plans, activity, responses, answers and ledgers: round trips, errors by field, and Azure's SDK."""

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
from azure.search.documents.knowledgebases import models as sdk

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
    ImageContent,
    Intent,
    Message,
    PendingWrite,
    Reference,
    RetrievalResponse,
    SourceData,
    SourceParams,
    TopicShift,
)
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import Answer, ledger_citations, ledger_supports
from llama_index_agentic_kb.schema.grounding import (
    Conflict,
    ConflictingValue,
    ConflictKind,
    GroundedClaim,
    GroundingLedger,
    Span,
    Support,
    Verdict,
)
from llama_index_agentic_kb.schema.request import MAX_GROUPS, MAX_NAME

USER = {"messages": [{"role": "user", "content": "Who?"}]}


def with_params(**fields: Any) -> dict[str, Any]:
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
        (with_params(maxOutputDocuments=2**31), "maxOutputDocuments: .* 10000"),
        (with_params(filters={"key": "b", "value": 2**63}), "a whole one within 64 bits"),
        ({**USER, "retrievalReasoningEffort": {"kind": "high"}}, "retrievalReasoningEffort: "),
        ({**USER, "maxOutputTokens": 3}, "maxOutputTokens: "),
        ({**USER, "knowledgeSourceParams": [{}]}, r"knowledgeSourceParams\.0\.knowledgeSourceName: "),
        (
            {**USER, "knowledgeSourceParams": [{"knowledgeSourceName": "a"}] * 2},
            "knowledgeSourceParams: a is named twice",
        ),
        (with_params(alwaysQuerySource=True, neverQuerySource=True), r"neverQuerySource exclude each other \(a\)"),
        (with_params(includeReferences=False, includeReferenceSourceData=True), "needs includeReferences to be true"),
        (with_params(rerankerThreshold=4.1), "rerankerThreshold"),
        (with_params(rerankerThreshold=2, resultsProcessing="none"), r"needs resultsProcessing to be 'rerank' \(a\)"),
        (
            {**with_params(rerankerThreshold=2), "resultsProcessing": "none"},
            r"needs resultsProcessing to be 'rerank' \(a\)",
        ),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"citations": [{"start": 1, "end": 1}]}, "citations.0: start (1) must be below end (1)"),
        ({"citations": [{"start": 0, "end": 4}]}, "citations.0.end: 4 is beyond the text of 3 characters"),
        ({"citations": [{"start": 0, "end": 1, "sources": [1]}]}, "citations.0.sources: there is no reference 1"),
        ({"groundingSupports": [{"start": 0, "end": 9}]}, "groundingSupports.0.end: 9 is beyond"),
        (
            {"groundingSupports": [{"start": 0, "end": 1, "checkRequired": False, "score": 0.5}]},
            "groundingSupports.0: score: a claim that needs no check has neither",
        ),
        ({"groundingScore": 1.1}, "groundingScore: Input should be less than or equal to 1"),
        ({"groundingScore": float("nan")}, "groundingScore: Input should be"),
        ({"createdAt": "2024-01-31T00:00:00"}, "createdAt: Input should have timezone info"),
    ],
)
def test_what_an_answer_can_not_hold_is_refused(fields: Any, message: str) -> None:
    """Spans lie in the text, references exist, scores lie from 0 to 1, times have a zone."""
    good = {"text": "abc", "references": [{"kind": "chunk"}]}
    assert Answer.parse(good).to_dict()["text"] == "abc"
    with pytest.raises(InvalidRequestError) as refused:
        Answer.parse({**good, **fields})
    assert message in str(refused.value)


def support(reference: str, score: float) -> Support:
    return Support(reference_id=reference, node_id="n", span=Span(start=0, end=1), quote="q", score=score)


def claim(start: int = 0, verdict: Any = Verdict.SUPPORTED, score: float | None = 0.9, **fields: Any) -> GroundedClaim:
    return GroundedClaim(text="x", span=Span(start=start, end=start + 1), verdict=verdict, score=score, **fields)


def test_the_ledger_becomes_citations() -> None:
    """Only references above the threshold are sources, by their place; what contradicts a claim is none."""
    ledger = GroundingLedger(
        claims=[
            claim(0, supports=[support("7", 0.9), support("3", 0.61), support("9", 0.99)]),
            claim(1, Verdict.UNSUPPORTED, 0.3, supports=[support("3", 0.59)]),
            claim(2, Verdict.CONTRADICTED, 0.1, supports=[support("3", 0.9)]),
            claim(3, Verdict.NOT_CHECKABLE, None, check_required=False),
        ]
    )
    citations = ledger_citations(ledger, ["3", "7"])
    assert [(one.start, one.end, one.sources) for one in citations] == [(0, 1, [1, 0])]
    assert ledger_supports(ledger, ["3", "7"], threshold=0.5)[1].sources == [0]
    supports = [(one.score, one.check_required, one.sources) for one in ledger_supports(ledger, ["3", "7"])]
    assert supports == [(0.9, True, [1, 0]), (0.3, True, []), (0.1, True, []), (None, False, [])]


@pytest.mark.parametrize(
    "fields",
    [
        {"check_required": False},
        {"check_required": False, "score": None, "verdict": "notCheckable", "supports": [support("0", 0.9)]},
        {"score": None},
        {"verdict": Verdict.NOT_CHECKABLE},
        *({"score": score} for score in (-0.1, 1.1, math.nan, math.inf)),
    ],
    ids=str,
)
def test_a_claim_has_a_score_if_it_is_checked(fields: dict[str, Any]) -> None:
    """A share from 0 to 1; only what needs a check has one, and what has one has a verdict."""
    assert claim().score == 0.9
    with pytest.raises(ValueError, match="score"):
        claim(**fields)


def test_a_ledger_is_in_order_and_of_its_answer() -> None:
    """Claims don't overlap, a score is of claims, conflicts are of claims that there are; another answer is refused."""
    other = ConflictingValue(value="x", support=support("0", 0.9))
    with pytest.raises(ValueError, match="inside of the claim before"):
        GroundingLedger(claims=[claim(0), claim(0)])
    with pytest.raises(ValueError, match="no claim has a score"):
        GroundingLedger(grounding_score=0.5)
    with pytest.raises(ValueError, match="no such claim"):
        GroundingLedger(conflicts=[Conflict(claim=0, kind=ConflictKind.DATE, values=[other, other])])
    with pytest.raises(ValueError, match="must be below end"):
        Span(start=3, end=2)
    ledger = GroundingLedger(claims=[claim(cited=["0"], supports=[support("0", 0.9)])], grounding_score=0.9)
    ledger.check_spans("x marks it")
    with pytest.raises(InvalidRequestError, match=r"claims\[0\]"):
        ledger.check_spans("nothing does")
    assert GroundingLedger.parse(ledger.to_json()) == ledger
    assert ledger.to_dict()["claims"][0]["supports"][0]["referenceId"] == "0"


def request_of_the_sdk() -> sdk.KnowledgeBaseRetrievalRequest:
    text, image = sdk.KnowledgeBaseMessageTextContent, sdk.KnowledgeBaseMessageImageContent
    picture = image(image=sdk.KnowledgeBaseImageContent(url="http://img/1.png"))
    return sdk.KnowledgeBaseRetrievalRequest(
        messages=[
            sdk.KnowledgeBaseMessage(role="assistant", content=[text(text="How can I help?")]),
            sdk.KnowledgeBaseMessage(role="user", content=[text(text="Who was first?"), picture]),
        ],
        retrieval_reasoning_effort=sdk.KnowledgeRetrievalMediumReasoningEffort(),
        output_mode="answerSynthesis",
        max_runtime_in_seconds=30,
        max_output_size=6000,
        max_output_size_in_tokens=5000,
        max_output_documents=50,
        knowledge_source_params=[
            sdk.SearchIndexKnowledgeSourceParams(
                knowledge_source_name="ks",
                filter_add_on="State eq 'WA'",
                include_references=True,
                include_reference_source_data=True,
                always_query_source=True,
                fail_on_error=True,
                reranker_threshold=2.5,
                results_processing="rerank",
                enable_image_serving=False,
            ),
            sdk.WebKnowledgeSourceParams(knowledge_source_name="web", count=5, market="en-US", never_query_source=True),
        ],
    )


def test_a_request_of_the_sdk_loads_as_ours() -> None:
    """Messages, effort, limits and source parameters arrive, as the model itself and as JSON."""
    theirs = request_of_the_sdk()
    ours = RetrievalRequest.parse(theirs)
    assert RetrievalRequest.parse(json.dumps(theirs.as_dict())) == ours
    assert (ours.question, [message.text for message in ours.history]) == ("Who was first?", ["How can I help?"])
    assert (ours.retrieval_reasoning_effort, ours.output_mode) == ("medium", "answerSynthesis")
    assert (ours.max_runtime_in_seconds, ours.max_output_size_in_tokens, ours.max_output_documents) == (30, 5000, 50)
    index, web = ours.knowledge_source_params
    assert (index.kind, index.filter_add_on, index.reranker_threshold) == ("searchIndex", "State eq 'WA'", 2.5)
    assert (index.always_query_source, index.fail_on_error, index.include_reference_source_data) == (True, True, True)
    assert (index.results_processing, {*(index.model_extra or ())}) == ("rerank", {"enableImageServing"})
    assert (web.kind, web.never_query_source, {*(web.model_extra or ())}) == ("web", True, {"count", "market"})


def test_a_request_of_ours_loads_as_the_sdks() -> None:
    """Our wire form has the SDK's names and typed classes."""
    params = SourceParams(knowledge_source_name="ks", kind="searchIndex", fail_on_error=True, include_references=True)
    limits: Any = {"max_runtime_in_seconds": 30, "max_output_size_in_tokens": 10}
    ours = RetrievalRequest(messages=[Message(content="Who?")], knowledge_source_params=[params], **limits)
    theirs: Any = sdk.KnowledgeBaseRetrievalRequest(json.loads(ours.to_json()))
    assert isinstance(theirs.messages[0].content[0], sdk.KnowledgeBaseMessageTextContent)
    assert (theirs.max_output_size_in_tokens, json.dumps(theirs.max_runtime_in_seconds)) == (10, "30")
    (found,) = theirs.knowledge_source_params
    assert isinstance(found, sdk.SearchIndexKnowledgeSourceParams)
    assert (found.knowledge_source_name, found.fail_on_error, found.include_references) == ("ks", True, True)
    assert RetrievalRequest.parse(theirs) == ours
