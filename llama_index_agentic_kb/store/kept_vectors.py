"""The vectors that a store keeps beside its documents, so that Chroma's can be made again without the embedding model.

They are float32, as Chroma's are: four bytes for each dimension, 1.5 kB for a chunk of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from llama_index_agentic_kb.store.database import Database

__all__ = ["KeptVectors", "batched", "marks", "put_vectors"]

# SQLite's own limit on parameters of one statement is 999 in old builds.
_PARAMETERS = 500


class KeptVectors:
    """The vectors of a store's chunks; they go when their chunks go.

    Args:
        database: The store's database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, source: str, node_ids: Iterable[str]) -> dict[str, list[float]]:
        """Read the vectors of nodes of a source; those that it does not have, or has no vector of, are left out."""
        found: dict[str, list[float]] = {}
        for batch in batched(node_ids):
            rows = self._database.rows(
                "SELECT node_id, vector FROM vectors JOIN chunks USING (node_id)"  # noqa: S608  (only question marks are put in)
                f" WHERE +source = ? AND node_id IN ({marks(batch)})",
                (source, *batch),
            )
            found.update((node_id, _floats(vector)) for node_id, vector in rows)
        return found

    def by_embedding(self, source: str, embedding_hashes: Iterable[str]) -> dict[str, list[float]]:
        """Find the vectors that nodes of a source already have of some texts.

        Args:
            source: The source to look in.
            embedding_hashes: The texts' hashes.

        Returns:
            The vector of each hash; hashes of which there is none are left out.
        """
        found: dict[str, list[float]] = {}
        for batch in batched(embedding_hashes):
            rows = self._database.rows(
                "SELECT embedding_hash, vector FROM chunks JOIN vectors USING (node_id)"  # noqa: S608  (only question marks are put in)
                f" WHERE source = ? AND embedding_hash IN ({marks(batch)}) GROUP BY embedding_hash",
                (source, *batch),
            )
            found.update((embedding_hash, _floats(vector)) for embedding_hash, vector in rows)
        return found

    def missing(self, source: str) -> set[str]:
        """Name the nodes of a source whose vectors are not kept, as in stores of the first release."""
        rows = self._database.rows(
            "SELECT node_id FROM chunks WHERE source = ? AND NOT EXISTS"
            " (SELECT 1 FROM vectors WHERE vectors.node_id = chunks.node_id)",
            (source,),
        )
        return {row[0] for row in rows}

    def put(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Keep the vectors of nodes that are stored, in one transaction."""
        with self._database.transaction() as connection:
            put_vectors(connection, vectors)


def put_vectors(connection: sqlite3.Connection, vectors: Mapping[str, Sequence[float]]) -> None:
    """Keep the vectors of nodes, in a transaction that is open."""
    connection.executemany(
        "INSERT OR REPLACE INTO vectors VALUES (?, ?)",
        [(node_id, struct.pack(f"<{len(vector)}f", *vector)) for node_id, vector in vectors.items()],
    )


def marks(values: Sequence[str]) -> str:
    """Give the question marks of a statement that takes so many parameters."""
    return ", ".join("?" * len(values))


def batched(values: Iterable[str], size: int = _PARAMETERS) -> Iterator[tuple[str, ...]]:
    """Cut any number of values into tuples of at most ``size``."""
    iterator = iter(values)
    while batch := tuple(islice(iterator, size)):
        yield batch


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))
