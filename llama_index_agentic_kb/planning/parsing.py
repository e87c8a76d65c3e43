"""Reads a plan out of whatever a language model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.llm import mended_json, unfenced

__all__ = ["Proposal", "plan_schema", "read_proposals"]

MAX_REPLY: Final = 100_000
"""Characters of a reply that are read; a plan is never that long."""

MAX_QUERY: Final = 1_000
"""Characters of one sub-query; longer ones are cut."""

_LISTS: Final = ("sub_queries", "subqueries", "sub_questions", "subquestions", "queries", "questions", "plan", "items")
_QUERIES: Final = ("query", "sub_query", "sub_question", "question", "search", "q", "text")
_SOURCES: Final = ("sources", "source", "tool_name", "tools", "tool", "source_names", "knowledge_sources")
_DEPENDS: Final = ("depends_on", "dependson", "dependencies", "parents")
# In both, no two repetitions can match the same text: a hostile reply takes linear time.
_NUMBERED: Final = re.compile(r"^[ \t]*(?:\(?(\d{1,4})[.):]|[-*•])[ \t]+(\S.*)$", re.MULTILINE)
_FOLLOWING: Final = re.compile(r"[\s,]*[{\[]")


@dataclass(frozen=True, slots=True)
class Proposal:
    """One sub-query as the model proposed it, nothing checked yet."""

    id: str
    query: str
    sources: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()


def plan_schema(sources: Sequence[str]) -> dict[str, Any]:
    """Give the JSON schema of a plan over these sources, strict enough for OpenAI's structured outputs."""
    names = {"type": "array", "items": {"type": "string", "enum": list(sources)}}
    sub_query = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "query": {"type": "string"},
            "sources": names,
            "depends_on": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["id", "query", "sources", "depends_on"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"sub_queries": {"type": "array", "items": sub_query}},
        "required": ["sub_queries"],
        "additionalProperties": False,
    }


def read_proposals(reply: str | dict[str, Any]) -> list[Proposal]:
    """Read proposals out of a reply: JSON with or without preamble and fences, broken JSON, or a numbered list.

    Args:
        reply: The reply's text, or the arguments of a tool call.

    Returns:
        Proposals in order; may be empty where the model proposed none.

    Raises:
        PlanningError: There is no plan in it.
    """
    items = _items(reply) if isinstance(reply, dict) else _items_of_text(reply[:MAX_REPLY])
    if items is None:
        raise PlanningError(f"the model's reply holds no plan: {one_line(str(reply)[:400], 80)!r}")
    proposals = [_proposal(item, position) for position, item in enumerate(items, start=1)]
    return [proposal for proposal in proposals if proposal is not None]


def _items_of_text(text: str) -> list[Any] | None:
    """Find the list of sub-queries in a text: as JSON, as JSON that can be mended, or as a numbered list."""
    body = unfenced(text)
    start = min((at for at in (body.find("{"), body.find("[")) if at >= 0), default=-1)
    if start >= 0:
        for read in (_whole_values, mended_json):
            try:
                items = _items(read(body[start:]))
            except (ValueError, RecursionError):
                continue
            if items is not None:
                return items
    return [query for _, query in _NUMBERED.findall(text)] or None


def _whole_values(text: str) -> Any:
    """Give the JSON value that a text begins with; a list of them where several follow one another (JSON lines)."""
    decoder = json.JSONDecoder()
    value, end = decoder.raw_decode(text)
    values = [value]
    while (start := _FOLLOWING.match(text, end)) is not None:
        try:
            value, end = decoder.raw_decode(text, start.end() - 1)
        except ValueError:
            break
        values.append(value)
    return values[0] if len(values) == 1 else values


def _items(value: Any) -> list[Any] | None:
    """Find the list of sub-queries in a JSON value; None where there is none."""
    if isinstance(value, list):
        objects = [item for item in value if isinstance(item, dict)]
        nested = [items for item in objects if (items := _listed(item)) is not None]
        if nested:  # several objects: the text held more than the plan
            return nested[0]
        return value if objects or (value and all(isinstance(item, str) for item in value)) else None
    if isinstance(value, dict):
        listed = _listed(value)
        if listed is not None:
            return listed
        return [value] if _text(value, _QUERIES) else None
    return None


def _listed(value: dict[str, Any]) -> list[Any] | None:
    lowered = {_key(key): item for key, item in value.items()}
    for name in _LISTS:
        if isinstance(lowered.get(name), list):
            return list(lowered[name])
        if isinstance(lowered.get(name), dict):
            return _listed(lowered[name])
    return None


def _proposal(item: Any, position: int) -> Proposal | None:
    if isinstance(item, str):
        query = _clean(item, position)
        return Proposal(f"q{position}", query) if query else None
    if not isinstance(item, dict):
        return None
    query = _clean(_text(item, _QUERIES), position)
    if not query:
        return None
    name = _text(item, ("id",)) or f"q{position}"
    return Proposal(name, query, _names(item, _SOURCES), _names(item, _DEPENDS))


def _clean(query: str, position: int) -> str:
    """Drop quotes, bullets and the query's own number; another number ("7. Symphonie") belongs to the query."""
    text = " ".join(query[:MAX_REPLY].split())
    numbered = _NUMBERED.match(text)
    if numbered and numbered.group(1) in (None, str(position)):
        text = numbered.group(2)
    text = text.strip("\"'` ")
    return text[:MAX_QUERY].rstrip() if normalize(text) else ""


def _key(key: Any) -> str:
    """``subQueries``, ``Sub-Queries`` and ``sub_queries`` are one name."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key))
    return snake.lower().replace("-", "_").replace(" ", "_")


def _text(item: dict[str, Any], names: Iterable[str]) -> str:
    lowered = {_key(key): value for key, value in item.items()}
    for name in names:
        value = lowered.get(name)
        if isinstance(value, (str, int)) and str(value).strip():
            return str(value)
    return ""


def _names(item: dict[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    lowered = {_key(key): value for key, value in item.items()}
    for key in keys:
        value = lowered.get(key)
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, list):
            return tuple(str(part).strip() for part in value if isinstance(part, (str, int)))
    return ()
