"""Filters as OData text: a grammar for the subset of ``$filter`` that has a meaning here, and its writer.

    (category eq 'a''b' or year ge 1969) and not (public eq false) and tags/any(t: t eq 'x' or t eq 'y')

The subset is Azure AI Search's (its OData expression syntax reference), with the ``in`` of OData 4.01:

* ``eq ne gt ge lt le`` of a field and a value, in either order; a field alone is ``field eq true``.
* ``and``, ``or``, ``not`` (which takes what follows it: ``not a eq 1`` is ``not (a eq 1)``), parentheses.
* ``field in ('a', 'b')`` and ``search.in(field, 'a,b', ',')``: by default at commas and spaces, else at each character
  of the third argument.
* ``list/any(x: x eq 'a' or x in ('b', 'c'))``, ``list/any(x: search.in(x, 'a,b'))``, ``list/any()``.
* ``field ne null`` (and ``list/any()``): the key is there. ``field eq null`` is refused: a filter never lets a
  document through for what is not known of it.
* Text in single quotes, a quote doubled; whole and decimal numbers; ``true`` and ``false``; dates and date-times
  (``2024-01-31``, ``2024-01-31T12:00:00Z``), which are compared as text, as metadata keep them: write them in the form
  that the store has.

``a/b`` is the metadata key "a/b"; keys that are no OData names stand in square brackets, ``[file name]``, with "]"
doubled (an extension, T-SQL's form).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.filters import (
    Condition,
    FilterLogic,
    FilterNode,
    FilterOperator,
    Scalar,
)
from llama_index_agentic_kb.schema.odata_grammar import MAX_VALUES, RESERVED, RefusedError, parser, place

__all__ = ["MAX_DEPTH", "MAX_LENGTH", "MAX_TERMS", "MAX_VALUES", "parse_odata", "to_odata"]

MAX_LENGTH: Final = 65_536
"""Characters of a filter."""
MAX_DEPTH: Final = 32
"""Parentheses inside each other."""
MAX_TERMS: Final = 1_000
"""Fields and values that are written in a filter."""
_OPENS: Final = frozenset({"LPAR", "_ANY"})
_TERMS: Final = frozenset({"PATH", "STRING", "DATE", "NUMBER", "BOOLEAN", "NULL"})
_TOLD: Final[Mapping[str, str]] = {
    "PATH": "a field",
    **dict.fromkeys(("STRING", "DATE", "NUMBER", "BOOLEAN", "NULL"), "a value ('text', 1, 1.5, true, 2024-01-31)"),
    "OPERATOR": "a comparison (eq, ne, gt, ge, lt, le)",
    "_IN": "in",
    "_ANY": "/any(",
    "_AND": "and",
    "_OR": "or",
    "_NOT": "not",
    "_SEARCH_IN": "search.in",
    "LPAR": '"("',
    "RPAR": '")"',
    "COMMA": '","',
    "COLON": '":"',
    "$END": "the end",
}
_HINTS: Final[tuple[tuple[str, str], ...]] = (
    (r"[\"`\u2018-\u201f]", "text stands in single quotes: 'acme'"),
    (r"'|\w+'", "a string is closed by a single quote, and a quote inside it is doubled: 'it''s'"),
    (r"/all\s*\(", "all is not supported: write not field/any(...)"),
    (r"\.?\w*\s?\(", "search.in and any are the only functions"),
    (r"\.[0-9]", "a number has a digit before its point: 0.5"),
    (r"[=!<>&|]", "operators are words: eq, ne, gt, ge, lt, le, and, or, not"),
)
_NAME: Final = re.compile(r"([^\W\d]\w*)(?:/[^\W\d]\w*)*")


def parse_odata(text: str) -> FilterNode:
    """Read a filter that is written as OData text; see the module for what is understood.

    Time is linear in the length of the text, whatever it holds.

    Raises:
        InvalidRequestError: It is no such filter, or is longer or deeper than the limits here; the message tells the
            place, what was found there, and what would do.
    """
    if not text.strip():
        raise InvalidRequestError("OData filter: it is empty; leave it out to search everything")
    if len(text) > MAX_LENGTH:
        raise InvalidRequestError(f"OData filter: {len(text)} characters; at most {MAX_LENGTH} are read")
    try:
        return _parse(text)
    except RefusedError as error:
        raise InvalidRequestError(f"OData filter, character {error.position + 1}: {error}") from None
    except ValidationError as error:  # what no condition can hold, such as the key "$or"
        raise InvalidRequestError(f"OData filter: {describe(error)}") from None


def _parse(text: str) -> FilterNode:
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken  # noqa: PLC0415 (lark is loaded at first use)

    parsing: Any = parser().parse_interactive(text)
    depth = terms = 0
    token = None
    try:
        for token in parsing.iter_parse():
            depth += (token.type in _OPENS) - (token.type == "RPAR")
            terms += token.type in _TERMS
            if depth > MAX_DEPTH:
                raise RefusedError(f"at most {MAX_DEPTH} parentheses may stand inside each other", place(token))
            if terms > MAX_TERMS:
                raise RefusedError(f"at most {MAX_TERMS} terms are read; use search.in for lists", place(token))
        tree: FilterNode = parsing.feed_eof(token)
    except UnexpectedToken as error:
        position = len(text) if error.token.type == "$END" else place(error.token)
        raise _unexpected(text, position, parsing.accepts()) from None
    except UnexpectedCharacters as error:
        at: Any = error.pos_in_stream  # its annotation says None
        raise _unexpected(text, at, parsing.accepts()) from None
    return tree


def _unexpected(text: str, position: int, expected: set[str]) -> RefusedError:
    """Tell what stands at a place, what could stand there, and what was probably meant."""
    if "OPERATOR" not in expected and {"PATH", "NULL"} <= expected:
        expected = expected - {"PATH"}  # the grammar knows it there only for a better message
    wanted = ", ".join(dict.fromkeys(told for name, told in _TOLD.items() if name in expected))
    found = re.match(r"\w{1,30}|/?\w{0,30}\s?\(|\S", text[position : position + 40])
    if found is None:
        return RefusedError(f"the filter ends, expected: {wanted}", position)
    rest = text[position - 1 :] if position and text[position - 1] == "'" else text[position:]
    hint = next((f"; {hint}" for pattern, hint in _HINTS if re.match(pattern, rest)), "")
    if not hint and found[0] in RESERVED and "PATH" in expected:
        hint = f"; a field of this name stands in brackets: [{found[0]}]"
    return RefusedError(f"found {found[0]!r}, expected: {wanted}{hint}", position)


def to_odata(tree: FilterNode) -> str:
    """Write a filter as OData text, for accounts and contracts; ``parse_odata`` reads it with the same meaning."""
    if isinstance(tree, Condition):
        return _condition(tree)
    parts = [to_odata(child) for child in tree.filters]
    if tree.logic is FilterLogic.NOT:
        inner = parts[0] if len(parts) == 1 else " or ".join(parts)
        grouped = len(parts) == 1 and inner.startswith("(")  # and so ends with the same parenthesis
        return f"not {inner}" if grouped else f"not ({inner})"
    return parts[0] if len(parts) == 1 else f"({f' {tree.logic.value} '.join(parts)})"


def _condition(condition: Condition) -> str:
    key, operator = _field(condition.key), condition.operator
    if operator is FilterOperator.EXISTS:
        return f"{key} ne null"
    if not isinstance(condition.value, list):
        return f"{key} {operator.value} {_literal(condition.value)}"
    name = "x" if operator is FilterOperator.ANY else key
    equal = " or ".join(f"{name} eq {_literal(value)}" for value in condition.value)
    if operator is FilterOperator.ANY:
        return f"{key}/any(x: {equal})"
    if operator is FilterOperator.NIN:
        return f"not ({equal})"
    return equal if len(condition.value) == 1 else f"({equal})"


def _field(key: str) -> str:
    name = _NAME.fullmatch(key)
    return key if name and name[1] not in RESERVED else f"[{key.replace(']', ']]')}]"


def _literal(value: Scalar) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)
