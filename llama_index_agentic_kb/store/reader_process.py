"""The process in which ``file_reader`` has files read: it is run as a program, and takes and gives lines of JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store.own_process import limit_resources
from llama_index_agentic_kb.store.readers import read_file

MEMORY: Final = 4 << 30
"""Bytes of address space of this process; loading the parsers takes a good part of one GB."""


def _serve() -> None:
    limit_resources(memory_bytes=MEMORY)
    # What parsers print must not get among the replies.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            replies.write(json.dumps(_reply(Path(request["path"]), request["max_bytes"])) + "\n")
            replies.flush()


def _reply(path: Path, max_bytes: int) -> dict[str, Any]:
    try:
        parsed = read_file(path, max_bytes)
    except IngestionError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"can't be read: {error.strerror or error}"}
    except Exception as error:  # noqa: BLE001  (file parsers raise anything; the error is reported)
        return {"error": f"can't be read: {type(error).__name__}: {error}"}
    return {
        "title": parsed.title,
        "sections": [asdict(section) for section in parsed.sections],
        "metadata": dict(parsed.metadata),
    }


if __name__ == "__main__":
    _serve()
