from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.schema import Condition
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import Found
from tests.sources.conftest import search as search_source


class Tree(BaseRetriever):
    """Gives index nodes that stand for further retrievers, so many a level."""

    def __init__(self, children: Sequence[Any]) -> None:
        super().__init__()
        self.children = list(children)
        self.calls = 0

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.calls += 1
        return [
            NodeWithScore(node=IndexNode(text=f"rain {n}", index_id=f"{id(self)}-{n}", obj=child), score=0.5)
            for n, child in enumerate(self.children)
        ]


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str) -> str:
        return f"echo of {query_str}"


def index_of(*objects: IndexNode, texts: Sequence[str] = ()) -> VectorStoreIndex:
    return VectorStoreIndex([TextNode(text=t) for t in texts], objects=list(objects), embed_model=HashEmbedding())


def search(index: VectorStoreIndex, *, seconds: float = 20, filters: Condition | None = None) -> Found:
    source = KnowledgeSource("docs", index=index, filters=filters)
    return search_source(source, "rain", top_k=50, seconds=seconds)


def texts(result: Found) -> list[str]:
    return [node.text for node in result.nodes]


def test_one_level_works_as_in_llamaindex() -> None:
    """A node stands for a retriever, a query engine or another node; plain nodes stay."""
    inner = MemoryRetriever(["rain in Oslo"])
    index = index_of(
        IndexNode(text="rain one", index_id="r", obj=inner),
        IndexNode(text="rain two", index_id="q", obj=Echo()),
        IndexNode(text="rain three", index_id="n", obj=TextNode(text="a rainy node")),
        texts=["rain in Paris"],
    )
    assert sorted(texts(search(index))) == ["a rainy node", "echo of rain", "rain in Oslo", "rain in Paris"]
    assert sorted(texts(search(index))) == sorted(
        n.text for n in index.as_retriever(similarity_top_k=9).retrieve("rain")
    )


@pytest.mark.parametrize("given", ["index", "retriever", "factory"])
def test_a_cycle_ends(given: str) -> None:
    """A retriever that stands behind its own node is followed once, a user's own too, which is left as it is."""
    loop = Tree([])
    loop.children = [loop, MemoryRetriever(["rain in Oslo"])]
    node = IndexNode(text="rain", index_id="loop", obj=loop)
    over: dict[str, Any] = {"index": {"index": index_of(node)}, "retriever": {"retriever": loop}}
    found = search_source(KnowledgeSource("x", **over.get(given, {"retriever_factory": lambda _: loop})), "rain")
    assert loop.calls == 1
    assert "rain in Oslo" in texts(found)
    assert "_handle_recursive_retrieval" not in vars(loop)


def test_what_is_behind_a_node_must_pass_the_filter() -> None:
    """The effective filter is checked on what comes out, not on the node that led there."""
    inner = MemoryRetriever([TextNode(text="rain", metadata={"tenant": "umbrella"})])
    door = IndexNode(text="rain", index_id="r", obj=inner, metadata={"tenant": "acme"})
    result = search(index_of(door), filters=Condition(key="tenant", value="acme"))
    assert texts(result) == []
    assert result.total("dropped_by_filter") == 1


def test_what_hangs_behind_a_node_is_given_up() -> None:
    """The search's deadline holds for everything that it follows."""
    with MemoryRetriever(["rain"], fault="hang") as hanging:
        index = index_of(IndexNode(text="rain", index_id="h", obj=hanging))
        with pytest.raises(DeadlineExceededError, match="retriever behind an index node"):
            search(index, seconds=0.1)
