"""Dense search under a filter in a user's own Chroma collection, without the rows that Chroma's own query loses.

Chroma walks its graph past the rows that don't match: under filters that have nothing to do with the query, recall
falls to 0.45-0.93 (measured). And ``$ne`` and ``$nin`` let rows without the key through, which would fill the top
places and be dropped by the check. Here few matching rows are compared exactly with numpy; of many, Chroma's filter is
asked for many more candidates than are needed. A filter that is too large for one request is asked in several; where
that would take very many, the metadata of all rows are read. If it matches many, they are sieved from the nearest of
all. Nothing is remembered: the collection may change.

Limits of the embedded Chroma (measured with 1.5.9): 32,766 values in one request ("too many SQL variables"), about a
thousand conditions ("Expression tree is too large"), and some 5 ms for each condition of a request over 50,000 rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.types import FilterOperator as Operator

from llama_index_agentic_kb.errors import DeniedError, RetrievalError
from llama_index_agentic_kb.store.database import Floats
from llama_index_agentic_kb.store.vectors import Passes, check_deadline, growing, take, unit

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

EXACT_ROWS: Final = 2_000
"""Up to this many matching rows are searched exactly: fetching their vectors takes about 0.2 s."""
CANDIDATES: Final = 400
MAX_CANDIDATES: Final = 10_000
"""Chroma is asked for at least, and at most, so many candidates; the most take 0.1-0.2 s."""
MAX_VALUES: Final = 10_000
MAX_CONDITIONS: Final = 100
"""Values and conditions of one request."""
MAX_REQUESTS: Final = 50
"""Requests that a filter is asked in."""
_OPERATORS: Final = {
    Operator.EQ: "$eq",
    Operator.NE: "$ne",
    Operator.GT: "$gt",
    Operator.LT: "$lt",
    Operator.GTE: "$gte",
    Operator.LTE: "$lte",
    Operator.IN: "$in",
    Operator.NIN: "$nin",
}
Where: TypeAlias = dict[str, Any]
"""``{key: {operator: value}}``, or ``{"$and": [...]}``, ``{"$or": [...]}``."""


class ChromaFilteredSearch:
    """Searches one Chroma collection under filters; safe to use from many threads.

    Args:
        store: The collection's LlamaIndex store, a ``ChromaVectorStore``.
    """

    def __init__(self, store: BasePydanticVectorStore) -> None:
        self._store = store
        self._collection: Collection = store.client
        self._space = _space(self._collection)

    @property
    def usable(self) -> bool:
        """Whether the collection's distance is one that can be computed here."""
        return self._space in ("cosine", "l2", "ip")

    def __call__(
        self, query: VectorStoreQuery, passes: Passes, *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest rows that match a filter.

        Args:
            query: With a vector, filters, and how many rows are wanted.
            passes: Checks a node against the filter.
            deadline: ``time.monotonic()`` after which no further request is begun; None goes on.

        Returns:
            The nodes, best first, with the similarities that the store itself gives, exp(-distance); and a sentence
            that says how they were found.

        Raises:
            DeadlineExceededError: The time was over between two requests.
            RetrievalError: The query's vector is not as long as the collection's.
        """
        assert query.filters is not None
        vector = np.asarray(query.query_embedding, dtype=np.float32)
        where, top_k = chroma_where(query.filters), query.similarity_top_k
        check_deadline(deadline)
        parts = requests(where)
        whole = len(parts) != 1
        ids = self._ids(parts, deadline) if parts else self._all_ids(passes, deadline)
        taken = partial(take, fetch=self._rows, top_k=top_k, passes=passes, deadline=deadline)
        note = f"filter matches {len(ids):,}: "
        if not ids:
            return taken([]), note + "nothing to search"
        if len(ids) <= EXACT_ROWS:
            return taken(self._exact(ids, vector, deadline)), note + "searched exactly"
        nearest = partial(self._nearest, vector, None if whole else where, deadline)
        ranked = growing(nearest, max(CANDIDATES, 4 * top_k), MAX_CANDIDATES)
        if not whole:
            return taken(ranked), f"filter matches more than {EXACT_ROWS:,} rows: taken from its nearest"
        matching = set(ids)
        found = taken(item for item in ranked if item[0] in matching)
        if len(found.ids or []) >= top_k:
            return found, note + "taken from the nearest of all"
        return taken(self._exact(ids, vector, deadline)), note + "searched exactly"

    def _ids(self, parts: list[Where], deadline: float | None) -> list[str]:
        ids: list[str] = []
        for where in parts:
            check_deadline(deadline)
            limit = EXACT_ROWS + 1 if len(parts) == 1 else None  # of several, all are sieved
            ids += self._collection.get(where=where, limit=limit, include=[])["ids"]
        return list(dict.fromkeys(ids))

    def _all_ids(self, passes: Passes, deadline: float | None) -> list[str]:
        """Return the ids of all rows whose own metadata pass the check."""
        ids: list[str] = []
        for offset in range(0, self._collection.count(), MAX_VALUES):
            check_deadline(deadline)
            found = self._collection.get(limit=MAX_VALUES, offset=offset, include=["metadatas"])
            rows = zip(found["ids"], found["metadatas"] or [], strict=True)
            ids += [node_id for node_id, metadata in rows if passes(TextNode(metadata=dict(metadata or {})))]
        return list(dict.fromkeys(ids))  # rows may come and go between two requests

    def _exact(self, ids: list[str], vector: Floats, deadline: float | None) -> list[tuple[str, float]]:
        """Rank rows by their distances, as Chroma computes them."""
        ranked: list[tuple[str, float]] = []
        for start in range(0, len(ids), EXACT_ROWS):
            check_deadline(deadline)
            found = self._collection.get(ids=ids[start : start + EXACT_ROWS], include=["embeddings"])
            vectors = np.asarray(found["embeddings"], dtype=np.float32)
            if not len(vectors):  # rows may be gone since their ids were read
                continue
            if vectors.shape[1] != len(vector):
                raise RetrievalError(
                    f"The query's vector has {len(vector)} dimensions, those of the collection have "
                    f"{vectors.shape[1]}: embed queries with the model that the collection was made with."
                )
            ranked += zip(found["ids"], self._distances(vectors, vector).tolist(), strict=True)
        order = {node_id: at for at, node_id in enumerate(ids)}
        return sorted(ranked, key=lambda item: (item[1], order[item[0]]))

    def _distances(self, vectors: Floats, vector: Floats) -> Floats:
        if self._space == "l2":
            squares: Floats = ((vectors - vector) ** 2).sum(axis=1)
            return squares
        inner: Floats = 1.0 - (unit(vectors) @ unit(vector) if self._space == "cosine" else vectors @ vector)
        return inner

    def _nearest(
        self, vector: Floats, where: Where | None, deadline: float | None, count: int
    ) -> list[tuple[str, float]]:
        check_deadline(deadline)
        found = self._collection.query(
            query_embeddings=[vector.tolist()], n_results=count, where=where, include=["distances"]
        )
        return list(zip(found["ids"][0], (found["distances"] or [[]])[0], strict=True))

    def _rows(self, ids: list[str]) -> dict[str, BaseNode]:
        """Fetch nodes as the store itself makes them of rows."""
        found = self._store.query(VectorStoreQuery(query_embedding=None, similarity_top_k=len(ids)), ids=ids)
        return dict(zip(found.ids or [], found.nodes or [], strict=True))


def _space(collection: Collection) -> str:
    """Return a collection's distance: "cosine", "l2" or "ip"; "" where it is not known."""
    configuration = getattr(collection, "configuration_json", None) or {}
    for kind in ("hnsw", "spann"):
        if configuration.get(kind):
            return str(configuration[kind].get("space", "l2"))
    return str((collection.metadata or {}).get("hnsw:space", ""))


def chroma_where(filters: MetadataFilters) -> Where:
    """Return the ``where`` of a filter.

    Args:
        filters: At least one filter; groups are "and" or "or".

    Raises:
        DeniedError: Chroma has no such operator or group.
    """
    if filters.condition is FilterCondition.NOT:
        raise DeniedError("Chroma has no 'not': filters over it must come without negated groups")
    parts = [_part(part) for part in filters.filters]
    if filters.condition is FilterCondition.OR:
        return _group("$or", _listed(parts))
    return _group("$and", parts)


def _group(logic: str, parts: list[Where]) -> Where:
    return parts[0] if len(parts) == 1 else {logic: parts}


def _listed(parts: list[Where]) -> list[Where]:
    """Put equalities on one key into one list, of one type as Chroma's lists are: a thousand cost no more than one."""
    lists: dict[tuple[str, type], list[Any]] = {}
    others: list[Where] = []
    for part in parts:
        ((key, inner),) = part.items()
        values = [] if isinstance(inner, list) else inner.get("$in") or [inner[name] for name in inner if name == "$eq"]
        if values:
            lists.setdefault((key, type(values[0])), []).extend(values)
        else:
            others.append(part)
    joined: list[Where] = [
        {key: {"$in": list(dict.fromkeys(values))} if len(values) > 1 else {"$eq": values[0]}}
        for (key, _), values in lists.items()
    ]
    return joined + others


def _part(part: MetadataFilter | MetadataFilters) -> Where:
    if isinstance(part, MetadataFilters):
        return chroma_where(part)
    if part.operator not in _OPERATORS:
        raise DeniedError(f"Chroma has no operator {part.operator.value!r}, which the filter on {part.key!r} needs")
    return {part.key: {_OPERATORS[part.operator]: part.value}}


def fits(where: Where) -> bool:
    """Return whether one request can hold it."""
    conditions, values = _size(where)
    return conditions <= MAX_CONDITIONS and values <= MAX_VALUES


def requests(where: Where) -> list[Where]:
    """Return filters of one request each whose rows together are a filter's; none where they are too many."""
    fitting: list[Where] = []
    waiting = [where]
    while waiting:
        part = waiting.pop()
        if fits(part):
            fitting.append(part)
            continue
        halves = _halves(part)
        if not halves or len(fitting) + len(waiting) + len(halves) > MAX_REQUESTS:
            return []
        waiting += halves
    return fitting


def _halves(where: Where) -> list[Where]:
    """Return two filters whose rows together are a filter's: an "or" or a list, in an "and" the largest, is halved."""
    ((key, inner),) = where.items()
    if key == "$and":
        for at in sorted(range(len(inner)), key=lambda at: _size(inner[at]), reverse=True):
            if halves := _halves(inner[at]):
                return [{key: [*inner[:at], half, *inner[at + 1 :]]} for half in halves]
        return []
    values = inner if key == "$or" else inner.get("$in", [])
    parts = [values[: len(values) // 2], values[len(values) // 2 :]]
    if not parts[0]:
        return []
    return [_group(key, part) if key == "$or" else {key: {"$in": part}} for part in parts]


def _size(where: Where) -> tuple[int, int]:
    """Count conditions and values."""
    inner = next(iter(where.values()))
    if isinstance(inner, list):
        sizes = [_size(part) for part in inner]
        return sum(conditions for conditions, _ in sizes), sum(values for _, values in sizes)
    value = next(iter(inner.values()))
    return 1, len(value) if isinstance(value, list) else 1
