"""Servers as processes of their own, forked from one that has loaded everything, so that each starts at once."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import uvicorn

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.llm.openai_compatible import OpenAICompatible
from llama_index_agentic_kb.server.access import Limits
from llama_index_agentic_kb.server.app import create_app
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.server.serving import KEYS, source_of

DEFINED = {
    "/knowledgesources/docs": source_of("docs", "memory"),
    "/knowledgebases/kb": {"name": "kb", "knowledgeSources": [{"name": "docs"}], "models": ["loopback"]},
}
"""The definitions that its index and its model serve, by their paths."""


def memory_index(latency: float = 0.0) -> Any:
    """An index of one text, which takes its time."""
    retriever = MemoryRetriever(["The Saturn V was 110.6 m tall."], mode="async", latency=latency)
    return partial(KnowledgeSource, retriever=retriever)


_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])


def start(
    database: str, model: str, *, latency: float = 0.0, tenant_running: int | None = None
) -> tuple[ForkServerProcess, Connection]:
    """Start a server whose search takes ``latency``; return its process, and the connection that brings its port."""
    announced, ready = _FORKED.Pipe(duplex=False)
    process = _FORKED.Process(target=_run, args=(ready, database, model, latency, tenant_running), daemon=True)
    process.start()
    ready.close()
    return process, announced


@contextmanager
def program(database: str, model: str, **options: Any) -> Iterator[tuple[ForkServerProcess, int]]:
    """Start a server; yield its process and its port."""
    process, announced = start(database, model, **options)
    try:
        yield process, announced.recv()
    finally:
        process.kill()
        process.join()


def _run(ready: Connection, database: str, model: str, latency: float, tenant_running: int | None) -> None:
    """Serve until killed, or stopped by SIGTERM."""
    llm = OpenAICompatible(model="loopback", api_base=model, api_key="none")
    service = KnowledgeService(database, indexes={"memory": memory_index(latency)}, models={"loopback": llm})
    limits = Limits(requests_per_minute=None, tenant_running_questions=tenant_running)
    app = create_app(service, keys=KEYS, limits=limits)
    asyncio.run(_serve(uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none")), ready))


async def _serve(server: uvicorn.Server, ready: Connection) -> None:
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn announces it in no other way)
        await asyncio.sleep(0.01)
    ready.send(server.servers[0].sockets[0].getsockname()[1])
    await serving
