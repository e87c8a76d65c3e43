"""Searches every (sub-query x source) of a plan side by side; one that fails or hangs costs only itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Job, deadline_after, earliest, start
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.account.budget import current_budget
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, FailedSearch, RetrievalError
from llama_index_agentic_kb.guard.resilience import CallProgress
from llama_index_agentic_kb.schema import (
    MissingPart,
    Outcome,
    QueryPlan,
    SearchArguments,
    SearchLane,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.search.embedding import QueryEmbeddings
from llama_index_agentic_kb.search.embedding_cache import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.sources.base import KnowledgeSource, NodeList, PreparedSource, SearchResult, distinct_nodes
from llama_index_agentic_kb.sources.selection import SelectedSource
from llama_index_agentic_kb.sources.stragglers import RunningSearch, Stragglers

__all__ = ["Batch", "FanOut", "SourceSearch", "missing_parts", "raise_if_lost"]


@dataclass(slots=True)
class SourceSearch:
    """One search and what came of it.

    Args:
        sub_query: What was searched.
        source: Where.
        record: Its record in the account.
        lists: What it found, one ranked list for each way in which the source was searched.
        error: Why it failed; None where it did not.
        must_answer: Whether its failure is the request's (``failOnError``).
        stage: What was done last: "preparation", "embedding" or "search".
    """

    sub_query: SubQuery
    source: KnowledgeSource
    record: SourceActivity
    lists: tuple[NodeList, ...] = ()
    error: Exception | None = None
    must_answer: bool = False
    stage: str = "preparation"

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)


@dataclass(frozen=True, slots=True)
class Batch:
    """Searches that were started together.

    Args:
        searches: Each of them, in the plan's order.
        whole: Ends when all have ended, with their outcomes.
    """

    searches: Sequence[RunningSearch]
    whole: Job[list[SourceSearch]]

    def of(self, ids: Collection[str]) -> list[RunningSearch]:
        """Return the searches of some sub-queries."""
        return [search for search in self.searches if search.sub_query_id in ids]

    @property
    def done(self) -> list[SourceSearch]:
        """The searches that are done by now, in the plan's order."""
        return [search.job.result() for search in self.searches if search.job.done]


class FanOut:
    """All searches of one request. Its deadlines are those of the request's budget (``current_budget``).

    Args:
        selected: The sources, by name.
        log: The request's account.
        top_k: Documents of each search.
        search_seconds: Time of each search, unless its source has its own.
        bundle: The caller's query; its vector or embedding strings serve the question's own search.
        embedding_cache: Query vectors of earlier requests; None keeps none.
        max_searches: Searches that are made in all, whatever is planned; None makes every one.
    """

    def __init__(
        self,
        selected: Mapping[str, SelectedSource],
        log: ActivityLog,
        *,
        top_k: int,
        search_seconds: float,
        bundle: QueryBundle | None = None,
        embedding_cache: EmbeddingCache | None = SHARED_CACHE,
        max_searches: int | None = None,
    ) -> None:
        self.selected = selected
        self.stragglers = Stragglers()
        self._log = log
        self._deadline = current_budget().retrieval_deadline
        self._top_k = top_k
        self._search_seconds = search_seconds
        self._bundle = bundle
        self._embeddings = QueryEmbeddings(log.manager, deadline=self._deadline, cache=embedding_cache)
        self._prepared: dict[tuple[str, str], PreparedSource | Exception] = {}
        self._max_searches = max_searches
        self._planned = 0

    async def search(self, plan: QueryPlan) -> list[SourceSearch]:
        """Search every sub-query at each of its sources.

        Returns:
            One outcome a search, in the plan's order. None is missing: each says how it ended.
        """
        searches = await self._searches(plan)
        if len(searches) == 1:
            return [await self._search(*searches[0], CallProgress())]
        running = self._start(searches)
        await self.stragglers.watch(running)
        return [search.job.result() for search in running]

    async def begin(self, plan: QueryPlan) -> Batch:
        """Begin to search every sub-query at each of its sources, and return the running searches."""
        running = self._start(await self._searches(plan))
        return Batch(running, start(self._finish(running)))

    def _start(self, searches: Sequence[tuple[SubQuery, SelectedSource]]) -> list[RunningSearch]:
        running = []
        for sub_query, chosen in searches:
            progress = CallProgress()
            job = start(self._search(sub_query, chosen, progress))
            running.append(RunningSearch(sub_query.id, chosen.source, chosen.params.fail_on_error, progress, job))
        return running

    async def _finish(self, running: Sequence[RunningSearch]) -> list[SourceSearch]:
        await self.stragglers.watch(running)
        return [search.job.result() for search in running]

    async def _searches(self, plan: QueryPlan) -> list[tuple[SubQuery, SelectedSource]]:
        """Return the searches of a plan, without those that are too many, and begin to embed their queries."""
        every = [(sub_query, self.selected[name]) for sub_query in plan.sub_queries for name in sub_query.sources]
        if self._max_searches is not None:
            left = max(0, self._max_searches - self._planned)
            self._planned += len(every)
            every = every[:left]
        models = []
        for sub_query, chosen in every:
            prepared = self._prepare(sub_query, chosen)
            if isinstance(prepared, PreparedSource) and prepared.embed_model and not self._brings_vector(sub_query):
                models.append((prepared.embed_model, sub_query.query))
        self._embeddings.begin(models)
        return every

    @property
    def left_out(self) -> list[MissingPart]:
        """The searches that were not made because they were too many."""
        if self._max_searches is None or self._planned <= self._max_searches:
            return []
        many = self._planned - self._max_searches
        reason = f"{many} searches beyond the first {self._max_searches} were not made (EffortLimits.searches)"
        return [MissingPart(what="searches", outcome=Outcome.SKIPPED, reason=reason)]

    # -- one search ------------------------------------------------------------------------------------------------

    async def _search(self, sub_query: SubQuery, chosen: SelectedSource, progress: CallProgress) -> SourceSearch:
        """Search one source. Never raises: what happened stands in the outcome and in its record."""
        source, started = chosen.source, time.monotonic()
        record = self._open(sub_query, chosen)
        search = SourceSearch(sub_query, source, record, must_answer=chosen.params.fail_on_error)
        deadline = earliest(self._deadline, deadline_after(source.resilience.timeout or self._search_seconds))
        try:
            result = await self._found(search, chosen, deadline, progress)
            nodes = result.nodes  # reads the nodes, which are anybody's
        except asyncio.CancelledError:
            if progress.given_up is None:
                self._log.cancel(record)
                raise
            return self._failed(search, DeadlineExceededError(progress.given_up), progress)
        except Exception as error:  # noqa: BLE001 (one search's failure is its own; it is kept and reported)
            return self._failed(search, error, progress)
        search.lists = result.lists
        self.stragglers.answered(source.name, time.monotonic() - started, found_something=bool(nodes))
        self._log.close(
            record,
            {EventPayload.NODES: nodes},
            outcome=Outcome.OK if nodes else Outcome.EMPTY,
            count=len(nodes),
            candidates=result.total("candidates"),
            dropped_by_filter=result.total("dropped_by_filter"),
            dropped_as_unusable=result.total("dropped_as_unusable") or None,
            lanes=[_reported(ranked, source.name) for ranked in result.lists],
            retries=progress.retries or None,
        )
        return search

    def _failed(self, search: SourceSearch, error: Exception, progress: CallProgress) -> SourceSearch:
        name, search.error = search.source.name, error
        self._log.close(
            search.record,
            outcome=_outcome_of(error),
            count=0,
            error=describe_error(error, name, search.stage),
            retries=progress.retries or None,
        )
        message = error_message(error)
        logger.warning("source %r did not answer %s (%s): %s", name, search.sub_query.id, search.stage, message)
        return search

    async def _found(
        self, search: SourceSearch, chosen: SelectedSource, deadline: float | None, progress: CallProgress
    ) -> SearchResult:
        prepared = self._prepare(search.sub_query, chosen)
        if prepared is None:
            filters = chosen.filters_for(search.sub_query.filters.get(chosen.source.name))
            prepared = await chosen.source.prepare(filters, self._top_k, deadline=deadline, progress=progress)
        if isinstance(prepared, Exception):
            raise prepared
        return await chosen.source.search(
            prepared,
            QueryBundle(search.sub_query.query),
            top_k=self._top_k,
            deadline=deadline,
            complete=partial(self._bundle_for, search, prepared, deadline),
            progress=progress,
        )

    def _prepare(self, sub_query: SubQuery, chosen: SelectedSource) -> PreparedSource | Exception | None:
        """Return the source with the sub-query's effective filter, one for all; None where a factory makes it."""
        if chosen.denied is not None:
            return DeniedError(f"source {chosen.source.name!r} was not searched: {chosen.denied}")
        if chosen.source.has_factory:
            return None
        planner = sub_query.filters.get(chosen.source.name)
        key = chosen.source.name, "" if planner is None else planner.model_dump_json()
        if key not in self._prepared:
            try:
                self._prepared[key] = chosen.source.prepared(chosen.filters_for(planner), self._top_k)
            except Exception as error:  # noqa: BLE001 (raised in each search)
                self._prepared[key] = error
        return self._prepared[key]

    async def _bundle_for(self, search: SourceSearch, prepared: PreparedSource, deadline: float | None) -> QueryBundle:
        """Return a bundle of its own for each search: retrievers write into theirs."""
        search.stage, query = "embedding", search.sub_query.query
        made = QueryBundle(query_str=query)
        if self._bundle is not None and self._brings_vector(search.sub_query):
            brought = self._bundle
            made.embedding = None if brought.embedding is None else list(brought.embedding)
            strings = brought.custom_embedding_strs
            made.custom_embedding_strs = None if strings is None else list(strings)
            made.image_path = brought.image_path
        elif prepared.embed_model is not None:
            made.embedding = await self._embeddings.get(prepared.embed_model, query, deadline=deadline)
        search.stage = "search"
        return made

    def _brings_vector(self, sub_query: SubQuery) -> bool:
        """Return whether the caller's bundle says how this sub-query is embedded."""
        bundle = self._bundle
        if bundle is None or sub_query.origin is not SubQueryOrigin.QUESTION:
            return False
        says_how = bundle.embedding is not None or bundle.custom_embedding_strs is not None
        return says_how and bundle.query_str.strip() == sub_query.query

    def _open(self, sub_query: SubQuery, chosen: SelectedSource) -> SourceActivity:
        source = chosen.source
        payload = None
        if self._log.manager.handlers:
            question = SubQuestion(sub_question=sub_query.query, tool_name=source.name)
            payload = {EventPayload.SUB_QUESTION: SubQuestionAnswerPair(sub_q=question)}
        return self._log.open(
            SourceActivity,
            CBEventType.SUB_QUESTION,
            payload,
            type=source.kind,
            knowledge_source_name=source.name,
            sub_query_id=sub_query.id,
            query_time=datetime.now(UTC),
            arguments=SearchArguments(
                search=sub_query.query, filter=chosen.filters_for(sub_query.filters.get(source.name))
            ),
            warning=chosen.warning,
        )


# -- what failed searches mean for their request ----------------------------------------------------------------------


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, DeniedError):
        return Outcome.DENIED
    return Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR


def _reported(ranked: NodeList, source: str) -> SearchLane:
    """Return a ranked list as the account has it."""
    return SearchLane(
        kind=ranked.kind,
        count=len(ranked.nodes),
        candidates=ranked.candidates,
        elapsed_ms=ranked.elapsed_ms,
        error=None if ranked.error is None else describe_error(ranked.error, source, "search"),
        note=ranked.note,
    )


def raise_if_lost(searches: Sequence[SourceSearch]) -> None:
    """Raise where no search could answer, or one that must did not; anything less is reported in the response.

    Raises:
        DeniedError: Every cause is a filter that could not be applied.
        RetrievalError: Every search failed, or one whose source has ``failOnError``. It holds every cause.
    """
    failed = [(search, search.error) for search in searches if search.error is not None]
    strict = [(search, error) for search, error in failed if search.must_answer]
    if not strict and len(failed) < len(searches):
        return
    guilty = strict or failed
    causes = {f"{search.source.name}: {search.sub_query.query}": error for search, error in guilty}
    reasons = {search.source.name: error_message(error) for search, error in reversed(guilty)}
    failures = []
    for search, error in guilty:
        described = describe_error(error)
        failures.append(
            FailedSearch(search.source.name, search.stage, described.code, described.message, search.sub_query.query)
        )
    kind = DeniedError if all(isinstance(error, DeniedError) for error in causes.values()) else RetrievalError
    what = "a source with failOnError failed" if strict else "every selected source failed"
    raise kind(f"{what}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()), causes, failures)


def missing_parts(searches: Sequence[SourceSearch]) -> list[MissingPart]:
    """Return what the failed searches leave missing."""
    return [
        MissingPart(
            what=search.source.name,
            outcome=search.record.outcome or Outcome.ERROR,
            reason=error_message(search.error),
            sub_query_id=search.sub_query.id,
        )
        for search in searches
        if search.error is not None
    ]
