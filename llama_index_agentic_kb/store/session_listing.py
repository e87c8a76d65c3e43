"""Lists of sessions: filters and orders as SQL, and pages that go on after the last session of the page before.

A page begins behind a key, not at a number: sessions that are made or deleted between two pages neither repeat nor
hide others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import operator as python_operator
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, and_, exists, false, literal, not_, or_, select, true

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import SessionOrder, SessionQuery, SessionState
from llama_index_agentic_kb.schema.filters import Condition, FilterLogic, FilterNode, FilterOperator, Scalar
from llama_index_agentic_kb.store.session_tables import labels, microseconds, sessions

__all__ = ["after_page", "filter_clause", "next_token", "order_of", "ordering"]

_MAX_INTEGER: Final = (1 << 63) - 1
_TIMES: Final = ("started_at", "updated_at")
_TEXTS: Final = ("id", "display_name", "user_pseudo_id")
_FILTERED: Final = (*_TEXTS, "state", "is_pinned", "labels", *_TIMES)
_ORDERED: Final = (FilterOperator.GT, FilterOperator.GE, FilterOperator.LT, FilterOperator.LE)


def filter_clause(tree: FilterNode | None) -> ColumnElement[bool]:
    """Return the SQL of a filter of sessions; None lets all through.

    Raises:
        InvalidRequestError: It asks for a field that sessions don't have, or compares one with what it can't be.
    """
    if tree is None:
        return true()
    if isinstance(tree, Condition):
        return _condition(tree)
    parts = [filter_clause(child) for child in tree.filters]
    if tree.logic is FilterLogic.AND:
        return and_(*parts)
    return or_(*parts) if tree.logic is FilterLogic.OR else not_(or_(*parts))


def _condition(one: Condition) -> ColumnElement[bool]:
    if one.key not in _FILTERED:
        raise InvalidRequestError(f"filters: sessions have no {one.key[:60]!r}; there are {', '.join(_FILTERED)}")
    if one.operator is FilterOperator.EXISTS:
        return _has_label(None) if one.key == "labels" else true()
    if one.operator in _ORDERED and one.key not in (*_TIMES, *_TEXTS):
        raise InvalidRequestError(f"filters: {one.key} is equal or not, it has no order")
    if one.key == "labels":
        return _labelled(one)
    return _compare(_column(one.key), one.operator, [_value(one.key, value) for value in one.values])


def _labelled(one: Condition) -> ColumnElement[bool]:
    found = or_(*(_has_label(str(value)) for value in one.values))
    return not_(found) if one.operator in (FilterOperator.NE, FilterOperator.NIN) else found


def _has_label(label: str | None) -> ColumnElement[bool]:
    same = and_(labels.c.owner == sessions.c.owner, labels.c.session_id == sessions.c.id)
    return exists(select(labels.c.label).where(same if label is None else and_(same, labels.c.label == label)))


def _column(key: str) -> ColumnElement[Any]:
    return literal(SessionState.IN_PROGRESS.value) if key == "state" else sessions.c[key]


def _value(key: str, value: Scalar) -> Any:
    if key in _TIMES:
        return _time(key, value)
    if key == "is_pinned":
        if not isinstance(value, bool):
            raise InvalidRequestError(f"filters: is_pinned is true or false, found {str(value)[:40]!r}")
        return value
    return str(value).replace("\x00", "\ufffd")


def _time(key: str, value: Scalar) -> int:
    try:
        moment = datetime.fromisoformat(str(value))
        return microseconds(moment)
    except (ValueError, TypeError):
        raise InvalidRequestError(
            f"filters: {key} is compared with a time such as 2024-01-31T12:00:00Z, found {str(value)[:40]!r}"
        ) from None


def _compare(column: ColumnElement[Any], operator: FilterOperator, values: list[Any]) -> ColumnElement[bool]:
    if operator in (FilterOperator.IN, FilterOperator.ANY):
        return column.in_(values)
    if operator is FilterOperator.NIN:
        return column.not_in(values)
    clause: ColumnElement[bool] = getattr(python_operator, operator.value)(column, values[0])  # eq, ne, gt, ge, lt, le
    return clause


def order_of(query: SessionQuery) -> list[SessionOrder]:
    """Return a query's order, made total by the ids."""
    order = list({one.key: one for one in reversed(query.order_by)}.values())[::-1]
    return order if any(one.key == "id" for one in order) else [*order, SessionOrder(key="id")]


def ordering(order: Sequence[SessionOrder]) -> list[ColumnElement[Any]]:
    """Return the SQL of an order."""
    return [sessions.c[one.key].desc() if one.descending else sessions.c[one.key].asc() for one in order]


def next_token(query: SessionQuery, row: Row[Any]) -> str:
    """Return the token of the page that begins behind a row."""
    values = [getattr(row, one.key) for one in order_of(query)]
    return base64.urlsafe_b64encode(json.dumps([_digest(query), values]).encode()).decode().rstrip("=")


def after_page(query: SessionQuery) -> ColumnElement[bool]:
    """Return the SQL of what comes behind the page that a query's token ends.

    Raises:
        InvalidRequestError: The token is unknown, or of another filter or order.
    """
    if query.page_token is None:
        return true()
    order = order_of(query)
    values = _token_values(query, order)
    clauses: list[ColumnElement[bool]] = []
    equal: ColumnElement[bool] = true()
    for one, value in zip(order, values, strict=True):
        column = sessions.c[one.key]
        clauses.append(and_(equal, _behind(column, value, descending=one.descending)))
        equal = and_(equal, column == value)
    return or_(*clauses)


def _behind(column: ColumnElement[Any], value: Any, *, descending: bool) -> ColumnElement[bool]:
    if isinstance(value, bool):  # PostgreSQL orders booleans, SQLAlchemy has no ">" for them that SQLite shares
        return (column == (not descending)) if value is descending else false()
    behind: ColumnElement[bool] = column < value if descending else column > value
    return behind


def _token_values(query: SessionQuery, order: Sequence[SessionOrder]) -> list[Any]:
    token = query.page_token or ""
    kinds = {"is_pinned": bool, "started_at": int, "updated_at": int, "id": str}
    try:
        digest, values = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        good = len(values) == len(order)
        good = good and all(type(value) is kinds[one.key] for one, value in zip(order, values, strict=True))
        good = good and all(
            abs(value) <= _MAX_INTEGER if isinstance(value, int) else "\0" not in value for value in values
        )
        json.dumps(values, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, TypeError, RecursionError, binascii.Error):
        good, digest, values = False, "", []
    if not good or digest != _digest(query):
        raise InvalidRequestError("pageToken: it was not returned for this filter and order; ask for the first page")
    return list(values)


def _digest(query: SessionQuery) -> str:
    asked = query.model_dump_json(include={"filters", "order_by"}, fallback=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
