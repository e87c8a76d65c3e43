"""Calls to language models, with a deadline, retries and token usage; the package calls models only through this.

A failed call and an unusable reply raise ``LLMError``; the planner and the synthesizers decide how to handle it.
A bill (``billed``) adds up what calls cost, also those that a LlamaIndex component makes itself.
``openai_compatible`` is not imported here, because it loads the OpenAI client.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import json_repair
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, ToolCallBlock
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM
from pydantic import BaseModel

from llama_index_agentic_kb._aio import Call, emit
from llama_index_agentic_kb._text import error_message, one_line, redacted_excerpt
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account import ActivityLog, EventHandler, with_handlers
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.guard.failures import breaks_connection, is_transient, status_of
from llama_index_agentic_kb.guard.resilience import NO_RETRIES, RetryPolicy, retried
from llama_index_agentic_kb.llm.calls import (
    calls_of,
    count_tokens,
    is_function_calling,
    is_openai,
    metadata_of,
    model_name,
    of_any_name,
    once,
    resolve_llm,
    retries_itself,
    speaks_openai,
    structured_output,
    takes_schema,
    tokens_of,
    warm_up_llm,
)
from llama_index_agentic_kb.schema import ModelAnswerSynthesisActivity, ModelInfo, Outcome
from llama_index_agentic_kb.schema.activity import Purpose

__all__ = [
    "CUT_SHORT",
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
    "resolve_llm",
    "strip_code_fence",
    "structured_output",
    "takes_schema",
    "tokens_of",
    "warm_up_llm",
]

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

C = TypeVar("C")
T = TypeVar("T")

FALLBACK_CONTEXT_WINDOW: Final = 8_192  # in tokens, for a model without ``metadata``

NOTHING_CAME: Final = "the model's server sent no piece of a reply: a web page, or nothing, in place of a stream"
NO_CHOICES: Final = "the model's server sent a reply without choices"

MAX_REPLY: Final = 200_000
MAX_THOUGHTS: Final = 200_000
"""Maximum number of characters of a reply, and of reasoning text in a stream; after that, reading stops."""
MAX_PIECE: Final = 20_000  # characters of a streamed reply that are filtered in one turn of the event loop
FORM_REFUSED: Final = (400, 404, 415, 422, 501)  # HTTP statuses of servers that don't support an output format

MAX_REPAIRED: Final = 8_000
"""Maximum number of characters of broken JSON to repair; repair takes quadratic time (7 s for 20,000 brackets)."""
MAX_INLINE: Final = 2_000
"""Maximum number of characters of a reply that is parsed on the event loop: at worst 0.1 s, if it needs repair."""
SHOWN: Final = 200
READ: Final = 2_000
"""Maximum number of characters of a server's message that are quoted in an error message, and that are read for it."""

_FENCE: Final = re.compile(r"```(?:json)?(.*?)```", re.DOTALL | re.IGNORECASE)  # no \s*: it would be quadratic

CUT_SHORT: Final = "the model stopped before it was done"


@dataclass(slots=True)
class Usage:
    """Token usage and number of model calls; a token count is None if no reply reported it."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    calls: int = 0
    model: str | None = None  # the name of the last model; set in the sum of several calls

    @property
    def tokens(self) -> int | None:
        """Input and output tokens together; None if there were calls and no reply reported them."""
        if self.input_tokens is None and self.output_tokens is None:
            return None if self.calls else 0
        return (self.input_tokens or 0) + (self.output_tokens or 0)

    def add(self, other: Usage) -> None:
        """Add another usage to this one."""
        if other.input_tokens is not None:
            self.input_tokens = (self.input_tokens or 0) + other.input_tokens
        if other.output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + other.output_tokens
        self.calls += other.calls


@dataclass(slots=True)
class Reply:
    """The reply of a model."""

    text: str
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tool_arguments: JsonObject | None = None
    thoughts: int = 0  # number of reasoning characters that were removed from the text
    refusal: str = ""

    @classmethod
    def of(cls, response: ChatResponse | CompletionResponse) -> Reply:
        """Build a reply from a complete response, without its reasoning text."""
        text, thoughts, (_, reason, refusal) = text_of(response), ThoughtFilter(), _choice_of(response.raw)
        if len(text) > MAX_REPLY:
            text, reason = text[:MAX_REPLY], "length"
        shown = thoughts.feed(text, final=True)
        return cls(shown, usage_of(response), reason, thoughts=thoughts.left_out, refusal=refusal)

    @property
    def cut_short(self) -> bool:
        """Whether the reply ended at the token limit."""
        return self.finish_reason in ("length", "max_tokens")

    def check(self) -> None:
        """Raise ``LLMError`` if the reply is empty, the model refused, or a content filter stopped it."""
        if self.refusal:
            raise LLMError(f"the model refused: {self.refusal}", usage=self.usage)
        if self.finish_reason == "content_filter":
            raise LLMError("the model's reply was stopped by a content filter", usage=self.usage)
        if not self.text.strip():
            why = f": {CUT_SHORT}" if self.cut_short else ""
            raise LLMError(f"the model's reply is empty{why}", empty=True, usage=self.usage)


def _choice_of(raw: object) -> tuple[bool, str | None, str]:
    """Return whether a raw response or chunk has a choice, with its finish reason and (a piece of) its refusal."""
    if not (choices := _get(raw, "choices")):
        return False, None, ""
    reason, said = _get(choices[0], "finish_reason"), _get(choices[0], "message") or _get(choices[0], "delta")
    return True, reason if isinstance(reason, str) else None, _get(said, "refusal") or ""


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def text_of(response: ChatResponse | CompletionResponse) -> str:
    """Return a response's text."""
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def usage_of(response: ChatResponse | CompletionResponse) -> Usage:
    """Return the token usage that a response reports."""
    try:
        read, written = get_tokens_from_response(response)
    except (TypeError, ValueError, AttributeError):  # a raw reply of a shape that core doesn't know
        read, written = 0, 0
    counted = bool(read or written)
    return Usage(read if counted else None, written if counted else None, calls=1)


def refuses_form(error: BaseException) -> bool:
    """Return whether an error's HTTP status may mean that the server does not support structured output."""
    return status_of(error) in FORM_REFUSED


async def parsed(read: Callable[[], T], text: str, *, deadline: float | None = None, max_inline: int = MAX_INLINE) -> T:
    """Return what a function reads from a reply; for a long reply it runs on a thread, not on the event loop."""
    if len(text) <= max_inline:
        return read()
    return await Call(sync=read, deadline=deadline, what="reading a reply")


def strip_code_fence(text: str) -> str:
    """Return the content of a reply's first code fence, or the reply itself if it has none."""
    fence = _FENCE.search(text)
    return fence.group(1) if fence else text


def read_json(text: str, opening: str = "{") -> Any:
    """Return the JSON value in a reply, also in a code fence, behind a preamble or broken; None if there is none.

    It begins at the first of the ``opening`` signs. Of a broken one, at most ``MAX_REPAIRED`` characters are used.
    """
    body = strip_code_fence(text)
    start = min((at for at in map(body.find, opening) if at >= 0), default=-1)
    try:
        return json_repair.loads(body[start:][:MAX_REPAIRED]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None


# -- reasoning text ---------------------------------------------------------------------------------------------------

_TAG: Final = re.compile(r"(?<!`)<(/?)(think|thinking|thought|reasoning)>", re.IGNORECASE | re.ASCII)
_BEGUN: Final = re.compile(r"</?[a-z]{0,9}\Z", re.IGNORECASE | re.ASCII)


@dataclass(slots=True)
class ThoughtFilter:
    """Removes reasoning blocks from a reply that arrives in pieces.

    A tag after a backquote is normal text. A closing tag without an opening one ends reasoning that began in the
    prompt: all text before it is removed, in a stream only the text that was not returned yet.
    """

    left_out: int = 0  # number of reasoning characters removed so far
    _held: str = ""
    _inside: str = ""  # the name of the tag whose block is read
    _started: bool = False  # whether any visible text was returned
    _last: str = ""  # the last character that was read: a backquote makes a tag normal text

    def feed(self, delta: str, *, final: bool = False) -> str:
        """Process a piece of the reply, and return the text that can be shown now; all of it after the ``final`` piece.

        An unclosed reasoning block is removed.
        """
        text, at, passed = self._last + self._held + delta, len(self._last), ""
        while True:
            if self._inside:
                to, after = self._block_end(text, at, final=final)
                self.left_out += to - at
                if after is None:
                    break
                self._inside, at = "", after
            elif (found := _TAG.search(text, at)) is None:
                begun = None if final else _BEGUN.search(text, at)
                to = len(text) if begun is None else begun.start()
                passed += text[at:to]
                break
            elif found[1]:  # what came before was reasoning
                self.left_out += len(passed) + found.end() - at
                passed, at = "", found.end()
            else:
                passed += text[at : found.start()]
                self._inside, at = found[2].lower(), found.end()
        self._last, self._held = text[max(0, to - 1) : to], text[to:]
        if not self._started and self.left_out:  # whitespace between the reasoning and the reply's first word
            passed = passed.lstrip()
        self._started |= bool(passed.strip())
        return passed

    def _block_end(self, text: str, at: int, *, final: bool) -> tuple[int, int | None]:
        """Return how far a reasoning block is known to go, and the position after its end tag; None without one."""
        tag = f"</{self._inside}>"
        if (end := re.compile(re.escape(tag), re.IGNORECASE | re.ASCII).search(text, at)) is not None:
            return end.start(), end.end()
        return len(text) if final else max(at, len(text) - len(tag) + 1), None


# -- failures ---------------------------------------------------------------------------------------------------------


def as_llm_error(error: Exception) -> LLMError:
    """Return an ``LLMError`` that describes an error of the model's client, to be raised ``from`` it."""
    if isinstance(error, LLMError):
        return error
    status, body = status_of(error), getattr(error, "body", None)
    if status is not None:
        return LLMError(
            f"the model's server answered with status {status}: {_words(body if isinstance(body, dict) else error)}"
        )
    if isinstance(error, AgenticKBError):
        return LLMError(error_message(error))
    if (sent := _sent_instead(error, body)) is not None:
        return LLMError(f"the model's server sent {sent}")
    if breaks_connection(error):  # OpenAI's client says only "Connection error."
        return LLMError(f"the connection to the model's server failed: {_named(error.__cause__ or error)}")
    return LLMError(_named(error))


def _sent_instead(error: Exception, body: object) -> str | None:
    """Return a description of an unusable response from the server; None if the error has another cause."""
    if isinstance(error, json.JSONDecodeError):
        return f"JSON that is broken off or malformed: {_words(error)}"
    page = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(page, str):
        kind = "a web page" if page.lstrip().startswith("<") else "plain text"
        return f"{kind} in place of JSON: {_words(page)!r}"
    if not isinstance(body, dict):  # OpenAI's client sets a dictionary for errors in a stream
        reply = _reply_in(error) if isinstance(error, (IndexError, TypeError, AttributeError)) else None
        body = getattr(reply, "error", None)
        if not body:
            return None if reply is None else "a reply without choices"
    return f"an error in place of a reply: {_words(body)}"


def _reply_in(error: Exception) -> object:
    """Return the parsed reply without choices that a client failed on, taken from the error's traceback."""
    responses = [frame.f_locals.get("response") for frame, _ in walk_tb(error.__traceback__)]
    reply = next((one for one in reversed(responses) if hasattr(one, "choices")), None)
    return None if getattr(reply, "choices", None) else reply


def _named(error: BaseException) -> str:
    kind = type(error).__name__
    return f"{kind}: {_words(error)}" if str(error).strip() else kind


def _words(said: object) -> str:
    """Return an excerpt of an error, of text, or of the message in a JSON object, as one line without secrets."""
    message = (said.get("message") or said) if isinstance(said, dict) else said
    return one_line(redacted_excerpt(str(message), READ), SHOWN) or "nothing said"


# -- the model ---------------------------------------------------------------------------------------------------------


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
        self.is_openai = is_openai(llm)
        self._manager = manager
        self._ready: tuple[tuple[int, ...], LLM] | None = None
        self._calls = calls_of(llm, f"language model {model_name(llm) or ''}".strip(), as_llm_error)
        self._retries = NO_RETRIES if retries_itself(llm) else retries or RetryPolicy()

    @property
    def context_window(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        known = metadata_of(self.llm)
        return FALLBACK_CONTEXT_WINDOW if known is None else known.context_window

    def ready(self) -> LLM:
        """Return the LLM copy to call, cached while the handlers stay the same so that its client is reused."""
        own = getattr(self.llm, "callback_manager", None)
        handlers = (*self._manager().handlers, *(own.handlers if own is not None else ()))
        key = tuple(map(id, handlers))
        if self._ready is None or self._ready[0] != key:
            self._ready = (key, once(with_handlers(self.llm, self._manager()), self.llm))
        return self._ready[1]

    async def chat(self, messages: Sequence[ChatMessage], *, deadline: float | None, **kwargs: object) -> Reply:
        """Return a complete reply, requested without streaming; for errors see ``read``."""
        llm, method, prompt, arguments = self._arguments("chat", messages, kwargs)
        response = await self._calls.call(llm, method, prompt, policy=self._retries, deadline=deadline, **arguments)
        reply = self._billed(Reply.of(response))
        reply.check()
        return reply

    async def call_tool(
        self, messages: Sequence[ChatMessage], tool: BaseTool, *, deadline: float | None, **kwargs: object
    ) -> Reply:
        """Ask a function-calling model to call one tool; see the reply's ``tool_arguments``."""
        llm: Any = self.ready()
        arguments = {"tools": [tool], "chat_history": list(messages), "tool_required": True, **kwargs}
        response: ChatResponse = await self._calls.call(
            llm, "chat_with_tools", policy=self._retries, deadline=deadline, **arguments
        )
        reply, message = self._billed(Reply.of(response)), response.message
        blocks = [str(block.tool_kwargs) for block in message.blocks if isinstance(block, ToolCallBlock)]
        written = "".join(blocks) or str(message.additional_kwargs.get("tool_calls", ""))
        if len(written) > MAX_REPLY:
            raise LLMError(f"the model's reply is longer than {MAX_REPLY:,} characters", usage=reply.usage)
        read = partial(llm.get_tool_calls_from_response, response, error_on_no_tool_call=False)
        calls = await parsed(read, written, deadline=deadline)
        if calls:
            reply.tool_arguments = dict(calls[0].tool_kwargs)
        else:
            reply.check()
        return reply

    def stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        deadline: float | None,
        through: Callable[[str], str] = str,
        **kwargs: Any,
    ) -> Work[Reply]:
        """Return a coroutine that emits each piece of a streamed reply, changed by ``through``; see ``read``."""

        async def pass_on(delta: str, _: str) -> None:
            for at in range(0, len(delta), MAX_PIECE):
                if text := through(delta[at : at + MAX_PIECE]):
                    await emit(text)

        return self.read(messages, pass_on, deadline=deadline, **kwargs)

    def read(
        self,
        messages: Sequence[ChatMessage],
        each: Callable[[str, str], Work[None]],
        *,
        deadline: float | None,
        max_chars: int = MAX_REPLY,
        **kwargs: Any,
    ) -> Work[Reply]:
        """Return a coroutine that requests a streamed reply; it awaits ``each`` with each piece and the text so far.

        After ``max_chars`` characters, reading stops.

        Raises:
            LLMError: The call failed, the model refused, the reply is empty or was filtered, or the stream broke off.
            DeadlineExceededError: The stream did not end by ``deadline``.
        """
        reply, of_openai = Reply(""), self.is_openai
        if of_openai:  # usage is only sent at the end of a stream on request
            kwargs = {"stream_options": {"include_usage": True}, **kwargs}

        async def attempt(until: float | None) -> Reply:
            llm, method, prompt, arguments = self._arguments("stream_chat", messages, kwargs)
            reply.refusal, wrong, thoughts = "", NOTHING_CAME, ThoughtFilter()
            async with aclosing(self._calls.stream(llm, method, prompt, deadline=until, **arguments)) as chunks:
                async for chunk in chunks:
                    usage, (is_there, finish_reason, refusal) = usage_of(chunk), _choice_of(chunk.raw)
                    if usage.input_tokens is not None:  # once, in the last chunks, or as a running total
                        reply.usage = usage
                    reply.finish_reason = finish_reason or reply.finish_reason
                    reply.refusal += refusal
                    wrong = "" if chunk.raw is None or is_there else wrong and NO_CHOICES
                    delta = thoughts.feed((chunk.delta or "")[: max_chars + 1])
                    reply.text += delta
                    await each(delta, reply.text)
                    if len(reply.text) > max_chars or thoughts.left_out > MAX_THOUGHTS:
                        reply.finish_reason = "length"
                        break
            if rest := thoughts.feed("", final=True):
                reply.text += rest
                await each(rest, reply.text)
            reply.thoughts, reply.usage.calls = thoughts.left_out, 1
            self._billed(reply)
            if not (wrong and of_openai):
                reply.check()
                wrong = "" if reply.finish_reason else "the model's stream ended before the model did"
            if wrong and of_openai:
                raise LLMError(wrong, usage=reply.usage)
            return reply

        def is_worth(error: BaseException) -> bool:
            return not reply.text and is_transient(error)

        return retried(attempt, policy=self._retries, deadline=deadline, is_worth=is_worth)

    def _billed(self, reply: Reply) -> Reply:
        """Return a reply, with its usage added to the current bill."""
        if (bill := _bill.get()) is not None:
            bill.add(reply.usage)
            bill.model = model_name(self.llm) or bill.model
        return reply

    def _arguments(
        self, method: str, messages: Sequence[ChatMessage], kwargs: JsonObject
    ) -> tuple[Any, str, Any, JsonObject]:
        """Return model, method, prompt and arguments; a completion model gets a prompt instead of messages."""
        llm: Any = self.ready()
        known = metadata_of(llm)
        if known is None or known.is_chat_model:
            return llm, method, messages, kwargs
        single = len(messages) == 1 and messages[0].role is MessageRole.USER
        prompt = llm.completion_to_prompt(messages[0].content or "") if single else llm.messages_to_prompt(messages)
        return llm, method.replace("chat", "complete"), prompt, {**kwargs, "formatted": True}


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
    """Yield a copy of a LlamaIndex component whose model's calls are added to the current ``Bill``.

    Without a bill, or if the component has no model of its own, yield the component itself. With ``only_core``, copy
    only LlamaIndex's own classes: changes that another component makes to itself would be lost with the copy.
    """
    bill, fields = _bill.get(), ("llm", "_llm")
    name = next((name for name in fields if isinstance(getattr(component, name, None), LLM)), "")
    is_copied = not only_core or type(component).__module__.startswith("llama_index.")
    if bill is None or not name or not is_copied:
        yield component
        return
    meter, own = _Meter(), getattr(component, name)
    if speaks_openai(own) and getattr(own, "reuse_client", False):  # the copy shares the clients
        own._get_client()  # noqa: SLF001 (they have no public name)
        own._get_aclient()  # noqa: SLF001
    twin = _with_model(component, name, with_handlers(own, CallbackManager([meter])))
    try:
        yield twin
    finally:
        for usage in meter.usages:
            bill.add(usage)


def _with_model(component: C, name: str, model: LLM) -> C:
    """Return a copy of a component with another model in a field."""
    twin: Any = component.model_copy() if isinstance(component, BaseModel) else copy.copy(component)
    setattr(twin, name, model)
    for key, value in [*vars(twin).items()]:
        if getattr(value, "__self__", None) is component:  # a method of the original, which calls the original's model
            setattr(twin, key, MethodType(value.__func__, twin))
    return twin  # type: ignore[no-any-return]


class _Meter(EventHandler):
    """Collects the usage of a model's calls; one inside another, such as ``complete`` inside ``chat``, is no other."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[Usage] = []
        self._open: dict[str, bool] = {}  # by event id, whether the call is inside another

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: JsonObject | None = None,  # noqa: ARG002
        event_id: str = "",
        parent_id: str = "",
        **_: object,
    ) -> str:
        if event_type is CBEventType.LLM:
            self._open[event_id] = parent_id in self._open
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: JsonObject | None = None, event_id: str = "", **_: object
    ) -> None:
        ended = payload or {}
        response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
        if event_type is CBEventType.LLM and not self._open.pop(event_id, False) and response is not None:
            self.usages.append(usage_of(response))
