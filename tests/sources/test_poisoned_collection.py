"""What a collection of the user's own Chroma must not bring the client to do."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.testing import HashEmbedding
from tests.chroma_server import ChromaServer

FUNCTION = {
    "type": "known",
    "name": "sentence_transformer",
    "config": {"model_name": "attacker/evil", "device": "cpu", "normalize_embeddings": False, "kwargs": {}},
}
CONFIGURATION = {"hnsw": {"space": "cosine"}, "embedding_function": FUNCTION}


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
