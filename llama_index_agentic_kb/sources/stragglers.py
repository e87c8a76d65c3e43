"""How long a slow source is waited for when the others have answered.

A source that hangs would cost each request its whole timeout, although the answer may be there in milliseconds. Once
some other source has found something, a search that is at work gets, counted from the last answer or from its own
beginning,

    the greatest of  its source's ``straggler_grace`` (1 s; 3 s until the source has answered for the first time),
                     twice the time that the slowest of the others took,
                     twice the time that its source usually takes

and is then given up: a timeout, told with its reason. What counts is work: while a search waits for a query's vector
or for a place in a bulkhead, its source is not to blame. A source with ``failOnError``, and one whose grace is None,
has its whole time; and where there is only one source, nothing is gained by not waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_index_agentic_kb._aio import Job, wait
from llama_index_agentic_kb.guard.pipeline import Progress
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.settings import STRAGGLER_GRACE

__all__ = ["RunningSearch", "Stragglers"]

TIMES: Final = 2.0
"""So many times what is usual is still no sign of a hang."""

FIRST_TIMES: Final = 3.0
"""What was never called before may have to load."""


@dataclass(eq=False, slots=True)
class RunningSearch:
    """A search that was begun.

    Args:
        sub_query_id: What is searched.
        source: Where.
        must_answer: Whether its failure is the request's.
        progress: How far it has come.
        job: Ends with its lane, which has ``lists``.
    """

    sub_query_id: str
    source: KnowledgeSource
    must_answer: bool
    progress: Progress
    job: Job[Any]

    @property
    def found_something(self) -> bool:
        """Whether it is done and has evidence."""
        return self.job.value is not None and any(ranked.nodes for ranked in self.job.value.lists)


@dataclass(frozen=True, slots=True)
class _Answer:
    source: str
    came: float
    took: float
    found_something: bool


class Stragglers:
    """Watches the searches of one request and gives up those that are waited for in vain."""

    def __init__(self) -> None:
        self._answers: list[_Answer] = []

    async def watch(self, searches: Sequence[RunningSearch]) -> None:
        """Wait for searches until each has ended or was given up."""
        pending = list(searches)
        while pending:
            may_be_given_up = [one for one in pending if _may_be_given_up(one)]
            look = self.next_look(may_be_given_up) if may_be_given_up else None
            await wait([one.job for one in pending], deadline=look)  # no answer brings a decision forward
            pending = [one for one in pending if not one.job.done]
            for one in pending:
                if _may_be_given_up(one) and self.waited_enough([one]):
                    await one.progress.give_up(_reason(one))

    def answered(self, source: str, took: float, *, found_something: bool) -> None:
        """Note that a search has ended well, after so many seconds."""
        self._answers.append(_Answer(source, time.monotonic(), took, found_something))

    def waited_enough(self, pending: Sequence[RunningSearch]) -> bool:
        """Whether each of these searches was waited for as long as one waits who has found something."""
        now = time.monotonic()
        return all((until := self._until(one)) is not None and now >= until for one in pending)

    def next_look(self, pending: Sequence[RunningSearch]) -> float:
        """Give ``time.monotonic()`` at which to ask again; what begins to work in the meantime wakes nobody up."""
        now = time.monotonic()
        looks = [now + _grace(one) if (until := self._until(one)) is None else until for one in pending]
        return min((look for look in looks if look > now), default=now + STRAGGLER_GRACE)

    def _until(self, one: RunningSearch) -> float | None:
        """Give ``time.monotonic()`` until which a search is waited for; None where nothing speaks against it yet."""
        others = [answer for answer in self._answers if answer.source != one.source.name]
        since = one.progress.at_work_since
        if since is None or not any(answer.found_something for answer in others):
            return None
        slowest = max(answer.took for answer in others)
        return max(since, *(answer.came for answer in others)) + max(_grace(one), TIMES * slowest)


def _may_be_given_up(one: RunningSearch) -> bool:
    return one.source.straggler_grace is not None and not one.must_answer and one.progress.given_up is None


def _grace(one: RunningSearch) -> float:
    """Give the least time that a search is waited for."""
    usual, grace = one.source.usual_seconds, one.source.straggler_grace
    if grace is None:
        grace = STRAGGLER_GRACE  # of those who go on beside it
    return FIRST_TIMES * grace if usual is None else max(grace, TIMES * usual)


def _reason(one: RunningSearch) -> str:
    return (
        f"source {one.source.name!r} was still running {_grace(one):.1f} s after the others had answered "
        "(KnowledgeSource.straggler_grace; None waits for its whole timeout)"
    )
