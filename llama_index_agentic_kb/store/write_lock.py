"""Locks among processes on files: one writer at a time, and nobody who opens while it writes.

The operating system gives a lock back when its process dies, however it dies.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_index_agentic_kb.errors import IngestionError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["WRITE_LOCK", "LockedError", "file_lock", "lock_holder", "write_lock"]

WRITE_LOCK = "write.lock"
"""The file in a store's directory that its one writer locks."""

_POLL = 0.02
"""Seconds between two attempts to take a lock that somebody else has."""


class LockedError(IngestionError):
    """Somebody else has the lock."""


@contextmanager
def write_lock(path: Path, wait: float = 0.0) -> Iterator[str]:
    """Hold the only right to write.

    Args:
        path: The lock file; made when missing, and left in place afterwards. It tells who has the lock.
        wait: Seconds to wait for whoever has it.

    Yields:
        Who holds it now: this process's id and a random word, which no other holder has.

    Raises:
        LockedError: Another process, or another thread of this one, holds the lock; the message names its pid.
        IngestionError: The file can't be written.
    """
    with _opened(path) as descriptor:
        if not _acquire(descriptor, wait, shared=False):
            raise LockedError(
                f"Process {lock_holder(path).partition(' ')[0] or 'unknown'} is writing into the store "
                f"{str(path.parent)!r}. Wait for it to end (wait=SECONDS, --wait SECONDS), or end it, then run this "
                "again."
            )
        holder = f"{os.getpid()} {secrets.token_hex(8)}"
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, holder.encode("ascii"))
        yield holder


@contextmanager
def file_lock(path: Path, *, shared: bool, wait: float = 60.0) -> Iterator[None]:
    """Hold a lock that many may share, or one alone.

    Args:
        path: The lock file; made when missing.
        shared: Whether others may share it.
        wait: Seconds to wait for it.

    Raises:
        LockedError: Others held it all that time.
    """
    with _opened(path) as descriptor:
        if not _acquire(descriptor, wait, shared=shared):
            raise LockedError(f"Other processes have kept {str(path)!r} locked for {wait:g} s. End them.")
        yield


def lock_holder(path: Path) -> str:
    """Tell who has a write lock, or had it last; empty where nobody ever had."""
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise IngestionError(f"{str(path)!r} can't be written: {error.strerror}.") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # gives the lock back


def _acquire(descriptor: int, wait: float, *, shared: bool) -> bool:
    deadline = time.monotonic() + wait
    while not _try_lock(descriptor, shared=shared):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    try:
        if sys.platform == "win32":
            # A byte locked there can't be read by others, so the locked one lies far behind the pid.
            os.lseek(descriptor, 1 << 20, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
