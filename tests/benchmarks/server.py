"""What the HTTP server adds: its overhead over ``KnowledgeBase.aretrieve``, its first event, many streams, its memory.

The server is a process of its own with one source in memory, SQLite and one API key; so its whole cost is measured:
HTTP, key, catalog, codec. The client is Python's plainest (``http.client``), whose cost is counted as the server's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import psutil  # type: ignore[import-untyped]  # has no types

from llama_index_agentic_kb import KnowledgeBase
from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply
from tests.benchmarks.measure import Row
from tests.server.program import DEFINED, memory_index, program
from tests.server.serving import ADMIN

NO_PEER: Final = "(no peer)"
PATH: Final = "/knowledgebases/kb/retrieve"
EXTRACT: Final = {"intents": [{"search": "Saturn V"}], "outputMode": "extractiveData"}
ANSWER: Final = {
    "messages": [{"role": "user", "content": "How tall was the Saturn V?"}],
    "outputMode": "answerSynthesis",
}
EVENTS: Final = {"Accept": "text/event-stream"}
HEADERS: Final = {"api-key": ADMIN, "Content-Type": "application/json"}


def server(requests: int = 400, streams: int = 200, many: int = 10_000, llm_seconds: float = 0.6) -> list[Row]:
    """Measure requests one after another, streams at the same time, and memory over many requests."""
    slow = Reply("The Saturn V was 110.6 m tall [ref_id:0].", latency=llm_seconds)
    with (
        LoopbackOpenAI(lambda request: Reply("{}") if "You plan" in request.text else slow) as model,
        tempfile.TemporaryDirectory() as folder,
        program(str(Path(folder) / "server.db"), model.base_url) as (process, port),
    ):
        for path, body in DEFINED.items():
            url = f"http://127.0.0.1:{port}{path}"
            httpx.put(url, json=body, headers=HEADERS, trust_env=False).raise_for_status()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        server_process = psutil.Process(process.pid)
        before = _cpu(server_process)
        bare, whole, bare_cpu = _pairs(connection, requests)
        cpu = (_cpu(server_process) - before) / requests
        overhead = median(one - other for one, other in zip(whole, bare, strict=True))
        first = [_ask(connection, EXTRACT, EVENTS, first=True) for _ in range(requests)]
        rows = [
            Row("server/retrieve, median", median(whole), median(bare), "KnowledgeBase.aretrieve", "ms", requests),
            Row("server/retrieve, overhead", overhead, None, NO_PEER, "ms", requests),
            Row("server/retrieve, CPU of the server", cpu, bare_cpu, "KnowledgeBase.aretrieve", "ms", requests),
            Row("server/first event, median", median(first), None, NO_PEER, "ms", requests),
        ]
        asyncio.run(_streams(port, 1))  # loads what checks answers
        wall, failed = asyncio.run(_streams(port, streams))
        rows += [
            Row(f"server/{streams} streams, model of {1000 * llm_seconds:.0f} ms/wall", wall, None, NO_PEER, "s", 1),
            Row(f"server/{streams} streams/failed", failed, None, NO_PEER, "streams", 1),
        ]
        connection.close()  # it was idle for too long; the next request opens it again
        for _ in range(many // 10):
            _ask(connection, EXTRACT, {})
        before = server_process.memory_info().rss
        for _ in range(many):
            _ask(connection, EXTRACT, {})
        grown = (server_process.memory_info().rss - before) / 1e6
        return [*rows, Row(f"server/memory grown over {many:,} requests", grown, None, NO_PEER, "MB", 1)]


def _cpu(process: psutil.Process) -> float:
    """Return the ms of processor time that a process has used."""
    used = process.cpu_times()
    return float(used.user + used.system) * 1000


def _pairs(connection: http.client.HTTPConnection, requests: int) -> tuple[list[float], list[float], float]:
    """Ask ``aretrieve`` here and the server in turns; return the ms of each, and the processor's of a call."""
    base = KnowledgeBase([memory_index()(name="docs", description="")], name="kb", effort="low")

    async def ask() -> tuple[float, float]:
        began, before = time.perf_counter(), time.process_time()
        await base.aretrieve(EXTRACT)
        return (time.perf_counter() - began) * 1000, (time.process_time() - before) * 1000

    with asyncio.Runner() as runner:
        pairs = [(runner.run(ask()), _ask(connection, EXTRACT, {})) for _ in range(requests + 1)]
    bare, whole = zip(*pairs[1:], strict=True)  # the first ones load what they need
    return [wall for wall, _ in bare], list(whole), sum(used for _, used in bare) / requests


def _ask(
    connection: http.client.HTTPConnection, body: Mapping[str, Any], headers: Mapping[str, str], *, first: bool = False
) -> float:
    """Ask, and return the ms until the whole response, or its first line, has come."""
    began = time.perf_counter()
    connection.request("POST", PATH, json.dumps(body), {**HEADERS, **headers})
    response = connection.getresponse()
    assert response.status == 200
    (response.readline if first else response.read)()
    took = time.perf_counter() - began
    response.read()
    return took * 1000


async def _streams(port: int, streams: int) -> tuple[float, int]:
    """Read streams at the same time; return the seconds until the last has ended, and how many have failed."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:

        async def read() -> bool:
            url, headers = f"http://127.0.0.1:{port}{PATH}", {**HEADERS, **EVENTS}
            response = await client.post(url, json=ANSWER, headers=headers)
            return "event: response.completed" in response.text and "[ref_id:0]" in response.text

        began = time.perf_counter()
        ended = await asyncio.gather(*(read() for _ in range(streams)), return_exceptions=True)
    return time.perf_counter() - began, sum(one is not True for one in ended)
