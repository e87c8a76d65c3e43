"""Reads a plan out of whatever a language model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from llama_index_agentic_kb._text import normalize, one_line, without_surrogates
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.llm import repair_json, strip_code_fence

__all__ = ["MAX_QUERY", "MAX_REPLY", "Proposal", "plan_schema", "read_partial_plan", "read_proposals"]

MAX_REPLY: Final = 100_000
"""Characters of a reply that are read; a plan is never that long."""

MAX_PARTIAL: Final = 20_000
"""Characters of a reply that are parsed while it is still written, each time from its start; more waits for the end."""

MAX_QUERY: Final = 1_000
"""Characters of one sub-query; longer ones are cut."""

MAX_ITEMS: Final = 2_000
"""Sub-queries of a reply that are read."""

MAX_NUMBER: Final = 2**63
"""Numbers are read up to here; Python refuses to write those of thousands of digits."""

_LISTS: Final = ("sub_queries", "subqueries", "sub_questions", "subquestions", "queries", "questions", "plan", "items")
_QUERIES: Final = ("query", "sub_query", "sub_question", "question", "search", "q", "text")
_SOURCES: Final = ("sources", "source", "tool_name", "tools", "tool", "source_names", "knowledge_sources")
_FINDS: Final = ("finds", "answer_is", "looks_for")
_FILTERS: Final = ("filter", "filters")
_DEPENDS: Final = ("depends_on", "dependson", "dependencies", "parents")
_KNOWN: Final = frozenset(("id", *_LISTS, *_QUERIES, *_SOURCES, *_FINDS, *_FILTERS, *_DEPENDS))
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
    finds: str = ""
    filter: str = ""


def plan_schema(
    sources: Sequence[str], *, filters: bool = False, first: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the JSON schema of a plan over these sources, strict enough for OpenAI's structured outputs.

    Args:
        sources: Their names.
        filters: Whether a sub-query has a filter.
        first: What else a reply holds, before the sub-queries: schemas by name.
    """
    text = {"type": "string"}
    sub_query = {
        "id": text,
        "query": text,
        "sources": {"type": "array", "items": {"type": "string", "enum": list(sources)}},
        "depends_on": {"type": "array", "items": text},
        **({"filter": text} if filters else {}),
        "finds": text,
    }
    return _object({**(first or {}), "sub_queries": {"type": "array", "items": _object(sub_query)}})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def read_proposals(reply: str | dict[str, Any]) -> list[Proposal]:
    """Return the proposals of a reply: JSON with or without preamble and fences, broken JSON, or a numbered list.

    Args:
        reply: The reply's text, or the arguments of a tool call.

    Returns:
        Proposals in order; empty where the model proposed none.

    Raises:
        PlanningError: The reply holds no plan.
    """
    items = _items(reply) if isinstance(reply, dict) else _items_of_text(reply[:MAX_REPLY])
    if items is None:
        raise PlanningError(f"the model's reply holds no plan: {one_line(str(reply)[:400], 80)!r}")
    return _proposals(items[:MAX_ITEMS])


def read_partial_plan(text: str) -> list[Proposal]:
    """Return the proposals of a reply that is still being written, as far as they can be searched.

    The last one counts when its object ends, or as soon as its last key (``finds``, which no search needs) begins.
    Nothing is repaired: what can't be read yet is read at the end.

    Args:
        text: The reply so far.
    """
    start = _first_bracket(text)
    if start < 0 or len(text) > MAX_PARTIAL:
        return []
    body = without_surrogates(text[start:])
    try:
        value = from_json(body, allow_partial="trailing-strings")
    except ValueError:
        return []
    items = _items(value)
    if not items or (
        isinstance(value, dict) and _listed(_fields(value)) is None
    ):  # one object alone: more keys may come
        return []
    if not text.rstrip().endswith(("}", "]")):
        last = items.pop()
        if isinstance(last, dict) and "depends_on" in last and [*last][-1] == "finds":
            items.append({**last, "finds": ""})
    elif not _ends_with_item(body):
        items.pop()
    return _proposals(items)


def _ends_with_item(text: str) -> bool:
    """Return whether the last item is whole: only further items or closing brackets may still come."""
    for rest in ("]}", "]", "}", ""):
        try:
            from_json(text + rest)
        except ValueError:
            continue
        return True
    return False


def _first_bracket(text: str) -> int:
    bracket = re.search(r"[{\[]", text)
    return -1 if bracket is None else bracket.start()


def _items_of_text(text: str) -> list[Any] | None:
    """Return the list of sub-queries in a text: as JSON, as JSON that can be repaired, or as a numbered list."""
    body = strip_code_fence(text)
    start = _first_bracket(body)
    readers: tuple[Callable[[str], Any], ...] = (_whole_values, repair_json)
    for read in readers if start >= 0 else ():
        try:
            items = _items(read(body[start:]))
        except (ValueError, RecursionError):
            continue
        if items is not None:
            return items
    return [query for _, query in _NUMBERED.findall(text)] or None


def _whole_values(text: str) -> Any:
    """Return the JSON value that a text begins with; a list of them where several follow one another (JSON lines)."""
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
    """Return the list of sub-queries in a JSON value; None where there is no such list."""
    if isinstance(value, list):
        objects = [item for item in value if isinstance(item, dict)]
        for item in objects:
            if (items := _listed(_fields(item))) is not None:  # several objects: the text held more than the plan
                return items
        return value if objects or (value and all(isinstance(item, str) for item in value)) else None
    if isinstance(value, dict):
        fields = _fields(value)
        listed = _listed(fields)
        return [value] if listed is None and _text(fields, _QUERIES) else listed
    return None


def _listed(fields: Mapping[str, Any]) -> list[Any] | None:
    for name in _LISTS:
        value = fields.get(name)
        if isinstance(value, list):
            return list(value)
        if isinstance(value, dict):
            return _listed(_fields(value))
    return None


def _proposals(items: Sequence[Any]) -> list[Proposal]:
    proposals = []
    for position, item in enumerate(items, start=1):
        fields = {"query": item} if isinstance(item, str) else _fields(item) if isinstance(item, dict) else {}
        query = _clean(_text(fields, _QUERIES), position)
        if query:
            name = _text(fields, ("id",)) or f"q{position}"
            finds = one_line(_text(fields, _FINDS), MAX_QUERY)
            sources, parents = _names(fields, _SOURCES), _names(fields, _DEPENDS)
            proposals.append(Proposal(name, query, sources, parents, finds, _text(fields, _FILTERS)))
    return proposals


def _clean(query: str, position: int) -> str:
    """Return a query without quotes, bullets and its own number; another number belongs to it ("7. Symphonie")."""
    text = " ".join(query[:MAX_REPLY].split())
    numbered = _NUMBERED.match(text)
    if numbered and numbered.group(1) in (None, str(position)):
        text = numbered.group(2)
    text = text.strip("\"'` ")
    return text[:MAX_QUERY].rstrip() if normalize(text) else ""


def _fields(item: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an object's values by our form of their keys: ``subQueries`` and ``Sub-Queries`` are ``sub_queries``."""
    return {key if key in _KNOWN else _key(str(key)): value for key, value in item.items()}


def _key(key: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_").replace(" ", "_")


def _text(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    for name in names:
        if name in fields and (text := _as_text(fields[name])):
            return text
    return ""


def _names(fields: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, ...]:
    for key in keys:
        value = fields.get(key)
        if isinstance(value, str):
            return tuple(part.strip() for part in without_surrogates(value).split(",") if part.strip())
        if isinstance(value, list):
            return tuple(text.strip() for part in value if (text := _as_text(part)))
    return ()


def _as_text(value: Any) -> str:
    """Return a text that UTF-8 can write, or a number as text; "" for anything else."""
    if isinstance(value, str):
        return without_surrogates(value) if value.strip() else ""
    return str(value) if isinstance(value, int) and abs(value) < MAX_NUMBER else ""
