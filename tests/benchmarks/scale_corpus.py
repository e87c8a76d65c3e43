"""Synthetic chunks in any number: clustered vectors of 384 dimensions, texts of Zipf words that follow the clusters.

Vectors are points of a 48-dimensional space around topics, laid into 384 dimensions with a little noise: about the
intrinsic dimension of sentence embeddings, so that neighbours exist and the graph that Chroma searches is about as hard
as a real one. Metadata has a ``tenth`` and a ``hundredth`` that are drawn apart from the vectors, as tenants are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

DIMENSION: Final = 384
LATENT: Final = 48
PER_TOPIC: Final = 200
SPREAD: Final = 0.6
NOISE: Final = 0.01
VOCABULARY: Final = 30_000
ZIPF: Final = 1.05
WORDS: Final = 48
TOPIC_WORDS: Final = 12
BLOCK: Final = 5_000
QUERIES: Final = 200
SEED: Final = 7


@dataclass(frozen=True)
class Block:
    """Some chunks in a row."""

    start: int
    vectors: Floats
    texts: list[str]
    groups: Ints
    """From 0 to 99: a chunk's ``hundredth``; its last digit is the ``tenth``."""


class ScaleCorpus:
    """The same chunks and queries (each near the chunks of some topic) at each run, made block by block.

    Without clusters, all vectors are drawn apart from each other, in all dimensions: the hardest there are for a graph.
    """

    def __init__(self, size: int, *, clustered: bool = True) -> None:
        rng = np.random.default_rng(SEED)
        self.size, self._clustered = size, clustered
        self._topics = rng.standard_normal((max(4, size // PER_TOPIC), LATENT)).astype(np.float32)
        basis = np.linalg.qr(rng.standard_normal((DIMENSION, LATENT)))[0]
        self._basis: Floats = np.ascontiguousarray(basis.T, dtype=np.float32)
        self._words = _vocabulary()
        weights = 1.0 / np.arange(1, VOCABULARY + 1) ** ZIPF
        self._zipf = np.cumsum(weights / weights.sum())
        topics = rng.integers(0, len(self._topics), QUERIES)
        self.query_vectors = self._vectors(topics, rng)
        self.query_texts = self._texts(topics, rng, words=3, topic_words=3)

    def blocks(self) -> Iterator[Block]:
        """Yield all chunks."""
        for start in range(0, self.size, BLOCK):
            rng = np.random.default_rng([SEED, start])
            count = min(BLOCK, self.size - start)
            topics = rng.integers(0, len(self._topics), count)
            vectors, groups = self._vectors(topics, rng), rng.integers(0, 100, count)
            yield Block(start, vectors, self._texts(topics, rng, words=WORDS, topic_words=TOPIC_WORDS), groups)

    def _vectors(self, topics: Ints, rng: np.random.Generator) -> Floats:
        if not self._clustered:
            return rng.standard_normal((len(topics), DIMENSION)).astype(np.float32)
        latent = self._topics[topics] + SPREAD * rng.standard_normal((len(topics), LATENT)).astype(np.float32)
        vectors = latent @ self._basis + NOISE * rng.standard_normal((len(topics), DIMENSION)).astype(np.float32)
        unit: Floats = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def _texts(self, topics: Ints, rng: np.random.Generator, *, words: int, topic_words: int) -> list[str]:
        """Words by Zipf's law, and among them words of the topic's own (rare ones, shared with few topics)."""
        drawn = np.searchsorted(self._zipf, rng.random((len(topics), words))).clip(max=VOCABULARY - 1)
        own = (topics[:, None] * 7919 + rng.integers(0, 24, (len(topics), topic_words)) * 104_729) % VOCABULARY
        return [" ".join(self._words[at] for at in row) for row in np.concatenate([drawn, own], axis=1)]


class ScaleEmbedding(BaseEmbedding):
    """Looks vectors up that were made beforehand: a text names its row as ``#12``, queries are known by their words."""

    _queries: dict[str, list[float]] = PrivateAttr()
    _block: Block | None = PrivateAttr(default=None)

    def __init__(self, corpus: ScaleCorpus) -> None:
        super().__init__(model_name="synthetic", embed_batch_size=1_000)
        self._queries = dict(zip(corpus.query_texts, corpus.query_vectors.tolist(), strict=True))

    def show(self, block: Block) -> None:
        """Make a block's vectors known; those of the block before are forgotten."""
        self._block = block

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(self._queries[query])

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return list(self._queries[query])

    def _get_text_embedding(self, text: str) -> list[float]:
        row = re.search(r"#(\d+)", text)
        if self._block is None or row is None:  # the store asks for the dimension with a text of its own
            return [1.0] * DIMENSION
        vector: list[float] = self._block.vectors[int(row[1]) - self._block.start].tolist()
        return vector


def _vocabulary() -> list[str]:
    syllables = [onset + vowel for onset in "bdfgklmnprstvz" for vowel in "aeiou"]
    return [
        syllables[at % 70] + syllables[at // 70 % 70] + syllables[at // 4900 % 70] + syllables[at * 31 % 70]
        for at in range(VOCABULARY)
    ]
