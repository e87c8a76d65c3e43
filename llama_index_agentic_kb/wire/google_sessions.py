"""Google's session methods (Discovery Engine v1): request parsers and session encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import (
    Session,
    SessionChanges,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionState,
)
from llama_index_agentic_kb.schema.filters import Condition, FilterGroup, FilterNode
from llama_index_agentic_kb.wire._proto import Fields, Untyped, member, message_class, read, write
from llama_index_agentic_kb.wire.google_answer import session_fields
from llama_index_agentic_kb.wire.google_filter import parse_session_filter
from llama_index_agentic_kb.wire.google_names import Parent

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
