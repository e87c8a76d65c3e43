"""One query among the rows of a Chroma collection: exact, sieved from an unfiltered search, or with Chroma's filter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult

from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.store.matches import Floats, Matches, distances, unit
from llama_index_agentic_kb.store.where import Where, check_deadline, matching_ids

__all__ = ["EXACT_ROWS", "CollectionSearch", "Passes"]

Passes: TypeAlias = Callable[[BaseNode], bool]
"""Checks a node against the filter."""

EXACT_ROWS: Final = 2_000
"""Up to this many matching rows are searched exactly at once: fetching their vectors takes about 0.2 s."""

CANDIDATES: Final = 400
"""An over-fetch asks for at least this many: the graph is walked as far as it is asked for results."""

MOST_CANDIDATES: Final = 10_000
"""And for at most this many, which takes 0.1-0.2 s."""

MARGIN: Final = 5
"""How many times the candidates that are needed on average are asked for."""


class CollectionSearch:
    """One query in one collection.

    Args:
        store: The collection's LlamaIndex store.
        space: Its distance: "cosine", "l2" or "ip".
        query: With a vector; its filters are not looked at.
        passes: Checks each row as it is now.
        deadline: ``time.monotonic()`` after which no further request is begun; None goes on.
    """

    def __init__(
        self,
        store: BasePydanticVectorStore,
        space: str,
        query: VectorStoreQuery,
        passes: Passes,
        deadline: float | None,
    ) -> None:
        self.deadline = deadline
        self.top_k = query.similarity_top_k
        self._store = store
        self._collection = store.client
        self._space = space
        self._query = query
        self._vector: list[float] = list(query.query_embedding or [])
        self._passes = passes

    def without_deadline(self) -> CollectionSearch:
        """Give the same search, with all the time it takes."""
        return CollectionSearch(self._store, self._space, self._query, self._passes, None)

    def ids(self, where: Where, limit: int | None = None) -> list[str]:
        """Ask for the ids of matching rows; ``limit`` only where the ``where`` fits one request."""

        def get(part: Where) -> list[str]:
            ids: list[str] = self._collection.get(where=part, limit=limit, include=[])["ids"]
            return ids

        return matching_ids(get, where, self.deadline)

    def fetch_vectors(self, matches: Matches) -> None:
        """Fetch the rows' vectors, in portions between which the deadline is looked at."""
        ids: list[str] = []
        parts: list[Floats] = []
        for batch in _batches(matches.ids, EXACT_ROWS):
            check_deadline(self.deadline)
            found = self._collection.get(ids=batch, include=["embeddings"])
            if found["ids"]:  # rows may be gone since their ids were read
                ids.extend(found["ids"])
                parts.append(np.asarray(found["embeddings"], dtype=np.float32))
        vectors = np.concatenate(parts) if parts else np.zeros((0, len(self._vector)), dtype=np.float32)
        matches.vector_ids = ids
        matches.vectors = unit(vectors) if self._space == "cosine" else vectors

    def exact(self, matches: Matches) -> VectorStoreQueryResult:
        """Compare the query with every matching row."""
        if matches.vectors is None:
            self.fetch_vectors(matches)
        vectors = matches.vectors
        assert vectors is not None
        if len(vectors) and vectors.shape[1] != len(self._vector):
            raise RetrievalError(
                f"The query's vector has {len(self._vector)} dimensions, those of the collection have "
                f"{vectors.shape[1]}: embed queries with the model that the collection was made with."
            )
        far = distances(vectors, np.asarray(self._vector, dtype=np.float32), self._space)
        order = np.argsort(far, kind="stable")
        ranked = ((matches.vector_ids[at], float(far[at])) for at in order.tolist())
        return self._take(ranked, matches)

    def sieve(self, matches: Matches) -> tuple[VectorStoreQueryResult, int]:
        """Take the matching rows out of an unfiltered search's, asking for more until there are enough."""
        total = matches.total or MOST_CANDIDATES
        most = min(total, MOST_CANDIDATES)
        candidates = min(most, max(CANDIDATES, math.ceil(MARGIN * self.top_k * total / len(matches.ids))))
        while True:
            ranked = self._nearest(candidates)
            found = self._take((one for one in ranked if one[0] in matches.ids), matches)
            if len(found.ids or []) >= self.top_k or candidates >= most:
                return found, candidates
            candidates = min(most, candidates * 4)

    def filtered(self, where: Where) -> tuple[VectorStoreQueryResult, int]:
        """Search with Chroma's own filter and many candidates, asking for more until enough pass the check."""
        candidates = max(CANDIDATES, 4 * self.top_k)
        while True:
            ranked = self._nearest(candidates, where)
            found = self._take(iter(ranked), None)
            exhausted = len(ranked) < candidates or candidates >= MOST_CANDIDATES
            if len(found.ids or []) >= self.top_k or exhausted:
                return found, candidates
            candidates = min(MOST_CANDIDATES, candidates * 4)

    def _nearest(self, candidates: int, where: Where | None = None) -> list[tuple[str, float]]:
        check_deadline(self.deadline)
        found = self._collection.query(
            query_embeddings=[self._vector], n_results=candidates, where=where, include=["distances"]
        )
        return list(zip(found["ids"][0], found["distances"][0], strict=True))

    def _take(self, ranked: Iterator[tuple[str, float]], matches: Matches | None) -> VectorStoreQueryResult:
        """Fetch rows, best first, until enough of them pass the check; those that fail are known from then on."""
        rejected = set() if matches is None else matches.rejected
        left = (one for one in ranked if one[0] not in rejected)
        nodes: list[BaseNode] = []
        ids: list[str] = []
        similarities: list[float] = []
        asked = self.top_k
        while len(ids) < self.top_k and (portion := dict(islice(left, asked))):
            rows = self._rows(list(portion))
            for node_id, distance in portion.items():
                node = rows.get(node_id)
                if node is None:
                    continue  # gone since its id was read
                if not self._passes(node):
                    rejected.add(node_id)
                elif len(ids) < self.top_k:
                    nodes.append(node)
                    ids.append(node_id)
                    similarities.append(math.exp(-distance))
            asked = min(asked * 2, EXACT_ROWS)
        return VectorStoreQueryResult(nodes=nodes, similarities=similarities, ids=ids)

    def _rows(self, ids: list[str]) -> dict[str, BaseNode]:
        """Fetch nodes as the store itself makes them of rows."""
        check_deadline(self.deadline)
        wanted = VectorStoreQuery(query_embedding=None, similarity_top_k=len(ids))
        found = self._store.query(wanted, ids=ids)
        return dict(zip(found.ids or [], found.nodes or [], strict=True))


def _batches(ids: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(ids)
    while batch := list(islice(iterator, size)):
        yield batch
