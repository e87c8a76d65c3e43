"""Filters as OData text: a parser and a writer for the supported subset of ``$filter``; a parser of such languages.

    (category eq 'a''b' or year ge 1969) and not (public eq false) and tags/any(t: t eq 'x' or t eq 'y')

The subset is Azure AI Search's (its OData expression syntax reference), with the ``in`` of OData 4.01:

* ``eq ne gt ge lt le`` of a field and a value, in either order; a field alone is ``field eq true``.
* ``and``, ``or``, ``not`` (applied to the comparison after it: ``not a eq 1`` is ``not (a eq 1)``), parentheses.
* ``field in ('a', 'b')`` and ``search.in(field, 'a,b', ',')``: by default at commas and spaces, else at each character
  of the third argument.
* ``list/any(x: x eq 'a' or x in ('b', 'c'))``, ``list/any(x: search.in(x, 'a,b'))``, ``list/any()``.
* ``contains(field, 'a')``, and ``contains(tolower(field), 'a')`` for any letter case; ``isempty(field)`` (an extension)
  for a document in which the field is absent or empty.
* ``field ne null`` (and ``list/any()``): the key is present. ``field eq null`` is rejected; use ``isempty(field)`` to
  match documents without the field.
* Text in single quotes, a quote doubled; whole and decimal numbers; ``true`` and ``false``; dates and date-times
  (``2024-01-31``, ``2024-01-31T12:00:00Z``), which are compared as text: write them in the same format as in the
  metadata.

``a/b`` is the metadata key "a/b"; keys that are no OData names are written in square brackets, ``[file name]``, with
"]" doubled (an extension, in T-SQL's form).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pydantic import ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.filters import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    Scalar,
)

if TYPE_CHECKING:
    from lark import Lark, Token

MAX_LENGTH: Final = 65_536
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 5_000
MAX_TERMS: Final = 1_000
_INT64: Final = 2**63
_DIGITS: Final = 40
_SIGNS: Final = {"LPAR": "'('", "RPAR": "')'", "COMMA": "','", "COLON": "':'", "$END": "the end"}

# -- filter languages, also Google's (``wire.google_filter``); parsed in linear time -----------------------------------


class RefusedError(Exception):
    """A filter text is invalid at a token or a 0-based character position."""

    def __init__(self, message: str, place: Token | int) -> None:
        super().__init__(message)
        self.position = place if isinstance(place, int) else place.start_pos or 0


@dataclass(frozen=True)
class Syntax:
    """A filter language."""

    grammar: str
    builder: Callable[[], TreeBuilder]
    words: Mapping[str, str]  # name of each terminal in error messages, besides ``_SIGNS``
    terms: frozenset[str]  # terminals counted against ``max_terms``
    max_terms: tuple[int, str]  # maximum number of terms, and the remedy for the error message
    hints: Sequence[tuple[str, str]]  # pattern for the text at an error, and the correction to suggest
    opens: frozenset[str] = frozenset({"LPAR"})  # terminals that open a parenthesis

    @cached_property
    def parser(self) -> Lark:
        """The parser, built at first use."""
        from lark import Lark  # noqa: PLC0415 (0.1 s, for those who send filters as text only)

        return Lark(self.grammar, parser="lalr", transformer=self.builder())


class TreeBuilder:
    """Builds the filter tree during parsing: each method takes the children of the grammar rule of its name."""

    any_of = staticmethod(lambda trees: FilterGroup(logic=FilterLogic.OR, filters=trees))
    all_of = staticmethod(lambda trees: FilterGroup(logic=FilterLogic.AND, filters=trees))
    negation = staticmethod(lambda trees: FilterGroup(logic=FilterLogic.NOT, filters=trees))


def parse(syntax: Syntax, text: str, what: str) -> FilterNode:
    """Parse a filter text that is not empty; ``what`` is its name in error messages.

    Raises:
        InvalidRequestError: The text is no valid filter, or exceeds the limits of this module. The message names the
            position, the text found there, and the expected tokens.
    """
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken  # noqa: PLC0415 (lark is loaded at first use)

    if len(text) > MAX_LENGTH:
        raise InvalidRequestError(f"{what}: {len(text)} characters; at most {MAX_LENGTH} are read")
    parsing: Any = syntax.parser.parse_interactive(text)
    limit, remedy = syntax.max_terms
    depth = terms = 0
    token = None
    try:
        for token in parsing.iter_parse():
            depth += (token.type in syntax.opens) - (token.type == "RPAR")
            terms += token.type in syntax.terms
            if depth > MAX_DEPTH:
                raise RefusedError(f"at most {MAX_DEPTH} parentheses may stand inside each other", token)  # noqa: TRY301 (builders raise it too)
            if terms > limit:
                raise RefusedError(f"at most {limit} terms are read{remedy}", token)  # noqa: TRY301 (same)
        tree: FilterNode = parsing.feed_eof(token)
    except RefusedError as error:
        refused = error
    except (UnexpectedToken, UnexpectedCharacters) as error:
        at_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        place: Any = len(text) if at_end else error.pos_in_stream  # its annotation says None
        refused = _unexpected(syntax, text, place, parsing.accepts())
    except ValidationError as error:  # an invalid condition, such as one with the key "$or"
        raise InvalidRequestError(f"{what}: {describe(error)}") from None
    else:
        return tree
    raise InvalidRequestError(f"{what}, character {refused.position + 1}: {refused}")


def _unexpected(syntax: Syntax, text: str, position: int, accepted: set[str]) -> RefusedError:
    """Return an error with the text found at a position, the expected tokens and a suggested correction."""
    expected = ", ".join(dict.fromkeys(words for name, words in {**syntax.words, **_SIGNS}.items() if name in accepted))
    found = re.match(r"\w{1,30}|/?\w{0,30}\s?\(|\S", text[position : position + 40])
    if found is None:
        return RefusedError(f"the filter ends, expected: {expected}", position)
    rest = text[position - 1 :] if position and text[position - 1] == "'" else text[position:]
    hint = next((f"; {hint}" for pattern, hint in syntax.hints if re.match(pattern, rest)), "")
    return RefusedError(f"found {found[0]!r}, expected: {expected}{hint}", position)


def to_number(token: Token, text: str) -> int | float:
    """Parse a number; raise ``RefusedError`` if it is too long, not finite or an integer beyond 64 bits."""
    if len(text) <= _DIGITS:  # reading very long numbers takes more than linear time
        whole = text.lstrip("+-").isdigit()
        number = int(text) if whole else float(text)
        if -_INT64 <= number < _INT64 if whole else math.isfinite(number):
            return number
    raise RefusedError(f"{text[:30]!r} is too large or too long a number", token)


# -- OData -------------------------------------------------------------------------------------------------------------

_RESERVED: Final = ("or", "and", "not", "in", "eq", "ne", "gt", "ge", "lt", "le", "true", "false", "null")
"""Reserved words; as field names they are written in brackets."""

_GRAMMAR: Final = r"""
    ?start: disjunction
    ?disjunction: conjunction | conjunction (_OR conjunction)+ -> any_of
    ?conjunction: term | term (_AND term)+ -> all_of
    ?term: atom | _NOT atom -> negation
    ?atom: "(" disjunction ")"
        | PATH -> comparison
        | PATH OPERATOR _literal -> comparison
        | _literal OPERATOR PATH -> comparison
        | PATH OPERATOR NULL -> comparison
        | membership -> is_member
        | _CONTAINS "(" PATH "," STRING ")" -> contains
        | _CONTAINS "(" _TOLOWER "(" PATH ")" "," STRING ")" -> contains_insensitive
        | PATH _ANY ")" -> some_item
        | _IS_EMPTY "(" PATH ")" -> is_empty
        | PATH _ANY PATH ":" items ")" -> any_item
    items: item (_OR item)*
    ?item: PATH OPERATOR _literal -> item_comparison
        | membership
        | "(" items ")"
    ?membership: PATH _IN "(" _literal ("," _literal)* ")" -> one_of
        | _SEARCH_IN "(" PATH "," STRING ["," STRING] ")" -> search_in
    _literal: STRING | DATE | NUMBER | BOOLEAN

    _OR.2: /or(?!\w)/
    _AND.2: /and(?!\w)/
    _NOT.2: /not(?!\w)/
    _IN.2: /in(?!\w)/
    OPERATOR.2: /(?:eq|ne|g[te]|l[te])(?!\w)/
    BOOLEAN.2: /(?:true|false)(?!\w)/
    NULL.2: /null(?!\w)/
    _SEARCH_IN.3: /search\.in(?=\s*\()/
    _CONTAINS.3: /contains(?=\s*\()/
    _IS_EMPTY.3: /isempty(?=\s*\()/
    _TOLOWER.3: /tolower(?=\s*\()/
    _ANY: /\/any\s*\(/
    STRING: /'(?:[^']|'')*'/
    DATE.2: /[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9:.]+(?:Z|[+-][0-9:]+)?)?(?![\w.:+-])/
    NUMBER: /[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])/
    PATH: /(?!(?:%RESERVED%)(?!\w))[^\W\d]\w*(?:\/(?!(?:any|all)\s*\()[^\W\d]\w*)*/
        | /\[(?:[^\]]|\]\])+\]/
    %ignore /\s+/
""".replace("%RESERVED%", "|".join(_RESERVED))

_FLIPPED: Final = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}
_NAME: Final = re.compile(r"([^\W\d]\w*)(?:/[^\W\d]\w*)*")
_VALUES: Final = ("STRING", "DATE", "NUMBER", "BOOLEAN", "NULL")

_WRITTEN: Final = {
    FilterOperator.EXISTS: "{0} ne null",
    FilterOperator.IS_EMPTY: "isempty({0})",
    FilterOperator.TEXT_MATCH: "contains({0}, {1})",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "contains(tolower({0}), {1})",
}

_Items: TypeAlias = "tuple[list[Token], list[Scalar]]"
"""The occurrences of a lambda's variable in comparisons, and the values compared with it."""


def _of_field(operator: FilterOperator, tokens: list[Token]) -> FilterNode:
    return Condition(key=_key(tokens[0]), operator=operator, value=_value(tokens[1]) if len(tokens) > 1 else True)


class _ODataBuilder(TreeBuilder):
    is_empty = staticmethod(partial(_of_field, FilterOperator.IS_EMPTY))
    some_item = staticmethod(partial(_of_field, FilterOperator.EXISTS))
    contains = staticmethod(partial(_of_field, FilterOperator.TEXT_MATCH))
    contains_insensitive = staticmethod(partial(_of_field, FilterOperator.TEXT_MATCH_INSENSITIVE))

    def comparison(self, tokens: list[Token]) -> FilterNode:
        if len(tokens) == 1:
            return _of_field(FilterOperator.EQ, tokens)
        field, operator, value = tokens
        comparing = str(operator)
        if field.type != "PATH":
            field, comparing, value = value, _FLIPPED.get(comparing, comparing), field
        if value.type != "NULL":
            return Condition(key=_key(field), operator=FilterOperator(comparing), value=_value(value))
        if comparing == "ne":
            return self.some_item([field])
        raise RefusedError(
            f"{comparing} null can't be asked: a filter lets nothing through for what is not known of it; "
            f"{field} ne null asks that there is a value",
            value,
        )

    def one_of(self, tokens: list[Token]) -> _Items:
        return tokens[:1], [_value(value) for value in tokens[1:]]

    def search_in(self, tokens: list[Token]) -> _Items:
        field, values, delimiters = tokens
        marks = str(_value(delimiters)) if delimiters else " ,"
        text = str(_value(values))
        parts = re.split(f"[{re.escape(marks)}]", text, maxsplit=MAX_VALUES + 1) if marks else [text]
        parts = [part for part in parts if part]
        if not 1 <= len(parts) <= MAX_VALUES:
            raise RefusedError(f"search.in takes 1 to {MAX_VALUES} values", values)
        return [field], list(parts)

    def is_member(self, children: list[_Items]) -> FilterNode:
        (((field,), values),) = children
        return Condition(key=_key(field), operator=FilterOperator.IN, value=values)

    def item_comparison(self, tokens: list[Token]) -> _Items:
        variable, operator, value = tokens
        if operator != "eq":
            raise RefusedError(f"found {str(operator)!r}; inside any only eq, in and search.in are known", operator)
        return [variable], [_value(value)]

    def items(self, children: list[_Items]) -> _Items:
        return [name for names, _ in children for name in names], [one for _, values in children for one in values]

    def any_item(self, children: tuple[Token, Token, _Items]) -> FilterNode:
        field, variable, (compared, values) = children
        for name in compared:
            if name != variable:
                expected = f"inside any only its variable, {str(variable)[:30]!r}, is compared"
                raise RefusedError(f"found {str(name)[:30]!r}; {expected}", name)
        return Condition(key=_key(field), operator=FilterOperator.ANY, value=values)


_SYNTAX: Final = Syntax(
    grammar=_GRAMMAR,
    builder=_ODataBuilder,
    words={
        "PATH": "a field",
        **dict.fromkeys(_VALUES, "a value ('text', 1, 1.5, true, 2024-01-31)"),
        "OPERATOR": "a comparison (eq, ne, gt, ge, lt, le)",
        "_IN": "in",
        "_ANY": "/any(",
        "_AND": "and",
        "_OR": "or",
        "_NOT": "not",
        "_SEARCH_IN": "search.in",
        "_CONTAINS": "contains",
    },
    terms=frozenset({"PATH", *_VALUES}),
    max_terms=(MAX_TERMS, "; use search.in for lists"),
    hints=(
        (r"[\"`\u2018-\u201f]", "text stands in single quotes: 'acme'"),
        (r"'|\w+'", "a string is closed by a single quote, and a quote inside it is doubled: 'it''s'"),
        (r"/all\s*\(", "all is not supported: write not field/any(...)"),
        (r"\.?\w*\s?\(", "search.in, contains, tolower and any are the only functions"),
        (r"\.[0-9]", "a number has a digit before its point: 0.5"),
        (r"[=!<>&|]", "operators are words: eq, ne, gt, ge, lt, le, and, or, not"),
        (rf"(?:{'|'.join(_RESERVED)})(?!\w)", "a field of such a name stands in brackets: [in]"),
    ),
    opens=frozenset({"LPAR", "_ANY"}),
)


def parse_odata(text: str) -> FilterNode:
    """Parse a filter from OData text; the module docstring describes the supported syntax.

    Raises:
        InvalidRequestError: The text is no valid filter, or exceeds the limits of length, nesting or terms. The
            message names the position, the text found there, and the expected tokens.
    """
    if not text.strip():
        raise InvalidRequestError("OData filter: it is empty; leave it out to search everything")
    return parse(_SYNTAX, text, "OData filter")


def _key(field: Token) -> str:
    return field[1:-1].replace("]]", "]") if field.startswith("[") else str(field)


def _value(token: Token) -> Scalar:
    if token.type == "STRING":
        return token[1:-1].replace("''", "'")
    if token.type == "BOOLEAN":
        return str(token) == "true"
    if token.type == "NUMBER":
        return to_number(token, str(token))
    try:
        datetime.fromisoformat(token)
    except ValueError as error:
        raise RefusedError(f"{str(token)!r} is no date: {error}", token) from None
    return str(token)


def to_odata(tree: FilterNode) -> str:
    """Return a filter as OData text, which ``parse_odata`` parses to an equivalent filter if it is within its limits.

    ``in`` and ``nin`` become comparisons joined by ``or``.
    """
    if isinstance(tree, Condition):
        return _condition(tree)
    parts = [to_odata(child) for child in tree.filters]
    if tree.logic is FilterLogic.NOT:
        inner = " or ".join(parts)
        grouped = len(parts) == 1 and inner.startswith("(")  # and so ends with the matching parenthesis
        return f"not {inner}" if grouped else f"not ({inner})"
    return parts[0] if len(parts) == 1 else f"({f' {tree.logic.value} '.join(parts)})"


def _condition(condition: Condition) -> str:
    key, operator = condition.key, condition.operator
    name = _NAME.fullmatch(key)
    if not name or name[1] in _RESERVED:
        key = f"[{key.replace(']', ']]')}]"
    if operator in _WRITTEN:
        return _WRITTEN[operator].format(key, _literal(condition.values[0]))
    if not isinstance(condition.value, list):
        return f"{key} {operator.value} {_literal(condition.value)}"
    item = "x" if operator is FilterOperator.ANY else key
    equal = " or ".join(f"{item} eq {_literal(value)}" for value in condition.value)
    if operator is FilterOperator.IN:
        return equal if len(condition.value) == 1 else f"({equal})"
    return f"{key}/any(x: {equal})" if operator is FilterOperator.ANY else f"not ({equal})"


def _literal(value: Scalar) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)
