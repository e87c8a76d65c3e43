from __future__ import annotations

import math

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from llama_index_agentic_kb.testing import HashEmbedding, count_tokens, hash_vector


def test_vectors_have_norm_one() -> None:
    """Every vector has norm one, that of an empty text too."""
    model = HashEmbedding(dimensions=32)
    for text in ("rain and snow", "rain rain rain", "", "?!", "\ud800"):
        assert math.isclose(math.hypot(*model.get_text_embedding(text)), 1.0)


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
    vectors = model.model_copy().get_text_embedding_batch(["a", "b", "c"])
    assert await model.aget_text_embedding_batch(["a", "b", "c"]) == vectors
    assert model.calls[:4] == [("query", ["q"]), ("query", ["q"]), ("text", ["t"]), ("text", ["t"])]
    assert model.calls[4:] == [("text", ["a", "b"]), ("text", ["c"])] * 2


def test_texts_that_share_words_are_close() -> None:
    """LlamaIndex's vector index finds what shares words with the query."""
    nodes = [TextNode(text=text) for text in ("Rain in Paris", "Snow in Oslo")]
    index = VectorStoreIndex(nodes, embed_model=HashEmbedding())
    assert index.as_retriever(similarity_top_k=1).retrieve("Oslo, snow!")[0].text == "Snow in Oslo"


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("  \n", 0), ("It's 5 km.", 6), ("a_b", 1), ("{}", 2)])
def test_tokens_are_words_and_marks(text: str, tokens: int) -> None:
    """Tokens are runs of word characters and single marks."""
    assert count_tokens(text) == tokens
