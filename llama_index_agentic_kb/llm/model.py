"""The wrapper through which the package calls a language model, with a deadline, retries and token usage."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
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
from llama_index_agentic_kb.llm.bill import current_bill
from llama_index_agentic_kb.llm.calls import calls_of, once, retries_itself
from llama_index_agentic_kb.llm.capabilities import chats, is_openai, model_name, prompt_of
from llama_index_agentic_kb.llm.replies import Choice, Reply, Usage, as_llm_error, parsed, tool_arguments_of, usage_of
from llama_index_agentic_kb.llm.thoughts import ThoughtFilter, without_thoughts

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

    async def chat(self, messages: Sequence[ChatMessage], *, deadline: float | None, **kwargs: Any) -> Reply:
        """Request a complete reply, without streaming.

        Raises:
            LLMError: The call failed, the model refused, or the reply is empty or was filtered.
            DeadlineExceededError: The reply did not arrive by ``deadline``.
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
        """Ask a function-calling model to call one tool; the arguments are in the reply's ``tool_arguments``.

        Raises:
            LLMError: The call failed, or the reply has neither a tool call nor usable text.
            DeadlineExceededError: The reply did not arrive by ``deadline``.
        """
        arguments = {"tools": [tool], "chat_history": list(messages), "tool_required": True, **kwargs}

        async def attempt(until: float | None) -> Reply:
            llm: Any = self.ready()
            response: ChatResponse = await self._calls.call(llm, "chat_with_tools", deadline=until, **arguments)
            reply, written = Reply.of(response), tool_arguments_of(response)
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
        """Request a streamed reply, emit each piece, changed by ``through``, and return the reply; see ``read``."""

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
        """Request a streamed reply and call a function for each piece as it arrives.

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
        if wrong and speaks_openai:
            raise LLMError(wrong, usage=reply.usage)
        reply.check()
        if reply.finish_reason is None and speaks_openai:
            raise LLMError("the model's stream ended before the model did", usage=reply.usage)

    # -- shared helpers --------------------------------------------------------------------------------------------

    async def _retried(
        self,
        attempt: Callable[[float | None], Coroutine[Any, Any, Reply]],
        deadline: float | None,
        is_worth: Callable[[BaseException], bool] = is_transient,
    ) -> Reply:
        bill, usage = current_bill(), Usage()
        try:
            reply = await retried(attempt, policy=self._retries, deadline=deadline, is_worth=is_worth)
            usage = reply.usage
        except LLMError as error:
            usage = error.usage or usage
            raise
        finally:
            if bill is not None:
                bill.add(usage)
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
