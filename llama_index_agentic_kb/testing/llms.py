"""A language model in the same process that says what it is told to say."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from llama_index_agentic_kb.testing._script import Script
from llama_index_agentic_kb.testing._text import count_tokens

__all__ = ["ScriptedLLM", "ScriptedReply"]


@dataclass(frozen=True)
class ScriptedReply:
    """One answer of a :class:`ScriptedLLM`.

    Args:
        content: The text.
        latency: Seconds before the answer, or before a stream's first piece.
        chunk_delay: Seconds before each further piece of a stream.
        chunk_size: Characters in each piece of a stream.
        error: Raised after the latency, and in a stream after the content was told; None raises nothing.
    """

    content: str = ""
    latency: float = 0.0
    chunk_delay: float = 0.0
    chunk_size: int = 16
    error: Exception | None = None

    def __post_init__(self) -> None:
        """Check the piece size.

        Raises:
            ValueError: ``chunk_size`` is below 1.
        """
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}.")


Scripted = str | Exception | ScriptedReply


class _State:
    """The script and the record of one model and all its copies."""

    def __init__(self, replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted]) -> None:
        self._script: Script[list[ChatMessage], Scripted] = Script(replies)
        self._calls: list[list[ChatMessage]] = []
        self._lock = threading.Lock()

    def __deepcopy__(self, _memo: dict[int, object]) -> _State:
        """Stay shared, by deep copies too."""
        return self

    @property
    def calls(self) -> list[list[ChatMessage]]:
        with self._lock:
            return list(self._calls)

    def ask(self, messages: Sequence[ChatMessage]) -> ScriptedReply:
        # Copied, so that the record stays true if the caller goes on with its messages.
        asked = [message.model_copy(deep=True) for message in messages]
        with self._lock:
            self._calls.append(asked)
        reply = self._script.answer(asked)
        if isinstance(reply, str):
            return ScriptedReply(reply)
        return ScriptedReply(error=reply) if isinstance(reply, Exception) else reply


class ScriptedLLM(CustomLLM):
    """A chat model without tools that answers from a script, natively sync, async and streaming.

    Callbacks and instrumentation events fire as for any other model. ``raw`` holds
    ``{"usage": {"prompt_tokens", "completion_tokens", "total_tokens"}}``, counted with :func:`count_tokens`; in a
    stream, that of the last piece does. Copies made with ``model_copy`` share script and record.

        llm = ScriptedLLM(["first", ScriptedReply("second", latency=0.1), ValueError("third")])
        assert llm.complete("Hi").text == "first"
        assert llm.calls[0][0].content == "Hi"

    Args:
        replies: One answer for all calls; a list, consumed in order, after which :class:`ScriptExhaustedError` is
            raised; or a callable that is given each call's messages, in the calling thread. An answer is a text, a
            :class:`ScriptedReply`, or an exception to raise. As with OpenAI's client, a stream raises when its first
            piece is asked for.
        model_name: The name in the metadata.
        context_window: Tokens of prompt and answer together.
        num_output: Tokens of an answer; nothing is cut to it.
        **kwargs: For ``CustomLLM``, such as ``callback_manager``.
    """

    model_name: str = Field(default="scripted", description="The name in the metadata.")
    context_window: int = Field(default=16_384, description="Tokens of prompt and answer together.")
    num_output: int = Field(default=1_024, description="Tokens of an answer; nothing is cut to it.")

    _state: _State = PrivateAttr()

    def __init__(
        self,
        replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted] = "OK.",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._state = _State(replies)

    @classmethod
    def class_name(cls) -> str:
        """Name the class in serialized forms."""
        return "scripted_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """A chat model that calls no functions."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of every call so far, in order; a completion's prompt is one user message."""
        return self._state.calls

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer after the reply's latency."""
        return self._chat(messages, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer after the reply's latency, without blocking the loop."""
        return await self._achat(messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer piece by piece."""
        return self._stream_chat(messages, **kwargs)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer piece by piece, without blocking the loop."""
        return await self._astream_chat(messages, **kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt as one user message."""
        return chat_to_completion_decorator(self._chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt as one user message, without blocking the loop."""
        return await achat_to_completion_decorator(self._achat)(prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Answer a prompt piece by piece."""
        return stream_chat_to_completion_decorator(self._stream_chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt piece by piece, without blocking the loop."""
        return await astream_chat_to_completion_decorator(self._astream_chat)(prompt, **kwargs)

    def _chat(self, messages: Sequence[ChatMessage], **_kwargs: Any) -> ChatResponse:
        reply = self._state.ask(messages)
        time.sleep(reply.latency)
        return _whole(messages, reply)

    async def _achat(self, messages: Sequence[ChatMessage], **_kwargs: Any) -> ChatResponse:
        reply = self._state.ask(messages)
        await asyncio.sleep(reply.latency)
        return _whole(messages, reply)

    def _stream_chat(self, messages: Sequence[ChatMessage], **_kwargs: Any) -> ChatResponseGen:
        reply = self._state.ask(messages)

        def tell() -> ChatResponseGen:
            for delay, piece in _pieces(messages, reply):
                time.sleep(delay)
                if piece is not None:
                    yield piece
            _raise_error(reply)

        return tell()

    async def _astream_chat(self, messages: Sequence[ChatMessage], **_kwargs: Any) -> ChatResponseAsyncGen:
        reply = self._state.ask(messages)

        async def tell() -> ChatResponseAsyncGen:
            for delay, piece in _pieces(messages, reply):
                await asyncio.sleep(delay)
                if piece is not None:
                    yield piece
            _raise_error(reply)

        return tell()


def _raise_error(reply: ScriptedReply) -> None:
    if reply.error is not None:
        raise reply.error


def _whole(messages: Sequence[ChatMessage], reply: ScriptedReply) -> ChatResponse:
    _raise_error(reply)
    return ChatResponse(message=_assistant(reply.content), raw=_raw(messages, reply))


def _pieces(messages: Sequence[ChatMessage], reply: ScriptedReply) -> Iterator[tuple[float, ChatResponse | None]]:
    """Yield pauses in seconds and what follows them; None is a pause before an error alone."""
    if reply.error is not None and not reply.content:
        yield reply.latency, None
        return
    size, text = reply.chunk_size, reply.content
    for start in range(0, len(text) or 1, size):
        end = start + size
        last = end >= len(text) and reply.error is None
        yield (
            reply.chunk_delay if start else reply.latency,
            ChatResponse(
                message=_assistant(text[:end]), delta=text[start:end], raw=_raw(messages, reply) if last else None
            ),
        )


def _assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _raw(messages: Sequence[ChatMessage], reply: ScriptedReply) -> dict[str, dict[str, int]]:
    prompt = sum(count_tokens(message.content or "") for message in messages)
    completion = count_tokens(reply.content)
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}
