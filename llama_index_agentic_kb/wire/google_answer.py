"""Google's Answer method (Discovery Engine v1, JSON): parser of requests, encoder of answers and streams.

    query = decode_answer_query(body, serving_config=path)
    body = encode_answer_response(answer, parent=config.parent, session=session, enum_as_int=True)

Every field of a v1 request is checked; those that change an answer and have no effect here are named in
``AnswerQuery.unsupported``. ``asynchronousMode`` is refused, as by the live service. Output is strictly v1. Offsets
are UTF-8 bytes, reference ids are indices as text, times are in UTC.

A stream is one JSON array over chunked HTTP: steps, references, then text and citations alternately (each
citation right after its claim's text), then the whole answer. The standard client (``google.api_core.rest_streaming``)
accepts only an array: no line break before its ``[``, no server-sent events; it ignores an ``{"error": ...}`` inside.
So an answer that fails while streaming ends with state FAILED, and the array is always closed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from llama_index_agentic_kb._text import byte_offsets, error_message
from llama_index_agentic_kb.errors import AgenticKBError, InvalidAnswerError, InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerReference,
    AnswerState,
    AnswerStep,
    ChunkContent,
    ChunkReference,
    Citation,
    DocumentReference,
    HarmCategory,
    SearchObservation,
    Session,
)
from llama_index_agentic_kb.schema.answer_query import (
    AnswerPiece,
    AnswerQuery,
    CitationPiece,
    DataStoreQuery,
    EndUserChunk,
    HarmBlockThreshold,
    ReferencesPiece,
    ResultMode,
    SafetySetting,
    StepsPiece,
    TextPiece,
    WholePiece,
)
from llama_index_agentic_kb.schema.filters import FilterNode
from llama_index_agentic_kb.schema.grounding import FilteringLevel
from llama_index_agentic_kb.schema.request import Message, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.wire._proto import Fields, Untyped, member, number, read, write
from llama_index_agentic_kb.wire.google_filter import parse_filter
from llama_index_agentic_kb.wire.google_names import (
    Parent,
    SessionName,
    parse_parent,
    parse_serving_config,
    parse_session_name,
)

DEFAULT_RESULTS: Final = 10  # default of Google's ``maxReturnResults``
_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
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


# -- questions --------------------------------------------------------------------------------------------------------


def decode_answer_query(body: object, *, serving_config: str | None = None) -> AnswerQuery:
    """Parse the request of ``:answer`` or ``:streamAnswer``; ``serving_config`` is the resource name in its path."""
    sent = read("AnswerQueryRequest", body)
    if sent.asynchronous_mode:
        raise InvalidRequestError("asynchronousMode: asynchronous mode is deprecated.")
    if not sent.query.text.strip():
        raise InvalidRequestError("query.text: a question is needed")
    if serving_config and sent.serving_config not in ("", serving_config):
        raise InvalidRequestError("servingConfig: the body names another one than the request's path")
    if config := serving_config or sent.serving_config:
        parse_serving_config(config)
    understanding, generation = sent.query_understanding_spec, sent.answer_generation_spec
    rephraser = understanding.query_rephraser_spec
    classes = [found for one in understanding.query_classification_spec.types if (found := member(QueryClass, one))]
    gated = generation.HasField("ignore_low_relevant_content")
    try:
        return AnswerQuery(
            request=RetrievalRequest(
                messages=[Message.model_validate({"role": "user", "content": sent.query.text})],
                retrieval_reasoning_effort=ReasoningEffort.MINIMAL if rephraser.disable else None,
                max_output_documents=sent.search_spec.search_params.max_return_results or DEFAULT_RESULTS,
            ),
            query_id=sent.query.query_id,
            session=parse_session_name(sent.session).id if sent.session else None,
            user_pseudo_id=sent.user_pseudo_id,
            user_labels=dict(sent.user_labels),
            end_user_chunks=[
                EndUserChunk(content=one.chunk_info.content, title=one.chunk_info.document_metadata.title)
                for one in sent.end_user_spec.end_user_metadata
                if one.HasField("chunk_info")
            ],
            **_search_fields(sent.search_spec),
            classify=list(dict.fromkeys(classes)),
            max_rephrase_steps=rephraser.max_rephrase_steps or 1,
            unsupported=_unsupported(sent),
            preamble=generation.prompt_spec.preamble,
            language=generation.answer_language_code or None,
            include_citations=generation.include_citations,
            ignore_adversarial_query=generation.ignore_adversarial_query,
            ignore_non_answer_seeking_query=generation.ignore_non_answer_seeking_query,
            ignore_jail_breaking_query=generation.ignore_jail_breaking_query,
            ignore_low_relevant_content=generation.ignore_low_relevant_content if gated else None,
            related_questions=sent.related_questions_spec.enable,
            grounding_supports=sent.grounding_spec.include_grounding_supports,
            filtering_level=member(FilteringLevel, sent.grounding_spec.filtering_level),
            safety=sent.safety_spec.enable,
            safety_settings=_safety_settings(sent.safety_spec),
        )
    except ValidationError as error:
        raise InvalidRequestError(describe(error)) from error


def _unsupported(sent: Untyped) -> list[str]:
    params = sent.search_spec.search_params
    asked = {
        "boostSpec": any(one.HasField("boost_spec") for one in (params, *params.data_store_specs)),
        "orderBy": params.order_by,
        "customSearchOperators": any(one.custom_search_operators for one in params.data_store_specs),
        "modelVersion": sent.answer_generation_spec.model_spec.model_version,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _safety_settings(spec: Untyped) -> list[SafetySetting]:
    settings = []
    for position, one in enumerate(spec.safety_settings):
        category, threshold = member(HarmCategory, one.category), member(HarmBlockThreshold, one.threshold)
        if category is None or threshold is None:
            raise InvalidRequestError(f"safetySpec.safetySettings.{position}: category and threshold are both needed")
        settings.append(SafetySetting(category=category, threshold=threshold))
    return settings


def _search_fields(spec: Untyped) -> Fields:
    if spec.HasField("search_result_list"):
        return {"search_results": [_brought_result(one) for one in spec.search_result_list.search_results]}
    params, at = spec.search_params, "searchSpec.searchParams"
    return {
        "filters": _filter(params, at),
        "result_mode": member(ResultMode, params.search_result_mode),
        "data_stores": [
            DataStoreQuery(
                data_store=str(parse_parent(one.data_store, f"{at}.dataStoreSpecs.{position}.dataStore")),
                max_results=one.num_results or None,
                filters=_filter(one, f"{at}.dataStoreSpecs.{position}"),
            )
            for position, one in enumerate(params.data_store_specs)
        ],
    }


def _filter(spec: Untyped, at: str) -> FilterNode | None:
    """Return the parsed filter; the conditions of boosts are only checked for syntax."""
    for position, boost in enumerate(spec.boost_spec.condition_boost_specs):
        parse_filter(boost.condition, f"{at}.boostSpec.conditionBoostSpecs.{position}.condition")
    return parse_filter(spec.filter, f"{at}.filter")


def _brought_result(result: Untyped) -> AnswerReference:
    if result.HasField("chunk_info"):
        chunk = result.chunk_info
        about = chunk.document_metadata
        return ChunkReference(chunk=chunk.chunk, content=chunk.content, uri=about.uri, title=about.title)
    document = result.unstructured_document_info
    # Google's order: segments only if there are no contexts; answers (deprecated) only if there are neither.
    passages = document.document_contexts or document.extractive_segments or document.extractive_answers
    return DocumentReference(
        document=document.document,
        uri=document.uri,
        title=document.title,
        chunks=[ChunkContent(content=one.content, page_identifier=one.page_identifier) for one in passages],
    )


# -- answers ----------------------------------------------------------------------------------------------------------


def encode_answer(answer: Answer, *, name: str | None = None, enum_as_int: bool = False) -> Fields:
    """Return an answer, with its resource name in a session; raise ``InvalidAnswerError`` if it is invalid."""
    return write("Answer", _answer_fields(answer, name), enum_as_int=enum_as_int)


def encode_answer_response(
    answer: Answer, *, parent: Parent | None = None, session: Session | None = None, enum_as_int: bool = False
) -> Fields:
    """Return the response of ``:answer`` as JSON data; an invalid answer is an ``InvalidAnswerError``.

    A session (after this turn) needs its parent, a data store or engine; without one the answer has no name.
    """
    kept = name = None
    if session is not None and parent is not None:
        kept = session_fields(session, parent)
        name = None if answer.id is None else SessionName(parent, session.id).answer(answer.id)
    fields = {"answer": _answer_fields(answer, name), "session": kept}
    return write("AnswerQueryResponse", fields, enum_as_int=enum_as_int)


def _answer_fields(answer: Answer, name: str | None) -> Fields:
    """Return the fields of an ``Answer`` message, validated again because the answer may have been modified."""
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
                **one.model_dump(by_alias=True),
                "category": number(one.category),
                "probability": number(one.probability),
                "severity": number(one.severity),
            }
            for one in answer.safety_ratings
        ],
    }


def _claim(claim: Citation, offsets: Sequence[int]) -> Fields:
    return {
        "startIndex": offsets[claim.start],
        "endIndex": offsets[claim.end],
        "sources": [{"referenceId": str(source)} for source in claim.sources],
    }


def _reference(reference: AnswerReference) -> Fields:
    document = reference.model_dump(include={"document", "uri", "title"})
    if isinstance(reference, ChunkReference):
        metadata = {**document, "pageIdentifier": reference.page_identifier, "structData": reference.metadata or None}
        return {"chunkInfo": {**_chunk(reference), "documentMetadata": metadata}}
    if isinstance(reference, DocumentReference):
        chunks = [one.model_dump(by_alias=True) for one in reference.chunks]
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
        **result.model_dump(include={"document", "uri", "title"}),
        "snippetInfo": [{"snippet": one.snippet, "snippetStatus": one.status} for one in result.snippets],
        "chunkInfo": [_chunk(one) for one in result.chunks],
        "structData": result.metadata or None,
    }


def session_fields(session: Session, parent: Parent) -> Fields:
    """Return the fields of a ``Session`` message for ``write``; turns include their whole answers if loaded."""
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
                "detailedAnswer": None if turn.answer is None else _answer_fields(turn.answer, answer),
            }
            for turn in session.turns
        ],
        "labels": session.labels,
        "isPinned": session.is_pinned,
        "startTime": session.started_at,
        "endTime": session.ended_at,
    }


class AnswerStream:
    """Encoder of a streamed answer, piece by piece, in the order of ``AnswerPiece``.

        stream = AnswerStream()
        for piece in kb.stream_answer(query):
            yield stream.piece(piece)

    A session needs its ``parent``, a data store or engine.
    """

    def __init__(self, *, parent: Parent | None = None, enum_as_int: bool = False) -> None:
        self._parent, self._enum_as_int = parent, enum_as_int
        self._opened = self._closed = False
        self._offsets = [0]  # byte offset of each character of the text so far, and its length

    def piece(self, piece: AnswerPiece) -> bytes:
        """Return the bytes to send for a piece, none for an empty piece; the whole answer closes the array.

        Raises ``InvalidAnswerError`` for a citation of text that was not sent, and for a whole answer that is
        unfinished or invalid.
        """
        if isinstance(piece, WholePiece):
            return self._whole(piece)
        fields: Fields
        match piece:
            case StepsPiece():
                fields = {"steps": _steps(piece.steps)}
            case ReferencesPiece():
                fields = {"references": [_reference(one) for one in piece.references]}
            case TextPiece():
                self._offsets += [self._offsets[-1] + offset for offset in byte_offsets(piece.text)[1:]]
                fields = {"answerText": piece.text}
            case CitationPiece():
                if piece.citation.end >= len(self._offsets):
                    raise InvalidAnswerError(f"citations.0.end: only {len(self._offsets) - 1} characters were sent")
                fields = {"citations": [_claim(piece.citation, self._offsets)]}
        if not any(fields.values()):
            return b""
        answer = {"state": number(AnswerState.STREAMING), **fields}
        return self._element(write("AnswerQueryResponse", {"answer": answer}, enum_as_int=self._enum_as_int))

    def fail(self) -> bytes:
        """Return the bytes that end the stream with state FAILED; empty if the array is already closed."""
        return b"" if self._closed else self._whole(WholePiece(answer=Answer(state=AnswerState.FAILED)))

    def _whole(self, piece: WholePiece) -> bytes:
        state = piece.answer.state
        if state not in (AnswerState.SUCCEEDED, AnswerState.FAILED):
            raise InvalidAnswerError(f"state: a finished answer has succeeded or failed, found {state.value!r}")
        fields = encode_answer_response(
            piece.answer, parent=self._parent, session=piece.session, enum_as_int=self._enum_as_int
        )
        element = self._element(fields)
        self._closed = True
        return element + b"]"

    def _element(self, fields: Fields) -> bytes:
        before = b",\n" if self._opened else b"["
        self._opened = True
        return before + json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def encode_error(error: BaseException) -> tuple[int, list[Fields]]:
    """Return an error's HTTP status and body, ``[{"error": {"code", "message", "status", "details"}}]``.

    Errors of this library have their message and a ``google.rpc.ErrorInfo``; any other is only "Internal error."
    """
    details: list[Fields] = []
    status, text = 500, "Internal error."
    if isinstance(error, AgenticKBError):
        text, metadata = error_message(error), {"remedy": error.remedy, "docs": error.docs}
        details = [{"@type": _ERROR_INFO, "reason": error.code, "domain": "agentic-kb", "metadata": metadata}]
        found = 504 if isinstance(error, TimeoutError) else error.status_code
        found = 503 if found == 502 else found  # noqa: PLR2004 (Google's list of statuses has no bad gateway)
        status = found if found in _STATUS else status
    return status, [{"error": {"code": status, "message": text, "status": _STATUS[status], "details": details}}]
