"""Coroutines for all internal code, with sync and async entry points.

Everything below the public methods is ``async def``. A sync method uses ``run``, which performs the coroutine on a
private event loop in the caller's own thread. Only leaf calls differ between the two: a ``Call`` has a sync function,
an async one, or both. A sync entry point prefers the sync function, on a worker thread; an async one prefers the async
function, on the caller's loop. So no method is written twice, and an async client is never used on a short-lived loop:
sync entry points await async-only clients on one long-lived background loop.

    async def lookup(source, question):
        job = start(Call(sync=lambda: source.search(question)))
        await wait([job], deadline=deadline_after(0.5))
        return job.result() if job.done else []

The deadline of a context (``set_deadline``) limits every call that is made in it.
"""

from llama_index_agentic_kb._aio.bridge import aiterate, arun, iterate, run
from llama_index_agentic_kb._aio.calls import (
    Call,
    Job,
    as_exception,
    call_deadline,
    cancel,
    deadline_after,
    earliest,
    emit,
    emitting,
    gather,
    outside_loop,
    set_deadline,
    start,
    wait,
)
from llama_index_agentic_kb._aio.streams import END, Stream, open_stream
from llama_index_agentic_kb._aio.threads import WorkerPool, reset_after_fork

__all__ = [
    "END",
    "Call",
    "Job",
    "Stream",
    "WorkerPool",
    "aiterate",
    "arun",
    "as_exception",
    "call_deadline",
    "cancel",
    "deadline_after",
    "earliest",
    "emit",
    "emitting",
    "gather",
    "iterate",
    "open_stream",
    "outside_loop",
    "reset_after_fork",
    "run",
    "set_deadline",
    "start",
    "wait",
]
