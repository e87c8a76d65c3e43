"""Several calls at once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from llama_index_agentic_kb._aio import Job, cancel, start, wait

__all__ = ["side_by_side"]

T = TypeVar("T")


async def side_by_side(
    calls: Sequence[Coroutine[Any, Any, T]], each: Callable[[int, T], Coroutine[Any, Any, None]] | None = None
) -> list[T]:
    """Run calls side by side and give their results in order; the first failure stops the rest and is raised.

    Args:
        calls: Not yet begun; each has its own deadline.
        each: Run with each position and result, in order, as soon as it and those before it are there.
    """
    jobs: list[Job[T]] = []
    for call in calls:
        jobs.append(start(call))
    results: list[T] = []
    try:
        while len(results) < len(jobs):
            await wait([job for job in jobs if not job.done], first=True)
            _raise_first([job for job in jobs if job.done])
            while len(results) < len(jobs) and jobs[len(results)].done:
                results.append(jobs[len(results)].result())
                if each is not None:
                    await each(len(results) - 1, results[-1])
    except Exception:
        for job in jobs:
            if not job.done:
                await cancel(job)
        raise
    return results


def _raise_first(done: Sequence[Job[T]]) -> None:
    for job in done:
        job.result()
