"""A server as a program of its own: ``python -m tests.server.program DATABASE MODEL``; prints its port."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible
from llama_index_agentic_kb.server.app import create_app
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.server.serving import KEYS

DEFINED = {
    "/knowledgesources/docs": {
        "name": "docs",
        "kind": "searchIndex",
        "searchIndexParameters": {"searchIndexName": "memory"},
    },
    "/knowledgebases/kb": {"name": "kb", "knowledgeSources": [{"name": "docs"}], "models": ["loopback"]},
}
"""The definitions that its index and its model serve, by their paths."""


def memory_index() -> Any:
    """An index of one text."""
    retriever = MemoryRetriever(["The Saturn V was 110.6 m tall."], mode="async")
    return partial(KnowledgeSource, retriever=retriever)


@contextmanager
def program(database: str, model: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start it; yield its process and its port."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.server.program", database, model]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


async def main(database: str, model: str) -> None:
    """Serve until killed."""
    llm = OpenAICompatible(model="loopback", api_base=model, api_key="none")
    service = KnowledgeService(database, indexes={"memory": memory_index()}, models={"loopback": llm})
    app = create_app(service, keys=KEYS, requests_per_minute=None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn announces it in no other way)
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
