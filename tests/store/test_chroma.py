"""Chroma's directories, and what its client must not be brought to do."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.errors import StoreMismatchError
from llama_index_agentic_kb.store.chroma import ChromaDirectory
from llama_index_agentic_kb.testing import HashEmbedding
from tests.chroma_server import ChromaServer

ODD_NAMES = ["ab", "a b", "a-b", "ünïcode 🚀", "..", "10.0.0.1", "x" * 600, "tab\tname", "Missions", ""]
FUNCTION = {
    "type": "known",
    "name": "sentence_transformer",
    "config": {"model_name": "attacker/evil", "device": "cpu", "normalize_embeddings": False, "kwargs": {}},
}
CONFIGURATION = {"hnsw": {"space": "cosine"}, "embedding_function": FUNCTION}


def _node(name: str, embedding: list[float]) -> TextNode:
    return TextNode(id_=name, text=f"text of {name}", embedding=embedding, metadata={"title": name})


def test_any_name_has_a_collection_of_its_own(tmp_path: Path) -> None:
    """Nodes come back by direction; a directory that is closed opens again, by another spelling too."""
    with closing(ChromaDirectory(tmp_path / "chroma")) as directory:
        for name in ODD_NAMES:
            directory.vector_store(name).add([_node(f"near {name}", [10.0, 1.0]), _node("far", [0.1, 1.0])])
    with closing(ChromaDirectory(str(tmp_path / "x" / ".." / "chroma"))) as directory:
        for name in ODD_NAMES:
            found = directory.vector_store(name).query(VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=2))
            assert [node.node_id for node in found.nodes or []] == [f"near {name}", "far"]
        directory.close()


def test_a_callers_env_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chroma settings in the working directory's .env don't reach the client, and telemetry is off."""
    (tmp_path / ".env").write_text("CHROMA_SERVER_HOST=evil.example\nANONYMIZED_TELEMETRY=true\n")
    monkeypatch.chdir(tmp_path)
    with closing(ChromaDirectory(tmp_path / "chroma")) as directory:
        settings = directory._client.get_settings()
        assert settings.chroma_server_host is None
        assert settings.anonymized_telemetry is False


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is asked of a model's loader, which loads nothing."""
    import sentence_transformers  # noqa: PLC0415

    asked: list[object] = []
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", lambda *args, **_: asked.append(args))
    return asked


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChromaServer]:
    with ChromaServer(tmp_path / "served") as started:
        yield started


@pytest.mark.parametrize("where", ["configuration", "schema"])
def test_a_directory_can_not_make_the_client_load_a_model(
    server: ChromaServer, tmp_path: Path, loaded: list[object], where: str
) -> None:
    """A graph in somebody's store whose configuration names a model is searched, and never added to."""
    vectors = {"enabled": True, "config": {"space": "cosine", "embedding_function": FUNCTION, "hnsw": {}}}
    schema = {"defaults": {}, "keys": {"#embedding": {"float_list": {"vector_index": vectors}}}}
    body = CONFIGURATION if where == "configuration" else schema
    made = _post(server.port, "", {"name": "graph", where: body})
    _post(server.port, f"/{made['id']}/add", {"ids": ["1"], "embeddings": [[1.0, 0.0]]})
    server.kill()
    with closing(ChromaDirectory(tmp_path / "served")) as directory:
        assert directory.collection("graph", create=False).query([1.0, 0.0], n_results=1)["ids"] == [["1"]]
        with pytest.raises(StoreMismatchError, match="sentence_transformer"):
            directory.collection("graph", create=True)
    assert loaded == []


def _post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/api/v2/tenants/default_tenant/databases/default_database/collections{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return dict(json.loads(answer.read() or b"{}"))


def test_questions_to_a_users_own_poisoned_collection_load_nothing(server: ChromaServer, loaded: list[object]) -> None:
    """A knowledge base over a ``ChromaVectorStore`` that the user made, with and without a filter."""
    import chromadb  # noqa: PLC0415

    made = _post(server.port, "", {"name": "poisoned-own", "configuration": CONFIGURATION})
    node = TextNode(id_="n", text="Snow falls in winter.", metadata={"title": "Oslo", "year": 2001})
    metadata = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    known = {key: value for key, value in metadata.items() if value is not None}
    row = {"embeddings": [HashEmbedding().get_text_embedding(node.text)], "documents": [node.text]}
    _post(server.port, f"/{made['id']}/add", {"ids": ["n"], **row, "metadatas": [known]})
    opened: Any = chromadb.HttpClient("127.0.0.1", server.port)
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
