"""The agentic retriever: scope, plan, search all sources, fuse, postprocess."""

from __future__ import annotations

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
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, run
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account import ActivityLog, Budget, GuardedCallbacks
from llama_index_agentic_kb.account.budget import set_budget
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidRequestError,
)
from llama_index_agentic_kb.evidence.candidates import Fusion
from llama_index_agentic_kb.evidence.gathering import EvidenceOptions, as_processing, gather_evidence
from llama_index_agentic_kb.evidence.provenance import references
from llama_index_agentic_kb.guard.limits import DEFAULT_INPUT_LIMITS, InputLimits
from llama_index_agentic_kb.guard.permissions import (
    current_principal,
    merge_principals,
    owner_of,
    set_principal,
)
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import Spotlighting, as_spotlighting
from llama_index_agentic_kb.llm import LanguageModel, resolve_llm
from llama_index_agentic_kb.planning import ClassificationSpec, EffortLimits, Scope
from llama_index_agentic_kb.planning.effort import MAX_RANKED, as_effort, as_limits, planned_use
from llama_index_agentic_kb.planning.planner import PlanningModel
from llama_index_agentic_kb.planning.rounds import FoundStep, PlanOutcome, Task, search_question
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
from llama_index_agentic_kb.search.embedding import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.search.fusion import interleave
from llama_index_agentic_kb.search.rerank import Reranker, as_reranker
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.fan_out import FanOut, missing_parts, raise_if_lost
from llama_index_agentic_kb.sources.filters import FilterLike, to_tree
from llama_index_agentic_kb.sources.selection import SelectedSource, as_source, by_name, select

MEMORY_SECONDS: Final = 5.0
"""Time to read a shared memory at most; a quarter of the time for searching where that is less."""

RETRIEVAL_ANSWER_SHARE: Final = 0.05
"""The part of the time that is kept for what comes after a retrieval that no answer follows."""

_MEMORIES: Final = WorkerPool("memories")
"""A pool of their own: those that hang take no thread from anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverOptions:
    """The options of ``AgenticRetriever`` that most applications leave at their defaults.

    Args:
        limits: Limits by effort, in place of ``DEFAULT_LIMITS``.
        fusion: How the sub-queries' ranked lists are fused. Default ``interleave``.
        join_neighbours: Whether adjacent chunks of one document become one reference. Default True.
        max_per_document: References of one document before others get a place: a number, None for no limit, or
            "auto" (default), a third of all and at least 3.
        results_processing: "none" leaves what the searches found as they ranked it, in turns, unless a request says.
        embedding_cache: Query vectors of earlier requests. Default ``SHARED_CACHE``, one for the process; None keeps
            none.
        retries: How failed calls of the language model are tried again, and how many retries all calls of a request,
            searches too, may make together. Default three attempts, with full jitter.
        spotlighting: How retrieved text is marked as data in every prompt of a request, the answer's too: "delimit"
            (default), "datamark", "encode", or None for not at all; see ``guard.spotlighting``.
        require_principal: Whether a request without a principal is denied, also where no source has permissions.
        input_limits: The most that one request may hold: characters, messages, intents.

    Raises:
        ConfigurationError: An option is unusable.
    """

    limits: Mapping[ReasoningEffort, EffortLimits] | None = None
    fusion: Fusion = interleave
    join_neighbours: bool = True
    max_per_document: int | Literal["auto"] | None = "auto"
    results_processing: ResultsProcessing | str = ResultsProcessing.RERANK
    embedding_cache: EmbeddingCache | None = SHARED_CACHE
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    spotlighting: Spotlighting | None = "delimit"
    require_principal: bool = False
    input_limits: InputLimits = DEFAULT_INPUT_LIMITS


@dataclass(slots=True)
class Retrieval:
    """What a retrieval found, and its account so far.

    Args:
        nodes: The evidence, best first.
        plan: What was searched.
        log: The request's account; later stages add to it.
        budget: The request's budget; later stages spend what is left.
        missing: What should have been searched and could not be.
        selected: The sources that were allowed, by name.
        scope: The question and its conversation.
        findings: What sub-queries found on the way.
        chain: The steps with what was found for each, those that others build on first.
        references: Those of the nodes, where an answer is made of them: made once, when the evidence stands.
    """

    nodes: list[NodeWithScore]
    plan: QueryPlan
    log: ActivityLog
    budget: Budget
    missing: list[MissingPart] = field(default_factory=list)
    selected: Mapping[str, SelectedSource] = field(default_factory=dict)
    scope: Scope = field(default_factory=lambda: Scope(""))
    findings: list[Finding] = field(default_factory=list)
    chain: list[FoundStep] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)

    def arrange(self, nodes: Sequence[NodeWithScore]) -> None:
        """Take the nodes as the evidence, in their order and as a reader may see them, and make their references."""
        self.nodes = self.concealed(nodes)
        self.references = references(self.nodes, self.selected)

    def concealed(self, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
        """Return nodes without what says whom else they are shared with."""
        made = list(nodes)
        for permissions in [chosen.source.permissions for chosen in self.selected.values()]:
            if permissions is not None:
                made = [NodeWithScore(node=permissions.conceal(item.node), score=item.score) for item in made]
        return made


class AgenticRetriever(GuardedCallbacks, BaseRetriever):
    """Decomposes a question with a language model and searches several knowledge sources side by side.

    A drop-in ``BaseRetriever``: chat engines, query engines and tools take it as it is. Without a language model it
    searches the question itself at every source.

    Args:
        sources: What to search; names must differ.
        llm: Plans. None is ``Settings.llm`` where one is set or an OpenAI key is there, else none.
        effort: How hard to think unless a request says. Default low.
        similarity_top_k: Nodes that a retrieval returns, and that each search returns at least; None is the effort's.
        filters: Narrows every source's search, beside the source's own mandatory filter.
        node_postprocessors: Applied to the fused nodes before they are cut to their number.
        reranker: Reranks the candidates of each sub-query; a node postprocessor stands for ``Reranker`` with defaults.
            If it is calibrated, what is below its threshold (2.5 of 4 unless it says) is dropped, and counted.
        memory: A memory shared with a chat engine: the conversation that a question belongs to. It is its principal's,
            where there is one: anybody else is denied.
        principal: Who asks, in every request of this retriever; none can bring another. See ``guard.permissions``.
        max_runtime_in_seconds: Deadline of a retrieval unless a request says. Default 90; None is no limit.
        observer: Called with each activity record when it is opened and when it is closed.
        callback_manager: None is ``Settings.callback_manager``. What a handler raises is logged.
        options: Everything else; None is ``RetrieverOptions()``.

    Raises:
        ConfigurationError: There is no source, two have one name, or an argument is unusable.
    """

    def __init__(
        self,
        sources: Sequence[KnowledgeSource],
        *,
        llm: LLM | None = None,
        effort: ReasoningEffort | str = ReasoningEffort.LOW,
        similarity_top_k: int | None = None,
        filters: FilterLike = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = (),
        reranker: Reranker | BaseNodePostprocessor | None = None,
        memory: BaseMemory | None = None,
        principal: Principal | None = None,
        max_runtime_in_seconds: float | None = 90.0,
        observer: Callable[[ActivityRecord], None] | None = None,
        callback_manager: CallbackManager | None = None,
        options: RetrieverOptions | None = None,
    ) -> None:
        self.sources = by_name(sources)
        self.effort = as_effort(effort)
        _check_positive("similarity_top_k", similarity_top_k, int)
        _check_positive("max_runtime_in_seconds", max_runtime_in_seconds, (int, float))
        self.similarity_top_k = similarity_top_k
        self.filters = to_tree(filters)
        self.memory = memory
        if principal is not None and not isinstance(principal, Principal):
            raise ConfigurationError(f"principal: expected a Principal, got {type(principal).__name__}")
        self.principal = principal
        self.max_runtime_in_seconds = max_runtime_in_seconds
        self.observer = observer
        self.options = options or RetrieverOptions()
        self.limits = as_limits(self.options.limits)
        self.evidence = EvidenceOptions(
            fusion=self.options.fusion,
            postprocessors=tuple(node_postprocessors or ()),
            reranker=as_reranker(reranker),
            join_neighbours=self.options.join_neighbours,
            max_per_document=self.options.max_per_document,
            results_processing=as_processing(self.options.results_processing),
        )
        spotlighting = as_spotlighting(self.options.spotlighting)
        super().__init__(callback_manager=callback_manager)
        self.callback_manager = callback_manager
        self.llm = resolve_llm(llm)
        self._model: PlanningModel | None = None
        if self.llm is not None:
            model = LanguageModel(self.llm, lambda: self.callback_manager, retries=self.options.retries)
            self._model = PlanningModel(model, spotlighting)

    @classmethod
    def from_defaults(
        cls,
        sources: Sequence[KnowledgeSource | BaseRetriever | BaseIndex[Any]] | BaseIndex[Any] | BaseRetriever,
        **kwargs: Any,
    ) -> Self:
        """Make one from an index, a retriever, or a list of them.

        Args:
            sources: An index or a retriever becomes a ``KnowledgeSource`` named "source_1", "source_2", ...; retrievers
                that are wrapped in tools or need filters are better described by hand.
            kwargs: See the class.
        """
        listed = list(sources) if isinstance(sources, Sequence) else [sources]
        return cls([as_source(item, position) for position, item in enumerate(listed, start=1)], **kwargs)

    # -- LlamaIndex ------------------------------------------------------------------------------------------------

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        retrieval = run(self.retrieval(self.request_for(query_bundle), bundle=query_bundle))
        return retrieval.concealed(retrieval.nodes)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        retrieval = await arun(self.retrieval(self.request_for(query_bundle), bundle=query_bundle))
        return retrieval.concealed(retrieval.nodes)

    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Return the nodes: index nodes were followed at their sources, a bounded number of times."""
        del query_bundle
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return self._handle_recursive_retrieval(query_bundle, nodes)

    def _get_prompts(self) -> PromptDictType:
        return {} if self._model is None else {**self._model.prompts}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if self._model is not None:
            self._model.prompts.update({name: prompts[name] for name in prompts.keys() & self._model.prompts.keys()})

    def request_for(self, query: str | QueryBundle) -> RetrievalRequest:
        """Return the request that a plain question stands for.

        Raises:
            InvalidRequestError: The question is empty.
        """
        text = query if isinstance(query, str) else query.query_str
        if not text.strip():
            raise InvalidRequestError("query: the question is empty")
        return RetrievalRequest(messages=[Message.model_validate({"role": "user", "content": text})])

    def resolve_principal(self, given: Principal | None = None) -> Principal | None:
        """Return who asks: the principal that is bound to the retriever, comes with a request, or of ``acting_as``.

        Raises:
            DeniedError: Two of them differ, or there is none and one is required.
        """
        required = self.options.require_principal
        return merge_principals(self.principal, given, current_principal(), required=required)

    # -- the way of a query ----------------------------------------------------------------------------------------

    async def retrieval(
        self,
        request: RetrievalRequest,
        *,
        bundle: QueryBundle | None = None,
        answer_share: float = RETRIEVAL_ANSWER_SHARE,
        observer: Callable[[ActivityRecord], None] | None = None,
        classification: ClassificationSpec | None = None,
    ) -> Retrieval:
        """Scope, plan, search, fuse and postprocess.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the search of the question itself.
            answer_share: The part of the time that is kept for what comes after.
            observer: In place of the retriever's own.
            classification: What the question is classified as, in the planner's own call; the plan has the verdicts. A
                question that needs no plan is then planned all the same. At minimal effort, with intents and without a
                model nothing is classified.

        Raises:
            InvalidRequestError: The request names an unknown source, leaves none, or is too large.
            DeniedError: There is no principal where one is needed, or the principal may search no source.
            RetrievalError: Every search failed, or one whose source has ``failOnError``.
        """
        self.options.input_limits.check(request)
        effort = request.retrieval_reasoning_effort or self.effort
        limits, log = self.limits[effort], ActivityLog(self.callback_manager, observer or self.observer)
        budget = Budget.start(
            request.max_runtime_in_seconds or self.max_runtime_in_seconds,
            answer_share=answer_share,
            output_tokens=request.max_output_size_in_tokens,
            output_documents=request.max_output_documents,
            retrieval_seconds=limits.seconds,
            retries=self.options.retries.budget(),
        )
        set_budget(budget)
        options = self.evidence
        if request.results_processing is not None:
            options = replace(options, results_processing=request.results_processing)
        principal = self.resolve_principal(request.principal)
        set_principal(principal)
        selected = select(self.sources, request, self.filters, calibrated=options.calibrated)
        if self.memory is not None:
            owner_of(self.memory).claim(principal)
        memory, forgotten = await self._remember(request.question, budget.retrieval_share(0.25, MEMORY_SECONDS))
        asked = [request.max_output_documents, *(p.max_output_documents for p in request.knowledge_source_params)]
        cache = self.options.embedding_cache
        fan_out = FanOut(
            selected,
            log,
            top_k=max(limits.documents_per_search, self.similarity_top_k or 0, *(number or 0 for number in asked)),
            search_seconds=limits.search_seconds,
            max_searches=limits.searches,
            bundle=bundle,
            embedding_cache=None if cache is None else cache.of(principal),
        )
        scope = Scope.of(request, memory, classification)
        task = Task(
            scope=scope,
            effort=effort,
            limits=limits,
            model=self._model,
            fusion=options.fusion,
            fan_out=fan_out,
            budget=budget,
            log=log,
        )
        outcome = await search_question(task)
        raise_if_lost(outcome.searches)
        missing = [*forgotten, *missing_parts(outcome.searches), *fan_out.left_out]
        found = outcome.findings, outcome.chain
        retrieval = Retrieval([], outcome.plan, log, budget, missing, selected, scope, *found)
        await self._gather(retrieval, outcome, task, options, bundle or QueryBundle(request.question))
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

    async def _gather(
        self, retrieval: Retrieval, outcome: PlanOutcome, task: Task, options: EvidenceOptions, bundle: QueryBundle
    ) -> None:
        """Make one list of evidence out of the searches, and count what became of every candidate."""
        log, budget = retrieval.log, retrieval.budget
        limit = budget.output_documents or self.similarity_top_k or task.limits.documents
        ranked = max(MAX_RANKED, limit)
        with log.record(
            AgenticReasoningActivity,
            CBEventType.AGENT_STEP,
            logical_reasoning_effort=task.effort,
            retrieval_reasoning_effort=task.effort if outcome.planned else ReasoningEffort.MINIMAL,
            planned=planned_use(task.limits, outcome.planned, budget),
            findings=outcome.findings or None,
            signals=outcome.signals,
            decision=outcome.decision or None,
        ) as record:
            gathered = await gather_evidence(
                outcome.searches,
                retrieval.selected,
                options,
                bundle=bundle,
                ranked=ranked,
                limit=limit,
                deadline=budget.evidence_deadline,
                rerank_deadline=budget.retrieval_deadline,
                proof=outcome.proof,
            )
            for changed, fields in gathered.cut_searches:
                log.amend(changed, **fields)
            retrieval.nodes, counts = gathered.nodes, gathered.counts
            retrieval.missing += [part for part in (gathered.missing,) if part is not None]
            log.close(
                record,
                outcome=Outcome.OK if retrieval.nodes else Outcome.EMPTY,
                reasoning_tokens=0,
                warning=gathered.warning,
                spent=outcome.spent(budget, min(counts.candidates - counts.merged, ranked)),
                **counts.as_fields(),
            )


def _check_positive(field_name: str, value: object, kinds: type | tuple[type, ...]) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):  # type: ignore[operator]
        raise ConfigurationError(f"{field_name} must be a number above 0, got {value!r}")
