"""Two servers on one PostgreSQL behind a plain TCP balancer; one is killed under load."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from itertools import count
from typing import Self

import httpx
import pytest

from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply
from tests.kills_sessions.postgres import PostgresServer, why_not
from tests.server.program import DEFINED, program
from tests.server.serving import ADMIN, QUERY

CLIENTS, TURNS = 4, 6
ENGINE = "projects/p/locations/global/dataStores/kb"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


class Balancer:
    """Hands each connection to the next of several ports that accepts one."""

    def __init__(self, ports: list[int]) -> None:
        self._ports, self._turn = ports, count()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with closing(client):
            for _ in self._ports:
                port = self._ports[next(self._turn) % len(self._ports)]
                try:
                    server = socket.create_connection(("127.0.0.1", port), timeout=5)
                except OSError:
                    continue
                with closing(server), selectors.DefaultSelector() as ready:
                    server.settimeout(None)
                    ready.register(client, selectors.EVENT_READ, server)
                    ready.register(server, selectors.EVENT_READ, client)
                    self._copy(ready)
                return

    @staticmethod
    def _copy(ready: selectors.BaseSelector) -> None:
        while True:
            for key, _ in ready.select():
                try:
                    data = key.fileobj.recv(65_536)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
                except OSError:
                    return


def converse(url: str, number: int, stored: list[str], retries: list[int]) -> None:
    """Ask several questions in a session, each until it is answered; note the name of each answer."""
    with httpx.Client(base_url=url, headers={"x-goog-api-key": QUERY}, trust_env=False, timeout=60) as client:

        def post(path: str, body: Mapping[str, object]) -> dict[str, dict[str, str]]:
            until = time.monotonic() + 100
            while True:
                try:
                    response = client.post(path, json=body, headers={"connection": "close"})
                    if response.status_code == 200:
                        return dict(response.json())
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < until
                retries.append(number)
                time.sleep(0.05)

        session = post(f"/v1/{ENGINE}/sessions", {"displayName": f"client {number}"})["name"]
        for turn in range(TURNS):
            body = {"query": {"text": f"How tall was the Saturn V, {turn}?"}, "session": session}
            answered = post(f"/v1/{ENGINE}/servingConfigs/default:answer", body)
            stored.append(answered["answer"]["name"])


def test_one_of_two_servers_may_die_under_load() -> None:
    """Definitions made on one server hold on both; after a kill every retry succeeds, and no answered turn is lost."""
    slow = Reply("The Saturn V was 110.6 m tall [ref_id:0].", latency=0.1)
    stored: list[str] = []
    retries: list[int] = []
    with ExitStack() as stack:
        model = stack.enter_context(LoopbackOpenAI(lambda request: "{}" if "You plan" in request.text else slow))
        postgres = stack.enter_context(PostgresServer())
        (first, one), (_, other) = [stack.enter_context(program(postgres.url, model.base_url)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)]
        for url, (path, body) in zip(urls, DEFINED.items(), strict=True):
            httpx.put(url + path, json=body, headers={"api-key": ADMIN}, trust_env=False).raise_for_status()
        balancer = stack.enter_context(Balancer([one, other]))
        clients = [
            threading.Thread(target=converse, args=(balancer.url, number, stored, retries)) for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        until = time.monotonic() + 100
        while len(stored) < CLIENTS * TURNS // 3 and time.monotonic() < until:
            time.sleep(0.01)
        first.kill()
        for client in clients:
            client.join(120)
        assert len(stored) == CLIENTS * TURNS
        with httpx.Client(base_url=urls[1], headers={"api-key": QUERY}, trust_env=False, timeout=60) as left:
            assert [left.get(f"/v1/{name}").status_code for name in stored] == [200] * len(stored)
        assert first.poll() is not None
