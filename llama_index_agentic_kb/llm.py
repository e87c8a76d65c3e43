"""The one way in which this library calls a language model: as a flow, with a deadline, and with its bill.

Nothing here decides what a failure means: a reply that can't be used raises ``LLMError``, what the model's client
raises goes through, and planner and synthesizers each do what is right for them.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM, CustomLLM, MockLLM
from llama_index.core.settings import Settings
from llama_index.core.utils import get_tokenizer

from llama_index_agentic_kb._flow import END, Call, Emit, Flow, Next, Open, Stream
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import LLMError

__all__ = [
    "LanguageModel",
    "Reply",
    "Usage",
    "count_tokens",
    "is_function_calling",
    "model_name",
    "resolve_llm",
    "structured_output",
    "warm_up_llm",
]

FALLBACK_CONTEXT_WINDOW: Final = 8_192
"""Tokens assumed for a model whose ``metadata`` does not know its own window."""

CUT_SHORT: Final = "the model stopped before it was done"


@dataclass(slots=True)
class Usage:
    """What language model calls billed; None where a reply did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    calls: int = 0

    def add(self, other: Usage) -> None:
        """Add another bill to this one."""
        self.input_tokens = _sum(self.input_tokens, other.input_tokens)
        self.output_tokens = _sum(self.output_tokens, other.output_tokens)
        self.calls += other.calls


@dataclass(slots=True)
class Reply:
    """What a model said."""

    text: str
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    tool_arguments: dict[str, Any] | None = None

    @property
    def cut_short(self) -> bool:
        """Whether the model ran out of tokens."""
        return self.finish_reason in ("length", "max_tokens")


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
        reply = Reply(_text(response), _usage(response), _finish_reason(response.raw))
        _check(reply, _refusal(response.raw))
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
            native=partial(llm.achat_with_tools, **asked) if _has_native_async(llm) else None,
            deadline=deadline,
            what=f"language model {self.name or ''}".strip(),
        )
        calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        reply = Reply(response.message.content or "", _usage(response), _finish_reason(response.raw))
        if not calls:
            _check(reply, _refusal(response.raw))
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
        stream: Stream = yield Open(**self._ways("stream_chat", messages, {**_stream_kwargs(self.llm), **kwargs}))
        reply, refusal, usage = Reply(""), "", Usage()
        while (chunk := (yield Next(stream, deadline=deadline))) is not END:
            usage = _latest(usage, _usage(chunk))
            reply.finish_reason = _finish_reason(chunk.raw) or reply.finish_reason
            refusal += _refusal(chunk.raw)
            delta = chunk.delta or ""
            reply.text += delta
            if told := through(delta):
                yield Emit(told)
        reply.usage = usage
        _check(reply, refusal)
        if reply.finish_reason is None and _is_openai(self.llm):
            raise LLMError("the model's stream ended before the model did", usage=usage)
        return reply

    def _ways(self, method: str, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give the two ways of a call; a model that doesn't chat is given a prompt to complete, as core gives it."""
        llm = self.ready()
        given: Any = messages
        if not _chats(llm):
            method, given, kwargs = (
                method.replace("chat", "complete"),
                _prompt(llm, messages),
                {**kwargs, "formatted": True},
            )
        native = partial(getattr(llm, f"a{method}"), given, **kwargs)
        return {
            "sync": partial(getattr(llm, method), given, **kwargs),
            "native": native if _has_native_async(llm, f"a{method}") else None,
            "what": f"language model {self.name or ''}".strip(),
        }


def resolve_llm(llm: LLM | None) -> LLM | None:
    """Give the LLM to use: the given one, else ``Settings.llm``, else None.

    ``Settings.llm`` raises where no OpenAI key is set, so it is only asked when somebody set it or a key is there;
    a disabled one (``Settings.llm = None`` gives core's ``MockLLM``) counts as none.
    """
    if llm is not None:
        return llm
    if Settings._llm is None and not os.environ.get("OPENAI_API_KEY"):  # noqa: SLF001 (the getter would raise)
        return None
    default: LLM = Settings.llm
    return None if isinstance(default, MockLLM) else default


def warm_up_llm(llm: LLM) -> None:
    """Load tokenizer and client before the first call; nothing is sent.

    llama_index's OpenAI makes its clients on first use (0.1 s each), and they load their resources on first use
    (0.6 s): in an async query both would hold up the event loop.
    """
    count_tokens("warm up")
    if not _is_openai(llm):
        return
    structured_output(llm, "warm_up", {})
    for make in ("_get_client", "_get_aclient"):
        client = getattr(llm, make, None)
        if client is not None:
            _ = client().chat.completions


def count_tokens(text: str) -> int:
    """Count tokens with LlamaIndex's global tokenizer."""
    return len(get_tokenizer()(text))


def model_name(llm: LLM) -> str | None:
    """Give a model's name, or None where it says none."""
    name = getattr(llm, "model", None) or getattr(llm, "model_name", None)
    if isinstance(name, str):
        return name
    try:
        return llm.metadata.model_name
    except ValueError:
        return None


def structured_output(llm: LLM, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Give the call arguments that make an OpenAI model reply in a JSON schema; None where it can't."""
    utils = sys.modules.get("llama_index.llms.openai.utils")
    if utils is None or not _is_openai(llm) or not utils.is_json_schema_supported(llm.model):  # type: ignore[attr-defined]
        return None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}}


def is_function_calling(llm: LLM) -> bool:
    """Tell whether a model can be made to call a tool."""
    try:
        return bool(llm.metadata.is_function_calling_model) and hasattr(llm, "chat_with_tools")
    except ValueError:
        return False


def _chats(llm: LLM) -> bool:
    try:
        return bool(llm.metadata.is_chat_model)
    except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
        return True


def _prompt(llm: LLM, messages: Sequence[ChatMessage]) -> str:
    if len(messages) == 1 and messages[0].role is MessageRole.USER:
        return llm.completion_to_prompt(messages[0].content or "")  # type: ignore[misc]  # core's validators set both
    return llm.messages_to_prompt(messages)  # type: ignore[misc]


def _text(response: ChatResponse | CompletionResponse) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def _is_openai(llm: LLM) -> bool:
    """Whether it is llama_index's OpenAI, without importing it: if it was never imported, it is not."""
    module = sys.modules.get("llama_index.llms.openai.base")
    return module is not None and isinstance(llm, module.OpenAI)


def _stream_kwargs(llm: LLM) -> dict[str, Any]:
    """Ask for the bill at the end of a stream; else streams have none."""
    return {"stream_options": {"include_usage": True}} if _is_openai(llm) else {}


def _has_native_async(llm: LLM, method: str = "achat") -> bool:
    """Whether an async method really awaits: core's ``CustomLLM`` runs the sync call on the loop."""
    if not isinstance(llm, CustomLLM):
        return True
    own, core = (inspect.unwrap(getattr(kind, method)) for kind in (type(llm), CustomLLM))  # core's spans wrap methods
    return own is not core


def _usage(response: ChatResponse | CompletionResponse) -> Usage:
    try:
        given, written = get_tokens_from_response(response)
    except (TypeError, ValueError, AttributeError):  # a raw reply of a shape that core doesn't know
        given, written = 0, 0
    counted = bool(given or written)
    return Usage(given if counted else None, written if counted else None, calls=1)


def _latest(seen: Usage, new: Usage) -> Usage:
    """A stream bills once, in its last chunks; some servers repeat a running total."""
    return Usage(
        new.input_tokens if new.input_tokens is not None else seen.input_tokens,
        new.output_tokens if new.output_tokens is not None else seen.output_tokens,
        calls=1,
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def _finish_reason(raw: Any) -> str | None:
    choices = _get(raw, "choices")
    reason = _get(choices[0], "finish_reason") if choices else None
    return reason if isinstance(reason, str) else None


def _refusal(raw: Any) -> str:
    """Give the words of a refusal; a stream tells them in pieces."""
    choices = _get(raw, "choices")
    said = (_get(choices[0], "message") or _get(choices[0], "delta")) if choices else None
    return _get(said, "refusal") or ""


def _check(reply: Reply, refusal: str) -> None:
    """Refuse a reply that is none."""
    if refusal:
        raise LLMError(f"the model refused: {refusal}", usage=reply.usage)
    if reply.finish_reason == "content_filter":
        raise LLMError("the model's reply was stopped by a content filter", usage=reply.usage)
    if not reply.text.strip():
        why = f": {CUT_SHORT}" if reply.cut_short else ""
        raise LLMError(f"the model's reply is empty{why}", empty=True, usage=reply.usage)
