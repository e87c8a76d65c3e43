"""A language model in the same process that answers from a script."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

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

from llama_index_agentic_kb.testing.embeddings import count_tokens

__all__ = ["Script", "ScriptExhaustedError", "ScriptedLLM", "ScriptedReply"]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class ScriptExhaustedError(LookupError):
    """A list of replies was used up and one more was asked for: an unexpected call is what a test should notice."""


class Script(Generic[Asked, Answer]):
    """The answers of a double, to any number of threads: one for all, a list consumed in order, or a callable."""

    def __init__(self, replies: Answer | Sequence[Answer] | Callable[[Asked], Answer]) -> None:
        self._replies = replies
        self._used = itertools.count(1)

    def answer(self, asked: Asked) -> Answer:
        """Return the next answer; a callable is asked in the calling thread.

        Raises:
            ScriptExhaustedError: A list of replies is used up.
        """
        if callable(self._replies):
            return self._replies(asked)
        if not isinstance(self._replies, list | tuple):
            return cast("Answer", self._replies)
        used = next(self._used)
        if used > len(self._replies):
            raise ScriptExhaustedError(
                f"The script holds {len(self._replies)} replies and this is call {used}. "
                "Add a reply, or pass a callable or a single reply to answer any number of calls."
            )
        return cast("Answer", self._replies[used - 1])


@dataclass(frozen=True)
class ScriptedReply:
    """One answer of a :class:`ScriptedLLM`.

    Args:
        content: The text.
        latency: Seconds before the answer, or before a stream's first piece.
        chunk_delay: Seconds before each further piece of a stream.
        chunk_size: Characters in each piece of a stream, at least 1.
        error: Raised after the latency, and in a stream after the content; None raises nothing.
    """

    content: str = ""
    latency: float = 0.0
    chunk_delay: float = 0.0
    chunk_size: int = 16
    error: Exception | None = None


Scripted = str | Exception | ScriptedReply


class _State:
    """The script and the record of one model and all its copies, deep ones too."""

    def __init__(self, replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted]) -> None:
        self.script: Script[list[ChatMessage], Scripted] = Script(replies)
        self.calls: list[list[ChatMessage]] = []

    def __deepcopy__(self, _memo: dict[int, object]) -> _State:
        return self


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
            raised; or a callable that maps each call's messages to an answer, in the calling thread. An answer is a
            text, a :class:`ScriptedReply`, or an exception to raise. As with OpenAI's client, a stream raises when
            its first piece is asked for.
        **kwargs: The fields below, and those of ``CustomLLM``, such as ``callback_manager``.
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

    @property
    def metadata(self) -> LLMMetadata:
        """A chat model that calls no functions."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            is_chat_model=True,
            model_name=self.model_name,
        )

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of every call so far, in order; a completion's prompt is one user message."""
        return list(self._state.calls)

    # The callbacks of chats and of completions fire once each: both go to the methods below, which have none.

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Answer after the reply's latency."""
        return self._chat(messages)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        """Answer after the reply's latency, without blocking the loop."""
        return await self._achat(messages)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseGen:
        """Answer piece by piece."""
        return self._stream_chat(messages)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseAsyncGen:
        """Answer piece by piece, without blocking the loop."""
        return await self._astream_chat(messages)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt as one user message."""
        return chat_to_completion_decorator(self._chat)(prompt)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt as one user message, without blocking the loop."""
        return await achat_to_completion_decorator(self._achat)(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponseGen:  # noqa: ARG002
        """Answer a prompt piece by piece."""
        return stream_chat_to_completion_decorator(self._stream_chat)(prompt)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponseAsyncGen:  # noqa: ARG002
        """Answer a prompt piece by piece, without blocking the loop."""
        return await astream_chat_to_completion_decorator(self._astream_chat)(prompt)

    def _chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        reply = self._ask(messages)
        time.sleep(reply.latency)
        return _whole(messages, reply)

    async def _achat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        reply = self._ask(messages)
        await asyncio.sleep(reply.latency)
        return _whole(messages, reply)

    def _stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseGen:
        reply = self._ask(messages)

        def pieces() -> ChatResponseGen:
            for delay, piece in _pieces(messages, reply):
                time.sleep(delay)
                if piece is not None:
                    yield piece

        return pieces()

    async def _astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponseAsyncGen:
        reply = self._ask(messages)

        async def pieces() -> ChatResponseAsyncGen:
            for delay, piece in _pieces(messages, reply):
                await asyncio.sleep(delay)
                if piece is not None:
                    yield piece

        return pieces()

    def _ask(self, messages: Sequence[ChatMessage]) -> ScriptedReply:
        asked = [message.model_copy(deep=True) for message in messages]  # callers may go on with their messages
        self._state.calls.append(asked)
        reply = self._state.script.answer(asked)
        if isinstance(reply, str):
            return ScriptedReply(reply)
        return ScriptedReply(error=reply) if isinstance(reply, Exception) else reply


def _whole(messages: Sequence[ChatMessage], reply: ScriptedReply) -> ChatResponse:
    if reply.error is not None:
        raise reply.error
    return ChatResponse(message=ChatMessage(reply.content, role=MessageRole.ASSISTANT), raw=_raw(messages, reply))


def _pieces(messages: Sequence[ChatMessage], reply: ScriptedReply) -> Iterator[tuple[float, ChatResponse | None]]:
    """Yield pauses in seconds and what follows them (None: an error), and raise the error."""
    text, size, delay = reply.content, reply.chunk_size, reply.latency
    for end in range(size, (len(text) or (reply.error is None)) + size, size):
        raw = _raw(messages, reply) if end >= len(text) and reply.error is None else None
        message = ChatMessage(text[:end], role=MessageRole.ASSISTANT)
        yield delay, ChatResponse(message=message, delta=text[end - size : end], raw=raw)
        delay = reply.chunk_delay
    if reply.error is not None:
        yield (0.0 if text else delay), None
        raise reply.error


def _raw(messages: Sequence[ChatMessage], reply: ScriptedReply) -> dict[str, dict[str, int]]:
    prompt = sum(count_tokens(message.content or "") for message in messages)
    completion = count_tokens(reply.content)
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}}
