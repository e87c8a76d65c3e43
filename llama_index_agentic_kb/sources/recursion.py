"""Follows index nodes to what they stand for, a few levels deep.

LlamaIndex's own recursion has no bound: a node that points at its own retriever ends in a ``RecursionError``, five
levels of ten took 48 s (measured). It also follows ``obj`` as the store's metadata has it, so that whoever can write
metadata can forge a node; here only live retrievers and query engines, and the index's own objects, are followed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode, IndexNode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.sources.cleaning import clean_nodes
from llama_index_agentic_kb.sources.index import NotedNodes

__all__ = ["bounded", "own_recursion", "resolve_index_nodes"]

MAX_DEPTH: Final = 3
"""Levels of index nodes that are followed."""

MAX_FOLLOWED: Final = 32
"""Index nodes of one search that are followed; further ones stay as they are."""

_OURS: Final = "_agentic_kb_recursion"

_THEIRS: Final = "_agentic_kb_made_by_user"
"""Nodes of a user's own retriever: those behind index nodes are followed too, as LlamaIndex does."""

Perform: TypeAlias = Callable[[Call[Any]], Coroutine[Any, Any, Any]]
"""Makes a call, within its source's bulkhead."""


def own_recursion(retriever: BaseRetriever, source: str) -> BaseRetriever:
    """Take recursion over from a retriever that was made for us: index nodes stay as found.

    What it found is looked through at this very place: core's own look at it, which comes next, would raise for one
    node that is not one, and lose the others.

    Args:
        retriever: Is changed.
        source: The source's name, for errors.
    """
    retriever._handle_recursive_retrieval = partial(_as_found, source)  # type: ignore[method-assign]  # noqa: SLF001
    retriever._ahandle_recursive_retrieval = partial(_aas_found, source)  # type: ignore[method-assign]  # noqa: SLF001
    setattr(retriever, _OURS, True)
    return retriever


def bounded(retriever: BaseRetriever, source: str) -> BaseRetriever:
    """Return a twin of a user's retriever whose index nodes are followed here; the same where it has its own recursion.

    The twin shares all that the retriever has, and is made anew for each search: what its user sets later holds.
    """
    kind = type(retriever)
    own = (kind._handle_recursive_retrieval, kind._ahandle_recursive_retrieval)  # noqa: SLF001 (core has no other way)
    core = (BaseRetriever._handle_recursive_retrieval, BaseRetriever._ahandle_recursive_retrieval)  # noqa: SLF001
    if own != core:
        return retriever
    twin = own_recursion(copy.copy(retriever), source)
    setattr(twin, _THEIRS, True)
    return twin


def _as_found(source: str, query_bundle: QueryBundle, nodes: Any) -> list[NodeWithScore]:  # noqa: ARG001
    return nodes if isinstance(nodes, NotedNodes) else clean_nodes(nodes, source)


async def _aas_found(source: str, query_bundle: QueryBundle, nodes: Any) -> list[NodeWithScore]:
    return _as_found(source, query_bundle, nodes)


async def resolve_index_nodes(
    retriever: BaseRetriever,
    nodes: list[NodeWithScore],
    bundle: QueryBundle,
    *,
    deadline: float | None,
    perform: Perform,
) -> list[NodeWithScore]:
    """Replace index nodes by what they stand for; a retriever that follows its own is left alone.

    Args:
        retriever: Where the nodes come from; its ``object_map`` is trusted.
        nodes: What it found.
        bundle: The query.
        deadline: ``time.monotonic()``.
        perform: Makes the calls.

    Returns:
        Nodes in order, each id once. What is too deep, or one too many, stays an index node.
    """
    if not getattr(retriever, _OURS, False) or not any(isinstance(n.node, IndexNode) for n in nodes):
        return nodes
    follower = _Follower(bundle, deadline, perform, nodes_too=getattr(retriever, _THEIRS, False))
    resolved = await follower.resolve(nodes, retriever.object_map, depth=0)
    return list({node.node.node_id: node for node in reversed(resolved)}.values())[::-1]


class _Follower:
    """Follows the index nodes of one search."""

    def __init__(self, bundle: QueryBundle, deadline: float | None, perform: Perform, *, nodes_too: bool) -> None:
        self._followed = (BaseRetriever, BaseQueryEngine, *((BaseNode,) if nodes_too else ()))
        self._bundle = bundle
        self._deadline = deadline
        self._perform = perform
        self._left = MAX_FOLLOWED
        self._seen: set[int] = set()

    async def resolve(self, nodes: list[NodeWithScore], objects: dict[str, Any], depth: int) -> list[NodeWithScore]:
        resolved: list[NodeWithScore] = []
        for node in nodes:
            target = self._target(node, objects) if depth < MAX_DEPTH else None
            if target is None:
                resolved.append(node)
            else:
                resolved.extend(await self._follow(node, target, depth))
        return resolved

    def _target(self, node: NodeWithScore, objects: dict[str, Any]) -> Any:
        if not isinstance(node.node, IndexNode) or self._left <= 0:
            return None
        target = objects.get(node.node.index_id)
        if target is None and isinstance(node.node.obj, self._followed):
            target = node.node.obj
        if target is None or id(target) in self._seen:
            return None
        return target

    async def _follow(self, node: NodeWithScore, target: Any, depth: int) -> list[NodeWithScore]:
        self._left -= 1
        if isinstance(target, NodeWithScore):
            return [target]
        if isinstance(target, BaseNode):
            return [NodeWithScore(node=target, score=node.score)]
        self._seen.add(id(target))
        if isinstance(target, BaseQueryEngine):
            response = await self._call(partial(target.query, self._bundle), "query engine")
            text = TextNode(text=str(response), metadata=response.metadata or {})
            return [NodeWithScore(node=text, score=node.score)]
        if isinstance(target, BaseRetriever):
            find = partial(target._retrieve, self._bundle)  # noqa: SLF001 (not its recursion)
            found = await self._call(find, "retriever")
            return await self.resolve(list(found), target.object_map, depth + 1)
        return [node]

    def _call(self, work: Any, what: str) -> Coroutine[Any, Any, Any]:
        return self._perform(Call(sync=work, deadline=self._deadline, what=f"{what} behind an index node"))
