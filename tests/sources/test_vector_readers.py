"""Scope indexes are made of the vectors of any index that lets them be read."""

from __future__ import annotations

import pytest
from llama_index.core import Document, SummaryIndex, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.sources.vectors import scope_indexes, vector_reader
from llama_index_agentic_kb.testing import HashEmbedding
from tests.sources.conftest import MakeIndex

TEXTS = {"long": " ".join(f"Sentence {at} about rockets." for at in range(40)), "short": "A garden."}


@pytest.mark.parametrize("kind", ["memory", "chroma"])
def test_documents_are_the_keys_of_a_scope_index(kind: str, chroma_index: MakeIndex) -> None:
    """Chunks belong to their document, a node without one to itself; an update reads what changed."""
    model = HashEmbedding()
    documents = [Document(text=text, id_=name) for name, text in TEXTS.items()]
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents(documents)
    given = [*nodes, TextNode(id_="alone", text="Alone.")]
    index = chroma_index(given, model) if kind == "chroma" else VectorStoreIndex(given, embed_model=model)
    source = KnowledgeSource("docs", index=index)
    reader = vector_reader(source)
    assert reader is not None
    made = scope_indexes([source])
    assert made["docs"].version == reader.version()
    assert sorted(made["docs"].documents) == ["alone", "long", "short"]
    assert made["docs"].model == "hash"
    found = made["docs"].part({"short"}).prototypes @ model.get_text_embedding(TEXTS["short"])
    assert found.tolist() == pytest.approx([1.0], abs=1e-5)
    index.insert_nodes([TextNode(id_="new", text="News.")])
    assert reader.version() != made["docs"].version
    assert sorted(scope_indexes([source], made)["docs"].documents) == ["alone", "long", "new", "short"]


def test_other_sources_have_no_scope_index() -> None:
    """Their results are never left out."""
    sources = [
        KnowledgeSource("summary", index=SummaryIndex([TextNode(text="x")])),
        KnowledgeSource("plain", retriever=VectorStoreIndex([], embed_model=HashEmbedding()).as_retriever()),
    ]
    assert [vector_reader(source) for source in sources] == [None, None]
    assert scope_indexes(sources) == {}
