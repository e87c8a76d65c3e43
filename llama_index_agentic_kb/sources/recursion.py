"""Follows index nodes to what they stand for, a few levels deep and not for ever.

LlamaIndex's own recursion has no bound: a node that points at its own retriever ends in a ``RecursionError``, five
levels of ten took 48 s (measured). It also follows ``obj`` as the store's metadata has it, so that whoever can write
metadata can forge a node; here only live retrievers and query engines, and the index's own objects, are followed.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any, Final

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode, IndexNode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._flow import Call, Flow, WorkerPool

__all__ = ["own_recursion", "resolve_index_nodes"]

MAX_DEPTH: Final = 3
"""Levels of index nodes that are followed."""

MAX_FOLLOWED: Final = 32
"""Index nodes of one search that are followed; further ones stay as they are."""

_OURS: Final = "_agentic_kb_recursion"


def own_recursion(retriever: BaseRetriever) -> BaseRetriever:
    """Take recursion over from a retriever that was made for us: it gives index nodes as they are."""
    retriever._handle_recursive_retrieval = types.MethodType(_as_found, retriever)  # type: ignore[method-assign]  # noqa: SLF001
    retriever._ahandle_recursive_retrieval = types.MethodType(_aas_found, retriever)  # type: ignore[method-assign]  # noqa: SLF001
    setattr(retriever, _OURS, True)
    return retriever


def _as_found(self: BaseRetriever, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:  # noqa: ARG001
    return nodes


async def _aas_found(
    self: BaseRetriever,  # noqa: ARG001 (LlamaIndex's signature)
    query_bundle: QueryBundle,  # noqa: ARG001
    nodes: list[NodeWithScore],
) -> list[NodeWithScore]:
    return nodes


def resolve_index_nodes(
    retriever: BaseRetriever,
    nodes: list[NodeWithScore],
    bundle: QueryBundle,
    *,
    deadline: float | None,
    pool: WorkerPool,
) -> Flow[list[NodeWithScore]]:
    """Replace index nodes by what they stand for; a retriever that follows its own is left alone.

    Args:
        retriever: Where the nodes come from; its ``object_map`` is trusted.
        nodes: What it found.
        bundle: The query.
        deadline: ``time.monotonic()``.
        pool: Where calls run.

    Returns:
        Nodes in order, each id once. What is too deep, or one too many, stays an index node.
    """
    if not getattr(retriever, _OURS, False) or not any(isinstance(n.node, IndexNode) for n in nodes):
        return nodes
    follower = _Follower(bundle, deadline, pool)
    resolved = yield from follower.resolve(nodes, retriever.object_map, depth=0)
    return list({node.node.node_id: node for node in reversed(resolved)}.values())[::-1]


class _Follower:
    """Follows the index nodes of one search."""

    def __init__(self, bundle: QueryBundle, deadline: float | None, pool: WorkerPool) -> None:
        self._bundle = bundle
        self._deadline = deadline
        self._pool = pool
        self._left = MAX_FOLLOWED
        self._seen: set[int] = set()

    def resolve(self, nodes: list[NodeWithScore], objects: dict[str, Any], depth: int) -> Flow[list[NodeWithScore]]:
        resolved: list[NodeWithScore] = []
        for node in nodes:
            target = self._target(node, objects) if depth < MAX_DEPTH else None
            if target is None:
                resolved.append(node)
            else:
                resolved.extend((yield from self._follow(node, target, depth)))
        return resolved

    def _target(self, node: NodeWithScore, objects: dict[str, Any]) -> Any:
        if not isinstance(node.node, IndexNode) or self._left <= 0:
            return None
        target = objects.get(node.node.index_id)
        if target is None and isinstance(node.node.obj, (BaseRetriever, BaseQueryEngine)):
            target = node.node.obj
        if target is None or id(target) in self._seen:
            return None
        return target

    def _follow(self, node: NodeWithScore, target: Any, depth: int) -> Flow[list[NodeWithScore]]:
        self._left -= 1
        if isinstance(target, NodeWithScore):
            return [target]
        if isinstance(target, BaseNode):
            return [NodeWithScore(node=target, score=node.score)]
        self._seen.add(id(target))
        if isinstance(target, BaseQueryEngine):
            response = yield self._call(partial(target.query, self._bundle), "query engine")
            text = TextNode(text=str(response), metadata=response.metadata or {})
            return [NodeWithScore(node=text, score=node.score)]
        if isinstance(target, BaseRetriever):
            found = yield self._call(partial(target._retrieve, self._bundle), "retriever")  # noqa: SLF001 (not its recursion)
            return (yield from self.resolve(list(found), target.object_map, depth + 1))
        return [node]

    def _call(self, work: Any, what: str) -> Call:
        return Call(sync=work, deadline=self._deadline, pool=self._pool, what=f"{what} behind an index node")
