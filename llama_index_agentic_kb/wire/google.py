"""Google's Answer and session methods, CheckGrounding and Rank (Discovery Engine v1): requests in, answers out.

    query = decode_answer_query(body, serving_config=path)
    body = encode_answer_response(answer, parent=names.parse_serving_config(path), session=session, enum_as_int=True)

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
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from llama_index_agentic_kb._text import byte_offsets, error_message
from llama_index_agentic_kb.errors import AgenticKBError, InvalidAnswerError, InvalidRequestError, SynthesisError
from llama_index_agentic_kb.schema import answer as answers
from llama_index_agentic_kb.schema import grounding
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.filters import Condition, FilterNode, FilterOperator
from llama_index_agentic_kb.schema.request import Message, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.wire import google_messages as names
from llama_index_agentic_kb.wire.google_filter import parse_filter, parse_session_filter
from llama_index_agentic_kb.wire.google_messages import Fields, Untyped, member, plain, read, write

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
_NEAREST: Final = {413: 400, 502: 503}  # statuses that Google's list lacks
DEFAULT_RANKER: Final = "semantic-ranker-512@latest"
DEFAULT_PAGE: Final = 50
MAX_PAGE: Final = 1_000
_DOCUMENT: Final = {"document", "uri", "title"}
_CHUNK: Final = {"chunk", "content", "relevance_score"}
_KEYS: Final = {
    "user_pseudo_id": "user_pseudo_id",
    "state": "state",
    "display_name": "display_name",
    "starred": "is_pinned",
    "is_pinned": "is_pinned",
    "labels": "labels",
    "create_time": "started_at",
    "update_time": "updated_at",
}
_ORDERS: Final = {**{name: _KEYS[name] for name in ("update_time", "create_time", "is_pinned")}, "session_name": "id"}
_CHANGEABLE: Final = ("display_name", "labels", "is_pinned", "user_pseudo_id")


# -- questions --------------------------------------------------------------------------------------------------------


def decode_answer_query(body: object, *, serving_config: str | None = None) -> answers.AnswerQuery:
    """Parse the request of ``:answer`` or ``:streamAnswer``; ``serving_config`` is the resource name in its path."""
    sent = read("AnswerQueryRequest", body)
    _check_question(sent, serving_config)
    understanding = sent.query_understanding_spec
    rephraser, safety = understanding.query_rephraser_spec, sent.safety_spec
    classes = [found for one in understanding.query_classification_spec.types if (found := member(QueryClass, one))]
    try:
        return answers.AnswerQuery(
            request=RetrievalRequest(
                messages=[Message.model_validate({"role": "user", "content": sent.query.text})],
                retrieval_reasoning_effort=ReasoningEffort.MINIMAL if rephraser.disable else None,
                max_output_documents=sent.search_spec.search_params.max_return_results or DEFAULT_RESULTS,
            ),
            query_id=sent.query.query_id,
            session=names.parse_session_name(sent.session)[1] if sent.session else None,
            user_pseudo_id=sent.user_pseudo_id,
            user_labels=dict(sent.user_labels),
            end_user_chunks=[
                answers.EndUserChunk(content=one.chunk_info.content, title=one.chunk_info.document_metadata.title)
                for one in sent.end_user_spec.end_user_metadata
                if one.HasField("chunk_info")
            ],
            **_search_fields(sent.search_spec),
            classify=list(dict.fromkeys(classes)),
            max_rephrase_steps=rephraser.max_rephrase_steps or 1,
            unsupported=_unsupported(sent),
            **_generation_fields(sent.answer_generation_spec),
            related_questions=sent.related_questions_spec.enable,
            grounding_supports=sent.grounding_spec.include_grounding_supports,
            filtering_level=member(grounding.FilteringLevel, sent.grounding_spec.filtering_level),
            safety=safety.enable,
            safety_settings=_safety_settings(safety),
        )
    except ValidationError as error:
        raise InvalidRequestError(describe(error)) from error


def _check_question(sent: Untyped, serving_config: str | None) -> None:
    if sent.asynchronous_mode:
        raise InvalidRequestError("asynchronousMode: asynchronous mode is deprecated.")
    if not sent.query.text.strip():
        raise InvalidRequestError("query.text: a question is needed")
    if serving_config and sent.serving_config not in ("", serving_config):
        raise InvalidRequestError("servingConfig: the body names another one than the request's path")
    if config := serving_config or sent.serving_config:
        names.parse_serving_config(config)


def _unsupported(sent: Untyped) -> list[str]:
    """Return the names of the fields that change an answer, are set, and have no effect here."""
    params = sent.search_spec.search_params
    is_set = {
        "boostSpec": any(one.HasField("boost_spec") for one in (params, *params.data_store_specs)),
        "orderBy": params.order_by,
        "customSearchOperators": any(one.custom_search_operators for one in params.data_store_specs),
        "modelVersion": sent.answer_generation_spec.model_spec.model_version,
    }
    return [name for name, value in is_set.items() if value]


def _generation_fields(spec: Untyped) -> Fields:
    """Return the settings of the answer, which have Google's names but for three."""
    same = ("adversarial_query", "non_answer_seeking_query", "jail_breaking_query")
    gated = spec.HasField("ignore_low_relevant_content")
    return {
        **{f"ignore_{name}": getattr(spec, f"ignore_{name}") for name in same},
        "ignore_low_relevant_content": spec.ignore_low_relevant_content if gated else None,
        "include_citations": spec.include_citations,
        "preamble": spec.prompt_spec.preamble,
        "language": spec.answer_language_code or None,
    }


def _safety_settings(spec: Untyped) -> list[answers.SafetySetting]:
    settings = []
    for position, one in enumerate(spec.safety_settings):
        category = member(answers.HarmCategory, one.category)
        threshold = member(answers.HarmBlockThreshold, one.threshold)
        if category is None or threshold is None:
            raise InvalidRequestError(f"safetySpec.safetySettings.{position}: category and threshold are both needed")
        settings.append(answers.SafetySetting(category=category, threshold=threshold))
    return settings


def _search_fields(spec: Untyped) -> Fields:
    if spec.HasField("search_result_list"):
        return {"search_results": [_brought_result(one) for one in spec.search_result_list.search_results]}
    params, at = spec.search_params, "searchSpec.searchParams"
    return {
        "filters": _filter(params, at),
        "result_mode": member(answers.ResultMode, params.search_result_mode),
        "data_stores": [
            answers.DataStoreQuery(
                data_store=names.parse_parent(one.data_store, f"{at}.dataStoreSpecs.{position}.dataStore"),
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


def _brought_result(result: Untyped) -> answers.AnswerReference:
    if result.HasField("chunk_info"):
        chunk = result.chunk_info
        about = chunk.document_metadata
        return answers.ChunkReference(chunk=chunk.chunk, content=chunk.content, uri=about.uri, title=about.title)
    document = result.unstructured_document_info
    # Google's order: segments only if there are no contexts; answers (deprecated) only if there are neither.
    passages = document.document_contexts or document.extractive_segments or document.extractive_answers
    return answers.DocumentReference(
        document=document.document,
        uri=document.uri,
        title=document.title,
        chunks=[answers.ChunkContent(content=one.content, page_identifier=one.page_identifier) for one in passages],
    )


# -- answers ----------------------------------------------------------------------------------------------------------


def encode_answer(answer: answers.Answer, *, name: str | None = None, enum_as_int: bool = False) -> Fields:
    """Return an answer, with its resource name in a session; raise ``InvalidAnswerError`` if it is invalid."""
    return write("Answer", _answer_fields(answer, name), enum_as_int=enum_as_int)


def encode_answer_response(
    answer: answers.Answer,
    *,
    parent: str | None = None,
    session: answers.Session | None = None,
    enum_as_int: bool = False,
) -> Fields:
    """Return the response of ``:answer``; an invalid answer is an ``InvalidAnswerError``.

    A session (after this turn) needs its parent, a data store or engine; without one the answer has no name.
    """
    kept = None if session is None or parent is None else session_fields(session, parent)
    name = None if kept is None or answer.id is None else f"{kept['name']}/answers/{answer.id}"
    fields = {"answer": _answer_fields(answer, name), "session": kept}
    return write("AnswerQueryResponse", fields, enum_as_int=enum_as_int)


def _answer_fields(answer: answers.Answer, name: str | None) -> Fields:
    """Return the fields of an ``Answer`` message, validated again because the answer may have been modified."""
    try:
        answers.Answer.model_validate(answer.model_dump(warnings="none"))
    except ValidationError as error:
        raise InvalidAnswerError(describe(error)) from error
    offsets = byte_offsets(answer.text)
    shown = answer.model_dump(
        include={"state", "grounding_score", "related_questions", "safety_ratings", "query_classifications"}
    )
    classified = shown.pop("queryClassifications")
    return {
        **shown,
        "name": name,
        "answerText": answer.text,
        "citations": [_claim(one, offsets) for one in answer.citations],
        "groundingSupports": [
            {**_claim(one, offsets), "groundingScore": one.score, "groundingCheckRequired": one.check_required}
            for one in answer.grounding_supports
        ],
        "references": [_reference(one) for one in answer.references],
        "steps": _steps(answer.steps),
        "queryUnderstandingInfo": {"queryClassificationInfo": classified} if classified else None,
        "answerSkippedReasons": answer.skipped_reasons,
        "createTime": answer.created_at,
        "completeTime": answer.completed_at,
    }


def _claim(claim: answers.Citation, offsets: Sequence[int]) -> Fields:
    return {
        "startIndex": offsets[claim.start],
        "endIndex": offsets[claim.end],
        "sources": [{"referenceId": str(source)} for source in claim.sources],
    }


def _reference(reference: answers.AnswerReference) -> Fields:
    document = reference.model_dump(include=_DOCUMENT)
    if isinstance(reference, answers.StructuredReference):
        return {"structuredDocumentInfo": {**document, "structData": plain(reference.data) or None}}
    document["structData"] = plain(reference.metadata) or None
    if isinstance(reference, answers.ChunkReference):
        metadata = {**document, "pageIdentifier": reference.page_identifier}
        return {"chunkInfo": {**reference.model_dump(include=_CHUNK), "documentMetadata": metadata}}
    return {"unstructuredDocumentInfo": {**document, "chunkContents": [one.model_dump() for one in reference.chunks]}}


def _steps(steps: Sequence[answers.AnswerStep]) -> list[Fields]:
    return [
        {
            **step.model_dump(exclude={"actions"}),
            "actions": [
                {
                    "searchAction": None if action.query is None else {"query": action.query},
                    "observation": None
                    if action.results is None
                    else {"searchResults": [*map(_found, action.results)]},
                }
                for action in step.actions
            ],
        }
        for step in steps
    ]


def _found(result: answers.SearchObservation) -> Fields:
    return {
        **result.model_dump(include=_DOCUMENT),
        "snippetInfo": [{"snippet": found.snippet, "snippetStatus": found.status} for found in result.snippets],
        "chunkInfo": [chunk.model_dump(include=_CHUNK) for chunk in result.chunks],
        "structData": plain(result.metadata) or None,
    }


def session_fields(session: answers.Session, parent: str) -> Fields:
    """Return the fields of a ``Session`` message for ``write``; turns include their whole answers if loaded."""
    name = f"{parent}/sessions/{session.id}"
    return {
        **session.model_dump(
            include={"display_name", "state", "user_pseudo_id", "labels", "is_pinned"}, warnings=False
        ),
        "name": name,
        "turns": [
            {
                "query": {"queryId": turn.query_id, "text": turn.query},
                "answer": (answer := f"{name}/answers/{turn.answer_id}"),
                "queryConfig": turn.query_config,
                "detailedAnswer": None if turn.answer is None else _answer_fields(turn.answer, answer),
            }
            for turn in session.turns
        ],
        "startTime": session.started_at,
        "endTime": session.ended_at,
    }


class AnswerStream:
    """Encoder of a streamed answer, piece by piece, in the order of ``AnswerPiece``; a session needs its ``parent``."""

    def __init__(self, *, parent: str | None = None, enum_as_int: bool = False) -> None:
        self._parent, self._enum_as_int = parent, enum_as_int
        self._opened = self._closed = False
        self._offsets = [0]  # byte offset of each character of the text so far, and its length

    def piece(self, piece: answers.AnswerPiece) -> bytes:
        """Return the bytes to send for a piece, none for an empty piece; the whole answer closes the array.

        Raises ``InvalidAnswerError`` for a citation of text that was not sent, and for a whole answer that is
        unfinished or invalid.
        """
        if isinstance(piece, answers.WholePiece):
            return self._whole(piece)
        fields: Fields
        match piece:
            case answers.StepsPiece():
                fields = {"steps": _steps(piece.steps)}
            case answers.ReferencesPiece():
                fields = {"references": [_reference(one) for one in piece.references]}
            case answers.TextPiece():
                self._offsets += [self._offsets[-1] + offset for offset in byte_offsets(piece.text)[1:]]
                fields = {"answerText": piece.text}
            case answers.CitationPiece():
                if piece.citation.end >= len(self._offsets):
                    raise InvalidAnswerError(f"citations.0.end: only {len(self._offsets) - 1} characters were sent")
                fields = {"citations": [_claim(piece.citation, self._offsets)]}
        if not any(fields.values()):
            return b""
        answer = {"state": answers.AnswerState.STREAMING, **fields}
        return self._element(write("AnswerQueryResponse", {"answer": answer}, enum_as_int=self._enum_as_int))

    def fail(self) -> bytes:
        """Return the bytes that end the stream with state FAILED; empty if the array is already closed."""
        failed = answers.Answer(state=answers.AnswerState.FAILED)
        return b"" if self._closed else self._whole(answers.WholePiece(answer=failed))

    def _whole(self, piece: answers.WholePiece) -> bytes:
        state = piece.answer.state
        if state not in (answers.AnswerState.SUCCEEDED, answers.AnswerState.FAILED):
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
        found = 502 if isinstance(error, SynthesisError) else error.status_code or status
        found = 504 if isinstance(error, TimeoutError) else _NEAREST.get(found, found)
        status = found if found in _STATUS else status
    return status, [{"error": {"code": status, "message": text, "status": _STATUS[status], "details": details}}]


# -- sessions ----------------------------------------------------------------------------------------------------------


def decode_create_session(body: object) -> answers.SessionChanges:
    """Parse the body of CreateSession; raise ``InvalidRequestError`` if it is invalid or has turns."""
    sent = read("Session", body)
    if sent.turns:
        raise InvalidRequestError("session.turns: turns are made by answering, not sent")
    return _changes(sent, _CHANGEABLE)


def decode_update_session(body: object, update_mask: str = "") -> answers.SessionChanges:
    """Parse the body of UpdateSession, a session, and the names of the fields to change, in either spelling.

    Without names all changeable fields are changed, and those absent from the body reset to their defaults, as in
    Google's service. Raises ``InvalidRequestError`` for an invalid body and for fields that can't be changed.
    """
    sent = read("Session", body)
    spellings = {to_camel(name): name for name in _CHANGEABLE}
    changed = [spellings.get(name.strip(), name.strip()) for name in update_mask.split(",") if name.strip()]
    if wrong := [name for name in changed if name not in _CHANGEABLE]:
        known = ", ".join(_CHANGEABLE)
        raise InvalidRequestError(f"updateMask: {wrong[0][:60]!r} can't be changed; it can hold {known}")
    return _changes(sent, changed or _CHANGEABLE)


def _changes(sent: Untyped, changed: Sequence[str]) -> answers.SessionChanges:
    fields = {name: list(sent.labels) if name == "labels" else getattr(sent, name) for name in changed}
    return answers.SessionChanges(**fields)


def decode_list_sessions(params: Mapping[str, object]) -> answers.SessionQuery:
    """Parse the query parameters of ListSessions; raise ``InvalidRequestError`` that names an invalid one."""
    sent = read("ListSessionsRequest", dict(params))
    query = answers.SessionQuery(
        page_size=min(sent.page_size or DEFAULT_PAGE, MAX_PAGE),
        page_token=sent.page_token or None,
        filters=parse_session_filter(sent.filter, _our_condition),
    )
    if sent.order_by.strip():
        query.order_by = [_order(part) for part in sent.order_by.split(",")]
    return query


def _our_condition(sent: Condition) -> Condition:
    if sent.key not in _KEYS:
        known = ", ".join(_KEYS)
        raise InvalidRequestError(f"filter: there is no field {sent.key[:60]!r}; sessions are filtered by {known}")
    values = sent.values
    if sent.key == "state":
        states = names.message_class("Session").DESCRIPTOR.fields_by_name["state"].enum_type.values_by_name
        if unknown := [value for value in values if value not in states]:
            raise InvalidRequestError(f"filter: Session.State has no value {str(unknown[0])[:60]!r}")
        values = [str(member(answers.SessionState, states[value].number) or "") for value in values]
    value = values if isinstance(sent.value, list) else values[0]
    is_any = (sent.operator, sent.key) == (FilterOperator.IN, "labels")
    return Condition(key=_KEYS[sent.key], operator=FilterOperator.ANY if is_any else sent.operator, value=value)


def _order(text: str) -> answers.SessionOrder:
    name, *direction = text.split() or [""]
    if name not in _ORDERS or direction not in ([], ["asc"], ["desc"]):
        known, found = ", ".join(_ORDERS), " ".join(text.split())[:60]
        raise InvalidRequestError(f"orderBy: can't read {found!r}; write one of {known}, with or without desc")
    return answers.SessionOrder.model_validate({"key": _ORDERS[name], "descending": direction == ["desc"]})


def wants_answer_details(params: Mapping[str, str]) -> bool:
    """Return whether GetSession asks for whole answers; raise ``InvalidRequestError`` if unclear."""
    sent = params.get("includeAnswerDetails", params.get("include_answer_details", ""))
    if sent.lower() not in ("true", "1", "false", "0", ""):
        raise InvalidRequestError(f"includeAnswerDetails: {sent[:20]!r} is neither true nor false")
    return sent.lower() in ("true", "1")


def encode_session(session: answers.Session, parent: str, *, enum_as_int: bool = False) -> Fields:
    """Return a session; turns include loaded answers. Raise ``InvalidAnswerError`` if one is invalid."""
    return write("Session", session_fields(session, parent), enum_as_int=enum_as_int)


def encode_session_page(page: answers.SessionPage, parent: str, *, enum_as_int: bool = False) -> Fields:
    """Return the response of ListSessions as JSON data."""
    sessions = [session_fields(session, parent) for session in page.sessions]
    fields = {"sessions": sessions, "nextPageToken": page.next_page_token or ""}
    return write("ListSessionsResponse", fields, enum_as_int=enum_as_int)


# -- checks and ranking ------------------------------------------------------------------------------------------------


def decode_check_grounding(body: object, *, grounding_config: str | None = None) -> grounding.GroundingQuery:
    """Parse a request of ``:check``; raise ``InvalidRequestError`` if invalid or beyond Google's limits."""
    sent = read("CheckGroundingRequest", body)
    if name := grounding_config or sent.grounding_config:
        names.check_config_name(name, "groundingConfig")
    if not sent.answer_candidate.strip():
        raise InvalidRequestError("answerCandidate: an answer to check is needed")
    tokens = grounding.answer_tokens(sent.answer_candidate)
    if tokens > grounding.MAX_ANSWER_TOKENS:
        raise InvalidRequestError(
            f"answerCandidate: {tokens} tokens; at most {grounding.MAX_ANSWER_TOKENS} are checked"
        )
    spec = sent.grounding_spec
    return grounding.GroundingQuery(
        answer=sent.answer_candidate,
        facts=[grounding.Fact(text=fact.fact_text, attributes=dict(fact.attributes)) for fact in sent.facts],
        citation_threshold=spec.citation_threshold
        if spec.HasField("citation_threshold")
        else grounding.CITATION_THRESHOLD,
        claim_scores=spec.enable_claim_level_score,
    )


def encode_check_grounding(query: grounding.GroundingQuery, ledger: grounding.GroundingLedger) -> Fields:
    """Return the response of ``:check`` as JSON data; a support's ``reference_id`` is the index of the fact.

    Raises ``InvalidAnswerError`` if the answer does not contain a claim's text at the claim's position.
    """
    facts = [str(index) for index in range(len(query.facts))]
    supports = answers.ledger_supports(ledger, facts, threshold=query.citation_threshold)
    chunks: dict[tuple[int, str], int] = {}
    offsets = byte_offsets(query.answer)
    claims = []
    for position, (claim, support) in enumerate(zip(ledger.claims, supports, strict=True)):
        if claim.span.of(query.answer) != claim.text:
            raise InvalidAnswerError(f"claims[{position}].startPos: the answer does not say {claim.text[:60]!r} there")
        quotes = {one.reference_id: one.quote for one in reversed(claim.supports)}
        cited = [(source, quotes[str(source)]) for source in support.sources]
        claims.append(
            {
                "claimText": claim.text,
                "startPos": offsets[claim.span.start],
                "endPos": offsets[claim.span.end],
                "citationIndices": [chunks.setdefault(chunk, len(chunks)) for chunk in cited],
                "groundingCheckRequired": claim.check_required,
                "score": claim.score if query.claim_scores else None,
            }
        )
    cited_chunks = [{"chunkText": quote, "source": str(source)} for source, quote in chunks]
    fields = {"citedChunks": cited_chunks, "claims": claims, "supportScore": ledger.grounding_score}
    return write("CheckGroundingResponse", fields)


def decode_rank(body: object, *, ranking_config: str | None = None) -> grounding.RankQuery:
    """Parse a request of ``:rank``; raise ``InvalidRequestError`` if it is invalid, or has no records or empty ones."""
    sent = read("RankRequest", body)
    if name := ranking_config or sent.ranking_config:
        names.check_config_name(name, "rankingConfig")
    for position, record in enumerate(sent.records):
        if not record.title and not record.content:
            raise InvalidRequestError(f"records.{position}: a title or content is needed")
    if not sent.records:
        raise InvalidRequestError("records: records to rank are needed")
    return grounding.RankQuery(
        query=sent.query,
        records=[grounding.RankRecord(id=one.id, title=one.title, content=one.content) for one in sent.records],
        top_n=sent.top_n or None,
        model=sent.model or DEFAULT_RANKER,
        ids_only=sent.ignore_record_details_in_response,
    )


def encode_rank(query: grounding.RankQuery, records: Sequence[grounding.RankRecord]) -> Fields:
    """Return the response of ``:rank`` as JSON data; ``records`` have their scores, best first (``search.rerank``)."""
    shown = {"id", "score"} if query.ids_only else {"id", "score", "title", "content"}
    return write("RankResponse", {"records": [one.model_dump(include=shown) for one in records[: query.top_n]]})
