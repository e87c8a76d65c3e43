"""Requests and responses as the real Azure SDK has them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import pytest
from azure.search.documents.knowledgebases import models as sdk

from llama_index_agentic_kb.schema import (
    ActivityError,
    AgenticReasoningActivity,
    Message,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    Reference,
    RetrievalRequest,
    RetrievalResponse,
    SearchArguments,
    SourceActivity,
    SourceData,
    SourceParams,
    parse_odata,
)

BEGAN = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
TIMES: Any = {"started_at": BEGAN, "completed_at": BEGAN, "elapsed_ms": 322, "outcome": Outcome.OK}
FILTER = "(tenant eq 'o''hara' and year ge 1969)"
MISSIONS: Any = {"knowledge_source_name": "missions", "sub_query_id": "q1", "query_time": BEGAN, **TIMES}
NEWS: Any = {"knowledge_source_name": "news", "type": "web"}
FIRST, LATE = (
    SearchArguments(search="first", filter=parse_odata(FILTER)),
    {"code": "late", "message": "m", "target": "n"},
)
DATA = SourceData(doc_key="a11", title="Apollo 11", content="Text", metadata={"year": 1969})
RECORDS: list[Any] = [
    ModelQueryPlanningActivity(id=0, input_tokens=50, output_tokens=7, model=ModelInfo(model_name="gpt"), **TIMES),
    SourceActivity(id=1, count=2, candidates=3, arguments=FIRST, warning="slow", **MISSIONS),
    SourceActivity(
        id=2, arguments=SearchArguments(search="moon"), error=ActivityError(**LATE), sub_query_id="q1", **NEWS
    ),
    AgenticReasoningActivity(
        id=3, reasoning_tokens=9, retrieval_reasoning_effort="low", logical_reasoning_effort="auto", **TIMES
    ),
    ModelAnswerSynthesisActivity(id=4, input_tokens=500, output_tokens=20, **TIMES),
]
PAGE: Any = {"url": "https://e.org", "citation_url": "https://e.org#1", "node_id": "n1"}
FOUND: Any = {"activity_source": 1, "knowledge_source_name": "missions", "doc_key": "a11", "reranker_score": 2.5}
RESPONSE = RetrievalResponse(
    status_code=206,
    response=[Message(role="assistant", content="Neil Armstrong [ref_id:0].")],
    activity=RECORDS,
    references=[
        Reference(id="0", title="Apollo 11", score=0.5, source_data=DATA, **FOUND, **PAGE),
        Reference(id="1", activity_source=2, doc_key="k", title="T", url="u", node_id="n2", **NEWS),
    ],
)


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
    assert (index.results_processing, index.ignored) == ("rerank", ("enableImageServing",))
    assert (web.kind, web.never_query_source, web.ignored) == ("web", True, ("count", "market"))


@pytest.mark.parametrize("effort", ["Minimal", "Low", "Auto"])
def test_intents_and_efforts(effort: str) -> None:
    """Intents and each effort go both ways, as typed classes of the SDK."""
    intents: list[Any] = [sdk.KnowledgeRetrievalSemanticIntent(search=word) for word in "ab"]
    theirs = getattr(sdk, f"KnowledgeRetrieval{effort}ReasoningEffort")()
    request = sdk.KnowledgeBaseRetrievalRequest(intents=intents, retrieval_reasoning_effort=theirs, max_output_size=7)
    parsed = RetrievalRequest.parse(request.as_dict())
    assert ([one.search for one in parsed.intents or []], parsed.max_output_size_in_tokens) == (["a", "b"], 7)
    assert parsed.retrieval_reasoning_effort == effort.lower()
    back = sdk.KnowledgeBaseRetrievalRequest(parsed.to_dict())
    assert [type(one) for one in back.intents or []] == [sdk.KnowledgeRetrievalSemanticIntent] * 2
    assert type(back.retrieval_reasoning_effort) is type(theirs)


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


KINDS = ["ModelQueryPlanning", "SearchIndex", "Web", "AgenticReasoning", "ModelAnswerSynthesis"]
VALUES: list[dict[str, Any]] = [
    {"input_tokens": 50, "output_tokens": 7, "elapsed_ms": 322, "started_at": BEGAN, "model.model_name": "gpt"},
    {
        "count": 2,
        "query_time": BEGAN,
        "search_index_arguments.search": "first",
        "search_index_arguments.filter": FILTER,
    },
    {"web_arguments.search": "moon", "error.code": "late", "error.message": "m", "error.target": "n"},
    {"reasoning_tokens": 9, "retrieval_reasoning_effort.kind": "low", "logical_reasoning_effort.kind": "auto"},
    {"input_tokens": 500, "output_tokens": 20},
    {"id": "0", "activity_source": 1, "doc_key": "a11", "reranker_score": 2.5, "citation_url": "https://e.org#1"},
    {"id": "1", "url": "u", "title": "T", "source_data": None},
]


@pytest.mark.parametrize("written", [RESPONSE.to_dict(), json.loads(RESPONSE.to_json(indent=2))], ids=["data", "text"])
def test_our_response_loads_as_the_sdks(written: dict[str, Any]) -> None:
    """Every record and reference is of its typed class, with our values; and ours load it back."""
    theirs: Any = sdk.KnowledgeBaseRetrievalResponse(written)
    (message,) = theirs.response
    assert (message.role, message.content[0].text) == ("assistant", "Neil Armstrong [ref_id:0].")
    assert [type(one).__name__ for one in theirs.activity] == [f"KnowledgeBase{kind}ActivityRecord" for kind in KINDS]
    references = [type(one).__name__ for one in theirs.references]
    assert references == ["KnowledgeBaseSearchIndexReference", "KnowledgeBaseWebReference"]
    for one, values in zip([*theirs.activity, *theirs.references], VALUES, strict=True):
        assert {path: attrgetter(path)(one) for path in values} == values
    assert theirs.references[0].source_data["metadata"] == {"year": 1969}
    assert RetrievalResponse.parse(written) == RESPONSE
    assert sdk.KnowledgeBaseRetrievalResponse(RetrievalResponse().to_dict()).activity is None
