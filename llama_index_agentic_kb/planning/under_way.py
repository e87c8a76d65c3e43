"""The searches of a request that a model plans: begun in batches, waited for by sub-query."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from llama_index_agentic_kb._aio import earliest, wait
from llama_index_agentic_kb.schema import QueryPlan, SubQuery
from llama_index_agentic_kb.sources.fan_out import Batch, FanOut, SourceSearch
from llama_index_agentic_kb.sources.stragglers import RunningSearch

__all__ = ["SearchesUnderWay"]


class SearchesUnderWay:
    """What was begun to search, in the order in which it was planned.

    Args:
        fan_out: Searches.
        names: The sources' names, in order.
        deadline: ``time.monotonic()`` at which searching ends.
    """

    def __init__(self, fan_out: FanOut, names: Sequence[str], deadline: float | None) -> None:
        self.sub_queries: dict[str, SubQuery] = {}
        """What was begun, by id; each with all the sources that it was begun at."""
        self._fan_out = fan_out
        self._names = names
        self._deadline = deadline
        self._batches: list[Batch] = []

    async def begin(self, sub_queries: Sequence[SubQuery]) -> None:
        """Start to search; those ready together are embedded in one batch."""
        begun = [one.model_copy() for one in sub_queries]  # what is noted may get further sources
        self._know(sub_queries)
        self._batches.append(await self._fan_out.begin(QueryPlan(sub_queries=begun)))

    def note(self, sub_queries: Sequence[SubQuery], batch: Batch) -> None:
        """Add searches that somebody else began."""
        self._know(sub_queries)
        self._batches.append(batch)

    def _know(self, sub_queries: Sequence[SubQuery]) -> None:
        for one in sub_queries:
            known = self.sub_queries.setdefault(one.id, one)
            wanted = {*known.sources, *one.sources}
            known.sources = [name for name in self._names if name in wanted]

    async def arrived(self, ids: Collection[str]) -> None:
        """Wait for the searches of some sub-queries, as long as searching may take.

        Where each sub-query has found something, the rest is waited for as a slow source is when the others have
        answered (see ``sources.stragglers``), and goes on beside what follows: one source that hangs costs a wave a
        second, also where it is not given up.
        """
        stragglers = self._fan_out.stragglers
        while pending := [one for one in self._of(ids) if not one.job.done]:
            if self._each_found_something(ids) and stragglers.waited_enough(pending):
                return
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            until = earliest(self._deadline, stragglers.next_look(pending))
            await wait([one.job for one in pending], deadline=until, first=True)

    def _of(self, ids: Collection[str]) -> list[RunningSearch]:
        return [one for batch in self._batches for one in batch.of(ids)]

    def _each_found_something(self, ids: Collection[str]) -> bool:
        searches = self._of(ids)
        found = {one.sub_query_id for one in searches if one.found_something}
        return all(one.sub_query_id in found for one in searches)

    async def finished(self) -> None:
        """Wait until every search has ended."""
        await wait([batch.whole for batch in self._batches])

    @property
    def lanes(self) -> list[SourceSearch]:
        """What is there, in the order in which it was planned."""
        lanes = [lane for batch in self._batches for lane in batch.lanes]
        order = {name: position for position, name in enumerate(self.sub_queries)}
        return sorted(lanes, key=lambda lane: order[lane.sub_query.id])
