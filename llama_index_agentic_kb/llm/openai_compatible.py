"""An LLM class for OpenAI-compatible servers, with any model name and a configurable context window.

The package does not import this module by itself, because it loads the OpenAI client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field
from llama_index.core.utils import get_tokenizer
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai.base import Tokenizer
from llama_index.llms.openai.utils import DEFAULT_OPENAI_API_BASE
from pydantic import SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from llama_index_agentic_kb._text import redacted
from llama_index_agentic_kb._types import JsonObject

NO_KEY = "no-key"
"""API key sent to servers other than OpenAI's if none is set, because the client requires a key."""

SECRET_FIELDS: Final = frozenset({"api_key", "default_headers"})
"""Fields that are never printed, serialized or pickled, like the credentials in ``api_base``."""


class OpenAICompatible(OpenAI):
    """LlamaIndex's ``OpenAI`` for servers that use its protocol with other model names.

        llm = OpenAICompatible(model="my-model", api_base="http://localhost:8000/v1", context_window=32_768)

    ``OpenAI`` raises an error if the context window or the tokenizer of an unknown model name is needed. Its ``repr``,
    ``to_dict``, ``model_dump`` and pickle contain no key, no headers and no password in ``api_base``. A model loaded
    from them reads its key from ``OPENAI_API_KEY``; headers must be set again.

    Attributes:
        context_window: Tokens of prompt and reply together, for model names unknown to LlamaIndex. Defaults to 8,192.
        is_function_calling_model: Whether a model with an unknown name supports function calling. Defaults to False.
    """

    context_window: int = Field(default=8_192, gt=0)
    is_function_calling_model: bool = False

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this class in serialized forms."""
        return "openai_compatible_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """LlamaIndex's metadata of the model, or metadata from the arguments if the model name is unknown."""
        try:
            return super().metadata
        except ValueError:
            return LLMMetadata(
                context_window=self.context_window,
                num_output=self.max_tokens or -1,
                is_chat_model=True,
                is_function_calling_model=self.is_function_calling_model,
                model_name=self.model,
            )

    @property
    def _tokenizer(self) -> Tokenizer | None:
        """OpenAI's tokenizer if it is available for the model, else LlamaIndex's global tokenizer."""
        try:
            return super()._tokenizer
        except (KeyError, OSError):
            return _GlobalTokenizer()

    def _get_credential_kwargs(self, is_async: bool = False) -> JsonObject:
        kwargs = super()._get_credential_kwargs(is_async)
        if not kwargs["api_key"] and self.api_base != DEFAULT_OPENAI_API_BASE:
            kwargs["api_key"] = NO_KEY
        return kwargs

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Yield the fields for ``repr``, without keys, headers and credentials in URLs."""
        for name, value in super().__repr_args__():
            if name not in SECRET_FIELDS:
                yield name, redacted(value) if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> JsonObject:
        """Return the serialized fields without API keys, headers and credentials, also those of nested objects."""
        return _public(super().custom_model_dump(handler, info))

    def __getstate__(self) -> JsonObject:
        """Return the state to pickle, without keys, headers and credentials."""
        state = super().__getstate__()
        return {**state, "__dict__": _public(state["__dict__"])}


def _public(fields: JsonObject) -> JsonObject:
    shown = {name: value for name, value in fields.items() if name not in SECRET_FIELDS}
    return {name: redacted(value) if name == "api_base" and value else value for name, value in shown.items()}


class _GlobalTokenizer:
    """LlamaIndex's global tokenizer with the ``encode`` method of OpenAI's tokenizers."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(get_tokenizer()(text))
