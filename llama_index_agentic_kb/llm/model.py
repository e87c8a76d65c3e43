"""A language model as flows call it: with a deadline, and with its bill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM

from llama_index_agentic_kb._flow import END, Call, Emit, Flow, Next, Open, Stream
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError
from llama_index_agentic_kb.llm.capabilities import (
    chats,
    has_native_async,
    is_openai,
    model_name,
    prompt_of,
    stream_kwargs,
)
from llama_index_agentic_kb.llm.replies import (
    Reply,
    Usage,
    check,
    finish_reason_of,
    latest,
    refusal_of,
    text_of,
    usage_of,
)

__all__ = ["FALLBACK_CONTEXT_WINDOW", "LanguageModel"]

FALLBACK_CONTEXT_WINDOW: Final = 8_192
"""Tokens assumed for a model whose ``metadata`` does not know its own window."""


class LanguageModel:
    """A LlamaIndex LLM, ready to be called from flows.

    Args:
        llm: Left as it is: when handlers have to be added or guarded, a shallow copy is called instead.
        manager: Gives the handlers that are told of each call, beside the LLM's own.
    """

    def __init__(self, llm: LLM, manager: Callable[[], CallbackManager]) -> None:
        self.llm = llm
        self._manager = manager
        self._told: tuple[tuple[int, ...], LLM] | None = None

    @property
    def name(self) -> str | None:
        """The model's name, where it says one."""
        return model_name(self.llm)

    @property
    def context_window(self) -> int:
        """Tokens of prompt and reply together."""
        try:
            return self.llm.metadata.context_window
        except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
            return FALLBACK_CONTEXT_WINDOW

    def ready(self) -> LLM:
        """Give the LLM to call; the same copy as long as the handlers are the same, so that its client is kept."""
        own = getattr(self.llm, "callback_manager", None)
        handlers = (*self._manager().handlers, *(own.handlers if own is not None else ()))
        key = tuple(id(getattr(handler, "handler", handler)) for handler in handlers)
        if self._told is None or self._told[0] != key:
            self._told = (key, with_handlers(self.llm, self._manager()))
        return self._told[1]

    def chat(self, messages: Sequence[ChatMessage], *, deadline: float | None, **kwargs: Any) -> Flow[Reply]:
        """Ask for a whole reply.

        Raises:
            LLMError: The reply is empty, was refused or was filtered.
            DeadlineExceededError: It did not come in time.
        """
        response = yield Call(**self._ways("chat", messages, kwargs), deadline=deadline)
        reply = Reply(text_of(response), usage_of(response), finish_reason_of(response.raw))
        check(reply, refusal_of(response.raw))
        return reply

    def call_tool(
        self, messages: Sequence[ChatMessage], tool: Any, *, deadline: float | None, **kwargs: Any
    ) -> Flow[Reply]:
        """Ask a function-calling model to call one tool; its arguments are the reply's ``tool_arguments``.

        Raises:
            LLMError: The model did not call the tool.
            DeadlineExceededError: The reply did not come in time.
        """
        llm: Any = self.ready()
        asked = {"tools": [tool], "chat_history": list(messages), "tool_required": True, **kwargs}
        response: ChatResponse = yield Call(
            sync=partial(llm.chat_with_tools, **asked),
            native=partial(llm.achat_with_tools, **asked) if has_native_async(llm) else None,
            deadline=deadline,
            what=f"language model {self.name or ''}".strip(),
        )
        calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        reply = Reply(response.message.content or "", usage_of(response), finish_reason_of(response.raw))
        if not calls:
            check(reply, refusal_of(response.raw))
            return reply
        reply.tool_arguments = dict(calls[0].tool_kwargs)
        return reply

    def stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        deadline: float | None,
        through: Callable[[str], str] = str,
        **kwargs: Any,
    ) -> Flow[Reply]:
        """Ask for a streamed reply: each piece of text is emitted as it comes, the whole is the result.

        Args:
            messages: The prompt.
            deadline: ``time.monotonic()`` by which the stream must have ended; None waits.
            through: Each piece goes through it before it is emitted; the result is the model's own text.
            kwargs: Further arguments of the model's ``stream_chat``.

        Raises:
            LLMError: The reply is empty, was refused or filtered, or the stream ended before the model did.
            DeadlineExceededError: It did not end in time.
        """

        def emit(delta: str, _: str) -> Flow[None]:
            if told := through(delta):
                yield Emit(told)

        return (yield from self.read(messages, emit, deadline=deadline, **kwargs))

    def read(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Flow[None]],
        *,
        deadline: float | None,
        at_most: int | None = None,
        **kwargs: Any,
    ) -> Flow[Reply]:
        """Ask for a streamed reply and act on it as it comes.

        Args:
            messages: The prompt.
            each: A flow that is given each piece of text, and the whole text so far.
            deadline: ``time.monotonic()`` by which the stream must have ended; None waits.
            at_most: Characters after which no more is read; None reads to the end.
            kwargs: Further arguments of the model's ``stream_chat``.

        Raises:
            LLMError: The reply is empty, was refused or filtered, or the stream ended before the model did.
            DeadlineExceededError: It did not end in time.
        """
        ways = self._ways("stream_chat", messages, {**stream_kwargs(self.llm), **kwargs})
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{ways['what']} was not begun: its deadline had passed")
        stream: Stream = yield Open(**ways)
        reply, refusal, usage = Reply(""), "", Usage()
        while (chunk := (yield Next(stream, deadline=deadline))) is not END:
            usage = latest(usage, usage_of(chunk))
            reply.finish_reason = finish_reason_of(chunk.raw) or reply.finish_reason
            refusal += refusal_of(chunk.raw)
            delta = chunk.delta or ""
            reply.text += delta
            yield from each(delta, reply.text)
            if at_most is not None and len(reply.text) > at_most:
                reply.finish_reason = "length"
                yield from _leave(stream)
                break
        reply.usage = usage
        check(reply, refusal)
        if reply.finish_reason is None and is_openai(self.llm):
            raise LLMError("the model's stream ended before the model did", usage=usage)
        return reply

    def _ways(self, method: str, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give the two ways of a call; a model that doesn't chat is given a prompt to complete, as core gives it."""
        llm = self.ready()
        given: Any = messages
        if not chats(llm):
            method, given, kwargs = (
                method.replace("chat", "complete"),
                prompt_of(llm, messages),
                {**kwargs, "formatted": True},
            )
        native = partial(getattr(llm, f"a{method}"), given, **kwargs)
        return {
            "sync": partial(getattr(llm, method), given, **kwargs),
            "native": native if has_native_async(llm, f"a{method}") else None,
            "what": f"language model {self.name or ''}".strip(),
        }


def _leave(stream: Stream) -> Flow[None]:
    """Stop a stream that is not read to its end; else the model would write on, and bill it."""
    with suppress(DeadlineExceededError):
        yield Next(stream, deadline=0.0)
