"""Structured output: requested in the strictest form that a model supports, parsed leniently, and validated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ValidationError

from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.grounding.citations import AnswerRules, CheckedText, clean_values
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.llm import (
    LanguageModel,
    Reply,
    is_function_calling,
    read_json,
    refuses_form,
    strip_code_fence,
    structured_output,
)

_KEYWORDS: Final = ("default", "title", "examples")
"""JSON schema keywords to remove: OpenAI's strict mode rejects them, or they only cost tokens."""

M = TypeVar("M", bound=BaseModel)


class UnreadableReplyError(LLMError):
    """A model's reply contains no valid object of the requested class."""


class ObjectAsker:
    """Requests an object by JSON schema, else by a tool call, else in words; a rejected form is not used again."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    async def ask(
        self,
        model: LanguageModel,
        messages: Sequence[ChatMessage],
        output_cls: type[BaseModel],
        *,
        deadline: float | None,
        **limits: int,
    ) -> Reply:
        """Request an object; use ``read_object`` to parse the reply. ``limits`` are further arguments of the call."""
        name = re.sub(r"\W+", "_", output_cls.__name__)[:64]  # names of generic classes have brackets
        strict = strict_schema(output_cls)
        schema = None if strict is None else structured_output(model.llm, name, strict)
        possible = {"schema": schema is not None, "tool": is_function_calling(model.llm), "words": True}
        refused: set[str] = set()
        for form in [form for form, can in possible.items() if can and form not in self._refused]:
            try:
                if form == "tool":
                    described = output_cls.__doc__ or "Give the answer."
                    tool = FunctionTool.from_defaults(_take, name=name, description=described, fn_schema=output_cls)
                    reply = await model.call_tool(messages, tool, deadline=deadline, **limits)
                elif form == "schema":
                    reply = await model.chat(messages, deadline=deadline, **(schema or {}), **limits)
                else:
                    reply = await model.chat(in_words(messages, output_cls), deadline=deadline, **limits)
            except Exception as error:
                if form == "words" or not refuses_form(error):
                    raise
                refused.add(form)
                continue
            self._refused |= refused
            return reply
        raise AssertionError("asking in words is always possible")


def in_words(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return the messages with the JSON schema of the object added to the last user message."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    wish = f"\n\nReply with one JSON object and nothing else. It must fit this JSON schema:\n{schema}"
    *before, last = messages
    if last.role is not MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, content=wish.strip())]
    return [*before, ChatMessage(role=MessageRole.USER, content=(last.content or "") + wish)]


def _take(**_: object) -> None:
    """The tool's function, which is never called: only the arguments of the tool call are used."""


def strict_schema(output_cls: type[BaseModel]) -> dict[str, Any] | None:
    """Return the JSON schema of a class for OpenAI's strict mode; None if it can't be expressed there."""
    schema: dict[str, Any] = output_cls.model_json_schema()
    return _strict(schema) if _closed(schema) else None


def _closed(schema: object) -> bool:
    """Return whether all objects of a schema list all their keys."""
    if isinstance(schema, list):
        return all(map(_closed, schema))
    if not isinstance(schema, dict):
        return True
    free = schema.get("type") == "object" and ("properties" not in schema or schema.get("additionalProperties"))
    return not free and all(map(_closed, schema.values()))


def _strict(schema: Any, *, names: bool = False) -> Any:
    """Return a schema that requires all properties and allows no others; ``names`` means its keys are names."""
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
        made |= {"required": list(made["properties"]), "additionalProperties": False}
    return made


def read_object(
    reply: Reply, output_cls: type[M], rules: AnswerRules, spotlight: Spotlight = PLAIN
) -> tuple[M, CheckedText]:
    """Return the object in a reply, without invalid markers and links, and the counts of what was removed.

    Raises:
        UnreadableReplyError: The reply contains no valid object of the class.
    """
    spoken = reply.text if reply.tool_arguments is None else json.dumps(reply.tool_arguments, ensure_ascii=False)
    why = "it holds no JSON object"
    for item in _objects(spotlight.unmarked(spoken)):
        try:
            value, removed = clean_values(item, rules)
            return output_cls.model_validate(value), removed
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        except Exception as error:  # noqa: BLE001 (a validator's own; objects nested too deeply)
            why = f"{type(error).__name__}: {one_line(error_message(error), 200)}"
    message = f"the model's reply is no {output_cls.__name__} ({why}): {one_line(spoken, 80)!r}"
    raise UnreadableReplyError(message, usage=reply.usage)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, then the objects nested one level below them."""
    try:
        value = json.loads(strip_code_fence(text))
    except (ValueError, RecursionError):
        value = read_json(text)
    objects = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    yield from objects
    for item in objects:  # {"City": {"name": ...}} is how some models name the class
        yield from (inner for inner in item.values() if isinstance(inner, dict))
