"""The real Azure SDK, sync and async, against a server on loopback with Chroma sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from azure.core import MatchConditions
from azure.core import exceptions as errors
from azure.core.credentials import AzureKeyCredential
from azure.search.documents.indexes import SearchIndexClient
from azure.search.documents.indexes import models as im
from azure.search.documents.knowledgebases import KnowledgeBaseRetrievalClient
from azure.search.documents.knowledgebases import models as m
from azure.search.documents.knowledgebases.aio import KnowledgeBaseRetrievalClient as AsyncClient
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import discoveryengine_v1 as g
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.server.serving import ADMIN, QUERY

QUESTION = [m.KnowledgeBaseMessage(role="user", content=[m.KnowledgeBaseMessageTextContent(text="How tall?")])]
INTENTS: list[Any] = [
    m.KnowledgeRetrievalSemanticIntent(search="Saturn V"),
    m.KnowledgeRetrievalSemanticIntent(search="Titan"),
]
ANSWER = "The Saturn V was 110.6 m tall [ref_id:0]."


def retrieval_client(url: str, name: str = "space", key: str = QUERY) -> Any:
    return KnowledgeBaseRetrievalClient(url, AzureKeyCredential(key), knowledge_base_name=name)


@pytest.fixture
def indexes(url: str) -> Iterator[Any]:
    with SearchIndexClient(url, AzureKeyCredential(ADMIN)) as client:
        yield client


@pytest.mark.parametrize(
    ("effort", "mode"),
    [
        ("Minimal", "extractiveData"),
        ("Low", "answerSynthesis"),
        ("Medium", "answerSynthesis"),
        ("Auto", "answerSynthesis"),
        ("Auto", "extractiveData"),
    ],
)
def test_every_effort_and_mode_answers(url: str, effort: str, mode: str) -> None:
    """Messages go with each effort and output mode; activity and references are the SDK's typed classes."""
    request = m.KnowledgeBaseRetrievalRequest(
        messages=QUESTION,
        retrieval_reasoning_effort=getattr(m, f"KnowledgeRetrieval{effort}ReasoningEffort")(),
        output_mode=mode,
        include_activity=True,
    )
    with retrieval_client(url) as client:
        result = client.retrieve(request)
    text = result.response[0].content[0].text
    assert (text == ANSWER) is (mode == "answerSynthesis")
    assert all(isinstance(one, m.KnowledgeBaseSearchIndexReference) for one in result.references)
    assert {type(one).__name__ for one in result.activity} >= {
        "KnowledgeBaseSearchIndexActivityRecord",
        "KnowledgeBaseAgenticReasoningActivityRecord",
    }
    ids = {one.id for one in result.activity}
    assert {one.activity_source for one in result.references} <= ids


async def test_the_async_client_asks_with_intents_and_source_parameters(url: str) -> None:
    """Intents, a filter, and a source that is left out, through the async client."""
    request = m.KnowledgeBaseRetrievalRequest(
        intents=INTENTS,
        output_mode="extractiveData",
        knowledge_source_params=[
            m.SearchIndexKnowledgeSourceParams(
                knowledge_source_name="rockets",
                filter_add_on="title eq 'Titan'",
                include_references=True,
                include_reference_source_data=True,
            ),
            m.SearchIndexKnowledgeSourceParams(knowledge_source_name="moons", never_query_source=True),
        ],
    )
    client: Any = AsyncClient(url, AzureKeyCredential(QUERY), knowledge_base_name="space")
    async with client:
        result = await client.retrieve(request)
        events = [event async for event in await client.retrieve_stream(request)]
    assert [one.source_data["title"] for one in result.references] == ["Titan"]
    assert events[-1].event_type == "response.completed"
    assert events[-1].data.response.references[0].source_data["title"] == "Titan"


def test_a_stream_has_typed_events(url: str) -> None:
    """In Azure's order; each but the additive token deltas is a typed class of the SDK."""
    with (
        retrieval_client(url) as client,
        client.retrieve_stream(m.KnowledgeBaseRetrievalRequest(messages=QUESTION)) as stream,
    ):
        events = list(stream)
    kinds = {event.event_type: type(event.data).__name__ for event in events}
    assert kinds.pop("activity.completed").endswith("ActivityRecord")
    assert list(kinds.items()) == [
        ("retrieval.started", "KnowledgeBaseRetrievalStartedEvent"),
        ("activity.started", "KnowledgeBaseActivityStartedEvent"),
        ("answer.delta", "dict"),
        ("answer.completed", "KnowledgeBaseAnswerCompletedEvent"),
        ("references.completed", "list"),
        ("response.completed", "KnowledgeBaseResponseCompletedEvent"),
    ]
    started = [event.data.id for event in events if event.event_type == "activity.started"]
    completed = [event.data for event in events if event.event_type == "activity.completed"]
    assert all(isinstance(one, m.KnowledgeBaseActivityRecord) for one in completed)
    assert sorted(one.id for one in completed) == sorted(started) == list(range(len(started)))
    assert "".join(event.data["delta"] for event in events if event.event_type == "answer.delta") == ANSWER
    assert events[-1].data.response.response[0].content[0].text == ANSWER


@pytest.mark.parametrize(
    ("name", "key", "request_", "error", "status"),
    [
        ("space", "wrong-key", {"messages": QUESTION}, errors.ClientAuthenticationError, 401),
        ("absent", QUERY, {"messages": QUESTION}, errors.ResourceNotFoundError, 404),
        ("space", QUERY, {}, errors.HttpResponseError, 400),
        ("private", QUERY, {"intents": INTENTS}, errors.HttpResponseError, 403),
    ],
)
def test_errors_are_the_sdks(
    url: str, name: str, key: str, request_: dict[str, Any], error: type[errors.HttpResponseError], status: int
) -> None:
    """Each status becomes the SDK's own exception, with our code and message, and prints what to do."""
    with retrieval_client(url, name, key) as client, pytest.raises(error) as raised:
        client.retrieve(m.KnowledgeBaseRetrievalRequest(**request_))
    assert raised.value.status_code == status
    assert raised.value.error is not None
    assert raised.value.error.code
    assert raised.value.error.message
    assert raised.value.error.innererror["docs"].endswith(f"#{raised.value.error.code.lower()}")
    assert raised.value.error.innererror["remedy"] in str(raised.value)


def test_definitions_are_made_changed_listed_and_deleted(indexes: Any) -> None:
    """SearchIndexClient's methods, with ETags, on a knowledge base and a source of its own."""
    parameters = im.SearchIndexKnowledgeSourceParameters(search_index_name="moons", base_filter="title eq 'Moon'")
    source = im.SearchIndexKnowledgeSource(name="one-moon", description="Titan", search_index_parameters=parameters)
    made = indexes.create_knowledge_source(source)
    assert (made.name, made.search_index_parameters.base_filter) == ("one-moon", "title eq 'Moon'")
    with pytest.raises(errors.ResourceExistsError):
        indexes.create_knowledge_source(source)
    base = im.KnowledgeBase(name="lunar", knowledge_sources=[im.KnowledgeSourceReference(name="one-moon")])
    first = indexes.create_or_update_knowledge_base(base)
    base.description, base.e_tag = "about one moon", first.e_tag
    second = indexes.create_or_update_knowledge_base(base, match_condition=MatchConditions.IfNotModified)
    assert second.e_tag != first.e_tag
    with pytest.raises(errors.ResourceModifiedError):
        indexes.create_or_update_knowledge_base(base, match_condition=MatchConditions.IfNotModified)
    assert indexes.get_knowledge_base("lunar").description == "about one moon"
    assert {"lunar", "space"} <= {one.name for one in indexes.list_knowledge_bases()}
    assert [one.name for one in indexes.list_knowledge_bases(search="lun", page_size=1)] == ["lunar"]
    assert len(list(indexes.list_knowledge_sources(page_size=1))) == len(list(indexes.list_knowledge_sources())) >= 4
    assert {"one-moon", "rockets"} <= {one.name for one in indexes.list_knowledge_sources()}
    assert indexes.get_knowledge_source_status("one-moon").synchronization_status == "active"
    assert indexes.get_service_statistics()["counters"]["knowledgeBasesCount"]["usage"] >= 3
    with pytest.raises(errors.ResourceExistsError, match="lunar"):
        indexes.delete_knowledge_source("one-moon")
    indexes.delete_knowledge_base(second, match_condition=MatchConditions.IfNotModified)
    indexes.delete_knowledge_source("one-moon")
    with pytest.raises(errors.ResourceNotFoundError):
        indexes.get_knowledge_base("lunar")


def test_a_container_is_searched_where_it_was_ingested(url: str, indexes: Any) -> None:
    """A source of an indexed kind answers in the kind's typed classes; what would be searched elsewhere is refused."""
    parameters = im.AzureBlobKnowledgeSourceParameters(connection_string="", container_name="moons")
    indexes.create_knowledge_source(im.AzureBlobKnowledgeSource(name="blobs", azure_blob_parameters=parameters))
    used = [im.KnowledgeSourceReference(name="blobs")]
    indexes.create_knowledge_base(im.KnowledgeBase(name="contained", knowledge_sources=used))
    asked = m.AzureBlobKnowledgeSourceParams(knowledge_source_name="blobs", include_references=True)
    request = m.KnowledgeBaseRetrievalRequest(intents=INTENTS, include_activity=True, knowledge_source_params=[asked])
    with retrieval_client(url, "contained") as client:
        result = client.retrieve(request)
    assert {type(one) for one in result.references} == {m.KnowledgeBaseAzureBlobReference}
    assert m.KnowledgeBaseAzureBlobActivityRecord in {type(one) for one in result.activity}
    indexes.delete_knowledge_base("contained")
    indexes.delete_knowledge_source("blobs")
    elsewhere = im.WebKnowledgeSource(name="web", web_parameters=im.WebKnowledgeSourceParameters())
    parts = im.AzureBlobKnowledgeSourceParameters(connection_string="", container_name="moons", folder_path="a")
    for refused in (elsewhere, im.AzureBlobKnowledgeSource(name="part", azure_blob_parameters=parts)):
        with pytest.raises(errors.HttpResponseError, match=r"LlamaIndex retriever|ingest that part"):
            indexes.create_knowledge_source(refused)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "a b"}, "name"),
        ({"knowledgeSources": []}, "knowledgeSources"),
        ({"knowledgeSources": [{"name": "mars"}]}, "mars"),
        (
            {"models": [{"kind": "azureOpenAI", "azureOpenAIParameters": {"deploymentId": "x", "apiKey": "sk"}}]},
            "apiKey",
        ),
        ({"models": ["unknown"]}, "unknown"),
        ({"outputMode": "answerSynthesis"}, "needs a model"),
        ({"encryptionKey": {"keyVaultKeyName": "k"}}, "encryptionKey"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_definitions_that_could_not_work_are_refused(indexes: Any, change: dict[str, Any], words: str) -> None:
    """A definition that names what the server lacks, or that holds a secret, gets 400 with the field."""
    with pytest.raises(errors.HttpResponseError, match=words) as raised:
        indexes.create_knowledge_base({"name": "bad", "knowledgeSources": [{"name": "moons"}], **change})
    assert raised.value.status_code == 400


ENGINE = "projects/p/locations/global/collections/c/engines/space"
CONFIG = f"{ENGINE}/servingConfigs/default"
METADATA = [("x-goog-api-key", QUERY)]


def made(kind: str, url: str) -> Any:
    return getattr(g, kind)(
        transport="rest",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]  # google-auth is half typed
        client_options=ClientOptions(api_endpoint=url),
    )


@pytest.fixture
def answers(url: str) -> Iterator[Any]:
    with made("ConversationalSearchServiceClient", url) as client:
        yield client


def request(**fields: Any) -> Any:
    spec = g.AnswerQueryRequest.AnswerGenerationSpec(include_citations=True)
    query = g.Query(text="How tall was the Saturn V?")
    return g.AnswerQueryRequest(serving_config=CONFIG, query=query, answer_generation_spec=spec, **fields)


def test_an_answer_belongs_to_a_session(answers: Any, url: str) -> None:
    """Answered in a new session, found by its name, listed, renamed, deleted."""
    reply = answers.answer_query(request(session=f"{ENGINE}/sessions/-"), metadata=METADATA)
    assert reply.answer.answer_text == "The Saturn V was 110.6 m tall."
    assert reply.answer.citations[0].sources[0].reference_id == "0"
    name = reply.session.name
    assert answers.get_answer(name=reply.answer.name, metadata=METADATA).answer_text == reply.answer.answer_text
    found = answers.get_session(g.GetSessionRequest(name=name, include_answer_details=True), metadata=METADATA)
    assert found.turns[0].detailed_answer.answer_text == reply.answer.answer_text
    own = g.Session(display_name="Wer?", labels=["hidden"], is_pinned=True)
    other = answers.create_session(parent=ENGINE, session=own, metadata=METADATA)
    assert (other.display_name, [*other.labels], other.is_pinned) == ("Wer?", ["hidden"], True)
    asked = g.ListSessionsRequest(parent=ENGINE, page_size=1, order_by="is_pinned desc,update_time desc")
    listed = [one.name for one in answers.list_sessions(asked, metadata=METADATA)]
    assert (listed[0], name in listed) == (other.name, True)
    asked.filter = "is_pinned=false AND (NOT labels:hidden)"
    assert other.name not in {one.name for one in answers.list_sessions(asked, metadata=METADATA)}
    session = g.Session(name=name, display_name="Rockets")
    mask = {"paths": ["display_name"]}
    changed = answers.update_session(session=session, update_mask=mask, metadata=METADATA)
    assert changed.display_name == "Rockets"
    answers.delete_session(name=name, metadata=METADATA)
    with pytest.raises(exceptions.NotFound):
        answers.get_session(name=name, metadata=METADATA)
    assert other.name.startswith(ENGINE)


def test_a_stream_is_an_array(answers: Any) -> None:
    """Deltas make the text of the last piece."""
    pieces = list(answers.stream_answer_query(request(), metadata=METADATA))
    *parts, last = [piece.answer for piece in pieces]
    assert "".join(part.answer_text for part in parts) == last.answer_text == "The Saturn V was 110.6 m tall."
    assert (last.state, bool(last.references)) == (g.Answer.State.SUCCEEDED, True)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"serving_config": CONFIG.replace("space", "absent")}, exceptions.NotFound),
        ({"query": g.Query(text="")}, exceptions.BadRequest),
        ({"session": f"{ENGINE}/sessions/absent"}, exceptions.NotFound),
        ({"query": g.Query(text="x" * 5_000_000)}, exceptions.BadRequest),
    ],
)
def test_errors_are_googles(answers: Any, change: dict[str, Any], error: type[Exception]) -> None:
    """Each error reaches the client as its own exception, streamed or not, with what to do."""
    asked = request()
    for name, value in change.items():
        setattr(asked, name, value)
    for method in (answers.answer_query, answers.stream_answer_query):
        with pytest.raises(error) as raised:
            list(method(asked, metadata=METADATA))
    assert raised.value.metadata["remedy"]  # type: ignore[attr-defined]


def test_answers_are_checked_and_records_ranked(url: str) -> None:
    """CheckGrounding and Rank answer on the same server."""
    location = "projects/p/locations/global"
    fact = g.GroundingFact(fact_text="The Saturn V was 110.6 m tall.")
    with made("GroundedGenerationServiceClient", url) as client:
        checked = client.check_grounding(
            g.CheckGroundingRequest(
                grounding_config=f"{location}/groundingConfigs/default_grounding_config",
                answer_candidate="The Saturn V was 110.6 m tall.",
                facts=[fact],
            ),
            metadata=METADATA,
        )
    assert checked.support_score > 0.6
    records = [g.RankingRecord(id="1", content="A cat."), g.RankingRecord(id="2", content="A tall rocket.")]
    with made("RankServiceClient", url) as client:
        config = f"{location}/rankingConfigs/default_ranking_config"
        ranked = client.rank(g.RankRequest(ranking_config=config, query="rocket", records=records), metadata=METADATA)
    assert ranked.records[0].id == "2"


TOOL = "knowledge_base_retrieve"


@pytest.mark.parametrize("path", ["knowledgebases/space/mcp", "knowledgebases('space')/mcp"])
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_asks_over_http(url: str, path: str, mode: str) -> None:
    """The tool is listed with the base's name, answers with references, and reports errors as results."""
    async with (
        httpx2.AsyncClient(headers={"api-key": QUERY}, timeout=60) as http,
        Client(streamable_http_client(f"{url}/{path}", http_client=http), mode=mode) as client,
    ):
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, "space" in (tool.description or "")) == (TOOL, True)
        answered = await client.call_tool(TOOL, {"query": "How tall was the Saturn V?"})
        assert "110.6 m tall [ref_id:0]" in answered.content[0].text  # type: ignore[union-attr]
        assert answered.structured_content["references"][0]["title"] == "Saturn"
        refused = await client.call_tool(TOOL, {"query": "x", "surprise": 1})
        assert (refused.is_error, "surprise" in refused.content[0].text) == (True, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(("method", "key", "status"), [("GET", QUERY, 405), ("DELETE", QUERY, 405), ("POST", "", 401)])
async def test_no_stream_is_held_open_and_nobody_asks_without_a_key(
    url: str, method: str, key: str, status: int
) -> None:
    """An open stream would take a place among running requests; a message needs the credentials of every route."""
    async with httpx2.AsyncClient(headers={"last-event-id": "1", **({"api-key": key} if key else {})}) as http:
        response = await http.request(
            method, f"{url}/knowledgebases/space/mcp", json={"jsonrpc": "2.0", "method": "ping"}
        )
    assert response.status_code == status
