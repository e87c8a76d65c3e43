"""The planner: one language model call turns the conversation into a ``QueryPlan``.

Whatever the model writes ends in a sane plan; at worst the question alone goes to all sources, with a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import AgenticKBError, LLMError, PlanningError
from llama_index_agentic_kb.llm import LanguageModel, Reply, Usage, is_function_calling, refuses_form, structured_output
from llama_index_agentic_kb.planning.classification import (
    PART,
    ClassificationSpec,
    Verdicts,
    asking_for_classes,
    classification_schema,
    classify,
    read_verdicts,
    wanted,
)
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.graph import Candidate, PlanGraph, plain_plan
from llama_index_agentic_kb.planning.parsing import MAX_REPLY, Proposal, plan_schema, read_begun, read_proposals
from llama_index_agentic_kb.planning.plan_tool import plan_tool
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.prompts import DEPENDENT, FILTERS, INDEPENDENT, PLANNER_TEMPLATE, as_data
from llama_index_agentic_kb.schema import (
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    SubQuery,
)
from llama_index_agentic_kb.sources.planner_filters import describe_fields

__all__ = ["Begin", "Planner", "Planning", "describe_sources"]


@dataclass(slots=True)
class Planning:
    """What planning gave.

    Args:
        plan: Never without the question's own lane.
        usage: What the call billed.
        error: Why the model's plan was not used; None where it was.
    """

    plan: QueryPlan
    usage: Usage = field(default_factory=Usage)
    error: Exception | None = None


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
        sources: Sequence[Candidate],
        limits: EffortLimits,
        *,
        deadline: float | None,
        log: ActivityLog,
        begin: Begin | None = None,
    ) -> Planning:
        """Plan as ``plan`` does, with a record in the request's account."""
        name = self.model.name
        record = log.open(
            ModelQueryPlanningActivity,
            CBEventType.AGENT_STEP,
            model=None if name is None else ModelInfo(model_name=name),
        )
        try:
            planning = await self.plan(scope, sources, limits, deadline=deadline, begin=begin)
        except asyncio.CancelledError:
            log.cancel(record)
            raise
        log.close(
            record,
            outcome=Outcome.OK if planning.error is None else Outcome.ERROR,
            error=None if planning.error is None else describe_error(planning.error, name),
            warning="; ".join(planning.plan.warnings) or None,
            input_tokens=planning.usage.input_tokens,
            output_tokens=planning.usage.output_tokens,
            sub_queries=[sub_query.query for sub_query in planning.plan.sub_queries],
            classifications=planning.plan.classifications,
            labels=planning.plan.labels or None,
        )
        return planning

    async def plan(
        self,
        scope: Scope,
        sources: Sequence[Candidate],
        limits: EffortLimits,
        *,
        deadline: float | None,
        begin: Begin | None = None,
    ) -> Planning:
        """Plan the searches of a question, and classify it in the same call where that is asked for.

        What was classified is kept where the rest of the call fails, as sub-queries are that were read by then.

        Args:
            scope: Question and conversation, and what it is to be classified as.
            sources: Those that may be searched, in declaration order.
            limits: How many sub-queries, sources and waves.
            deadline: ``time.monotonic()`` at which planning is given up.
            begin: A flow that is given sub-queries as soon as they can be searched, while the model still writes;
                those that build on others are never among them.
        """
        planning = Planning(plain_plan(scope, sources))
        graph = PlanGraph(planning.plan, sources, limits)
        spec = wanted(scope.classification)
        intake = _Intake(graph, begin or _leave, spec)
        try:
            reply = await self._ask(self._messages(scope, sources, limits), intake, sources, deadline)
            planning.usage = reply.usage
            read = partial(intake.read_whole, reply.tool_arguments or reply.text)
            await intake.take(await Call(sync=read, deadline=deadline, what="reading the plan"))
            if reply.cut_short:
                planning.plan.warnings.append("the model ran out of tokens while planning; the plan may be incomplete")
        except Exception as error:  # noqa: BLE001 (any failure of a model ends in a sane plan, and is told)
            planning.error = error
            if isinstance(error, LLMError) and error.usage is not None:
                planning.usage = error.usage
            kept = "what was planned by then is searched" if intake.began else "the question is searched as it is"
            planning.plan.warnings.append(f"planning failed, {kept}: {_reason(error)}")
        graph.finish()
        classify(planning.plan, scope.classification, intake.verdicts)
        return planning

    async def _ask(
        self, messages: list[ChatMessage], intake: _Intake, sources: Sequence[Candidate], deadline: float | None
    ) -> Reply:
        """Ask in the strictest form that the model has; where its server refuses the form, in plain text.

        It is remembered when the same question was taken as plain text: then the form was what the server refused.
        """
        if not self._structured:
            return await self._read(messages, intake, deadline)
        try:
            return await self._ask_structured(messages, intake, sources, deadline)
        except Exception as error:
            if not refuses_form(error):
                raise
        reply = await self._read(messages, intake, deadline)
        self._structured = False
        return reply

    async def _read(self, messages: list[ChatMessage], intake: _Intake, deadline: float | None, **form: Any) -> Reply:
        """Read the plan as it is written; a model that can't stream is asked for the whole."""
        try:
            return await self.model.read(messages, intake.read, deadline=deadline, at_most=MAX_REPLY, **form)
        except NotImplementedError:
            return await self.model.chat(messages, deadline=deadline, **form)

    async def _ask_structured(
        self, messages: list[ChatMessage], intake: _Intake, sources: Sequence[Candidate], deadline: float | None
    ) -> Reply:
        spec = intake.spec
        first = None if spec is None else {PART: classification_schema(spec)}
        names = [source.name for source in sources]
        schema = structured_output(
            self.model.llm, "query_plan", plan_schema(names, filters=_filterable(sources), first=first)
        )
        if schema is not None:
            return await self._read(messages, intake, deadline, **schema)
        if is_function_calling(self.model.llm):
            return await self.model.call_tool(messages, plan_tool(spec), deadline=deadline)
        return await self._read(messages, intake, deadline)

    def _messages(self, scope: Scope, sources: Sequence[Candidate], limits: EffortLimits) -> list[ChatMessage]:
        waves = DEPENDENT.format(max_waves=limits.waves) if limits.waves > 1 else INDEPENDENT
        turns = [f"{role}: {one_line(text, 2_000)}" for role, text in scope.history[-limits.history_messages :]]
        messages = self.template.format_messages(
            llm=self.model.llm,
            max_sub_queries=str(limits.sub_queries),
            dependencies=f"{waves}\n- {FILTERS}" if _filterable(sources) else waves,
            sources=as_data(describe_sources(sources)),
            conversation=as_data("\n".join([*turns, f"user: {scope.question}"])),
            query_str=as_data(scope.question),
        )
        return asking_for_classes(messages, wanted(scope.classification))


MAX_LOOKS: Final = 400
"""How often a reply is looked into while it is written, each time from its start: about 20 times a sub-query."""

_MARKS: Final = frozenset('"}]')


class _Intake:
    """Takes the proposals of a reply as they are written, and has begun what can be searched."""

    def __init__(self, graph: PlanGraph, begin: Begin, spec: ClassificationSpec | None) -> None:
        self.began = False
        self.spec = spec
        self.verdicts: Verdicts | None = None
        self._looks = 0
        self._graph = graph
        self._begin = begin

    async def read(self, delta: str, text: str) -> None:
        """Look into the reply where a key begins, or an object or a list ends."""
        if not _MARKS.isdisjoint(delta) and self._looks < MAX_LOOKS and not self._graph.full:
            self._looks += 1
            if self.spec is not None and self.verdicts is None:
                self.verdicts = read_verdicts(text, self.spec, whole=False)
            await self.take(read_begun(text))

    def read_whole(self, reply: str | dict[str, Any]) -> list[Proposal]:
        """Read verdicts and proposals of a reply that has ended.

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
            await self._begin(ready)


def describe_sources(sources: Sequence[Candidate]) -> str:
    """Give sources as they stand in a prompt, one a line, each with the fields that a filter may use."""
    lines = []
    for source in sources:
        lines.append(f"- {source.name}: {one_line(source.description, 400) or 'no description'}")
        lines += [f"  {line}" for line in describe_fields(source.fields).splitlines()]
    return "\n".join(lines)


def _filterable(sources: Sequence[Candidate]) -> bool:
    return any(source.fields for source in sources)


async def _leave(_: Sequence[SubQuery]) -> None:
    """Begin nothing."""


def _reason(error: Exception) -> str:
    """Give a failure in a few words; a client's own message may be a page of HTML."""
    if isinstance(error, LLMError):
        return error_message(error)
    name = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return f"{name}: {one_line(error_message(error), 200)}"
