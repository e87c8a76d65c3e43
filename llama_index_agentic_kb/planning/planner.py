"""The planner: one language model call turns the conversation into a ``QueryPlan``.

Whatever the model writes ends in a sane plan; at worst the question alone goes to all sources, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import AgenticKBError, LLMError, PlanningError
from llama_index_agentic_kb.llm import LanguageModel, Reply, refuses_form, structured_output
from llama_index_agentic_kb.planning.classification import (
    PART,
    ClassificationSpec,
    ask_for_classes,
    classification_schema,
    classify,
    read_verdicts,
    requested,
)
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.model_calls import ModelCall, model_record
from llama_index_agentic_kb.planning.parsing import (
    MAX_REPLY,
    Proposal,
    plan_schema,
    read_partial_plan,
    read_proposals,
)
from llama_index_agentic_kb.planning.plan_graph import PlanGraph, PlannerSource, plain_plan
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.prompts import DEPENDENT, FILTERS, INDEPENDENT, PLANNER_TEMPLATE, as_data
from llama_index_agentic_kb.schema import QueryPlan, SubQuery
from llama_index_agentic_kb.sources.planner_filters import describe_fields

__all__ = ["Begin", "Planner", "Planning", "describe_sources"]

HISTORY_MESSAGES: Final = 10
"""Messages before the question that the planner reads: what a question leaves out stands in the last few."""

MAX_LOOKS: Final = 400
"""How often a reply is parsed while it is written, each time from its start: about 20 times a sub-query."""

_LAST_KEY: Final = re.compile(r'"finds"\s{0,3}:\s{0,3}"')
"""Begins the last key of a sub-query, which no search needs."""


@dataclass(slots=True)
class Planning(ModelCall):
    """What planning gave.

    Args:
        plan: Its first sub-query is always the question itself.
        usage: What the call billed.
        error: Why the model's plan was not used; None where it was.
    """

    plan: QueryPlan


Begin: TypeAlias = Callable[[Sequence[SubQuery]], Coroutine[Any, Any, None]]
"""What is done with sub-queries that can be searched."""


class Planner:
    """Plans searches with a language model.

    Args:
        model: The language model.
        template: The prompt; its variables are ``max_sub_queries``, ``sources``, ``conversation`` and ``query_str``.
    """

    def __init__(self, model: LanguageModel, template: BasePromptTemplate | None = None) -> None:
        self.model = model
        self.template = template or PLANNER_TEMPLATE
        self._structured = True  # until the server refuses it

    async def recorded_plan(
        self,
        scope: Scope,
        sources: Sequence[PlannerSource],
        limits: EffortLimits,
        *,
        deadline: float | None,
        log: ActivityLog,
        begin: Begin | None = None,
    ) -> Planning:
        """Plan as ``plan`` does, with a record in the request's account."""
        with model_record(log, self.model, "plan") as record:
            planning = await self.plan(scope, sources, limits, deadline=deadline, begin=begin)
            plan = planning.plan
            planning.close(
                log,
                record,
                warning="; ".join(plan.warnings) or None,
                sub_queries=[sub_query.query for sub_query in plan.sub_queries],
                classifications=plan.classifications,
                labels=plan.labels or None,
            )
        return planning

    async def plan(
        self,
        scope: Scope,
        sources: Sequence[PlannerSource],
        limits: EffortLimits,
        *,
        deadline: float | None,
        begin: Begin | None = None,
    ) -> Planning:
        """Plan the searches of a question, and classify it in the same call where that is asked for.

        Verdicts and sub-queries that were read before a failure are kept.

        Args:
            scope: Question and conversation, and what it is to be classified as.
            sources: Those that may be searched, in declaration order.
            limits: How many sub-queries and rounds.
            deadline: ``time.monotonic()`` at which planning is given up.
            begin: Awaited with sub-queries as soon as they can be searched, while the model still writes; those that
                build on others are never among them.
        """
        planning = Planning(plain_plan(scope, sources))
        plan = planning.plan
        graph = PlanGraph(plan, sources, limits)
        intake = _Intake(graph, begin, requested(scope.classification))
        try:
            reply = await self._ask(self._messages(scope, sources, limits), intake, sources, deadline)
            planning.usage = reply.usage
            read = partial(intake.read_whole, reply.text)
            await intake.take(await Call(sync=read, deadline=deadline, what="reading the plan"))
            if reply.cut_short:
                plan.warnings.append("the model ran out of tokens while planning; the plan may be incomplete")
        except Exception as error:  # noqa: BLE001 (any failure of a model ends in a sane plan, and is reported)
            planning.fail(error)
            kept = "what was planned by then is searched" if intake.began else "the question is searched as it is"
            plan.warnings.append(f"planning failed, {kept}: {_reason(error)}")
        graph.finish()
        classify(plan, scope.classification, intake.verdicts)
        return planning

    async def _ask(
        self, messages: list[ChatMessage], intake: _Intake, sources: Sequence[PlannerSource], deadline: float | None
    ) -> Reply:
        """Ask for structured output where the model has it; where its server refuses the form, for plain text.

        The refusal is remembered once the same question was answered as plain text: then it was the form that the
        server refused.
        """
        form = self._form(intake.spec, sources) if self._structured else None
        if form is not None:
            try:
                return await self._read(messages, intake, deadline, **form)
            except Exception as error:
                if not refuses_form(error):
                    raise
        reply = await self._read(messages, intake, deadline)
        self._structured = self._structured and form is None
        return reply

    def _form(self, spec: ClassificationSpec | None, sources: Sequence[PlannerSource]) -> dict[str, Any] | None:
        """Return the arguments that ask the model for a plan's JSON schema; None where it knows no such thing."""
        first = None if spec is None else {PART: classification_schema(spec)}
        schema = plan_schema([source.name for source in sources], filters=_filterable(sources), first=first)
        return structured_output(self.model.llm, "query_plan", schema)

    async def _read(self, messages: list[ChatMessage], intake: _Intake, deadline: float | None, **form: Any) -> Reply:
        """Read the plan as it is written; a model that can't stream is asked for the whole."""
        try:
            return await self.model.read(messages, intake.read, deadline=deadline, max_chars=MAX_REPLY, **form)
        except NotImplementedError:
            return await self.model.chat(messages, deadline=deadline, **form)

    def _messages(self, scope: Scope, sources: Sequence[PlannerSource], limits: EffortLimits) -> list[ChatMessage]:
        rules = DEPENDENT.format(max_rounds=limits.rounds) if limits.rounds > 1 else INDEPENDENT
        turns = [f"{role}: {one_line(text, 2_000)}" for role, text in scope.history[-HISTORY_MESSAGES:]]
        messages = self.template.format_messages(
            llm=self.model.llm,
            max_sub_queries=str(limits.sub_queries),
            dependencies=f"{rules}\n- {FILTERS}" if _filterable(sources) else rules,
            sources=as_data(describe_sources(sources)),
            conversation=as_data("\n".join([*turns, f"user: {scope.question}"])),
            query_str=as_data(scope.question),
        )
        return ask_for_classes(messages, requested(scope.classification))


class _Intake:
    """Takes the proposals of a reply as they are written, and begins what can be searched."""

    def __init__(self, graph: PlanGraph, begin: Begin | None, spec: ClassificationSpec | None) -> None:
        self.began = False
        self.spec = spec
        self.verdicts: dict[str, bool] | None = None
        self._looks = 0
        self._graph = graph
        self._begin = begin

    async def read(self, delta: str, text: str) -> None:
        """Parse the reply where an object or a list ends, or the last key of a sub-query begins."""
        ends = "}" in delta or "]" in delta or _LAST_KEY.search(text, max(0, len(text) - len(delta) - 15)) is not None
        if ends and self._looks < MAX_LOOKS and not self._graph.full:
            self._looks += 1
            if self.spec is not None and self.verdicts is None:
                self.verdicts = read_verdicts(text, self.spec, whole=False)
            await self.take(read_partial_plan(text))

    def read_whole(self, reply: str) -> list[Proposal]:
        """Return the proposals of a reply that has ended, and keep its verdicts.

        Some models say no more of a question than what is wrong with it: that is no failure.

        Raises:
            PlanningError: There is neither a plan nor a verdict in it.
        """
        if self.spec is not None:
            self.verdicts = read_verdicts(reply, self.spec) or self.verdicts
        try:
            return read_proposals(reply)
        except PlanningError:
            if self.verdicts is None:
                raise
            return []

    async def take(self, proposals: Sequence[Proposal]) -> None:
        """Take all proposals that were read so far."""
        ready = self._graph.add(proposals)
        if ready:
            self.began = True
            if self._begin is not None:
                await self._begin(ready)


def describe_sources(sources: Sequence[PlannerSource]) -> str:
    """Return sources as they stand in a prompt, one a line, each with the fields that a filter may use."""
    lines = []
    for source in sources:
        lines.append(f"- {source.name}: {one_line(source.description, 400) or 'no description'}")
        lines += [f"  {line}" for line in describe_fields(source.fields).splitlines()]
    return "\n".join(lines)


def _filterable(sources: Sequence[PlannerSource]) -> bool:
    return any(source.fields for source in sources)


def _reason(error: Exception) -> str:
    """Return a failure in a few words; a client's own message may be a page of HTML."""
    if isinstance(error, LLMError):
        return error_message(error)
    name = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return f"{name}: {one_line(error_message(error), 200)}"
