"""Google's own client over REST: what it sends is read, and what is written it reads."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import discoveryengine_v1 as g
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from google.protobuf.field_mask_pb2 import FieldMask  # type: ignore[import-untyped]  # same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    RetrievalError,
)
from llama_index_agentic_kb.schema import Message, RetrievalRequest
from llama_index_agentic_kb.schema import answer as a
from llama_index_agentic_kb.schema.answer import Session, SessionPage, Turn
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.grounding import (
    Fact,
    GroundedClaim,
    GroundingLedger,
    GroundingQuery,
    RankQuery,
    RankRecord,
    Span,
    Support,
    Verdict,
)
from llama_index_agentic_kb.wire.google_answer import (
    decode_answer_query,
    encode_answer_response,
    encode_error,
)
from llama_index_agentic_kb.wire.google_checks import (
    decode_check_grounding,
    decode_rank,
    encode_check_grounding,
    encode_rank,
)
from llama_index_agentic_kb.wire.google_names import parse_answer_name, parse_parent, parse_session_name
from llama_index_agentic_kb.wire.google_sessions import (
    decode_create_session,
    decode_list_sessions,
    decode_update_session,
    encode_session,
    encode_session_page,
    wants_answer_details,
)
from tests.wire.google_requests import CONFIGS, FULL, READ, REQUESTS, STORE
from tests.wire.loopback import LoopbackGoogle, chunked
from tests.wire.strategies import EXAMPLES, answers
from tests.wire.streams import stream_answer

NOW = datetime(2026, 1, 2, tzinfo=UTC)
PARENT = parse_parent(STORE)
over_http = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


@over_http
@given(sent=REQUESTS)
def test_what_the_client_sends_is_read(google: LoopbackGoogle, answers: Any, sent: Any) -> None:
    """Any combination of fields is read, and alike in each form: enums by name or number, camelCase or snake_case."""
    answers.answer_query(sent)
    assert google.last.path.endswith(":answer")
    assert google.last.query["$alt"] == "json;enum-encoding=int"
    query = decode_answer_query(google.last.body, serving_config=google.last.resource)
    for as_int in (False, True):
        for snake in (False, True):
            message = type(sent).pb(sent)
            form = {"use_integers_for_enums": as_int, "preserving_proto_field_name": snake}
            assert decode_answer_query(json_format.MessageToJson(message, **form)) == query


def test_every_field_means_what_it_says() -> None:
    """A request with every field set, field by field; and one with none."""
    body = json_format.MessageToDict(g.AnswerQueryRequest.pb(g.AnswerQueryRequest(FULL)))
    assert decode_answer_query(body).to_dict() == READ
    least = decode_answer_query({"query": {"text": "Who?"}})
    assert least == AnswerQuery(
        request=RetrievalRequest(messages=[Message(role="user", content="Who?")], max_output_documents=10)
    )


@settings(over_http, max_examples=EXAMPLES // 2)
@given(answer=answers(done=True), as_int=st.booleans(), size=st.integers(1, 200))
def test_the_client_reads_equal_objects(
    google: LoopbackGoogle, answers: Any, answer: a.Answer, as_int: bool, size: int
) -> None:
    """A reply, and a streamed one however it is cut, is to the client the object that was written."""
    session = Session(id="s", started_at=NOW, updated_at=NOW)
    whole = encode_answer_response(answer, parent=PARENT, session=session, enum_as_int=as_int)
    google.body = json.dumps(whole, ensure_ascii=False).encode()
    got = answers.answer_query(g.AnswerQueryRequest(serving_config=CONFIGS[2], query={"text": "?"}))
    assert json_format.MessageToDict(type(got).pb(got), use_integers_for_enums=as_int) == whole
    pieces = list(stream_answer(answer, parent=PARENT, session=session, enum_as_int=as_int))
    google.body = chunked(pieces, size)
    request = g.AnswerQueryRequest(serving_config=CONFIGS[2], query={"text": "?"})
    streamed = list(answers.stream_answer_query(request))
    assert google.last.path.endswith(":streamAnswer")
    read = [json_format.MessageToDict(type(one).pb(one), use_integers_for_enums=as_int) for one in streamed]
    assert read == json.loads(b"".join(pieces))
    assert read[-1] == whole


def test_a_session_is_made_changed_read_listed_and_deleted(google: LoopbackGoogle, answers: Any) -> None:
    """Each session method's request is read, and its reply is what the client gives back."""
    session = Session(
        id="s1",
        display_name="Wer?",
        labels=["x"],
        is_pinned=True,
        started_at=NOW,
        updated_at=NOW,
        turns=[Turn(session_id="s1", number=1, query="Wer?", answer_id="a", created_at=NOW, completed_at=NOW)],
    )
    google.body = json.dumps(encode_session(session, PARENT)).encode()
    mine = g.Session(display_name="Wer?", labels=["x"], is_pinned=True, user_pseudo_id="u")
    made = answers.create_session(parent=str(PARENT), session=mine)
    assert (made.display_name, made.turns[0].answer) == ("Wer?", f"{STORE}/sessions/s1/answers/a")
    changes = decode_create_session(google.last.body)
    assert changes.to_dict() == {"displayName": "Wer?", "labels": ["x"], "isPinned": True, "userPseudoId": "u"}
    mask = FieldMask(paths=["is_pinned", "labels"])
    answers.update_session(session=g.Session(name=made.name, is_pinned=False), update_mask=mask)
    changes = decode_update_session(google.last.body, google.last.query["updateMask"])
    assert changes.to_dict() == {"labels": [], "isPinned": False}
    answers.get_session(request=g.GetSessionRequest(name=made.name, include_answer_details=True))
    assert parse_session_name(google.last.resource).id == "s1"
    assert wants_answer_details(google.last.query)
    assert not wants_answer_details({})
    google.body = b"{}"
    answers.delete_session(name=made.name)
    assert google.last.method == "DELETE"
    answers.get_answer(name=f"{made.name}/answers/a")
    assert parse_answer_name(google.last.resource)[1] == "a"
    google.body = json.dumps(encode_session_page(SessionPage(sessions=[session]), PARENT)).encode()
    request = g.ListSessionsRequest(
        parent=str(PARENT),
        page_size=7,
        filter="is_pinned=true AND (NOT labels:hidden)",
        order_by="is_pinned desc,update_time",
    )
    assert [one.name for one in answers.list_sessions(request)] == [made.name]
    query = decode_list_sessions({key: value for key, value in google.last.query.items() if not key.startswith("$")})
    assert (query.page_size, query.page_token) == (7, None)
    assert [(one.key, one.descending) for one in query.order_by] == [("is_pinned", True), ("updated_at", False)]


def test_a_check_of_grounding_goes_both_ways(google: LoopbackGoogle) -> None:
    """The client's check is read, and the ledger's claims come back with bytes, indices and scores."""
    text = "Käse ist gelb. Here is what I found. Er fliegt."
    claims = [
        GroundedClaim(
            text="Käse ist gelb.",
            span=Span(start=0, end=14),
            verdict=Verdict.SUPPORTED,
            score=0.9,
            supports=[support("1", 0.9), support("0", 0.7), support("0", 0.1)],
        ),
        GroundedClaim(text="Here is what I found.", span=Span(start=15, end=36), check_required=False),
        GroundedClaim(
            text="Er fliegt.",
            span=Span(start=37, end=47),
            verdict=Verdict.CONTRADICTED,
            score=0.2,
            supports=[support("0", 0.9)],
        ),
    ]
    name = "projects/p/locations/global/groundingConfigs/default_grounding_config"
    with google.client("GroundedGenerationServiceClient") as client:
        facts = [g.GroundingFact(fact_text=one, attributes={"author": "x"}) for one in ("A", "B")]
        spec = g.CheckGroundingSpec(citation_threshold=0.0, enable_claim_level_score=True)
        request = g.CheckGroundingRequest(
            grounding_config=name, answer_candidate=text, facts=facts, grounding_spec=spec
        )
        query = GroundingQuery(answer=text, facts=[Fact(text="A"), Fact(text="B")], claim_scores=True)
        google.body = json.dumps(
            encode_check_grounding(query, GroundingLedger(claims=claims, grounding_score=0.55))
        ).encode()
        got = client.check_grounding(request)
        read = decode_check_grounding(google.last.body, grounding_config=google.last.resource)
    assert (read.answer, read.citation_threshold, read.claim_scores) == (text, 0.0, True)
    assert [(fact.text, fact.attributes) for fact in read.facts] == [("A", {"author": "x"}), ("B", {"author": "x"})]
    assert got.support_score == pytest.approx(0.55)
    assert [(one.chunk_text, one.source) for one in got.cited_chunks] == [("quote 1", "1"), ("quote 0", "0")]
    assert [(one.start_pos, one.end_pos, list(one.citation_indices)) for one in got.claims] == [
        (0, 15, [0, 1]),
        (16, 37, []),
        (38, 48, []),
    ]
    assert [one.grounding_check_required for one in got.claims] == [True, False, True]
    assert [one.score if "score" in one else None for one in got.claims] == [0.9, None, 0.2]


def support(reference: str, score: float) -> Support:
    return Support(
        reference_id=reference, node_id="n", span=Span(start=0, end=7), quote=f"quote {reference}", score=score
    )


def test_ranking_goes_both_ways(google: LoopbackGoogle) -> None:
    """The client's records are read, and come back best first, with details or without."""
    name = "projects/p/locations/global/rankingConfigs/default_ranking_config"
    with google.client("RankServiceClient") as client:
        records = [g.RankingRecord(id="1", title="a"), g.RankingRecord(id="2", content="b")]
        google.body = json.dumps(
            encode_rank(RankQuery(records=[RankRecord(id="2")]), [RankRecord(id="2", content="b", score=0.8597)])
        ).encode()
        got = client.rank(g.RankRequest(ranking_config=name, query="q", records=records, top_n=1))
        read = decode_rank(google.last.body, ranking_config=google.last.resource)
    assert [(one.id, one.content, round(one.score, 4)) for one in got.records] == [("2", "b", 0.8597)]
    assert (read.query, read.top_n, read.model, read.ids_only) == ("q", 1, "semantic-ranker-512@latest", False)
    assert [(one.id, one.title, one.content) for one in read.records] == [("1", "a", ""), ("2", "", "b")]
    bare = encode_rank(RankQuery(records=[RankRecord(id="2")], ids_only=True), [RankRecord(id="2", content="b")])
    assert bare == {"records": [{"id": "2"}]}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidRequestError("query.text: a question is needed"), exceptions.BadRequest, "query.text"),
        (NotFoundError("session: there is no session of this name"), exceptions.NotFound, "no session"),
        (RetrievalError("all sources failed"), exceptions.ServiceUnavailable, "all sources"),
        (DeadlineExceededError("late"), exceptions.GatewayTimeout, "late"),
        (KeyError("sk-secret-123456"), exceptions.InternalServerError, "Internal error."),
        (InvalidRequestError("password=hunter22"), exceptions.BadRequest, "password=***"),
    ],
)
def test_errors_reach_the_client_as_what_they_are(
    google: LoopbackGoogle, answers: Any, error: Exception, kind: type[exceptions.GoogleAPICallError], message: str
) -> None:
    """Each error is raised by the client as Google's own, unary and streamed; foreign ones say nothing."""
    google.status, body = encode_error(error)
    google.body = json.dumps(body).encode()
    request = g.AnswerQueryRequest(serving_config=CONFIGS[0], query={"text": "?"})
    with pytest.raises(kind) as unary:
        answers.answer_query(request)
    assert message in str(unary.value)
    assert "secret" not in str(unary.value)
    assert unary.value.metadata == (
        {"remedy": error.remedy, "docs": error.docs} if isinstance(error, AgenticKBError) else None
    )
    with pytest.raises(kind):
        list(answers.stream_answer_query(request))
