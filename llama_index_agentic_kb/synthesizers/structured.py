"""Objects instead of text: asked for in the strictest form that a model has, read tolerantly, validated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ValidationError

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.grounding.answers import AnswerRules, CheckedText, clean_values
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.llm import (
    LanguageModel,
    Reply,
    is_function_calling,
    refuses_form,
    repair_json,
    strip_code_fence,
    structured_output,
)

__all__ = ["ObjectAsker", "read_object", "strict_schema"]

_KEYWORDS: Final = ("default", "title", "examples")
"""Keywords of a JSON schema that OpenAI's strict mode does not take, or that only cost tokens."""

M = TypeVar("M", bound=BaseModel)


class ObjectAsker:
    """Asks a model for an object: by JSON schema where it has that, by a tool call, else in words.

    A form that the model's server refuses is not tried again, once a plainer one has worked.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    async def ask(
        self,
        model: LanguageModel,
        messages: Sequence[ChatMessage],
        output_cls: type[BaseModel],
        *,
        deadline: float | None,
        **kwargs: Any,
    ) -> Reply:
        """Ask for an object; ``read_object`` reads it out of the reply.

        Args:
            model: The language model.
            messages: The prompt.
            output_cls: What is wanted.
            deadline: ``time.monotonic()`` by which the reply must be there; None waits.
            kwargs: Further arguments of the call.

        Raises:
            LLMError: The reply is empty, was refused or was filtered.
        """
        refused: set[str] = set()
        for form, kind, extra in self._forms(model, output_cls):
            try:
                if kind == "tool":
                    reply = await model.call_tool(messages, _tool(output_cls), deadline=deadline, **kwargs)
                else:
                    asked = messages if extra else in_words(messages, output_cls)
                    reply = await model.chat(asked, deadline=deadline, **extra, **kwargs)
            except Exception as error:
                if kind == "words" or not refuses_form(error):
                    raise
                refused.add(form)
                continue
            self._refused |= refused
            return reply
        raise AssertionError("asking in words is always possible")

    def _forms(self, model: LanguageModel, output_cls: type[BaseModel]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Return the forms to try as (name, kind, arguments), strictest first."""
        strict = strict_schema(output_cls)
        schema = None if strict is None else structured_output(model.llm, _name(output_cls), strict)
        if schema is not None and "schema" not in self._refused:
            yield "schema", "schema", schema
        if is_function_calling(model.llm) and "tool" not in self._refused:
            yield "tool", "tool", {}
        yield "words", "words", {}


def in_words(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return messages whose last one says in words what object is wanted."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    wish = f"\n\nReply with one JSON object and nothing else. It must fit this JSON schema:\n{schema}"
    *before, last = messages
    if last.role is not MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, content=wish.strip())]
    return [*before, ChatMessage(role=MessageRole.USER, content=(last.content or "") + wish)]


def _tool(output_cls: type[BaseModel]) -> FunctionTool:
    return FunctionTool.from_defaults(
        fn=_take, name=_name(output_cls), description=output_cls.__doc__ or "Give the answer.", fn_schema=output_cls
    )


def _name(output_cls: type[BaseModel]) -> str:
    """Return a class's name as servers take it: generic classes have brackets in theirs."""
    return re.sub(r"\W+", "_", output_cls.__name__)[:64]


def _take(**_: Any) -> None:
    """Never runs: the call's arguments are what is wanted."""


def strict_schema(output_cls: type[BaseModel]) -> dict[str, Any] | None:
    """Return the JSON schema of a class as OpenAI's strict mode takes it; None where it can't be put that way."""
    schema: dict[str, Any] = output_cls.model_json_schema()
    return _strict(schema) if _closed(schema) else None


def _closed(schema: Any) -> bool:
    """Whether no object of a schema may have keys that it doesn't list."""
    if isinstance(schema, list):
        return all(_closed(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    free = schema.get("type") == "object" and ("properties" not in schema or schema.get("additionalProperties"))
    return not free and all(_closed(value) for value in schema.values())


def _strict(schema: Any, *, names: bool = False) -> Any:
    """Require every property and allow no other; ``names``: the keys are names, not keywords."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: _strict(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key not in _KEYWORDS
    }
    if not names and "properties" in made:
        made["required"] = list(made["properties"])
        made["additionalProperties"] = False
    return made


def read_object(
    reply: Reply, output_cls: type[M], rules: AnswerRules, spotlight: Spotlight = PLAIN
) -> tuple[M, CheckedText]:
    """Read an object out of a reply; markers and links in its texts are checked as in any answer.

    Args:
        reply: A tool call's arguments, or JSON with or without preamble and fences, mended where it is broken.
        output_cls: What it is validated as.
        rules: What its texts may hold.
        spotlight: How the prompt marked what was retrieved.

    Returns:
        The object, and what was removed from its texts.

    Raises:
        LLMError: There is no such object in it.
    """
    spoken = reply.text if reply.tool_arguments is None else json.dumps(reply.tool_arguments, ensure_ascii=False)
    why = "it holds no JSON object"
    for item in _values(spotlight.unmarked(spoken)):
        value, removed = clean_values(item, rules)
        try:
            return output_cls.model_validate(value), removed
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    raise LLMError(
        f"the model's reply is no {output_cls.__name__} ({why}): {one_line(spoken, 80)!r}", usage=reply.usage
    )


def _values(text: str) -> Iterator[dict[str, Any]]:
    """Return the JSON objects in a text, likeliest first: the text itself, then what stands in it, then within that."""
    body = strip_code_fence(text)
    try:
        value = json.loads(body)
    except ValueError:
        value = _mended(body)
    objects = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    yield from objects
    for item in objects:  # {"City": {"name": ...}} is how some models name the class
        yield from (inner for inner in item.values() if isinstance(inner, dict))


def _mended(text: str) -> Any:
    start = text.find("{")
    if start < 0:
        return None
    try:
        return repair_json(text[start:])
    except (ValueError, RecursionError):
        return None
