"""Reads files whose parsers are large programs in a process of its own, with an end to its time and its memory.

A PDF, an office file or a page can make a parser loop without end, recurse until the interpreter is gone, or unpack
more than there is memory for. There it costs that file alone: the process is ended, and the next file gets another.
Requests and replies are lines of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store.readers import MAX_BYTES, ParsedFile, Section, read_file

__all__ = ["READ_SECONDS", "FileReader", "serve"]

READ_SECONDS: Final = 60.0
"""The time that a file's parser is given."""

PARSED: Final = frozenset({".html", ".htm", ".pdf", ".docx"})
"""The kinds of files that are read in a process of their own; the others are only decoded."""

_MEMORY: Final = 4 << 30
"""Bytes of address space of the process; loading the parsers takes a good part of one GB."""

_PROGRAM: Final = f"from {__name__} import serve; serve()"


class FileReader:
    """Reads files one after the other; close it, or use it as a context manager.

    Args:
        max_bytes: The largest file that is read, and the largest content of a packed one.
        seconds: The time that a file's parser is given, the first one's start included.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, seconds: float = READ_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End its process."""
        self.close()

    def read(self, path: Path) -> ParsedFile:
        """Read a file; see ``readers.read_file``.

        Raises:
            IngestionError: It can't be read; the message is the reason alone, without the path.
        """
        if path.suffix.lower() not in PARSED:
            return read_file(path, self._max_bytes)
        reply = self._ask({"path": str(path), "max_bytes": self._max_bytes})
        if "error" in reply:
            raise IngestionError(str(reply["error"]))
        sections = [Section(**section) for section in reply["sections"]]
        return ParsedFile(title=reply["title"], sections=sections, metadata=reply["metadata"])

    def close(self) -> None:
        """End the process; the next file starts another."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it has not read
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._replies.get(timeout=self._seconds)
        except queue.Empty:
            self.close()
            raise IngestionError(f"can't be read within {self._seconds:g} s: its parser was ended") from None
        except OSError:  # it has ended since the last file
            line = ""
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        code = process.wait()
        self.close()
        raise IngestionError(f"can't be read: its parser's process ended with {code}")

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(  # noqa: S603  (our own module)
            # -P: a module in the working directory, or in a folder that is ingested, must not stand in for another.
            [sys.executable, "-P", "-c", _PROGRAM],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
        )
        replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process, self._replies = process, replies

        def listen() -> None:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    replies.put(line)
            except ValueError:  # closed
                return
            replies.put("")

        threading.Thread(target=listen, name="file-reader", daemon=True).start()
        return process


# -- in the process ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """Read requests and write replies until the requests end."""
    _limit_memory()
    # What parsers print must not get among the replies.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            replies.write(json.dumps(_reply(Path(request["path"]), request["max_bytes"])) + "\n")
            replies.flush()


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 (not on Windows)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _reply(path: Path, max_bytes: int) -> dict[str, Any]:
    try:
        parsed = read_file(path, max_bytes)
    except IngestionError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"can't be read: {error.strerror or error}"}
    except Exception as error:  # noqa: BLE001 (file parsers raise anything; the error is reported)
        return {"error": f"can't be read: {type(error).__name__}: {error}"}
    return asdict(parsed)
