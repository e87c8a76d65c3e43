"""Replays recorded replies of a language model, so that whole queries can be shown and tested without one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from llama_index.core.base.llms.generic_utils import chat_to_completion_decorator, stream_chat_to_completion_decorator
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
from llama_index.core.llms.callbacks import llm_chat_callback
from pydantic import BaseModel, Field

from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.spotlighting import without_signs
from llama_index_agentic_kb.llm import count_tokens

__all__ = ["PASSAGE", "RecordedLLM", "RecordedReply", "Recording", "ReplyingLLM", "ScriptedReply"]

PASSAGE: Final = re.compile(r'<passage ref_id="(\d+)"[^\n]*>\n(.*?)\n</passage>', re.DOTALL)
"""Pattern of a passage in a prompt, with its number and text as groups."""

_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")
_REF: Final = re.compile(r'("ref"\s*:\s*"?)(\d+)')


class RecordedReply(BaseModel):
    """One recorded reply of a language model; a quote identifies each passage, since another run may number it anew."""

    when: str = Field(min_length=1, description="Text that the prompt must hold for this reply to be its answer.")
    content: str = Field(description="What the model wrote.")
    quotes: dict[str, str] = Field(
        default_factory=dict, description="Words of the passage behind each [ref_id:N] or ref of the content, by N."
    )

    def for_prompt(self, prompt: str) -> str:
        """Return the content with the prompt's passage numbers: null for a finding whose passage is not in it.

        Raises:
            LLMError: The passage of a citation is not in the prompt.
        """
        passages = {number: without_signs(text) for number, text in PASSAGE.findall(prompt)}
        numbers = {
            quoted: number
            for quoted, quote in self.quotes.items()
            for number, text in reversed(passages.items())
            if quote and quote in text
        }

        def cited(marker: re.Match[str]) -> str:
            if marker[1] not in numbers:
                quote = self.quotes.get(marker[1], "")
                raise LLMError(f"the recorded reply cites {quote!r}, which is not in this run's evidence")
            return f"[ref_id:{numbers[marker[1]]}]"

        return _MARKER.sub(cited, _REF.sub(lambda ref: f"{ref[1]}{numbers.get(ref[2], 'null')}", self.content))


class Recording(BaseModel):
    """A question and all replies of a model during its processing."""

    question: str
    model: str = Field(description="Who replied.")
    effort: str = Field(default="low", description="The reasoning effort of the recorded request.")
    replies: list[RecordedReply]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recording from a JSON file."""
        return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ScriptedReply:
    """One reply of a :class:`ReplyingLLM`; times are in seconds."""

    content: str = ""
    latency: float = 0.0  # before the reply, or before a stream's first piece
    chunk_delay: float = 0.0  # before each further piece of a stream
    chunk_size: int = 16  # characters in each piece of a stream, at least 1
    error: Exception | None = None  # raised after the latency, or in a stream after the content


class ReplyingLLM(CustomLLM):
    """A base class for chat models without tools whose replies come from code; chats are native, async too.

    Callbacks and instrumentation events are sent as for any other chat model. ``raw`` contains
    ``{"usage": {"prompt_tokens", "completion_tokens", "total_tokens"}}``; in a stream, only the last piece has it.
    Subclasses implement ``metadata``, and ``reply_to`` or ``respond``.
    """

    def reply_to(self, prompt: str) -> str:
        """Return the reply to a prompt, messages joined by line breaks; raise ``LLMError`` if there is none."""
        raise NotImplementedError

    def respond(self, messages: Sequence[ChatMessage]) -> ScriptedReply:
        """Return the reply to a conversation, with its delays or its error."""
        return ScriptedReply(self.reply_to("\n".join(message.content or "" for message in messages)))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens that are billed for a text."""
        return count_tokens(text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **_: object) -> ChatResponse:
        """Reply to a conversation."""
        reply = self.respond(messages)
        time.sleep(reply.latency)
        return self._whole(messages, reply)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **_: object) -> ChatResponse:
        """Reply to a conversation, without blocking the loop."""
        reply = self.respond(messages)
        await asyncio.sleep(reply.latency)
        return self._whole(messages, reply)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **_: object) -> ChatResponseGen:
        """Reply to a conversation piece by piece."""
        reply = self.respond(messages)

        def pieces() -> ChatResponseGen:
            for delay, piece in self._pieces(messages, reply):
                time.sleep(delay)
                yield from piece

        return pieces()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **_: object) -> ChatResponseAsyncGen:
        """Reply to a conversation piece by piece, without blocking the loop."""
        reply = self.respond(messages)

        async def pieces() -> ChatResponseAsyncGen:
            for delay, piece in self._pieces(messages, reply):
                await asyncio.sleep(delay)
                for response in piece:
                    yield response

        return pieces()

    def complete(self, prompt: str, formatted: bool = False, **_: object) -> CompletionResponse:  # noqa: ARG002
        """Reply to a prompt as one user message; likewise the other completions."""
        return chat_to_completion_decorator(self.chat)(prompt)

    def stream_complete(self, prompt: str, formatted: bool = False, **_: object) -> CompletionResponseGen:  # noqa: ARG002, D102
        return stream_chat_to_completion_decorator(self.stream_chat)(prompt)

    def _whole(self, messages: Sequence[ChatMessage], reply: ScriptedReply) -> ChatResponse:
        if reply.error is not None:
            raise reply.error
        message = ChatMessage(reply.content, role=MessageRole.ASSISTANT)
        return ChatResponse(message=message, raw=self._billed(messages, reply.content))

    def _pieces(
        self, messages: Sequence[ChatMessage], reply: ScriptedReply
    ) -> Iterator[tuple[float, list[ChatResponse]]]:
        """Yield pairs of a pause in seconds and the next piece (none before an error), then raise the error, if any."""
        text, size, delay = reply.content, reply.chunk_size, reply.latency
        for end in range(size, (len(text) or (reply.error is None)) + size, size):
            raw = self._billed(messages, text) if end >= len(text) and reply.error is None else None
            message = ChatMessage(text[:end], role=MessageRole.ASSISTANT)
            yield delay, [ChatResponse(message=message, delta=text[end - size : end], raw=raw)]
            delay = reply.chunk_delay
        if reply.error is not None:
            yield (0.0 if text else delay), []
            raise reply.error

    def _billed(self, messages: Sequence[ChatMessage], text: str) -> dict[str, dict[str, int]]:
        read, written = sum(self.count_tokens(one.content or "") for one in messages), self.count_tokens(text)
        return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}


class RecordedLLM(ReplyingLLM):
    """A language model that returns recorded replies; a prompt gets the first one whose ``when`` it contains."""

    recording: Recording
    context_window: int = 128_000

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of a chat model with the name of the recorded one."""
        name = f"{self.recording.model} (recorded)"
        return LLMMetadata(context_window=self.context_window, num_output=1_024, is_chat_model=True, model_name=name)

    def reply_to(self, prompt: str) -> str:
        """Return the recorded reply; raise ``LLMError`` if there is none, or its evidence is not in the prompt."""
        for reply in self.recording.replies:
            if reply.when in prompt:
                return reply.for_prompt(prompt)
        raise LLMError("the recording holds no reply to this prompt: it was made for another question")
