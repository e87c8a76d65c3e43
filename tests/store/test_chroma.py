from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromadb.api.client import Client
from chromadb.config import Settings
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.errors import ConfigurationError, StoreMismatchError
from llama_index_agentic_kb.store.chroma import ChromaDatabase, collection_name
from llama_index_agentic_kb.testing import HashEmbedding

ODD_NAMES = ["ab", "a b", "a-b", "ünïcode 🚀", "..", "10.0.0.1", "-x-", "x" * 600, "tab\tname", "a..b", "Missions"]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChromaDatabase]:
    opened = ChromaDatabase.persistent(tmp_path / "chroma")
    yield opened
    opened.close()


def _node(name: str, embedding: list[float]) -> TextNode:
    return TextNode(id_=name, text=f"text of {name}", embedding=embedding, metadata={"title": name})


def test_nodes_come_back_by_cosine(database: ChromaDatabase) -> None:
    """Added nodes are found by direction, whatever their vectors' length."""
    database.vector_store("missions", create=True)
    database.add("missions", [_node("near", [10.0, 1.0]), _node("far", [0.1, 1.0])])
    found = database.vector_store("missions").query(VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=2))
    assert found.nodes is not None
    assert [node.node_id for node in found.nodes] == ["near", "far"]
    assert found.nodes[0].metadata == {"title": "near"}
    assert database.count("missions") == 2


def test_any_source_name_has_a_legal_collection(database: ChromaDatabase) -> None:
    """Odd source names get collections of their own, and are read back as they were."""
    for name in ODD_NAMES:
        database.vector_store(name, create=True)
        database.add(name, [_node(name[:20], [1.0])])
    assert database.sources() == sorted(ODD_NAMES)
    assert [database.count(name) for name in ODD_NAMES] == [1] * len(ODD_NAMES)


def test_collection_names_never_collide() -> None:
    """A plain name that looks like a derived one is derived again; an empty name is refused."""
    assert collection_name("missions") == "missions"
    derived = collection_name("a b")
    assert collection_name(derived) != derived
    with pytest.raises(ConfigurationError, match="needs a name"):
        collection_name("  ")


@pytest.mark.slow
def test_batches_respect_the_clients_limit(database: ChromaDatabase) -> None:
    """More nodes than one request may carry are added."""
    total = 5461 + 10
    database.vector_store("many", create=True)
    database.add("many", [_node(str(i), [float(i), 1.0]) for i in range(total)])
    assert database.count("many") == total


def test_missing_source_is_named(database: ChromaDatabase) -> None:
    """Asking for a source that has no collection names those that have."""
    database.vector_store("missions", create=True)
    with pytest.raises(ConfigurationError, match="'vehicles'; there are: missions"):
        database.vector_store("vehicles")


def test_database_is_there_after_closing(tmp_path: Path) -> None:
    """A closed database opens again with its nodes; two openings share it."""
    first = ChromaDatabase.persistent(tmp_path / "chroma")
    first.vector_store("missions", create=True)
    second = ChromaDatabase.persistent(str(tmp_path / "x" / ".." / "chroma"))
    first.add("missions", [_node("a", [1.0])])
    first.close()
    first.close()
    assert second.count("missions") == 1
    second.close()
    third = ChromaDatabase.persistent(tmp_path / "chroma")
    assert third.count("missions") == 1
    third.close()


def test_unopenable_directory_is_reported(tmp_path: Path) -> None:
    """A path that is a file, or that another client holds with other settings, is a clear error."""
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigurationError, match="can't be opened"):
        ChromaDatabase.persistent(tmp_path / "file")
    settings = Settings(allow_reset=True, is_persistent=True, persist_directory=str(tmp_path / "shared"))
    other = Client(settings=settings)
    with pytest.raises(ConfigurationError, match="different settings"):
        ChromaDatabase.persistent(tmp_path / "shared")
    other.close()


def test_a_callers_env_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chroma settings in the working directory's .env don't reach our client, and telemetry is off."""
    (tmp_path / ".env").write_text("CHROMA_SERVER_HOST=evil.example\nANONYMIZED_TELEMETRY=true\n")
    monkeypatch.chdir(tmp_path)
    database = ChromaDatabase.persistent(tmp_path / "chroma")
    settings = database._client.get_settings()
    assert settings.chroma_server_host is None
    assert settings.anonymized_telemetry is False
    database.close()


def test_collections_of_others_are_refused(tmp_path: Path, database: ChromaDatabase) -> None:
    """A collection that this library did not make is neither listed nor written to."""
    database._client.create_collection("theirs", embedding_function=None)
    assert database.sources() == []
    for create in (False, True):
        with pytest.raises(StoreMismatchError, match="was not made by this library"):
            database.vector_store("theirs", create=create)


def test_server_holds_the_same(chroma_server: tuple[int, int]) -> None:
    """Over HTTP a source is made, filled and searched."""
    database = ChromaDatabase.http("127.0.0.1", chroma_server[0], timeout=5)
    database.vector_store("http source", create=True)
    database.add("http source", [_node("a", [1.0, 0.0]), _node("b", [0.0, 1.0])])
    assert database.count("http source") == 2
    found = database.vector_store("http source").query(VectorStoreQuery(query_embedding=[1.0, 0.1], similarity_top_k=1))
    assert found.ids == ["a"]
    assert "http source" in database.sources()
    database.close()


def test_every_request_has_the_timeout(chroma_server: tuple[int, int]) -> None:
    """A stopped server costs the set timeout, in use and while connecting; then the same client goes on."""
    port, pid = chroma_server
    database = ChromaDatabase.http("127.0.0.1", port, timeout=0.5, max_connections=3)
    store = database.vector_store("stopped", create=True)
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            store.query(VectorStoreQuery(query_embedding=[1.0], similarity_top_k=1))
        with pytest.raises(ConfigurationError, match=r"No Chroma server answers at 127.0.0.1.*`chroma run`"):
            ChromaDatabase.http("127.0.0.1", port, timeout=0.5)
        assert time.monotonic() - started < 2.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert database.count("stopped") == 0
    for session in (database._client._server._session, database._client._admin_client._server._session):  # type: ignore[attr-defined]
        assert session.timeout == httpx.Timeout(0.5)
    database.close()


def test_no_server_is_reported() -> None:
    """A port where nothing listens is a clear error at once."""
    with pytest.raises(ConfigurationError, match=r"No Chroma server answers at 127\.0\.0\.1:1 "):
        ChromaDatabase.http("127.0.0.1", 1, timeout=2)


@pytest.mark.parametrize("where", ["configuration", "schema"])
def test_server_can_not_make_the_client_load_a_model(
    chroma_server: tuple[int, int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A collection whose configuration names a model to load is refused before anything is loaded."""
    import sentence_transformers  # noqa: PLC0415

    loaded: list[object] = []
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", lambda *args, **kwargs: loaded.append(args))
    config = {"model_name": "attacker/evil", "device": "cpu", "normalize_embeddings": False}
    function = {"type": "known", "name": "sentence_transformer", "config": {**config, "kwargs": {}}}
    source = f"poisoned-{where}"
    body: dict[str, Any] = {"name": source, "metadata": {"agentic_kb_source": source}}
    if where == "configuration":
        body["configuration"] = {"hnsw": {"space": "cosine"}, "embedding_function": function}
    else:
        vectors = {"enabled": True, "config": {"space": "cosine", "embedding_function": function, "hnsw": {}}}
        body["schema"] = {"defaults": {}, "keys": {"#embedding": {"float_list": {"vector_index": vectors}}}}
    url = f"http://127.0.0.1:{chroma_server[0]}/api/v2/tenants/default_tenant/databases/default_database/collections"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=5).close()
    database = ChromaDatabase.http("127.0.0.1", chroma_server[0], timeout=5)
    for create in (False, True):
        with pytest.raises(StoreMismatchError, match="sentence_transformer"):
            database.vector_store(source, create=create)
    with pytest.raises(StoreMismatchError):
        database.add(source, [_node("a", [1.0])])
    assert loaded == []
    database.close()


def _post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/api/v2/tenants/default_tenant/databases/default_database/collections{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return dict(json.loads(answer.read() or b"{}"))


def test_questions_to_a_users_own_poisoned_collection_load_nothing(
    chroma_server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A knowledge base over a ``ChromaVectorStore`` that the user made, with and without a filter."""
    import chromadb  # noqa: PLC0415
    import sentence_transformers  # noqa: PLC0415

    loaded: list[object] = []
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", lambda *args, **kwargs: loaded.append(args))
    config = {"model_name": "attacker/evil", "device": "cpu", "normalize_embeddings": False}
    function = {"type": "known", "name": "sentence_transformer", "config": {**config, "kwargs": {}}}
    body = {"name": "poisoned-own", "configuration": {"hnsw": {"space": "cosine"}, "embedding_function": function}}
    made = _post(chroma_server[0], "", body)
    node = TextNode(id_="n", text="Snow falls in winter.", metadata={"title": "Oslo", "year": 2001})
    metadata = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    vector = HashEmbedding().get_text_embedding(node.text)
    row = {"ids": ["n"], "embeddings": [vector], "documents": [node.text], "metadatas": [metadata]}
    _post(chroma_server[0], f"/{made['id']}/add", {**row, "metadatas": [_without_none(metadata)]})
    opened: Any = chromadb.HttpClient("127.0.0.1", chroma_server[0])
    with opened as client:
        collection = client.get_collection("poisoned-own", embedding_function=None)
        index = VectorStoreIndex.from_vector_store(
            ChromaVectorStore(chroma_collection=collection), embed_model=HashEmbedding()
        )
        assert [found.text for found in index.as_retriever().retrieve("snow")] == [node.text]
        kb = KnowledgeBase([KnowledgeSource("own", index=index)], effort="minimal")
        for filters in (None, "year eq 2001"):
            parameters = [{"kind": "searchIndex", "knowledgeSourceName": "own", "filterAddOn": filters}]
            kb.retrieve("snow", output_mode="extractiveData", knowledge_source_params=parameters)
    assert loaded == []


def _without_none(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if value is not None}
