"""A real ``chroma run`` on loopback that tests stop, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Self


class ChromaServer:
    """One server process at a time, on one port, over one directory; it ends with the context."""

    def __init__(self, path: Path | None = None) -> None:
        self._folder = None if path is not None else tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._path = path or Path(self._folder.name if self._folder is not None else "")
        self._process: subprocess.Popen[bytes] | None = None
        self._choose_port()

    def __enter__(self) -> Self:
        try:
            self.start()
        except RuntimeError:  # another process may have taken the port in between
            self.kill()
            self._choose_port()
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()

    def _choose_port(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("chroma")), "run", "--host", "127.0.0.1", "--port"]
        command += [str(self.port), "--path", str(self._path)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v2/heartbeat", timeout=1).close()
            except OSError:
                time.sleep(0.03)
            else:
                return
        raise RuntimeError("chroma run did not start")

    def stop(self) -> None:
        """SIGSTOP: it keeps its port and its connections, and answers nobody."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
