"""The planner: one language model call turns the conversation into a ``QueryPlan``.

Any reply results in a valid plan; at worst only the question is searched, in all sources, with a warning. The reply is
parsed while it is being streamed, so that each sub-query is searched as soon as it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, normalize, one_line, without_surrogates
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import AgenticKBError, LLMError, PlanningError
from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.llm import (
    LanguageModel,
    Reply,
    Usage,
    read_json,
    refuses_form,
    strip_code_fence,
    structured_output,
)
from llama_index_agentic_kb.planning.classification import (
    MAX_REPLY,
    PART,
    ClassificationSpec,
    ask_for_classes,
    classify,
    read_verdicts,
    requested,
)
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.plan_graph import MAX_QUERY, PlanGraph, PlannerSource, Proposal, plain_plan
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.prompts import (
    DEPENDENT,
    FILTERS,
    FINDINGS_TEMPLATE,
    FOLLOW_UP,
    INDEPENDENT,
    ON_SEARCHING,
    PLANNER_TEMPLATE,
    REVISION_TEMPLATE,
    TODAY,
    TOOL_TEMPLATE,
    as_data,
    shortened,
    with_instructions,
)
from llama_index_agentic_kb.schema import ModelInfo, ModelQueryPlanningActivity, Outcome, QueryPlan, SubQuery
from llama_index_agentic_kb.sources.filters import describe_fields

HISTORY_MESSAGES: Final = 10
HISTORY_CHARACTERS: Final = 2_000
"""How many messages before the question are in the planner's prompt, and how many characters of each."""

MAX_LOOKS: Final = 400  # maximum number of times that a reply is parsed while it is streamed, each time from its start
MAX_PARTIAL: Final = 20_000
"""Maximum number of characters parsed while a reply is streamed; the rest is parsed when it is complete."""
MAX_ITEMS: Final = 2_000  # maximum number of sub-queries read from a reply
MAX_NUMBER: Final = 2**63
"""Numbers must be below this limit; Python can't convert integers of thousands of digits to text."""

_EMPTY_WORDS: Final = "a all document documents file files in of source text texts the".split()
"""Words in a source's description that are no information for the planner."""

_LISTS: Final = ("sub_queries", "subqueries", "sub_questions", "subquestions", "queries", "questions", "plan", "items")
_QUERIES: Final = ("query", "sub_query", "sub_question", "question", "search", "q", "text")
_SOURCES: Final = ("sources", "source", "tool_name", "tools", "tool", "source_names", "knowledge_sources")
_FINDS: Final = ("finds", "answer_is", "looks_for")
_FILTERS: Final = ("filter", "filters")
_DEPENDS: Final = ("depends_on", "dependson", "dependencies", "parents")
# In these, no two repetitions can match the same text: a hostile reply takes linear time.
_NUMBERED: Final = re.compile(r"^[ \t]*(?:\(?(\d{1,4})[.):]|[-*•])[ \t]+(\S.*)$", re.MULTILINE)
_FIRST_ITEM: Final = re.compile(r"\[\s{0,100}(?=\{)")
_NEXT_ITEM: Final = re.compile(r"\s{0,100},\s{0,100}(?=\{)")
_LAST_KEY: Final = re.compile(r'"finds"\s{0,3}:\s{0,3}"')
"""Start of the last key of a sub-query (``finds``), which is not needed to search it."""
_DECODER: Final = json.JSONDecoder()
_EMPTY_BLOCK: Final = re.compile(r"^<(conversation|later_steps|found|searches)>\s*</\1>\n{0,2}", re.MULTILINE)


# -- what all calls of the planning model share --------------------------------------------------------------------


class PlanningModel:
    """The language model that plans, with its prompts by the names that ``update_prompts`` uses."""

    def __init__(
        self,
        model: LanguageModel,
        spotlighting: Spotlighting | None = "delimit",
        today: Callable[[], date] = date.today,
    ) -> None:
        self.model = model
        self.today = today
        self.spotlighting = spotlighting
        self.structured = True  # set to False once the server refuses structured output
        self.prompts: dict[str, BasePromptTemplate] = {
            "planner_prompt": PLANNER_TEMPLATE,
            "findings_prompt": FINDINGS_TEMPLATE,
            "revision_prompt": REVISION_TEMPLATE,
            "tool_prompt": TOOL_TEMPLATE,
        }

    def messages(self, prompt: str, passages: str = "", **variables: str) -> list[ChatMessage]:
        """Return a prompt's messages with ``passages`` as the context and its other variables, sanitized.

        A block that holds nothing is left out.
        """
        values = {name: as_data(text) for name, text in variables.items()}
        made = self.prompts[prompt].format_messages(llm=self.model.llm, context_str=passages, **values)
        for one in made:
            one.blocks = [
                TextBlock(text=_EMPTY_BLOCK.sub("", block.text)) if isinstance(block, TextBlock) else block
                for block in one.blocks
            ]
        return made


@dataclass(slots=True)
class ModelCall:
    """The result of one model call: its token usage, and its error if it failed. An error is reported, never raised."""

    usage: Usage = field(default_factory=Usage, kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)
    fields: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Further fields of the call's record in the activity log."""

    def fail(self, error: Exception) -> None:
        """Store the error of a failed call, and its token usage."""
        self.error = error
        if isinstance(error, LLMError) and error.usage is not None:
            self.usage = error.usage

    @contextmanager
    def recorded(
        self, log: ActivityLog, model: LanguageModel, purpose: Literal["plan", "findings", "revision", "tool"]
    ) -> Iterator[None]:
        """Record the call in the activity log; an exception of the ``with`` body is stored as the call's error."""
        info = None if model.name is None else ModelInfo(model_name=model.name)
        with log.record(ModelQueryPlanningActivity, CBEventType.AGENT_STEP, model=info, purpose=purpose) as record:
            try:
                yield
            except Exception as error:  # noqa: BLE001 (any failure of a model is reported, and the search goes on)
                self.fail(error)
            log.close(
                record,
                outcome=Outcome.OK if self.error is None else Outcome.ERROR,
                error=None if self.error is None else describe_error(self.error, model.name),
                input_tokens=self.usage.input_tokens,
                output_tokens=self.usage.output_tokens,
                **self.fields,
            )


# -- the call ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Planning(ModelCall):
    """The result of planning: a plan whose first sub-query is always the question itself."""

    plan: QueryPlan
    finds: dict[str, str] = field(default_factory=dict)
    """Description of each sub-query's answer; see ``PlanGraph.finds``."""


Begin: TypeAlias = Callable[[Sequence[SubQuery]], Coroutine[object, object, None]]
"""Callback that starts the search of sub-queries."""


async def plan_searches(
    models: PlanningModel,
    scope: Scope,
    sources: Sequence[PlannerSource],
    limits: EffortLimits,
    *,
    deadline: float | None,
    log: ActivityLog,
    begin: Begin | None = None,
) -> Planning:
    """Plan the searches of a question, and classify it in the same call if the scope asks for it.

    What was parsed before a failure is kept. ``begin`` gets independent sub-queries while the reply is streamed.
    """
    planning = Planning(plain_plan(scope, sources))
    plan = planning.plan
    graph = PlanGraph(plan, sources, limits)
    spec = None if scope.classification is None else requested(scope.classification)
    intake = _Intake(graph, begin, spec)
    if scope.history and (note := shortened(scope.history, HISTORY_MESSAGES, HISTORY_CHARACTERS)):
        plan.warnings.append(f"in the planner's prompt, {note}")
    with planning.recorded(log, models.model, "plan"):
        try:
            reply = await _ask(models, _messages(models, scope, sources, limits, spec), intake, sources, deadline)
            planning.usage = reply.usage
            read = partial(intake.read_whole, reply.text)
            await intake.take(await Call(sync=read, deadline=deadline, what="reading the plan"))
            if reply.cut_short:
                plan.warnings.append("the model ran out of tokens while planning; the plan may be incomplete")
        except Exception as error:  # noqa: BLE001 (any failure of a model ends in a sane plan, and is reported)
            planning.fail(error)
            kept = "what was planned by then is searched" if intake.began else "the question is searched as it is"
            name = error.code if isinstance(error, AgenticKBError) else type(error).__name__
            # A client's own message may be a page of HTML.
            short = f"{name}: {one_line(error_message(error), 200)}"
            plan.warnings.append(
                f"planning failed, {kept}: {error_message(error) if isinstance(error, LLMError) else short}"
            )
        graph.finish()
        planning.finds = graph.finds
        if scope.classification is not None:
            classify(plan, scope.classification, intake.verdicts)
        planning.fields = {
            "warning": "; ".join(plan.warnings) or None,
            "sub_queries": [sub_query.query for sub_query in plan.sub_queries],
            "classifications": plan.classifications,
            "labels": plan.labels or None,
        }
    return planning


def _messages(
    models: PlanningModel,
    scope: Scope,
    sources: Sequence[PlannerSource],
    limits: EffortLimits,
    spec: ClassificationSpec | None,
) -> list[ChatMessage]:
    rules = DEPENDENT.format(max_rounds=limits.rounds) if limits.rounds > 1 else INDEPENDENT
    if any(source.fields for source in sources):
        rules += f"\n- {FILTERS}"
    if scope.history:
        rules += f"\n- {FOLLOW_UP}"
    rules += f"\n- {TODAY.format(today=models.today().isoformat())}"
    turns = [f"{role}: {one_line(text, HISTORY_CHARACTERS)}" for role, text in scope.history[-HISTORY_MESSAGES:]]
    messages = models.messages(
        "planner_prompt",
        max_sub_queries=str(limits.sub_queries),
        dependencies=rules,
        sources=describe_sources(sources),
        conversation="\n".join(turns),
        query_str=scope.question,
    )
    messages = with_instructions(messages, scope.retrieval_instructions, ON_SEARCHING)
    return messages if spec is None else ask_for_classes(messages, spec)


def describe_sources(sources: Sequence[PlannerSource]) -> str:
    """Return the sources as prompt text, one per line, with their fields for filters; no description that is empty."""
    lines = []
    for source in sources:
        words = {*re.findall(r"\w+", normalize(source.description))}
        says = words.difference(re.findall(r"\w+", normalize(source.name)), _EMPTY_WORDS)
        lines.append(f"- {source.name}: {one_line(source.description, 400)}" if says else f"- {source.name}")
        lines += [f"  {line}" for line in describe_fields(source.fields).splitlines()] if source.fields else []
    return "\n".join(lines)


async def _ask(
    models: PlanningModel,
    messages: list[ChatMessage],
    intake: _Intake,
    sources: Sequence[PlannerSource],
    deadline: float | None,
) -> Reply:
    """Ask for structured output if the model supports it, or for plain text once its server has refused that."""

    async def ask(form: dict[str, object]) -> Reply:
        try:
            return await models.model.read(messages, intake.read, deadline=deadline, max_chars=MAX_REPLY, **form)
        except NotImplementedError:
            return await models.model.chat(messages, deadline=deadline, **form)

    schema = plan_schema(sources, intake.spec)
    form = structured_output(models.model.llm, "query_plan", schema) if models.structured else None
    if form is not None:
        try:
            return await ask(form)
        except Exception as error:
            if not refuses_form(error):
                raise
    reply = await ask({})
    models.structured = models.structured and form is None
    return reply


@dataclass(slots=True)
class _Intake:
    """Adds a reply's proposals to the plan while the reply is streamed, and starts searches that are ready."""

    graph: PlanGraph
    begin: Begin | None
    spec: ClassificationSpec | None
    began: bool = False
    verdicts: dict[str, bool] | None = None
    looks: int = 0

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply when an object or a list ends, or when the last key of a sub-query begins."""
        ends = "}" in delta or "]" in delta or _LAST_KEY.search(text, max(0, len(text) - len(delta) - 15)) is not None
        if ends and self.looks < MAX_LOOKS and not self.graph.full:
            self.looks += 1
            if self.spec is not None and self.verdicts is None:
                self.verdicts = read_verdicts(text, self.spec, whole=False)
            await self.take(read_partial_plan(text))

    def read_whole(self, reply: str) -> list[Proposal]:
        """Return the proposals of a complete reply, and store its verdicts, which are valid without a plan."""
        if self.spec is not None:
            self.verdicts = read_verdicts(reply, self.spec) or self.verdicts
        try:
            return read_proposals(reply)
        except PlanningError:
            if self.verdicts is None:
                raise
            return []

    async def take(self, proposals: Sequence[Proposal]) -> None:
        """Add all proposals parsed so far to the plan, and start the searches that are ready."""
        ready = self.graph.add(proposals)
        if ready:
            self.began = True
            if self.begin is not None:
                await self.begin(ready)


# -- the reply -----------------------------------------------------------------------------------------------------


def strict_object(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON schema of an object with these properties, in the strict form of OpenAI's structured outputs."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def plan_schema(sources: Sequence[PlannerSource], spec: ClassificationSpec | None = None) -> dict[str, object]:
    """Return the JSON schema of a plan over these sources, with the verdicts of ``spec`` before the sub-queries."""
    text = {"type": "string"}
    sub_query = {
        "id": text,
        "query": text,
        "sources": {"type": "array", "items": {"type": "string", "enum": [source.name for source in sources]}},
        "depends_on": {"type": "array", "items": text},
        **({"filter": text} if any(source.fields for source in sources) else {}),
        "finds": text,
    }
    plan: dict[str, object] = {"sub_queries": {"type": "array", "items": strict_object(sub_query)}}
    if spec is not None:
        plan = {PART: strict_object({key: {"type": "boolean"} for key in spec.keys}), **plan}
    return strict_object(plan)


def read_proposals(reply: str | Mapping[str, Any], prefix: str = "q") -> list[Proposal]:
    """Return the proposals of a reply in any form; those without an id get ``prefix`` and their number.

    Raises:
        PlanningError: The reply contains no plan.
    """
    items = _items_of_text(reply[:MAX_REPLY]) if isinstance(reply, str) else _items(reply)
    if items is None:
        raise PlanningError(f"the model's reply holds no plan: {one_line(str(reply)[:400], 80)!r}")
    return _proposals(items[:MAX_ITEMS], prefix)


def read_partial_plan(text: str) -> list[Proposal]:
    """Return the complete proposals of a reply that is still being streamed; the last one needs no ``finds``."""
    items: list[object] = []
    start = _FIRST_ITEM.search(text[:MAX_PARTIAL])
    while start is not None:
        position = start.end()
        try:
            item, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            last = _LAST_KEY.search(text, position)
            with suppress(ValueError, RecursionError):
                item = json.loads(text[position : last.start() if last else position].rstrip(", \n") + "}")
                items += [item] if isinstance(item, dict) and "depends_on" in item else []
            break
        items.append(item)
        start = _NEXT_ITEM.match(text, end)
    return _proposals(items)


def _items_of_text(text: str) -> list[object] | None:
    """Return the list of sub-queries in a text: JSON, repairable JSON or a numbered list; None if there is no list."""
    body = strip_code_fence(text)
    if "}\n{" in body:  # one object a line
        body = "[" + body[body.find("{") : body.rfind("}") + 1].replace("}\n{", "},\n{") + "]"
    items = _items(read_json(body, "{["))
    return items if items is not None else [query for _, query in _NUMBERED.findall(text)] or None


def _items(value: object) -> list[object] | None:
    """Return the list of sub-queries in a JSON value; None if it has no such list."""
    if isinstance(value, Mapping):
        items = _listed(value)
        return [value] if items is None and _text(_fields(value), _QUERIES) else items
    if not isinstance(value, list):
        return None
    objects = [item for item in value if isinstance(item, dict)]
    listed = next((items for item in objects if (items := _listed(item)) is not None), None)
    if listed is not None:  # several objects: the text contained more than the plan
        return listed
    return value if objects or (value and all(isinstance(item, str) for item in value)) else None


def _listed(item: Mapping[object, object]) -> list[object] | None:
    fields = _fields(item)
    for name in _LISTS:
        value = fields.get(name)
        if isinstance(value, list):
            return [*value]
        if isinstance(value, dict):
            return _listed(value)
    return None


def _proposals(items: Sequence[object], prefix: str = "q") -> list[Proposal]:
    proposals = []
    for position, item in enumerate(items, start=1):
        fields = {"query": item} if isinstance(item, str) else _fields(item) if isinstance(item, dict) else {}
        query = " ".join(_text(fields, _QUERIES)[:MAX_REPLY].split())
        numbered = _NUMBERED.match(query)
        if numbered and numbered.group(1) in (None, str(position)):  # other numbers belong to the text ("7. Symphonie")
            query = numbered.group(2)
        query = query.strip("\"'` ")
        if re.search(r"\w", query):
            name = _text(fields, ("id",)) or f"{prefix}{position}"
            finds = one_line(_text(fields, _FINDS), MAX_QUERY)
            sources, parents = _names(fields, _SOURCES), _names(fields, _DEPENDS)
            query = query[:MAX_QUERY].rstrip()
            proposals.append(Proposal(name, query, sources, parents, finds, _text(fields, _FILTERS)))
    return proposals


def _fields(item: Mapping[object, object]) -> dict[str, object]:
    """Return an object with its keys in snake case: ``subQueries`` and ``Sub-Queries`` become ``sub_queries``."""
    fields = {}
    for key, value in item.items():
        name = str(key)
        if not (name.islower() and name.isidentifier()):
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")
        fields[name] = value
    return fields


def _text(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first non-empty text under any of these keys; "" if there is none."""
    for name in names:
        if text := _as_text(fields.get(name)):
            return text
    return ""


def _names(fields: Mapping[str, object], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the names under the first of these keys with a value, which is a list or a comma-separated text."""
    for key in keys:
        value = fields.get(key)
        if isinstance(value, str):
            value = without_surrogates(value).split(",")
        if isinstance(value, list):
            return tuple(text.strip() for part in value if (text := _as_text(part)))
    return ()


def _as_text(value: object) -> str:
    """Return a string without surrogates, or an integer as text; "" for any other value."""
    if isinstance(value, str):
        return without_surrogates(value) if value.strip() else ""
    return str(value) if isinstance(value, int) and abs(value) < MAX_NUMBER else ""
