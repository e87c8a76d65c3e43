"""Plain coroutines inside, sync doors outside.

Everything below the public methods is ``async def``. A sync method bridges: ``run`` performs the coroutine on a
private event loop in the caller's own thread. Only leaf calls differ between the two: a ``Call`` holds a sync
function, an async one, or both. A sync door prefers the sync function, on a thread of a bulkhead; an async door prefers
the async one, on the caller's loop. So no method is written twice, and an async client is never used on a short-lived
loop: a sync door awaits async-only clients on one long-lived background loop.

    async def lookup(source, question):
        job = start(Call(sync=lambda: source.search(question)))
        await wait([job], deadline=deadline_after(0.5))
        return job.result() if job.done else []

A deadline that is set in a context (``set_deadline``) bounds every call that is made there.
"""

from llama_index_agentic_kb._aio.bridge import (
    aiterate as aiterate,
)
from llama_index_agentic_kb._aio.bridge import (
    arun as arun,
)
from llama_index_agentic_kb._aio.bridge import (
    iterate as iterate,
)
from llama_index_agentic_kb._aio.bridge import (
    run as run,
)
from llama_index_agentic_kb._aio.calls import (
    END as END,
)
from llama_index_agentic_kb._aio.calls import (
    Call as Call,
)
from llama_index_agentic_kb._aio.calls import (
    Job as Job,
)
from llama_index_agentic_kb._aio.calls import (
    Stream as Stream,
)
from llama_index_agentic_kb._aio.calls import (
    as_exception as as_exception,
)
from llama_index_agentic_kb._aio.calls import (
    call_deadline as call_deadline,
)
from llama_index_agentic_kb._aio.calls import (
    cancel as cancel,
)
from llama_index_agentic_kb._aio.calls import (
    deadline_after as deadline_after,
)
from llama_index_agentic_kb._aio.calls import (
    earliest as earliest,
)
from llama_index_agentic_kb._aio.calls import (
    emit as emit,
)
from llama_index_agentic_kb._aio.calls import (
    emitting as emitting,
)
from llama_index_agentic_kb._aio.calls import (
    gather as gather,
)
from llama_index_agentic_kb._aio.calls import (
    open_stream as open_stream,
)
from llama_index_agentic_kb._aio.calls import (
    outside_loop as outside_loop,
)
from llama_index_agentic_kb._aio.calls import (
    set_deadline as set_deadline,
)
from llama_index_agentic_kb._aio.calls import (
    start as start,
)
from llama_index_agentic_kb._aio.calls import (
    wait as wait,
)
from llama_index_agentic_kb._aio.threads import WorkerPool as WorkerPool
from llama_index_agentic_kb._aio.threads import reset_after_fork as reset_after_fork
