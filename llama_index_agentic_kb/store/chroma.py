"""Vectors in Chroma, one collection per source. The only module that imports chromadb, so it is imported late.

Two habits of Chroma's client are kept out here. It builds the embedding function that a collection's configuration
names, which for a hostile server means loading model code of its choice: collections are opened without one, and one
that names any is refused. And its HTTP session waits for ever: ours has a timeout from the first request on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from chromadb.api import ClientAPI, ServerAPI
from chromadb.api.client import Client
from chromadb.api.models.Collection import Collection
from chromadb.auth import UserIdentity
from chromadb.config import Settings
from chromadb.errors import ChromaError, NotFoundError

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store.chroma_access import Access, Unguarded, another_spelling, refuse_forked
from llama_index_agentic_kb.store.chroma_collections import SOURCE_KEY, check_collection, collection_name

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode

    from llama_index_agentic_kb.store.source_vector_store import SourceVectorStore

__all__ = ["ChromaDatabase", "collection_name"]

VersionOf = Callable[[str], Hashable]
"""Gives a source's version, which changes with every change of its vectors."""

_PAGE = 10_000  # ids per request when all are listed


class ChromaDatabase:
    """The collections of one Chroma database that hold this library's sources; safe to use from many threads.

    Make one with `persistent` or `http`.

    Args:
        client: An open Chroma client; closed with this object.
        version_of: Gives a source's version, so that searches under a filter may remember which rows it matches.
            None remembers nothing.
        access: Keeps other processes apart from this one.
    """

    def __init__(self, client: ClientAPI, version_of: VersionOf | None = None, access: Access | None = None) -> None:
        self._client = client
        self._version_of = version_of
        self._access = access or Unguarded()
        self._lock = threading.Lock()
        self._collections: dict[str, Collection] = {}

    @classmethod
    def persistent(
        cls,
        path: str | Path,
        version_of: VersionOf | None = None,
        *,
        access: Access | None = None,
        anew: int = 0,
    ) -> ChromaDatabase:
        """Open the database in a directory, or make one there.

        Args:
            path: The directory. One process at a time may write into it.
            version_of: See the class.
            access: See the class.
            anew: A number that no other opening of the directory in this process has had reads all of it from disk;
                openings with the same number share what was read.

        Returns:
            The open database.

        Raises:
            ConfigurationError: The directory can't be opened, or this process was forked from one that had opened any.
        """
        refuse_forked()
        # Resolved: Chroma shares one engine per path as spelt, and two that write into one directory damage it.
        directory = str(Path(path).resolve()) + another_spelling(anew)
        settings = _settings(
            chroma_api_impl="chromadb.api.rust.RustBindingsAPI", is_persistent=True, persist_directory=directory
        )
        try:
            return cls(Client(settings=settings), version_of, access)
        except (ValueError, ChromaError, OSError) as error:
            told = error_message(error)
            raise ConfigurationError(f"The Chroma database in {str(path)!r} can't be opened: {told}") from error

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

    def has(self, source: str) -> bool:
        """Tell whether a source has a collection here."""
        if source in self._collections:
            return True
        try:
            self._client.get_collection(collection_name(source), embedding_function=None)
        except NotFoundError:
            return False
        return True

    def sources(self) -> list[str]:
        """List the sources that have a collection here, by name; other libraries' collections are left out."""
        found: list[str] = []
        for collection in self._client.list_collections():
            source = (collection.metadata or {}).get(SOURCE_KEY)
            if isinstance(source, str):
                found.append(source)
        return sorted(found)

    def vector_store(self, source: str, *, create: bool = False) -> SourceVectorStore:
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
        from llama_index_agentic_kb.store.source_vector_store import SourceVectorStore  # noqa: PLC0415  (loads LlamaIndex)

        version = None if self._version_of is None else partial(self._version_of, source)
        return SourceVectorStore(self.collection(source, create=create), version)

    def count(self, source: str) -> int:
        """Count a source's nodes. Raises as `vector_store` does."""
        return int(self.collection(source).count())

    def node_ids(self, source: str) -> set[str]:
        """Collect the ids of all nodes of a source. Raises as `vector_store` does."""
        collection = self.collection(source)
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
        collection = self.collection(source)
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
            with self._access.changing():
                store.add(list(nodes[start : start + size]))

    def delete_nodes(self, source: str, node_ids: Iterable[str]) -> None:
        """Delete nodes by id, in batches; unknown ids are ignored. Raises as `vector_store` does."""
        collection = self.collection(source)
        for batch in self._batches(node_ids):
            with self._access.changing():
                collection.delete(ids=batch)

    def delete_source(self, source: str) -> None:
        """Delete a source's collection; does nothing when there is none."""
        with self._lock:
            self._collections.pop(source, None)
        with self._access.changing(), suppress(NotFoundError):
            self._client.delete_collection(collection_name(source))

    def _batches(self, node_ids: Iterable[str]) -> Iterator[list[str]]:
        ids = sorted(set(node_ids))
        size = self._client.get_max_batch_size()
        return (ids[start : start + size] for start in range(0, len(ids), size))

    def collection(self, source: str, *, create: bool = False) -> Collection:
        """Give Chroma's own object for a source's collection. Takes and raises what `vector_store` does."""
        with self._lock:
            if source not in self._collections:
                with self._access.opening():
                    collection = self._open_collection(source, create=create)
                    check_collection(collection, source)
                    if not isinstance(self._access, Unguarded):
                        collection.count()  # reads it now, while nobody writes
                self._collections[source] = collection
            return self._collections[source]

    def _open_collection(self, source: str, *, create: bool) -> Collection:
        name = collection_name(source)
        if create:
            return self._client.get_or_create_collection(
                name,
                embedding_function=None,
                configuration={"hnsw": {"space": "cosine"}},
                metadata={SOURCE_KEY: source},
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
