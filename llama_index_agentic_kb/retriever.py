"""The agentic retriever: scope, plan, fan out over sources, fuse, postprocess."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, Self

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

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, run
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account import ActivityLog, Budget, GuardedCallbacks
from llama_index_agentic_kb.account.budget import set_budget
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
)
from llama_index_agentic_kb.evidence.gathering import Fusion, gather_evidence, references
from llama_index_agentic_kb.evidence.options import EvidenceOptions, as_processing
from llama_index_agentic_kb.guard.conversations import ConversationOwner
from llama_index_agentic_kb.guard.limits import DEFAULT_INPUT_LIMITS, InputLimits
from llama_index_agentic_kb.guard.permissions import current_principal, merge_principals, set_principal
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import as_spotlighting
from llama_index_agentic_kb.llm import LanguageModel, resolve_llm
from llama_index_agentic_kb.planning import ClassificationSpec, EffortLimits, Planner, Scope
from llama_index_agentic_kb.planning.effort import as_effort, as_limits, planned_use
from llama_index_agentic_kb.planning.findings import FindingsReader
from llama_index_agentic_kb.planning.revision import Reviser
from llama_index_agentic_kb.planning.searched import Agents, Searched, spent_use
from llama_index_agentic_kb.planning.strategy import Strategy
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    Finding,
    Message,
    MissingPart,
    Outcome,
    Principal,
    QueryPlan,
    ReasoningEffort,
    Reference,
    ResultsProcessing,
    RetrievalRequest,
)
from llama_index_agentic_kb.search.embedding_cache import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.search.fusion import interleave, relative_score_fusion
from llama_index_agentic_kb.search.rerank import Reranker, as_reranker
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.fan_out import FanOut, missing_parts, raise_if_lost
from llama_index_agentic_kb.sources.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.selection import SelectedSource, as_source, by_name, raise_if_denied, select

__all__ = ["AgenticRetriever", "Retrieval"]

MEMORY_SECONDS: Final = 5.0
"""Time to read a shared memory at most; a quarter of the time for searching where that is less."""

_MEMORIES: Final = WorkerPool("memories")
"""Of their own: those that hang take no thread from anything else."""


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
        findings: What sub-queries found on the way.
    """

    nodes: list[NodeWithScore]
    plan: QueryPlan
    log: ActivityLog
    budget: Budget
    missing: list[MissingPart] = field(default_factory=list)
    selected: Mapping[str, SelectedSource] = field(default_factory=dict)
    scope: Scope = field(default_factory=lambda: Scope(""))
    findings: list[Finding] = field(default_factory=list)

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
        memory: A memory shared with a chat engine: the conversation that a question belongs to. It is its principal's,
            where there is one: anybody else is denied.
        limits: Limits by effort, in place of ``DEFAULT_LIMITS``.
        fusion: How the sub-queries' ranked lists are fused. Default ``interleave``.
        lane_fusion: How the ways of searching one corpus (dense and lexical) are fused for a sub-query. Default
            ``relative_score_fusion``.
        lane_weights: Weights of these ways by kind, ``{"lexical": 0.5}``; one that is not named has 1.
        reranker: Reranks the candidates of each sub-query; a node postprocessor stands for ``Reranker`` with defaults.
            If it is calibrated, what is below its threshold (2.5 of 4 unless it says) is dropped, and counted.
        join_neighbours: Whether adjacent chunks of one document become one reference. Default True.
        max_per_document: References of one document before others get a place: a number, None for no limit, or
            "auto" (default), a third of what is wanted and at least 3.
        results_processing: "none" leaves what the searches found as they ranked it, in turns, unless a request says.
        embedding_cache: Query vectors of earlier requests. Default ``SHARED_CACHE``, one for the process; None does
            without.
        principal: Who asks, in every request of this retriever; none can bring another. See ``guard.permissions``.
        require_principal: Whether a request without a principal is denied whole, also where no source has permissions.
        input_limits: The most that one request may hold: characters, messages, intents.
        max_runtime_in_seconds: Deadline of a retrieval unless a request says. Default 90; None is no limit.
        retries: How failed calls of the language model are tried again, and how many retries all calls of a request,
            searches too, may make together. None is ``RetryPolicy()``: three attempts, with full jitter.
        spotlighting: How retrieved text is marked as data in every prompt of a request, the answer's too: "delimit"
            (default), "datamark", "encode", or None for not at all; see ``guard.spotlighting``.
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
        lane_fusion: Fusion = relative_score_fusion,
        lane_weights: Mapping[str, float] | None = None,
        reranker: Reranker | BaseNodePostprocessor | None = None,
        join_neighbours: bool = True,
        max_per_document: int | Literal["auto"] | None = "auto",
        results_processing: ResultsProcessing | str = ResultsProcessing.RERANK,
        embedding_cache: EmbeddingCache | None = SHARED_CACHE,
        max_runtime_in_seconds: float | None = 90.0,
        retries: RetryPolicy | None = None,
        spotlighting: str | None = "delimit",
        principal: Principal | None = None,
        require_principal: bool = False,
        input_limits: InputLimits = DEFAULT_INPUT_LIMITS,
        planner_prompt: BasePromptTemplate | None = None,
        observer: Callable[[ActivityRecord], None] | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        self.sources = by_name(sources)
        self.effort = as_effort(effort)
        self.similarity_top_k = _positive("similarity_top_k", similarity_top_k, int)
        self.filters = to_tree(filters)
        self.memory = memory
        self.limits = as_limits(limits)
        self.evidence = EvidenceOptions(
            fusion=fusion,
            lane_fusion=lane_fusion,
            lane_weights=lane_weights or {},
            postprocessors=tuple(node_postprocessors),
            reranker=as_reranker(reranker),
            join_neighbours=join_neighbours,
            max_per_document=max_per_document,
            results_processing=as_processing(results_processing),
        )
        self.embedding_cache = embedding_cache
        self.max_runtime_in_seconds = _positive("max_runtime_in_seconds", max_runtime_in_seconds)
        if principal is not None and not isinstance(principal, Principal):
            raise ConfigurationError(f"principal: expected a Principal, got {type(principal).__name__}")
        self.principal = principal
        self.require_principal = require_principal
        self._owner = ConversationOwner()
        self.input_limits = input_limits
        self.spotlighting = as_spotlighting(spotlighting)
        self.observer = observer
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.callback_manager = callback_manager
        self.llm = resolve_llm(llm)
        self.retries = retries or RetryPolicy()
        self._agents: Agents | None = None
        if self.llm is not None:
            model = LanguageModel(self.llm, lambda: self.callback_manager, retries=self.retries)
            marked = self.spotlighting
            readers = FindingsReader(model, spotlighting=marked), Reviser(model, spotlighting=marked)
            self._agents = Agents(Planner(model, planner_prompt), *readers)

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
        return {} if self._agents is None else self._agents.prompts

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if self._agents is not None:
            self._agents.update(prompts)

    def request_for(self, query: str | QueryBundle) -> RetrievalRequest:
        """Give the request that a plain question stands for."""
        text = query if isinstance(query, str) else query.query_str
        if not text.strip():
            raise InvalidRequestError("query: the question is empty")
        return RetrievalRequest(messages=[Message.model_validate({"role": "user", "content": text})])

    def resolve_principal(self, given: Principal | None = None) -> Principal | None:
        """Give who asks: the principal that is bound to the retriever, given with a request, or of ``acting_as``.

        Raises:
            DeniedError: Two of them differ, or there is none and one is required.
        """
        principal = merge_principals(self.principal, given, current_principal())
        if principal is None and self.require_principal:
            raise DeniedError("no principal was given: pass principal= or use acting_as(...)")
        return principal

    # -- the way of a query ----------------------------------------------------------------------------------------

    async def retrieval(
        self,
        request: RetrievalRequest,
        *,
        bundle: QueryBundle | None = None,
        answer_share: float = 0.05,
        observer: Callable[[ActivityRecord], None] | None = None,
        classification: ClassificationSpec | None = None,
    ) -> Retrieval:
        """Scope, plan, fan out, fuse and postprocess.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the question's lane.
            answer_share: The part of the time that is kept for what comes after.
            observer: In place of the retriever's own.
            classification: What the question is classified as, in the planner's own call; the plan tells. A question
                that needs no plan is then planned all the same. At minimal effort, with intents and without a model
                nothing is classified.

        Raises:
            InvalidRequestError: The request names an unknown source, leaves none, or is too large.
            DeniedError: There is no principal where one is needed, or the one may search no source.
            RetrievalError: Every search failed, or one whose source has ``failOnError``.
        """
        self.input_limits.check(request)
        effort = request.retrieval_reasoning_effort or self.effort
        limits = self.limits[effort]
        budget = Budget.start(
            request.max_runtime_in_seconds or self.max_runtime_in_seconds,
            answer_share=answer_share,
            output_tokens=request.max_output_size_in_tokens,
            output_documents=request.max_output_documents,
            retrieval_seconds=limits.seconds,
            retries=self.retries.budget(),
        )
        set_budget(budget)
        log = ActivityLog(self.callback_manager, observer or self.observer)
        options = self.evidence
        if request.results_processing is not None:
            options = replace(options, results_processing=request.results_processing)
        principal = self.resolve_principal(request.principal)
        set_principal(principal)
        selected = select(self.sources, request, self.filters, calibrated=options.calibrated, principal=principal)
        raise_if_denied(selected)
        if self.memory is not None:
            self._owner.claim(principal)
        memory, forgotten = await self._remember(request.question, budget.retrieval_share(0.25, MEMORY_SECONDS))
        scope = Scope.of(request, memory, classification)
        fan_out = FanOut(
            selected,
            log,
            top_k=max(limits.documents_per_search, self.similarity_top_k or 0, *_asked_documents(request)),
            search_seconds=limits.search_seconds,
            max_searches=limits.searches,
            bundle=bundle,
            embedding_cache=None if self.embedding_cache is None else self.embedding_cache.of(principal),
        )
        strategy = Strategy(effort, limits, self._agents, options)
        searched = await strategy.search(scope, fan_out, budget, log)
        raise_if_lost(searched.lanes)
        missing = [*forgotten, *missing_parts(searched.lanes), *fan_out.left_out]
        retrieval = Retrieval([], searched.plan, log, budget, missing, selected, scope, searched.findings)
        await self._reason(retrieval, searched, strategy, bundle or QueryBundle(request.question))
        return retrieval

    async def _remember(self, question: str, deadline: float | None) -> tuple[list[Any], list[MissingPart]]:
        """Read the shared memory as LlamaIndex's chat engines do: some memories look up what the question is about.

        Returns:
            The conversation; and, where it could not be read, that it is missing: the question is then searched alone.
        """
        if self.memory is None:
            return [], []
        read, aread = partial(self.memory.get, input=question), partial(self.memory.aget, input=question)
        try:
            return list(await Call(sync=read, native=aread, deadline=deadline, pool=_MEMORIES, what="memory")), []
        except Exception as error:  # noqa: BLE001 (whatever a memory raises; the question can be searched all the same)
            outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
            reason = f"the conversation could not be read: {error_message(error)}"
            return [], [MissingPart(what="memory", outcome=outcome, reason=reason)]

    async def _reason(self, retrieval: Retrieval, searched: Searched, strategy: Strategy, bundle: QueryBundle) -> None:
        """Make one list of evidence out of the lanes, and count what became of every candidate."""
        log, budget, limits = retrieval.log, retrieval.budget, strategy.limits
        wanted = budget.output_documents or self.similarity_top_k or limits.documents
        ranked = max(limits.documents_ranked, wanted)
        record = log.open(
            AgenticReasoningActivity,
            CBEventType.AGENT_STEP,
            logical_reasoning_effort=strategy.effort,
            retrieval_reasoning_effort=strategy.effort if searched.planned else ReasoningEffort.MINIMAL,
            planned=planned_use(limits, searched.planned, budget),
            findings=searched.findings or None,
            signals=searched.signals,
            decision=searched.decision or None,
        )
        try:
            gathered = await gather_evidence(
                searched.lanes,
                retrieval.selected,
                strategy.options,
                bundle=bundle,
                ranked=ranked,
                wanted=wanted,
                deadline=budget.evidence_deadline,
                rerank_deadline=budget.retrieval_deadline,
            )
        except asyncio.CancelledError:
            log.cancel(record)
            raise
        except Exception as error:
            log.fail(record, error)
            raise
        for search, fields in gathered.searches:
            log.amend(search, **fields)
        retrieval.nodes, counts = gathered.nodes, gathered.counts
        retrieval.missing += [part for part in (gathered.missing,) if part is not None]
        log.close(
            record,
            outcome=Outcome.OK if retrieval.nodes else Outcome.EMPTY,
            reasoning_tokens=0,
            warning=gathered.warning,
            spent=spent_use(searched, budget, min(counts.candidates - counts.merged, ranked)),
            **counts.as_fields(),
        )


def _asked_documents(request: RetrievalRequest) -> list[int]:
    """Give the numbers of documents that a request asks for, in all and of single sources."""
    asked = [request.max_output_documents, *(p.max_output_documents for p in request.knowledge_source_params)]
    return [number for number in asked if number is not None]


def _positive(field_name: str, value: Any, kinds: Any = (int, float)) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):
        raise ConfigurationError(f"{field_name} must be a number above 0, got {value!r}")
    return value
