"""The scope index of a source, in a file beside the store's other indexes; ``agentic-kb calibrate`` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llama_index_agentic_kb.errors import IngestionError, RetrievalError
from llama_index_agentic_kb.search.prototypes import ScopeIndex
from llama_index_agentic_kb.store.database import DocumentDatabase, Floats

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.store import KnowledgeStore


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads the vectors of a source's chunks; see ``search.prototypes.VectorReader``."""

    documents: DocumentDatabase
    source: str
    dimension: int

    def version(self) -> str:
        """Return the source's version; empty if the source is gone."""
        state = self.documents.source_state(self.source)
        return "" if state is None else str(state.version)

    def chunks(self) -> dict[str, list[str]]:
        """Return the row ids of each document's chunks, by document id; a row id is never used again."""
        documents: dict[str, list[str]] = {}
        statement = "SELECT path, id FROM chunks WHERE source = ? ORDER BY path, chunk_index"
        for path, row in self.documents.stream(statement, (self.source,)):
            documents.setdefault(f"{self.source}/{path}", []).append(str(row))
        return documents

    def vectors(self, chunks: Sequence[str]) -> dict[str, Floats]:
        """Return the vectors of chunks, by row id."""
        rows, vectors = self.documents.vectors(np.array([int(chunk) for chunk in chunks], np.int64), self.dimension)
        return {str(row): vector for row, vector in zip(rows.tolist(), vectors, strict=True)}


def stored_scopes(store: KnowledgeStore) -> dict[str, ScopeIndex]:
    """Return the scope indexes of a store by source, up to date; sources without a readable one are left out."""
    made: dict[str, ScopeIndex] = {}
    for info in store.sources():
        with suppress(RetrievalError):
            index = store.load_scope(info.name)
            if index is None:
                continue
            reader = store.vectors(info.name).reader()
            if index.version != reader.version():
                index = index.updated(reader)
                with suppress(IngestionError):  # a store that can't be written to
                    store.save_scope(info.name, index)
            made[info.name] = index
    return made
