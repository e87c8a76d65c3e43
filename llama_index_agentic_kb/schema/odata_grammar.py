"""The grammar of OData filters, and what its rules build; ``schema.odata`` tells what they mean."""

from __future__ import annotations

import math
import re
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from llama_index_agentic_kb.schema.filters import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    Scalar,
    any_of,
)

if TYPE_CHECKING:
    from lark import Lark, Token

__all__ = ["MAX_VALUES", "RESERVED", "RefusedError", "parser", "place"]

MAX_VALUES: Final = 5_000
"""Values of one ``search.in``."""

RESERVED: Final = ("or", "and", "not", "in", "eq", "ne", "gt", "ge", "lt", "le", "true", "false", "null")
"""Words that are no fields, unless in brackets."""

_GRAMMAR: Final = r"""
    ?start: disjunction
    ?disjunction: conjunction | conjunction (_OR conjunction)+ -> any_of
    ?conjunction: term | term (_AND term)+ -> all_of
    ?term: atom | _NOT atom -> negation
    ?atom: "(" disjunction ")"
        | PATH -> truth
        | PATH OPERATOR _literal -> comparison
        | _literal OPERATOR PATH -> reversed_comparison
        | PATH OPERATOR NULL -> null_comparison
        | PATH OPERATOR PATH -> field_comparison
        | PATH _IN "(" _literal ("," _literal)* ")" -> one_of
        | search_in -> search_in_field
        | PATH _ANY ")" -> some_item
        | PATH _ANY PATH ":" items ")" -> any_item
    items: item (_OR item)*
    ?item: PATH OPERATOR _literal -> item_comparison
        | PATH _IN "(" _literal ("," _literal)* ")" -> item_one_of
        | search_in
        | "(" items ")"
    search_in: _SEARCH_IN "(" PATH "," STRING ["," STRING] ")"
    _literal: STRING | DATE | NUMBER | BOOLEAN

    _OR.2: /or(?!\w)/
    _AND.2: /and(?!\w)/
    _NOT.2: /not(?!\w)/
    _IN.2: /in(?!\w)/
    OPERATOR.2: /(?:eq|ne|g[te]|l[te])(?!\w)/
    BOOLEAN.2: /(?:true|false)(?!\w)/
    NULL.2: /null(?!\w)/
    _SEARCH_IN.3: /search\.in(?=\s*\()/
    _ANY: /\/any\s*\(/
    STRING: /'(?:[^']|'')*'/
    DATE.2: /[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9:.]+(?:Z|[+-][0-9:]+)?)?(?![\w.:+-])/
    NUMBER: /[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])/
    PATH: /(?!(?:%RESERVED%)(?!\w))[^\W\d]\w*(?:\/(?!(?:any|all)\s*\()[^\W\d]\w*)*/
        | /\[(?:[^\]]|\]\])+\]/
    %ignore /\s+/
""".replace("%RESERVED%", "|".join(RESERVED))

_FLIPPED: Final = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}
_INT64: Final = 2**63
_DIGITS: Final = 40

_Items: TypeAlias = "tuple[Token, list[Scalar]]"
"""A lambda's variable where it is compared, and what it may be equal to."""


class RefusedError(Exception):
    """What is wrong with the text, and the 0-based place."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@cache
def parser() -> Lark:
    """Build the parser, once: 0.2 s with the import of lark."""
    from lark import Lark  # noqa: PLC0415 (0.1 s, for those who send OData only)

    return Lark(_GRAMMAR, parser="lalr", transformer=_Builder())


class _Builder:
    """Makes the tree from the bottom up, while the text is parsed: nothing here is recursive.

    Methods are named for the grammar's rules, and take what those hold.
    """

    def any_of(self, trees: list[FilterNode]) -> FilterNode:
        return any_of(*trees)

    def all_of(self, trees: list[FilterNode]) -> FilterNode:
        return FilterGroup(logic=FilterLogic.AND, filters=trees)

    def negation(self, trees: list[FilterNode]) -> FilterNode:
        return FilterGroup(logic=FilterLogic.NOT, filters=trees)

    def truth(self, tokens: list[Token]) -> FilterNode:
        return Condition(key=_key(tokens[0]), value=True)

    def comparison(self, tokens: list[Token]) -> FilterNode:
        field, operator, value = tokens
        return Condition(key=_key(field), operator=FilterOperator(str(operator)), value=_value(value))

    def reversed_comparison(self, tokens: list[Token]) -> FilterNode:
        value, operator, field = tokens
        flipped = FilterOperator(_FLIPPED.get(str(operator), str(operator)))
        return Condition(key=_key(field), operator=flipped, value=_value(value))

    def null_comparison(self, tokens: list[Token]) -> FilterNode:
        field, operator, null = tokens
        if operator != "ne":
            raise RefusedError(
                f"{operator} null can't be asked: a filter lets nothing through for what is not known of it; "
                f"{field} ne null asks that there is a value",
                place(null),
            )
        return Condition(key=_key(field), operator=FilterOperator.EXISTS, value=True)

    def field_comparison(self, tokens: list[Token]) -> FilterNode:
        other = tokens[2]
        raise RefusedError(
            f"found {str(other)[:30]!r} where a value is expected; text stands in single quotes: 'acme', and fields "
            "can't be compared with each other",
            place(other),
        )

    def one_of(self, tokens: list[Token]) -> FilterNode:
        field, *values = tokens
        return Condition(key=_key(field), operator=FilterOperator.IN, value=[_value(value) for value in values])

    def search_in(self, tokens: list[Any]) -> _Items:
        """Split the list: by default at commas and spaces, else at each of the delimiters given."""
        field, values, delimiters = tokens
        marks = " ," if delimiters is None else str(_value(delimiters))
        text = str(_value(values))
        parts = re.split(f"[{re.escape(marks)}]", text, maxsplit=MAX_VALUES + 1) if marks else [text]
        parts = [part for part in parts if part]
        if not 1 <= len(parts) <= MAX_VALUES:
            raise RefusedError(f"search.in takes 1 to {MAX_VALUES} values", place(values))
        return field, list(parts)

    def search_in_field(self, children: list[_Items]) -> FilterNode:
        ((field, values),) = children
        return Condition(key=_key(field), operator=FilterOperator.IN, value=values)

    def some_item(self, tokens: list[Token]) -> FilterNode:
        return Condition(key=_key(tokens[0]), operator=FilterOperator.EXISTS, value=True)

    def any_item(self, children: list[Any]) -> FilterNode:
        field, variable, (compared, values) = children
        for one in compared:
            if one != variable:
                raise RefusedError(
                    f"found {str(one)[:30]!r}; inside any only its variable, {str(variable)[:30]!r}, is compared",
                    place(one),
                )
        return Condition(key=_key(field), operator=FilterOperator.ANY, value=values)

    def item_comparison(self, tokens: list[Token]) -> _Items:
        variable, operator, value = tokens
        if operator != "eq":
            raise RefusedError(
                f"found {str(operator)!r}; inside any only eq, in and search.in are known", place(operator)
            )
        return variable, [_value(value)]

    def item_one_of(self, tokens: list[Token]) -> _Items:
        variable, *values = tokens
        return variable, [_value(value) for value in values]

    def items(self, children: list[Any]) -> tuple[list[Token], list[Scalar]]:
        compared: list[Token] = []
        values: list[Scalar] = []
        for child_compared, child_values in children:
            compared += child_compared if isinstance(child_compared, list) else [child_compared]
            values += child_values
        return compared, values


def place(token: Token) -> int:
    """Give the 0-based place of a token."""
    return token.start_pos or 0


def _key(field: Token) -> str:
    return field[1:-1].replace("]]", "]") if field.startswith("[") else str(field)


def _value(token: Token) -> Scalar:
    if token.type == "STRING":
        return token[1:-1].replace("''", "'")
    if token.type == "BOOLEAN":
        return str(token) == "true"
    return _date(token) if token.type == "DATE" else _number(token)


def _date(token: Token) -> str:
    try:
        datetime.fromisoformat(token)
    except ValueError as error:
        raise RefusedError(f"{str(token)!r} is no date: {error}", place(token)) from None
    return str(token)


def _number(token: Token) -> int | float:
    if len(token) <= _DIGITS:  # reading very long numbers takes more than linear time
        whole = token.lstrip("+-").isdigit()
        number = int(token) if whole else float(token)
        if -_INT64 <= number < _INT64 if whole else math.isfinite(number):
            return number
    raise RefusedError(f"{str(token)[:30]!r} is too large or too long a number", place(token))
