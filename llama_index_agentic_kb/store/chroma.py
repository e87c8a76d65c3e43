"""Vectors in Chroma, one collection per source. The only module that imports chromadb, so it is imported late.

Two habits of Chroma's client are kept out here. It builds the embedding function that a collection's configuration
names, which for a hostile server means loading model code of its choice: collections are opened without one, and one
that names any is refused. And its HTTP session waits for ever: ours has a timeout from the first request on.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from chromadb.api import ClientAPI, ServerAPI
from chromadb.api.client import Client
from chromadb.api.models.Collection import Collection
from chromadb.auth import UserIdentity
from chromadb.config import Settings
from chromadb.errors import ChromaError, NotFoundError
from llama_index.core.schema import BaseNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError

__all__ = ["ChromaDatabase", "collection_name"]

_SOURCE_KEY = "agentic_kb_source"
_PLAIN_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{1,98}[a-zA-Z0-9]")
_DERIVED_NAME = re.compile(r"-[0-9a-f]{16}")
_PAGE = 10_000  # ids per request when all are listed


def collection_name(source: str) -> str:
    """Derive a name that Chroma accepts from any source name.

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


class ChromaDatabase:
    """The collections of one Chroma database that hold this library's sources; safe to use from many threads.

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
            ConfigurationError: The directory can't be opened.
        """
        # Resolved: Chroma shares one engine per path as spelt, and two on one directory damage it.
        settings = _settings(
            chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
            is_persistent=True,
            persist_directory=str(Path(path).resolve()),
        )
        try:
            return cls(Client(settings=settings))
        except (ValueError, ChromaError, OSError) as error:
            raise ConfigurationError(f"The Chroma database in {str(path)!r} can't be opened: {error}") from error

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
                f"No Chroma server answers at {host}:{port} within {timeout:g} s: {error}. "
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
        """List the sources that have a collection here, by name; other libraries' collections are left out."""
        found: list[str] = []
        for collection in self._client.list_collections():
            source = (collection.metadata or {}).get(_SOURCE_KEY)
            if isinstance(source, str):
                found.append(source)
        return sorted(found)

    def vector_store(self, source: str, *, create: bool = False) -> ChromaVectorStore:
        """Wrap a source's collection as a LlamaIndex vector store.

        Args:
            source: The source's name.
            create: Make an empty collection, with cosine distance, when there is none.

        Returns:
            The vector store; a new object over the same collection at each call.

        Raises:
            ConfigurationError: There is no such collection and ``create`` is false.
            StoreMismatchError: The collection was not made by this library, or its configuration names an
                embedding function.
        """
        return ChromaVectorStore(chroma_collection=self._collection(source, create=create))

    def count(self, source: str) -> int:
        """Count a source's nodes. Raises as `vector_store` does."""
        return int(self._collection(source).count())

    def node_ids(self, source: str) -> set[str]:
        """Collect the ids of all nodes of a source. Raises as `vector_store` does."""
        collection = self._collection(source)
        ids: set[str] = set()
        while page := collection.get(limit=_PAGE, offset=len(ids), include=[])["ids"]:
            ids.update(page)
        return ids

    def embeddings(self, source: str, node_ids: Iterable[str]) -> dict[str, list[float]]:
        """Fetch stored vectors.

        Args:
            source: The source's name.
            node_ids: The nodes; unknown ones are left out of the result.

        Returns:
            Each node's vector, by its id. Raises as `vector_store` does.
        """
        collection = self._collection(source)
        vectors: dict[str, list[float]] = {}
        for batch in self._batches(node_ids):
            found = collection.get(ids=batch, include=["embeddings"])
            rows = found["embeddings"]
            if rows is None:
                continue
            vectors.update((node_id, [float(x) for x in row]) for node_id, row in zip(found["ids"], rows, strict=True))
        return vectors

    def add(self, source: str, nodes: Sequence[BaseNode]) -> None:
        """Add nodes that have embeddings; a node whose id is there already is left as it is.

        Args:
            source: The source's name; must have a collection.
            nodes: The nodes, as many as there are: they are sent in batches that the database accepts.
        """
        store = self.vector_store(source)
        size = self._client.get_max_batch_size()
        for start in range(0, len(nodes), size):
            store.add(list(nodes[start : start + size]))

    def delete_nodes(self, source: str, node_ids: Iterable[str]) -> None:
        """Delete nodes by id, in batches; unknown ids are ignored. Raises as `vector_store` does."""
        collection = self._collection(source)
        for batch in self._batches(node_ids):
            collection.delete(ids=batch)

    def delete_source(self, source: str) -> None:
        """Delete a source's collection; does nothing when there is none."""
        with self._lock:
            self._collections.pop(source, None)
            try:
                self._client.delete_collection(collection_name(source))
            except NotFoundError:
                return

    def _batches(self, node_ids: Iterable[str]) -> Iterator[list[str]]:
        ids = sorted(set(node_ids))
        size = self._client.get_max_batch_size()
        return (ids[start : start + size] for start in range(0, len(ids), size))

    def _collection(self, source: str, *, create: bool = False) -> Collection:
        with self._lock:
            if source not in self._collections:
                collection = self._open_collection(source, create=create)
                _check_collection(collection, source)
                self._collections[source] = collection
            return self._collections[source]

    def _open_collection(self, source: str, *, create: bool) -> Collection:
        name = collection_name(source)
        if create:
            return self._client.get_or_create_collection(
                name,
                embedding_function=None,
                configuration={"hnsw": {"space": "cosine"}},
                metadata={_SOURCE_KEY: source},
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


def _settings(**values: Any) -> Settings:
    # The caller's .env file is none of Chroma's business, and nobody asked for telemetry.
    return Settings(_env_file=None, anonymized_telemetry=False, **values)


def _check_collection(collection: Collection, source: str) -> None:
    """Refuse a collection that is not ours, before anything is added to it.

    Only the raw JSON is read: Chroma's own accessors (``configuration``, ``schema``) build what it names.
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
    """Name the embedding functions in a configuration; ``legacy`` and ``unknown`` stand for none."""
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
