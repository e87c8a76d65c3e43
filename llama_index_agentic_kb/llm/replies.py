"""What a language model said, what it billed, and whether it can be used."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

import json_repair
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.callbacks.token_counting import get_tokens_from_response

from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.failures import status_of

__all__ = [
    "CUT_SHORT",
    "Reply",
    "Usage",
    "check",
    "finish_reason_of",
    "has_choices",
    "latest",
    "refusal_of",
    "refuses_form",
    "repair_json",
    "strip_code_fence",
    "text_of",
    "usage_of",
]

FORM_REFUSED: Final = (400, 404, 415, 422, 501)
"""HTTP statuses with which servers refuse a request form that they don't know."""

MAX_MENDED: Final = 8_000
"""Characters of broken JSON that are mended: mending takes quadratic time (20,000 brackets: 7 s, measured)."""

_FENCE: Final = re.compile(r"```(?:json)?(.*?)```", re.DOTALL | re.IGNORECASE)  # no \s*: it would be quadratic

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


def text_of(response: ChatResponse | CompletionResponse) -> str:
    """Give a response's text."""
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def usage_of(response: ChatResponse | CompletionResponse) -> Usage:
    """Give what a response says that it billed."""
    try:
        given, written = get_tokens_from_response(response)
    except (TypeError, ValueError, AttributeError):  # a raw reply of a shape that core doesn't know
        given, written = 0, 0
    counted = bool(given or written)
    return Usage(given if counted else None, written if counted else None, calls=1)


def latest(seen: Usage, new: Usage) -> Usage:
    """A stream bills once, in its last chunks; some servers repeat a running total."""
    return Usage(
        new.input_tokens if new.input_tokens is not None else seen.input_tokens,
        new.output_tokens if new.output_tokens is not None else seen.output_tokens,
        calls=1,
    )


def has_choices(raw: Any) -> bool:
    """Tell whether a raw response holds any choice, where it is of a shape that has them."""
    return bool(_get(raw, "choices"))


def finish_reason_of(raw: Any) -> str | None:
    """Give why a model stopped, where its raw response says so."""
    choices = _get(raw, "choices")
    reason = _get(choices[0], "finish_reason") if choices else None
    return reason if isinstance(reason, str) else None


def refusal_of(raw: Any) -> str:
    """Give the words of a refusal; a stream tells them in pieces."""
    choices = _get(raw, "choices")
    said = (_get(choices[0], "message") or _get(choices[0], "delta")) if choices else None
    return _get(said, "refusal") or ""


def check(reply: Reply, refusal: str) -> None:
    """Refuse a reply that is none."""
    if refusal:
        raise LLMError(f"the model refused: {refusal}", usage=reply.usage)
    if reply.finish_reason == "content_filter":
        raise LLMError("the model's reply was stopped by a content filter", usage=reply.usage)
    if not reply.text.strip():
        why = f": {CUT_SHORT}" if reply.cut_short else ""
        raise LLMError(f"the model's reply is empty{why}", empty=True, usage=reply.usage)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def refuses_form(error: BaseException) -> bool:
    """Tell whether a client's error may mean that its server doesn't know the form of structured output asked for."""
    return status_of(error) in FORM_REFUSED


def strip_code_fence(text: str) -> str:
    """Give what stands in a reply's first code fence, or the reply itself."""
    fence = _FENCE.search(text)
    return fence.group(1) if fence else text


def repair_json(text: str) -> Any:
    """Give the JSON value that broken text was meant to be, as far as the start of it tells.

    Raises:
        ValueError: There is none.
        RecursionError: It is nested too deep.
    """
    return json_repair.loads(text[:MAX_MENDED])
