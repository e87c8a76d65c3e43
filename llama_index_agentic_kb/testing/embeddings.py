"""An embedding model that needs no weights: texts that share words are close."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Literal

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

from llama_index_agentic_kb.testing._text import DEFAULT_DIMENSIONS, hash_vector

__all__ = ["HashEmbedding"]

EmbeddingCall = tuple[Literal["query", "text"], list[str]]


class _Record:
    """The calls of one model and all its copies."""

    def __init__(self) -> None:
        self._calls: list[EmbeddingCall] = []
        self._lock = threading.Lock()

    def __deepcopy__(self, _memo: dict[int, object]) -> _Record:
        """Stay shared, by deep copies too."""
        return self

    @property
    def calls(self) -> list[EmbeddingCall]:
        with self._lock:
            return list(self._calls)

    def add(self, kind: Literal["query", "text"], texts: list[str]) -> None:
        with self._lock:
            self._calls.append((kind, list(texts)))


class HashEmbedding(BaseEmbedding):
    """Embeds a text as a bag of hashed words, the same in every process.

    Vectors have L2 norm 1 and no negative value. Copies made with ``model_copy`` share the record.

    Args:
        dimensions: The length of the vectors; 256 unless told.
        latency: Seconds each call takes, a batch counting as one.
        **kwargs: For ``BaseEmbedding``, such as ``embed_batch_size``, 10 unless told.
    """

    model_name: str = Field(default="hash", description="The name of the model.")
    dimensions: int = Field(default=DEFAULT_DIMENSIONS, ge=1, description="The length of the vectors.")
    latency: float = Field(default=0.0, ge=0.0, description="Seconds each call takes.")

    _record: _Record = PrivateAttr(default_factory=_Record)

    @classmethod
    def class_name(cls) -> str:
        """Name the class in serialized forms."""
        return "hash_embedding"

    @property
    def calls(self) -> list[EmbeddingCall]:
        """Every call so far: "query" or "text", and the texts embedded together."""
        return self._record.calls

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
        self._record.add(kind, texts)
        time.sleep(self.latency)
        return self._vectors(texts)

    async def _aembed(self, kind: Literal["query", "text"], texts: list[str]) -> list[list[float]]:
        self._record.add(kind, texts)
        await asyncio.sleep(self.latency)
        return self._vectors(texts)

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        return [hash_vector(text, self.dimensions) for text in texts]
