from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from llama_index_agentic_kb.testing import HashEmbedding, count_tokens, hash_vector


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_vectors_are_normalised() -> None:
    """Every vector has norm one, that of an empty text too."""
    model = HashEmbedding(dimensions=32)
    for text in ("rain and snow", "rain rain rain", "", "?!", "\ud800"):
        vector = model.get_text_embedding(text)
        assert len(vector) == 32
        assert math.isclose(math.hypot(*vector), 1.0)


def test_shared_words_are_close() -> None:
    """Texts that share more words are closer; case and punctuation do not count."""
    model = HashEmbedding()
    query = model.get_query_embedding("Rain in Paris")
    near, far = model.get_text_embedding_batch(["rain, paris!", "snow and ice"])
    assert cosine(query, near) > 0.5 > cosine(query, far)


def test_vectors_are_the_same_in_every_process() -> None:
    """Nothing depends on the process's hash seed."""
    assert [round(value, 3) for value in hash_vector("rain in Paris", 8)] == [0, 0, 0.577, 0, 0, 0, 0.577, 0.577]


async def test_calls_are_recorded_by_batch() -> None:
    """Queries, texts and native batches are recorded, sync and async."""
    model = HashEmbedding(embed_batch_size=2)
    model.get_query_embedding("q")
    await model.aget_query_embedding("q")
    model.get_text_embedding("t")
    await model.aget_text_embedding("t")
    vectors = model.get_text_embedding_batch(["a", "b", "c"])
    assert await model.aget_text_embedding_batch(["a", "b", "c"]) == vectors

    assert model.calls[:4] == [("query", ["q"]), ("query", ["q"]), ("text", ["t"]), ("text", ["t"])]
    assert model.calls[4:] == [("text", ["a", "b"]), ("text", ["c"])] * 2


async def test_latency_overlaps_in_async_calls() -> None:
    """A call takes its latency, once for a batch, and leaves the loop free."""
    model = HashEmbedding(latency=0.2)
    started = time.monotonic()
    await asyncio.gather(*(model.aget_query_embedding("q") for _ in range(10)))
    assert 0.2 <= time.monotonic() - started < 1.5
    started = time.monotonic()
    model.get_text_embedding_batch(list("abcdefgh"))
    assert 0.2 <= time.monotonic() - started < 1.2


def test_copies_and_threads_share_the_record() -> None:
    """Copies, shallow and deep, fill one record from any number of threads."""
    model = HashEmbedding()
    copies = [model.model_copy(), model.model_copy(deep=True)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: copies[n % 2].get_query_embedding(str(n)), range(100)))
    assert len(model.calls) == 100


def test_an_index_runs_on_it() -> None:
    """LlamaIndex's vector index finds what shares words with the query."""
    nodes = [TextNode(text=text) for text in ("Rain in Paris", "Snow in Oslo")]
    index = VectorStoreIndex(nodes, embed_model=HashEmbedding())
    assert index.as_retriever(similarity_top_k=1).retrieve("Oslo snow")[0].text == "Snow in Oslo"


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("  \n", 0), ("It's 5 km.", 6), ("a_b", 1), ("{}", 2)])
def test_tokens_are_words_and_marks(text: str, tokens: int) -> None:
    """Tokens are runs of word characters and single marks."""
    assert count_tokens(text) == tokens
