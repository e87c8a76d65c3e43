"""A linear-time parser of filter texts, shared by the OData and the Google filter syntax."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.filters import FilterGroup, FilterLogic, FilterNode

if TYPE_CHECKING:
    from lark import Lark, Token

MAX_LENGTH: Final = 65_536
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 5_000
_INT64: Final = 2**63
_DIGITS: Final = 40
_SIGNS: Final = {"LPAR": "'('", "RPAR": "')'", "COMMA": "','", "COLON": "':'", "$END": "the end"}


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
            if (deep := depth > MAX_DEPTH) or terms > limit:
                most = (
                    f"{MAX_DEPTH} parentheses may stand inside each other"
                    if deep
                    else f"{limit} terms are read{remedy}"
                )
                raise RefusedError(f"at most {most}", token)  # noqa: TRY301 (builders raise it too)
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
