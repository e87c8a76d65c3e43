"""What is written is what Google's own parser reads, nothing lost and nothing unknown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as google_v1
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidAnswerError
from llama_index_agentic_kb.schema import answer as a
from llama_index_agentic_kb.wire import google as codec
from llama_index_agentic_kb.wire.google_messages import write
from tests.wire.strategies import answers, many, sessions, stream_answer

PARENT = "projects/p/locations/global/collections/default_collection/engines/e"
NOW = datetime(2026, 1, 2, 3, 4, 5, 600000, tzinfo=UTC)


def parsed(kind: Any, written: Any) -> Any:
    """Parse strictly, by way of the bytes that go out."""
    data = json.dumps(written, ensure_ascii=False, allow_nan=False).encode().decode()
    return json_format.Parse(data, kind.pb(kind()), ignore_unknown_fields=False)


def whole(answer: a.Answer) -> a.WholePiece:
    """The last piece, as it is: nothing is validated."""
    return a.WholePiece.model_construct(answer=answer, session=None)


def same(kind: Any, written: dict[str, Any], *, enum_as_int: bool) -> None:
    """Nothing is lost, and everything is in protobuf's own form."""
    again = json_format.MessageToDict(parsed(kind, written), use_integers_for_enums=enum_as_int)
    assert again == written


@many
@given(answers(), st.booleans())
def test_answers_survive_a_strict_parse(answer: a.Answer, enum_as_int: bool) -> None:
    """Any answer is read strictly, and written by protobuf comes out the same."""
    written = codec.encode_answer(answer, name="n", enum_as_int=enum_as_int)
    same(google_v1.Answer, written, enum_as_int=enum_as_int)


@many
@given(sessions(), st.booleans())
def test_sessions_survive_a_strict_parse(session: a.Session, enum_as_int: bool) -> None:
    """Any session is read strictly, with whole answers and without; so is a page of them."""
    written = codec.encode_session(session, PARENT, enum_as_int=enum_as_int)
    same(google_v1.Session, written, enum_as_int=enum_as_int)
    page = codec.encode_session_page(
        a.SessionPage(sessions=[session], next_page_token="t"), PARENT, enum_as_int=enum_as_int
    )
    same(google_v1.ListSessionsResponse, page, enum_as_int=enum_as_int)


@many
@given(answers(done=True), st.booleans(), st.booleans())
def test_every_piece_of_a_stream_survives_a_strict_parse(answer: a.Answer, enum_as_int: bool, kept: bool) -> None:
    """Pieces are read strictly, come in Google's order, and together hold the text."""
    session = a.Session(id="s", started_at=NOW, updated_at=NOW) if kept else None
    pieces = list(stream_answer(answer, parent=PARENT, session=session, enum_as_int=enum_as_int))
    assert b"".join(pieces).startswith(b"[{")
    elements = json.loads(b"".join(pieces))
    for element in elements:
        same(google_v1.AnswerQueryResponse, element, enum_as_int=enum_as_int)
    *before, last = elements
    assert ("name" in last["answer"]) == kept == ("session" in last)
    order = [
        next(key for key in ("steps", "references", "citations", "answerText") if key in one["answer"])
        for one in before
    ]
    written = [kind for kind in order if kind in ("steps", "references")]
    assert order[: len(written)] == written == [kind for kind in ("steps", "references") if getattr(answer, kind)]
    streamed = "".join(one["answer"].get("answerText", "") for one in before)
    assert streamed == last["answer"].get("answerText", "")
    assert all(one["answer"]["state"] in ("STREAMING", 4) for one in before)
    assert last["answer"]["state"] not in ("STREAMING", 4)


def test_a_citation_follows_its_claim_by_absolute_bytes() -> None:
    """Text deltas and citations take turns; offsets count bytes from the answer's start."""
    text = "Österreich: Wien. 日本: 東京."
    citations = [a.Citation(start=0, end=17, sources=[0]), a.Citation(start=18, end=len(text), sources=[1, 0])]
    references: list[a.AnswerReference] = [a.ChunkReference(chunk="1"), a.ChunkReference(chunk="2")]
    answer = a.Answer(text=text, citations=citations, references=references)
    elements = [one["answer"] for one in json.loads(b"".join(stream_answer(answer)))]
    first = {"endIndex": "18", "sources": [{"referenceId": "0"}]}
    second = {"startIndex": "19", "endIndex": "34", "sources": [{"referenceId": "1"}, {"referenceId": "0"}]}
    assert elements[1:-1] == [
        {"state": "STREAMING", "answerText": "Österreich: Wien."},
        {"state": "STREAMING", "citations": [first]},
        {"state": "STREAMING", "answerText": " 日本: 東京."},
        {"state": "STREAMING", "citations": [second]},
    ]
    assert text.encode()[19:34].decode() == "日本: 東京."


def test_a_refused_piece_leaves_a_stream_that_can_be_closed() -> None:
    """What cites unsent text, is not done, or can't be written was not sent; a failed stream is an array still."""
    stream = codec.AnswerStream(parent=PARENT)
    sent = stream.piece(a.ReferencesPiece(references=[a.ChunkReference()])) + stream.piece(a.TextPiece(text="Pa"))
    assert stream.piece(a.TextPiece(text="")) == b""
    with pytest.raises(InvalidAnswerError, match=r"citations.0.end: only 2 characters were sent"):
        stream.piece(a.CitationPiece(citation=a.Citation(start=0, end=5)))
    with pytest.raises(InvalidAnswerError, match="state: a finished answer"):
        stream.piece(a.WholePiece(answer=a.Answer(state=a.AnswerState.STREAMING)))
    session = a.Session(id="s", started_at=NOW, updated_at=NOW).model_copy(update={"labels": [1]})
    with pytest.raises(InvalidAnswerError):
        stream.piece(whole(a.Answer(text="x")).model_copy(update={"session": session}))
    sent += stream.fail()
    assert stream.fail() == b""
    assert json.loads(sent)[-1] == {"answer": {"state": "FAILED"}}
    assert json.loads(codec.AnswerStream().fail()) == [{"answer": {"state": "FAILED"}}]


def test_values_take_protobufs_form() -> None:
    """Float32 is short, long whole numbers and dates are text, what is no number is null."""
    day, big, nan = NOW.date(), 2**53 + 1, float("nan")
    data: Any = {"big": big, "nan": nan, "day": day, "deep": {"x": (1, {"y": b"z"})}, "s": "\ud800"}
    reference = a.ChunkReference(relevance_score=0.1203860342502594, metadata=data)
    written = codec.encode_answer(a.Answer(references=[reference]))["references"][0]["chunkInfo"]
    assert written["relevanceScore"] == 0.120386034
    expected = {"big": "9007199254740993", "nan": None, "day": "2026-01-02", "deep": {"x": [1, {"y": "b'z'"}]}}
    assert written["documentMetadata"]["structData"] == {**expected, "s": "\ufffd"}
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert codec.encode_answer(a.Answer(references=[a.StructuredReference(data={"x": deep})]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grounding_score": 1.7}, "groundingScore: Input should be less than or equal to 1"),
        ({"references": [a.ChunkReference.model_construct(relevance_score=-0.1)]}, "relevanceScore: Input should be"),
        ({"text": "é"}, "citations.0.end: 3 is beyond the text of 1 characters"),
    ],
)
def test_an_answer_that_breaks_a_rule_is_refused_by_its_field(changed: dict[str, Any], message: str) -> None:
    """An answer is checked again before it goes out, as changed models are not; what is written is strictly v1."""
    good = a.Answer(text="é 東", citations=[a.Citation(start=0, end=3, sources=[0])], references=[a.ChunkReference()])
    assert codec.encode_answer(good)
    broken = good.model_copy(update=changed)
    for encode in (
        codec.encode_answer,
        codec.encode_answer_response,
        lambda one: codec.AnswerStream().piece(whole(one)),
    ):
        with pytest.raises(InvalidAnswerError) as refused:
            encode(broken)
        assert message in str(refused.value)
    with pytest.raises(InvalidAnswerError, match='no field named "blobAttachments"'):
        write("Answer", {"blobAttachments": []})
