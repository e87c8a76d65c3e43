"""A real PostgreSQL on loopback, from the binaries of the package ``pgserver``; it may be killed and started again.

The package's own way of starting it is not taken: as root it makes a system user and opens folders to everyone, and
listens on no port.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]  # has no types

__all__ = ["PostgresServer", "why_not"]

START_SECONDS = 120.0


def _binaries() -> Path | None:
    spec = find_spec("pgserver")
    return Path(spec.origin).parent / "pginstall" / "bin" if spec and spec.origin else None


def why_not() -> str | None:
    """Why there can be no PostgreSQL here; None where it can."""
    found = _binaries()
    if found is None or not (found / "postgres").exists():
        return "pgserver, which brings PostgreSQL, is not installed on this platform"
    return None if find_spec("psycopg") else "psycopg is not installed"


class PostgresServer:
    """A server with its own data, in a folder that goes with it."""

    def __init__(self) -> None:
        found = _binaries()
        assert found is not None
        self._binaries = found
        self._folder = Path(tempfile.mkdtemp(prefix="kb-postgres-"))
        self._as: dict[str, Any] = {"cwd": self._folder, "env": {"PATH": os.defpath, "LC_ALL": "C"}}
        if os.geteuid() == 0:  # PostgreSQL doesn't run as root
            shutil.chown(self._folder, "nobody")
            self._as["user"] = "nobody"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        initdb = [str(found / "initdb"), "-D", "data", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"]
        subprocess.run(initdb, check=True, capture_output=True, **self._as)
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers; after a kill it recovers first."""
        deadline = time.monotonic() + START_SECONDS
        self._process = self._launch()
        while not self._answers():
            if time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text()[-2000:])
            if self._process.poll() is not None:  # what a killed one shared with its backends is not free yet
                self._process = self._launch()
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server and all its backends at once (SIGKILL)."""
        backends = psutil.Process(self._process.pid).children() if self._process.poll() is None else []
        self._process.kill()
        for backend in backends:
            with contextlib.suppress(psutil.NoSuchProcess):
                backend.kill()
        self._process.wait()

    def _launch(self) -> subprocess.Popen[Any]:
        command = [str(self._binaries / "postgres"), "-D", "data", "-h", "127.0.0.1", "-p", str(self.port), "-k", ""]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, **self._as)

    def _answers(self) -> bool:
        import psycopg  # noqa: PLC0415 (may not be installed, which why_not tells)

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
