"""One writer at a time: several processes writing into one Chroma store leave it damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_index_agentic_kb.errors import IngestionError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["write_lock"]


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Hold the only right to write; the operating system gives it back if the process dies.

    Args:
        path: The lock file; made when missing, and left in place afterwards.

    Yields:
        Nothing; the lock is held inside the ``with`` block.

    Raises:
        IngestionError: Another process, or another thread of this one, holds the lock; the message names its pid.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, str(os.getpid()).encode("ascii"))
        yield
    finally:
        os.close(descriptor)  # gives the lock back


def _acquire(descriptor: int, path: Path) -> None:
    try:
        if sys.platform == "win32":
            # A byte locked there can't be read by others, so the locked one lies far behind the pid.
            os.lseek(descriptor, 1 << 20, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = os.read(descriptor, 32).decode("ascii", "replace") or "unknown"
        raise IngestionError(
            f"Process {holder} is writing into the store {str(path.parent)!r}. "
            "Wait for it to end, or end it, then run this again."
        ) from error
