r"""Google's filter text, read into our filter trees.

    category: ANY("persona_A", "it\"s") AND (year: IN(1969, 1972e) OR score >= 0.5) AND NOT date < "2024-01-31"

* ``field: ANY("a", "b")``: the field is one of the texts. Of a field that holds a list (``list_fields``): one of its
  items is.
* ``field: IN(lower, upper)``: a range; ``*`` is open. Without ``i`` (inclusive) or ``e`` (exclusive) after it, the
  lower bound is inclusive and the upper one exclusive.
* ``< <= > >= =`` of a field and a number, a quoted date, ``true`` or ``false``.
* ``NOT`` or ``-`` before an expression, ``AND``, ``OR``, parentheses. ``AND`` beside ``OR`` without parentheses is
  refused: Google's own pages don't say which binds tighter, and a filter is not guessed at.
* ``GEO_DISTANCE`` is refused.

The same, with bare words (``user_pseudo_id = some_id``) and ``labels:hidden``, filters lists of sessions.
Source: the EBNF of Google's guide "Filter generic search for structured or unstructured data".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.filters import (
    Condition,
    FilterGroup,
    FilterLogic,
    FilterNode,
    FilterOperator,
    Scalar,
    all_of,
)

__all__ = ["parse_filter", "parse_session_filter"]

MAX_LENGTH, MAX_DEPTH, MAX_VALUES = 65_536, 32, 5_000
_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
        | (?P<comparison><=|>=|!=|<|>|=)
        | (?P<mark>[():,*])
        | (?P<number>[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?P<bound>[ie])?(?![\w.]))
        | (?P<minus>-)
        | (?P<word>[^\W\d][\w.\-/]*)
        | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_OPERATORS: Final = {
    "=": FilterOperator.EQ,
    "<": FilterOperator.LT,
    "<=": FilterOperator.LE,
    ">": FilterOperator.GT,
    ">=": FilterOperator.GE,
}
_INT64: Final = 2**63
_DIGITS: Final = 40


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


@dataclass(frozen=True)
class _Dialect:
    """What may be written, and what fields mean.

    Args:
        what: Names the filter in errors.
        bare: Whether words stand for text without quotes, and ``field:word`` asks for an item.
        is_list: Tells fields that hold lists.
        key: Gives the key of a field, or raises ValueError.
    """

    what: str
    bare: bool
    is_list: Callable[[str], bool]
    key: Callable[[str], str]


def parse_filter(text: str, field: str = "filter", *, list_fields: Collection[str] = ()) -> FilterNode | None:
    """Read a filter of documents; None for an empty one, which Google takes for none.

    Args:
        text: The filter.
        field: Where it stands, for errors.
        list_fields: Metadata keys that hold lists: ``ANY`` then looks at their items. Stores such as Chroma can't.

    Raises:
        InvalidRequestError: It can't be read, or asks for what can't be done; the message tells the place.
    """
    return _parse(text, _Dialect(field, bare=False, is_list=frozenset(list_fields).__contains__, key=str))


def parse_session_filter(text: str, fields: dict[str, str], lists: Collection[str]) -> FilterNode | None:
    """Read a filter of sessions.

    Args:
        text: The filter.
        fields: Each field that may be named, and its key.
        lists: Those of the fields that hold lists.

    Raises:
        InvalidRequestError: It can't be read, or names another field.
    """

    def key(name: str) -> str:
        if name not in fields:
            raise ValueError(f"there is no field {name[:60]!r}; sessions are filtered by {', '.join(fields)}")
        return fields[name]

    return _parse(text, _Dialect("filter", bare=True, is_list=frozenset(lists).__contains__, key=key))


def _parse(text: str, dialect: _Dialect) -> FilterNode | None:
    if not text.strip():
        return None
    if len(text) > MAX_LENGTH:
        raise InvalidRequestError(f"{dialect.what}: {len(text)} characters; at most {MAX_LENGTH} are read")
    reader = _Reader(text, dialect)
    tree = reader.expression(0)
    if reader.token.kind != "end":
        raise reader.unexpected("AND, OR or the end")
    return tree


class _Reader:
    """Reads a filter from left to right, one token ahead."""

    def __init__(self, text: str, dialect: _Dialect) -> None:
        self._text = text
        self._dialect = dialect
        self._at = 0
        self.token = self._read()

    def expression(self, depth: int) -> FilterNode:
        """Read terms that are joined by one word."""
        if depth > MAX_DEPTH:
            raise self._refused(f"at most {MAX_DEPTH} parentheses may stand inside each other")
        trees = [self._term(depth)]
        word = self.token.text if self._is("word", "AND", "OR") else ""
        while word and self._is("word", "AND", "OR"):
            if self.token.text != word:
                raise self._refused("AND beside OR is ambiguous; put parentheses around one of them")
            self._next()
            trees.append(self._term(depth))
        logic = FilterLogic.OR if word == "OR" else FilterLogic.AND
        return trees[0] if len(trees) == 1 else FilterGroup(logic=logic, filters=trees)

    def unexpected(self, expected: str) -> InvalidRequestError:
        """Tell what stands here, and what could."""
        found = "the filter ends" if self.token.kind == "end" else f"found {self.token.text[:40]!r}"
        return self._refused(f"{found}, expected {expected}")

    def _term(self, depth: int) -> FilterNode:
        if self._is("word", "NOT") or self._is("minus"):
            self._next()
            return FilterGroup(logic=FilterLogic.NOT, filters=[self._factor(depth)])
        return self._factor(depth)

    def _factor(self, depth: int) -> FilterNode:
        if self._is("mark", "("):
            self._next()
            tree = self.expression(depth + 1)
            self._expect(")")
            return tree
        if self._is("word", "GEO_DISTANCE"):
            raise self._refused("GEO_DISTANCE is not supported: keep what is near to what as a field of its own")
        if not self._is("word") or self._is("word", "AND", "OR", "NOT"):
            raise self.unexpected("a field, NOT or '('")
        return self._comparison()

    def _comparison(self) -> FilterNode:
        field = self._next()
        name = field.text
        try:
            key = self._dialect.key(name)
        except ValueError as error:
            raise self._refused(str(error), field) from None
        if self._is("mark", ":"):
            self._next()
            return self._function(key, is_list=self._dialect.is_list(name))
        if not self._is("comparison") or self.token.text not in _OPERATORS:
            raise self.unexpected("':' or one of < <= > >= = (not equal is NOT field = value)")
        operator = _OPERATORS[self._next().text]
        return Condition(key=key, operator=operator, value=self._value())

    def _function(self, key: str, *, is_list: bool) -> FilterNode:
        function = self.token.text if self.token.kind == "word" else ""
        if function == "ANY":
            self._next()
            operator = FilterOperator.ANY if is_list else FilterOperator.IN
            return Condition(key=key, operator=operator, value=list(self._values()))
        if function == "IN":
            self._next()
            return self._range(key)
        if self._dialect.bare and self.token.kind in ("word", "string"):
            value = self._value()
            return (
                Condition(key=key, operator=FilterOperator.ANY, value=[value])
                if is_list
                else Condition(key=key, value=value)
            )
        raise self.unexpected('ANY("...") or IN(lower, upper)')

    def _values(self) -> list[str]:
        self._expect("(")
        values = [self._literal()]
        while self._is("mark", ","):
            self._next()
            values.append(self._literal())
            if len(values) > MAX_VALUES:
                raise self._refused(f"at most {MAX_VALUES} values are read")
        self._expect(")")
        return values

    def _literal(self) -> str:
        if not self._is("string"):
            raise self.unexpected('a text in double quotes: "acme"')
        return self._unquoted(self._next())

    def _range(self, key: str) -> FilterNode:
        self._expect("(")
        lower = self._bound(key, "i", {"i": FilterOperator.GE, "e": FilterOperator.GT})
        self._expect(",")
        upper = self._bound(key, "e", {"i": FilterOperator.LE, "e": FilterOperator.LT})
        self._expect(")")
        both = all_of(lower, upper)
        return both if both is not None else Condition(key=key, operator=FilterOperator.EXISTS, value=True)

    def _bound(self, key: str, default: str, operators: dict[str, FilterOperator]) -> FilterNode | None:
        if self._is("mark", "*"):
            self._next()
            return None
        if not self._is("number"):
            raise self.unexpected("a number or *")
        token = self._next()
        kind = token.text[-1] if token.text[-1] in "ie" else default
        return Condition(key=key, operator=operators[kind], value=self._number(token, token.text.rstrip("ie")))

    def _value(self) -> Scalar:
        if self._is("string"):
            return self._unquoted(self._next())
        if self._is("word", "true", "false"):
            return self._next().text == "true"
        if self._is("number") and self.token.text[-1] not in "ie":
            token = self._next()
            return self._number(token, token.text)
        if self._dialect.bare and self._is("word"):
            return self._next().text
        raise self.unexpected('a number, true, false, or a text in double quotes: "acme"')

    def _unquoted(self, token: _Token) -> str:
        inner = token.text[1:-1]
        if re.search(r'(?<!\\)(?:\\\\)*\\[^"\\]', inner):
            raise self._refused(r"only \" and \\ may follow a backslash", token)
        return re.sub(r"\\(.)", r"\1", inner)

    def _number(self, token: _Token, text: str) -> int | float:
        if len(text) <= _DIGITS:
            whole = text.lstrip("+-").isdigit()
            number = int(text) if whole else float(text)
            if -_INT64 <= number < _INT64 if whole else math.isfinite(number):
                return number
        raise self._refused(f"{text[:40]!r} is too large or too long a number", token)

    def _is(self, kind: str, *texts: str) -> bool:
        return self.token.kind == kind and (not texts or self.token.text in texts)

    def _expect(self, mark: str) -> None:
        if not self._is("mark", mark):
            raise self.unexpected(repr(mark))
        self._next()

    def _next(self) -> _Token:
        token, self.token = self.token, self._read()
        return token

    def _read(self) -> _Token:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            rest = self._text[self._at :].lstrip()
            at = len(self._text) - len(rest)
            hint = "; text stands in double quotes, closed by another" if rest[0] in "'\"" else ""
            raise self._refused(f"can't read {rest[:20]!r}{hint}", _Token("", rest[:20], at))
        self._at = found.end()
        kind = found.lastgroup or ""
        kind = "number" if kind == "bound" else kind
        return _Token(kind, found[kind], found.start(kind))

    def _refused(self, reason: str, token: _Token | None = None) -> InvalidRequestError:
        position = (token or self.token).position
        return InvalidRequestError(f"{self._dialect.what}, character {position + 1}: {reason}")
