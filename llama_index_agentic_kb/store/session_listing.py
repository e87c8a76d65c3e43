"""Session listing: filters and sort orders as SQL, and pagination.

Pages use keyset pagination instead of offsets: sessions created or deleted between two requests cause neither
duplicates nor gaps.
"""

from __future__ import annotations

import base64
import hashlib
import json
import operator as python_operator
from datetime import datetime
from typing import Any, Final, TypeAlias

from sqlalchemy import ColumnElement, Row, Select, and_, exists, false, literal, not_, or_, select, true

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import SessionOrder, SessionQuery, SessionState
from llama_index_agentic_kb.schema.filters import Condition, FilterLogic, FilterNode, FilterOperator, Scalar
from llama_index_agentic_kb.store.session_database import labels, microseconds, sessions

Clause: TypeAlias = ColumnElement[bool]

_MAX_INTEGER: Final = (1 << 63) - 1
_TIMES: Final = ("started_at", "updated_at")
_TEXTS: Final = ("id", "display_name", "user_pseudo_id")
_FILTERED: Final = (*_TEXTS, "state", "is_pinned", "labels", *_TIMES)
_ORDERED: Final = (FilterOperator.GT, FilterOperator.GE, FilterOperator.LT, FilterOperator.LE)
_KINDS: Final = {"is_pinned": bool, "started_at": int, "updated_at": int, "id": str}


def page(owner: str, query: SessionQuery) -> Select[Any]:
    """Return the SQL statement for a page of an owner's sessions, plus one row to detect a next page.

    Raises:
        InvalidRequestError: The filter uses an unknown field, operator or value type, or the page token is invalid or
            belongs to another filter or order.
    """
    order = _order(query)
    columns = (sessions.c[by.key].desc() if by.descending else sessions.c[by.key].asc() for by in order)
    wanted = (sessions.c.owner == owner, _filter(query.filters), _after(query, order))
    return select(sessions).where(*wanted).order_by(*columns).limit(query.page_size + 1)


def _filter(tree: FilterNode | None) -> Clause:
    if tree is None:
        return true()
    if isinstance(tree, Condition):
        return _condition(tree)
    parts = [_filter(child) for child in tree.filters]
    if tree.logic is FilterLogic.AND:
        return and_(*parts)
    return or_(*parts) if tree.logic is FilterLogic.OR else not_(or_(*parts))


def _condition(condition: Condition) -> Clause:
    key, operator = condition.key, condition.operator
    if key not in _FILTERED:
        raise InvalidRequestError(f"filters: sessions have no {key[:60]!r}; there are {', '.join(_FILTERED)}")
    if operator is FilterOperator.EXISTS:
        return _has_label(true()) if key == "labels" else true()
    if operator in (FilterOperator.IS_EMPTY, FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE):
        raise InvalidRequestError(f"filters: sessions are not filtered by {operator.value}")
    if operator in _ORDERED and key not in (*_TIMES, *_TEXTS):
        raise InvalidRequestError(f"filters: {key} is equal or not, it has no order")
    values = [_value(key, value) for value in condition.values]
    if key == "labels":
        found = _has_label(labels.c.label.in_(values))
        return not_(found) if operator in (FilterOperator.NE, FilterOperator.NIN) else found
    column: ColumnElement[Any] = literal(SessionState.IN_PROGRESS.value) if key == "state" else sessions.c[key]
    if operator in (FilterOperator.IN, FilterOperator.ANY):
        return column.in_(values)
    if operator is FilterOperator.NIN:
        return column.not_in(values)
    clause: Clause = getattr(python_operator, operator.value)(column, values[0])  # eq, ne, gt, ge, lt, le
    return clause


def _has_label(which: Clause) -> Clause:
    same = and_(labels.c.owner == sessions.c.owner, labels.c.session_id == sessions.c.id)
    return exists(select(labels.c.label).where(same, which))


def _value(key: str, value: Scalar) -> str | int:
    if key in _TIMES:
        try:
            return microseconds(datetime.fromisoformat(str(value)))
        except (ValueError, TypeError):  # TypeError: without a zone
            raise InvalidRequestError(
                f"filters: {key} is compared with a time such as 2024-01-31T12:00:00Z, found {str(value)[:40]!r}"
            ) from None
    if key == "is_pinned" and not isinstance(value, bool):
        raise InvalidRequestError(f"filters: is_pinned is true or false, found {str(value)[:40]!r}")
    return value if key == "is_pinned" and isinstance(value, bool) else str(value).replace("\x00", "\ufffd")


def _order(query: SessionQuery) -> list[SessionOrder]:
    """Return a query's sort order without duplicate fields, with the session id added as tie-breaker."""
    order = list({by.key: by for by in reversed(query.order_by)}.values())[::-1]
    return order if any(by.key == "id" for by in order) else [*order, SessionOrder(key="id")]


def next_token(query: SessionQuery, row: Row[Any]) -> str:
    """Return the token of the page that starts after a row."""
    values = [getattr(row, by.key) for by in _order(query)]
    return base64.urlsafe_b64encode(json.dumps([_digest(query), values]).encode()).decode().rstrip("=")


def _after(query: SessionQuery, order: list[SessionOrder]) -> Clause:
    """Return the SQL condition for rows after the query's page token; always true without a token."""
    if query.page_token is None:
        return true()
    clauses: list[Clause] = []
    equal: Clause = true()
    for by, value in zip(order, _token_values(query, query.page_token, order), strict=True):
        column = sessions.c[by.key]
        if isinstance(value, bool):  # PostgreSQL orders booleans, SQLAlchemy has no ">" for them that SQLite shares
            behind: Clause = (column == (not by.descending)) if value is by.descending else false()
        else:
            behind = column < value if by.descending else column > value
        clauses.append(and_(equal, behind))
        equal = and_(equal, column == value)
    return or_(*clauses)


def _token_values(query: SessionQuery, token: str, order: list[SessionOrder]) -> list[Any]:
    try:
        digest, values = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        kinds = [_KINDS[by.key] for by in order]
        good = digest == _digest(query) and [type(value) for value in values] == kinds
        good = good and all(abs(value) <= _MAX_INTEGER for value in values if isinstance(value, int))
        good = good and "\0" not in "".join(value for value in values if isinstance(value, str))
        json.dumps(values, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        raise InvalidRequestError("pageToken: it was not returned for this filter and order; ask for the first page")
    return list(values)


def _digest(query: SessionQuery) -> str:
    asked = query.model_dump_json(include={"filters", "order_by"}, fallback=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
