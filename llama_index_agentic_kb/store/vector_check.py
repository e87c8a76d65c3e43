"""Looks at a store's vectors in a process of its own: damaged ones may end it, or never let it end.

Counting rows and comparing with searches says nothing: Chroma's graph finds only part of the rows of a healthy
collection. Whether each recorded node's vector can be read, and is the one that was stored, does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llama_index_agentic_kb.store.documents import DocumentDatabase
from llama_index_agentic_kb.store.kept_vectors import batched
from llama_index_agentic_kb.store.own_process import limit_resources, own_command, own_environment

if TYPE_CHECKING:
    from llama_index_agentic_kb.store.chroma import ChromaDatabase

__all__ = ["SAMPLE", "vector_fault"]

SAMPLE: Final = 20_000
"""Up to this many nodes of a source are all looked at, else so many drawn at random."""

SEARCHED: Final = 20
"""So many of them are searched by their own vectors."""

SECONDS: Final = 180.0
NODES_PER_SECOND: Final = 1_000
"""The time that a check is given: these seconds, and more for large stores."""

_MOST_WRITTEN: Final = 4
"""A damaged graph may write without end: a file may become so many times as large as the largest one is."""

_TOLERANCE: Final = 1e-4


def vector_fault(path: Path, documents: DocumentDatabase, *, seconds: float | None = None) -> str:
    """Look at the vectors of a store; nobody may be writing into it.

    Args:
        path: The store's directory.
        documents: Its documents.
        seconds: The time it is given; None is by the store's size.

    Returns:
        What is wrong with them, in one sentence without its end; empty where they are whole.
    """
    chunks = sum(source.chunks for source in documents.sources())
    if not chunks:
        return ""
    limit = seconds or SECONDS + chunks / NODES_PER_SECOND
    try:
        done = subprocess.run(  # noqa: S603  (our own module)
            own_command(__name__, str(path)),
            env=own_environment(),
            capture_output=True,
            timeout=limit,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"reading them does not end within {limit:.0f} s"
    if done.returncode < 0:
        return f"reading them ends the process (signal {-done.returncode})"
    try:
        return str(json.loads(done.stdout)["fault"])
    except (ValueError, KeyError):
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"reading them fails: {last}"


def _main(path: Path) -> None:
    from llama_index_agentic_kb.store.chroma import ChromaDatabase  # noqa: PLC0415  (loads chromadb)

    documents = DocumentDatabase(path / "documents.db")
    directory = path / documents.state.vectors[0]
    _limit_files(directory)
    try:
        fault = _fault(documents, ChromaDatabase.persistent(directory))
    except BaseException as error:  # noqa: BLE001  (Chroma's Rust panics are no Exceptions)
        fault = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"fault": fault}))
    sys.stdout.flush()
    os._exit(0)  # what is damaged need not be closed


def _limit_files(directory: Path) -> None:
    largest = max((file.stat().st_size for file in directory.rglob("*") if file.is_file()), default=0)
    limit_resources(file_bytes=_MOST_WRITTEN * largest + 64_000_000)


def _fault(documents: DocumentDatabase, database: ChromaDatabase) -> str:
    present = set(database.sources())
    for source in documents.sources():
        if not source.chunks:
            continue
        if source.name not in present:
            return f"the source {source.name!r} has none"
        fault = _source_fault(documents, database, source.name)
        if fault:
            return f"of the source {source.name!r}, {fault}"
    return ""


def _source_fault(documents: DocumentDatabase, database: ChromaDatabase, source: str) -> str:
    database.count(source)
    recorded = sorted(set[str]().union(*documents.node_ids(source).values()))
    drawn = random.sample(recorded, min(SAMPLE, len(recorded)))
    for batch in batched(drawn):
        found = database.embeddings(source, batch)
        if len(found) < len(batch):
            return f"{len(batch) - len(found)} of {len(batch)} can't be found"
        for node_id, kept in documents.vectors.of(source, batch).items():
            if not _same(kept, found[node_id]):
                return f"that of the node {node_id} is not the one that was stored"
    collection = database.collection(source)
    asked = drawn[:SEARCHED]
    vectors = database.embeddings(source, asked)
    result = collection.query(
        query_embeddings=np.asarray([vectors[one] for one in asked], dtype=np.float32),
        n_results=10,
        include=["distances"],
    )
    # Not each one is its own nearest: rows may be equal, and the graph finds most and not all.
    near = sum(bool(distances) and min(distances) < _TOLERANCE for distances in result["distances"] or [])
    return "" if near * 2 >= len(asked) else f"{len(asked) - near} of {len(asked)} are not found by searching them"


def _same(kept: list[float], stored: list[float]) -> bool:
    """Compare directions: Chroma may give vectors back with length one."""
    one, other = np.asarray(kept), np.asarray(stored)
    if one.shape != other.shape:
        return False
    lengths = float(np.linalg.norm(one)) or 1.0, float(np.linalg.norm(other)) or 1.0
    return bool(np.allclose(one / lengths[0], other / lengths[1], atol=_TOLERANCE))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
