"""What flows are made of, apart from any driver."""

from __future__ import annotations

import time

import pytest

from llama_index_agentic_kb._aio import Job, deadline_after, earliest
from llama_index_agentic_kb.errors import DeadlineExceededError


def test_deadlines() -> None:
    """None is no deadline, for one and for several."""
    assert deadline_after(None) is None
    before = time.monotonic()
    deadline = deadline_after(5)
    assert deadline is not None
    assert before + 5 <= deadline <= time.monotonic() + 5
    assert earliest(None, 3.0, 2.0) == 2.0
    assert earliest(None, None) is None
    assert earliest() is None


def test_a_job_before_and_after_its_end() -> None:
    """A job has no result before its end; then it gives its value, or raises its error."""
    job: Job[int] = Job()
    assert not job.done
    with pytest.raises(DeadlineExceededError, match="still running"):
        job.result()
    job.finish(0)
    assert (job.done, job.result()) == (True, 0)
    job.finish(error=OSError("bad"))
    with pytest.raises(OSError, match="bad"):
        job.result()


def test_jobs_are_told_apart_by_identity() -> None:
    """Two jobs are never equal, whatever they hold."""
    assert Job() != Job()
