"""A real PostgreSQL on loopback, from the binaries of the package ``pgserver``; it may be killed and started again.

The package's own way of starting it is not used: as root it makes a system user and opens folders to everyone, and it
listens on no port. PostgreSQL refuses to run as root, and the user that it then runs as may not enter root's home (a
container's usual place for an environment), so that user gets the binaries in a folder of its own.
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

START_SECONDS = 120.0


_BIN = Path("pgserver", "pginstall", "bin")


def _packages() -> Path | None:
    """Return the folder that holds the package and, beside it, the libraries that its binaries load."""
    spec = find_spec("pgserver")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def why_not() -> str | None:
    """Return why there can be no PostgreSQL here; None where it can."""
    found = _packages()
    if found is None or not (found / _BIN / "postgres").exists():
        return "pgserver, which brings PostgreSQL, is not installed on this platform"
    return None if find_spec("psycopg") else "psycopg is not installed"


def _readable_copy(packages: Path, to: Path) -> Path:
    """Copy the binaries and their libraries, 35 MB, to where any user may run them."""
    for source in packages.glob("pgserver*"):
        if source.suffix != ".dist-info":
            shutil.copytree(source, to / source.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    for path in [to, *to.rglob("*")]:
        path.chmod(0o755)
    return to


class PostgresServer:
    """A server with its own data, in a folder that goes with it."""

    def __init__(self) -> None:
        packages = _packages()
        assert packages is not None
        self._folder = Path(tempfile.mkdtemp(prefix="kb-postgres-"))
        self._as: dict[str, Any] = {"cwd": self._folder, "env": {"PATH": os.defpath, "LC_ALL": "C"}}
        if os.geteuid() == 0:
            packages = _readable_copy(packages, self._folder / "packages")
            shutil.chown(self._folder, "nobody")
            self._as["user"] = "nobody"
        self._binaries = packages / _BIN
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        initdb = ["-D", "data", "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"]
        subprocess.run([str(self._binaries / "initdb"), *initdb], check=True, capture_output=True, **self._as)
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
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
        # What a killed process has written, the system keeps; only a power cut would lose it.
        command += ["-c", "fsync=off"]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, **self._as)

    def _answers(self) -> bool:
        import psycopg  # noqa: PLC0415 (may not be installed, which why_not tells)

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
