"""Chroma in directories, imported here alone and late: it takes a second to load.

Chroma's client builds the embedding function that a collection's configuration names, which in a hostile directory
means loading model code of its choice. Collections are opened without one, and one that names any is refused. A user's
own Chroma server or client is not opened here: see ``sources``.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.client import Client
from chromadb.api.models.Collection import Collection
from chromadb.config import Settings

from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError

if TYPE_CHECKING:
    from llama_index.vector_stores.chroma import ChromaVectorStore

    from llama_index_agentic_kb.store.database import Floats, Ids

__all__ = ["ChromaDirectory", "ChromaGraph"]

_COSINE: Final[Any] = {"hnsw": {"space": "cosine"}}

_opened_in: int | None = None  # the process that first opened a directory


class ChromaDirectory:
    """A Chroma database in a directory; one process at a time may write into it.

    Args:
        path: The directory; made when missing.

    Raises:
        ConfigurationError: This process was forked from one that had opened a directory.
    """

    def __init__(self, path: str | Path) -> None:
        self._client = _client(path)
        # Not closed while a search is in it, nor by a forked child, which would wait for threads of its parent.
        self._finalizer = weakref.finalize(self, _close, self._client, os.getpid())
        self._finalizer.atexit = False

    @property
    def max_batch(self) -> int:
        """How many rows one request may carry."""
        return int(self._client.get_max_batch_size())

    def collection(self, name: str, *, create: bool) -> Collection:
        """Return a collection, with cosine distance where it is created here.

        Raises:
            StoreMismatchError: Its configuration names an embedding function.
            ChromaError: It does not exist, or is damaged.
        """
        if not create:
            return self._client.get_collection(name, embedding_function=None)
        found = self._client.get_or_create_collection(name, embedding_function=None, configuration=_COSINE)
        # Only the raw JSON is read: Chroma's own accessors (``configuration``, ``schema``) build what it names.
        for configuration in (found.configuration_json, found.get_model().serialized_schema):
            for embedding_function in _embedding_functions(configuration):
                raise StoreMismatchError(
                    f"The Chroma collection {name!r} names an embedding function ({embedding_function!r}), which this "
                    "library never loads. Build it again: `agentic-kb repair --rebuild`."
                )
        return found

    def vector_store(self, name: str) -> ChromaVectorStore:
        """Return the collection of any name, created when missing, as a LlamaIndex vector store."""
        from llama_index.vector_stores.chroma import ChromaVectorStore  # noqa: PLC0415 (loads LlamaIndex)

        derived = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # Chroma's names are few
        return ChromaVectorStore(chroma_collection=self.collection(derived, create=True))

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        self._finalizer()


class ChromaGraph:
    """A directory with one collection: vectors by the ids of their chunks, nothing else.

    Args:
        path: The directory.
        create: Whether rows will be added.

    Raises:
        ConfigurationError: This process was forked from one that had opened a directory.
        ChromaError: There is no graph in it, or it is damaged.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._directory = ChromaDirectory(path)
        self._collection = self._directory.collection("graph", create=create)

    def nearest(self, vector: Floats, count: int) -> list[tuple[int, float]]:
        """Return the nearest chunks with their cosine distances, best first."""
        found = self._collection.query(query_embeddings=vector[None, :], n_results=count, include=["distances"])
        distances = found["distances"] or [[]]
        return list(zip(map(int, found["ids"][0]), distances[0], strict=True))

    def ids(self) -> set[int]:
        """Return the ids of all its chunks."""
        return set(map(int, self._collection.get(include=[])["ids"]))

    def add(self, ids: Ids, vectors: Floats) -> None:
        """Add chunks."""
        self._collection.add(ids=list(map(str, ids.tolist())), embeddings=np.array(vectors))

    def delete(self, ids: Iterable[int]) -> None:
        """Delete chunks."""
        listed, size = list(map(str, ids)), self._directory.max_batch
        for start in range(0, len(listed), size):
            self._collection.delete(ids=listed[start : start + size])

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        self._directory.close()


def _client(path: str | Path) -> ClientAPI:
    global _opened_in  # noqa: PLW0603 (of the process)
    _opened_in = _opened_in or os.getpid()
    if _opened_in != os.getpid():  # it would wait without end for threads that don't come along
        raise ConfigurationError(
            f"This process was forked from {_opened_in}, which had opened a Chroma directory, and can't open one any "
            "more. Open stores only in the children, or start them with 'spawn' (multiprocessing.set_start_method)."
        )
    settings = Settings(
        _env_file=None,  # no setting from a file in the working directory
        anonymized_telemetry=False,
        chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
        is_persistent=True,
        # Resolved: Chroma shares one engine per path as spelt, and two that write into one directory damage it.
        persist_directory=str(Path(path).resolve()),
    )
    return Client(settings=settings)


def _close(client: ClientAPI, pid: int) -> None:
    if os.getpid() == pid:
        client.close()  # type: ignore[attr-defined]  # of the client's class, not of its interface


def _embedding_functions(configuration: object) -> Iterator[str]:
    """Yield the names of the embedding functions in a configuration; ``legacy`` and ``unknown`` mean none."""
    if isinstance(configuration, list):
        for item in configuration:
            yield from _embedding_functions(item)
    if not isinstance(configuration, dict):
        return
    for key, value in configuration.items():
        if key != "embedding_function":
            yield from _embedding_functions(value)
        elif isinstance(value, dict) and value.get("type") in ("legacy", "unknown") and "name" not in value:
            continue
        elif value is not None:
            yield str(value.get("name", value)) if isinstance(value, dict) else str(value)
