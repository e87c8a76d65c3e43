"""OpenAI's client for other people's servers: any model name, a context window of your own.

Not imported by its package, because it imports the OpenAI client.
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

NO_KEY = "no-key"
"""Sent to servers other than OpenAI's where no key is set: the client insists on one, they often don't."""

SECRET_FIELDS: Final = frozenset({"api_key", "default_headers"})
"""What is never printed, serialized or pickled; user and password in ``api_base`` neither."""


class OpenAICompatible(OpenAI):
    """LlamaIndex's ``OpenAI`` for servers that speak its protocol with model names of their own.

    ``OpenAI`` raises where a name's context window or tokenizer is asked for and the name is not OpenAI's. This
    one doesn't. All arguments are those of ``OpenAI``, and two:

        llm = OpenAICompatible(model="my-model", api_base="http://localhost:8000/v1", context_window=32_768)

    Its ``repr``, ``to_dict``, ``model_dump`` and pickle hold no key, no headers and no password of ``api_base``: what
    is loaded from them takes its key from ``OPENAI_API_KEY``, and headers have to be set again.

    Attributes:
        context_window: Tokens of prompt and reply together, for a name that LlamaIndex doesn't know. Default 8,192.
        is_function_calling_model: Whether a model of such a name can be made to call tools. Default False.
    """

    context_window: int = Field(
        default=8_192, gt=0, description="Tokens of prompt and reply together, for a model name that is unknown."
    )
    is_function_calling_model: bool = Field(
        default=False, description="Whether a model whose name is unknown can be made to call tools."
    )

    @classmethod
    def class_name(cls) -> str:
        """Name the class in serialized forms."""
        return "openai_compatible_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex knows of the model, or else what was said."""
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
        """OpenAI's tokenizer for its own models, where it can be had; LlamaIndex's global one for all others."""
        try:
            return super()._tokenizer
        except (KeyError, OSError):
            return _GlobalTokenizer()

    def _get_credential_kwargs(self, is_async: bool = False) -> dict[str, Any]:
        kwargs = super()._get_credential_kwargs(is_async)
        if not kwargs["api_key"] and self.api_base != DEFAULT_OPENAI_API_BASE:
            kwargs["api_key"] = NO_KEY
        return kwargs

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Leave keys and headers out of what is printed."""
        for name, value in super().__repr_args__():
            if name not in SECRET_FIELDS:
                yield name, redacted(value) if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave keys and headers out of ``model_dump``, ``to_dict``, ``to_json`` and whatever holds the model."""
        data = super().custom_model_dump(handler, info)
        kept = {name: value for name, value in data.items() if name not in SECRET_FIELDS}
        return {**kept, "api_base": redacted(kept["api_base"])} if "api_base" in kept else kept

    def __getstate__(self) -> dict[str, Any]:
        """Leave keys and headers out of pickles: where one is loaded, the key is that of OPENAI_API_KEY."""
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name not in SECRET_FIELDS}
        return {**state, "__dict__": {**kept, "api_base": redacted(self.api_base or "") or None}}


class _GlobalTokenizer:
    """LlamaIndex's global tokenizer, with the method that OpenAI's have."""

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return list(get_tokenizer()(text))
