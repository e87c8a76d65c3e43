"""Servers on one PostgreSQL behind a plain TCP balancer, replaced and killed under load; and a tenant that floods one.

``python -m tests.server.replicas`` is the long form (``make replicas``); ``test_operation.py`` has the short one.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply
from tests.kills_sessions.postgres import PostgresServer
from tests.server.program import DEFINED, program, start
from tests.server.serving import ADMIN, QUERY, client_of, define

ENGINE = "projects/p/locations/global/dataStores/kb"
ATTEMPTS = 20


class Balancer:
    """Hands each connection to the next of several ports that accepts one."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._turn = count()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection until either side has closed it."""
        ports, turn = list(self.ports), next(self._turn)
        with closing(writer):
            for port in (ports[(turn + tried) % len(ports)] for tried in range(len(ports))):
                try:
                    answers, asked = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    continue
                with closing(asked):
                    ways = [asyncio.create_task(_copy(*way)) for way in ((reader, asked), (answers, writer))]
                    _, other = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in other:
                        way.cancel()
                return


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@dataclass
class Load:
    """Clients that converse until they are stopped, each in a session of its own, and what they noted."""

    url: str
    pause: float = 0.0
    phase: str = "before"
    stored: dict[str, list[str]] = field(default_factory=dict)
    """By session: the names of the answers that a client has received."""
    retries: Counter[str] = field(default_factory=Counter)
    """By phase: the requests that were sent again."""
    failed: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def turns(self) -> int:
        """The number of answers received."""
        return sum(map(len, self.stored.values()))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"x-goog-api-key": QUERY}, trust_env=False, timeout=60)

    async def more(self, turns: int) -> None:
        """Wait until so many further answers were received."""
        until, target = time.monotonic() + 120, self.turns + turns
        while self.turns < target:
            assert not self.failed, self.failed
            assert time.monotonic() < until
            await asyncio.sleep(0.02)

    async def converse(self, number: int) -> None:
        """Ask in a session until it is over."""
        pauses = random.Random(number)
        async with self._client() as client:
            try:
                made = await self._post(client, f"/v1/{ENGINE}/sessions", {"displayName": f"client {number}"})
                answers = self.stored.setdefault(made["name"], [])
                while not self.over:
                    query = {"text": f"How tall was the Saturn V, {number}, {len(answers)}?"}
                    path = f"/v1/{ENGINE}/servingConfigs/default:answer"
                    answered = await self._post(client, path, {"query": query, "session": made["name"]})
                    answers.append(answered["answer"]["name"])
                    await asyncio.sleep(2 * self.pause * pauses.random())
            except (httpx.HTTPError, AssertionError) as error:
                self.failed.append(f"{self.phase}: {error!r}")

    async def _post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Send a request, again as docs/server.md says."""
        for attempt in range(ATTEMPTS):
            try:
                response = await client.post(path, json=body)
                if response.status_code == 200:
                    return dict(response.json())
                assert response.status_code in (429, 503), response.text
                wait = float(response.headers.get("retry-after", 0))
            except httpx.TransportError:
                wait = 0.0
            self.retries[self.phase] += 1
            await asyncio.sleep(max(wait, min(2.0, 0.1 * 2**attempt)))
        raise AssertionError(f"{path}: {ATTEMPTS} attempts failed")

    async def lost_and_doubled(self) -> tuple[int, int]:
        """Return how many received answers no session holds, and how many turns a session has beyond those received."""
        lost = doubled = 0
        async with self._client() as client:
            for session, answers in self.stored.items():
                found = (await client.get(f"/v1/{session}")).raise_for_status().json()
                kept = [turn["answer"] for turn in found.get("turns", [])]
                lost += len(set(answers) - set(kept))
                doubled += len(kept) - len(set(answers) & set(kept))
        return lost, doubled


class Servers:
    """Servers on one database behind a balancer."""

    def __init__(self, database: str, model: str, balancer: Balancer, stack: ExitStack) -> None:
        self._command, self._balancer, self._stack = (database, model), balancer, stack
        self.running: list[tuple[ForkServerProcess, int]] = []

    async def add(self, servers: int = 1) -> None:
        """Start servers side by side, and hand them connections when they listen."""
        started = [start(*self._command) for _ in range(servers)]
        for process, _ in started:
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
        for process, announced in started:
            port = await asyncio.to_thread(announced.recv)
            self.running.append((process, port))
            self._balancer.ports.append(port)

    async def retire(self) -> int | None:
        """Take the oldest server out of the balancer and end it by SIGTERM; return its status."""
        process, port = self.running.pop(0)
        self._balancer.ports.remove(port)
        process.terminate()
        await asyncio.to_thread(process.join, 150)
        return process.exitcode

    def kill(self) -> None:
        """Kill the oldest server; the balancer finds out by itself."""
        process, _ = self.running.pop(0)
        process.kill()


def _define(url: str, definitions: Mapping[str, object]) -> None:
    with client_of(url) as client:
        define(client, definitions)


async def replace_and_kill(
    clients: int, wait: Callable[[Load], Awaitable[None]], *, rolled: int, pause: float = 0.0
) -> tuple[Load, int, int]:
    """Replace ``rolled`` of two servers, then kill one and start another, under load; ``wait`` between two events.

    Returns the load, the turns that were lost, and those that were stored twice.
    """
    slow = Reply("The Saturn V was 110.6 m tall [ref_id:0].", latency=0.2)
    with ExitStack() as stack:
        model = stack.enter_context(LoopbackOpenAI(lambda request: "{}" if "You plan" in request.text else slow))
        postgres = stack.enter_context(PostgresServer())
        balancer = Balancer()
        listening = await asyncio.start_server(balancer.relay, "127.0.0.1", 0, backlog=200)
        stack.callback(listening.close)
        servers = Servers(postgres.url, model.base_url, balancer, stack)
        await servers.add(2)
        for port, definition in zip(balancer.ports, DEFINED.items(), strict=True):  # one by each server
            await asyncio.to_thread(_define, f"http://127.0.0.1:{port}", dict([definition]))
        load = Load(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", pause)
        asking = [asyncio.create_task(load.converse(number)) for number in range(clients)]
        await wait(load)
        load.phase = "rolling restart"
        for _ in range(rolled):
            await servers.add()
            assert await servers.retire() in (0, -signal.SIGTERM)
            await wait(load)
        load.phase = "kill"
        servers.kill()
        await wait(load)
        await servers.add()
        await wait(load)
        load.over = True
        await asyncio.gather(*asking)
        lost, doubled = await load.lost_and_doubled()
        return load, lost, doubled


# -- a tenant's flood --------------------------------------------------------------------------------------------------

_ASK = {"intents": [{"search": "Saturn V"}], "outputMode": "extractiveData"}
_PATH = "/knowledgebases/kb/retrieve"


def _flood(url: str, clients: int, on: Event) -> None:
    """Ask with many clients while the event is set, in a process of its own; whatever is refused is asked again."""

    def ask() -> None:
        with client_of(url, ADMIN) as client:
            while True:
                on.wait()
                client.post(_PATH, json=_ASK)

    for _ in range(clients - 1):
        threading.Thread(target=ask, daemon=True).start()
    ask()


def noisy_tenant(
    clients: int = 50, blocks: int = 10, questions: int = 40, tenant_running: int | None = 4
) -> dict[str, list[float]]:
    """Return the ms of one tenant's questions, one at a time, in blocks without and with another tenant's flood.

    Blocks alternate, so that whatever else the machine does concerns both. The search itself takes 200 ms.
    """
    times: dict[str, list[float]] = {"alone": [], "beside the flood": []}
    spawned = multiprocessing.get_context("spawn")
    on = spawned.Event()
    with ExitStack() as stack:
        model = stack.enter_context(LoopbackOpenAI("{}"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _, port = stack.enter_context(
            program(str(folder / "server.db"), model.base_url, latency=0.2, tenant_running=tenant_running)
        )
        url = f"http://127.0.0.1:{port}"
        _define(url, DEFINED)
        flood = spawned.Process(target=_flood, args=(url, clients, on), daemon=True)
        flood.start()
        stack.callback(flood.join)
        stack.callback(flood.kill)
        client = stack.enter_context(client_of(url))
        for block in range(2 * blocks):
            (on.set if block % 2 else on.clear)()
            for number in range(questions + 5):
                began = time.perf_counter()
                client.post(_PATH, json=_ASK).raise_for_status()
                if number >= 5:  # the flood comes and goes within the first ones
                    took = 1000 * (time.perf_counter() - began)
                    times["beside the flood" if block % 2 else "alone"].append(took)
    return times


def main() -> None:
    """Run the long forms and print what they found."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.replicas", description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the servers' replacement, about")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two questions of a client")
    parser.add_argument("--blocks", type=int, default=10, help="of 40 questions, without and with the flood")
    arguments = parser.parse_args()

    async def wait(_: Load) -> None:
        await asyncio.sleep(arguments.seconds / 5)

    began = time.monotonic()
    replaced = replace_and_kill(arguments.clients, wait, rolled=2, pause=arguments.pause)
    load, lost, doubled = asyncio.run(replaced)
    print(f"{arguments.clients} clients, {load.turns} turns in {time.monotonic() - began:.0f} s with all starts")
    print(f"requests sent again: {dict(load.retries)}")
    print(f"failed: {len(load.failed)}, lost turns: {lost}, turns stored twice: {doubled}", *load.failed, sep="\n")
    for quota in (4, None):
        times = noisy_tenant(blocks=arguments.blocks, tenant_running=quota)
        print(f"one tenant's flood, tenantRunningQuestions {quota or 'not set'}; ms at p50, p95, p99:")
        for name, each in times.items():
            shown = ", ".join(f"{np.percentile(each, p):.0f}" for p in (50, 95, 99))
            print(f"  {name}: {shown} ({len(each)} questions)")
    if load.failed or lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
