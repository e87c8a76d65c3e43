"""Searches of random principals with random filters in real stores: ``python -m tests.stores.leaks --cases 10000``.

Nothing that a principal may not see is found, listed or counted; and with room for no more than it may see, all of that
is found, so that nothing else took a place. The full kit, with models and conversations, is ``tests.leaks --kinds``.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any, Final

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Principal
from llama_index_agentic_kb.errors import DeniedError, InvalidRequestError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator
from llama_index_agentic_kb.schema.filters import ORDERS
from tests.leaks.world import (
    CHUNKS,
    FIELDS,
    GROUPS,
    KEYS,
    MANY_GROUPS,
    SHARED_KINDS,
    TENANTS,
    USERS,
    VALUES,
    WORDS,
    Document,
    World,
)
from tests.sources.conftest import search

__all__ = ["look"]

_LISTS: Final = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY)
_TRUE: Final = (FilterOperator.EXISTS, FilterOperator.IS_EMPTY)
_HOSTILE: Final = (
    "x' OR '1'='1",
    "') OR TRUE --",
    "'; DELETE FROM data; --",
    '" or 1==1 or "',
    "\\' or true or '",
    ":tenant",
)


def _some(chance: random.Random, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(chance.sample(names, chance.randrange(3)))


def _principal(chance: random.Random) -> Principal:
    groups = chance.choice([_some(chance, GROUPS), frozenset(GROUPS), MANY_GROUPS])
    tenant, user = chance.choice([*TENANTS, *_HOSTILE[:2]]), chance.choice([*USERS, *_HOSTILE[:2]])
    return Principal(tenant=tenant, user=user, groups=groups)


def _document(chance: random.Random, number: int) -> Document:
    shared: dict[str, Any] = {
        "users": _some(chance, USERS),
        "groups": _some(chance, GROUPS),
        "public": chance.random() < 0.2,
    }
    owner, words = chance.choice([None, *USERS]), tuple(chance.choices(WORDS, k=2))
    return Document(number, words, chance.choice(TENANTS), owner, **shared)


def _tree(chance: random.Random, depth: int = 2) -> FilterNode:
    if depth and chance.random() < 0.5:
        children = [_tree(chance, depth - 1) for _ in range(chance.randrange(1, 4))]
        return FilterGroup(logic=chance.choice(list(FilterLogic)), filters=children)
    operator, values = chance.choice(list(FilterOperator)), [*VALUES, *_HOSTILE]
    value: Any = chance.choices(values, k=2) if operator in _LISTS else operator in _TRUE or chance.choice(values)
    if operator.value.startswith("text") or (operator in ORDERS and isinstance(value, bool)):
        value = str(value) or "x"
    shown = [key for key in KEYS if not FIELDS.hides(key)]  # the others are refused
    key = chance.choice(KEYS if chance.random() < 0.05 else shown)
    return Condition(key=key, operator=operator, value=value)


def look(kind: str, cases: int, seed: int = 0) -> tuple[int, int]:
    """Make worlds until enough searches were looked at.

    Returns:
        The number of searches that were refused, and of documents that were found.

    Raises:
        AssertionError: Something leaked, or took a place.
    """
    chance, number, refused, shown = random.Random(seed), 0, 0, 0
    world, left = World(kind), 0
    source, kb = _opened(world)
    while cases:
        if not left:
            world.close()
            world, left = World(kind), 40
            source, kb = _opened(world)
            for number in range(number, number + 12):  # noqa: B020 (numbers go on)
                world.put(_document(chance, number))
            number += 1
        elif chance.random() < 0.1:
            world.remove(chance.choice(sorted(world.documents)))
            world.put(_document(chance, number))
            number += 1
        cases, left = cases - 1, left - 1
        who = _principal(chance)
        tree = _tree(chance) if chance.random() < 0.6 else None
        found = _found(source, kb, who, tree, len(world.visible(who)))
        refused += found is None
        shown += len(found or ())
        assert (found or set()) <= world.visible(who), (who, tree)
        if tree is None:
            assert found == world.visible(who), f"{who} does not find all that it may see"
    world.close()
    return refused, shown


def _opened(world: World) -> tuple[KnowledgeSource, KnowledgeBase]:
    source = KnowledgeSource("docs", index=world.index, permissions=FIELDS, hybrid=False)
    return source, KnowledgeBase([source])


def _found(
    source: KnowledgeSource, kb: KnowledgeBase, who: Principal, tree: FilterNode | None, visible: int
) -> set[str] | None:
    """Return the secrets that are found, after looking at what is listed and counted; None if it is refused."""
    try:
        source.refuse_hidden(tree)
        both = source.permitted(who) if tree is None else FilterGroup(filters=[source.permitted(who), tree])
        nodes = search(source, "rain", both, top_k=max(1, CHUNKS * visible)).nodes
        documents = kb.documents("docs", filters=tree, principal=who)
        counted = kb.count("docs", filters=tree, principal=who)
        assert counted == len(documents) <= visible, (who, tree, counted, documents)
        codes = {bucket.value for bucket in kb.facets("docs", ["code"], filters=tree, principal=who, limit=50)["code"]}
    except (DeniedError, InvalidRequestError):
        return None
    found = {str(node.metadata["code"]) for node in nodes}
    assert found == codes == {str(document.metadata["code"]) for document in documents}
    return found


def main() -> int:
    """Look at each kind of store; give 1 where something leaked."""
    parser = argparse.ArgumentParser(prog="python -m tests.stores.leaks", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", default=list(SHARED_KINDS))
    given = parser.parse_args()
    for kind in given.kinds:
        refused, shown = look(kind, given.cases)
        print(f"{kind}: {given.cases} searches, 0 leaks; {refused} were refused, {shown} documents found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
