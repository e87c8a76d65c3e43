"""The planner: one language model call turns the conversation into a ``QueryPlan``.

Any reply results in a valid plan; at worst only the question is searched, in all sources, with a warning. The reply is
parsed while it is being streamed, so that each sub-query is searched as soon as it is complete.

The same call classifies the question. The verdicts come first in the reply, so they are kept if planning fails. They
depend on the user's messages only. A class without a verdict was not classified; that never means that the question
passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Final, Literal, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb import prompts
from llama_index_agentic_kb._aio import Call, deadline_after, earliest
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account import ActivityLog, current_budget, describe_error
from llama_index_agentic_kb.errors import AgenticKBError, LLMError, PlanningError
from llama_index_agentic_kb.evidence.candidates import Fusion
from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.guard.text import quoted
from llama_index_agentic_kb.llm import (
    LanguageModel,
    Reply,
    Usage,
    model_name,
    read_json,
    refuses_form,
    structured_output,
    takes_schema,
)
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.plan_graph import (
    LAST_KEY,
    MAX_REPLY,
    PlanGraph,
    Proposal,
    plain_plan,
    read_partial_plan,
    read_proposals,
)
from llama_index_agentic_kb.planning.scope import KEYS, ClassificationSpec, Scope
from llama_index_agentic_kb.schema import (
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
)
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import FanOut
from llama_index_agentic_kb.sources.filters import describe_fields

HISTORY_MESSAGES: Final = 10
HISTORY_CHARACTERS: Final = 2_000
"""How many messages before the question are in the planner's prompt, and how many characters of each."""

MAX_LOOKS: Final = 400  # maximum number of times that a reply is parsed while it is streamed, each time from its start

_EMPTY_WORDS: Final = "a all document documents file files in of source text texts the".split()
"""Words in a source's description that are no information for the planner."""

_EMPTY_BLOCK: Final = re.compile(r"^<(conversation|later_steps|found|searches)>\s*</\1>\n{0,2}", re.MULTILINE)

PART: Final = "classification"  # JSON key of the verdicts in a planner's reply
# The maximum number of characters of one set of verdicts, or of a reply that is still being streamed, that are parsed;
# and the maximum number of such sets. They bound the work on a hostile reply.
MAX_READ: Final = 8_000
MAX_PARTS: Final = 20
_PART: Final = re.compile(rf'"{PART}"\s{{0,20}}:\s{{0,20}}(?=\{{)', re.IGNORECASE)
_STARTS: Final = re.compile(r"\s{0,20}(?:```\w{0,10}\s{0,20})?\{\s{0,20}" + _PART.pattern, re.IGNORECASE)
_WORDS: Final = {"true": True, "false": False}


# -- what all calls of the planning model share --------------------------------------------------------------------

Begin: TypeAlias = Callable[[Sequence[SubQuery]], Work[None]]  # starts the search of sub-queries
Each: TypeAlias = Callable[[str, str], Work[None]]  # gets each piece of a streamed reply, and the text so far


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
            "planner_prompt": prompts.PLANNER_TEMPLATE,
            "findings_prompt": prompts.FINDINGS_TEMPLATE,
            "revision_prompt": prompts.REVISION_TEMPLATE,
            "tool_prompt": prompts.TOOL_TEMPLATE,
        }

    def messages(self, prompt: str, passages: str = "", **variables: str) -> list[ChatMessage]:
        """Return a prompt's messages with passages and sanitized variables; a block that holds nothing is left out."""
        for name, text in variables.items():
            variables[name] = prompts.as_data(text)
        made = self.prompts[prompt].format_messages(llm=self.model.llm, context_str=passages, **variables)
        for block in chain.from_iterable(map(attrgetter("blocks"), made)):
            if isinstance(block, TextBlock):
                block.text = _EMPTY_BLOCK.sub("", block.text)
        return made

    async def read(
        self, messages: Sequence[ChatMessage], each: Each, deadline: float | None, most: int = MAX_REPLY, **form: object
    ) -> Reply:
        """Return a reply of ``most`` characters; ``each`` gets nothing of a model that can't stream."""
        try:
            return await self.model.read(messages, each, deadline=deadline, max_chars=most, **form)
        except NotImplementedError:
            return await self.model.chat(messages, deadline=deadline, **form)


@dataclass(frozen=True, slots=True)
class Task:
    """The question, limits and components of one request's search."""

    scope: Scope
    effort: ReasoningEffort
    limits: EffortLimits
    model: PlanningModel | None  # plans and reads; without one, the question is searched unplanned
    fusion: Fusion  # fuses ranked lists of different corpora into the passages that the model reads
    fan_out: FanOut
    log: ActivityLog

    @property
    def call_deadline(self) -> float | None:
        """``time.monotonic()`` at which a model call that starts now is abandoned."""
        return earliest(current_budget().retrieval_deadline, deadline_after(self.limits.planning_seconds))


@dataclass(slots=True)
class ModelCall:
    """The result of one model call: its token usage, and its error if it failed. An error is reported, never raised."""

    usage: Usage = field(default_factory=Usage, kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)

    def report(self) -> JsonObject:
        """Return the fields that the activity record of the planning call gets at its end, beside usage and outcome."""
        return {}

    @contextmanager
    def recorded(
        self, log: ActivityLog, models: PlanningModel, purpose: Literal["plan", "findings", "revision", "tool"]
    ) -> Iterator[None]:
        """Record the call in the activity log; an exception of the ``with`` body is stored as the call's error."""
        name = model_name(models.model.llm)
        info = None if name is None else ModelInfo(model_name=name)
        with log.record(ModelQueryPlanningActivity, CBEventType.AGENT_STEP, model=info, purpose=purpose) as record:
            try:
                yield
            except Exception as error:  # noqa: BLE001 (any failure of a model is reported, and the search goes on)
                self.error, self.usage = error, getattr(error, "usage", None) or self.usage
            fields: JsonObject = {}
            try:
                fields = self.report()
            except Exception as error:  # noqa: BLE001 (same)
                self.error = self.error or error
            log.close(
                record,
                outcome=Outcome.OK if self.error is None else Outcome.ERROR,
                error=None if self.error is None else describe_error(self.error, name),
                input_tokens=self.usage.input_tokens,
                output_tokens=self.usage.output_tokens,
                **fields,
            )


# -- the call ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Planning(ModelCall):
    """The call that plans: while its reply is streamed, proposals are added to the plan, and searches started."""

    scope: Scope
    keys: Mapping[str, str]  # the classes that the question is checked for; see ``ClassificationSpec``
    graph: PlanGraph  # the first sub-query of its plan is always the question itself
    begin: Begin | None
    began: bool = False
    verdicts: dict[str, bool] | None = None
    looks: int = 0

    async def ask(self, models: PlanningModel, deadline: float | None) -> Reply:
        """Ask for structured output if the model supports it, or for plain text once its server has refused that."""
        messages, form = _messages(models, self), JsonObject()
        if models.structured and models.model.is_openai and takes_schema(models.model.llm):
            form = structured_output("query_plan", plan_schema(self.graph.sources, self.keys))
        try:
            return await models.read(messages, self.read, deadline, **form)
        except Exception as error:
            if not form or not refuses_form(error):
                raise
        reply = await models.read(messages, self.read, deadline)
        models.structured = False
        return reply

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply when an object or a list ends, or when the last key of a sub-query begins."""
        ends = "}" in delta or "]" in delta or LAST_KEY.search(text, max(0, len(text) - len(delta) - 15)) is not None
        if ends and self.looks < MAX_LOOKS and not self.graph.full:
            self.looks += 1
            if self.keys and self.verdicts is None:
                self.verdicts = read_verdicts(text, self.keys, whole=False)
            await self.take(read_partial_plan(text))

    def read_whole(self, reply: str) -> list[Proposal]:
        """Return the proposals of a complete reply, and store its verdicts, which are valid without a plan."""
        if self.keys:
            self.verdicts = read_verdicts(reply, self.keys) or self.verdicts
        try:
            return read_proposals(reply)
        except PlanningError:
            if self.verdicts is None:
                raise
            return []

    async def take(self, proposals: Sequence[Proposal]) -> None:
        """Add all proposals parsed so far to the plan, and start the searches that are ready."""
        if ready := self.graph.add(proposals):
            self.began = True
            if self.begin is not None:
                await self.begin(ready)

    def report(self) -> JsonObject:
        """Complete the plan, with a warning if the call failed, and return the fields of its record."""
        plan, spec = self.graph.plan, self.scope.classification
        if (error := self.error) is not None:
            kept = "what was planned by then is searched" if self.began else "the question is searched as it is"
            why = error_message(error)
            if not isinstance(error, LLMError):  # a client's own message may be a page of HTML
                name = error.code if isinstance(error, AgenticKBError) else type(error).__name__
                why = f"{name}: {one_line(why, 200)}"
            plan.warnings.append(f"planning failed, {kept}: {why}")
        self.graph.finish()
        if spec is not None:
            classify(plan, spec, self.verdicts or {})
        return {
            "warning": "; ".join(plan.warnings) or None,
            "sub_queries": list(map(attrgetter("query"), plan.sub_queries)),
            "classifications": plan.classifications,
            "labels": plan.labels or None,
        }


async def plan_searches(task: Task, models: PlanningModel, begin: Begin | None = None) -> Planning:
    """Plan the searches of a question, and classify it in the same call if the scope asks for it.

    What was parsed before a failure is kept. ``begin`` gets independent sub-queries while the reply is streamed.
    """
    scope, limits, deadline, sources = task.scope, task.limits, task.call_deadline, [*task.fan_out.selected.values()]
    keys = {} if scope.classification is None else scope.classification.keys
    planning = Planning(scope, keys, PlanGraph(plain_plan(scope, sources, limits), sources, limits), begin)
    warnings = planning.graph.plan.warnings
    if scope.history and (note := prompts.shortened(scope.history, HISTORY_MESSAGES, HISTORY_CHARACTERS)):
        warnings.append(f"in the planner's prompt, {note}")
    with planning.recorded(task.log, models, "plan"):
        reply = await planning.ask(models, deadline)
        planning.usage = reply.usage
        read = partial(planning.read_whole, reply.text)
        await planning.take(await Call(sync=read, deadline=deadline, what="reading the plan"))
        if reply.cut_short:
            warnings.append("the model ran out of tokens while planning; the plan may be incomplete")
    return planning


def _messages(models: PlanningModel, planning: Planning) -> list[ChatMessage]:
    scope, spec = planning.scope, planning.scope.classification
    sources, limits = planning.graph.sources, planning.graph.limits
    rules = prompts.DEPENDENT.format(max_rounds=limits.rounds) if limits.rounds > 1 else prompts.INDEPENDENT
    if any(map(attrgetter("source.filterable"), sources)):
        rules += f"\n- {prompts.FILTERS}"
    turns = list[str]()
    if scope.history:
        rules += f"\n- {prompts.FOLLOW_UP}"
        turns = [f"{role}: {one_line(text, HISTORY_CHARACTERS)}" for role, text in scope.history[-HISTORY_MESSAGES:]]
    rules += f"\n- {prompts.TODAY.format(today=models.today().isoformat())}"
    messages = models.messages(
        "planner_prompt",
        max_sub_queries=str(limits.sub_queries),
        dependencies=rules,
        sources=describe_sources(sources),
        conversation="\n".join(turns),
        query_str=scope.question,
    )
    if scope.retrieval_instructions:
        messages = prompts.with_instructions(messages, scope.retrieval_instructions, prompts.ON_SEARCHING)
    return messages if spec is None or not spec.keys else prompts.with_rules(messages, _classification(spec))


def _classification(spec: ClassificationSpec) -> str:
    lines, keys = [], spec.keys
    for key, name in keys.items():
        definition = prompts.CLASSES.get(key)
        if definition is None:  # the application's names can't end a line
            about = one_line(prompts.as_data(spec.labels[name]), 400)
            definition = prompts.LABEL.format(name=quoted(name)) + (f": {about}" if about else ".")
        lines.append(f'- "{key}": {definition}')
    form = json.dumps({PART: dict.fromkeys(keys, False)})[:-1] + ', "sub_queries": [...]}'
    return prompts.CLASSIFICATION.format(classes="\n".join(lines), form=form)


def describe_sources(sources: Sequence[SelectedSource]) -> str:
    """Return the sources as prompt text, one per line, with their fields for filters; no description that is empty."""
    lines = []
    for source in map(attrgetter("source"), sources):
        words = {*re.findall(r"\w+", normalize(source.description))}
        says = words.difference(re.findall(r"\w+", normalize(source.name)), _EMPTY_WORDS)
        lines.append(f"- {source.name}: {one_line(source.description, 400)}" if says else f"- {source.name}")
        lines += [f"  {line}" for line in describe_fields(source.filterable).splitlines()] if source.filterable else []
    return "\n".join(lines)


def plan_schema(sources: Sequence[SelectedSource], keys: Collection[str] = ()) -> JsonObject:
    """Return the strict JSON schema of a plan over these sources, with the verdicts of ``keys`` before it."""

    def strict(properties: JsonObject) -> JsonObject:
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    text, names = {"type": "string"}, list(map(attrgetter("name"), sources))
    sub_query: JsonObject = {
        "id": text,
        "query": text,
        "sources": {"type": "array", "items": {"type": "string", "enum": names}},
        "depends_on": {"type": "array", "items": text},
        **({"filter": text} if any(map(attrgetter("source.filterable"), sources)) else {}),
        "finds": text,
    }
    verdicts = {PART: strict({key: {"type": "boolean"} for key in keys})} if keys else {}
    return strict({**verdicts, "sub_queries": {"type": "array", "items": strict(sub_query)}})


# -- classification ------------------------------------------------------------------------------------------------


def read_verdicts(reply: str, keys: Mapping[str, str], *, whole: bool = True) -> dict[str, bool] | None:
    """Return the verdicts of a reply by key; None if it contains no clear verdict.

    A model may repeat the user's text, with fake verdicts, before its own: a class is positive if any set says so, and
    negative only if all do. While the reply is being written (``whole=False``), only its start is read.
    """
    if whole:
        parts = _parts(reply[:MAX_REPLY]) or _other_parts(reply[:MAX_REPLY])
    else:
        parts = _parts(reply[:MAX_READ]) if _STARTS.match(reply) else []
    known = {_form(name): key for key, name in keys.items()} | {_form(key): key for key in keys}
    said = [_verdicts_in(part, known) for part in parts]
    agreed = {key: _agreed([one.get(key) for one in said]) for key in keys}
    return {key: verdict for key, verdict in agreed.items() if verdict is not None} or None


def _verdicts_in(part: Mapping[str, object], known: Mapping[str, str]) -> dict[str, bool]:
    """Return the clear verdicts of a set by key, given the keys by the forms of names; of two, True counts."""
    said: dict[str, bool] = {}
    for name, value in part.items():
        verdict = _WORDS.get(value.strip().casefold()) if isinstance(value, str) else value
        if isinstance(verdict, bool) and (key := known.get(_form(name))) is not None:
            said[key] = said.get(key, False) or verdict
    return said


def _agreed(verdicts: Sequence[bool | None]) -> bool | None:
    """Return True if any verdict is True, False if there are some and all are False, else None."""
    return True if any(verdicts) else False if verdicts and None not in verdicts else None


def _parts(text: str) -> list[Mapping[str, object]]:
    """Return the complete sets of verdicts in a text; quoted JSON inside a string never matches, as it is escaped."""
    parts: list[Mapping[str, object]] = []
    decoder, position = json.JSONDecoder(), 0
    while len(parts) < MAX_PARTS and (start := _PART.search(text, position)) is not None:
        position = start.end()
        try:
            value, end = decoder.raw_decode(text[position : position + MAX_READ])
        except (ValueError, RecursionError):
            continue
        parts.append(value)
        position += end
    return parts


def _other_parts(text: str) -> list[Mapping[str, object]]:
    """Return the sets of verdicts in JSON that has to be repaired, or whose keys are written otherwise."""
    value = read_json(text)
    values = value if isinstance(value, list) else [value]
    return [item[PART] for item in values if isinstance(item, dict) and isinstance(item.get(PART), dict)]


def _form(name: str) -> str:
    """Normalize a class name: ``jailBreakingQuery``, ``JAIL_BREAKING_QUERY`` and ``jail-breaking`` are the same."""
    return re.sub(r"[\W_]+", "", normalize(str(name)[:400])).removesuffix("query")


def classify(plan: QueryPlan, spec: ClassificationSpec, verdicts: Mapping[str, bool]) -> None:
    """Set a plan's ``classifications`` (None without a verdict) and ``labels``; warn of classes without a verdict."""
    judged = {item: verdicts[KEYS[item]] for item in spec.types if KEYS.get(item) in verdicts}
    labels = {name: verdicts.get(key) for key, name in spec.keys.items() if key not in prompts.CLASSES}
    plan.labels = list(filter(labels.get, labels))
    fits_any = _agreed([*labels.values()])
    if fits_any is not None:
        judged[QueryClass.USER_DEFINED_CLASSIFICATION_QUERY] = fits_any
    plan.classifications = [QueryClassification(type=item, positive=fits) for item, fits in judged.items()] or None
    lacking = [item.value for item in spec.types if item not in judged]
    lacking += [f"label {quoted(name)!r}" for name, fits in labels.items() if fits is None]
    if lacking:
        plan.warnings.append(f"the question was not classified as to: {', '.join(lacking)}")
