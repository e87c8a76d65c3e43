"""The agentic retriever: scope, plan, search all sources, fuse, postprocess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from operator import attrgetter
from typing import Any, Final, Literal, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.indices.base import BaseIndex
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.utils import print_text

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, run
from llama_index_agentic_kb._text import error_message, one_line, printable
from llama_index_agentic_kb.account import ActivityLog, Budget, GuardedCallbacks, set_budget
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, InvalidRequestError, by_value
from llama_index_agentic_kb.evidence.candidates import Fusion, drop_provenance, references
from llama_index_agentic_kb.evidence.gathering import EvidenceOptions, GatheredEvidence, gather_evidence
from llama_index_agentic_kb.guard.permissions import (
    Permissions,
    current_principal,
    merge_principals,
    owner_of,
    searched_under,
    set_principal,
)
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import Spotlighting, as_spotlighting
from llama_index_agentic_kb.llm import LanguageModel, billed, resolve_llm
from llama_index_agentic_kb.planning import ClassificationSpec, EffortLimits, Scope
from llama_index_agentic_kb.planning.contraction import Conversation, Narrowing
from llama_index_agentic_kb.planning.effort import MAX_RANKED, as_effort, as_limits
from llama_index_agentic_kb.planning.planner import PlanningModel, Task
from llama_index_agentic_kb.planning.rounds import PlanOutcome, search_question
from llama_index_agentic_kb.planning.tool_turn import ToolTurn, search_turn
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    DialogueState,
    Message,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    Principal,
    ReasoningEffort,
    Reference,
    ResultsProcessing,
    RetrievalRequest,
    ScopeState,
    SourceActivity,
    TurnScope,
)
from llama_index_agentic_kb.schema.request import DEFAULT_INPUT_LIMITS, INSTRUCTING, InputLimits
from llama_index_agentic_kb.search.embedding import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.search.filters import FilterLike, to_tree
from llama_index_agentic_kb.search.follow_up import FollowUp
from llama_index_agentic_kb.search.fusion import interleave
from llama_index_agentic_kb.search.prototypes import ScopeIndex
from llama_index_agentic_kb.search.rerank import Reranker, as_reranker
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.base import SelectedSource, as_source, by_name, select
from llama_index_agentic_kb.sources.fan_out import FanOut, missing_parts
from llama_index_agentic_kb.sources.tool import ToolSource

MEMORY_SECONDS: Final = 5.0
"""Maximum seconds for reading a shared memory, or a quarter of the retrieval time if that is less."""

RETRIEVAL_ANSWER_SHARE: Final = 0.05
"""Fraction of the time limit reserved for postprocessing after a retrieval without an answer."""

_MEMORIES: Final = WorkerPool("memories")  # a separate thread pool, so that memories that hang don't block other calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverOptions:
    """The options of ``AgenticRetriever`` that most applications leave at their defaults.

    Args:
        limits: Limits by reasoning effort. Defaults to ``DEFAULT_LIMITS``.
        fusion: The function that fuses the sub-queries' ranked lists. Default ``interleave``.
        join_neighbours: Whether to join adjacent chunks of a document into one reference. Default True.
        max_per_document: Maximum references per document while other documents have candidates: a number, None for no
            limit, or "auto" (default): a third of all references, but at least 3.
        results_processing: The default of requests. "none" interleaves the searches' results without reranking.
        embedding_cache: The cache of query embeddings. Defaults to one that the process shares; None for no caching.
        retries: The retry policy for failed calls of the language model. Default three attempts with full jitter.
        scope: The scope indexes by source name (``sources.vectors.scope_indexes``), by which a question in a
            conversation is narrowed to the documents that the conversation is about. Defaults to no narrowing.
        spotlighting: How retrieved text is marked as data in every prompt of a request, including the answer's:
            "delimit" (default), "datamark", "encode", or None for not at all; see ``guard.spotlighting``.
        require_principal: Whether to deny requests without a principal even if no source has permissions.
        input_limits: The maximum size of a request: characters, messages, intents.
        retrieval_instructions: The default of requests: instructions for planning.

    Raises:
        ConfigurationError: An option is invalid.
    """

    limits: Mapping[ReasoningEffort, EffortLimits] | None = None
    fusion: Fusion = interleave
    join_neighbours: bool = True
    max_per_document: int | Literal["auto"] | None = "auto"
    results_processing: ResultsProcessing | str = ResultsProcessing.RERANK
    embedding_cache: EmbeddingCache | None = SHARED_CACHE
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    scope: Mapping[str, ScopeIndex] = field(default_factory=dict)
    spotlighting: Spotlighting | None = "delimit"
    require_principal: bool = False
    input_limits: InputLimits = DEFAULT_INPUT_LIMITS
    retrieval_instructions: str = ""


@dataclass(slots=True)
class Retrieval:
    """The result of a retrieval, with the activity log and budget that later stages continue to use."""

    outcome: PlanOutcome  # the plan of the searches, what they found, and its proof
    log: ActivityLog
    budget: Budget
    scope: Scope
    sources: Mapping[str, KnowledgeSource]  # all of the retriever
    selected: Mapping[str, SelectedSource]
    missing: list[MissingPart] = field(default_factory=list)
    nodes: list[NodeWithScore] = field(default_factory=list)  # the evidence, best first
    references: list[Reference] = field(default_factory=list)  # of the nodes, set by ``arrange``
    dialogue: DialogueState | None = None  # after this turn; None if no source is a tool
    reply: str = ""  # in place of an answer: a question about a tool's arguments, or a request for confirmation
    scope_state: ScopeState | None = None  # after this turn; None if the request has no such state

    def arrange(self, nodes: Sequence[NodeWithScore]) -> None:
        """Set ``nodes``, without their permission metadata, and ``references``."""
        self.nodes = self.concealed(nodes)
        self.references = references(self.nodes, self.selected)

    def plain_nodes(self) -> list[NodeWithScore]:
        """Return the nodes as LlamaIndex's retrievers do: with provenance, equal nodes of two searches would differ."""
        return [drop_provenance(node) for node in self.concealed(self.nodes, but=searched_under.get())]

    def concealed(self, nodes: Sequence[NodeWithScore], but: Permissions | None = None) -> list[NodeWithScore]:
        """Return nodes without the metadata that lists who else may see them.

        ``but`` are the permissions of an outer source whose search this retrieval is: it checks the nodes by them.
        """
        made = list(nodes)
        for chosen in self.selected.values():
            permissions = chosen.source.permissions
            if permissions not in (None, but):
                for position, item in enumerate(made):
                    plain = permissions.conceal(item.node)
                    if plain is not item.node:
                        made[position] = NodeWithScore(node=plain, score=item.score)
        return made


class AgenticRetriever(GuardedCallbacks, BaseRetriever):
    """Decomposes a question with a language model and searches several knowledge sources concurrently.

    A drop-in ``BaseRetriever`` for chat engines, query engines and tools. Without a language model it searches every
    source for the question, as at minimal effort.

    Args:
        sources: The knowledge sources to search; their names must be unique.
        llm: The language model that plans. Defaults to ``Settings.llm`` if set or if there is an OpenAI key.
        effort: The default reasoning effort of requests. Default low.
        similarity_top_k: Nodes returned by a retrieval, and the minimum per search. Defaults to that of the effort.
        filters: A filter on every search, in addition to the source's own mandatory filter.
        node_postprocessors: Applied to the fused nodes before the list is truncated.
        reranker: Reranks the candidates of each sub-query; a node postprocessor is wrapped in a default ``Reranker``.
            If it is calibrated, candidates below its threshold (default 2.5 of 4) are dropped and counted.
        memory: A memory shared with a chat engine: the conversation of the question. If it belongs to a principal, the
            requests of others are denied.
        principal: The user on whose behalf every request runs; requests can't override it. See ``guard.permissions``.
        max_runtime_in_seconds: The default time limit of a retrieval in seconds. Default 90; None means no limit.
        observer: Called with each activity record when it is opened and when it is closed.
        callback_manager: Defaults to ``Settings.callback_manager``. Exceptions of handlers are logged.
        verbose: Whether to print each search and what it found.
        options: Further options. Defaults to ``RetrieverOptions()``.

    Raises:
        ConfigurationError: There are no sources, two have the same name, or an argument is invalid.
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
        verbose: bool = False,
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
            results_processing=by_value(ResultsProcessing, self.options.results_processing, "results_processing"),
        )
        spotlighting = as_spotlighting(self.options.spotlighting)
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.callback_manager = callback_manager
        self.llm = resolve_llm(llm)
        self._model: PlanningModel | None = None
        if self.llm is not None:
            model = LanguageModel(self.llm, partial(getattr, self, "callback_manager"), retries=self.options.retries)
            self._model = PlanningModel(model, spotlighting)

    @classmethod
    def from_defaults(
        cls,
        sources: Sequence[KnowledgeSource | BaseRetriever | BaseIndex[Any]] | BaseIndex[Any] | BaseRetriever,
        **kwargs: Any,
    ) -> Self:
        """Create a retriever from an index, a retriever, or a list of them.

        Args:
            sources: Knowledge sources, indexes or retrievers; the latter two become a ``KnowledgeSource`` named
                "source_1", "source_2", ... Create it yourself if the source needs a description or filters.
            kwargs: Further arguments of the class.
        """
        listed = list(sources) if isinstance(sources, Sequence) else [sources]
        return cls([as_source(item, position) for position, item in enumerate(listed, start=1)], **kwargs)

    # -- LlamaIndex ------------------------------------------------------------------------------------------------

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        request = self.request_for(query_bundle)
        return run(self.retrieval(request, bundle=query_bundle, recorded=self._verbose)).plain_nodes()

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        request = self.request_for(query_bundle)
        return (await arun(self.retrieval(request, bundle=query_bundle, recorded=self._verbose))).plain_nodes()

    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Return the nodes unchanged: each source has already resolved its index nodes."""
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
        """Return the request for a plain question.

        Raises:
            InvalidRequestError: The question is empty.
        """
        text = query if isinstance(query, str) else query.query_str
        if not text.strip():
            raise InvalidRequestError("query: the question is empty")
        return RetrievalRequest(messages=[Message.model_validate({"role": "user", "content": text})])

    def resolve_principal(self, given: Principal | None = None) -> Principal | None:
        """Return the requesting principal: the retriever's, the request's, or that of ``acting_as``.

        Raises:
            DeniedError: Two of these principals differ, or a principal is required and missing.
        """
        required = self.options.require_principal
        return merge_principals(self.principal, given, current_principal(), required=required)

    # -- the stages of a query -------------------------------------------------------------------------------------

    async def retrieval(
        self,
        request: RetrievalRequest,
        *,
        bundle: QueryBundle | None = None,
        answer_share: float = RETRIEVAL_ANSWER_SHARE,
        observer: Callable[[ActivityRecord], None] | None = None,
        classification: ClassificationSpec | None = None,
        recorded: bool = True,
    ) -> Retrieval:
        """Scope, plan, search, fuse and postprocess.

        Args:
            request: The retrieval request.
            bundle: The caller's query. Its embedding, if any, is used to search for the question itself.
            answer_share: The fraction of the time limit to reserve for the stages after retrieval.
            observer: Called with each activity record. Defaults to the retriever's own.
            classification: The classes to sort the question into as part of planning, even if it is simple. Ignored at
                minimal effort, with intents, and without a model.
            recorded: Whether to log the activity even if no observer and no handler gets it. Default True.

        Raises:
            InvalidRequestError: The request names an unknown source, excludes all sources, or is too large.
            DeniedError: A required principal is missing, or the principal may not search any source.
            RetrievalError: All searches failed, or one of a source with ``failOnError``.
        """
        self.options.input_limits.check(request, self.options.retrieval_instructions)
        effort = request.retrieval_reasoning_effort or self.effort
        limits = self.limits[effort]
        budget = Budget(
            request.max_runtime_in_seconds or self.max_runtime_in_seconds,
            answer_share=answer_share,
            output_tokens=request.max_output_size_in_tokens,
            output_documents=request.max_output_documents,
            retrieval_seconds=limits.seconds,
        )
        set_budget(budget)
        principal = self.resolve_principal(request.principal)
        log = ActivityLog(self.callback_manager, observer or self.observer, recorded)
        set_principal(principal)
        selected = select(self.sources, request, self.filters, calibrated=self.evidence.calibrated)
        memory, forgotten = list[ChatMessage](), list[MissingPart]()
        if self.memory is not None:
            owner_of(self.memory).claim(principal)
            memory, forgotten = await _remembered(self.memory, request.question, budget)
        whole = scope_of(request, memory, classification, self.options.retrieval_instructions)
        # What is searched may go to every source. Not checked once for all: `KnowledgeBase.load_plugins` adds sources.
        scope = whole.without_answers() if whole.history and _keep_apart(self.sources) else whole
        follows = bool(scope.history) or request.scope_state is not None
        asked = map(attrgetter("max_output_documents"), request.knowledge_source_params)
        fan_out = FanOut(
            {name: chosen for name, chosen in selected.items() if not isinstance(chosen.source, ToolSource)},
            log,
            top_k=max(
                filter(None, [limits.documents_per_search, self.similarity_top_k, budget.output_documents, *asked])
            ),
            search_seconds=limits.search_seconds,
            max_searches=limits.searches,
            bundle=bundle,
            embedding_cache=self.options.embedding_cache,
            follow_up=self._follow_up(scope, effort) if follows else None,
        )
        task = Task(scope, effort, limits, self._model, self.evidence.fusion, fan_out, log)
        if len(fan_out.selected) < len(selected) or request.dialogue is not None:
            turn, outcome = await search_turn(task, request.dialogue, selected)
        else:
            turn, outcome = ToolTurn(None), await search_question(task)
        if self._verbose:
            _print_searches(log.records)
        failed = missing_parts(outcome.searches, answered=bool(turn.reply))
        missing = [*forgotten, *failed, *fan_out.left_out, *outcome.withheld]
        made = Retrieval(
            outcome, log, budget, whole, self.sources, selected, missing, dialogue=turn.state, reply=turn.reply
        )
        limit = budget.output_documents or self.similarity_top_k or limits.documents
        if not follows:
            await self._gather(request, made, task, bundle, Narrowing(), limit)
        else:
            conversation = Conversation(fan_out, request.scope_state, self.options.scope)
            narrowing = await conversation.narrow(outcome.searches, limit)
            await self._gather(request, made, task, bundle, narrowing, limit)
            if request.scope_state is not None and narrowing.turn is not None:
                made.scope_state = conversation.after(narrowing.turn, made.nodes)
        if failed:
            fan_out.forget(outcome.searches)
        outcome.searches = []  # a model may write for seconds, and nothing later needs what was not selected
        return made

    def _follow_up(self, scope: Scope, effort: ReasoningEffort) -> FollowUp | None:
        """Return how a question is searched in its conversation; None with intents, or if a model reads and plans."""
        is_planned = self._model is not None and effort is not ReasoningEffort.MINIMAL
        return None if scope.intents or is_planned else FollowUp.of(scope.question, scope.history)

    async def _gather(
        self,
        request: RetrievalRequest,
        retrieval: Retrieval,
        task: Task,
        bundle: QueryBundle | None,
        narrowing: Narrowing,
        limit: int,
    ) -> None:
        """Merge the search results into ``retrieval.nodes``, and log how many candidates each stage dropped."""
        budget, outcome, options, ranked = retrieval.budget, retrieval.outcome, self.evidence, max(MAX_RANKED, limit)
        if request.results_processing is not None:
            options = replace(options, results_processing=request.results_processing)
        opened: AbstractContextManager[AgenticReasoningActivity | None] = nullcontext()
        if retrieval.log.is_read:
            opened = _opened(retrieval, task, narrowing.turn)
        with opened as record, billed() as bill:
            gathered = await gather_evidence(
                outcome.searches,
                retrieval.selected,
                options,
                bundle=bundle or QueryBundle(retrieval.scope.question),
                ranked=ranked,
                limit=limit,
                deadline=budget.evidence_deadline,
                rerank_deadline=budget.retrieval_deadline,
                proof=outcome.proof,
                outside=narrowing.outside,
                follows=bool(task.scope.history),
            )
            if record is not None:
                for changed, fields in gathered.cut_searches:
                    retrieval.log.amend(changed, **fields)
                counts = gathered.counts
                retrieval.log.close(
                    record,
                    outcome=Outcome.OK if gathered.nodes else Outcome.EMPTY,
                    reasoning_tokens=bill.tokens,
                    warning=_warning(request, retrieval, gathered),
                    spent=outcome.spent(budget, min(counts.candidates - counts.merged, ranked)),
                    **counts._asdict(),
                )
        retrieval.nodes = gathered.nodes
        retrieval.missing += filter(None, [gathered.missing])
        if task.scope.intents:  # without a model, the plan's only warning is that there are too many
            skipped = partial(MissingPart, what="intents", outcome=Outcome.SKIPPED)
            retrieval.missing += [skipped(reason=warning) for warning in outcome.plan.warnings]


def _opened(
    retrieval: Retrieval, task: Task, turn: TurnScope | None
) -> AbstractContextManager[AgenticReasoningActivity]:
    """Return the activity record of gathering evidence, to be opened."""
    outcome = retrieval.outcome
    return retrieval.log.record(
        AgenticReasoningActivity,
        CBEventType.AGENT_STEP,
        logical_reasoning_effort=task.effort,
        retrieval_reasoning_effort=task.effort if outcome.planned else ReasoningEffort.MINIMAL,
        planned=outcome.allowed(task.limits, retrieval.budget),
        findings=outcome.findings or None,
        signals=outcome.signals,
        decision=outcome.decision or None,
        conversation=turn,
    )


def _warning(request: RetrievalRequest, retrieval: Retrieval, gathered: GatheredEvidence) -> str | None:
    """Return the warning of gathered evidence; the record of a planning call, if any, has the plan's."""
    planned, counts = retrieval.log.last(ModelQueryPlanningActivity) is not None, gathered.counts
    is_cut = counts.kept < counts.candidates - counts.merged
    cuts = counts.cuts(limited=retrieval.budget.output_documents is not None) if is_cut else []
    unplanned = [] if planned else retrieval.outcome.plan.warnings
    return "; ".join(filter(None, [gathered.warning, *request.unread, *unplanned, *cuts])) or None


def scope_of(
    request: RetrievalRequest,
    memory: Sequence[ChatMessage] = (),
    classification: ClassificationSpec | None = None,
    instructions: str = "",
) -> Scope:
    """Return what a request is planned by; ``memory`` and ``instructions`` count where it has none of its own."""
    history = [(one.role, one.text) for one in request.history if one.role not in INSTRUCTING and one.text.strip()]
    if memory and not history:
        history = _in_memory(memory, request.question)
    intents = tuple(map(attrgetter("search"), request.intents or ()))
    roles = map(attrgetter("role"), request.messages or ())
    system = "" if INSTRUCTING.isdisjoint(roles) else request.system
    own = instructions if request.retrieval_instructions is None else request.retrieval_instructions
    planning = "\n".join(filter(None, [own.strip(), system]))
    answering = "\n".join(filter(None, [(request.answer_instructions or "").strip(), system]))
    return Scope(request.question, tuple(history), intents, classification, planning, answering)


def _in_memory(memory: Sequence[ChatMessage], question: str) -> list[tuple[str, str]]:
    """Return the turns of a conversation in a memory before a question."""
    history = [(one.role.value, one.content or "") for one in memory]
    if history[-1][0] == "user" and history[-1][1].strip() == question:
        history.pop()  # some chat engines store the question before they ask
    return [(role, text) for role, text in history if text.strip() and role in ("user", "assistant")]


async def _remembered(memory: BaseMemory, question: str, budget: Budget) -> tuple[list[ChatMessage], list[MissingPart]]:
    """Return the conversation in a memory; without it, if it can't be read in time, the question is searched alone."""
    read, aread = partial(memory.get, input=question), partial(memory.aget, input=question)
    deadline = budget.retrieval_share(0.25, MEMORY_SECONDS)
    try:
        return [*await Call(sync=read, native=aread, deadline=deadline, pool=_MEMORIES, what="memory")], []
    except Exception as error:  # noqa: BLE001 (any error of a memory)
        ended = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
        reason = f"the conversation could not be read: {error_message(error)}"
        return [], [MissingPart(what="memory", outcome=ended, reason=reason)]


def _keep_apart(sources: Mapping[str, KnowledgeSource]) -> bool:
    """Return whether any source may not get what was read in another."""
    return not all(one.may_learn_from(other) for one, other in permutations(sources.values(), 2))


def _print_searches(records: Sequence[ActivityRecord]) -> None:
    for one in records:
        if isinstance(one, SourceActivity) and one.arguments is not None and one.outcome is not None:
            found = f"{one.outcome.value}, {one.count or 0} documents in {one.elapsed_ms} ms"
            line = one_line(printable(f"{one.knowledge_source_name}: {one.arguments.search}: {found}"))
            print_text(f"{line}\n", color="llama_turquoise")


def _check_positive(field_name: str, value: object, kinds: type | tuple[type, ...]) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):  # type: ignore[operator]
        raise ConfigurationError(f"{field_name} must be a number above 0, got {value!r}")
