"""Chroma, imported here alone, and late: it takes a second to load.

Two habits of Chroma's client are kept out here. It builds the embedding function that a collection's configuration
names, which for a hostile server means loading model code of its choice: collections are opened without one, and one
that names any is refused. And its HTTP session has no timeout: here it has one from the first request on.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np
from chromadb.api import ClientAPI, ServerAPI
from chromadb.api.client import Client
from chromadb.api.models.Collection import Collection
from chromadb.auth import UserIdentity
from chromadb.config import Settings
from chromadb.errors import ChromaError, NotFoundError

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode
    from llama_index.vector_stores.chroma import ChromaVectorStore

    from llama_index_agentic_kb.store.database import Floats, Ids

__all__ = ["ChromaDatabase", "ChromaGraph", "collection_name"]

_SOURCE_KEY: Final = "agentic_kb_source"  # of a collection's metadata: the source's own name
_PLAIN_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{1,98}[a-zA-Z0-9]")
_DERIVED_NAME: Final = re.compile(r"-[0-9a-f]{16}")
_COSINE: Final[Any] = {"hnsw": {"space": "cosine"}}

_opened_in: int | None = None  # the process that first opened a directory


class ChromaGraph:
    """A directory with one collection: vectors by the ids of their chunks, nothing else.

    Args:
        directory: Where it is.
        create: Whether to make the collection where it is missing.

    Raises:
        ConfigurationError: This process was forked from one that had opened a directory.
        ChromaError: There is no such collection, or it is damaged.
    """

    def __init__(self, directory: Path, *, create: bool = False) -> None:
        self._client = _directory_client(directory)
        # Not closed while a search is in it, nor by a forked child, which would wait for threads of its parent.
        self._finalizer = weakref.finalize(self, _close, self._client, os.getpid())
        self._finalizer.atexit = False
        make = self._client.get_or_create_collection if create else self._client.get_collection
        self._collection = make("graph", embedding_function=None, **({"configuration": _COSINE} if create else {}))

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
        for batch in _batches(list(map(str, ids)), self._client.get_max_batch_size()):
            self._collection.delete(ids=list(batch))

    def close(self) -> None:
        """Release its files; a second call does nothing."""
        self._finalizer()


def _close(client: ClientAPI, pid: int) -> None:
    if os.getpid() == pid:
        client.close()  # type: ignore[attr-defined]  # of the client's class, not of its interface


class ChromaDatabase:
    """Collections of one Chroma database, one for each source; safe to use from many threads.

    Make one with `persistent` or `http`.

    Args:
        client: An open Chroma client; closed with this object.
    """

    def __init__(self, client: ClientAPI) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._collections: dict[str, Collection] = {}

    @classmethod
    def persistent(cls, path: str | Path) -> ChromaDatabase:
        """Open the database in a directory, or make one there.

        Args:
            path: The directory. One process at a time may write into it.

        Returns:
            The open database.

        Raises:
            ConfigurationError: The directory can't be opened, or this process was forked from one that had opened any.
        """
        try:
            return cls(_directory_client(path))
        except (ValueError, ChromaError, OSError) as error:
            message = error_message(error)
            raise ConfigurationError(f"The Chroma database in {str(path)!r} can't be opened: {message}") from error

    @classmethod
    def http(
        cls,
        host: str = "localhost",
        port: int = 8000,
        *,
        timeout: float = 10.0,
        max_connections: int = 8,
        ssl: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> ChromaDatabase:
        """Connect to a Chroma server.

        Args:
            host: Its host name.
            port: Its port.
            timeout: Seconds to wait for a connection, for each piece of a reply, and for a free connection.
            max_connections: Requests in flight at once; a server's answers get slow beyond about 8.
            ssl: Whether to use HTTPS.
            headers: Sent with each request, for authentication.

        Returns:
            The open database.

        Raises:
            ConfigurationError: No Chroma server answers there within the timeout.
        """
        settings = _settings(
            chroma_api_impl="chromadb.api.fastapi.FastAPI",
            chroma_server_host=host,
            chroma_server_http_port=port,
            chroma_server_ssl_enabled=ssl,
            chroma_server_headers=dict(headers or {}),
            chroma_http_max_connections=max_connections,
        )
        try:
            return cls(_TimedClient(settings, timeout))
        except (ValueError, ChromaError, httpx.HTTPError) as error:
            raise ConfigurationError(
                f"No Chroma server answers at {host}:{port} within {timeout:g} s: {error_message(error)}. "
                "Start one with `chroma run`, or correct host and port."
            ) from error

    def close(self) -> None:
        """Release the database; a second call does nothing."""
        with self._lock:
            self._collections.clear()
            # Not part of ClientAPI in the releases that lack it.
            close = getattr(self._client, "close", None)
            if close is not None:
                close()

    def sources(self) -> list[str]:
        """Return the names of the sources that have a collection here; other libraries' collections are left out."""
        found = ((collection.metadata or {}).get(_SOURCE_KEY) for collection in self._client.list_collections())
        return sorted(source for source in found if isinstance(source, str))

    def vector_store(self, source: str, *, create: bool = False) -> ChromaVectorStore:
        """Return a source's collection as a LlamaIndex vector store.

        Args:
            source: The source's name.
            create: Make an empty collection, with cosine distance, when it is missing.

        Returns:
            The vector store; a new object over the same collection at each call.

        Raises:
            ConfigurationError: There is no such collection and ``create`` is false.
            StoreMismatchError: The collection was not made by this library, or its configuration names an
                embedding function.
        """
        from llama_index.vector_stores.chroma import ChromaVectorStore  # noqa: PLC0415 (loads LlamaIndex)

        return ChromaVectorStore(chroma_collection=self._collection(source, create=create))

    def count(self, source: str) -> int:
        """Return the number of a source's nodes. Raises as `vector_store` does."""
        return int(self._collection(source).count())

    def add(self, source: str, nodes: Sequence[BaseNode]) -> None:
        """Add nodes that have embeddings; a node whose id is there already is left as it is.

        Args:
            source: The source's name; must have a collection.
            nodes: The nodes, as many as there are: they are sent in batches that the database accepts.
        """
        store = self.vector_store(source)
        for batch in _batches(nodes, self._client.get_max_batch_size()):
            store.add(list(batch))

    def _collection(self, source: str, *, create: bool = False) -> Collection:
        with self._lock:
            if source not in self._collections:
                collection = self._open_collection(source, create=create)
                _check_collection(collection, source)
                self._collections[source] = collection
            return self._collections[source]

    def _open_collection(self, source: str, *, create: bool) -> Collection:
        name, metadata = collection_name(source), {_SOURCE_KEY: source}
        if create:
            return self._client.get_or_create_collection(
                name, embedding_function=None, configuration=_COSINE, metadata=metadata
            )
        try:
            return self._client.get_collection(name, embedding_function=None)
        except NotFoundError as error:
            raise ConfigurationError(
                f"There is no collection for the source {source!r}; there are: {', '.join(self.sources()) or 'none'}."
            ) from error


class _TimedClient(Client):
    """Chroma's HTTP client with what it lacks: a timeout, and an end to its connections when it is closed.

    The constructor already sends requests, through two sessions; each hook below runs before the first one of its
    session. The public way, setting the session's timeout afterwards, hangs on a server that doesn't answer.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self._timeout = httpx.Timeout(timeout)
        self._sessions: list[httpx.Client] = []
        try:
            super().__init__(settings=settings)
        except BaseException:
            self._close_sessions()
            raise

    def get_user_identity(self) -> UserIdentity:
        self._take_session(self._server)
        return super().get_user_identity()

    def _validate_tenant_database(self, tenant: str, database: str) -> None:
        self._take_session(self._admin_client._server)  # type: ignore[attr-defined]  # noqa: SLF001
        super()._validate_tenant_database(tenant, database)

    def close(self) -> None:
        super().close()
        self._close_sessions()

    def _take_session(self, server: ServerAPI) -> None:
        session: httpx.Client = server._session  # type: ignore[attr-defined]  # noqa: SLF001
        session.timeout = self._timeout
        self._sessions.append(session)

    def _close_sessions(self) -> None:
        for session in self._sessions:
            session.close()


def _directory_client(path: str | Path) -> ClientAPI:
    """Open a directory; Chroma's threads don't come along into a forked process, which would wait without end.

    Raises:
        ConfigurationError: This process was forked from one that had opened a directory.
    """
    global _opened_in  # noqa: PLW0603 (of the process)
    _opened_in = _opened_in or os.getpid()
    if _opened_in != os.getpid():
        raise ConfigurationError(
            f"This process was forked from {_opened_in}, which had opened a Chroma directory, and can't open one any "
            "more. Open stores only in the children, or start them with 'spawn' (multiprocessing.set_start_method)."
        )
    # Resolved: Chroma shares one engine per path as spelt, and two that write into one directory damage it.
    return Client(
        settings=_settings(
            chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
            is_persistent=True,
            persist_directory=str(Path(path).resolve()),
        )
    )


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _settings(**values: Any) -> Settings:
    # No setting from a file in the working directory, and no telemetry.
    return Settings(_env_file=None, anonymized_telemetry=False, **values)


def collection_name(source: str) -> str:
    """Return a name that Chroma accepts, made from any source name.

    Args:
        source: Any text that is not empty.

    Returns:
        The name itself when it is 3 to 100 letters, digits, ``_`` and ``-``; else its legal part and 16 hex digits of
        its hash. The collection's metadata keeps the source's own name.

    Raises:
        ConfigurationError: The name is empty.
    """
    if not source.strip():
        raise ConfigurationError("A source needs a name; got an empty one.")
    if _PLAIN_NAME.fullmatch(source) and not _DERIVED_NAME.fullmatch(source[-17:]):
        return source
    legal = re.sub(r"[^a-zA-Z0-9]+", "-", source).strip("-")[:48].rstrip("-") or "source"
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{legal}-{digest}"


def _check_collection(collection: Collection, source: str) -> None:
    """Check that a collection was made by this library, before anything is added to it.

    Only the raw JSON is read: Chroma's own accessors (``configuration``, ``schema``) build what it names.

    Raises:
        StoreMismatchError: It names an embedding function, or was not made by this library for this source.
    """
    model = collection.get_model()
    for configuration in (collection.configuration_json, model.serialized_schema):
        for embedding_function in _embedding_functions(configuration):
            raise StoreMismatchError(
                f"The Chroma collection {collection.name!r} names an embedding function of its own "
                f"({embedding_function!r}), which this library never loads. Delete the collection, then run "
                "`agentic-kb ingest` again."
            )
    space = ((collection.configuration_json or {}).get("hnsw") or {}).get("space")
    if (collection.metadata or {}).get(_SOURCE_KEY) != source or space != "cosine":
        raise StoreMismatchError(
            f"The Chroma collection {collection.name!r} was not made by this library for the source {source!r}. "
            "Give the source another name, or wrap that collection as an index of your own."
        )


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
