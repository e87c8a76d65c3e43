"""One body for sync and async: flows, the steps they yield, and two drivers that perform the steps.

A *flow* is a generator. It yields steps ("call this", "start these", "wait for them", "next item of this stream")
and gets their results back; it knows nothing of threads or event loops. ``run`` and ``iterate`` perform a flow's
steps with threads, ``arun`` and ``aiterate`` with asyncio tasks, so that no method of this library is written twice
and a sync call never starts an event loop around an async client.

    def lookup(source, question) -> Flow[list[str]]:
        job = yield Start(Call(sync=lambda: source.search(question)))
        yield Wait([job], deadline=deadline_after(0.5))
        return job.result() if job.done else []

The pattern is httpx's ``auth_flow`` (a generator of requests, two short drivers), widened to side-by-side work.
"""

from llama_index_agentic_kb._flow.asynchronous import aiterate, arun
from llama_index_agentic_kb._flow.emitted import emitting
from llama_index_agentic_kb._flow.steps import (
    END,
    Call,
    Cancel,
    Emit,
    Flow,
    Job,
    Next,
    Open,
    Pause,
    Start,
    Step,
    Stream,
    Wait,
    collect,
    deadline_after,
    earliest,
    gather,
)
from llama_index_agentic_kb._flow.synchronous import iterate, run
from llama_index_agentic_kb._flow.workers import WorkerPool

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
    "WorkerPool",
    "aiterate",
    "arun",
    "collect",
    "deadline_after",
    "earliest",
    "emitting",
    "gather",
    "iterate",
    "run",
]
