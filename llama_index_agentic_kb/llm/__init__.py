"""Calls to language models, with a deadline, retries and token usage; the package calls models only through this.

A failed call and an unusable reply raise ``LLMError``; the planner and the synthesizers decide how to handle it.
A bill (``billed``) adds up what calls cost, also those that a LlamaIndex component makes itself.
``openai_compatible`` is not imported here, because it loads the OpenAI client.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, Final, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.llms import LLM
from pydantic import BaseModel

from llama_index_agentic_kb._aio import END, emit
from llama_index_agentic_kb.account.activity_log import ActivityLog, EventHandler, with_handlers
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.failures import is_transient
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import (
    calls_of,
    chats,
    count_tokens,
    is_function_calling,
    is_openai,
    model_name,
    of_any_name,
    once,
    prompt_of,
    resolve_llm,
    retries_itself,
    share_clients,
    structured_output,
    tokens_of,
    warm_up_llm,
)
from llama_index_agentic_kb.llm.replies import (
    CUT_SHORT,
    Choice,
    Reply,
    ThoughtFilter,
    Usage,
    as_llm_error,
    parsed,
    read_json,
    refuses_form,
    repair_json,
    strip_code_fence,
    tool_arguments_of,
    usage_of,
    without_thoughts,
)
from llama_index_agentic_kb.schema import ModelAnswerSynthesisActivity, ModelInfo, Outcome
from llama_index_agentic_kb.schema.activity import Purpose

__all__ = [
    "CUT_SHORT",
    "FALLBACK_CONTEXT_WINDOW",
    "LanguageModel",
    "Reply",
    "Usage",
    "billed",
    "count_tokens",
    "is_function_calling",
    "metered",
    "model_name",
    "of_any_name",
    "parsed",
    "read_json",
    "recorded_calls",
    "refuses_form",
    "repair_json",
    "resolve_llm",
    "strip_code_fence",
    "structured_output",
    "tokens_of",
    "warm_up_llm",
]

C = TypeVar("C")

FALLBACK_CONTEXT_WINDOW: Final = 8_192
"""Context window in tokens that is assumed if a model's ``metadata`` does not have it."""

NOTHING_CAME: Final = "the model's server sent no piece of a reply: a web page, or nothing, in place of a stream"
NO_CHOICES: Final = "the model's server sent a reply without choices"

MAX_REPLY: Final = 200_000
MAX_THOUGHTS: Final = 200_000
"""Maximum number of characters of a reply, and of reasoning text in a stream; after that, reading stops."""


class LanguageModel(NotPickled):
    """A LlamaIndex LLM with retries, a concurrency limit and callback handlers.

    At most 128 calls of a model object run concurrently (``MODEL_PLACES``). Transient failures are retried only here:
    for LlamaIndex's ``OpenAI`` and its subclasses, a copy without its own retries is called. Any other model with
    ``max_retries`` above 0 retries itself and is not retried here.

    Args:
        llm: The user's LLM, which is not changed; calls are made on a shallow copy with additional handlers.
        manager: Returns the callback manager whose handlers also receive the events of each call.
        retries: Retry policy for failed calls, within the request's ``RetryBudget``. Defaults to ``RetryPolicy()``.
    """

    def __init__(self, llm: LLM, manager: Callable[[], CallbackManager], *, retries: RetryPolicy | None = None) -> None:
        self.llm = llm
        self._manager = manager
        self._ready: tuple[tuple[int, ...], LLM] | None = None
        self._calls = calls_of(llm, f"language model {model_name(llm) or ''}".strip(), as_llm_error)
        self._retries = NO_RETRIES if retries_itself(llm) else retries or RetryPolicy()

    @property
    def name(self) -> str | None:
        """The model's name; None if it has none."""
        return model_name(self.llm)

    @property
    def context_window(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        try:
            return self.llm.metadata.context_window
        except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
            return FALLBACK_CONTEXT_WINDOW

    def ready(self) -> LLM:
        """Return the LLM copy to call, cached while the handlers stay the same so that its client is reused."""
        own = getattr(self.llm, "callback_manager", None)
        handlers = (*self._manager().handlers, *(own.handlers if own is not None else ()))
        key = tuple(id(getattr(handler, "handler", handler)) for handler in handlers)
        if self._ready is None or self._ready[0] != key:
            self._ready = (key, once(with_handlers(self.llm, self._manager()), self.llm))
        return self._ready[1]

    # -- whole replies ---------------------------------------------------------------------------------------------

    def chat(
        self, messages: Sequence[ChatMessage], *, deadline: float | None, **kwargs: Any
    ) -> Coroutine[Any, Any, Reply]:
        """Return a coroutine that requests a complete reply, without streaming.

        Raises:
            LLMError: The call failed, the model refused, or the reply is empty or was filtered.
            DeadlineExceededError: The reply did not arrive by ``deadline``.
        """

        async def attempt(until: float | None) -> Reply:
            llm, method, prompt, arguments = self._arguments("chat", messages, kwargs)
            reply = self._billed(Reply.of(await self._calls.call(llm, method, prompt, deadline=until, **arguments)))
            if len(reply.text) > MAX_REPLY:
                reply.text, reply.finish_reason = reply.text[:MAX_REPLY], "length"
            reply.text, reply.thoughts = without_thoughts(reply.text)
            reply.check()
            return reply

        return retried(attempt, policy=self._retries, deadline=deadline)

    def call_tool(
        self, messages: Sequence[ChatMessage], tool: Any, *, deadline: float | None, **kwargs: Any
    ) -> Coroutine[Any, Any, Reply]:
        """Return a coroutine that asks a function-calling model to call one tool; see the reply's ``tool_arguments``.

        Raises:
            LLMError: The call failed, or the reply has neither a tool call nor usable text.
            DeadlineExceededError: The reply did not arrive by ``deadline``.
        """
        arguments = {"tools": [tool], "chat_history": list(messages), "tool_required": True, **kwargs}

        async def attempt(until: float | None) -> Reply:
            llm: Any = self.ready()
            response: ChatResponse = await self._calls.call(llm, "chat_with_tools", deadline=until, **arguments)
            reply, written = self._billed(Reply.of(response)), tool_arguments_of(response)
            if len(written) > MAX_REPLY:
                raise LLMError(f"the model's reply is longer than {MAX_REPLY:,} characters", usage=reply.usage)
            read = partial(llm.get_tool_calls_from_response, response, error_on_no_tool_call=False)
            calls = await parsed(read, written, deadline=until)
            reply.text, reply.thoughts = without_thoughts(reply.text)
            if calls:
                reply.tool_arguments = dict(calls[0].tool_kwargs)
            else:
                reply.check()
            return reply

        return retried(attempt, policy=self._retries, deadline=deadline)

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        deadline: float | None,
        through: Callable[[str], str] = str,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Reply]:
        """Return a coroutine that emits each piece of a streamed reply, changed by ``through``; see ``read``."""

        async def pass_on(delta: str, _: str) -> None:
            if text := through(delta):
                await emit(text)

        return self.read(messages, pass_on, deadline=deadline, **kwargs)

    def read(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Coroutine[Any, Any, None]],
        *,
        deadline: float | None,
        max_chars: int = MAX_REPLY,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Reply]:
        """Return a coroutine that requests a streamed reply and awaits a function for each piece as it arrives.

        Args:
            messages: The prompt messages.
            each: Awaited with each piece of text and the whole text so far.
            deadline: ``time.monotonic()`` by which the stream must have ended; None is no limit.
            max_chars: Number of characters after which reading stops.
            kwargs: Further arguments of the model's ``stream_chat``.

        Raises:
            LLMError: The call failed, the model refused, the reply is empty or was filtered, or the stream broke off.
            DeadlineExceededError: The stream did not end by ``deadline``.
        """
        reply = Reply("")
        attempt = partial(self._read_once, messages, each, reply, max_chars, kwargs)

        def is_worth(error: BaseException) -> bool:
            return not reply.text and is_transient(error)

        return retried(attempt, policy=self._retries, deadline=deadline, is_worth=is_worth)

    async def _read_once(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Coroutine[Any, Any, None]],
        reply: Reply,
        max_chars: int,
        kwargs: dict[str, Any],
        deadline: float | None,
    ) -> Reply:
        speaks_openai = is_openai(self.llm)
        if speaks_openai:  # usage is only sent at the end of a stream on request
            kwargs = {"stream_options": {"include_usage": True}, **kwargs}
        llm, method, prompt, arguments = self._arguments("stream_chat", messages, kwargs)
        reply.refusal, wrong, thoughts = "", NOTHING_CAME, ThoughtFilter()
        async with self._calls.stream(llm, method, prompt, deadline=deadline, **arguments) as next_chunk:
            while (chunk := await next_chunk()) is not END:
                usage, choice = usage_of(chunk), Choice.of(chunk.raw)
                if usage.input_tokens is not None:  # once, in the last chunks, or as a running total
                    reply.usage = usage
                reply.finish_reason = choice.finish_reason or reply.finish_reason
                reply.refusal += choice.refusal
                wrong = "" if chunk.raw is None or choice.is_there else wrong and NO_CHOICES
                delta = thoughts.feed((chunk.delta or "")[: max_chars + 1])
                reply.text += delta
                await each(delta, reply.text)
                if len(reply.text) > max_chars or thoughts.left_out > MAX_THOUGHTS:
                    reply.finish_reason = "length"
                    break
        if rest := thoughts.close():
            reply.text += rest
            await each(rest, reply.text)
        reply.thoughts = thoughts.left_out
        reply.usage.calls = 1
        self._billed(reply)
        if wrong and speaks_openai:
            raise LLMError(wrong, usage=reply.usage)
        reply.check()
        if reply.finish_reason is None and speaks_openai:
            raise LLMError("the model's stream ended before the model did", usage=reply.usage)
        return reply

    # -- shared helpers --------------------------------------------------------------------------------------------

    def _billed(self, reply: Reply) -> Reply:
        """Return a reply, with its usage added to the current bill."""
        if (bill := _bill.get()) is not None:
            bill.add(reply.usage)
            bill.model = self.name or bill.model
        return reply

    def _arguments(
        self, method: str, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> tuple[Any, str, Any, dict[str, Any]]:
        """Return model, method, prompt and arguments; a completion model gets a prompt instead of messages."""
        llm = self.ready()
        if chats(llm):
            return llm, method, messages, kwargs
        return llm, method.replace("chat", "complete"), prompt_of(llm, messages), {**kwargs, "formatted": True}


# -- what calls cost --------------------------------------------------------------------------------------------------

_bill: ContextVar[Usage | None] = ContextVar("agentic_kb_bill", default=None)


@contextmanager
def billed() -> Iterator[Usage]:
    """Yield a ``Usage`` to which the token usage of every model call inside the ``with`` block is added."""
    bill, outer = Usage(), _bill.get()
    _bill.set(bill)
    try:
        yield bill
    finally:
        _bill.set(outer)


@contextmanager
def recorded_calls(log: ActivityLog, purpose: Purpose) -> Iterator[None]:
    """Record the model calls of the ``with`` block in one activity record of their own; without calls there is none."""
    since, outcome = time.monotonic(), Outcome.ERROR
    with billed() as bill:
        try:
            yield
            outcome = Outcome.OK
        finally:
            if bill.calls:
                model = None if bill.model is None else ModelInfo(model_name=bill.model)
                kind, event = ModelAnswerSynthesisActivity, CBEventType.AGENT_STEP
                record = log.open(kind, event, since=since, purpose=purpose, model=model, calls=bill.calls)
                log.close(record, outcome=outcome, input_tokens=bill.input_tokens, output_tokens=bill.output_tokens)


@contextmanager
def metered(component: C, *, only_core: bool = False) -> Iterator[C]:
    """Yield a copy of a LlamaIndex component whose model's calls are added to the current bill.

    Without a bill, or if the component has no model of its own, it is the component itself. With ``only_core``, so is
    a component of a class that is not LlamaIndex's: a copy may lose what it changes in itself.
    """
    bill, fields = _bill.get(), ("llm", "_llm")
    name = next((name for name in fields if isinstance(getattr(component, name, None), LLM)), "")
    is_copied = not only_core or type(component).__module__.startswith("llama_index.")
    if bill is None or not name or not is_copied:
        yield component
        return
    meter, own = _Meter(), getattr(component, name)
    share_clients(own)
    model = with_handlers(own, CallbackManager([meter]))
    twin: Any = component.model_copy() if isinstance(component, BaseModel) else copy.copy(component)
    setattr(twin, name, model)
    for key, value in [*vars(twin).items()]:
        if getattr(value, "__self__", None) is component:  # a method of the original, which calls the original's model
            setattr(twin, key, MethodType(value.__func__, twin))
    try:
        yield twin
    finally:
        for usage in meter.usages:
            bill.add(usage)


class _Meter(EventHandler):
    """Collects the usage of a model's calls; one inside another, such as ``complete`` inside ``chat``, is no other."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[Usage] = []
        self._open: dict[str, bool] = {}
        """By event id, whether the call is inside another."""

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,  # noqa: ARG002
        event_id: str = "",
        parent_id: str = "",
        **_: Any,
    ) -> str:
        """Note that a call began."""
        if event_type is CBEventType.LLM:
            self._open[event_id] = parent_id in self._open
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **_: Any
    ) -> None:
        """Count a call that ended with a reply."""
        ended = payload or {}
        response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
        if event_type is CBEventType.LLM and not self._open.pop(event_id, False) and response is not None:
            self.usages.append(usage_of(response))
