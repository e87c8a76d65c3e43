"""Google's real client over REST against the server: answers, streams, sessions, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import discoveryengine_v1 as g

from tests.server.serving import QUERY

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
