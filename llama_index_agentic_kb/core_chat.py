"""LlamaIndex's chat engines over our retriever: the conversation stays text, and no call is spent on condensing it.

LlamaIndex puts the conversation into prompt templates, where ``{context_str}`` in a message would be replaced. Our
planner reads the conversation from the memory that it shares with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.response_synthesizers import CompactAndRefine


class _PlainConversation:
    """Mixin for engines whose prompt templates hold the conversation."""

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> CompactAndRefine:
        values, history = _variables(chat_history)
        make: Any = super()._get_response_synthesizer  # type: ignore[misc]  # of the engine beside this mixin
        synthesizer: CompactAndRefine = make(history, streaming=streaming)
        prompts = synthesizer.get_prompts().items()
        synthesizer.update_prompts({name: prompt.partial_format(**values) for name, prompt in prompts})
        return synthesizer


def _variables(history: Sequence[ChatMessage]) -> tuple[dict[str, str], list[ChatMessage]]:
    """Return the texts of messages by variable name, and the messages with the variables in their place."""
    values, messages = dict[str, str](), list[ChatMessage]()
    for message in history:
        blocks: list[Any] = []
        for block in message.blocks:
            if isinstance(block, TextBlock):
                values[f"said_{len(values)}"] = block.text
                blocks.append(TextBlock(text=f"{{said_{len(values) - 1}}}"))
            else:
                blocks.append(block)
        messages.append(message.model_copy(update={"blocks": blocks}))
    return values, messages


class ContextChat(_PlainConversation, ContextChatEngine):
    """LlamaIndex's ``ContextChatEngine``."""


class CondensePlusContextChat(_PlainConversation, CondensePlusContextChatEngine):
    """LlamaIndex's ``CondensePlusContextChatEngine``."""


class CondenseQuestionChat(CondenseQuestionChatEngine):
    """LlamaIndex's ``CondenseQuestionChatEngine`` without its condensing: the retriever plans from the conversation."""

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Answer a message; a ``chat_history`` replaces the messages in the memory, as in the other modes."""
        return super().chat(message, self._kept(chat_history))

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Answer a message; see ``chat``."""
        return await super().achat(message, self._kept(chat_history))

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Answer a message, as a stream; see ``chat``."""
        return super().stream_chat(message, self._kept(chat_history))

    async def astream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> Any:
        """Answer a message, as a stream; see ``chat``."""
        return await super().astream_chat(message, self._kept(chat_history))

    def _kept(self, chat_history: list[ChatMessage] | None) -> list[ChatMessage] | None:
        if chat_history is not None:
            self._memory.set(chat_history)
        return chat_history

    def _condense_question(self, chat_history: list[ChatMessage], last_message: str) -> str:
        del chat_history
        return last_message

    async def _acondense_question(self, chat_history: list[ChatMessage], last_message: str) -> str:
        del chat_history
        return last_message
