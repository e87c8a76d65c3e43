from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb._aio import Call, deadline_after, run
from llama_index_agentic_kb.errors import DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.guard.resilience import Bulkhead
from llama_index_agentic_kb.sources.index import kind_of
from llama_index_agentic_kb.sources.stores import with_request_timeouts
from llama_index_agentic_kb.testing import HashEmbedding


class Server:
    def __init__(self, session: httpx.Client) -> None:
        self._session = session


class Collection:
    def __init__(self, server: Server) -> None:
        self._client = server

    def get(self, **_: Any) -> Any:
        return self._client._session.request("GET", "/get").json()

    def count(self) -> int:
        return int(self._client._session.request("GET", "/count").text)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def store_over(session: httpx.Client) -> Any:
    store = ChromaVectorStore(chroma_collection=Collection(Server(session)))
    assert store.client.count.__self__._client._session is session
    return store


def test_a_request_ends_with_its_call(silent: str) -> None:
    """The thread that waits for a silent server is free soon after the deadline; the user's client is as before."""
    with httpx.Client(base_url=silent, timeout=None) as session:
        store = store_over(session)
        twin = with_request_timeouts(store)
        ended, errors = threading.Event(), []

        def ask() -> int:
            try:
                return int(twin.client.count())
            except Exception as error:
                errors.append(error)
                raise
            finally:
                ended.set()

        with pytest.raises((DeadlineExceededError, httpx.TimeoutException)):  # a machine that stalls is late for both
            run(Bulkhead("chroma").call(Call(sync=ask, deadline=deadline_after(0.5))))
        assert ended.wait(10)
        assert isinstance(errors[0], httpx.TimeoutException)
        assert type(twin) is type(store)
        assert store.client._client._session is session
        assert session.timeout.read is None


def test_reading_metadata_ends_too(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped server holds none of the threads that read metadata."""
    monkeypatch.setattr("llama_index_agentic_kb.sources.stores.WITHOUT_DEADLINE", 0.1)
    with httpx.Client(base_url=silent, timeout=None) as session:
        index = VectorStoreIndex.from_vector_store(store_over(session), embed_model=HashEmbedding())
        source = KnowledgeSource("docs", index=index, hybrid=False)
        with pytest.raises(RetrievalError, match="timed out"):
            KnowledgeBase([source], max_runtime_in_seconds=None).count("docs")


def test_other_stores_are_left_as_they_are() -> None:
    """A client with a timeout of its own keeps it; a store without a client is itself."""
    with httpx.Client(timeout=3.0) as session:
        store = store_over(session)
        assert with_request_timeouts(store) is store
    simple = SimpleVectorStore()
    assert kind_of(simple).store is simple
