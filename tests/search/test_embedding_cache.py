from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.search.embedding import ENTRY_BYTES, EmbeddingCache

BYTES_OF_TWO = ENTRY_BYTES + 2 * 8
"""What a vector of two numbers takes."""


def test_vectors_are_found_by_model_and_text() -> None:
    """Only the same model and the same text find a vector, and the counts tell."""
    cache = EmbeddingCache()
    cache.put("m", "a", [0.1, 0.2])
    assert cache.get("m", "a") == [0.1, 0.2]
    assert [cache.get("m", "A"), cache.get("n", "a"), cache.get("m", "")] == [None, None, None]
    counted = cache.statistics
    assert (counted.hits, counted.misses, counted.entries, counted.bytes) == (1, 3, 1, BYTES_OF_TWO)


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=False), max_size=20), st.text(st.characters(codec=None), max_size=20))
def test_what_is_found_equals_what_was_kept(vector: list[float], text: str) -> None:
    """Every double comes back as it was, also infinities and -0.0, for any text, lone surrogates included."""
    cache = EmbeddingCache()
    cache.put("m", text, vector)
    assert repr(cache.get("m", text)) == repr(vector)


def test_the_longest_unused_goes_first() -> None:
    """A full cache lets go of what was not looked up or kept for the longest time."""
    cache = EmbeddingCache(max_bytes=2 * BYTES_OF_TWO)
    for text in "ab":
        cache.put("m", text, [0.0, 1.0])
    cache.get("m", "a")
    cache.put("m", "c", [0.0, 1.0])
    assert [cache.get("m", text) is not None for text in "abc"] == [True, False, True]
    assert cache.statistics.bytes == 2 * BYTES_OF_TWO


@pytest.mark.parametrize("vector", [[0.0] * 100, [[1.0], [2.0]], [10**400], None], ids=str)
def test_what_can_not_be_kept_is_let_go(vector: Any) -> None:
    """A vector larger than the cache, a multi-vector model's rows or no vector at all leave the rest alone."""
    cache = EmbeddingCache(max_bytes=BYTES_OF_TWO)
    cache.put("m", "a", [1.0, 2.0])
    cache.put("m", "b", vector)
    assert cache.get("m", "b") is None
    assert cache.get("m", "a") == [1.0, 2.0]


@pytest.mark.parametrize("max_bytes", [-1, 1.5, True, "64 MB", None])
def test_a_bad_size_is_refused(max_bytes: Any) -> None:
    """The message names the argument and what it may be."""
    with pytest.raises(ConfigurationError, match=r"max_bytes .* 0 or more"):
        EmbeddingCache(max_bytes)
