"""Google's Answer method (Discovery Engine v1, JSON): questions in; answers out, whole or as a stream.

    query = decode_answer_query(body, serving_config=path)
    body = encode_answer_response(answer, parent=config.parent, session=session, enum_as_int=True)

What goes out is strictly v1. Offsets count bytes of UTF-8, references are indices as text, times are in UTC.

A stream is one JSON array over chunked HTTP: steps, references, then text and citations in turns (each citation right
after its claim's text), then the whole answer. The stock client (``google.api_core.rest_streaming``) takes nothing but
an array: no line break before its ``[``, no server-sent events; an ``{"error": ...}`` inside of it would be swallowed.
So an answer that fails on the way ends with state FAILED, and the array is always closed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from llama_index_agentic_kb import _text
from llama_index_agentic_kb.errors import AgenticKBError, InvalidAnswerError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerReference,
    AnswerState,
    AnswerStep,
    ChunkReference,
    Citation,
    DocumentReference,
    GroundingSupport,
    SearchObservation,
)
from llama_index_agentic_kb.schema.answer_query import (
    AnswerPiece,
    CitationPiece,
    ReferencesPiece,
    StepsPiece,
    TextPiece,
    WholePiece,
)
from llama_index_agentic_kb.schema.sessions import Session
from llama_index_agentic_kb.wire._proto import Fields, byte_offsets, clean, number, write
from llama_index_agentic_kb.wire.google_names import Parent, SessionName
from llama_index_agentic_kb.wire.google_request import decode_answer_query

__all__ = [
    "CONTENT_TYPE",
    "AnswerStream",
    "answer_fields",
    "decode_answer_query",
    "encode_answer",
    "encode_answer_response",
    "encode_error",
    "session_fields",
]

CONTENT_TYPE: Final = "application/json; charset=UTF-8"
_STAGES: Final = {"steps": 1, "references": 2, "text": 3, "citation": 3, "whole": 4}
"""The order of a stream's pieces."""


def encode_answer(answer: Answer, *, name: str | None = None, enum_as_int: bool = False) -> Fields:
    """Return an answer's JSON.

    Args:
        answer: The answer. Its ``language`` has no field in v1.
        name: Its resource name; None without a session.
        enum_as_int: Whether enums are numbers (the client asks by ``$alt=json;enum-encoding=int``).

    Raises:
        InvalidAnswerError: It breaks a rule of its model; the message names the field.
    """
    return write("Answer", answer_fields(answer, name), enum_as_int=enum_as_int)


def encode_answer_response(
    answer: Answer,
    *,
    parent: Parent | None = None,
    session: Session | None = None,
    token: str = "",
    enum_as_int: bool = False,
) -> Fields:
    """Return the response of ``:answer``.

    Args:
        answer: The answer; its name is built from the session's and its ``id``.
        parent: What was asked; needed with a session.
        session: The session as it is after this turn; None is sessionless, and nothing is named then.
        token: The ``answerQueryToken``.
        enum_as_int: Whether enums are numbers.

    Raises:
        InvalidAnswerError: The answer breaks a rule of its model.
    """
    fields = {
        "answerQueryToken": token,
        "answer": answer_fields(answer, _answer_name(answer.id, parent, session)),
        "session": _session(session, parent),
    }
    return write("AnswerQueryResponse", fields, enum_as_int=enum_as_int)


def _answer_name(answer_id: str | None, parent: Parent | None, session: Session | None) -> str | None:
    if parent is None or session is None or answer_id is None:
        return None
    return SessionName(parent, session.id).answer(answer_id)


def answer_fields(answer: Answer, name: str | None) -> Fields:
    """Return the fields of an ``Answer`` message, for ``write``.

    Raises:
        InvalidAnswerError: It was changed after it was made, and breaks a rule of its model.
    """
    try:
        Answer.model_validate(answer.model_dump(warnings="none"))
    except ValidationError as error:
        raise InvalidAnswerError(describe(error)) from error
    offsets = byte_offsets(answer.text)
    classified = [{"type": number(one.type), "positive": one.positive} for one in answer.query_classifications or ()]
    return {
        "name": name,
        "state": number(answer.state),
        "answerText": answer.text,
        "groundingScore": answer.grounding_score,
        "citations": [_claim(one, offsets) for one in answer.citations],
        "groundingSupports": [
            {**_claim(one, offsets), "groundingScore": one.score, "groundingCheckRequired": one.check_required}
            for one in answer.grounding_supports
        ],
        "references": [_reference(one) for one in answer.references],
        "relatedQuestions": answer.related_questions,
        "steps": _steps(answer.steps),
        "queryUnderstandingInfo": {"queryClassificationInfo": classified} if classified else None,
        "answerSkippedReasons": [number(one) for one in answer.skipped_reasons],
        "createTime": answer.created_at,
        "completeTime": answer.completed_at,
        "safetyRatings": [
            {
                "category": number(one.category),
                "probability": number(one.probability),
                "probabilityScore": one.probability_score,
                "severity": number(one.severity),
                "severityScore": one.severity_score,
                "blocked": one.blocked,
            }
            for one in answer.safety_ratings
        ],
    }


def _claim(claim: Citation | GroundingSupport, offsets: Sequence[int]) -> Fields:
    return {
        "startIndex": offsets[claim.start],
        "endIndex": offsets[claim.end],
        "sources": [{"referenceId": str(source)} for source in claim.sources],
    }


def _reference(reference: AnswerReference) -> Fields:
    document = {"document": reference.document, "uri": reference.uri, "title": reference.title}
    if isinstance(reference, ChunkReference):
        metadata = {**document, "pageIdentifier": reference.page_identifier, "structData": reference.metadata or None}
        return {"chunkInfo": {**_chunk(reference), "documentMetadata": metadata}}
    if isinstance(reference, DocumentReference):
        chunks = [
            {"content": one.content, "pageIdentifier": one.page_identifier, "relevanceScore": one.relevance_score}
            for one in reference.chunks
        ]
        data = {"chunkContents": chunks, "structData": reference.metadata or None}
        return {"unstructuredDocumentInfo": {**document, **data}}
    return {"structuredDocumentInfo": {**document, "structData": reference.data or None}}


def _chunk(chunk: ChunkReference) -> Fields:
    return {"chunk": chunk.chunk, "content": chunk.content, "relevanceScore": chunk.relevance_score}


def _steps(steps: Sequence[AnswerStep]) -> list[Fields]:
    return [
        {
            "state": number(step.state),
            "description": step.description,
            "thought": step.thought,
            "actions": [
                {
                    "searchAction": None if action.query is None else {"query": action.query},
                    "observation": None
                    if action.results is None
                    else {"searchResults": [_result(one) for one in action.results]},
                }
                for action in step.actions
            ],
        }
        for step in steps
    ]


def _result(result: SearchObservation) -> Fields:
    return {
        "document": result.document,
        "uri": result.uri,
        "title": result.title,
        "snippetInfo": [{"snippet": one.snippet, "snippetStatus": one.status} for one in result.snippets],
        "chunkInfo": [_chunk(one) for one in result.chunks],
        "structData": result.metadata or None,
    }


def session_fields(session: Session, parent: Parent) -> Fields:
    """Return the fields of a ``Session`` message, for ``write``; turns hold their whole answers where loaded."""
    name = SessionName(parent, session.id)
    return {
        "name": str(name),
        "displayName": session.display_name,
        "state": number(session.state),
        "userPseudoId": session.user_pseudo_id,
        "turns": [
            {
                "query": {"queryId": turn.query_id, "text": turn.query},
                "answer": (answer := name.answer(turn.answer_id)),
                "queryConfig": turn.query_config,
                "detailedAnswer": None if turn.answer is None else answer_fields(turn.answer, answer),
            }
            for turn in session.turns
        ],
        "labels": session.labels,
        "isPinned": session.is_pinned,
        "startTime": session.started_at,
        "endTime": session.ended_at,
    }


def _session(session: Session | None, parent: Parent | None) -> Fields | None:
    return None if session is None or parent is None else session_fields(session, parent)


class AnswerStream:
    """Writes a streamed answer piece by piece.

        stream = AnswerStream(token="T")
        for piece in kb.stream_answer(query):
            yield stream.piece(piece)

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
        self._name = _answer_name(answer_id, parent, session)
        self._token = token
        self._enum_as_int = enum_as_int
        self._stage = 0
        self._opened = False
        self._text = ""
        self._references = 0

    def piece(self, piece: AnswerPiece) -> bytes:
        """Return the bytes to send for a piece, nothing for an empty one; the whole answer closes the array.

        Raises:
            InvalidAnswerError: It comes too late, cites a text or a reference that was not sent, or is a whole answer
                that is not finished or breaks a rule of its model.
        """
        if isinstance(piece, WholePiece):
            return self._whole(piece)
        fields = self._fields(piece)
        if not any(fields.values()):
            return b""
        self._enter(piece)
        return self._element({"name": self._name, "state": number(AnswerState.STREAMING), **fields}, None)

    def fail(self) -> bytes:
        """Return the end of an answer that failed; nothing where the array is closed already."""
        failed = WholePiece(answer=Answer(state=AnswerState.FAILED))
        return b"" if self._stage == _STAGES["whole"] else self._whole(failed)

    def _enter(self, piece: AnswerPiece) -> None:
        stage = _STAGES[piece.kind]
        if self._stage > stage or (self._stage == stage and not isinstance(piece, (TextPiece, CitationPiece))):
            raise InvalidAnswerError(
                f"{piece.kind}: too late; the order is steps, references, text and citations, whole"
            )
        self._stage = stage

    def _fields(self, piece: StepsPiece | ReferencesPiece | TextPiece | CitationPiece) -> Fields:
        if isinstance(piece, StepsPiece):
            return {"steps": _steps(piece.steps)}
        if isinstance(piece, ReferencesPiece):
            self._references = self._references or len(piece.references)
            return {"references": [_reference(one) for one in piece.references]}
        if isinstance(piece, TextPiece):
            self._text += clean(piece.text)
            return {"answerText": piece.text}
        citation = piece.citation
        if citation.end > len(self._text):
            raise InvalidAnswerError(
                f"citations.0.end: the claim ends at character {citation.end}; only {len(self._text)} were sent"
            )
        if any(source >= self._references for source in citation.sources):
            raise InvalidAnswerError(f"citations.0.sources: one is no reference; {self._references} were sent")
        return {"citations": [_claim(citation, byte_offsets(self._text))]}

    def _whole(self, piece: WholePiece) -> bytes:
        answer, session = piece.answer, piece.session or self._session
        if answer.state not in (AnswerState.SUCCEEDED, AnswerState.FAILED):
            raise InvalidAnswerError(f"state: a finished answer has succeeded or failed, found {answer.state.value!r}")
        fields = answer_fields(answer, _answer_name(answer.id, self._parent, session) or self._name)
        self._enter(piece)
        return self._element(fields, _session(session, self._parent)) + b"]"

    def _element(self, answer: Fields, session: Fields | None) -> bytes:
        fields = {"answerQueryToken": self._token, "answer": answer, "session": session}
        element = write("AnswerQueryResponse", fields, enum_as_int=self._enum_as_int)
        before = b",\n" if self._opened else b"["
        self._opened = True
        return before + json.dumps(element, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_REPLACED: Final = {502: 503}
"""Google's list of statuses has no bad gateway."""


def encode_error(error: BaseException) -> tuple[int, list[Fields]]:
    """Return an error's HTTP status and body, ``[{"error": {"code", "message", "status"}}]``.

    The body says what an error of this library says, without what looks like a secret; of any other only that there was
    one.
    """
    status, text = 500, "Internal error."
    if isinstance(error, AgenticKBError):
        text = _text.printable(_text.redacted(str(error)))
        found = 504 if isinstance(error, TimeoutError) else error.status_code or status
        found = _REPLACED.get(found, found)
        status = found if found in _STATUS else status
    return status, [{"error": {"code": status, "message": text, "status": _STATUS[status]}}]
