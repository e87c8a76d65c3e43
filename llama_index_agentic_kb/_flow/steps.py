"""The steps a flow may yield, and the handles it gets back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from llama_index_agentic_kb._flow.workers import Pool, WorkerPool
from llama_index_agentic_kb.errors import DeadlineExceededError

__all__ = [
    "END",
    "Call",
    "Cancel",
    "Emit",
    "Flow",
    "Job",
    "Next",
    "Open",
    "Pause",
    "Start",
    "Step",
    "Stream",
    "Wait",
    "check_begun_in_time",
    "collect",
    "deadline_after",
    "earliest",
    "gather",
    "still_running",
]

T = TypeVar("T")

SHARED_POOL: Final = WorkerPool("shared", max_workers=64)
"""For calls without a bulkhead of their own: language models, postprocessors."""


class _End:
    """The type of ``END``."""

    def __repr__(self) -> str:
        return "END"


END: Final = _End()
"""What ``Next`` gives when the stream is over."""


class Step:
    """Something for a driver to do. The result of ``yield step`` is what the step's docstring says."""

    __slots__ = ()


Flow: TypeAlias = Generator[Step, Any, T]
"""A generator of steps that returns a ``T``."""


@dataclass(frozen=True, slots=True)
class Call(Step):
    """Call a function and give its result; its exception is raised at the ``yield``.

    The sync driver calls ``sync`` on a thread of ``pool``; without it, ``native`` on one long-lived background
    loop. The async driver awaits ``native``; without it, it calls ``sync`` on a thread of ``pool``.

    Args:
        sync: Takes nothing, returns the result.
        native: Takes nothing, returns an awaitable of the result.
        deadline: ``time.monotonic()`` at which waiting ends with ``DeadlineExceededError``; None waits for ever. After
            it the function is not called at all.
        pool: The bulkhead; None is one shared by everything that has none of its own.
        what: Names the call in errors.
    """

    sync: Callable[[], Any] | None = None
    native: Callable[[], Awaitable[Any]] | None = None
    deadline: float | None = None
    pool: Pool | None = None
    what: str = "call"


@dataclass(frozen=True, slots=True)
class Start(Step):
    """Start a flow or a call beside this one and give its ``Job`` at once."""

    work: Flow[Any] | Call


@dataclass(frozen=True, slots=True)
class Wait(Step):
    """Wait until all jobs are done (or the ``first`` of them), or the deadline; give None.

    Ask each job then whether it is ``done``. No job's error is raised here.
    """

    jobs: Sequence[Job[Any]]
    deadline: float | None = None
    first: bool = False


@dataclass(frozen=True, slots=True)
class Cancel(Step):
    """Stop a job: a flow is closed, an async call cancelled, a sync one abandoned on its thread. Gives None."""

    job: Job[Any]


@dataclass(frozen=True, slots=True)
class Pause(Step):
    """Let time pass; give None. No thread is held, and the event loop goes on.

    Args:
        until: ``time.monotonic()`` at which the flow goes on; one that has passed does so at once.
    """

    until: float


@dataclass(frozen=True, slots=True)
class Open(Step):
    """Open a stream and give its ``Stream``; see ``Call`` for the arguments.

    The whole iterator runs in one context: a thread (sync) or a task (native) reads it ahead, so that each
    ``Next`` can have a deadline.
    """

    sync: Callable[[], Iterator[Any]] | None = None
    native: Callable[[], Awaitable[AsyncIterator[Any]]] | None = None
    pool: Pool | None = None
    what: str = "stream"


@dataclass(frozen=True, slots=True)
class Next(Step):
    """Give the next item of a stream, or ``END``; the stream's exception is raised at the ``yield``.

    An item that came after the deadline is late: ``DeadlineExceededError`` is raised, and the stream closed.
    """

    stream: Stream
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Emit(Step):
    """Hand an item to the caller of ``iterate`` or ``aiterate``; ``run`` and ``arun`` let it go. Gives None."""

    item: Any


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """Work that was started. Filled in by the driver."""

    started: float = field(default_factory=time.monotonic)
    finished: float | None = None
    value: T | None = None
    error: BaseException | None = None
    handle: Any = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.finished is not None

    def finish(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Record the end. For drivers."""
        self.value, self.error, self.finished = value, error, time.monotonic()

    def result(self) -> T:
        """Give the result, or raise the error.

        Raises:
            DeadlineExceededError: The job is still running.
        """
        if self.error is not None:
            raise self.error
        if not self.done:
            raise DeadlineExceededError("the job was still running at its deadline")
        return self.value  # type: ignore[return-value]  # a done job without an error holds a T


@dataclass(eq=False, slots=True)
class Stream:
    """An open stream. Filled in by the driver."""

    what: str
    handle: Any = None


def check_begun_in_time(call: Call) -> None:
    """Refuse to begin what is late already. For drivers.

    Raises:
        DeadlineExceededError: The call's deadline has passed.
    """
    if call.deadline is not None and time.monotonic() >= call.deadline:
        raise DeadlineExceededError(f"{call.what} was not begun: its deadline had passed")


def still_running(what: str) -> DeadlineExceededError:
    """Give the error of something that is late. For drivers."""
    return DeadlineExceededError(f"{what} was still running at its deadline")


def deadline_after(seconds: float | None) -> float | None:
    """Give the ``time.monotonic()`` of ``seconds`` from now; None stays None (no deadline)."""
    return None if seconds is None else time.monotonic() + seconds


def earliest(*deadlines: float | None) -> float | None:
    """Give the first of several deadlines; None where none is set."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def gather(works: Iterable[Flow[Any] | Call], *, deadline: float | None = None) -> Flow[list[Job[Any]]]:
    """Run works side by side until all are done or the deadline passes; what is late is cancelled.

    Args:
        works: Flows and calls.
        deadline: ``time.monotonic()``; None waits for all.

    Returns:
        Their jobs in order. A late one holds a ``DeadlineExceededError``.
    """
    jobs: list[Job[Any]] = []
    for work in works:
        jobs.append((yield Start(work)))
    yield Wait(jobs, deadline=deadline)
    for job in jobs:
        if not job.done:
            yield Cancel(job)
            if job.error is None:
                job.finish(error=DeadlineExceededError("still running at its deadline"))
    return jobs


def collect(stream: Stream, *, deadline: float | None = None) -> Flow[list[Any]]:
    """Read a stream to its end and give its items."""
    items: list[Any] = []
    while (item := (yield Next(stream, deadline=deadline))) is not END:
        items.append(item)
    return items
