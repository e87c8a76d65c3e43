"""Replays recorded replies of a language model, so that a whole query can be shown and tested without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import BaseModel, Field

from llama_index_agentic_kb.errors import LLMError

__all__ = ["RecordedLLM", "RecordedReply", "Recording"]

_PASSAGE: Final = re.compile(r'<passage ref_id="(\d+)"[^>]*>\n(.*?)\n</passage>', re.DOTALL)
_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")


class RecordedReply(BaseModel):
    """One reply.

    The evidence of another run may come in another order: each marker is numbered anew by a quote from the passage
    that it stood for.
    """

    when: str = Field(min_length=1, description="Text that the prompt must hold for this reply to be its answer.")
    content: str = Field(description="What the model wrote.")
    quotes: dict[str, str] = Field(
        default_factory=dict, description="Words of the passage behind each [ref_id:N] of the content, by N."
    )

    def for_prompt(self, prompt: str) -> str:
        """Give the content with its markers numbered as the prompt's passages are.

        Raises:
            LLMError: A passage that the reply cites is not in the prompt.
        """
        passages = _PASSAGE.findall(prompt)

        def renumbered(marker: re.Match[str]) -> str:
            quote = self.quotes.get(marker.group(1), "")
            for number, text in passages:
                if quote and quote in text:
                    return f"[ref_id:{number}]"
            raise LLMError(f"the recorded reply cites {quote!r}, which is not in this run's evidence")

        return _MARKER.sub(renumbered, self.content)


class Recording(BaseModel):
    """A question and what a model replied on the way to its answer."""

    question: str
    model: str = Field(description="Who replied.")
    effort: str = Field(default="low", description="The reasoning effort of the recorded request.")
    replies: list[RecordedReply]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recording from a JSON file."""
        return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))


class RecordedLLM(CustomLLM):
    """A language model that says again what was recorded.

    Args:
        recording: The replies; each prompt gets the first one whose ``when`` it holds.
        context_window: Tokens of prompt and reply together. Default 128,000.
    """

    recording: Recording
    context_window: int = 128_000

    @property
    def metadata(self) -> LLMMetadata:
        """Name the model as recorded."""
        return LLMMetadata(
            context_window=self.context_window, num_output=1_024, model_name=f"{self.recording.model} (recorded)"
        )

    def _reply(self, prompt: str) -> str:
        for reply in self.recording.replies:
            if reply.when in prompt:
                return reply.for_prompt(prompt)
        raise LLMError("the recording holds no reply to this prompt: it was made for another question")

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:  # noqa: ARG002
        """Reply to a prompt."""
        return CompletionResponse(text=self._reply(prompt))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Reply to a prompt word by word."""
        for text, delta in _growing(self._reply(prompt)):
            yield CompletionResponse(text=text, delta=delta)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Reply to a conversation."""
        return _chat(self._reply(_prompt(messages)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Reply to a conversation."""
        return _chat(self._reply(_prompt(messages)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseGen:
        """Reply to a conversation word by word."""
        reply = self._reply(_prompt(messages))

        def told() -> ChatResponseGen:
            for text, delta in _growing(reply):
                yield _chat(text, delta)

        return told()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseAsyncGen:
        """Reply to a conversation word by word."""
        reply = self._reply(_prompt(messages))

        async def told() -> ChatResponseAsyncGen:
            for text, delta in _growing(reply):
                yield _chat(text, delta)

        return told()


def _prompt(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message.content or "" for message in messages)


def _growing(text: str) -> list[tuple[str, str]]:
    """Give (text so far, delta) pairs, a word each."""
    words = re.findall(r"\S+\s*|\s+", text)
    return [("".join(words[: position + 1]), word) for position, word in enumerate(words)]


def _chat(text: str, delta: str | None = None) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)
