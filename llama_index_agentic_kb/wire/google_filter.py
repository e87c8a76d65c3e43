r"""Parser of Google's filter text into filter trees.

    category: ANY("persona_A", "it\"s") AND (year: IN(1969, 1972e) OR score >= 0.5) AND NOT date < "2024-01-31"

* ``field: ANY("a", "b")``: the field equals one of the texts or, if it is a list (a session's labels), has an item
  that does.
* ``field: IN(lower, upper)``: a range; ``*`` is an open end. A bound may end in ``i`` (inclusive) or ``e``
  (exclusive); by default the lower bound is inclusive and the upper one exclusive.
* ``< <= > >= =`` between a field and a number, a quoted date, ``true`` or ``false``.
* ``NOT`` or ``-`` before an expression, ``AND``, ``OR``, parentheses. ``AND`` mixed with ``OR`` without parentheses is
  refused: Google does not document their precedence, and a guess could change the filter.
* ``GEO_DISTANCE`` is refused.

Session filters have the same syntax, plus unquoted words (``user_pseudo_id = some_id``) and ``labels:hidden``.
Source: the EBNF of Google's guide "Filter generic search for structured or unstructured data".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb.schema.filters import Condition, FilterGroup, FilterNode, FilterOperator, Scalar, all_of
from llama_index_agentic_kb.schema.odata import MAX_VALUES, RefusedError, Syntax, TreeBuilder, parse, to_number

if TYPE_CHECKING:
    from lark import Token

_GRAMMAR: Final = r"""
    ?start: expression
    ?expression: term | term (_AND term)+ -> all_of | term (_OR term)+ -> any_of
    ?term: factor | _NOT factor -> negation
    ?factor: "(" expression ")"
        | FIELD ":" _ANY "(" STRING ("," STRING)* ")" -> one_of
        | FIELD ":" _IN "(" BOUND "," BOUND ")" -> in_range
        | FIELD OPERATOR _value -> comparison
        %HAS%
    _value: STRING | NUMBER | BOOLEAN %WORD%

    _AND.2: /AND(?![\w.\-\/])/
    _OR.2: /OR(?![\w.\-\/])/
    _NOT.2: /NOT(?![\w.\-\/])|-/
    _ANY.2: /ANY(?=\s*\()/
    _IN.2: /IN(?=\s*\()/
    OPERATOR: /<=|>=|<|>|=/
    BOOLEAN.2: /(?:true|false)(?![\w.\-\/])/
    STRING: /"(?:[^"\\]|\\["\\])*"/
    NUMBER: /[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])/
    BOUND: /[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?[ie]?(?![\w.])|\*/
    FIELD: /(?!(?:AND|OR|NOT)(?![\w.\-\/])|GEO_DISTANCE)[^\W\d][\w.\-\/]*/
    %ignore /\s+/
"""
_OPERATORS: Final = dict(zip("= < <= > >=".split(), map(FilterOperator, "eq lt le gt ge".split()), strict=True))


class _GoogleBuilder(TreeBuilder):
    def one_of(self, tokens: list[Token]) -> FilterNode:
        field, *values = tokens
        if len(values) > MAX_VALUES:
            raise RefusedError(f"at most {MAX_VALUES} values are read", values[MAX_VALUES])
        return Condition(key=str(field), operator=FilterOperator.IN, value=[_value(value) for value in values])

    def in_range(self, tokens: list[Token]) -> FilterNode:
        field, lower, upper = tokens
        bounds = (
            Condition(key=str(field), operator=operator, value=to_number(token, token.rstrip("ie")))
            for token, operator in (
                (lower, FilterOperator.GT if lower.endswith("e") else FilterOperator.GE),
                (upper, FilterOperator.LE if upper.endswith("i") else FilterOperator.LT),
            )
            if token != "*"  # noqa: S105 (a token of a grammar)
        )
        return all_of(*bounds) or Condition(key=str(field), operator=FilterOperator.EXISTS, value=True)

    def comparison(self, tokens: list[Token]) -> FilterNode:
        field, operator, value = tokens
        return Condition(key=str(field), operator=_OPERATORS[operator], value=_value(value))


_DOCUMENTS: Final = Syntax(
    grammar=_GRAMMAR.replace("%HAS%", "").replace("%WORD%", ""),
    builder=_GoogleBuilder,
    words={
        "FIELD": "a field",
        "STRING": 'a text in double quotes ("acme")',
        "NUMBER": "a number",
        "BOOLEAN": "true, false",
        "BOUND": "a number or *",
        "OPERATOR": "one of < <= > >= = (not equal is NOT field = value)",
        "_ANY": 'ANY("...")',
        "_IN": "IN(lower, upper)",
        "_AND": "AND",
        "_OR": "OR",
        "_NOT": "NOT",
    },
    terms=frozenset({"FIELD", "STRING", "NUMBER"}),
    max_terms=(4 * MAX_VALUES, ""),
    hints=(
        (r"AND\b|OR\b", "AND beside OR is ambiguous without parentheses"),
        (r"GEO_DISTANCE", "GEO_DISTANCE is not supported: keep what is near to what as a field of its own"),
        (r"['\"]", r"text stands in double quotes, closed by another; only \" and \\ may follow a backslash"),
    ),
)
_BARE: Final = _GRAMMAR.replace("%HAS%", '| FIELD ":" (FIELD | STRING) -> one_of').replace("%WORD%", "| FIELD")
_SESSIONS: Final = replace(_DOCUMENTS, grammar=_BARE)


def parse_filter(text: str, field: str = "filter") -> FilterNode | None:
    """Return the tree of a document filter, None for an empty text; ``field`` is its path in errors."""
    return parse(_DOCUMENTS, text, field) if text.strip() else None


def parse_session_filter(text: str, ours: Callable[[Condition], Condition]) -> FilterNode | None:
    """Return the tree of a session filter, None for an empty text; ``ours`` converts Google's fields and values."""

    def written(tree: FilterNode) -> FilterNode:
        if isinstance(tree, Condition):
            return ours(tree)
        return FilterGroup(logic=tree.logic, filters=[written(child) for child in tree.filters])

    return written(parse(_SESSIONS, text, "filter")) if text.strip() else None


def _value(token: Token) -> Scalar:
    if token.type == "STRING":
        return re.sub(r"\\(.)", r"\1", token[1:-1])
    if token.type == "NUMBER":
        return to_number(token, str(token))
    return token == "true" if token.type == "BOOLEAN" else str(token)  # noqa: S105 (a token of a grammar)
