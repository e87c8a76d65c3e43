"""An embedding model without weights (texts that share words are close), and functions for words and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections import deque
from typing import Final, Literal

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

__all__ = ["DIMENSIONS", "HashEmbedding", "count_tokens", "hash_vector", "words"]

DIMENSIONS: Final = 256

EmbeddingCall = tuple[Literal["query", "text"], list[str]]


def words(text: str) -> list[str]:
    """Split a text into lower-cased runs of letters, digits and underscores."""
    return re.findall(r"\w+", text.lower())


def count_tokens(text: str) -> int:
    """Return the number of words and punctuation marks, as reported by all test doubles: "It's 5 km." has six."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def hash_vector(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """Return a bag of hashed words as a vector with L2 norm 1 and no negative value, the same in every process."""
    vector = [0.0] * dimensions
    for word in words(text) or [""]:  # a text without words must not be a zero vector
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        vector[int.from_bytes(digest, "big") % dimensions] += 1.0
    norm = math.hypot(*vector)
    return [value / norm for value in vector]


class HashEmbedding(BaseEmbedding):
    """Embeds a text as a bag of hashed words; the cosine of two texts grows with the words they share.

    Args:
        dimensions: Length of the vectors. Defaults to 256.
        latency: Duration of each call in seconds; a batch is one call.
        **kwargs: Arguments of ``BaseEmbedding``, such as ``embed_batch_size``.
    """

    model_name: str = Field(default="hash", description="The name of the model.")
    dimensions: int = Field(default=DIMENSIONS, ge=1, description="The length of the vectors.")
    latency: float = Field(default=0.0, ge=0.0, description="Seconds each call takes.")

    _calls: deque[EmbeddingCall] = PrivateAttr(default_factory=deque)  # a list would be part of the model's state

    @property
    def calls(self) -> list[EmbeddingCall]:
        """All calls so far: "query" or "text", and the texts of the call."""
        return list(self._calls)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed("query", [query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aembed("query", [query]))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed("text", [text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aembed("text", [text]))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed("text", texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._aembed("text", texts)

    def _embed(self, kind: Literal["query", "text"], texts: list[str]) -> list[list[float]]:
        self._calls.append((kind, list(texts)))
        time.sleep(self.latency)
        return self._vectors(texts)

    async def _aembed(self, kind: Literal["query", "text"], texts: list[str]) -> list[list[float]]:
        self._calls.append((kind, list(texts)))
        await asyncio.sleep(self.latency)
        return self._vectors(texts)

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        return [hash_vector(text, self.dimensions) for text in texts]
