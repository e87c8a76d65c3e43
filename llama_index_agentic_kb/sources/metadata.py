"""The metadata of what a source holds, read as a stream under the source's mandatory filter.

What is counted in it are *units*: a document (its chunks' metadata, together) or a chunk. A unit counts once for each
value that it has; the items of a list are values each. What is no text, number or truth is no value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilters

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import FilterGroup, FilterLogic, FilterNode, Principal, all_of, matcher
from llama_index_agentic_kb.sources.base import KnowledgeSource, MetadataReader
from llama_index_agentic_kb.sources.filters import conditions, flat, lower
from llama_index_agentic_kb.sources.index import refusal

__all__ = [
    "Metadata",
    "MetadataRow",
    "Per",
    "Value",
    "distinct",
    "is_value",
    "over_metadata",
    "rank",
    "unit_values",
    "units",
]

T = TypeVar("T")

Metadata: TypeAlias = Mapping[str, Any]
Value: TypeAlias = bool | int | float | str
Per: TypeAlias = Literal["document", "chunk"]
"""What is counted."""

_EVERY: Final = 256
"""Rows after which the time is looked at."""
_PUSHED: Final = 100
"""Values of a filter that any store takes in one request."""
_POOL: Final = WorkerPool("metadata", max_workers=4)
"""Readings at once; they never take a search's thread."""


class MetadataRow(NamedTuple):
    """The metadata of one chunk.

    Args:
        document: The id of its document. Rows of one document follow each other.
        metadata: Its metadata.
    """

    document: str
    metadata: Metadata


async def over_metadata(
    source: KnowledgeSource,
    work: Callable[[Iterator[MetadataRow]], T],
    filters: FilterNode | None,
    *,
    principal: Principal | None,
    deadline: float | None,
) -> T:
    """Do work over the metadata of everything that passes a source's effective filter, on a thread.

    Args:
        source: What is read: through its ``metadata_reader``, else the documents of its index.
        work: Takes the rows.
        filters: The caller's filter, beside the source's mandatory one. Each row is checked, whatever the store did.
        principal: Who asks; only what that one may see is read.
        deadline: ``time.monotonic()`` after which reading stops.

    Raises:
        DeniedError: The principal may not see the source.
        InvalidRequestError: The source can't list what it holds.
        RetrievalError: Reading failed.
        DeadlineExceededError: It took too long.
    """
    effective = source.effective_filter(all_of(source.permitted(principal), filters))
    read, permissions = source.metadata_reader or _index_reader(source, effective), source.permissions

    def run() -> T:
        try:
            with closing(_passing(read(), effective, deadline)) as rows:
                return work(rows if permissions is None else _without_permissions(rows, permissions))
        except AgenticKBError:
            raise
        except Exception as error:
            message = error_message(error)
            raise RetrievalError(f"the metadata of source {source.name!r} could not be read: {message}") from error

    result: T = await Call(sync=run, deadline=deadline, pool=_POOL, what=f"metadata of source {source.name!r}")
    return result


def _passing(
    rows: Iterable[tuple[str, Metadata]], filters: FilterNode | None, deadline: float | None
) -> Generator[MetadataRow, None, None]:
    passes = None if filters is None else matcher(filters)
    try:
        for number, (document, metadata) in enumerate(rows):
            if deadline is not None and number % _EVERY == 0 and time.monotonic() > deadline:
                raise DeadlineExceededError("the metadata were still being read when the time was over")
            if passes is None or passes(metadata):
                yield MetadataRow(document, metadata)
    finally:
        close = getattr(rows, "close", None)  # a generator may hold a connection
        if close is not None:
            close()


def _without_permissions(rows: Iterable[MetadataRow], permissions: Permissions) -> Iterator[MetadataRow]:
    """Leave out whom a document is shared with: that is not for its readers to count."""
    return (MetadataRow(row.document, permissions.without(row.metadata)) for row in rows)


def _index_reader(source: KnowledgeSource, filters: FilterNode | None) -> MetadataReader:
    index = source.index
    if not isinstance(index, VectorStoreIndex):
        raise _unlistable(source)
    store = index.vector_store
    if isinstance(store, SimpleVectorStore):  # its docstore may be shared, and keeps what was deleted from the index
        return lambda: _rows(index.docstore.get_nodes(list(store.data.embedding_dict)))
    if not store.stores_text or index._store_nodes_override:  # noqa: SLF001 (no public name)
        return lambda: _rows(index.docstore.get_nodes(list(index.index_struct.nodes_dict.values())))
    if type(store).get_nodes is BasePydanticVectorStore.get_nodes:
        raise _unlistable(source)
    return lambda: _rows(store.get_nodes(node_ids=None, filters=_pushed(index, filters)))


def _pushed(index: VectorStoreIndex, filters: FilterNode | None) -> MetadataFilters | None:
    """Return what the store can leave out itself, to spare reading; all rows are checked in any case."""
    if filters is None:
        return None
    tree = flat(filters)
    parts = tree.filters if isinstance(tree, FilterGroup) and tree.logic is FilterLogic.AND else [tree]
    small = (part for part in parts if sum(len(one.values) for one in conditions(part)) <= _PUSHED)
    pushed = all_of(*(part for part in small if refusal(index, part) is None))
    return None if pushed is None else lower(pushed)


def _rows(nodes: Iterable[BaseNode]) -> list[tuple[str, Metadata]]:
    rows = [(node.ref_doc_id or node.node_id, node.metadata) for node in nodes]
    return sorted(rows, key=lambda row: row[0])


def _unlistable(source: KnowledgeSource) -> InvalidRequestError:
    return InvalidRequestError(
        f"source {source.name!r} can't list what it holds: that takes a store made by `agentic-kb ingest`, a "
        "VectorStoreIndex that keeps its nodes, or KnowledgeSource(metadata_reader=...)"
    )


# -- units and values ----------------------------------------------------------------------------------------------


def units(rows: Iterable[MetadataRow], per: Per) -> Iterator[list[MetadataRow]]:
    """Return the rows of each document together, or each row alone."""
    if per == "chunk":
        return ([row] for row in rows)
    return (list(together) for _, together in groupby(rows, key=attrgetter("document")))


def unit_values(unit: Iterable[MetadataRow], name: str) -> Iterator[Value]:
    """Return all values that a unit has of a field; one may come several times."""
    for row in unit:
        value = row.metadata.get(name)
        yield from filter(is_value, value if isinstance(value, (list, tuple, set, frozenset)) else (value,))


def is_value(value: Any) -> bool:
    """Return whether it can be counted and sorted."""
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def distinct(value: Value) -> tuple[bool, Value]:
    """Return what tells values apart: to Python, ``True`` is 1."""
    return isinstance(value, bool), value


def rank(value: Value) -> tuple[int, Any]:
    """Return what values of all kinds are sorted by: truths, numbers, text."""
    return 2 if isinstance(value, str) else 0 if isinstance(value, bool) else 1, value
