"""Searches every (sub-query x source) pair of a plan concurrently; a search that fails or hangs affects no other.

A hanging source would cost each request its whole timeout. So there is one rule for slow searches, called stragglers
(``FanOut._waited_until``). Once another source has found something, a running search gets, counted from the last answer
or from its own start,

    the maximum of  its source's ``straggler_grace`` (1 s; 3 s until the source has answered for the first time),
                    twice the duration of the slowest search of another source,
                    twice the usual duration of its source

and is then cancelled: a timeout, reported with its reason. Time in which a search waits for a query vector or for a
bulkhead permit does not count. A source with ``failOnError``, or whose grace is None, gets its whole timeout; so does
the only source of a request. If ``MANY`` requests search at once, ``FINISH_SECONDS`` are kept free for each before the
deadline, and no straggler is waited for then: all of them would end together, and late. The shards of a source count
as sources, but the usual duration is that of the median shard: one that has become slow is not waited for.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from typing import Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.query_engine.sub_question_query_engine import SubQuestionAnswerPair
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Job, call_deadline, deadline_after, earliest, set_deadline, start, wait
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account import ActivityLog, current_budget, describe_error
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, FailedSearch, RetrievalError
from llama_index_agentic_kb.guard.permissions import searched_under
from llama_index_agentic_kb.guard.resilience import STRAGGLER_GRACE, CallProgress
from llama_index_agentic_kb.schema import (
    FilterNode,
    MissingPart,
    Outcome,
    QueryPlan,
    SearchArguments,
    SearchLane,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.search.embedding import SHARED_CACHE, EmbeddingCache, QueryEmbeddings
from llama_index_agentic_kb.search.follow_up import Compared, FollowUp
from llama_index_agentic_kb.sources.base import KnowledgeSource, SelectedSource
from llama_index_agentic_kb.sources.search import NodeList, PreparedSource, distinct_nodes, search_source
from llama_index_agentic_kb.sources.shards import ShardedSource

USUAL_FACTOR: Final = 2.0  # of the usual duration, before a search counts as hanging
FIRST_FACTOR: Final = 3.0  # of the grace, for a source that has never answered: it may have to load first
LOOK_SECONDS: Final = 0.05  # at least, between two checks of a running search
FINISH_SECONDS: Final = 0.008  # of evidence and answer: 4 ms of a core that is shared with others
FINISH_SHARE: Final = 0.5  # of the time for searches, at most, that is kept free
MANY: Final = 10

_under_way: weakref.WeakSet[FanOut] = weakref.WeakSet()  # those that search now


@dataclass(eq=False, slots=True)
class SourceSearch:
    """One search of one source, with its outcome once it is done."""

    sub_query: SubQuery
    source: KnowledgeSource
    number: int  # of the search in its request: the id of its record, if it has one
    record: SourceActivity | None  # None if nobody reads the activity log
    must_answer: bool = False  # whether the request fails if this search fails (``failOnError``)
    filters: FilterNode | None = None  # the effective filter, which shards share
    words: str = ""  # the text that is searched: the query, which a conversation may expand
    lists: tuple[NodeList, ...] = ()  # the results, one ranked list for each search method of the source
    nodes: Sequence[NodeWithScore] = ()  # of all lists, each once, in the lists' order
    error: Exception | None = None
    stage: str = "preparation"  # the last that was reached; then "embedding" and "search"
    progress: CallProgress = field(default_factory=CallProgress)
    brought: QueryBundle | None = None
    """The caller's query, if its vector or embedding strings are searched; None if the query is embedded."""
    follow_up: FollowUp | None = None  # how the query is searched in its conversation; None if it is searched as it is
    whole: KnowledgeSource | None = None  # the source whose shard is searched; None if a whole source is searched
    seconds: tuple[float, float] | None = None
    """The ``time.monotonic()`` of its start and answer; None until it has succeeded, and for a source with shards."""
    parts: list[SourceSearch] = field(default_factory=list)  # the searches of its shards, once they have begun
    job: Job[None] = field(init=False)

    @property
    def grace(self) -> float:
        """The minimum number of seconds to wait for the search."""
        usual, grace = (self.whole or self.source).usual_seconds, self.source.resilience.grace
        if grace is None:
            grace = STRAGGLER_GRACE  # used by ``wait_for``, which lets the search continue
        return FIRST_FACTOR * grace if usual is None else max(grace, USUAL_FACTOR * usual)


class FanOut:
    """All searches of one request, within the deadlines of the request's budget (``current_budget``).

    The vector or embedding strings of ``bundle`` are used to search for the question itself, which ``follow_up``
    relates to its conversation. A search takes ``search_seconds``, unless its source has a timeout of its own.
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
        self._began = time.monotonic()
        self._top_k = top_k
        self._search_seconds = search_seconds
        self._brought: QueryBundle | None = None
        if bundle is not None and (bundle.embedding is not None or bundle.custom_embedding_strs is not None):
            self._brought = bundle
        self.follow_up = follow_up
        self._embeddings = QueryEmbeddings(log.manager, deadline=self._deadline, cache=embedding_cache)
        self._prepared: dict[tuple[str, str], PreparedSource | Exception] = {}
        self._compared: dict[int, Compared] = {}
        self._searches: list[SourceSearch] = []  # of sources without shards, and of shards
        self._watched: list[SourceSearch] = []
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._max_searches = max_searches
        self._planned = 0
        self.left_out: list[MissingPart] = []
        """A report of the searches that exceeded ``max_searches``, if any."""

    async def search(self, plan: QueryPlan) -> list[SourceSearch]:
        """Search every sub-query at each of its sources, and return the searches, failed ones included."""
        searches = self.begin(plan)
        await wait([search.job for search in searches])
        return searches

    def begin(self, plan: QueryPlan) -> list[SourceSearch]:
        """Start searching each sub-query in each of its sources, and return the searches in the plan's order.

        Searches beyond ``max_searches`` are left out. Stragglers are cancelled.
        """
        begun, plain, models = list[SourceSearch](), list[SourceSearch](), list[tuple[BaseEmbedding, str]]()
        for sub_query in plan.sub_queries:
            for name in sub_query.sources:
                self._planned += 1
                if self._max_searches is not None and self._planned > self._max_searches:
                    continue
                whole, context = self.selected[name], contextvars.copy_context()
                search = context.run(self._opened, sub_query, whole)
                search.job = start(self._search(search, whole), context)  # after all have been opened
                begun.append(search)
                parts = whole.shards if whole.source.shards else [whole]
                plain += [] if whole.source.shards else [search]
                for part in parts if search.brought is None else ():
                    prepared = self._prepare(search, part)
                    if isinstance(prepared, PreparedSource) and prepared.traits.embed_model is not None:
                        texts = [sub_query.query] if search.follow_up is None else search.follow_up.texts
                        models += zip(repeat(prepared.traits.embed_model), texts)
        if self._max_searches is not None and (many := self._planned - self._max_searches) > 0:
            reason = f"{many} searches beyond the first {self._max_searches} were not made (EffortLimits.searches)"
            self.left_out = [MissingPart(what="searches", outcome=Outcome.SKIPPED, reason=reason)]
        if models:
            self._embeddings.begin(models)
        self._running += len(begun)
        _under_way.add(self)
        self._searches += plain
        if len(self.selected) > 1:
            self._watch(plain)
        return begun

    def _opened(self, sub_query: SubQuery, chosen: SelectedSource) -> SourceSearch:
        """Return a search that begins, with its record, which is opened in the context of the search."""
        source, number, record, payload = chosen.source, self._planned, None, None
        planner = sub_query.filters.get(source.name)
        filters = chosen.filters if planner is None else source.effective_filter(chosen.caller, planner)
        if self._log.is_read:
            if self._log.manager.handlers:
                question = SubQuestion(sub_question=sub_query.query, tool_name=source.name)
                payload = {EventPayload.SUB_QUESTION: SubQuestionAnswerPair(sub_q=question)}
            record = self._log.open(
                SourceActivity,
                CBEventType.SUB_QUESTION,
                payload,
                type=source.kind,
                knowledge_source_name=source.name,
                sub_query_id=sub_query.id,
                query_time=datetime.now(UTC),
                arguments=SearchArguments(search=sub_query.query, filter=filters),
                warning=chosen.warning,
            )
            number = record.id
        strict = chosen.params.fail_on_error
        search = SourceSearch(sub_query, source, number, record, strict, filters, sub_query.query)
        if sub_query.origin is SubQueryOrigin.QUESTION:
            if self._brought is not None and self._brought.query_str.strip() == sub_query.query:
                search.brought = self._brought
            if self.follow_up is not None:
                search.follow_up, search.words = self.follow_up, self.follow_up.words
        return search

    # -- stragglers ------------------------------------------------------------------------------------------------

    def forget(self, searches: Sequence[SourceSearch]) -> None:
        """Forget the errors of searches, once they were reported: their frames hold this object and all nodes.

        Where a source hangs, each request would else stay until the garbage collector finds it, in pauses of 0.1 s.
        """
        for search in (*searches, *self._searches):
            search.error = None
        self._prepared.clear()

    async def wait_for(self, searches: Sequence[SourceSearch]) -> None:
        """Wait for searches until all are done or the retrieval deadline has passed.

        Once each sub-query has found something, the remaining searches are only waited for as long as stragglers are,
        and then continue in the background: a hanging source delays a round by about a second.
        """
        while pending := [search for search in searches if not search.job.done]:
            now = time.monotonic()
            found = {search.sub_query.id for search in searches if search.nodes}
            untils = [self._waited_until(search) for search in pending]
            untils = [
                now + one.grace if until == math.inf else until for one, until in zip(pending, untils, strict=True)
            ]
            settled = all(search.sub_query.id in found for search in searches) and all(until <= now for until in untils)
            if settled or (self._deadline is not None and now >= self._deadline):
                return
            look = min([until for until in untils if until > now], default=now + STRAGGLER_GRACE)
            await wait([search.job for search in pending], deadline=earliest(self._deadline, look), first=True)

    def _watch(self, searches: Sequence[SourceSearch]) -> None:
        """Cancel those of the searches that become stragglers, unless they get their whole timeout."""
        soonest = list[float]()  # none can be late before that
        for search in searches:
            if (grace := search.source.resilience.grace) is not None and not search.must_answer:
                self._watched.append(search)
                soonest.append(grace)
        if soonest:
            if self._deadline is not None:  # how many requests there are by then is not known yet
                half = self._deadline - FINISH_SHARE * (self._deadline - self._began)
                soonest.append(max(0.0, half - time.monotonic()))
            self._look_in(min(soonest))

    def _look_in(self, seconds: float) -> None:
        """Look for stragglers in ``seconds``, or earlier if that was due, with one timer for all searches."""
        loop = asyncio.get_running_loop()
        when, due = loop.time() + seconds, self._timer
        if due is not None:
            when = min(when, due.when())
            due.cancel()
        self._timer = loop.call_at(when, self._look)

    def _look(self) -> None:
        """Cancel the searches that are much slower than the others; see the module."""
        self._timer = None
        now, looks = time.monotonic(), list[float]()
        for search in [search for search in self._watched if not search.job.done]:
            until = self._waited_until(search)
            if until <= now:
                why = f"{search.grace:.1f} s after the others had answered"
                if now >= self._last_wait:
                    why = f"when {len(_under_way)} requests had to end in time"
                search.progress.given_up = (
                    f"source {search.source.name!r} was still running {why} "
                    "(Resilience.straggler_grace; None waits for its whole timeout)"
                )
                search.job.task.cancel()
            elif until < math.inf:
                looks.append(until - now)
            else:
                looks.append(max(min(search.grace, self._last_wait - now), LOOK_SECONDS))
        if looks:
            self._look_in(min(looks))

    @property
    def _last_wait(self) -> float:
        """The ``time.monotonic()`` after which no straggler is waited for; infinity if there are few requests."""
        if self._deadline is None or len(_under_way) < MANY:
            return math.inf
        kept_free = min(FINISH_SECONDS * len(_under_way), FINISH_SHARE * (self._deadline - self._began))
        return self._deadline - kept_free

    def _waited_until(self, search: SourceSearch) -> float:
        """Return the ``time.monotonic()`` to cancel a search at; infinity if no other source found nodes.

        An idle search is waited for until ``_last_wait``, and a search of shards as long as the last of them.
        """
        if search.parts:
            return max((self._waited_until(part) for part in search.parts if not part.job.done), default=math.inf)
        others = [one for one in self._searches if one.seconds and one.source.name != search.source.name]
        if not any(other.nodes for other in others):
            return math.inf
        since, times = search.progress.at_work_since, [other.seconds for other in others if other.seconds is not None]
        if since is None:
            return self._last_wait
        slowest = max(came - started for started, came in times)
        usual = max(since, *(came for _, came in times)) + max(search.grace, USUAL_FACTOR * slowest)
        return min(usual, self._last_wait)

    async def _search(self, search: SourceSearch, chosen: SelectedSource) -> None:
        """Search one source. Errors are stored in the search and its record; only cancellation is raised."""
        source, progress = search.source, search.progress
        try:
            if isinstance(source, ShardedSource):
                await self._search_shards(search, source, chosen)
            else:
                await self._find(search, chosen)
        except asyncio.CancelledError:
            if search.record is not None:
                self._log.cancel(search.record)
            raise
        except Exception as error:  # noqa: BLE001 (a failure affects only its search; it is stored and reported)
            self._fail(search, error)
            return
        finally:
            self._running -= 1
            if not self._running:
                _under_way.discard(self)
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        if search.record is None:
            return
        candidates = by_filter = unusable = 0
        lanes = list[SearchLane]()
        for ranked in search.lists:
            candidates += ranked.candidates
            by_filter += ranked.dropped_by_filter
            unusable += ranked.dropped_as_unusable
            for part in ranked.parts or [ranked]:
                lane = SearchLane(
                    kind=part.kind,
                    count=len(part.nodes),
                    candidates=part.candidates,
                    elapsed_ms=part.elapsed_ms,
                    error=None if part.error is None else describe_error(part.error, source.name, "search"),
                    note=part.note,
                    shard=part.shard,
                )
                lanes.append(lane)
        self._log.close(
            search.record,
            {EventPayload.NODES: [*search.nodes]},
            outcome=Outcome.OK if search.nodes else Outcome.EMPTY,
            count=len(search.nodes),
            candidates=candidates,
            dropped_by_filter=by_filter,
            dropped_as_unusable=unusable or None,
            lanes=lanes,
            retries=max(0, progress.attempts - progress.calls) or None,
        )

    async def _search_shards(self, search: SourceSearch, source: ShardedSource, chosen: SelectedSource) -> None:
        """Search all shards of a source, each a straggler where others have answered, and store the merged lists."""
        parts = list[SourceSearch]()
        for shard in chosen.shards:
            part = replace(search, source=shard.source, progress=CallProgress(), whole=source)
            part.job = start(self._search_shard(part, shard))
            parts.append(part)
        search.parts = parts
        self._searches += parts
        self._watch(parts)
        try:
            await wait([part.job for part in parts])
        finally:
            for part in parts:
                part.job.cancel()
        search.progress.calls = sum(part.progress.calls for part in parts)
        search.progress.attempts = sum(part.progress.attempts for part in parts)
        search.stage = parts[0].stage
        lists = {part.source.name: part.lists if part.error is None else part.error for part in parts}
        if search.must_answer and (errors := [part.error for part in parts if part.error is not None]):
            raise errors[0]
        search.lists = source.merged(lists, chosen.top_k or self._top_k)
        search.nodes = [*distinct_nodes(search.lists).values()]

    async def _search_shard(self, search: SourceSearch, chosen: SelectedSource) -> None:
        """Search one shard, and store its lists or its error; only cancellation is raised."""
        try:
            await self._find(search, chosen)
        except Exception as error:  # noqa: BLE001 (costs this shard's documents only; it is reported)
            search.error, name, words = error, search.source.name, error_message(error)
            logger.warning("shard %r did not answer %s: %s", name, search.sub_query.id, words)

    async def _find(self, search: SourceSearch, chosen: SelectedSource) -> None:
        """Store the lists of a source or shard, searched within its deadline, unless it is given up as a straggler."""
        source, progress, started = search.source, search.progress, time.monotonic()
        limit = chosen.top_k or self._top_k
        searched_under.set(source.permissions)
        deadline = earliest(self._deadline, deadline_after(source.resilience.timeout or self._search_seconds))
        bound = set_deadline(deadline)
        try:
            prepared = self._prepare(search, chosen)
            if prepared is None:
                prepared = await source.prepare(search.filters, limit, progress)
            if isinstance(prepared, Exception):
                raise prepared
            bundle = partial(self._bundle_for, search, prepared)
            search.lists = await search_source(prepared, search.words, bundle, limit=limit, progress=progress)
        except asyncio.CancelledError:
            if progress.given_up is None:
                raise
            raise DeadlineExceededError(progress.given_up) from None
        finally:
            bound.over = True
        search.nodes = [*distinct_nodes(search.lists).values()]
        search.seconds = started, time.monotonic()

    def _fail(self, search: SourceSearch, error: Exception) -> None:
        name, search.error = search.source.name, error
        if search.record is not None:
            self._log.close(
                search.record,
                outcome=_ended(error),
                count=0,
                error=describe_error(error, name, search.stage),
                retries=max(0, search.progress.attempts - search.progress.calls) or None,
            )
        asked, stage = search.sub_query.id, search.stage
        logger.warning("source %r did not answer %s (%s): %s", name, asked, stage, error_message(error))

    def _prepare(self, search: SourceSearch, chosen: SelectedSource) -> PreparedSource | Exception | None:
        """Return the source prepared for the search's effective filter, cached; None if it has a factory."""
        if chosen.denied is not None:
            return DeniedError(f"source {chosen.source.name!r} was not searched: {chosen.denied}")
        if chosen.source.has_factory:
            return None
        planner = search.sub_query.filters.get(chosen.name)
        key = chosen.source.name, "" if planner is None else planner.model_dump_json()
        if key not in self._prepared:
            try:
                self._prepared[key] = chosen.source.prepared(search.filters, chosen.top_k or self._top_k)
            except Exception as error:  # noqa: BLE001 (raised in each search)
                self._prepared[key] = error
        return self._prepared[key]

    async def _bundle_for(self, search: SourceSearch, prepared: PreparedSource) -> QueryBundle:
        """Return a new query bundle with its vector for one search: retrievers may modify it."""
        search.stage, follow_up, model = "embedding", search.follow_up, prepared.traits.embed_model
        made = QueryBundle(query_str=search.sub_query.query)
        if search.brought is not None:
            made = replace(copy.deepcopy(search.brought), query_str=made.query_str)
        elif model is not None and follow_up is not None and follow_up.expanded:
            made.embedding = [*(await self._compare(follow_up, model, call_deadline())).query]
        elif model is not None:
            made.embedding = await self._embeddings.get(model, made.query_str, deadline=call_deadline())
        search.stage = "search"
        return made

    async def _compare(self, follow_up: FollowUp, model: BaseEmbedding, deadline: float | None) -> Compared:
        """Return how the question compares with its conversation by a model; computed once."""
        if id(model) not in self._compared:
            vectors = {text: await self._embeddings.get(model, text, deadline=deadline) for text in follow_up.texts}
            self._compared[id(model)] = follow_up.compared(vectors)
        return self._compared[id(model)]

    async def compared(self, source: KnowledgeSource, seconds: float) -> tuple[BaseEmbedding, Compared] | None:
        """Return a source's embedding model, and the question compared with its conversation; None if it is late.

        Of a collection in shards it is the model of the first shard that has one.
        """
        prepared = [self._prepared.get((shard.name, "")) for shard in source.shards or [source]]
        models = [one.traits.embed_model for one in prepared if isinstance(one, PreparedSource)]
        model = next(filter(None, models), None)
        if model is None or self.follow_up is None:
            return None
        try:
            return model, await self._compare(self.follow_up, model, earliest(self._deadline, deadline_after(seconds)))
        except Exception:  # noqa: BLE001 (the search that failed for it has reported it)
            return None


# -- what failed searches mean for their request ----------------------------------------------------------------------


def missing_parts(searches: Sequence[SourceSearch], *, answered: bool = False) -> list[MissingPart]:
    """Return a ``MissingPart`` for each failed search, and for each list that failed beside one that succeeded.

    Raises:
        DeniedError, RetrievalError: All searches failed, or one of a source with ``failOnError``; unless the request
            is ``answered`` without them.
    """
    made, failed = list[MissingPart](), list[tuple[SourceSearch, Exception]]()
    for search in searches:
        if search.error is not None:
            failed.append((search, search.error))
            made.append(_missing(search, search.error))
        for ranked in search.lists:
            for part in ranked.parts or [ranked]:
                if part.error is not None:
                    where = f"in shard {part.shard!r} " if part.shard else ""
                    made.append(_missing(search, part.error, f"its {part.kind} search {where}failed: "))
    if failed and not answered:
        _raise_if_lost(failed, len(searches))
    return made


def _missing(search: SourceSearch, error: Exception, what: str = "") -> MissingPart:
    reason, name = what + error_message(error), search.source.name
    return MissingPart(what=name, outcome=_ended(error), reason=reason, sub_query_id=search.sub_query.id)


def _ended(error: Exception) -> Outcome:
    if isinstance(error, DeniedError):
        return Outcome.DENIED
    return Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR


def _raise_if_lost(failed: Sequence[tuple[SourceSearch, Exception]], count: int) -> None:
    """Raise if all of so many searches failed, or one of a source with ``failOnError``."""
    strict = [one for one in failed if one[0].must_answer]
    if not strict and len(failed) < count:
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
