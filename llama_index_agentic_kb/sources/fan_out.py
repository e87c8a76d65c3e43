"""Searches every (sub-query x source) pair of a plan concurrently; a search that fails or hangs affects no other.

A hanging source would cost each request its whole timeout, although other sources answer in milliseconds. So there is
one rule for slow searches, called stragglers (``FanOut._waited_until``). Once another source has found something, a
running search gets, counted from the last answer or from its own start,

    the maximum of  its source's ``straggler_grace`` (1 s; 3 s until the source has answered for the first time),
                    twice the duration of the slowest search of another source,
                    twice the usual duration of its source

and is then cancelled: a timeout, reported with its reason. Time in which a search waits for a query vector or for a
bulkhead permit does not count. A source with ``failOnError``, or whose grace is None, gets its whole timeout; so does
the only source of a request. The shards of a source count as sources, but the usual duration is that of the median
shard: one that has become slow is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Job, call_deadline, deadline_after, earliest, set_deadline, start, wait
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.account.budget import current_budget
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, FailedSearch, RetrievalError
from llama_index_agentic_kb.guard.permissions import searched_under
from llama_index_agentic_kb.guard.resilience import STRAGGLER_GRACE, CallProgress
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
from llama_index_agentic_kb.search.embedding import SHARED_CACHE, EmbeddingCache, QueryEmbeddings, Vector
from llama_index_agentic_kb.search.follow_up import FollowUp
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.search import NodeList, PreparedSource, distinct_nodes, search_source
from llama_index_agentic_kb.sources.selection import SelectedSource
from llama_index_agentic_kb.sources.shards import ShardedSource

USUAL_FACTOR: Final = 2.0
"""A search may take this multiple of the usual duration before it counts as hanging."""

FIRST_FACTOR: Final = 3.0
"""The multiple of the grace for a source that has never answered: it may have to load first."""

LOOK_SECONDS: Final = 0.05
"""The minimum number of seconds between two checks of a running search."""


@dataclass(slots=True)
class SourceSearch:
    """One search and its outcome.

    Args:
        sub_query: The sub-query.
        source: The source that was searched.
        record: Its record in the activity log.
        lists: The results, one ranked list for each search method of the source.
        error: Why the search failed; None if it succeeded.
        must_answer: Whether the request fails if this search fails (``failOnError``).
        stage: The last stage that was reached: "preparation", "embedding" or "search".
        words: The text that was searched, if a conversation expanded the query.
    """

    sub_query: SubQuery
    source: KnowledgeSource
    record: SourceActivity
    lists: tuple[NodeList, ...] = ()
    error: Exception | None = None
    must_answer: bool = False
    stage: str = "preparation"
    words: str = ""

    def __post_init__(self) -> None:
        """Set the default of ``words``, the query."""
        self.words = self.words or self.sub_query.query

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)


@dataclass(eq=False, slots=True)
class RunningSearch:
    """A search that was started.

    Args:
        sub_query_id: The ID of the sub-query.
        chosen: The source that is searched.
        progress: The state of the search's calls.
        job: The job that returns its ``SourceSearch``.
        look: The timer of its next straggler check; None if it gets its whole timeout.
        whole: The source whose shard is searched; None if a whole source is searched.
    """

    sub_query_id: str
    chosen: SelectedSource
    progress: CallProgress
    job: Job[SourceSearch]
    look: asyncio.TimerHandle | None = None
    whole: KnowledgeSource | None = None

    @property
    def found_something(self) -> bool:
        """Whether the search has succeeded and found nodes."""
        done = self.job.done and self.job.error is None
        return done and any(ranked.nodes for ranked in self.job.result().lists)

    @property
    def grace(self) -> float:
        """The minimum number of seconds to wait for the search."""
        source = self.chosen.source
        usual, grace = (self.whole or source).usual_seconds, source.resilience.grace
        if grace is None:
            grace = STRAGGLER_GRACE  # used by ``wait_for``, which lets the search continue
        return FIRST_FACTOR * grace if usual is None else max(grace, USUAL_FACTOR * usual)


class _Answer(NamedTuple):
    source: str
    came: float
    seconds: float
    found_something: bool


class FanOut:
    """All searches of one request, within the deadlines of the request's budget (``current_budget``).

    Args:
        selected: The sources, by name.
        log: The request's activity log.
        top_k: The number of documents per search.
        search_seconds: The timeout of each search in seconds, unless its source has its own.
        bundle: The caller's query; its vector or embedding strings are used to search for the question itself.
        embedding_cache: The cache of query vectors shared by requests; None for no cache.
        max_searches: The maximum number of searches. Defaults to no limit.
        follow_up: How the question itself is searched in its conversation. Defaults to being searched as it is.
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
        follow_up: FollowUp | None = None,
    ) -> None:
        self.selected = selected
        self._log = log
        self._deadline = current_budget().retrieval_deadline
        self._top_k = top_k
        self._search_seconds = search_seconds
        self._bundle = bundle
        self._follow_up = follow_up
        self._embeddings = QueryEmbeddings(log.manager, deadline=self._deadline, cache=embedding_cache)
        self._prepared: dict[tuple[str, str], PreparedSource | Exception] = {}
        self._answers: list[_Answer] = []
        self._max_searches = max_searches
        self._planned = 0

    async def search(self, plan: QueryPlan) -> list[SourceSearch]:
        """Search every sub-query at each of its sources.

        Returns:
            One outcome for each search, in the plan's order, failed searches included.
        """
        running = await self.begin(plan)
        await wait([search.job for search in running])
        return [search.job.result() for search in running]

    async def begin(self, plan: QueryPlan) -> list[RunningSearch]:
        """Start searching each sub-query in each of its sources, and return the running searches in the plan's order.

        Searches beyond ``max_searches`` are left out. Stragglers are cancelled.
        """
        every = [(sub_query, self.selected[name]) for sub_query in plan.sub_queries for name in sub_query.sources]
        if self._max_searches is not None:
            left = max(0, self._max_searches - self._planned)
            self._planned += len(every)
            every = every[:left]
        models, running = [], []
        for sub_query, chosen in [(asked, part) for asked, whole in every for part in whole.shards or [whole]]:
            prepared = self._prepare(sub_query, chosen)
            model = prepared.traits.embed_model if isinstance(prepared, PreparedSource) else None
            if model is not None and not self._brings_vector(sub_query):
                follow_up = self._followed(sub_query)
                texts = [sub_query.query] if follow_up is None else follow_up.texts
                models += [(model, text) for text in texts]
        self._embeddings.begin(models)
        for sub_query, chosen in every:
            progress = CallProgress()
            job = start(self._search(sub_query, chosen, progress))
            search = RunningSearch(sub_query.id, chosen, progress, job)
            running.append(search)
            if len(self.selected) > 1 and not chosen.shards:
                self._watch(search)
        return running

    def _watch(self, search: RunningSearch) -> None:
        """Check from time to time whether a search is a straggler, unless it gets its whole timeout."""
        if search.chosen.source.resilience.grace is not None and not search.chosen.must_answer:
            self._look_after(search.grace, search)
            search.job.task.add_done_callback(partial(_look_no_more, search))

    @property
    def left_out(self) -> list[MissingPart]:
        """A report of the searches that exceeded ``max_searches``; empty if there are none."""
        if self._max_searches is None or self._planned <= self._max_searches:
            return []
        many = self._planned - self._max_searches
        reason = f"{many} searches beyond the first {self._max_searches} were not made (EffortLimits.searches)"
        return [MissingPart(what="searches", outcome=Outcome.SKIPPED, reason=reason)]

    # -- stragglers ------------------------------------------------------------------------------------------------

    async def wait_for(self, searches: Sequence[RunningSearch]) -> None:
        """Wait for searches until all are done or the retrieval deadline has passed.

        Once each sub-query has found something, the remaining searches are only waited for as long as stragglers are,
        and then continue in the background: a hanging source delays a round by about a second.
        """
        while pending := [search for search in searches if not search.job.done]:
            now = time.monotonic()
            found = {search.sub_query_id for search in searches if search.found_something}
            untils = [self._waited_until(search) or now + search.grace for search in pending]
            settled = all(search.sub_query_id in found for search in searches) and all(until <= now for until in untils)
            if settled or (self._deadline is not None and now >= self._deadline):
                return
            look = min([until for until in untils if until > now], default=now + STRAGGLER_GRACE)
            await wait([search.job for search in pending], deadline=earliest(self._deadline, look), first=True)

    def _look_after(self, seconds: float, search: RunningSearch) -> None:
        """Schedule the next check whether a search is to be cancelled, in ``seconds``."""
        search.look = asyncio.get_running_loop().call_later(seconds, self._look, search)

    def _look(self, search: RunningSearch) -> None:
        if search.job.done:
            return
        now, until = time.monotonic(), self._waited_until(search)
        if until is None or until > now:
            self._look_after(max(search.grace, LOOK_SECONDS) if until is None else until - now, search)
            return
        search.progress.given_up = (
            f"source {search.chosen.source.name!r} was still running {search.grace:.1f} s after the others had "
            "answered (Resilience.straggler_grace; None waits for its whole timeout)"
        )
        search.job.task.cancel()

    def _waited_until(self, search: RunningSearch) -> float | None:
        """Return the ``time.monotonic()`` to cancel a search at; None if it is idle, or no other source found nodes."""
        since = search.progress.at_work_since
        others = [answer for answer in self._answers if answer.source != search.chosen.source.name]
        if since is None or not any(answer.found_something for answer in others):
            return None
        slowest = max(answer.seconds for answer in others)
        return max(since, *(answer.came for answer in others)) + max(search.grace, USUAL_FACTOR * slowest)

    # -- one search ------------------------------------------------------------------------------------------------

    async def _search(self, sub_query: SubQuery, chosen: SelectedSource, progress: CallProgress) -> SourceSearch:
        """Search one source. Errors are stored in the outcome and its record; only cancellation is raised."""
        source = chosen.source
        search = SourceSearch(sub_query, source, self._open(sub_query, chosen), must_answer=chosen.must_answer)
        try:
            if isinstance(source, ShardedSource):
                search.lists = await self._lists_of_shards(search, source, chosen, progress)
            else:
                search.lists = await self._lists_in_time(search, chosen, progress)
            nodes = search.nodes
        except asyncio.CancelledError:
            self._log.cancel(search.record)
            raise
        except Exception as error:  # noqa: BLE001 (a failure affects only its search; it is stored and reported)
            return self._failed(search, error, progress)
        lists = search.lists
        self._log.close(
            search.record,
            {EventPayload.NODES: nodes},
            outcome=Outcome.OK if nodes else Outcome.EMPTY,
            count=len(nodes),
            candidates=sum(ranked.candidates for ranked in lists),
            dropped_by_filter=sum(ranked.dropped_by_filter for ranked in lists),
            dropped_as_unusable=sum(ranked.dropped_as_unusable for ranked in lists) or None,
            lanes=[_lane(part, source.name) for ranked in lists for part in ranked.parts or [ranked]],
            retries=progress.retries or None,
        )
        return search

    async def _lists_of_shards(
        self, search: SourceSearch, source: ShardedSource, chosen: SelectedSource, progress: CallProgress
    ) -> tuple[NodeList, ...]:
        """Search all shards of a source, each a straggler where others have answered, and return the merged lists."""
        running = []
        for shard in chosen.shards:
            made, its_progress = replace(search, source=shard.source), CallProgress()
            job = start(self._search_shard(made, shard, its_progress))
            running.append(RunningSearch(search.sub_query.id, shard, its_progress, job, whole=source))
            self._watch(running[-1])
        try:
            await wait([shard.job for shard in running])
        finally:
            for shard_search in running:
                shard_search.job.cancel()
        progress.calls = sum(one.progress.calls for one in running)
        progress.attempts = sum(one.progress.attempts for one in running)
        found = [one.job.result() for one in running]
        search.stage, search.words = found[0].stage, found[0].words
        lists = {one.source.name: one.lists if one.error is None else one.error for one in found}
        if chosen.must_answer and (errors := [one.error for one in found if one.error is not None]):
            raise errors[0]
        return source.merged(lists, source.similarity_top_k or self._top_k)

    async def _search_shard(self, search: SourceSearch, chosen: SelectedSource, progress: CallProgress) -> SourceSearch:
        """Search one shard, and store its lists or its error; only cancellation is raised."""
        try:
            search.lists = await self._lists_in_time(search, chosen, progress)
        except Exception as error:  # noqa: BLE001 (costs this shard's documents only; it is reported)
            search.error = error
            logger.warning(
                "shard %r did not answer %s: %s", search.source.name, search.sub_query.id, error_message(error)
            )
        return search

    async def _lists_in_time(
        self, search: SourceSearch, chosen: SelectedSource, progress: CallProgress
    ) -> tuple[NodeList, ...]:
        """Return the lists of a source or shard, searched within its deadline.

        Raises:
            DeadlineExceededError: The search was too slow, or given up as a straggler.
        """
        source, started = chosen.source, time.monotonic()
        set_deadline(earliest(self._deadline, deadline_after(source.resilience.timeout or self._search_seconds)))
        searched_under.set(source.permissions)
        try:
            lists = await self._lists(search, chosen, progress)
            found = bool(distinct_nodes(lists))  # calls methods of user-defined nodes
        except asyncio.CancelledError:
            if progress.given_up is None:
                raise
            raise DeadlineExceededError(progress.given_up) from None
        ended = time.monotonic()
        self._answers.append(_Answer(source.name, ended, ended - started, found))
        return lists

    async def _lists(
        self, search: SourceSearch, chosen: SelectedSource, progress: CallProgress
    ) -> tuple[NodeList, ...]:
        source, sub_query = chosen.source, search.sub_query
        prepared = self._prepare(sub_query, chosen)
        if prepared is None:
            filters = chosen.filters_for(sub_query.filters.get(source.name))
            prepared = await source.prepare(filters, self._top_k, progress)
        if isinstance(prepared, Exception):
            raise prepared
        bundle, limit = partial(self._bundle_for, search, prepared), source.similarity_top_k or self._top_k
        follow_up = self._followed(sub_query)
        if follow_up is not None:
            search.words = follow_up.words
        return await search_source(prepared, search.words, bundle, limit=limit, progress=progress)

    def _failed(self, search: SourceSearch, error: Exception, progress: CallProgress) -> SourceSearch:
        name, search.error = search.source.name, error
        ended = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
        self._log.close(
            search.record,
            outcome=Outcome.DENIED if isinstance(error, DeniedError) else ended,
            count=0,
            error=describe_error(error, name, search.stage),
            retries=progress.retries or None,
        )
        message = error_message(error)
        logger.warning("source %r did not answer %s (%s): %s", name, search.sub_query.id, search.stage, message)
        return search

    def _prepare(self, sub_query: SubQuery, chosen: SelectedSource) -> PreparedSource | Exception | None:
        """Return the source prepared for the sub-query's effective filter, cached; None if it has a factory."""
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

    async def _bundle_for(self, search: SourceSearch, prepared: PreparedSource) -> QueryBundle:
        """Return a new query bundle with its vector for one search: retrievers may modify it."""
        search.stage, query, model = "embedding", search.sub_query.query, prepared.traits.embed_model
        made = QueryBundle(query_str=query)
        if self._bundle is not None and self._brings_vector(search.sub_query):
            brought = self._bundle
            made.embedding = None if brought.embedding is None else list(brought.embedding)
            strings = brought.custom_embedding_strs
            made.custom_embedding_strs = None if strings is None else list(strings)
            made.image_path = brought.image_path
        elif model is not None:
            made.embedding = await self._vector(model, search.sub_query)
        search.stage = "search"
        return made

    def _followed(self, sub_query: SubQuery) -> FollowUp | None:
        """Return how a sub-query is searched in the conversation; None if it is searched as it is."""
        return self._follow_up if sub_query.origin is SubQueryOrigin.QUESTION else None

    async def _vector(self, model: BaseEmbedding, sub_query: SubQuery) -> Vector:
        follow_up, deadline = self._followed(sub_query), call_deadline()
        if follow_up is None:
            return await self._embeddings.get(model, sub_query.query, deadline=deadline)
        needed = [follow_up.question, *filter(None, [follow_up.expanded])]
        vectors = {text: await self._embeddings.get(model, text, deadline=deadline) for text in needed}
        return follow_up.vector(vectors.__getitem__)

    async def follow_up_vectors(self, source: str) -> tuple[BaseEmbedding, dict[str, Vector]] | None:
        """Return a source's embedding model and the vectors of the conversation's texts; None if it has none."""
        prepared = self._prepared.get((source, ""))
        model = prepared.traits.embed_model if isinstance(prepared, PreparedSource) else None
        if model is None or self._follow_up is None:
            return None
        texts = self._follow_up.texts
        try:
            return model, {text: await self._embeddings.get(model, text, deadline=self._deadline) for text in texts}
        except Exception:  # noqa: BLE001 (the search that failed for it has reported it)
            return None

    def _brings_vector(self, sub_query: SubQuery) -> bool:
        """Return whether the caller's bundle has a vector or embedding strings for this sub-query."""
        bundle = self._bundle
        if bundle is None or sub_query.origin is not SubQueryOrigin.QUESTION:
            return False
        says_how = bundle.embedding is not None or bundle.custom_embedding_strs is not None
        return says_how and bundle.query_str.strip() == sub_query.query

    def _open(self, sub_query: SubQuery, chosen: SelectedSource) -> SourceActivity:
        name, payload = chosen.source.name, None
        if self._log.manager.handlers:
            question = SubQuestion(sub_question=sub_query.query, tool_name=name)
            payload = {EventPayload.SUB_QUESTION: SubQuestionAnswerPair(sub_q=question)}
        return self._log.open(
            SourceActivity,
            CBEventType.SUB_QUESTION,
            payload,
            type=chosen.source.kind,
            knowledge_source_name=name,
            sub_query_id=sub_query.id,
            query_time=datetime.now(UTC),
            arguments=SearchArguments(search=sub_query.query, filter=chosen.filters_for(sub_query.filters.get(name))),
            warning=chosen.warning,
        )


def _look_no_more(search: RunningSearch, _: object) -> None:
    if search.look is not None:
        search.look.cancel()


def _lane(ranked: NodeList, source: str) -> SearchLane:
    """Return the activity log's record of a ranked list."""
    return SearchLane(
        kind=ranked.kind,
        shard=ranked.shard,
        count=len(ranked.nodes),
        candidates=ranked.candidates,
        elapsed_ms=ranked.elapsed_ms,
        error=None if ranked.error is None else describe_error(ranked.error, source, "search"),
        note=ranked.note,
    )


# -- what failed searches mean for their request ----------------------------------------------------------------------


def raise_if_lost(searches: Sequence[SourceSearch]) -> None:
    """Raise if all searches failed, or one whose source has ``failOnError``; other failures go into the response.

    Raises:
        DeniedError: A search failed as above, and every cause is a ``DeniedError``.
        RetrievalError: Every search failed, or one whose source has ``failOnError``. It contains all causes.
    """
    failed = [(search, search.error) for search in searches if search.error is not None]
    strict = [(search, error) for search, error in failed if search.must_answer]
    if not strict and (not searches or len(failed) < len(searches)):
        return
    causes: dict[str, Exception] = {}
    reasons: dict[str, str] = {}
    failures = []
    for search, error in strict or failed:
        name, query, described = search.source.name, search.sub_query.query, describe_error(error)
        causes[f"{name}: {query}"] = error
        reasons.setdefault(name, error_message(error))
        failures.append(FailedSearch(name, search.stage, described.code, described.message, query))
    kind = DeniedError if all(isinstance(error, DeniedError) for error in causes.values()) else RetrievalError
    what = "a source with failOnError failed" if strict else "every selected source failed"
    raise kind(f"{what}: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()), causes, failures)


def missing_parts(searches: Sequence[SourceSearch]) -> list[MissingPart]:
    """Return a ``MissingPart`` for each failed search, and for each list that failed beside one that succeeded."""
    failed = [(search, search.error, "") for search in searches if search.error is not None]
    failed += [
        (search, one.error, f"its {one.kind} search {f'in shard {one.shard!r} ' if one.shard else ''}failed: ")
        for search in searches
        for ranked in search.lists
        for one in ranked.parts or [ranked]
        if one.error is not None
    ]
    made = []
    for search, error, what in failed:
        late = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
        made.append(
            MissingPart(
                what=search.source.name,
                outcome=late if what else search.record.outcome or Outcome.ERROR,
                reason=what + error_message(error),
                sub_query_id=search.sub_query.id,
            )
        )
    return made
