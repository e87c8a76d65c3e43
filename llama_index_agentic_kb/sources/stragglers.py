"""How long a slow source is waited for when the others have answered.

A source that hangs would cost each request its whole timeout, although the answer may be there in milliseconds. Once
some other source has found something, a search that is at work gets, counted from the last answer or from its own
beginning,

    the greatest of  its source's ``straggler_grace`` (1 s; 3 s until the source has answered for the first time),
                     twice the time that the slowest of the others took,
                     twice the time that its source usually takes

and is then given up: a timeout, reported with its reason. What counts is work: while a search waits for a query's
vector or for a permit of a bulkhead, its source is not to blame. A source with ``failOnError``, and one whose grace is
None, has its whole time; and where there is only one source, nothing is gained by not waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_index_agentic_kb._aio import Job, wait
from llama_index_agentic_kb.guard.resilience import STRAGGLER_GRACE, CallProgress
from llama_index_agentic_kb.sources.base import KnowledgeSource

__all__ = ["RunningSearch", "Stragglers"]

USUAL_FACTOR: Final = 2.0
"""So many times what is usual is still no sign of a hang."""

FIRST_FACTOR: Final = 3.0
"""What was never called before may have to load."""


@dataclass(eq=False, slots=True)
class RunningSearch:
    """A search that was started.

    Args:
        sub_query_id: What is searched.
        source: Where.
        must_answer: Whether its failure is the request's.
        progress: How far it has come.
        job: Ends with its ``SourceSearch``.
    """

    sub_query_id: str
    source: KnowledgeSource
    must_answer: bool
    progress: CallProgress
    job: Job[Any]

    @property
    def found_something(self) -> bool:
        """Whether it is done and has evidence."""
        return self.job.value is not None and any(ranked.nodes for ranked in self.job.value.lists)

    @property
    def may_be_given_up(self) -> bool:
        """Whether the straggler rule applies to it."""
        return self.source.resilience.grace is not None and not self.must_answer and self.progress.given_up is None

    @property
    def grace(self) -> float:
        """The least seconds that it is waited for."""
        usual, grace = self.source.usual_seconds, self.source.resilience.grace
        if grace is None:
            grace = STRAGGLER_GRACE  # of those who go on beside it
        return FIRST_FACTOR * grace if usual is None else max(grace, USUAL_FACTOR * usual)

    def give_up(self) -> None:
        """Cancel it: it ends with a timeout and the reason."""
        self.progress.given_up = (
            f"source {self.source.name!r} was still running {self.grace:.1f} s after the others had answered "
            "(Resilience.straggler_grace; None waits for its whole timeout)"
        )
        if self.job.task is not None:
            self.job.task.cancel()


@dataclass(frozen=True, slots=True)
class _Answer:
    source: str
    came: float
    seconds: float
    found_something: bool


class Stragglers:
    """Watches the searches of one request and gives up those that are waited for in vain."""

    def __init__(self) -> None:
        self._answers: list[_Answer] = []

    def answered(self, source: str, seconds: float, *, found_something: bool) -> None:
        """Note that a search has ended well, after so many seconds."""
        self._answers.append(_Answer(source, time.monotonic(), seconds, found_something))

    async def watch(self, searches: Sequence[RunningSearch]) -> None:
        """Wait for searches until each has ended or was given up."""
        pending = list(searches)
        while pending:
            watched = [search for search in pending if search.may_be_given_up]
            look = self.next_look(watched) if watched else None
            await wait([search.job for search in pending], deadline=look)  # no answer brings a decision forward
            pending = [search for search in pending if not search.job.done]
            for search in pending:
                if search.may_be_given_up and self.waited_enough([search]):
                    search.give_up()

    def waited_enough(self, pending: Sequence[RunningSearch]) -> bool:
        """Return whether each of these searches was waited for as long as the rule says."""
        now = time.monotonic()
        return all((until := self._until(search)) is not None and now >= until for search in pending)

    def next_look(self, pending: Sequence[RunningSearch]) -> float:
        """Return ``time.monotonic()`` at which to ask again; what begins to work in the meantime wakes nobody up."""
        now = time.monotonic()
        looks = [now + search.grace if (until := self._until(search)) is None else until for search in pending]
        return min((look for look in looks if look > now), default=now + STRAGGLER_GRACE)

    def _until(self, search: RunningSearch) -> float | None:
        """Return ``time.monotonic()`` until which a search is waited for; None where nothing speaks against it yet."""
        since = search.progress.at_work_since
        others = [answer for answer in self._answers if answer.source != search.source.name]
        if since is None or not any(answer.found_something for answer in others):
            return None
        slowest = max(answer.seconds for answer in others)
        return max(since, *(answer.came for answer in others)) + max(search.grace, USUAL_FACTOR * slowest)
