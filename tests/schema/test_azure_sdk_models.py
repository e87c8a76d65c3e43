"""Requests and responses as the real Azure SDK has them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.search.documents.knowledgebases import models as sdk

from llama_index_agentic_kb.schema import (
    ActivityError,
    AgenticReasoningActivity,
    Condition,
    FilterGroup,
    FilterLogic,
    Intent,
    Message,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    OutputMode,
    ReasoningEffort,
    Reference,
    ResultsProcessing,
    RetrievalRequest,
    RetrievalResponse,
    SearchArguments,
    SourceActivity,
    SourceData,
    SourceParams,
)

BEGAN = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
ENDED = datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
TIMES = {"started_at": BEGAN, "completed_at": ENDED, "elapsed_ms": 322, "outcome": Outcome.OK}
FILTER = FilterGroup(
    logic=FilterLogic.AND,
    filters=[Condition(key="tenant", value="o'hara"), Condition(key="year", operator="ge", value=1969)],
)
RESPONSE = RetrievalResponse(
    status_code=206,
    response=[Message(role="assistant", content="Neil Armstrong [ref_id:0].")],
    activity=[
        ModelQueryPlanningActivity(
            id=0, input_tokens=50, output_tokens=7, model=ModelInfo(model_name="gpt-4o-mini"), **TIMES
        ),
        SourceActivity(
            id=1,
            knowledge_source_name="missions",
            sub_query_id="q1",
            query_time=BEGAN,
            count=2,
            candidates=3,
            arguments=SearchArguments(search="first on the moon", filter=FILTER),
            warning="slow",
            **TIMES,
        ),
        SourceActivity(
            id=2,
            type="web",
            knowledge_source_name="news",
            sub_query_id="q1",
            arguments=SearchArguments(search="moon"),
            error=ActivityError(code="deadlineExceeded", message="late", target="news"),
        ),
        AgenticReasoningActivity(
            id=3, reasoning_tokens=9, retrieval_reasoning_effort="low", logical_reasoning_effort="auto", **TIMES
        ),
        ModelAnswerSynthesisActivity(id=4, input_tokens=500, output_tokens=20, **TIMES),
    ],
    references=[
        Reference(
            id="0",
            activity_source=1,
            knowledge_source_name="missions",
            doc_key="apollo-11",
            title="Apollo 11",
            url="https://example.org/a11",
            citation_url="https://example.org/a11#1",
            node_id="n1",
            score=0.5,
            reranker_score=2.5,
            source_data=SourceData(doc_key="apollo-11", title="Apollo 11", content="Text", metadata={"year": 1969}),
        ),
        Reference(
            type="web",
            id="1",
            activity_source=2,
            knowledge_source_name="news",
            doc_key="k",
            title="T",
            url="u",
            node_id="n2",
        ),
    ],
)


def request_of_the_sdk() -> sdk.KnowledgeBaseRetrievalRequest:
    return sdk.KnowledgeBaseRetrievalRequest(
        messages=[
            sdk.KnowledgeBaseMessage(
                role="assistant", content=[sdk.KnowledgeBaseMessageTextContent(text="How can I help?")]
            ),
            sdk.KnowledgeBaseMessage(
                role="user",
                content=[
                    sdk.KnowledgeBaseMessageTextContent(text="Who was first?"),
                    sdk.KnowledgeBaseMessageImageContent(image=sdk.KnowledgeBaseImageContent(url="http://img/1.png")),
                ],
            ),
        ],
        retrieval_reasoning_effort=sdk.KnowledgeRetrievalMediumReasoningEffort(),
        output_mode="answerSynthesis",
        include_activity=True,
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
                max_output_documents=50,
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
    assert ours.question == "Who was first?"
    assert [message.text for message in ours.history] == ["How can I help?"]
    assert ours.retrieval_reasoning_effort is ReasoningEffort.MEDIUM
    assert ours.output_mode is OutputMode.ANSWER_SYNTHESIS
    assert (ours.max_runtime_in_seconds, ours.max_output_size_in_tokens, ours.max_output_documents) == (30, 5000, 50)
    index, web = ours.knowledge_source_params
    assert (index.kind, index.filter_add_on, index.reranker_threshold) == ("searchIndex", "State eq 'WA'", 2.5)
    assert (index.always_query_source, index.fail_on_error, index.include_reference_source_data) == (True, True, True)
    assert index.results_processing is ResultsProcessing.RERANK
    assert index.ignored == ("enableImageServing",)
    assert (web.kind, web.never_query_source, web.ignored) == ("web", True, ("count", "market"))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (sdk.KnowledgeRetrievalMinimalReasoningEffort(), ReasoningEffort.MINIMAL),
        (sdk.KnowledgeRetrievalLowReasoningEffort(), ReasoningEffort.LOW),
        (sdk.KnowledgeRetrievalAutoReasoningEffort(), ReasoningEffort.AUTO),
    ],
)
def test_intents_and_efforts(theirs: Any, ours: ReasoningEffort) -> None:
    """Intents and each effort go both ways."""
    request = sdk.KnowledgeBaseRetrievalRequest(
        intents=[sdk.KnowledgeRetrievalSemanticIntent(search="a"), sdk.KnowledgeRetrievalSemanticIntent(search="b")],
        retrieval_reasoning_effort=theirs,
        max_output_size=7,
    )
    parsed = RetrievalRequest.parse(request.as_dict())
    assert (parsed.intents, parsed.max_output_size_in_tokens) == ([Intent(search="a"), Intent(search="b")], 7)
    assert parsed.retrieval_reasoning_effort is ours
    back = sdk.KnowledgeBaseRetrievalRequest(parsed.to_dict())
    assert back.intents is not None
    assert [type(intent) for intent in back.intents] == [sdk.KnowledgeRetrievalSemanticIntent] * 2
    assert type(back.retrieval_reasoning_effort) is type(theirs)


def test_a_request_of_ours_loads_as_the_sdks() -> None:
    """Our wire form has the SDK's names and typed classes."""
    ours = RetrievalRequest(
        messages=[Message(content="Who?")],
        retrieval_reasoning_effort="low",
        output_mode="extractiveData",
        max_runtime_in_seconds=30,
        max_output_size_in_tokens=10,
        knowledge_source_params=[
            SourceParams(knowledge_source_name="ks", kind="searchIndex", fail_on_error=True, include_references=True)
        ],
    )
    theirs = sdk.KnowledgeBaseRetrievalRequest(json.loads(ours.to_json()))
    assert theirs.messages is not None
    assert isinstance(theirs.messages[0].content[0], sdk.KnowledgeBaseMessageTextContent)
    assert isinstance(theirs.retrieval_reasoning_effort, sdk.KnowledgeRetrievalLowReasoningEffort)
    assert (theirs.output_mode, theirs.max_output_size_in_tokens) == ("extractiveData", 10)
    assert json.dumps(theirs.max_runtime_in_seconds) == "30"
    assert theirs.knowledge_source_params is not None
    (params,) = theirs.knowledge_source_params
    assert isinstance(params, sdk.SearchIndexKnowledgeSourceParams)
    assert (params.knowledge_source_name, params.fail_on_error, params.include_references) == ("ks", True, True)
    assert RetrievalRequest.parse(theirs) == ours


def check(theirs: sdk.KnowledgeBaseRetrievalResponse) -> None:
    """Every record and reference is of its typed class, with our values."""
    assert theirs.response is not None
    assert theirs.activity is not None
    assert theirs.references is not None
    content = theirs.response[0].content[0]
    assert isinstance(content, sdk.KnowledgeBaseMessageTextContent)
    assert (theirs.response[0].role, content.text) == ("assistant", "Neil Armstrong [ref_id:0].")
    planning, search, web, reasoning, synthesis = theirs.activity
    assert isinstance(planning, sdk.KnowledgeBaseModelQueryPlanningActivityRecord)
    assert (planning.input_tokens, planning.output_tokens, planning.elapsed_ms) == (50, 7, 322)
    assert (planning.started_at, planning.completed_at) == (BEGAN, ENDED)
    assert planning.model is not None
    assert planning.model.model_name == "gpt-4o-mini"
    assert isinstance(search, sdk.KnowledgeBaseSearchIndexActivityRecord)
    assert (search.id, search.knowledge_source_name, search.count, search.warning) == (1, "missions", 2, "slow")
    assert search.query_time == BEGAN
    assert search.search_index_arguments is not None
    assert search.search_index_arguments.search == "first on the moon"
    assert search.search_index_arguments.filter == "(tenant eq 'o''hara' and year ge 1969)"
    assert isinstance(web, sdk.KnowledgeBaseWebActivityRecord)
    assert web.error is not None
    assert (web.error.code, web.error.message, web.error.target) == ("deadlineExceeded", "late", "news")
    assert web.web_arguments is not None
    assert web.web_arguments.search == "moon"
    assert isinstance(reasoning, sdk.KnowledgeBaseAgenticReasoningActivityRecord)
    assert reasoning.reasoning_tokens == 9
    assert isinstance(reasoning.retrieval_reasoning_effort, sdk.KnowledgeRetrievalLowReasoningEffort)
    assert isinstance(reasoning.logical_reasoning_effort, sdk.KnowledgeRetrievalAutoReasoningEffort)
    assert isinstance(synthesis, sdk.KnowledgeBaseModelAnswerSynthesisActivityRecord)
    assert (synthesis.input_tokens, synthesis.output_tokens) == (500, 20)
    index, page = theirs.references
    assert isinstance(index, sdk.KnowledgeBaseSearchIndexReference)
    assert (index.id, index.activity_source, index.doc_key, index.reranker_score) == ("0", 1, "apollo-11", 2.5)
    assert index.citation_url == "https://example.org/a11#1"
    assert index.source_data is not None
    assert index.source_data["metadata"] == {"year": 1969}
    assert isinstance(page, sdk.KnowledgeBaseWebReference)
    assert (page.url, page.title, page.source_data) == ("u", "T", None)


def test_our_response_loads_as_the_sdks() -> None:
    """Dictionary and JSON text of a response load as the typed classes; and ours load them back."""
    check(sdk.KnowledgeBaseRetrievalResponse(RESPONSE.to_dict()))
    check(sdk.KnowledgeBaseRetrievalResponse(json.loads(RESPONSE.to_json(indent=2))))
    assert RetrievalResponse.parse(RESPONSE.to_dict()) == RetrievalResponse.parse(RESPONSE.to_json()) == RESPONSE
    assert sdk.KnowledgeBaseRetrievalResponse(RetrievalResponse().to_dict()).activity is None
