"""What a lexical index knows of metadata: a term for each value, to ask for those that a filter lets through.

The terms let through every document that could match a filter, and at times some more; ``schema.matches`` on the
document's own metadata decides. An equality is a term; any other condition is asked of each value that its key has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, matches

__all__ = ["AllOf", "AnyOf", "Asked", "comparable", "fact_value", "facts", "key_prefixes", "superset"]

_EQUALITIES: Final = frozenset({FilterOperator.EQ, FilterOperator.IN, FilterOperator.ANY})
_COLLECTIONS: Final = (list, tuple, set, frozenset)
_LONGEST: Final = 400
"""Characters of a term; a longer one is a hash, from which its value can't be read."""
_KEY_PART: Final = 100
"""Characters of the key in front of a hash."""

Values: TypeAlias = Callable[[str], Sequence[tuple[str, Any]] | None]
"""Gives the terms and values of a key; None where they are too many or can't be told."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Documents with one of these terms, or that one of these parts lets through."""

    terms: tuple[str, ...] = ()
    parts: tuple[Asked, ...] = ()


@dataclass(frozen=True, slots=True)
class AllOf:
    """Documents that all of these parts let through."""

    parts: tuple[Asked, ...]


Asked: TypeAlias = AnyOf | AllOf


def superset(tree: FilterNode, values: Values, *, negate: bool = False) -> Asked | None:
    """Give what to ask for, so that nothing that matches a filter is missed; None where terms can't tell."""
    if isinstance(tree, Condition):
        return _condition(tree, values, negate=negate)
    if tree.logic is FilterLogic.NOT:  # none of them
        return _group([superset(child, values, negate=not negate) for child in tree.filters], every=not negate)
    every = (tree.logic is FilterLogic.AND) is not negate
    return _group([superset(child, values, negate=negate) for child in tree.filters], every=every)


def _group(parts: Sequence[Asked | None], *, every: bool) -> Asked | None:
    known = tuple(part for part in parts if part is not None)
    if every:
        return AllOf(known) if known else None
    if len(known) < len(parts):
        return None
    # One set of terms is quick to ask for; a thousand of one term each (a principal's groups) are not.
    terms = tuple(term for part in known if _is_plain(part) for term in part.terms)
    return AnyOf(terms, tuple(part for part in known if not _is_plain(part)))


def _is_plain(part: Asked) -> TypeGuard[AnyOf]:
    return isinstance(part, AnyOf) and not part.parts


def _condition(condition: Condition, values: Values, *, negate: bool) -> Asked | None:
    if condition.operator in _EQUALITIES and not negate:
        return AnyOf(tuple(_fact(condition.key, value) for value in condition.values))
    known = values(condition.key)
    if known is None:
        return None
    tree: FilterNode = FilterGroup(logic=FilterLogic.NOT, filters=[condition]) if negate else condition
    key = condition.key
    # The value may stand alone or be an item of a list.
    held = (term for term, value in known if matches(tree, {key: value}) or matches(tree, {key: [value]}))
    return AnyOf(tuple(held))


def facts(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Give a term for each value of a document's metadata, and for each item of a list."""
    for key, value in comparable(metadata).items():
        if isinstance(value, list) and value:
            yield from {_fact(key, item) for item in value if item is not None}
        elif value is not None:
            yield _fact(key, value)


def _fact(key: str, value: Any) -> str:
    """Give the term of a value; equal values have one. It holds no space outside of the value's quotes."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    quoted = json.dumps(key)
    term = f"{quoted}:{json.dumps(value)}"
    if len(term) <= _LONGEST:
        return term
    digest = hashlib.blake2b(term.encode(), digest_size=16).hexdigest()
    return f"{quoted[:_KEY_PART]}#{digest}"


def key_prefixes(key: str) -> tuple[str, str]:
    """Give how the terms of a key begin that can be read, and those of hashes."""
    quoted = json.dumps(key)
    return f"{quoted}:", f"{quoted[:_KEY_PART]}#"


def fact_value(term: str, prefix: str) -> Any:
    """Give the value that a term stands for."""
    return json.loads(term[len(prefix) :])


def comparable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Give metadata as JSON on which ``matches`` says what it says of the original: what it can't compare is {}."""
    return {
        key: [_plain(one) for one in value] if isinstance(value, _COLLECTIONS) else _plain(value)
        for key, value in metadata.items()
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else {}
