from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import IndexNode, QueryBundle, TextNode

from llama_index_agentic_kb.testing import MemoryRetriever, RecordedQuery, Verbatim
from llama_index_agentic_kb.testing.doubles import Mode

TEXTS = ["Rain in Paris", "Snow in Oslo", "Rain and snow in Bergen"]


def test_nodes_are_ranked_by_shared_words() -> None:
    """The score is the share of the query's words found; ties keep their order, misses are left out."""
    source = MemoryRetriever(TEXTS, similarity_top_k=3)

    hits = source.retrieve("rain, SNOW")
    assert [(hit.text, hit.score) for hit in hits] == [(TEXTS[2], 1.0), (TEXTS[0], 0.5), (TEXTS[1], 0.5)]
    assert [hit.text for hit in source.retrieve("Paris?")] == [TEXTS[0]]
    assert source.retrieve("Rome") == []
    assert source.retrieve("?") == []


def test_results_are_fresh() -> None:
    """What a caller does to its nodes is not seen by the next one."""
    node = TextNode(text="Rain", metadata={"tags": ["a"]})
    source = MemoryRetriever([node])

    hit = source.retrieve("rain")[0]
    hit.score = 99.0
    hit.node.metadata["tags"].append("b")
    again = source.retrieve("rain")[0]
    assert again.score == 1.0
    assert again.node.metadata == node.metadata == {"tags": ["a"]}


def test_shared_nodes_are_the_same_objects() -> None:
    """With shared nodes, the same query returns the same objects, in a list of its own."""
    node = TextNode(text="Rain")
    source = MemoryRetriever([node], shared_nodes=True)

    first, second = source.retrieve("rain"), source.retrieve("rain")
    assert first is not second
    assert first[0] is second[0]
    assert first[0].node is node


def test_index_nodes_keep_their_object() -> None:
    """An index node's object is followed, not copied."""
    inner = MemoryRetriever(TEXTS)
    outer = MemoryRetriever([IndexNode(text="weather", index_id="w", obj=inner)])
    assert outer.retrieve("weather Paris") != []
    assert inner.queries[0].query_str == "weather Paris"


def test_queries_are_recorded() -> None:
    """Text, presence of an embedding and thread of each query are kept."""
    source = MemoryRetriever(TEXTS)
    source.retrieve("one")
    thread = threading.Thread(target=source.retrieve, args=(QueryBundle("two", embedding=[1.0]),), name="other")
    thread.start()
    thread.join()
    assert source.queries == [
        RecordedQuery("one", has_embedding=False, thread_name="MainThread"),
        RecordedQuery("two", has_embedding=True, thread_name="other"),
    ]


async def test_modes_are_classes() -> None:
    """A native async method is there only if the mode says so, and callers can see it; all answer the same."""
    modes: list[Mode] = ["sync", "async", "async_only"]
    made = [MemoryRetriever(TEXTS, mode=mode) for mode in modes]

    assert [type(m)._aretrieve is BaseRetriever._aretrieve for m in made] == [True, False, False]
    assert [(await one.aretrieve("Oslo"))[0].text for one in made] == [TEXTS[1]] * 3
    with pytest.raises(NotImplementedError, match="async only"):
        made[2].retrieve("rain")


def test_nonsense_is_returned_as_it_is() -> None:
    """A verbatim value stands where the list of nodes is due."""
    bundle = QueryBundle("rain")
    assert MemoryRetriever(TEXTS, fault=Verbatim(None))._retrieve(bundle) is None
    with pytest.raises(TypeError):
        MemoryRetriever(TEXTS, fault=Verbatim(None)).retrieve("rain")


def test_hung_threads_end_with_the_context() -> None:
    """A hung sync query answers once it is released."""
    with ThreadPoolExecutor(1) as pool:
        with MemoryRetriever(TEXTS, fault="hang") as source:
            hung = pool.submit(source.retrieve, "Oslo")
            assert not hung.done()
        assert [hit.text for hit in hung.result(timeout=60)] == [TEXTS[1]]
