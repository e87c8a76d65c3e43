"""Google's session methods (Discovery Engine v1): create, get, update and list requests in, sessions out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.filters import Condition, FilterGroup, FilterNode
from llama_index_agentic_kb.schema.sessions import (
    Session,
    SessionChanges,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionState,
    Turn,
)
from llama_index_agentic_kb.wire.google_answer_resource import encode_answer
from llama_index_agentic_kb.wire.google_enums import SESSION_STATE
from llama_index_agentic_kb.wire.google_fields import Flag, Int32, Text, WireMessage, at_most, enum, load
from llama_index_agentic_kb.wire.google_filter import parse_session_filter
from llama_index_agentic_kb.wire.google_names import Parent, SessionName
from llama_index_agentic_kb.wire.google_values import clean, message, timestamp

__all__ = [
    "answer_name",
    "decode_create_session",
    "decode_list_sessions",
    "decode_update_session",
    "encode_session",
    "encode_session_page",
    "wants_answer_details",
]

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


class _Session(WireMessage):
    """What a client may say of a session; what only the service sets is read and let go."""

    name: Text = ""
    display_name: Text = ""
    state: Annotated[SessionState | None, enum(SESSION_STATE)] = None
    user_pseudo_id: Annotated[Text, at_most(128)] = ""
    turns: list[Any] = Field(default_factory=list)
    labels: list[Text] = Field(default_factory=list)
    start_time: Text = ""
    end_time: Text = ""
    is_pinned: Flag = False


class _ListSessionsRequest(WireMessage):
    parent: Text = ""
    page_size: Annotated[Int32, Field(ge=0)] = 0
    page_token: Text = ""
    filter: Text = ""
    order_by: Text = ""


def decode_create_session(body: Any) -> SessionChanges:
    """Read the body of CreateSession: the new session's display name, labels, pin and user.

    Raises:
        InvalidRequestError: It is no session, or holds turns: those come from answering.
    """
    sent = _Session.parse(load(body))
    if sent.turns:
        raise InvalidRequestError("session.turns: turns are made by answering, not sent")
    return _changes(sent, _CHANGEABLE)


def decode_update_session(body: Any, update_mask: str = "") -> SessionChanges:
    """Read the body of UpdateSession.

    Args:
        body: The session.
        update_mask: Names of the fields to change, separated by commas, in either spelling. Empty changes every field
            that can be changed, those that the body leaves out to their defaults (as Google's says).

    Raises:
        InvalidRequestError: The mask names a field that can't be changed.
    """
    sent = _Session.parse(load(body))
    names = [_snake(name.strip()) for name in update_mask.split(",") if name.strip()]
    for name in names:
        if name not in _CHANGEABLE:
            raise InvalidRequestError(
                f"updateMask: {name[:60]!r} can't be changed; it can hold {', '.join(_CHANGEABLE)}"
            )
    return _changes(sent, names or _CHANGEABLE)


def _changes(sent: _Session, names: Any) -> SessionChanges:
    return SessionChanges(**{name: getattr(sent, name) for name in names})


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def decode_list_sessions(params: Mapping[str, Any]) -> SessionQuery:
    """Read the query parameters of ListSessions (``pageSize``, ``pageToken``, ``filter``, ``orderBy``).

    Raises:
        InvalidRequestError: One can't be read; the message names it.
    """
    sent = _ListSessionsRequest.parse(dict(params))
    filters = parse_session_filter(sent.filter, _KEYS, lists=("labels",))
    if filters is not None:
        filters = _ours(filters)
    order = [_order(part.split()) for part in sent.order_by.split(",")] if sent.order_by.strip() else None
    query = SessionQuery(
        page_size=min(sent.page_size or DEFAULT_PAGE, MAX_PAGE), page_token=sent.page_token or None, filters=filters
    )
    return query if order is None else query.model_copy(update={"order_by": order})


def _ours(tree: FilterNode) -> FilterNode:
    """Put our names of states in place of Google's."""
    if isinstance(tree, FilterGroup):
        return FilterGroup(logic=tree.logic, filters=[_ours(child) for child in tree.filters])
    if tree.key != "state":
        return tree
    values = [_state(value) for value in tree.values]
    return Condition(key="state", operator=tree.operator, value=values if isinstance(tree.value, list) else values[0])


def _state(value: Any) -> str:
    try:
        return str(SESSION_STATE.decode(value) or "")
    except ValueError as error:
        raise InvalidRequestError(f"filter: {error}") from None


def _order(words: list[str]) -> SessionOrder:
    name, *direction = words or [""]
    if name not in _ORDERS or direction not in ([], ["asc"], ["desc"]):
        raise InvalidRequestError(
            f"orderBy: can't read {' '.join(words)[:60]!r}; write one of {', '.join(_ORDERS)}, with or without desc"
        )
    return SessionOrder.model_validate({"key": _ORDERS[name], "descending": direction == ["desc"]})


def wants_answer_details(params: Mapping[str, str]) -> bool:
    """Tell whether GetSession asks for whole answers (``includeAnswerDetails=true``).

    Raises:
        InvalidRequestError: It is neither true nor false.
    """
    given = params.get("includeAnswerDetails", params.get("include_answer_details", ""))
    if given.lower() not in _BOOLEANS:
        raise InvalidRequestError(f"includeAnswerDetails: {given[:20]!r} is neither true nor false")
    return _BOOLEANS[given.lower()]


def answer_name(answer: Answer, parent: Parent | None, session: Session | None) -> str | None:
    """Give an answer's resource name; None where no session keeps it."""
    if parent is None or session is None or answer.id is None:
        return None
    return str(SessionName(parent, session.id).answer(answer.id))


def encode_session(session: Session, parent: Parent, *, enum_as_int: bool = False) -> dict[str, Any]:
    """Give a session's JSON; turns hold their whole answers where these were loaded.

    Args:
        session: The session.
        parent: Where it was made, for the names.
        enum_as_int: Whether enums are numbers.

    Raises:
        InvalidAnswerError: An answer breaks a rule of the contract.
    """
    name = SessionName(parent, session.id)
    return message(
        {
            "name": str(name),
            "displayName": clean(session.display_name),
            "state": SESSION_STATE.encode(session.state, as_int=enum_as_int),
            "userPseudoId": clean(session.user_pseudo_id),
            "turns": [_turn(turn, name, enum_as_int=enum_as_int) for turn in session.turns],
            "labels": [clean(label) for label in session.labels],
            "isPinned": session.is_pinned,
        },
        {"startTime": timestamp(session.started_at), "endTime": timestamp(session.ended_at)},
    )


def _turn(turn: Turn, session: SessionName, *, enum_as_int: bool) -> dict[str, Any]:
    name = str(session.answer(turn.answer_id))
    detailed = None if turn.answer is None else encode_answer(turn.answer, name=name, enum_as_int=enum_as_int)
    query = message({"queryId": clean(turn.query_id)}, {"text": clean(turn.query)})
    config = {clean(key): clean(value) for key, value in turn.query_config.items()}
    return message({"query": query, "answer": name, "queryConfig": config}, {"detailedAnswer": detailed})


def encode_session_page(page: SessionPage, parent: Parent, *, enum_as_int: bool = False) -> dict[str, Any]:
    """Give the response of ListSessions."""
    sessions = [encode_session(session, parent, enum_as_int=enum_as_int) for session in page.sessions]
    return message({"sessions": sessions, "nextPageToken": page.next_page_token or ""})
