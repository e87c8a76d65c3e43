"""A retriever over texts in memory that can be slow, fail, hang or return invalid results."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self, cast

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb.testing.embeddings import words

__all__ = ["MemoryRetriever", "RecordedQuery", "Verbatim"]

HANG_SECONDS: Final = 60.0
"""Maximum seconds of a hang without a release, so that the interpreter can exit."""

Mode = Literal["sync", "async", "async_only"]


class RecordedQuery(NamedTuple):
    """One received query: its text, whether it had an embedding, and the name of the thread."""

    query_str: str
    has_embedding: bool
    thread_name: str


@dataclass(frozen=True)
class Verbatim:
    """A fault that returns ``value`` (None, a dict, ...) instead of a list of nodes."""

    value: object


SourceFault = Exception | Verbatim | Literal["hang"]


class MemoryRetriever(BaseRetriever):
    """Ranks texts by the words they share with the query.

    The score is the share of the query's distinct words found in a node, above 0 and up to 1. Nodes without such words
    are omitted; ties keep the order of the items.

        with MemoryRetriever(["Rain in Paris", "Snow in Oslo"], fault="hang") as source:
            ...  # queries hang here; leaving the context releases them

    Args:
        items: Nodes, or texts that become nodes with a hash of the text as id.
        similarity_top_k: Maximum number of nodes returned.
        latency: Duration of each query in seconds.
        mode: "sync" has only ``_retrieve``, so that an async call blocks its event loop, as with many vector stores;
            "async" also has a native ``_aretrieve``; in "async_only", ``_retrieve`` raises NotImplementedError.
        fault: Fault after the latency: an exception to raise; "hang", which ends at :meth:`release` or after 60 s;
            :class:`Verbatim`; or a callable that maps each QueryBundle to one of these or to None (no fault).
        shared_nodes: Whether to return the same ``NodeWithScore`` objects, with the original nodes, for the same query,
            so that tests can detect changes by the caller. Defaults to copies.
    """

    def __new__(cls, *_args: object, mode: Mode = "sync", **_kwargs: object) -> Self:
        """Create an object of the mode's class, because callers detect a native ``_aretrieve`` by the class."""
        return cast("Self", super().__new__(_CLASSES[mode] if cls is MemoryRetriever else cls))

    def __init__(
        self,
        items: Sequence[str | BaseNode],
        *,
        similarity_top_k: int = 2,
        latency: float = 0.0,
        mode: Mode = "sync",
        fault: SourceFault | Callable[[QueryBundle], SourceFault | None] | None = None,
        shared_nodes: bool = False,
    ) -> None:
        super().__init__()
        self.mode = mode
        self.similarity_top_k = similarity_top_k
        self.latency = latency
        self.fault = fault
        self.shared_nodes = shared_nodes
        self.queries: list[RecordedQuery] = []
        """All queries so far, in order of arrival."""
        nodes = [item if isinstance(item, BaseNode) else _text_node(item) for item in items]
        self._nodes = [(node, set(words(node.get_content(MetadataMode.NONE)))) for node in nodes]
        self._shared: dict[str, list[NodeWithScore]] = {}
        self._released = threading.Event()

    def release(self) -> None:
        """End all current hangs, and prevent later ones."""
        self._released.set()

    def __enter__(self) -> Self:
        """Return this retriever; leaving the context ends its hangs."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all hangs."""
        self.release()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self._record(query_bundle)
        time.sleep(self.latency)
        fault = self._fault_of(query_bundle)
        if fault == "hang":
            self._released.wait(HANG_SECONDS)
        return self._answer(query_bundle, fault)

    async def _retrieve_natively(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self._record(query_bundle)
        await asyncio.sleep(self.latency)
        fault = self._fault_of(query_bundle)
        ends = time.monotonic() + HANG_SECONDS
        # The release may come from any thread or event loop, so it is polled.
        while fault == "hang" and not self._released.is_set() and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self._answer(query_bundle, fault)

    def _record(self, query: QueryBundle) -> None:
        thread = threading.current_thread().name
        self.queries.append(RecordedQuery(query.query_str, query.embedding is not None, thread))

    def _fault_of(self, query: QueryBundle) -> SourceFault | None:
        return self.fault(query) if callable(self.fault) else self.fault

    def _answer(self, query: QueryBundle, fault: SourceFault | None) -> list[NodeWithScore]:
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, Verbatim):
            return cast("list[NodeWithScore]", fault.value)
        asked = set(words(query.query_str))
        shared = [(node, len(asked & held)) for node, held in self._nodes]
        best = sorted((pair for pair in shared if pair[1]), key=lambda pair: -pair[1])[: self.similarity_top_k]
        if self.shared_nodes:
            found = [NodeWithScore(node=node, score=count / len(asked)) for node, count in best]
            return list(self._shared.setdefault(query.query_str, found))
        return [NodeWithScore(node=_copied(node), score=count / len(asked)) for node, count in best]


class _AsyncMemoryRetriever(MemoryRetriever):
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await self._retrieve_natively(query_bundle)


class _AsyncOnlyMemoryRetriever(_AsyncMemoryRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise NotImplementedError(f"This source is async only; {query_bundle.query_str!r} was asked synchronously.")


_CLASSES: dict[str, type[MemoryRetriever]] = {
    "sync": MemoryRetriever,
    "async": _AsyncMemoryRetriever,
    "async_only": _AsyncOnlyMemoryRetriever,
}


def _text_node(text: str) -> TextNode:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return TextNode(id_=f"text-{digest}", text=text)


def _copied(node: BaseNode) -> BaseNode:
    if isinstance(node, IndexNode):  # its obj may be a retriever or an index, which must not be copied
        own: dict[str, Any] = {"metadata": copy.deepcopy(node.metadata), "relationships": dict(node.relationships)}
        return node.model_copy(update=own)
    return node.model_copy(deep=True)
