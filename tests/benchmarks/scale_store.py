"""Builds a store of synthetic chunks as ingestion does, once a size: the next run finds it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.database import Chunk, MetadataValue, StoredDocument
from tests.benchmarks.scale_corpus import DIMENSION, Block, Floats, ScaleCorpus, ScaleEmbedding

__all__ = ["SOURCE", "ScaleStore", "disk_bytes", "node_id"]

SOURCE: Final = "scale"
PER_DOCUMENT: Final = 100
BUILT: Final = "built.json"
LEXICAL_BUILT: Final = "lexical-built.json"
VECTORS: Final = "vectors.npy"
GROUPS: Final = "groups.npy"


class ScaleStore:
    """A store of one size in a cache directory, with its vectors beside it for exact search.

    Args:
        cache: The directory of all sizes.
        size: Chunks.
        clustered: See ``ScaleCorpus``.
    """

    def __init__(self, cache: Path, size: int, *, clustered: bool = True) -> None:
        self.folder = cache / (str(size) if clustered else f"{size}-unclustered")
        self.corpus = ScaleCorpus(size, clustered=clustered)
        self.embedding = ScaleEmbedding(self.corpus)

    def build(self, progress: Callable[[str], None] = print) -> float:
        """Build it unless it is there; what an earlier run left half built is thrown away.

        Returns:
            The seconds that building took, in this run or in the one that built it.
        """
        built = self.folder / BUILT
        if built.is_file():
            return float(json.loads(built.read_text(encoding="utf-8"))["seconds"])
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shape = (self.corpus.size, DIMENSION)
        vectors = np.lib.format.open_memmap(self.folder / VECTORS, mode="w+", dtype=np.float32, shape=shape)
        groups = np.zeros(self.corpus.size, dtype=np.int64)
        seconds = 0.0
        with self.open(create=True) as store, store.writing():
            store.documents.put_source(SOURCE, "Synthetic chunks.")
            for block in self.corpus.blocks():
                end = block.start + len(block.texts)
                vectors[block.start : end], groups[block.start : end] = block.vectors, block.groups
                self.embedding.show(block)
                started = time.perf_counter()
                _store_block(store, block)
                seconds += time.perf_counter() - started
                progress(f"{end:,} of {self.corpus.size:,} chunks after {seconds:,.0f} s")
            started = time.perf_counter()
            store.update_graph(SOURCE)
            seconds += time.perf_counter() - started
        np.save(self.folder / GROUPS, groups)
        built.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
        return seconds

    def build_lexical(self) -> float:
        """Build the lexical index unless it is there.

        Returns:
            The seconds that building took, in this run or in the one that built it.
        """
        built = self.folder / LEXICAL_BUILT
        if built.is_file():
            return float(json.loads(built.read_text(encoding="utf-8"))["seconds"])
        with self.open() as store, store.writing():
            started = time.perf_counter()
            store.lexical(SOURCE).update()
            seconds = time.perf_counter() - started
        built.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
        return seconds

    def open(self, *, create: bool = False) -> KnowledgeStore:
        """Open the store; the caller closes it."""
        return KnowledgeStore.open(self.folder / "store", embed_model=self.embedding, create=create)

    def vectors(self) -> Floats:
        """Give all vectors, on disk, shape (size, 384)."""
        loaded: Floats = np.load(self.folder / VECTORS, mmap_mode="r")
        return loaded

    def groups(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give each chunk's ``hundredth``, shape (size,)."""
        loaded: np.ndarray[tuple[int], np.dtype[np.int64]] = np.load(self.folder / GROUPS)
        return loaded


def node_id(number: int) -> str:
    """Give the id of a chunk's node."""
    return f"chunk-{number}"


def disk_bytes(path: Path) -> int:
    """Count the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _store_block(store: KnowledgeStore, block: Block) -> None:
    """Store each document in a transaction, as ingestion does."""
    chunks = [_chunk(block, at) for at in range(len(block.texts))]
    pieces = list(zip(chunks, block.vectors, strict=True))
    for start in range(0, len(pieces), PER_DOCUMENT):
        document = pieces[start : start + PER_DOCUMENT]
        store.documents.put_document(_document(str(document[0][0].metadata["file_path"])), document)


def _chunk(block: Block, at: int) -> Chunk:
    number = block.start + at
    path = f"{number // PER_DOCUMENT}.txt"
    text = f"#{number} {block.texts[at]}"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    metadata: dict[str, MetadataValue] = {
        "tenth": int(block.groups[at] % 10),
        "hundredth": int(block.groups[at]),
        "title": f"Document {number // PER_DOCUMENT}",
        "url": f"file:///scale/{path}",
        "source": SOURCE,
        "document_id": f"{SOURCE}/{path}",
        "file_path": path,
        "file_name": path,
        "chunk_index": number % PER_DOCUMENT,
    }
    return Chunk(node_id(number), number % PER_DOCUMENT, text, metadata, digest, None, None)


def _document(path: str) -> StoredDocument:
    return StoredDocument(SOURCE, path, f"/scale/{path}", "/scale", path, "scale")
