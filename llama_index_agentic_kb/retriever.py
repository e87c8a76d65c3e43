"""The agentic retriever: scope, plan, fan out over sources, fuse, postprocess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.indices.base import BaseIndex
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._flow import Call, Flow, Start, Wait, arun, run
from llama_index_agentic_kb.account import ActivityLog, Budget, GuardedCallbacks
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.llm import LanguageModel, resolve_llm
from llama_index_agentic_kb.planning import DEFAULT_LIMITS, EffortLimits, Planner, Scope
from llama_index_agentic_kb.planning.planner import Candidate, plain_plan
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    Message,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    QueryPlan,
    ReasoningEffort,
    Reference,
    RetrievalRequest,
)
from llama_index_agentic_kb.search.fusion import interleave
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.evidence import Fusion, gather_evidence, references
from llama_index_agentic_kb.sources.fan_out import FanOut, Lane, missing_parts, raise_if_lost
from llama_index_agentic_kb.sources.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.selection import SelectedSource, as_source, by_name, select

__all__ = ["AgenticRetriever", "Retrieval"]


@dataclass(slots=True)
class Retrieval:
    """What a retrieval gave, and its account so far.

    Args:
        nodes: The evidence, best first.
        plan: What was searched.
        log: The request's account; later stages add to it.
        budget: The request's budget; later stages spend what is left.
        missing: What was wanted and could not be had.
        selected: The sources that were allowed, by name.
        scope: The question and its conversation.
    """

    nodes: list[NodeWithScore]
    plan: QueryPlan
    log: ActivityLog
    budget: Budget
    missing: list[MissingPart] = field(default_factory=list)
    selected: Mapping[str, SelectedSource] = field(default_factory=dict)
    scope: Scope = field(default_factory=lambda: Scope(""))

    @property
    def references(self) -> list[Reference]:
        """The references of the nodes as they stand."""
        return references(self.nodes, self.selected)


class AgenticRetriever(GuardedCallbacks, BaseRetriever):
    """Decomposes a question with a language model and searches several knowledge sources side by side.

    A drop-in ``BaseRetriever``: chat engines, query engines and tools take it as it is. Without a language model it
    searches the question itself at every source.

    Args:
        sources: What to search; names must differ.
        llm: Plans. None is ``Settings.llm`` where one is set or an OpenAI key is there, else none.
        effort: How hard to think unless a request says. Default low.
        similarity_top_k: Nodes that a retrieval gives, and that each search gives at least; None is the effort's.
        filters: Narrows every source's search, beside the source's own mandatory filter.
        node_postprocessors: Applied to the fused nodes before they are cut to their number.
        memory: A memory shared with a chat engine: the conversation that a question belongs to.
        limits: Limits by effort, in place of ``DEFAULT_LIMITS``.
        fusion: How ranked lists are fused. Default ``interleave``.
        max_runtime_in_seconds: Deadline of a retrieval unless a request says. Default 90; None is no limit.
        planner_prompt: In place of the planner's template (also through ``update_prompts``).
        observer: Called with each activity record when it is opened and when it is closed.
        callback_manager: None is ``Settings.callback_manager``. Handlers that raise are logged, no more.
        verbose: Handed to LlamaIndex.

    Raises:
        ConfigurationError: No source is given, or a name twice.
    """

    def __init__(
        self,
        sources: Sequence[KnowledgeSource],
        *,
        llm: LLM | None = None,
        effort: ReasoningEffort | str = ReasoningEffort.LOW,
        similarity_top_k: int | None = None,
        filters: FilterLike = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        memory: BaseMemory | None = None,
        limits: Mapping[ReasoningEffort, EffortLimits] | None = None,
        fusion: Fusion = interleave,
        max_runtime_in_seconds: float | None = 90.0,
        planner_prompt: BasePromptTemplate | None = None,
        observer: Callable[[ActivityRecord], None] | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        self.sources = by_name(sources)
        self.effort = _effort(effort)
        self.similarity_top_k = _positive("similarity_top_k", similarity_top_k, int)
        self.filters = to_tree(filters)
        self.node_postprocessors = list(node_postprocessors)
        self.memory = memory
        self.limits = _limits(limits)
        self.fusion = fusion
        self.max_runtime_in_seconds = _positive("max_runtime_in_seconds", max_runtime_in_seconds)
        self.observer = observer
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.callback_manager = callback_manager
        self.llm = resolve_llm(llm)
        self._planner: Planner | None = None
        if self.llm is not None:
            self._planner = Planner(LanguageModel(self.llm, lambda: self.callback_manager), planner_prompt)

    @classmethod
    def from_defaults(
        cls,
        sources: Sequence[KnowledgeSource | BaseRetriever | BaseIndex[Any]] | BaseIndex[Any] | BaseRetriever,
        **kwargs: Any,
    ) -> Self:
        """Make one from an index, a retriever, or a list of them.

        Args:
            sources: What is no ``KnowledgeSource`` becomes one, named "source_1", "source_2", ...; retrievers that
                are wrapped in tools or need filters are better described by hand.
            kwargs: See the class.
        """
        given = list(sources) if isinstance(sources, Sequence) else [sources]
        return cls([as_source(one, position) for position, one in enumerate(given, start=1)], **kwargs)

    # -- LlamaIndex ------------------------------------------------------------------------------------------------

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return run(self.retrieval(self.request_for(query_bundle), bundle=query_bundle)).nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return (await arun(self.retrieval(self.request_for(query_bundle), bundle=query_bundle))).nodes

    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Index nodes were followed at their sources, a bounded number of times; nothing is left to do."""
        del query_bundle
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        del query_bundle
        return nodes

    def _get_prompts(self) -> PromptDictType:
        return {} if self._planner is None else {"planner_prompt": self._planner.template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if self._planner is not None and "planner_prompt" in prompts:
            self._planner.template = prompts["planner_prompt"]

    def request_for(self, query: str | QueryBundle) -> RetrievalRequest:
        """Give the request that a plain question stands for."""
        text = query if isinstance(query, str) else query.query_str
        if not text.strip():
            raise InvalidRequestError("query: the question is empty")
        return RetrievalRequest(messages=[Message.model_validate({"role": "user", "content": text})])

    # -- the way of a query ----------------------------------------------------------------------------------------

    def retrieval(
        self,
        request: RetrievalRequest,
        *,
        bundle: QueryBundle | None = None,
        answer_share: float = 0.05,
        observer: Callable[[ActivityRecord], None] | None = None,
    ) -> Flow[Retrieval]:
        """Scope, plan, fan out, fuse and postprocess.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the question's lane.
            answer_share: The part of the time that is kept for what comes after.
            observer: In place of the retriever's own.

        Raises:
            InvalidRequestError: The request names an unknown source, or leaves none.
            RetrievalError: Every search failed, or one whose source has ``failOnError``.
        """
        effort = request.retrieval_reasoning_effort or self.effort
        limits = self.limits[effort]
        budget = Budget.start(
            request.max_runtime_in_seconds or self.max_runtime_in_seconds,
            answer_share=answer_share,
            output_tokens=request.max_output_size_in_tokens,
            output_documents=request.max_output_documents,
        )
        log = ActivityLog(self.callback_manager, observer or self.observer)
        selected = select(self.sources, request, self.filters)
        memory = yield from self._remember(request.question, budget.retrieval_stage(limits.planning_seconds))
        scope = Scope.of(request, memory)
        fan_out = FanOut(
            selected,
            log,
            budget,
            top_k=max(limits.documents_per_search, self.similarity_top_k or 0, *_asked_documents(request)),
            search_seconds=limits.search_seconds,
            bundle=bundle,
        )
        plan, lanes = yield from self._search(scope, fan_out, effort, limits, budget, log)
        raise_if_lost(lanes)
        retrieval = Retrieval([], plan, log, budget, missing_parts(lanes), selected, scope)
        yield from self._reason(retrieval, lanes, limits, effort, bundle or QueryBundle(request.question))
        return retrieval

    def _remember(self, question: str, deadline: float | None) -> Flow[list[Any]]:
        """Read the shared memory as LlamaIndex's chat engines do: some memories look up what the question is about."""
        if self.memory is None:
            return []
        read, aread = partial(self.memory.get, input=question), partial(self.memory.aget, input=question)
        return list((yield Call(sync=read, native=aread, deadline=deadline, what="memory")))

    def _search(
        self,
        scope: Scope,
        fan_out: FanOut,
        effort: ReasoningEffort,
        limits: EffortLimits,
        budget: Budget,
        log: ActivityLog,
    ) -> Flow[tuple[QueryPlan, list[Lane]]]:
        """Plan and search; the question itself, which every plan holds, is searched while the model plans."""
        candidates = [
            Candidate(name, chosen.source.description, chosen.always) for name, chosen in fan_out.selected.items()
        ]
        plain = plain_plan(scope, candidates, limits)
        if self._planner is None or effort is ReasoningEffort.MINIMAL or scope.intents:
            return plain, (yield from fan_out.search(plain))
        deadline = budget.retrieval_stage(limits.planning_seconds)
        planning = yield Start(self._planner.recorded_plan(scope, candidates, limits, deadline=deadline, log=log))
        question = yield Start(fan_out.search(plain))
        yield Wait([planning])
        plan: QueryPlan = planning.result().plan
        added = yield from fan_out.search(QueryPlan(sub_queries=plan.sub_queries[1:]))
        yield Wait([question])
        return plan, [*question.result(), *added]

    def _reason(
        self,
        retrieval: Retrieval,
        lanes: list[Lane],
        limits: EffortLimits,
        effort: ReasoningEffort,
        bundle: QueryBundle,
    ) -> Flow[None]:
        """Make one list of evidence out of the lanes, and count what became of every candidate."""
        log, budget = retrieval.log, retrieval.budget
        wanted = budget.output_documents or self.similarity_top_k or limits.documents
        planned = any(isinstance(record, ModelQueryPlanningActivity) for record in log.records)
        record = log.open(
            AgenticReasoningActivity,
            CBEventType.AGENT_STEP,
            logical_reasoning_effort=effort,
            retrieval_reasoning_effort=effort if planned else ReasoningEffort.MINIMAL,
        )
        try:
            retrieval.nodes, counts = yield from gather_evidence(
                lanes,
                retrieval.selected,
                fusion=self.fusion,
                postprocessors=self.node_postprocessors,
                bundle=bundle,
                ranked=max(limits.documents_ranked, wanted),
                wanted=wanted,
                deadline=budget.deadline,
            )
        except GeneratorExit:
            log.cancel(record)
            raise
        except Exception as error:
            log.fail(record, error)
            raise
        outcome = Outcome.OK if retrieval.nodes else Outcome.EMPTY
        log.close(record, outcome=outcome, reasoning_tokens=0, **counts.as_fields())


def _asked_documents(request: RetrievalRequest) -> list[int]:
    """Give the numbers of documents that a request asks for, in all and of single sources."""
    asked = [request.max_output_documents, *(p.max_output_documents for p in request.knowledge_source_params)]
    return [number for number in asked if number is not None]


def _positive(field_name: str, value: Any, kinds: Any = (int, float)) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):
        raise ConfigurationError(f"{field_name} must be a number above 0, got {value!r}")
    return value


def _effort(value: ReasoningEffort | str) -> ReasoningEffort:
    try:
        return ReasoningEffort(value)
    except ValueError:
        known = ", ".join(effort.value for effort in ReasoningEffort)
        raise ConfigurationError(f"effort: {value!r} is unknown; known are {known}") from None


def _limits(given: Mapping[ReasoningEffort, EffortLimits] | None) -> dict[ReasoningEffort, EffortLimits]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigurationError("limits: give a mapping from efforts to EffortLimits, {'low': EffortLimits(...)}")
    return {**DEFAULT_LIMITS, **{_effort(effort): limits for effort, limits in (given or {}).items()}}
