"""Azure's ``retrieve`` in each API version: what is read, what is refused, what is written."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from azure.search.documents.knowledgebases import models as sdk
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import (
    ActivityError,
    AgenticReasoningActivity,
    Condition,
    Message,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    ModelQueryPlanningActivity,
    Reference,
    RetrievalRequest,
    RetrievalResponse,
    SearchArguments,
    SourceActivity,
)
from llama_index_agentic_kb.wire.azure import VERSIONS, decode_retrieve, encode_response
from tests.wire.strategies import many

GOLDEN = Path(__file__).with_name("azure")
EXAMPLES = json.loads(GOLDEN.joinpath("requests.json").read_text())
INDEXES, CONFIGURED, PREVIEW, STABLE, NEWEST = VERSIONS
USER = {"messages": [{"role": "user", "content": "Why?"}]}
INTENT = {"intents": [{"search": "why"}]}


def params(of: dict[str, Any] = USER, **fields: Any) -> dict[str, Any]:
    return {**of, "knowledgeSourceParams": [{"knowledgeSourceName": "a", **fields}]}


def index(**fields: Any) -> dict[str, Any]:
    return {**USER, "targetIndexParams": [{"indexName": "a", **fields}]}


@pytest.mark.parametrize("example", EXAMPLES, ids=[one["about"] for one in EXAMPLES])
def test_examples_of_the_documents_are_read(example: dict[str, Any]) -> None:
    """In the version that they are written for, from JSON text, as what they mean in the newest names."""
    read = decode_retrieve(json.dumps(example["body"]), api_version=example["version"])
    assert read == RetrievalRequest.parse(example["means"])


@pytest.mark.parametrize(
    ("version", "body", "message"),
    [
        (INDEXES, INTENT, "intents: 2025-05-01-preview has no such field"),
        (INDEXES, {**USER, "knowledgeSourceParams": [{"filterAddOn": "a eq 1"}]}, "knowledgeSourceParams"),
        (INDEXES, {"messages": [{"content": "Why?"}]}, "messages.0.role: a role is required"),
        (INDEXES, index(failOnError=True), "targetIndexParams.0.failO"),
        (INDEXES, index(maxDocsForReranker=0), "0.maxDocsForReranker"),
        (INDEXES, index(rerankerThreshold=5), "targetIndexParams.0.rer"),
        (CONFIGURED, {**USER, "maxRuntimeInSeconds": 3}, "maxRuntimeInSeconds"),
        (CONFIGURED, {**USER, "requestLimits": {"maxOutputDocuments": 3}}, "requestLimits.maxOutputDocuments"),
        (PREVIEW, {**USER, "maxOutputDocuments": 5}, "maxOutputDocuments"),
        (PREVIEW, {**USER, "retrievalReasoningEffort": {"kind": "auto"}}, "it has minimal, low, medium"),
        (PREVIEW, params(neverQuerySource=True), "neverQ"),
        (PREVIEW, params(kind="file"), "no kind 'file'"),
        (PREVIEW, {**USER, "knowledgeSourceParams": {}}, "knowledgeSourceParams: a list is expected"),
        (PREVIEW, {**USER, "knowledgeSourceParams": [3]}, "knowledgeSourceParams.0: an object is expected"),
        (STABLE, USER, "messages: 2026-04-01 has no such field"),
        (STABLE, {**INTENT, "outputMode": "extractiveData"}, "outputMode"),
        (STABLE, {**INTENT, "retrievalReasoningEffort": {"kind": "low"}}, "it has minimal"),
        (STABLE, params(INTENT, alwaysQuerySource=True), "alw"),
        (NEWEST, {**USER, "answerInstructions": "Rhyme."}, "answerInstructions"),
        (NEWEST, "{", "body: it is no JSON"),
        (NEWEST, [], "body: an object is expected"),
        (CONFIGURED, {**USER, "outputConfiguration": {"attemptFastPath": "yes"}}, "attemptFastPath: true or false"),
        ("2026-10-01", USER, f"'2026-10-01' is not known; known are {', '.join(VERSIONS)}"),
    ],
)
def test_fields_of_other_versions_are_refused(version: str, body: Any, message: str) -> None:
    """By name, and never ignored; so is a version that is not known."""
    with pytest.raises(InvalidRequestError) as refused:
        decode_retrieve(body, api_version=version)
    assert message in str(refused.value)


@pytest.mark.parametrize(("sent", "ranked"), [(1, 50), (50, 50), (51, 100), (200, 200)])
def test_documents_for_the_ranker_are_rounded_up(sent: int, ranked: int) -> None:
    """To whole loads of the ranker, as the service's query plan does."""
    body = {**USER, "targetIndexParams": [{"indexName": "a", "maxDocsForReranker": sent}]}
    assert decode_retrieve(body, api_version=INDEXES).params_for("a").max_output_documents == ranked


NAMES = st.sampled_from(["a", "b c", "d'e"])
PARAMS = {
    "includeReferenceSourceData": st.booleans(),
    "rerankerThreshold": st.sampled_from([0, 1.5, 4]),
    "filterAddOn": st.sampled_from(["x eq 1", "y eq 'z'"]),
}
LIMITS = {"maxRuntimeInSeconds": st.integers(1, 600), "includeActivity": st.booleans()}


def some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields; those that are absent may be null."""
    return st.fixed_dictionaries({}, optional={name: st.none() | value for name, value in fields.items()})


@st.composite
def sent_requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], int]:
    """A question, parameters of sources, settings and a size, under the names that no version changed."""
    question = draw(st.sampled_from([USER, INTENT]))
    params = [{"knowledgeSourceName": name, **draw(some(PARAMS))} for name in draw(st.lists(NAMES, unique=True))]
    return question, params, draw(some(LIMITS)), draw(st.integers(1, 9000))


@many
@given(sent_requests(), st.sampled_from(["low", "medium"]))
def test_the_same_request_reads_the_same_in_every_version(
    sent: tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], int], effort: str
) -> None:
    """Under the names of each, and what is read is written in the newest form and read back."""
    question, params, limits, size = sent
    sources = {"knowledgeSourceParams": params}
    newest = {**question, **limits, **sources, "maxOutputSizeInTokens": size}
    extracts: dict[str, Any] = {"outputMode": "extractiveData"}
    planned = {"retrievalReasoningEffort": {"kind": effort}}
    written: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        PREVIEW: ({**question, **limits, **planned, **sources, "maxOutputSize": size}, {**newest, **planned})
    }
    if question is INTENT:
        minimal = {"retrievalReasoningEffort": {"kind": "minimal"}}
        written[STABLE] = ({**INTENT, **limits, **sources, "maxOutputSizeInTokens": size}, newest | extracts | minimal)
    else:
        old = [{"indexName" if name == "knowledgeSourceName" else name: one[name] for name in one} for one in params]
        written[INDEXES] = ({**USER, "targetIndexParams": old}, {**USER, **sources, **extracts})
        output = {"includeActivity": limits.get("includeActivity")}
        limited = {"maxRuntimeInSeconds": limits.get("maxRuntimeInSeconds"), "maxOutputSize": size}
        body = {**USER, **sources, "requestLimits": limited, "outputConfiguration": output}
        written[CONFIGURED] = (body, newest)
    for version, (body, means) in written.items():
        read = decode_retrieve(json.dumps(body), api_version=version)
        assert read == decode_retrieve(means), version
        assert decode_retrieve(read.to_json()) == read


AT = datetime(2025, 5, 30, 21, 23, 25, 944000, tzinfo=UTC)
LATER = datetime(2025, 5, 30, 21, 23, 26, 128000, tzinfo=UTC)
EXTRACT = '[{"ref_id":0,"title":"Streets","terms":"Phoenix, Grid","content":"The grid is bright."}]'
TIMES: dict[str, Any] = {"started_at": AT, "completed_at": LATER}
PHOENIX = SearchArguments(search="streets of Phoenix at night", filter=Condition(key="page", value=105))
INTERSTATE = SearchArguments(search="lights of the interstate")
NIGHT: dict[str, Any] = {"knowledge_source_name": "night", "activity_source": 1}
PAGES: dict[str, Any] = {"knowledge_source_name": "pages", "activity_source": 2}


def searched(number: int, name: str, arguments: SearchArguments, at: datetime, **fields: Any) -> SourceActivity:
    named = {"id": number, "knowledge_source_name": name, "sub_query_id": f"q{number}"}
    return SourceActivity(**named, query_time=at, arguments=arguments, **fields)


RECORDS: list[Any] = [
    ModelQueryPlanningActivity(
        id=0, input_tokens=1261, output_tokens=270, elapsed_ms=2396, model=ModelInfo(model_name="m"), **TIMES
    ),
    searched(1, "night", PHOENIX, AT, count=2, candidates=7, elapsed_ms=600, **TIMES),
    searched(2, "pages", INTERSTATE, LATER, type="web", count=0, elapsed_ms=161),
    AgenticReasoningActivity(id=3, reasoning_tokens=2622, retrieval_reasoning_effort="low", kept=2, **TIMES),
    ModelAnswerSynthesisActivity(id=4, input_tokens=5821, output_tokens=344, elapsed_ms=3837, calls=1),
]
URL = "https://x.example/104#1"
REFERENCES = [
    Reference(**NIGHT, id="0", doc_key="page_104", title="Streets", node_id="n", score=0.5, citation_url=URL),
    Reference(**PAGES, type="web", id="1", doc_key="page_105", title="Roads", url="https://x.example/105", node_id="o"),
]


def with_nothing_null(data: Any) -> Any:
    """Data without nulls, and without the service's settings of a search, which a source of ours doesn't have."""
    settings = {"sourceDataFields", "searchFields", "semanticConfigurationName"}
    if isinstance(data, dict):
        return {name: with_nothing_null(data[name]) for name in data if data[name] is not None and name not in settings}
    return [with_nothing_null(one) for one in data] if isinstance(data, list) else data


@pytest.mark.parametrize("version", [INDEXES, PREVIEW])
def test_a_response_is_written_as_in_the_documents(version: str) -> None:
    """With the names of the version, and the fields that this library adds to the response itself."""
    golden = json.loads(GOLDEN.joinpath("responses.json").read_text())[version]
    response = RetrievalResponse(
        status_code=206,
        response=[Message(role="assistant", content=EXTRACT)],
        activity=RECORDS[: len(golden["activity"])],
        references=REFERENCES,
    )
    written = encode_response(response, api_version=version)
    assert {name: written[name] for name in golden} == with_nothing_null(golden)
    assert (written["statusCode"], written["missing"]) == (206, [])


@many
@given(
    st.lists(st.sampled_from(RECORDS), max_size=5, unique_by=id),
    st.lists(st.sampled_from(REFERENCES), max_size=2, unique_by=id),
    st.sampled_from(VERSIONS),
    st.booleans(),
)
def test_no_version_loses_an_account(
    records: list[Any], references: list[Reference], version: str, shown: bool
) -> None:
    """Ids, tokens, counts and warnings are those of the response; the newest form is read back equal."""
    failure = ActivityError(code="late", message="m", target="n")
    activity = [one.model_copy(update={"warning": "w", "error": failure}) for one in records] if shown else None
    response = RetrievalResponse(activity=activity, references=references)
    written = json.loads(json.dumps(encode_response(response, api_version=version)))
    assert ("activity" in written) == shown
    recorded = written.get("activity", [])
    told = [(one["id"], one["warning"], one["error"]) for one in recorded]
    assert told == [(one.id, "w", failure.to_dict()) for one in activity or []]
    tokens = ("inputTokens", "outputTokens", "reasoningTokens")
    billed = [("input_tokens", "output_tokens", "reasoning_tokens"), activity or []]
    total = sum(getattr(one, name, 0) or 0 for name in billed[0] for one in billed[1])
    assert sum(one.get(name, 0) for name in tokens for one in recorded) == total
    assert [one.get("count") for one in recorded] == [getattr(one, "count", None) for one in activity or []]
    assert [(one["id"], one["activitySource"]) for one in written["references"]] == [
        (one.id, one.activity_source) for one in references
    ]
    theirs = sdk.KnowledgeBaseRetrievalResponse(written)
    if version != INDEXES:
        assert all(type(one) is not sdk.KnowledgeBaseActivityRecord for one in theirs.activity or [])
        assert all(type(one) is not sdk.KnowledgeBaseReference for one in theirs.references or [])
    if version == NEWEST:
        assert RetrievalResponse.parse(written) == response
