"""A language model as this package calls it: with a deadline, with retries, and with its bill."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM

from llama_index_agentic_kb._aio import END, emit
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.failures import is_transient
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import calls_of, once, retries_itself
from llama_index_agentic_kb.llm.capabilities import chats, is_openai, model_name, prompt_of
from llama_index_agentic_kb.llm.replies import Choice, Reply, Usage, as_llm_error, usage_of
from llama_index_agentic_kb.llm.thoughts import ThoughtFilter, without_thoughts

FALLBACK_CONTEXT_WINDOW: Final = 8_192
"""Tokens assumed for a model whose ``metadata`` does not know its own window."""

NOTHING_CAME: Final = "the model's server sent no piece of a reply: a web page, or nothing, in place of a stream"
NO_CHOICES: Final = "the model's server sent a reply without choices"

MAX_REPLY: Final = 200_000
"""Characters of a reply that are read: what looks at text afterwards would be held up by more."""

MAX_THOUGHTS: Final = 200_000
"""Characters of thoughts after which a stream with a limit of its own is read no further."""

_BILL: ContextVar[Usage | None] = ContextVar("bill", default=None)


@contextmanager
def billed() -> Iterator[Usage]:
    """Yield a bill to which every call that is made inside is added, whichever model it asks."""
    bill, outer = Usage(), _BILL.get()
    _BILL.set(bill)
    try:
        yield bill
    finally:
        _BILL.set(outer)


class LanguageModel(NotPickled):
    """A LlamaIndex LLM, ready to be called.

    Its calls hold a place of the model's bulkhead (``MODEL_PLACES``, 128 for each model object), and failures that
    are worth it are retried here alone: of LlamaIndex's ``OpenAI`` and its subclasses a copy is called that tries
    once. A model of another kind that says ``max_retries`` retries itself, and is not retried here.

    Args:
        llm: Left as it is: a shallow copy is called instead, with further handlers and without its own retries.
        manager: Returns the manager whose handlers see each call, beside the LLM's own.
        retries: How failed calls are tried again; None is ``RetryPolicy()``. How often, in all, is the request's
            ``RetryBudget``.
    """

    def __init__(self, llm: LLM, manager: Callable[[], CallbackManager], *, retries: RetryPolicy | None = None) -> None:
        self.llm = llm
        self._manager = manager
        self._ready: tuple[tuple[int, ...], LLM] | None = None
        self._calls = calls_of(llm, f"language model {model_name(llm) or ''}".strip(), as_llm_error)
        self._retries = NO_RETRIES if retries_itself(llm) else retries or RetryPolicy()

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
        """Return the LLM to call; the same copy as long as the handlers are the same, so that its client is kept."""
        own = getattr(self.llm, "callback_manager", None)
        handlers = (*self._manager().handlers, *(own.handlers if own is not None else ()))
        key = tuple(id(getattr(handler, "handler", handler)) for handler in handlers)
        if self._ready is None or self._ready[0] != key:
            self._ready = (key, once(with_handlers(self.llm, self._manager()), self.llm))
        return self._ready[1]

    # -- whole replies ---------------------------------------------------------------------------------------------

    async def chat(self, messages: Sequence[ChatMessage], *, deadline: float | None, **kwargs: Any) -> Reply:
        """Ask for a whole reply.

        Raises:
            LLMError: The call failed, or the reply is empty, was refused or was filtered.
            DeadlineExceededError: It did not come in time.
        """

        async def attempt(until: float | None) -> Reply:
            llm, method, prompt, arguments = self._arguments("chat", messages, kwargs)
            reply = Reply.of(await self._calls.call(llm, method, prompt, deadline=until, **arguments))
            if len(reply.text) > MAX_REPLY:
                reply.text, reply.finish_reason = reply.text[:MAX_REPLY], "length"
            reply.text, reply.thoughts = without_thoughts(reply.text)
            reply.check()
            return reply

        return await self._retried(attempt, deadline)

    async def call_tool(
        self, messages: Sequence[ChatMessage], tool: Any, *, deadline: float | None, **kwargs: Any
    ) -> Reply:
        """Ask a function-calling model to call one tool; its arguments are the reply's ``tool_arguments``.

        Raises:
            LLMError: The call failed, or the model neither called the tool nor said anything.
            DeadlineExceededError: The reply did not come in time.
        """
        arguments = {"tools": [tool], "chat_history": list(messages), "tool_required": True, **kwargs}

        async def attempt(until: float | None) -> Reply:
            llm: Any = self.ready()
            response: ChatResponse = await self._calls.call(llm, "chat_with_tools", deadline=until, **arguments)
            calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
            reply = Reply.of(response)
            reply.text, reply.thoughts = without_thoughts(reply.text)
            if calls:
                reply.tool_arguments = dict(calls[0].tool_kwargs)
            else:
                reply.check()
            return reply

        return await self._retried(attempt, deadline)

    # -- streams ---------------------------------------------------------------------------------------------------

    async def stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        deadline: float | None,
        through: Callable[[str], str] = str,
        **kwargs: Any,
    ) -> Reply:
        """Ask for a streamed reply: each piece of text is emitted as it comes, the whole is the result; see ``read``.

        Each piece goes ``through`` a function before it is emitted; the result is the model's own text.
        """

        async def pass_on(delta: str, _: str) -> None:
            if text := through(delta):
                await emit(text)

        return await self.read(messages, pass_on, deadline=deadline, **kwargs)

    async def read(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Coroutine[Any, Any, None]],
        *,
        deadline: float | None,
        max_chars: int = MAX_REPLY,
        **kwargs: Any,
    ) -> Reply:
        """Ask for a streamed reply and act on it as it comes.

        Args:
            messages: The prompt.
            each: Awaited with each piece of text, and the whole text so far.
            deadline: ``time.monotonic()`` by which the stream must have ended; None waits.
            max_chars: Characters after which no more is read.
            kwargs: Further arguments of the model's ``stream_chat``.

        Raises:
            LLMError: The reply is empty, was refused or filtered, or the stream ended before the model did.
            DeadlineExceededError: It did not end in time.
        """
        reply = Reply("")

        async def attempt(until: float | None) -> Reply:
            await self._read_once(messages, each, reply, until, max_chars, kwargs)
            return reply

        return await self._retried(attempt, deadline, is_worth=lambda error: not reply.text and is_transient(error))

    async def _read_once(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Coroutine[Any, Any, None]],
        reply: Reply,
        deadline: float | None,
        max_chars: int,
        kwargs: dict[str, Any],
    ) -> None:
        speaks_openai = is_openai(self.llm)
        if speaks_openai:  # the bill comes at the end of a stream where it is asked for
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
        if wrong and speaks_openai:
            raise LLMError(wrong, usage=reply.usage)
        reply.check()
        if reply.finish_reason is None and speaks_openai:
            raise LLMError("the model's stream ended before the model did", usage=reply.usage)

    # -- what both share -------------------------------------------------------------------------------------------

    async def _retried(
        self,
        attempt: Callable[[float | None], Coroutine[Any, Any, Reply]],
        deadline: float | None,
        is_worth: Callable[[BaseException], bool] = is_transient,
    ) -> Reply:
        bill, usage = _BILL.get(), Usage()
        try:
            reply = await retried(attempt, policy=self._retries, deadline=deadline, is_worth=is_worth)
            usage = reply.usage
        except LLMError as error:
            usage = error.usage or usage
            raise
        finally:
            if bill is not None:
                bill.add(usage)
        return reply

    def _arguments(
        self, method: str, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> tuple[Any, str, Any, dict[str, Any]]:
        """Return model, method and arguments; a model that doesn't chat gets a prompt to complete, as core makes it."""
        llm = self.ready()
        if chats(llm):
            return llm, method, messages, kwargs
        return llm, method.replace("chat", "complete"), prompt_of(llm, messages), {**kwargs, "formatted": True}
