"""Selects the language model and detects its capabilities, without importing LlamaIndex's OpenAI integration."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM, CustomLLM, MockLLM
from llama_index.core.settings import Settings
from llama_index.core.utils import get_tokenizer

DEFAULT_MODEL: Final = "gpt-4o-mini"
"""The chat model asked of a server that the environment names."""

MAX_PIECE: Final = 100_000
"""Maximum number of characters that are tokenized at once."""


def resolve_llm(llm: LLM | None) -> LLM | None:
    """Return the LLM to use: ``llm``, else ``Settings.llm`` if it was set, else that of the environment, else None.

    Without a server's address, the environment's is core's default, if there is an OpenAI key. A disabled LLM
    (``Settings.llm = None`` sets core's ``MockLLM``) counts as None.
    """
    if llm is not None:
        return of_any_name(llm)
    if Settings._llm is None:  # noqa: SLF001 (the getter would create core's default)
        if openai_address() is not None:
            return openai_from_environment()
        if not os.environ.get("OPENAI_API_KEY"):
            return None
    default: LLM = Settings.llm
    return None if isinstance(default, MockLLM) else of_any_name(default)


def of_any_name(llm: LLM) -> LLM:
    """Return the LLM; LlamaIndex's ``OpenAI`` with a model name that it does not know becomes ``OpenAICompatible``."""
    module = sys.modules.get("llama_index.llms.openai.base")
    if module is None or type(llm) is not module.OpenAI:
        return llm
    try:
        _ = llm.metadata
    except ValueError:
        from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the client)

        # Core has no public names for a user's own HTTP clients.
        clients = {name: getattr(llm, f"_{name}") for name in ("http_client", "async_http_client")}
        fields = {name: getattr(llm, name) for name in type(llm).model_fields}
        return OpenAICompatible(**fields, **clients)
    return llm


def openai_address() -> str | None:
    """Return the address of the OpenAI-compatible server that the environment names."""
    return os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE") or None


def openai_from_environment(model: str | None = None, **arguments: Any) -> LLM:
    """Return a chat model of the environment's server: OPENAI_BASE_URL or OPENAI_API_BASE, and OPENAI_API_KEY."""
    from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible  # noqa: PLC0415 (loads the OpenAI client)

    key = os.environ.get("OPENAI_API_KEY") or None
    return OpenAICompatible(model=model or DEFAULT_MODEL, api_key=key, api_base=openai_address(), **arguments)


def warm_up_llm(llm: LLM) -> None:
    """Load the tokenizer and the clients, so that the first call does not block the event loop; send no request."""
    count_tokens("warm up")
    if not is_openai(llm):
        return
    structured_output(llm, "warm_up", {})
    for make in ("_get_client", "_get_aclient"):
        client = getattr(llm, make, None)
        if client is not None:
            _ = client().chat.completions


def tokens_of(text: str) -> list[Any]:
    """Return the tokens of a text, by LlamaIndex's global tokenizer.

    Long texts are split, which adds a token or two: OpenAI's tokenizer raises on a text of a million spaces.
    """
    encode = get_tokenizer()
    if len(text) <= MAX_PIECE:
        return encode(text)
    return [token for start in range(0, len(text), MAX_PIECE) for token in encode(text[start : start + MAX_PIECE])]


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text, by LlamaIndex's global tokenizer."""
    return len(tokens_of(text))


def model_name(llm: LLM) -> str | None:
    """Return a model's name, or None if it has none."""
    name = getattr(llm, "model", None) or getattr(llm, "model_name", None)
    if isinstance(name, str):
        return name
    try:
        return llm.metadata.model_name
    except ValueError:
        return None


def structured_output(llm: LLM, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments that make an OpenAI model reply in a JSON schema; None if the model does not support it."""
    utils = sys.modules.get("llama_index.llms.openai.utils")
    if utils is None or not is_openai(llm) or not utils.is_json_schema_supported(llm.model):  # type: ignore[attr-defined]
        return None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}}


def is_function_calling(llm: LLM) -> bool:
    """Return whether a model supports function calling."""
    try:
        return bool(llm.metadata.is_function_calling_model) and hasattr(llm, "chat_with_tools")
    except ValueError:
        return False


def chats(llm: LLM) -> bool:
    """Return whether a model is a chat model; otherwise it only completes prompts."""
    try:
        return bool(llm.metadata.is_chat_model)
    except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
        return True


def prompt_of(llm: LLM, messages: Sequence[ChatMessage]) -> str:
    """Return messages as one prompt for a completion model, in the form that LlamaIndex core makes."""
    if len(messages) == 1 and messages[0].role is MessageRole.USER:
        return llm.completion_to_prompt(messages[0].content or "")  # type: ignore[misc]  # core's validators set both
    return llm.messages_to_prompt(messages)  # type: ignore[misc]


def is_openai(llm: LLM) -> bool:
    """Return whether a model is LlamaIndex's ``OpenAI``, without importing that class."""
    module = sys.modules.get("llama_index.llms.openai.base")
    return module is not None and isinstance(llm, module.OpenAI)


def has_native_async(llm: LLM, method: str = "achat") -> bool:
    """Return whether an async method is truly async; that of core's ``CustomLLM`` blocks the event loop."""
    if not isinstance(llm, CustomLLM):
        return True
    own, core = (inspect.unwrap(getattr(kind, method)) for kind in (type(llm), CustomLLM))  # core's spans wrap methods
    return own is not core
