"""Two servers on one PostgreSQL, asked in turn; one is killed under load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle

import httpx
import pytest

from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply
from tests.kills_sessions.postgres import PostgresServer, why_not
from tests.server.program import DEFINED, program
from tests.server.serving import ADMIN, QUERY

CLIENTS, TURNS = 4, 6
ENGINE = "projects/p/locations/global/dataStores/kb"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


def converse(urls: list[str], number: int, stored: list[str]) -> None:
    """Ask several questions in a session, each at one server after the other until it is answered; note the answers."""
    turns = cycle(urls)

    def post(path: str, body: Mapping[str, object]) -> dict[str, dict[str, str]]:
        until = time.monotonic() + 100
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                headers = {"x-goog-api-key": QUERY}
                response = httpx.post(next(turns) + path, json=body, headers=headers, trust_env=False, timeout=60)
                if response.status_code == 200:
                    return dict(response.json())
            time.sleep(0.05)
        raise AssertionError("no server answers")

    session = post(f"/v1/{ENGINE}/sessions", {"displayName": f"client {number}"})["name"]
    for turn in range(TURNS):
        body = {"query": {"text": f"How tall was the Saturn V, {turn}?"}, "session": session}
        stored.append(post(f"/v1/{ENGINE}/servingConfigs/default:answer", body)["answer"]["name"])


def test_one_of_two_servers_may_die_under_load() -> None:
    """Definitions made on one server hold on both; after a kill every retry succeeds, and no answered turn is lost."""
    slow = Reply("The Saturn V was 110.6 m tall [ref_id:0].", latency=0.1)
    stored: list[str] = []
    with ExitStack() as stack:
        model = stack.enter_context(LoopbackOpenAI(lambda request: "{}" if "You plan" in request.text else slow))
        postgres = stack.enter_context(PostgresServer())
        (first, one), (_, other) = [stack.enter_context(program(postgres.url, model.base_url)) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)]
        for url, (path, body) in zip(urls, DEFINED.items(), strict=True):
            httpx.put(url + path, json=body, headers={"api-key": ADMIN}, trust_env=False).raise_for_status()
        with ThreadPoolExecutor(CLIENTS) as clients:
            begun = [clients.submit(converse, urls, number, stored) for number in range(CLIENTS)]
            while len(stored) < CLIENTS * TURNS // 3 and not all(client.done() for client in begun):
                time.sleep(0.01)
            first.kill()
            for client in begun:
                client.result(120)
        assert len(stored) == CLIENTS * TURNS
        with httpx.Client(base_url=urls[1], headers={"api-key": QUERY}, trust_env=False, timeout=60) as left:
            assert [left.get(f"/v1/{name}").status_code for name in stored] == [200] * len(stored)
