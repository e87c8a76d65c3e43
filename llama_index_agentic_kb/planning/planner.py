"""The planner: one language model call turns the conversation into a ``QueryPlan``.

Whatever the model writes ends in a sane plan; at worst the question alone goes to all sources, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from llama_index_agentic_kb._flow import Call, Flow
from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import AgenticKBError, LLMError
from llama_index_agentic_kb.llm import LanguageModel, Reply, Usage, is_function_calling, refuses_form, structured_output
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.parsing import Proposal, plan_schema, read_proposals
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.prompts import PLANNER_TEMPLATE, as_data
from llama_index_agentic_kb.schema import (
    ModelInfo,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    SubQuery,
    SubQueryOrigin,
)

__all__ = ["Candidate", "Planner", "Planning", "plain_plan"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source as the planner sees it."""

    name: str
    description: str
    always: bool = False


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


class _PlannedQuery(BaseModel):
    id: str = Field(description="q1, q2, ...")
    query: str = Field(description="One standalone search.")
    sources: list[str] = Field(description="Names of the sources to search.")
    depends_on: list[str] = Field(default_factory=list, description="Ids of the sub-queries that it builds on.")


class _Plan(BaseModel):
    sub_queries: list[_PlannedQuery]


def _submit_plan(**_: Any) -> None:
    """Never runs: the call's arguments are what is wanted."""


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

    def recorded_plan(
        self,
        scope: Scope,
        sources: Sequence[Candidate],
        limits: EffortLimits,
        *,
        deadline: float | None,
        log: ActivityLog,
    ) -> Flow[Planning]:
        """Plan as ``plan`` does, with a record in the request's account."""
        name = self.model.name
        record = log.open(
            ModelQueryPlanningActivity,
            CBEventType.AGENT_STEP,
            model=None if name is None else ModelInfo(model_name=name),
        )
        try:
            planning = yield from self.plan(scope, sources, limits, deadline=deadline)
        except GeneratorExit:
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
        )
        return planning

    def plan(
        self, scope: Scope, sources: Sequence[Candidate], limits: EffortLimits, *, deadline: float | None
    ) -> Flow[Planning]:
        """Plan the searches of a question.

        Args:
            scope: Question and conversation.
            sources: Those that may be searched, in declaration order.
            limits: How many sub-queries and sources.
            deadline: ``time.monotonic()`` at which planning is given up.
        """
        planning = Planning(plain_plan(scope, sources))
        messages = self._messages(scope, sources, limits)
        try:
            reply = yield from self._ask(messages, [source.name for source in sources], deadline)
            planning.usage = reply.usage
            read = partial(read_proposals, reply.tool_arguments or reply.text)
            proposals = yield Call(sync=read, deadline=deadline, what="reading the plan")
        except Exception as error:  # noqa: BLE001 (any failure of a model ends in the plain plan, and is told)
            planning.error = error
            if isinstance(error, LLMError) and error.usage is not None:
                planning.usage = error.usage
            planning.plan.warnings.append(f"planning failed, the question is searched as it is: {_reason(error)}")
            return planning
        if reply.cut_short:
            planning.plan.warnings.append("the model ran out of tokens while planning; the plan may be incomplete")
        _add(planning.plan, proposals, sources, limits)
        return planning

    def _ask(self, messages: list[ChatMessage], sources: list[str], deadline: float | None) -> Flow[Reply]:
        """Ask in the strictest form that the model has; where its server refuses the form, in plain text.

        It is remembered when the same question was taken as plain text: then the form was what the server refused.
        """
        if not self._structured:
            return (yield from self.model.chat(messages, deadline=deadline))
        try:
            return (yield from self._ask_structured(messages, sources, deadline))
        except Exception as error:
            if not refuses_form(error):
                raise
        reply = yield from self.model.chat(messages, deadline=deadline)
        self._structured = False
        return reply

    def _ask_structured(self, messages: list[ChatMessage], sources: list[str], deadline: float | None) -> Flow[Reply]:
        schema = structured_output(self.model.llm, "query_plan", plan_schema(sources))
        if schema is not None:
            return (yield from self.model.chat(messages, deadline=deadline, **schema))
        if is_function_calling(self.model.llm):
            tool = FunctionTool.from_defaults(
                fn=_submit_plan, name="query_plan", description="Submit the plan.", fn_schema=_Plan
            )
            return (yield from self.model.call_tool(messages, tool, deadline=deadline))
        return (yield from self.model.chat(messages, deadline=deadline))

    def _messages(self, scope: Scope, sources: Sequence[Candidate], limits: EffortLimits) -> list[ChatMessage]:
        described = [f"- {source.name}: {one_line(source.description, 400) or 'no description'}" for source in sources]
        turns = [f"{role}: {one_line(text, 2_000)}" for role, text in scope.history[-limits.history_messages :]]
        return self.template.format_messages(
            llm=self.model.llm,
            max_sub_queries=str(limits.sub_queries),
            sources=as_data("\n".join(described)),
            conversation=as_data("\n".join([*turns, f"user: {scope.question}"])),
            query_str=as_data(scope.question),
        )


def plain_plan(scope: Scope, sources: Sequence[Candidate], limits: EffortLimits | None = None) -> QueryPlan:
    """Give the plan without a model: each intent, or else the question, to all sources."""
    names = [source.name for source in sources]
    if not scope.intents:
        question = SubQuery(id="q0", query=scope.question, sources=names, origin=SubQueryOrigin.QUESTION)
        return QueryPlan(sub_queries=[question])
    by_form: dict[str, str] = {}
    for intent in scope.intents:
        by_form.setdefault(normalize(intent), intent)
    distinct = list(by_form.values())
    allowed = distinct if limits is None else distinct[: limits.sub_queries]
    plan = QueryPlan(
        sub_queries=[
            SubQuery(id=f"q{position}", query=intent, sources=names, origin=SubQueryOrigin.INTENT)
            for position, intent in enumerate(allowed)
        ]
    )
    if len(allowed) < len(distinct):
        plan.warnings.append(f"{len(distinct)} intents were cut to {len(allowed)} (EffortLimits.sub_queries)")
    return plan


def _add(plan: QueryPlan, proposals: list[Proposal], sources: Sequence[Candidate], limits: EffortLimits) -> None:
    """Add proposals to a plan: each query once, known sources only, within the limits."""
    question = normalize(plan.sub_queries[0].query)
    ids: dict[str, str] = {}
    taken: dict[str, SubQuery] = {}
    cut = 0
    for proposal in proposals:
        key = normalize(proposal.query)
        names = _known_sources(proposal, sources, limits, plan.warnings)
        if key == question:
            ids[proposal.id] = plan.sub_queries[0].id
        elif key in taken:
            ids[proposal.id] = taken[key].id
            merged = set(taken[key].sources) | set(names)
            taken[key].sources = [source.name for source in sources if source.name in merged]
        elif len(taken) >= limits.sub_queries:
            cut += 1
        else:
            sub_query = SubQuery(id=f"q{len(taken) + 1}", query=proposal.query, sources=names)
            ids[proposal.id] = sub_query.id
            taken[key] = sub_query
            sub_query.depends_on = list(proposal.depends_on)
    plan.sub_queries.extend(taken.values())
    _resolve_dependencies(list(taken.values()), ids, plan.warnings)
    if cut:
        plan.warnings.append(f"{cut} sub-queries over the limit of {limits.sub_queries} were left out")


def _known_sources(
    proposal: Proposal, sources: Sequence[Candidate], limits: EffortLimits, warnings: list[str]
) -> list[str]:
    """Give the sources of a proposal in declaration order: those it names and those that are always searched."""
    named = {normalize(name) for name in proposal.sources}
    known = [source for source in sources if normalize(source.name) in named]
    unknown = named - {normalize(source.name) for source in known}
    if unknown:
        warnings.append(f"the plan names unknown sources, which were left out: {one_line(', '.join(sorted(unknown)))}")
    chosen = (known or list(sources))[: limits.sources]
    return [source.name for source in sources if source.always or source in chosen]


def _resolve_dependencies(sub_queries: list[SubQuery], ids: dict[str, str], warnings: list[str]) -> None:
    """Keep dependencies on earlier sub-queries only: unknown parents and cycles are dropped, with a warning."""
    earlier: set[str] = set()
    for sub_query in sub_queries:
        parents = dict.fromkeys(ids.get(parent, "") for parent in sub_query.depends_on)
        kept = [parent for parent in parents if parent in earlier]
        dropped = [parent for parent in parents if parent not in earlier and parent != "q0"]
        if dropped:
            warnings.append(f"{sub_query.id} depends on sub-queries that don't come before it; searched without them")
        sub_query.depends_on = kept
        earlier.add(sub_query.id)


def _reason(error: Exception) -> str:
    """Give a failure in a few words; a client's own message may be a page of HTML."""
    if isinstance(error, LLMError):
        return str(error)
    name = error.code if isinstance(error, AgenticKBError) else type(error).__name__
    return f"{name}: {one_line(str(error), 200)}"
