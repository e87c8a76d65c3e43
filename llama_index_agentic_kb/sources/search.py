"""One search of one source: its dense and its lexical way side by side, each timed, each with an end of its own.

Where one way fails or is late and the other finds something, its list holds the error and the search succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, Job, start, wait
from llama_index_agentic_kb.account.callbacks import guard_component
from llama_index_agentic_kb.guard.pipeline import Progress, ResiliencePipeline
from llama_index_agentic_kb.schema import FilterNode, matcher
from llama_index_agentic_kb.search.lexical import LexicalSearch, NotIndexedError
from llama_index_agentic_kb.sources.cleaning import CleanNodes, clean_nodes
from llama_index_agentic_kb.sources.filtered import note_of, until
from llama_index_agentic_kb.sources.index import has_native_async, narrowed_by_ids
from llama_index_agentic_kb.sources.recursion import resolve_index_nodes
from llama_index_agentic_kb.sources.results import NodeList, SearchResult

__all__ = ["BundleFlow", "PreparedSource", "SourceWays"]

MANY: Final = 200
"""Nodes that are looked through on the event loop at a time: about 2 ms."""

BundleFlow: TypeAlias = Callable[[], Coroutine[Any, Any, QueryBundle]]
"""Gives a search's own bundle, with its vector."""


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """A source's retriever for one effective filter."""

    retriever: BaseRetriever
    filters: FilterNode | None
    embed_model: BaseEmbedding | None
    scale: Hashable | None
    """Searches of one scale have scores that can be compared."""
    kind: str = "retriever"
    """What its list is called; see ``NodeList``."""
    lexical: LexicalSearch | None = None
    """Asked beside the retriever."""
    private: bool = False
    """Whether there are documents that the caller may not see: nothing that is told may count them."""


class SourceWays:
    """Searches one source in all its ways.

    Args:
        name: The source's, for errors and threads.
        own: Makes the calls of the retriever.
        lexical: Makes those of the lexical index. The ways have bulkheads of their own: a lexical index that is being
            built never keeps a dense search from its place.
        native_async: Whether the retriever's ``aretrieve`` really awaits; None finds out as far as it can.
    """

    def __init__(
        self, name: str, own: ResiliencePipeline, lexical: ResiliencePipeline, *, native_async: bool | None
    ) -> None:
        self.own = own
        self.lexical = lexical
        self._name = name
        self._native_async = native_async

    async def search(
        self,
        prepared: PreparedSource,
        query: str,
        bundle: BundleFlow,
        *,
        limit: int,
        deadline: float | None,
        progress: Progress | None = None,
    ) -> SearchResult:
        """Search and check what comes back.

        Args:
            prepared: The retriever, its filter, and what is asked beside it.
            query: The text. The lexical way begins with it at once.
            bundle: The dense way begins when this has given the query's vector.
            limit: Documents of each list.
            deadline: ``time.monotonic()`` at which each way is given up.
            progress: Told of all calls.

        Raises:
            RetrievalError: The source returned something that is no list of nodes.
            DeadlineExceededError: It did not answer in time.
            SourceUnavailableError: It was not asked: it failed too often lately, or too many wait for it.
        """
        progress = progress or Progress()
        if prepared.lexical is None:
            return SearchResult(((await self._retriever_list(prepared, bundle, limit, deadline, progress)),))
        words = self._lexical_list(prepared, prepared.lexical, query, limit, deadline, progress)
        lexical: Job[NodeList] = start(words)
        try:
            dense = await self._retriever_list(prepared, bundle, limit, deadline, progress)
        except Exception as error:  # noqa: BLE001 (kept in its list, or raised below)
            dense = NodeList(prepared.kind, [], prepared.scale, error=error)
        await wait([lexical])  # it has the deadline itself
        return _side_by_side(dense, lexical)

    # -- dense, or whatever the retriever does -------------------------------------------------------------------

    async def _retriever_list(
        self,
        prepared: PreparedSource,
        bundle: BundleFlow,
        limit: int,
        deadline: float | None,
        progress: Progress,
    ) -> NodeList:
        with_vector = await bundle()
        started = time.monotonic()
        retriever = until(guard_component(prepared.retriever), deadline)
        found = await self._retrieve(retriever, with_vector, deadline, progress)
        made = NodeList(prepared.kind, [], prepared.scale, note=note_of(found))
        return await self._checked(made, found, prepared, with_vector, limit, deadline, started)

    async def _retrieve(
        self, retriever: BaseRetriever, bundle: QueryBundle, deadline: float | None, progress: Progress
    ) -> Any:
        native = has_native_async(retriever) if self._native_async is None else self._native_async
        what = f"source {self._name!r}"
        aretrieve = partial(retriever.aretrieve, bundle)
        try:
            call = Call(
                sync=partial(retriever.retrieve, bundle),
                native=aretrieve if native else None,
                deadline=deadline,
                what=what,
            )
            return await self.own.call(call, progress)
        except NotImplementedError:
            if not native:
                raise
            only_async = Call(native=aretrieve, deadline=deadline, what=what)  # called from sync
            return await self.own.call(only_async, progress)

    # -- lexical ---------------------------------------------------------------------------------------------------

    async def _lexical_list(
        self,
        prepared: PreparedSource,
        lexical: LexicalSearch,
        query: str,
        limit: int,
        deadline: float | None,
        progress: Progress,
    ) -> NodeList:
        started = time.monotonic()
        call = Call(
            sync=partial(lexical.search, query, limit, prepared.filters),
            deadline=deadline,
            what=f"lexical search of source {self._name!r}",
        )
        found = await self.lexical.call(call, progress)
        made = NodeList("lexical", [])
        return await self._checked(made, found, prepared, QueryBundle(query), limit, deadline, started)

    # -- what both return ------------------------------------------------------------------------------------------

    async def _checked(
        self,
        made: NodeList,
        found: Any,
        prepared: PreparedSource,
        bundle: QueryBundle,
        limit: int,
        deadline: float | None,
        started: float,
    ) -> NodeList:
        """Fill a list with what was found and passes the filter; index nodes are followed."""
        looked: CleanNodes = await self._at_leisure(partial(clean_nodes, found, self._name), found, deadline)
        every = await resolve_index_nodes(
            prepared.retriever, looked, bundle, deadline=deadline, perform=self.own.plain_call
        )
        if every is not looked:
            every = await self._at_leisure(partial(clean_nodes, every, self._name), every, deadline)
        kept = await self._at_leisure(partial(_passing, every, prepared), every, deadline)
        if prepared.private:  # all counts are of what passed, and notes, which may tell how much there is, are left out
            elapsed = round(1000 * (time.monotonic() - started))
            return replace(made, nodes=kept[:limit], candidates=len(kept), elapsed_ms=elapsed, note=None)
        further = len(every) - len(looked)  # what index nodes stood for, more than themselves
        return replace(
            made,
            nodes=kept[:limit],
            candidates=looked.returned + max(0, further),
            dropped_by_filter=len(every) - len(kept),
            dropped_as_unusable=looked.unusable,
            elapsed_ms=round(1000 * (time.monotonic() - started)),
            note="; ".join(filter(None, (made.note, looked.why))) or None,
        )

    async def _at_leisure(self, work: Callable[[], Any], over: Any, deadline: float | None) -> Any:
        """Do work over nodes; over very many of them off the event loop, which it would hold up."""
        if not isinstance(over, Sequence) or len(over) <= MANY:
            return work()
        call = Call(sync=work, deadline=deadline, what=f"checking source {self._name!r}")
        return await self.own.plain_call(call)


def _side_by_side(dense: NodeList, lexical: Job[NodeList]) -> SearchResult:
    """Give both lists; the dense way's error is raised where the lexical one found nothing either."""
    error = lexical.error
    found = lexical.value or NodeList("lexical", [], error=error if isinstance(error, Exception) else None)
    if dense.error is not None and not found.nodes:
        raise dense.error
    if isinstance(error, NotIndexedError):
        return SearchResult((replace(dense, note="; ".join(filter(None, (dense.note, str(error))))),))
    return SearchResult((dense, found))


def _stands_for_more(node: Any) -> bool:
    return isinstance(getattr(node, "node", None), IndexNode)


def _passing(nodes: list[NodeWithScore], prepared: PreparedSource) -> list[NodeWithScore]:
    named = narrowed_by_ids(prepared.retriever)
    if named is not None:
        nodes = [node for node in nodes if named(node.node)]
    if prepared.filters is None:
        return nodes
    passes = matcher(prepared.filters)
    return [node for node in nodes if passes(node.node.metadata)]
