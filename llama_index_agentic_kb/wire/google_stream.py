"""A streamed answer in Google's order, as one JSON array over chunked HTTP.

    steps, references, then text deltas, each claim's citation right after its text, then the whole answer

The stock client (``google.api_core.rest_streaming``) takes nothing but an array: no line break before its ``[``, no
server-sent events; an ``{"error": ...}`` inside of it would be swallowed. So an answer that fails on the way ends with
state FAILED, and the array is always closed. Source: the recordings that ``specs`` of this contract describe (section
4, streaming).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Final

from llama_index_agentic_kb.errors import InvalidAnswerError
from llama_index_agentic_kb.schema.answer import Answer, AnswerReference, AnswerState, AnswerStep, Citation
from llama_index_agentic_kb.schema.answer_pieces import (
    AnswerPiece,
    CitationPiece,
    ReferencesPiece,
    StepsPiece,
    TextPiece,
)
from llama_index_agentic_kb.schema.sessions import Session
from llama_index_agentic_kb.wire.google_answer_resource import (
    encode_answer,
    encode_citations,
    encode_references,
    encode_steps,
)
from llama_index_agentic_kb.wire.google_enums import ANSWER_STATE
from llama_index_agentic_kb.wire.google_names import Parent
from llama_index_agentic_kb.wire.google_sessions import answer_name, encode_session
from llama_index_agentic_kb.wire.google_validation import validate_answer
from llama_index_agentic_kb.wire.google_values import Utf8Offsets, clean, message

__all__ = ["CONTENT_TYPE", "AnswerStream", "stream_answer"]

CONTENT_TYPE: Final = "application/json; charset=UTF-8"
_DONE: Final = (AnswerState.SUCCEEDED, AnswerState.FAILED)


class _Stage(IntEnum):
    BEGUN = 0
    STEPS = 1
    REFERENCES = 2
    TEXT = 3
    ENDED = 4


class AnswerStream:
    """Writes an answer piece by piece; each method gives the bytes to send now.

        stream = AnswerStream(token="T")
        yield stream.steps(steps)
        yield stream.references(references)
        for delta in deltas:
            yield stream.text(delta)
        yield stream.citation(citation)      # once its claim was sent
        yield stream.finish(answer)          # whole; closes the array

    Each piece is checked as a whole answer is.

    Args:
        parent: What was asked; needed with a session.
        session: The session that keeps the turn; its name stands in every piece's answer once ``answer_id`` is known.
        answer_id: The id that the finished answer will have; None without a session.
        token: The ``answerQueryToken``, repeated in every piece.
        enum_as_int: Whether enums are numbers.
    """

    def __init__(
        self,
        *,
        parent: Parent | None = None,
        session: Session | None = None,
        answer_id: str | None = None,
        token: str = "",
        enum_as_int: bool = False,
    ) -> None:
        self._parent = parent
        self._session = session
        self._name = answer_name(Answer(id=answer_id), parent, session)
        self._token = clean(token)
        self._enum_as_int = enum_as_int
        self._stage = _Stage.BEGUN
        self._opened = False
        self._text = ""
        self._references = 0

    def steps(self, steps: Sequence[AnswerStep]) -> bytes:
        """Tell the steps; first, if at all."""
        self._enter(_Stage.STEPS, "steps")
        return self._piece({"steps": encode_steps(steps, enum_as_int=self._enum_as_int)})

    def references(self, references: Sequence[AnswerReference]) -> bytes:
        """Tell all references; before the text."""
        self._enter(_Stage.REFERENCES, "references")
        self._references = len(references)
        return self._piece({"references": encode_references(references)})

    def text(self, delta: str) -> bytes:
        """Tell what comes next of the text; an empty delta is nothing to send."""
        self._enter(_Stage.TEXT, "text", again=True)
        if not delta:
            return b""
        self._text += clean(delta)
        return self._piece({"answerText": clean(delta)})

    def citation(self, citation: Citation) -> bytes:
        """Tell a claim's sources, after the claim's text.

        Raises:
            InvalidAnswerError: Its text was not sent yet, or it names no reference.
        """
        self._enter(_Stage.TEXT, "citation", again=True)
        if citation.end > len(self._text):
            raise InvalidAnswerError(
                f"citations[0].endIndex: the claim ends at character {citation.end}; only {len(self._text)} were sent"
            )
        return self._piece({"citations": encode_citations([citation], Utf8Offsets(self._text))})

    def finish(self, answer: Answer, session: Session | None = None) -> bytes:
        """Tell the whole answer and close the array. It takes the place of what was streamed.

        Args:
            answer: The answer, SUCCEEDED or FAILED.
            session: The session as it is after the turn; None is that of the constructor.
        """
        if answer.state not in _DONE:
            raise InvalidAnswerError(f"state: a finished answer has succeeded or failed, found {answer.state.value!r}")
        session = session or self._session
        name = answer_name(answer, self._parent, session) or self._name
        told = encode_answer(answer, name=name, enum_as_int=self._enum_as_int)
        self._enter(_Stage.ENDED, "finish")
        kept = None
        if session is not None and self._parent is not None:
            kept = encode_session(session, self._parent, enum_as_int=self._enum_as_int)
        return self._element(told, kept) + b"]"

    def piece(self, piece: AnswerPiece) -> bytes:
        """Tell a piece of ``KnowledgeBase.stream_answer``; the last one closes the array.

        for piece in kb.stream_answer(query):
            yield stream.piece(piece)
        """
        if isinstance(piece, StepsPiece):
            return self.steps(piece.steps) if piece.steps else b""
        if isinstance(piece, ReferencesPiece):
            return self.references(piece.references) if piece.references else b""
        if isinstance(piece, TextPiece):
            return self.text(piece.text)
        if isinstance(piece, CitationPiece):
            return self.citation(piece.citation)
        return self.finish(piece.answer, piece.session)

    def fail(self) -> bytes:
        """Tell that no answer comes, and close the array; nothing where it is closed already."""
        if self._stage is _Stage.ENDED:
            return b""
        return self.finish(Answer(state=AnswerState.FAILED))

    def _enter(self, stage: _Stage, what: str, *, again: bool = False) -> None:
        if self._stage > stage or (self._stage is stage and not again):
            raise InvalidAnswerError(f"{what}: too late; a stream goes steps, references, text and citations, finish")
        self._stage = stage

    def _piece(self, fields: dict[str, Any]) -> bytes:
        state = ANSWER_STATE.encode(AnswerState.STREAMING, as_int=self._enum_as_int)
        told = message({"name": self._name, "state": state, **fields})
        validate_answer(told, text=self._text, references=self._references)
        return self._element(told, None)

    def _element(self, answer: dict[str, Any], session: dict[str, Any] | None) -> bytes:
        element = message({"answerQueryToken": self._token}, {"answer": answer, "session": session})
        before = b",\n" if self._opened else b"["
        self._opened = True
        return before + json.dumps(element, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def stream_answer(
    answer: Answer,
    *,
    parent: Parent | None = None,
    session: Session | None = None,
    token: str = "",
    enum_as_int: bool = False,
) -> Iterator[bytes]:
    """Stream an answer that is whole already, in the order and the pieces of one that comes about.

    Text is sent claim by claim, each followed by its citations; see ``AnswerStream`` for the arguments.

    Raises:
        InvalidAnswerError: The answer breaks a rule of the contract; before anything is sent.
    """
    encode_answer(answer)
    stream = AnswerStream(parent=parent, session=session, answer_id=answer.id, token=token, enum_as_int=enum_as_int)
    return _streamed(stream, answer)


def _streamed(stream: AnswerStream, answer: Answer) -> Iterator[bytes]:
    if answer.steps:
        yield stream.steps(answer.steps)
    if answer.references:
        yield stream.references(answer.references)
    sent = 0
    for citation in sorted(answer.citations, key=lambda one: (one.end, one.start)):
        if citation.end > sent:
            yield stream.text(answer.text[sent : citation.end])
            sent = citation.end
        yield stream.citation(citation)
    if sent < len(answer.text):
        yield stream.text(answer.text[sent:])
    yield stream.finish(answer)
