"""Searches every (sub-query x source) of a plan side by side; one that fails or hangs costs only itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._flow import Flow, Job, Start, Wait, deadline_after, earliest, gather
from llama_index_agentic_kb._text import redacted
from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, RetrievalError
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
from llama_index_agentic_kb.sources.base import (
    KnowledgeSource,
    NodeList,
    PreparedSource,
    SearchResult,
    distinct_nodes,
)
from llama_index_agentic_kb.sources.selection import SelectedSource

__all__ = ["FanOut", "Lane", "missing_parts", "raise_if_lost"]


@dataclass(slots=True)
class Lane:
    """One search and what came of it."""

    sub_query: SubQuery
    source: KnowledgeSource
    record: SourceActivity
    lists: tuple[NodeList, ...] = ()
    """What it found, one ranked list for each way in which the source was searched."""
    error: Exception | None = None
    must_answer: bool = False
    """Whether its failure is the request's (``failOnError``)."""

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)


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
    ) -> None:
        self.selected = selected
        self._log = log
        self._budget = budget
        self._top_k = top_k
        self._search_seconds = search_seconds
        self._bundle = bundle
        self._embeddings = QueryEmbeddings(log.manager, deadline=budget.retrieval_deadline, cache=embedding_cache)
        self._prepared: dict[tuple[str, str], Job[PreparedSource]] = {}

    @property
    def embeddings(self) -> QueryEmbeddings:
        """The request's query vectors, with the counts of what was embedded and what the cache had."""
        return self._embeddings

    def search(self, plan: QueryPlan) -> Flow[list[Lane]]:
        """Search every sub-query at each of its sources.

        Returns:
            One lane a search, in the plan's order. None is missing: each says how it ended.
        """
        yield from self._prepare(plan)
        works = [self._lane(sub_query, name) for sub_query in plan.sub_queries for name in sub_query.sources]
        jobs = yield from gather(works)
        return [job.result() for job in jobs]

    def _prepare(self, plan: QueryPlan) -> Flow[None]:
        """Make the retrievers, and begin to embed all queries of those that need no call to be made."""
        searches = [(sub_query, name) for sub_query in plan.sub_queries for name in sub_query.sources]
        for sub_query, name in searches:
            if _key(sub_query, name) not in self._prepared:
                chosen = self.selected[name]
                filters = chosen.filters_for(sub_query.filters.get(name))
                self._prepared[_key(sub_query, name)] = yield Start(chosen.source.prepare(filters, self._top_k))
        yield Wait([self._prepared[_key(*one)] for one in searches if self.selected[one[1]].source.prepares_at_once])
        yield from self._embeddings.begin(
            (model, sub_query.query)
            for sub_query, name in searches
            if (model := _model_of(self._prepared[_key(sub_query, name)])) is not None
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

    def _lane(self, sub_query: SubQuery, name: str) -> Flow[Lane]:
        chosen = self.selected[name]
        seconds = chosen.source.timeout or self._search_seconds
        deadline = earliest(self._budget.retrieval_deadline, deadline_after(seconds))
        record = self._open(sub_query, chosen)
        lane = Lane(sub_query, chosen.source, record, must_answer=chosen.params.fail_on_error)
        try:
            result = yield from self._search(lane, deadline)
        except GeneratorExit:
            self._log.cancel(record)
            raise
        except Exception as error:  # noqa: BLE001 (one search's failure is its own; it is kept and told)
            lane.error = error
            self._log.close(record, outcome=_outcome(error), count=0, error=describe_error(error, name))
            return lane
        lane.lists = result.lists
        nodes = result.nodes
        self._log.close(
            record,
            {EventPayload.NODES: nodes},
            outcome=Outcome.OK if nodes else Outcome.EMPTY,
            count=len(nodes),
            candidates=result.candidates,
            dropped_by_filter=result.dropped_by_filter,
            lanes=[_told_list(ranked, name) for ranked in result.lists],
        )
        return lane

    def _search(self, lane: Lane, deadline: float | None) -> Flow[SearchResult]:
        job = self._prepared[_key(lane.sub_query, lane.source.name)]
        yield Wait([job], deadline=deadline)
        prepared = job.result()
        bundle = QueryBundle(lane.sub_query.query)
        complete = partial(self._bundle_for, lane.sub_query, prepared, deadline)
        return (
            yield from lane.source.search(prepared, bundle, top_k=self._top_k, deadline=deadline, complete=complete)
        )

    def _bundle_for(self, sub_query: SubQuery, prepared: PreparedSource, deadline: float | None) -> Flow[QueryBundle]:
        """Give a bundle of its own to each search: retrievers write into theirs."""
        bundle = QueryBundle(query_str=sub_query.query)
        if self._bundle is not None and self._brings_vector(sub_query):
            given = self._bundle
            bundle.embedding = None if given.embedding is None else list(given.embedding)
            strings = given.custom_embedding_strs
            bundle.custom_embedding_strs = None if strings is None else list(strings)
            bundle.image_path = given.image_path
        elif prepared.embed_model is not None:
            bundle.embedding = yield from self._embeddings.get(prepared.embed_model, sub_query.query, deadline=deadline)
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


def _key(sub_query: SubQuery, name: str) -> tuple[str, str]:
    """Give what searches with one retriever share: the source, and the planner's filter on it."""
    made = sub_query.filters.get(name)
    return name, "" if made is None else made.model_dump_json()


def _told_list(ranked: NodeList, source: str) -> SearchLane:
    return SearchLane(
        kind=ranked.kind,
        count=len(ranked.nodes),
        candidates=ranked.candidates,
        elapsed_ms=ranked.elapsed_ms,
        error=None if ranked.error is None else describe_error(ranked.error, source),
        note=ranked.note,
    )


def _model_of(job: Job[PreparedSource]) -> Any:
    return job.value.embed_model if job.done and job.value is not None else None


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, DeniedError):
        return Outcome.DENIED
    return Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR


def _told(lane: Lane) -> str:
    """Give a failed lane's error in words; some errors have none of their own."""
    return redacted(str(lane.error)) or type(lane.error).__name__


def raise_if_lost(lanes: Sequence[Lane]) -> None:
    """Raise where no search could answer, or one that must did not; anything less is reported in the response.

    Raises:
        DeniedError: Every cause is a filter that could not be applied.
        RetrievalError: Every search failed, or one whose source has ``failOnError``. It holds every cause.
    """
    lost = [lane for lane in lanes if lane.error is not None]
    strict = [lane for lane in lost if lane.must_answer]
    if not strict and len(lost) < len(lanes):
        return
    guilty = strict or lost
    causes = {f"{lane.source.name}: {lane.sub_query.query}": lane.error for lane in guilty if lane.error is not None}
    told = {lane.source.name: _told(lane) for lane in reversed(guilty)}
    kind = DeniedError if all(isinstance(error, DeniedError) for error in causes.values()) else RetrievalError
    what = "a source with failOnError failed" if strict else "every selected source failed"
    raise kind(f"{what}: " + "; ".join(f"{name}: {reason}" for name, reason in told.items()), causes)


def missing_parts(lanes: Sequence[Lane]) -> list[MissingPart]:
    """Give what the failed lanes leave missing."""
    return [
        MissingPart(
            what=lane.source.name,
            outcome=lane.record.outcome or Outcome.ERROR,
            reason=_told(lane),
            sub_query_id=lane.sub_query.id,
        )
        for lane in lanes
        if lane.error is not None
    ]
