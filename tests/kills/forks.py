"""Work in a forked process that can be killed: it starts in milliseconds, an interpreter with LlamaIndex in seconds.

The process that forks imports everything and never opens a store: Chroma does not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

Tell: TypeAlias = Callable[[str], None]


def _tell(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())


class Child:
    """A forked process that tells lines."""

    def __init__(self, work: Callable[[Tell], None]) -> None:
        sys.stdout.flush()
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        os.close(self._read)
        code = 1
        try:
            # One write of a short line is whole or not there, whenever the process is killed.
            work(partial(_tell, write))
            code = 0
        except BaseException:  # noqa: BLE001 (a fork must not go on with the parent's work)
            traceback.print_exc()
        finally:
            os._exit(code)

    def end(
        self, seconds: float, *, kill: bool = False, after: int = 0, strike: Callable[[], None] | None = None
    ) -> tuple[list[str], int]:
        """Wait for its end, so long, then kill it."""
        told = b""
        deadline = time.monotonic() + (300.0 if after else seconds)
        killed = False
        while (piece := self._piece(deadline)) or (piece is None and strike is not None):
            if piece is None and strike is not None:
                strike()
                strike, deadline = None, time.monotonic() + 300.0
                continue
            assert piece is not None
            told += piece
            if after and told.count(b"\n") >= after:
                after, deadline = 0, time.monotonic() + seconds
        if piece is None:
            os.kill(self.pid, signal.SIGKILL)
            killed = True
            while piece := self._piece(time.monotonic() + 10.0):
                told += piece
        os.close(self._read)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if killed and not kill:
            raise TimeoutError(f"a process did not end within {seconds:g} s; it told {told[-300:]!r}")
        return told.decode().splitlines(), code

    def _piece(self, deadline: float) -> bytes | None:
        """What it tells next: nothing at its end, None at the deadline."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(self._read, 1 << 16) if ready else None

    def answer(self, seconds: float = 300.0) -> Any:
        """Wait for its end and give its last line as JSON."""
        lines, code = self.end(seconds)
        if code != 0 or not lines:
            raise RuntimeError(f"a process ended with {code}")
        return json.loads(lines[-1])
