"""Google's own client asks a knowledge base: from its request to the answer that it reads, nothing made up between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import discoveryengine_v1 as g
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Principal, session_owner
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from llama_index_agentic_kb.wire.google_answer import (
    AnswerStream,
    decode_answer_query,
    encode_answer,
    encode_answer_response,
    encode_error,
)
from llama_index_agentic_kb.wire.google_names import parse_answer_name, parse_serving_config, parse_session_name
from llama_index_agentic_kb.wire.google_sessions import encode_session, wants_answer_details
from tests.wire.google_requests import CONFIGS
from tests.wire.loopback import LoopbackGoogle, Recorded

R = g.AnswerQueryRequest
OWNER = Principal(tenant="acme", user="alice")
KEY = session_owner(OWNER)
APOLLO = "Apollo 11 was launched by a Saturn V rocket."
SATURN = "Der Saturn V war 110,6 m groß: the Saturn V rocket was 110.6 m tall."
ANSWERS = {
    "Which rocket launched Apollo 11?": "Größe folgt. Apollo 11 was launched by a Saturn V rocket [ref_id:0].",
    "How tall was it?": "The Saturn V rocket was 110.6 m tall. [ref_id:0]",
    "Who sits where?": "You sit in seat 7A.",
}


class Service:
    """What answers Google's client: a knowledge base, a session store, and a model that answers from a script."""

    def __init__(self, path: Path) -> None:
        nodes = [
            TextNode(
                id_=f"chunk-{number}",
                text=text,
                metadata={"title": f"Manual {number}", "url": f"https://x.example/{number}", "page_label": str(number)},
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"manual-{number}")},
            )
            for number, text in enumerate([APOLLO, SATURN])
        ]
        self.prompts: list[str] = []
        self.is_down = False
        self.store = SessionStore(path / "sessions.db")
        self.searched = MemoryRetriever(['{"rocket": "Saturn V", "stages": 3}'])
        index = VectorStoreIndex(nodes, embed_model=HashEmbedding())
        self.kb = KnowledgeBase(
            [
                KnowledgeSource("manuals", index=index, similarity_top_k=2),
                KnowledgeSource("records", retriever=self.searched),
            ],
            llm=ScriptedLLM(self._reply),
            sessions=self.store,
        )

    def _reply(self, messages: list[ChatMessage]) -> str:
        prompt = "\n".join(str(message.content) for message in messages)
        self.prompts.append(prompt)
        if "You plan searches" in prompt:
            later = {"id": "q2", "query": "height of #q1", "depends_on": ["q1"]}
            plan = {"id": "q1", "query": "Saturn V rocket", "finds": "the rocket"}
            return json.dumps({"sub_queries": [plan, later] if "#q1" in prompt else [plan]})
        if "You read what the steps" in prompt:
            return json.dumps({"id": "q1", "answers": [{"value": "Saturn V", "ref_id": 0, "confidence": "stated"}]})
        if self.is_down:
            raise ConnectionError("the model is away")
        return next((answer for question, answer in ANSWERS.items() if f"Question: {question}" in prompt), "Nothing.")

    def __call__(self, sent: Recorded) -> bytes | list[bytes]:
        """Serve one request."""
        as_int = sent.query.get("$alt", "").endswith("enum-encoding=int")
        if sent.path.endswith(":answer"):
            return json.dumps(self._asked(sent, enum_as_int=as_int), ensure_ascii=False).encode()
        if sent.path.endswith(":streamAnswer"):
            query = decode_answer_query(sent.body, serving_config=sent.resource)
            stream = AnswerStream(token=query.query_id, enum_as_int=as_int)
            return [stream.piece(piece) for piece in self.kb.stream_answer(query, principal=OWNER)]
        return json.dumps(self._kept(sent, enum_as_int=as_int), ensure_ascii=False).encode()

    def _asked(self, sent: Recorded, *, enum_as_int: bool) -> dict[str, Any]:
        query = decode_answer_query(sent.body, serving_config=sent.resource)
        assert query.serving_config is not None
        response = self.kb.answer(query, principal=OWNER)
        parent = parse_serving_config(query.serving_config)
        return encode_answer_response(response.answer, parent=parent, session=response.session, enum_as_int=enum_as_int)

    def _kept(self, sent: Recorded, *, enum_as_int: bool) -> dict[str, Any]:
        if "/answers/" in sent.resource:
            within, answer_id = parse_answer_name(sent.resource)
            answer = self.store.get_answer(KEY, within.id, answer_id)
            return encode_answer(answer, name=within.answer(answer_id), enum_as_int=enum_as_int)
        name = parse_session_name(sent.resource)
        session = self.store.get(KEY, name.id, include_answers=wants_answer_details(sent.query))
        return encode_session(session, name.parent, enum_as_int=enum_as_int)


@pytest.fixture
def service(google: LoopbackGoogle, tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    google.service = made
    with made.store:
        yield made


def asking(question: str, **fields: Any) -> Any:
    return R(
        serving_config=CONFIGS[2],
        query={"text": question},
        answer_generation_spec={"include_citations": True},
        grounding_spec={"include_grounding_supports": True},
        **fields,
    )


def cited(answer: Any) -> list[tuple[str, list[int]]]:
    """Each citation's words and its references, by the bytes that the client was given."""
    data = answer.answer_text.encode()
    return [
        (data[one.start_index : one.end_index].decode(), [int(source.reference_id) for source in one.sources])
        for one in answer.citations
    ]


def test_an_answer_of_a_real_search_is_read(answers: Any, service: Service) -> None:
    """Text, citations in bytes, scores, references of two kinds and steps are those of the real retrieval."""
    question = "Which rocket launched Apollo 11?"
    got = answers.answer_query(asking(question)).answer
    assert (got.state, got.answer_text, got.name) == (
        g.Answer.State.SUCCEEDED,
        ANSWERS[question].replace(" [ref_id:0]", ""),
        "",
    )
    by_text = {
        one.chunk_info.content: (number, one) for number, one in enumerate(got.references) if "chunk_info" in one
    }
    number, apollo = by_text[APOLLO]
    assert cited(got) == [("Apollo 11 was launched by a Saturn V rocket.", [number])]
    chunk = apollo.chunk_info
    assert (chunk.chunk, chunk.document_metadata.document) == ("chunk-0", "manual-0")
    assert (chunk.document_metadata.title, chunk.document_metadata.uri) == ("Manual 0", "https://x.example/0")
    assert chunk.document_metadata.page_identifier == "0"
    assert chunk.document_metadata.struct_data["page_label"] == "0"
    assert "relevance_score" not in chunk
    (record,) = [one.structured_document_info for one in got.references if "structured_document_info" in one]
    assert dict(record.struct_data) == {"rocket": "Saturn V", "stages": 3.0}
    assert got.grounding_score > 0.5
    assert len(got.grounding_supports) == 2
    assert got.create_time <= got.complete_time
    (step,) = got.steps
    assert step.description == "Rephrase the query and search."
    assert [action.search_action.query for action in step.actions] == [question, "Saturn V rocket"]
    titles = [one.title for one in step.actions[0].observation.search_results]
    assert "Manual 0" in titles
    assert dict(step.actions[0].observation.search_results[titles.index("Manual 0")].struct_data)["page_label"] == "0"
    assert step.actions[0].observation.search_results[0].snippet_info[0].snippet_status == "SUCCESS"
    assert len(service.prompts) == 2


def test_a_failed_answer_and_thoughts_arrive(answers: Any, service: Service) -> None:
    """A model that is away ends in FAILED, with references and steps; a step's thought is what an earlier one found."""
    service.is_down = True
    planned = {"query_rephraser_spec": {"max_rephrase_steps": 3}}
    got = answers.answer_query(asking("How tall was it?", query_understanding_spec=planned)).answer
    assert got.state is g.Answer.State.FAILED
    assert got.references
    assert [one.state for one in got.steps] == [g.Answer.Step.State.SUCCEEDED] * 2
    assert "the rocket: Saturn V" in got.steps[1].thought
    assert [action.search_action.query for action in got.steps[1].actions] == ["height of Saturn V"]


def test_the_same_is_streamed(answers: Any, service: Service) -> None:
    """The stream's pieces come in Google's order, and its end is the whole answer."""
    pieces = [one.answer for one in answers.stream_answer_query(asking("Which rocket launched Apollo 11?"))]
    *before, last = pieces
    assert [bool(one.steps) for one in before][:1] == [True]
    assert [bool(one.references) for one in before][1:2] == [True]
    assert "".join(one.answer_text for one in before) == last.answer_text
    assert {one.state for one in before} == {g.Answer.State.STREAMING}
    assert [span for one in before for span in one.citations] == list(last.citations) != []
    assert service.prompts


def test_brought_results_are_the_only_evidence(answers: Any, service: Service) -> None:
    """With ``searchResultList`` the references are what was sent, in its order, and no source is searched."""
    result = R.SearchSpec.SearchResultList.SearchResult
    document = result.UnstructuredDocumentInfo(
        document="d", uri="u", title="Own", extractive_segments=[{"content": SATURN, "page_identifier": "9"}]
    )
    chunk = result.ChunkInfo(chunk="c", content="Cheese.", document_metadata={"title": "Dairy", "uri": "v"})
    results = [result(chunk_info=chunk), result(unstructured_document_info=document)]
    sent = asking("How tall was it?", search_spec={"search_result_list": {"search_results": results}})
    got = answers.answer_query(sent).answer
    first, second = got.references
    assert (first.chunk_info.chunk, first.chunk_info.content) == ("c", "Cheese.")
    info = second.unstructured_document_info
    assert (info.document, info.uri, info.title) == ("d", "u", "Own")
    assert [(one.content, one.page_identifier) for one in info.chunk_contents] == [(SATURN, "9")]
    assert cited(got) == [("The Saturn V rocket was 110.6 m tall.", [0, 1])]  # its own marker, and the support
    assert [step.description for step in got.steps] == ["Read the results that were given."]
    assert service.searched.queries == []
    assert len(service.prompts) == 1


def test_what_the_end_user_gives_is_read_and_never_cited(answers: Any, service: Service) -> None:
    """An end-user chunk is in the prompt, outside of the evidence, and is no reference of the answer."""
    chunk = {"chunk_info": {"content": "My seat is 7A. [ref_id:0]", "document_metadata": {"title": "Ticket"}}}
    got = answers.answer_query(asking("Who sits where?", end_user_spec={"end_user_metadata": [chunk]})).answer
    prompt = service.prompts[-1]
    assert '<end_user title="Ticket">\nMy seat is 7A. (ref_id:0]\n</end_user>' in prompt
    assert prompt.index("</evidence>") < prompt.index("<end_user")
    assert got.answer_text == "You sit in seat 7A."
    assert "7A" not in str(got.references)
    assert cited(got) == []


def test_a_session_is_made_continued_and_read(answers: Any, service: Service) -> None:
    """``sessions/-`` makes a session that later turns go on in; answers and session are read back as they were."""
    parent = CONFIGS[2].rsplit("/servingConfigs/", 1)[0]
    sent = asking("Which rocket launched Apollo 11?", session=f"{parent}/sessions/-", user_pseudo_id="u")
    first = answers.answer_query(sent)
    assert first.session.name.startswith(f"{parent}/sessions/")
    assert first.session.display_name == "Which rocket launched Apollo 11?"
    second = answers.answer_query(asking("How tall was it?", session=first.session.name))
    assert second.session.name == first.session.name
    plan = [prompt for prompt in service.prompts if "You plan searches" in prompt][-1]
    assert "Apollo 11 was launched by a Saturn V rocket" in plan
    assert answers.get_answer(name=first.answer.name) == first.answer
    request = g.GetSessionRequest(name=first.session.name, include_answer_details=True)
    session = answers.get_session(request)
    assert [turn.query.text for turn in session.turns] == ["Which rocket launched Apollo 11?", "How tall was it?"]
    assert [turn.detailed_answer for turn in session.turns] == [first.answer, second.answer]
    assert session.user_pseudo_id == "u"


def test_errors_of_the_way_reach_the_client(google: LoopbackGoogle, answers: Any, service: Service) -> None:
    """A session of another's, or of nobody, is not found; a request that can't be read is a bad one."""

    def answered(sent: Recorded) -> bytes | list[bytes]:
        try:
            return service(sent)
        except AgenticKBError as error:
            google.status, body = encode_error(error)
            return json.dumps(body).encode()

    google.service = answered
    parent = CONFIGS[2].rsplit("/servingConfigs/", 1)[0]
    theirs = service.store.add_turn("bob", "-", "Q?", Answer(text="a"))
    with pytest.raises(exceptions.NotFound):
        answers.answer_query(asking("How tall?", session=f"{parent}/sessions/{theirs.session_id}"))
    google.status = 200
    with pytest.raises(exceptions.BadRequest, match=r"query\.text"):
        answers.answer_query(asking(" "))
