"""Searches every (sub-query x source) of a plan side by side; one that fails or hangs costs only itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Job, deadline_after, earliest, start, wait
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.guard.pipeline import Progress
from llama_index_agentic_kb.schema import (
    MissingPart,
    Outcome,
    QueryPlan,
    SearchArguments,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.search.embedding import QueryEmbeddings
from llama_index_agentic_kb.search.embedding_cache import SHARED_CACHE, EmbeddingCache
from llama_index_agentic_kb.sources.base import (
    KnowledgeSource,
    NodeList,
    PreparedSource,
    SearchResult,
    distinct_nodes,
)
from llama_index_agentic_kb.sources.outcomes import missing_parts, outcome_of, raise_if_lost, told, told_list
from llama_index_agentic_kb.sources.selection import SelectedSource
from llama_index_agentic_kb.sources.stragglers import RunningSearch, Stragglers

__all__ = ["Batch", "FanOut", "SourceSearch", "missing_parts", "raise_if_lost"]


@dataclass(slots=True)
class SourceSearch:
    """One search and what came of it."""

    sub_query: SubQuery
    source: KnowledgeSource
    record: SourceActivity
    lists: tuple[NodeList, ...] = ()
    """What it found, one ranked list for each way in which the source was searched."""
    error: Exception | None = None
    must_answer: bool = False
    """Whether its failure is the request's (``failOnError``)."""
    stage: str = "preparation"
    """What was done last: "preparation", "embedding" or "search"."""

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)


@dataclass(frozen=True, slots=True)
class Batch:
    """Searches that were begun together.

    Args:
        searches: Each of them, in the plan's order.
        whole: Ends when all have ended, with their lanes.
    """

    searches: Sequence[RunningSearch]
    whole: Job[list[SourceSearch]]

    def of(self, ids: Collection[str]) -> list[RunningSearch]:
        """Give the searches of some sub-queries."""
        return [one for one in self.searches if one.sub_query_id in ids]

    @property
    def lanes(self) -> list[SourceSearch]:
        """The lanes that are there by now, in the plan's order."""
        return [one.job.result() for one in self.searches if one.job.done]


class FanOut:
    """All searches of one request.

    Args:
        selected: The sources, by name.
        log: The request's account.
        budget: The request's budget.
        top_k: Documents of each search.
        search_seconds: Time of each search, unless its source says its own.
        bundle: The caller's query; its vector or embedding strings serve the question's lane.
        embedding_cache: Query vectors of earlier requests; None does without.
        most_searches: Searches that are made in all, whatever is planned; None makes every one.
    """

    def __init__(
        self,
        selected: Mapping[str, SelectedSource],
        log: ActivityLog,
        budget: Budget,
        *,
        top_k: int,
        search_seconds: float,
        bundle: QueryBundle | None = None,
        embedding_cache: EmbeddingCache | None = SHARED_CACHE,
        most_searches: int | None = None,
    ) -> None:
        self._most_searches = most_searches
        self._wanted = 0
        self.selected = selected
        self._log = log
        self._budget = budget
        self._top_k = top_k
        self._search_seconds = search_seconds
        self._bundle = bundle
        self._embeddings = QueryEmbeddings(log.manager, deadline=budget.retrieval_deadline, cache=embedding_cache)
        self._prepared: dict[tuple[str, str], tuple[Job[PreparedSource], Progress]] = {}
        self.stragglers = Stragglers()

    @property
    def embeddings(self) -> QueryEmbeddings:
        """The request's query vectors, with the counts of what was embedded and what the cache had."""
        return self._embeddings

    async def search(self, plan: QueryPlan) -> list[SourceSearch]:
        """Search every sub-query at each of its sources.

        Returns:
            One lane a search, in the plan's order. None is missing: each says how it ended.
        """
        batch = await self.begin(plan)
        await wait([batch.whole])
        return batch.whole.result()

    async def begin(self, plan: QueryPlan) -> Batch:
        """Begin to search every sub-query at each of its sources, and give the searches that are under way."""
        plan = self._afforded(plan)
        await self._prepare(plan)
        searches = []
        for sub_query in plan.sub_queries:
            for name in sub_query.sources:
                chosen = self.selected[name]
                progress = Progress(self._budget.retries)
                progress.builds_on(self._prepared[_key(sub_query, name)][1])
                job = start(self._lane(sub_query, chosen, progress))
                searches.append(RunningSearch(sub_query.id, chosen.source, chosen.params.fail_on_error, progress, job))
        return Batch(searches, (start(self._finish(searches))))

    def _afforded(self, plan: QueryPlan) -> QueryPlan:
        """Cut the searches of a plan that are one too many."""
        afforded = []
        for sub_query in plan.sub_queries:
            left = len(sub_query.sources)
            if self._most_searches is not None:
                left = max(0, self._most_searches - self._wanted)
            self._wanted += len(sub_query.sources)
            if left >= len(sub_query.sources):
                afforded.append(sub_query)
            elif left:
                afforded.append(sub_query.model_copy(update={"sources": sub_query.sources[:left]}))
        return plan.model_copy(update={"sub_queries": afforded})

    @property
    def left_out(self) -> list[MissingPart]:
        """Tell the searches that were not made because they were one too many."""
        if self._most_searches is None or self._wanted <= self._most_searches:
            return []
        many = self._wanted - self._most_searches
        reason = f"{many} searches beyond the first {self._most_searches} were not made (EffortLimits.searches)"
        return [MissingPart(what="searches", outcome=Outcome.SKIPPED, reason=reason)]

    async def _finish(self, searches: Sequence[RunningSearch]) -> list[SourceSearch]:
        await self.stragglers.watch(searches)
        return [one.job.result() for one in searches]

    async def _prepare(self, plan: QueryPlan) -> None:
        """Make the retrievers, and begin to embed all queries of those that need no call to be made."""
        searches = [(sub_query, name) for sub_query in plan.sub_queries for name in sub_query.sources]
        for sub_query, name in searches:
            if _key(sub_query, name) not in self._prepared:
                chosen = self.selected[name]
                progress = Progress(self._budget.retries)
                deadline = self._deadline(chosen.source)
                made = sub_query.filters.get(name)
                preparing = chosen.prepare(made, self._top_k, deadline=deadline, progress=progress)
                at_once = chosen.source.prepares_at_once
                job = (await _done_here(preparing)) if at_once else (start(preparing))
                self._prepared[_key(sub_query, name)] = job, progress
        await self._embeddings.begin(
            (model, sub_query.query)
            for sub_query, name in searches
            if (model := _model_of(self._prepared[_key(sub_query, name)][0])) is not None
            and not self._brings_vector(sub_query)
        )

    def _brings_vector(self, sub_query: SubQuery) -> bool:
        """Whether the caller's bundle says how this sub-query is embedded."""
        bundle = self._bundle
        if (
            bundle is None
            or sub_query.origin is not SubQueryOrigin.QUESTION
            or bundle.query_str.strip() != sub_query.query
        ):
            return False
        return bundle.embedding is not None or bundle.custom_embedding_strs is not None

    def _deadline(self, source: KnowledgeSource) -> float | None:
        seconds = source.timeout or self._search_seconds
        return earliest(self._budget.retrieval_deadline, deadline_after(seconds))

    async def _lane(self, sub_query: SubQuery, chosen: SelectedSource, progress: Progress) -> SourceSearch:
        name, began = chosen.source.name, time.monotonic()
        record = self._open(sub_query, chosen)
        lane = SourceSearch(sub_query, chosen.source, record, must_answer=chosen.params.fail_on_error)
        try:
            result = await self._search(lane, self._deadline(chosen.source), progress)
            nodes = result.nodes  # reads the nodes, which are anybody's
        except asyncio.CancelledError:
            self._log.cancel(record)
            raise
        except Exception as error:  # noqa: BLE001 (one search's failure is its own; it is kept and told)
            lane.error = error
            described = describe_error(error, name, lane.stage)
            self._log.close(record, outcome=outcome_of(error), count=0, error=described, **_again(progress))
            logger.warning("source %r did not answer %s (%s): %s", name, sub_query.id, lane.stage, told(error))
            return lane
        lane.lists = result.lists
        self.stragglers.answered(name, time.monotonic() - began, found_something=bool(nodes))
        self._log.close(
            record,
            {EventPayload.NODES: nodes},
            outcome=Outcome.OK if nodes else Outcome.EMPTY,
            count=len(nodes),
            candidates=result.candidates,
            dropped_by_filter=result.dropped_by_filter,
            dropped_as_unusable=result.dropped_as_unusable or None,
            lanes=[told_list(ranked, name) for ranked in result.lists],
            **_again(progress),
        )
        return lane

    async def _search(self, lane: SourceSearch, deadline: float | None, progress: Progress) -> SearchResult:
        job, preparing = self._prepared[_key(lane.sub_query, lane.source.name)]
        await wait([job], deadline=deadline)
        prepared = preparing.result_of(job)
        bundle = QueryBundle(lane.sub_query.query)
        complete = partial(self._bundle_for, lane, prepared, deadline)
        return await lane.source.search(
            prepared, bundle, top_k=self._top_k, deadline=deadline, complete=complete, progress=progress
        )

    async def _bundle_for(self, lane: SourceSearch, prepared: PreparedSource, deadline: float | None) -> QueryBundle:
        lane.stage = "embedding"
        bundle = await self._embedded(lane.sub_query, prepared, deadline)
        lane.stage = "search"
        return bundle

    async def _embedded(self, sub_query: SubQuery, prepared: PreparedSource, deadline: float | None) -> QueryBundle:
        """Give a bundle of its own to each search: retrievers write into theirs."""
        bundle = QueryBundle(query_str=sub_query.query)
        if self._bundle is not None and self._brings_vector(sub_query):
            given = self._bundle
            bundle.embedding = None if given.embedding is None else list(given.embedding)
            strings = given.custom_embedding_strs
            bundle.custom_embedding_strs = None if strings is None else list(strings)
            bundle.image_path = given.image_path
        elif prepared.embed_model is not None:
            bundle.embedding = await self._embeddings.get(prepared.embed_model, sub_query.query, deadline=deadline)
        return bundle

    def _open(self, sub_query: SubQuery, chosen: SelectedSource) -> SourceActivity:
        source = chosen.source
        question = SubQuestion(sub_question=sub_query.query, tool_name=source.name)
        return self._log.open(
            SourceActivity,
            CBEventType.SUB_QUESTION,
            {EventPayload.SUB_QUESTION: SubQuestionAnswerPair(sub_q=question)},
            type=source.kind,
            knowledge_source_name=source.name,
            sub_query_id=sub_query.id,
            query_time=datetime.now(UTC),
            arguments=SearchArguments(
                search=sub_query.query, filter=chosen.filters_for(sub_query.filters.get(source.name))
            ),
            warning=chosen.warning,
        )


async def _done_here(work: Coroutine[Any, Any, Any]) -> Job[Any]:
    """Do work that waits for nothing, and give it as a job: a task of its own would cost more than it."""
    job: Job[Any] = Job()
    try:
        job.finish(await work)
    except Exception as error:  # noqa: BLE001 (kept in the job, as a driver does)
        job.finish(error=error)
    return job


def _key(sub_query: SubQuery, name: str) -> tuple[str, str]:
    """Give what searches with one retriever share: the source, and the planner's filter on it."""
    made = sub_query.filters.get(name)
    return name, "" if made is None else made.model_dump_json()


def _model_of(job: Job[PreparedSource]) -> Any:
    return job.value.embed_model if job.done and job.value is not None else None


def _again(progress: Progress) -> dict[str, Any]:
    """Give how often a source was asked more than once, as fields of its record."""
    return {"retries": progress.retries or None, "hedged": progress.hedges or None}
