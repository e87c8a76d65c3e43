"""Google's session methods, CheckGrounding and Rank (Discovery Engine v1): request parsers and response encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llama_index_agentic_kb._text import byte_offsets
from llama_index_agentic_kb.errors import InvalidAnswerError, InvalidRequestError
from llama_index_agentic_kb.schema.answer import (
    Session,
    SessionChanges,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionState,
    ledger_supports,
)
from llama_index_agentic_kb.schema.filters import Condition, FilterGroup, FilterNode
from llama_index_agentic_kb.schema.grounding import (
    CITATION_THRESHOLD,
    MAX_ANSWER_TOKENS,
    Fact,
    GroundingLedger,
    GroundingQuery,
    RankQuery,
    RankRecord,
    answer_tokens,
)
from llama_index_agentic_kb.wire._proto import Fields, Untyped, member, message_class, read, write
from llama_index_agentic_kb.wire.google_answer import session_fields
from llama_index_agentic_kb.wire.google_filter import parse_session_filter
from llama_index_agentic_kb.wire.google_names import Parent, check_config_name

DEFAULT_RANKER: Final = "semantic-ranker-512@latest"
DEFAULT_PAGE: Final = 50
MAX_PAGE: Final = 1_000
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
_ORDERS: Final = {
    "update_time": "updated_at",
    "create_time": "started_at",
    "session_name": "id",
    "is_pinned": "is_pinned",
}
_CHANGEABLE: Final = ("display_name", "labels", "is_pinned", "user_pseudo_id")
_BOOLEANS: Final = {"true": True, "false": False, "": False, "1": True, "0": False}


# -- sessions ----------------------------------------------------------------------------------------------------------


def decode_create_session(body: object) -> SessionChanges:
    """Parse the body of CreateSession; raise ``InvalidRequestError`` if it is invalid or has turns."""
    sent = read("Session", body)
    if sent.turns:
        raise InvalidRequestError("session.turns: turns are made by answering, not sent")
    return _changes(sent, _CHANGEABLE)


def decode_update_session(body: object, update_mask: str = "") -> SessionChanges:
    """Parse the body of UpdateSession, a session, and the names of the fields to change, in either spelling.

    Without names all changeable fields are changed, and those absent from the body reset to their defaults, as in
    Google's service. Raises ``InvalidRequestError`` for an invalid body and for fields that can't be changed.
    """
    sent = read("Session", body)
    spellings = {field.json_name: field.name for field in sent.DESCRIPTOR.fields}
    names = [spellings.get(name.strip(), name.strip()) for name in update_mask.split(",") if name.strip()]
    for name in names:
        if name not in _CHANGEABLE:
            known = ", ".join(_CHANGEABLE)
            raise InvalidRequestError(f"updateMask: {name[:60]!r} can't be changed; it can hold {known}")
    return _changes(sent, names or _CHANGEABLE)


def _changes(sent: Untyped, names: Sequence[str]) -> SessionChanges:
    fields = {"labels": list(sent.labels)}
    return SessionChanges(**{name: fields.get(name, getattr(sent, name)) for name in names})


def decode_list_sessions(params: Mapping[str, object]) -> SessionQuery:
    """Parse the query parameters of ListSessions; raise ``InvalidRequestError`` that names an invalid one."""
    sent = read("ListSessionsRequest", dict(params))
    filters = parse_session_filter(sent.filter, _KEYS, lists=("labels",))
    query = SessionQuery(
        page_size=min(sent.page_size or DEFAULT_PAGE, MAX_PAGE),
        page_token=sent.page_token or None,
        filters=None if filters is None else _with_our_states(filters),
    )
    if sent.order_by.strip():
        query.order_by = [_order(part.split()) for part in sent.order_by.split(",")]
    return query


def _with_our_states(tree: FilterNode) -> FilterNode:
    if isinstance(tree, FilterGroup):
        return FilterGroup(logic=tree.logic, filters=[_with_our_states(child) for child in tree.filters])
    if tree.key != "state":
        return tree
    states = message_class("Session").DESCRIPTOR.fields_by_name["state"].enum_type.values_by_name
    values = []
    for value in tree.values:
        if value not in states:
            raise InvalidRequestError(f"filter: Session.State has no value {str(value)[:60]!r}")
        values.append(str(member(SessionState, states[value].number) or ""))
    return Condition(
        key="state", operator=tree.operator, value=[*values] if isinstance(tree.value, list) else values[0]
    )


def _order(words: list[str]) -> SessionOrder:
    name, *direction = words or [""]
    if name not in _ORDERS or direction not in ([], ["asc"], ["desc"]):
        known = ", ".join(_ORDERS)
        found = " ".join(words)[:60]
        raise InvalidRequestError(f"orderBy: can't read {found!r}; write one of {known}, with or without desc")
    return SessionOrder.model_validate({"key": _ORDERS[name], "descending": direction == ["desc"]})


def wants_answer_details(params: Mapping[str, str]) -> bool:
    """Return whether GetSession asks for whole answers; raise ``InvalidRequestError`` if unclear."""
    sent = params.get("includeAnswerDetails", params.get("include_answer_details", ""))
    if sent.lower() not in _BOOLEANS:
        raise InvalidRequestError(f"includeAnswerDetails: {sent[:20]!r} is neither true nor false")
    return _BOOLEANS[sent.lower()]


def encode_session(session: Session, parent: Parent, *, enum_as_int: bool = False) -> Fields:
    """Return a session; turns include loaded answers. Raise ``InvalidAnswerError`` if one is invalid."""
    return write("Session", session_fields(session, parent), enum_as_int=enum_as_int)


def encode_session_page(page: SessionPage, parent: Parent, *, enum_as_int: bool = False) -> Fields:
    """Return the response of ListSessions as JSON data."""
    fields = {
        "sessions": [session_fields(session, parent) for session in page.sessions],
        "nextPageToken": page.next_page_token or "",
    }
    return write("ListSessionsResponse", fields, enum_as_int=enum_as_int)


# -- checks and ranking ------------------------------------------------------------------------------------------------


def decode_check_grounding(body: object, *, grounding_config: str | None = None) -> GroundingQuery:
    """Parse a request of ``:check``; raise ``InvalidRequestError`` if invalid or beyond Google's limits."""
    sent = read("CheckGroundingRequest", body)
    if name := grounding_config or sent.grounding_config:
        check_config_name(name, "groundingConfig")
    if not sent.answer_candidate.strip():
        raise InvalidRequestError("answerCandidate: an answer to check is needed")
    tokens = answer_tokens(sent.answer_candidate)
    if tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequestError(f"answerCandidate: {tokens} tokens; at most {MAX_ANSWER_TOKENS} are checked")
    spec = sent.grounding_spec
    return GroundingQuery(
        answer=sent.answer_candidate,
        facts=[Fact(text=fact.fact_text, attributes=dict(fact.attributes)) for fact in sent.facts],
        citation_threshold=spec.citation_threshold if spec.HasField("citation_threshold") else CITATION_THRESHOLD,
        claim_scores=spec.enable_claim_level_score,
    )


def encode_check_grounding(query: GroundingQuery, ledger: GroundingLedger) -> Fields:
    """Return the response of ``:check`` as JSON data; a support's ``reference_id`` is the index of the fact.

    Raises ``InvalidAnswerError`` if the answer does not contain a claim's text at the claim's position.
    """
    facts = [str(index) for index in range(len(query.facts))]
    supports = ledger_supports(ledger, facts, threshold=query.citation_threshold)
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


def decode_rank(body: object, *, ranking_config: str | None = None) -> RankQuery:
    """Parse a request of ``:rank``; raise ``InvalidRequestError`` if it is invalid, or has no records or empty ones."""
    sent = read("RankRequest", body)
    if name := ranking_config or sent.ranking_config:
        check_config_name(name, "rankingConfig")
    for position, record in enumerate(sent.records):
        if not record.title and not record.content:
            raise InvalidRequestError(f"records.{position}: a title or content is needed")
    if not sent.records:
        raise InvalidRequestError("records: records to rank are needed")
    return RankQuery(
        query=sent.query,
        records=[RankRecord(id=one.id, title=one.title, content=one.content) for one in sent.records],
        top_n=sent.top_n or None,
        model=sent.model or DEFAULT_RANKER,
        ids_only=sent.ignore_record_details_in_response,
    )


def encode_rank(query: RankQuery, records: Sequence[RankRecord]) -> Fields:
    """Return the response of ``:rank`` as JSON data; ``records`` have their scores, best first (``grounding.rank``)."""
    shown = {"id", "score"} if query.ids_only else {"id", "score", "title", "content"}
    return write("RankResponse", {"records": [one.model_dump(include=shown) for one in records[: query.top_n]]})
