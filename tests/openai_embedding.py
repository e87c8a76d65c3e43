"""LlamaIndex's ``OpenAIEmbedding`` in small: the same names, clients and retries, without its package."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from openai import AsyncOpenAI, OpenAI
from tenacity import Retrying, stop_after_attempt, wait_none

from llama_index_agentic_kb.testing import LoopbackOpenAI


class OpenAIEmbedding(BaseEmbedding):
    """Retries around a client that retries, as llama-index-embeddings-openai 0.7 does (without its waits)."""

    model_name: str = "text-embedding-3-small"
    api_base: str
    max_retries: int = 10
    timeout: float = 60.0
    reuse_client: bool = True
    treats_queries_as_texts: bool = True

    _client: OpenAI | None = PrivateAttr(default=None)
    _aclient: AsyncOpenAI | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, server: LoopbackOpenAI, **fields: Any) -> OpenAIEmbedding:
        return cls(api_base=server.base_url, **fields)

    def _settings(self) -> dict[str, Any]:
        key = "sk-embedding-no-secret"
        return {"api_key": key, "base_url": self.api_base, "max_retries": self.max_retries, "timeout": self.timeout}

    def _get_client(self) -> OpenAI:
        if self._client is None:
            self._client = OpenAI(**self._settings())
        return self._client

    def _get_aclient(self) -> AsyncOpenAI:
        if self._aclient is None:
            self._aclient = AsyncOpenAI(**self._settings())
        return self._aclient

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        client = self._get_client()

        def ask() -> Any:
            return client.embeddings.create(input=texts, model=self.model_name, encoding_format="float")

        retrying = Retrying(stop=stop_after_attempt(self.max_retries), wait=wait_none(), reraise=True)
        return [item.embedding for item in retrying(ask).data]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        client = self._get_aclient()
        made = await client.embeddings.create(input=texts, model=self.model_name, encoding_format="float")
        return [item.embedding for item in made.data]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embeddings([query])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aget_text_embeddings([text]))[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aget_text_embeddings([query]))[0]
