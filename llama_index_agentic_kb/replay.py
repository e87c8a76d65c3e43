"""Replays recorded replies of a language model, so that a whole query can be shown and tested without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from llama_index.core.base.llms.generic_utils import (
    completion_response_to_chat_response,
    stream_completion_response_to_chat_response,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import BaseModel, Field

from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.spotlighting import without_signs
from llama_index_agentic_kb.llm import count_tokens

__all__ = ["PASSAGE", "RecordedLLM", "RecordedReply", "Recording", "ReplyingLLM"]

PASSAGE: Final = re.compile(r'<passage ref_id="(\d+)"[^\n]*>\n(.*?)\n</passage>', re.DOTALL)
"""A passage as it stands in a prompt: its number, its text."""

_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")
_REF: Final = re.compile(r'("ref"\s*:\s*"?)(\d+)')
_EVIDENCE_END: Final = "</evidence>"

QUOTE: Final = 200
"""Characters of a passage that are kept to find it again."""


class RecordedReply(BaseModel):
    """One reply.

    The evidence of another run may come in another order: each number of a passage, in a marker or in a finding, is
    found anew by a quote from the passage that it stood for.
    """

    when: str = Field(min_length=1, description="Text that the prompt must hold for this reply to be its answer.")
    content: str = Field(description="What the model wrote.")
    quotes: dict[str, str] = Field(
        default_factory=dict, description="Words of the passage behind each [ref_id:N] or ref of the content, by N."
    )

    @classmethod
    def of(cls, prompt: str, content: str) -> Self:
        """Record a reply to a prompt.

        It is known by what follows the evidence, which may come in another order next time.

        Args:
            prompt: The last message: what stands before it is the same for every question.
            content: What the model wrote.
        """
        named = {*_MARKER.findall(content), *(number for _, number in _REF.findall(content))}
        quotes = {number: text.strip()[:QUOTE] for number, text in _passages(prompt) if number in named}
        when = prompt.rpartition(_EVIDENCE_END)[2].strip() or prompt
        return cls(when=when, content=content, quotes=quotes)

    def for_prompt(self, prompt: str) -> str:
        """Return the content with its passages numbered as the prompt's.

        A finding whose passage is not in the prompt names none (ref 0).

        Raises:
            LLMError: A passage that the reply cites is not in the prompt.
        """
        passages = _passages(prompt)
        numbers = {
            quoted: next((number for number, text in passages if quote and quote in text), None)
            for quoted, quote in self.quotes.items()
        }

        def cited(marker: re.Match[str]) -> str:
            if numbers.get(marker[1]) is None:
                quote = self.quotes.get(marker[1], "")
                raise LLMError(f"the recorded reply cites {quote!r}, which is not in this run's evidence")
            return f"[ref_id:{numbers[marker[1]]}]"

        found = _REF.sub(lambda ref: f"{ref[1]}{numbers.get(ref[2]) or 0}", self.content)
        return _MARKER.sub(cited, found)


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

    def save(self, path: str | Path) -> None:
        """Write it as JSON, and make its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


class ReplyingLLM(CustomLLM):
    """A chat model whose reply is a function of the prompt; it streams word by word, and counts tokens.

    Subclasses say what it replies (``reply_to``) and what it is (``metadata``).
    """

    def reply_to(self, prompt: str) -> str:
        """Return the reply to a prompt: a conversation's messages, a line break between them.

        Raises:
            LLMError: There is no reply to it.
        """
        raise NotImplementedError

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:  # noqa: ARG002
        """Reply to a prompt."""
        return self._whole(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Reply to a prompt word by word."""
        return self._pieces(prompt)

    # Core's own chats would be a call within a call for whoever counts them.
    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Reply to a conversation."""
        return completion_response_to_chat_response(self._whole(_prompt(messages)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Reply to a conversation."""
        return completion_response_to_chat_response(self._whole(_prompt(messages)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseGen:
        """Reply to a conversation word by word."""
        return stream_completion_response_to_chat_response(self._pieces(_prompt(messages)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseAsyncGen:
        """Reply to a conversation word by word."""
        whole = list(stream_completion_response_to_chat_response(self._pieces(_prompt(messages))))

        async def pieces() -> ChatResponseAsyncGen:
            for piece in whole:
                yield piece

        return pieces()

    def _whole(self, prompt: str) -> CompletionResponse:
        text = self.reply_to(prompt)
        return CompletionResponse(text=text, raw=_billed(prompt, text))

    def _pieces(self, prompt: str) -> CompletionResponseGen:
        """Yield the reply word by word; the last piece holds the token counts."""
        text, sent = self.reply_to(prompt), ""
        for word in re.findall(r"\S+\s*|\s+", text):
            sent += word
            raw = _billed(prompt, text) if len(sent) == len(text) else None
            yield CompletionResponse(text=sent, delta=word, raw=raw)


class RecordedLLM(ReplyingLLM):
    """A language model that says again what was recorded.

    Args:
        recording: The replies; each prompt gets the first one whose ``when`` it holds.
        context_window: Tokens of prompt and reply together. Default 128,000.
    """

    recording: Recording
    context_window: int = 128_000

    @property
    def metadata(self) -> LLMMetadata:
        """A chat model, named by the one whose replies were recorded."""
        name = f"{self.recording.model} (recorded)"
        return LLMMetadata(context_window=self.context_window, num_output=1_024, is_chat_model=True, model_name=name)

    def reply_to(self, prompt: str) -> str:
        """Return the recorded reply to a prompt.

        Raises:
            LLMError: There is none, or it cites what this prompt does not hold.
        """
        for reply in self.recording.replies:
            if reply.when in prompt:
                return reply.for_prompt(prompt)
        raise LLMError("the recording holds no reply to this prompt: it was made for another question")


def _passages(prompt: str) -> list[tuple[str, str]]:
    """Return the passages of a prompt as (number, text), without the signs that mark them in one request."""
    return [(number, without_signs(text)) for number, text in PASSAGE.findall(prompt)]


def _prompt(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message.content or "" for message in messages)


def _billed(prompt: str, reply: str) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": count_tokens(prompt), "completion_tokens": count_tokens(reply)}}
