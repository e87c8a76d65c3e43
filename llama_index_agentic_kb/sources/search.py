"""One search of one source: its ways (dense, lexical) side by side, each timed, each with an end of its own.

Where one way fails or is late and the other finds something, its list holds the error and the search succeeds. What
comes back is cleaned (``sources.cleaning``), its index nodes are followed (``sources.recursion``), and each node is
checked against the effective filter again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, Job, start, wait
from llama_index_agentic_kb.account.callbacks import guard_component
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import CallProgress, ResilientCalls
from llama_index_agentic_kb.schema import FilterNode, matcher
from llama_index_agentic_kb.search.lexical import LexicalSearch, NotIndexedError
from llama_index_agentic_kb.sources.cleaning import clean_nodes
from llama_index_agentic_kb.sources.index import narrowed_by_ids, note_of, until
from llama_index_agentic_kb.sources.recursion import resolve_index_nodes

__all__ = ["NodeKey", "NodeList", "PreparedSource", "SearchResult", "distinct_nodes", "node_key", "search_prepared"]

MAX_INLINE: Final = 200
"""Nodes that are looked through on the event loop at a time: about 2 ms."""

NodeKey: TypeAlias = tuple[str, str]
"""A node's id and text."""


@dataclass(frozen=True, slots=True)
class NodeList:
    """One ranked list of a search: a source may search in several ways at once.

    Args:
        kind: "dense", "lexical", "hybrid" (the store's own), or "retriever" (its way is its own).
        nodes: Best first, every one checked against the effective filter; wrappers of our own.
        scale: Lists of one scale have scores that can be compared; None is a scale of its own.
        weight: How much it counts beside the search's other lists.
        candidates: How many the source returned.
        dropped_by_filter: How many of these broke the filter.
        dropped_as_unusable: How many of these were no nodes that can be used; ``note`` says why.
        elapsed_ms: How long it took, without the embedding of the query; None where it was not timed apart.
        error: Why it has no nodes, where it failed; the search goes on with the others.
        note: What else should be known of it: that it was searched exactly, or again with more candidates.
    """

    kind: str
    nodes: list[NodeWithScore]
    scale: Hashable | None = None
    weight: float = 1.0
    candidates: int = 0
    dropped_by_filter: int = 0
    dropped_as_unusable: int = 0
    elapsed_ms: int | None = None
    error: Exception | None = None
    note: str | None = None
    _keys: list[NodeKey] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def keys(self) -> list[NodeKey]:
        """What tells each node apart, in order. Computed once: LlamaIndex makes a node's text anew each time."""
        if len(self._keys) != len(self.nodes):
            self._keys[:] = [node_key(node.node) for node in self.nodes]
        return self._keys


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What one search found: its ranked lists, not fused yet."""

    lists: tuple[NodeList, ...]

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)

    def total(self, count: str) -> int:
        """Return the sum of a count over all lists: "candidates", "dropped_by_filter", "dropped_as_unusable"."""
        return sum(getattr(ranked, count) for ranked in self.lists)


def distinct_nodes(lists: Sequence[NodeList]) -> list[NodeWithScore]:
    """Return the nodes of several lists, each once (by id and text), where it comes first."""
    nodes: dict[NodeKey, NodeWithScore] = {}
    for ranked in lists:
        for key, node in zip(ranked.keys, ranked.nodes, strict=True):
            nodes.setdefault(key, node)
    return list(nodes.values())


def node_key(node: BaseNode) -> NodeKey:
    """Return what tells nodes apart: the same text under two ids stays two, and one id with two texts as well."""
    return node.node_id, node.get_content(metadata_mode=MetadataMode.NONE)


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """A source's retriever for one effective filter, and what its searches need.

    Args:
        name: The source's.
        retriever: Applies the filter.
        filters: The effective filter: each node is checked against it again.
        calls: Makes the retriever's calls.
        lexical_calls: Makes those of the lexical index. The ways have bulkheads of their own: a lexical index that is
            being built never keeps a dense search waiting.
        embed_model: Embeds the query; None where the retriever needs no vector.
        scale: Searches of one scale have scores that can be compared.
        kind: Of its list; see ``NodeList``.
        lexical: Is asked beside the retriever.
        is_private: Whether there are documents that the caller may not see: no count and no note may show them.
        native_async: Whether the retriever's ``aretrieve`` really awaits.
    """

    name: str
    retriever: BaseRetriever
    filters: FilterNode | None
    calls: ResilientCalls
    lexical_calls: ResilientCalls
    embed_model: BaseEmbedding | None
    scale: Hashable | None
    kind: str
    lexical: LexicalSearch | None
    is_private: bool
    native_async: bool


@dataclass(frozen=True, slots=True)
class _Request:
    """What all ways of one search share."""

    source: PreparedSource
    limit: int
    deadline: float | None
    progress: CallProgress


async def search_prepared(
    source: PreparedSource,
    query: str,
    bundle: Callable[[], Awaitable[QueryBundle]],
    *,
    limit: int,
    deadline: float | None,
    progress: CallProgress,
) -> SearchResult:
    """Search a prepared source in all its ways.

    Args:
        source: The retriever, its filter, and what is asked beside it.
        query: The text. The lexical way begins with it at once.
        bundle: Returns the query with its vector; the dense way waits for it.
        limit: Documents of each list.
        deadline: ``time.monotonic()`` at which each way is given up.
        progress: Notes all calls.

    Raises:
        RetrievalError: The source returned something that is no list of nodes.
        DeadlineExceededError: It did not answer in time.
        SourceUnavailableError: It was not asked: it failed too often lately, or too many wait for it.
    """
    request = _Request(source, limit, deadline, progress)
    if source.lexical is None:
        return SearchResult((await _retriever_list(request, bundle),))
    lexical = start(_lexical_list(request, source.lexical, query))
    dense = NodeList(source.kind, [], source.scale)
    try:
        try:
            dense = await _retriever_list(request, bundle)
        except Exception as error:  # noqa: BLE001 (kept in its list, or raised below)
            dense = replace(dense, error=error)
        await wait([lexical])  # it has the deadline itself
    except asyncio.CancelledError:
        lexical.cancel()
        if progress.given_up is None:
            raise
        if dense.elapsed_ms is None and dense.error is None:
            dense = replace(dense, error=DeadlineExceededError(progress.given_up))
        if task := asyncio.current_task():
            task.uncancel()
    return _side_by_side(dense, lexical)


def _side_by_side(dense: NodeList, lexical: Job[NodeList]) -> SearchResult:
    """Return both lists; the dense way's error is raised where the lexical one found nothing either."""
    error = lexical.error
    words = lexical.value or NodeList("lexical", [], error=error if isinstance(error, Exception) else None)
    if dense.error is not None and not words.nodes:
        raise dense.error
    if isinstance(error, NotIndexedError):
        return SearchResult((replace(dense, note="; ".join(filter(None, (dense.note, str(error))))),))
    return SearchResult((dense, words))


async def _retriever_list(request: _Request, bundle: Callable[[], Awaitable[QueryBundle]]) -> NodeList:
    source, query = request.source, await bundle()
    started = time.monotonic()
    retriever = until(guard_component(source.retriever), request.deadline)
    native = partial(retriever.aretrieve, query)
    call: Call[Any] = Call(
        sync=partial(retriever.retrieve, query),
        native=native if source.native_async else None,
        deadline=request.deadline,
        what=f"source {source.name!r}",
    )
    try:
        found = await source.calls.call(call, request.progress)
    except NotImplementedError:
        if not source.native_async:
            raise
        found = await source.calls.call(replace(call, sync=None), request.progress)  # async only, from a sync door
    made = NodeList(source.kind, [], source.scale, note=note_of(found))
    return await _checked(made, found, request, query, started)


async def _lexical_list(request: _Request, lexical: LexicalSearch, query: str) -> NodeList:
    source, started = request.source, time.monotonic()
    call: Call[Any] = Call(
        sync=partial(lexical.search, query, request.limit, source.filters),
        deadline=request.deadline,
        what=f"lexical search of source {source.name!r}",
    )
    found = await source.lexical_calls.call(call, request.progress)
    return await _checked(NodeList("lexical", []), found, request, QueryBundle(query), started)


async def _checked(made: NodeList, found: Any, request: _Request, query: QueryBundle, started: float) -> NodeList:
    """Fill a list with what was found and passes the filter."""
    source = request.source

    async def work_over(nodes: Any, work: Callable[[], Any]) -> Any:
        """Look through nodes; through very many of them off the event loop, which it would hold up."""
        if not isinstance(nodes, Sequence) or len(nodes) <= MAX_INLINE:
            return work()
        call = Call(sync=work, deadline=request.deadline, what=f"checking source {source.name!r}")
        return await source.calls.bulkhead.call(call)

    cleaned = await work_over(found, partial(clean_nodes, found, source.name))
    every = await resolve_index_nodes(
        source.retriever, cleaned, query, deadline=request.deadline, perform=source.calls.bulkhead.call
    )
    if every is not cleaned:
        every = await work_over(every, partial(clean_nodes, every, source.name))
    kept = await work_over(every, partial(_passing, every, source))
    elapsed = round(1000 * (time.monotonic() - started))
    if source.is_private:  # all counts are of what passed, and notes, which may show how much there is, are left out
        return replace(made, nodes=kept[: request.limit], candidates=len(kept), elapsed_ms=elapsed, note=None)
    return replace(
        made,
        nodes=kept[: request.limit],
        candidates=cleaned.returned + max(0, len(every) - len(cleaned)),
        dropped_by_filter=len(every) - len(kept),
        dropped_as_unusable=cleaned.unusable,
        elapsed_ms=elapsed,
        note="; ".join(filter(None, (made.note, cleaned.why))) or None,
    )


def _passing(nodes: list[NodeWithScore], source: PreparedSource) -> list[NodeWithScore]:
    is_named = narrowed_by_ids(source.retriever)
    if is_named is not None:
        nodes = [node for node in nodes if is_named(node.node)]
    if source.filters is None:
        return nodes
    passes = matcher(source.filters)
    return [node for node in nodes if passes(node.node.metadata)]
