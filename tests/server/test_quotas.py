"""Fair shares of tenants: whose question is next, who waits, and who is refused."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.server.access import Caller, FairQueue, Limits
from llama_index_agentic_kb.server.errors import TooManyRequestsError
from llama_index_agentic_kb.server.service import KnowledgeService
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.server.serving import QUERY, served_client
from tests.server.test_retrieve_route import ASK, STREAM


class Asked:
    """Questions in a queue, each of which holds its place until it may end."""

    def __init__(self, capacity: int, **limits: object) -> None:
        self.queue = FairQueue(Limits(**limits), capacity)
        self.running: list[tuple[str, asyncio.Event]] = []
        self.refused: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, tenant: str, questions: int = 1) -> None:
        """Add questions, and wait until each runs, waits or was refused."""
        self.tasks += [asyncio.create_task(self._question(tenant)) for _ in range(questions)]
        await settled()

    async def _question(self, tenant: str) -> None:
        item = (tenant, asyncio.Event())
        try:
            async with self.queue.place(tenant):
                self.running.append(item)
                try:
                    await item[1].wait()
                finally:
                    self.running.remove(item)
        except TooManyRequestsError:
            self.refused[tenant] += 1

    async def end(self, number: int = 0) -> None:
        """End the question that has run for longest, or a later one."""
        self.running[number][1].set()
        await settled()

    @property
    def tenants(self) -> Counter[str]:
        """The number of running questions of each tenant."""
        return Counter(tenant for tenant, _ in self.running)


async def settled() -> None:
    """Return when every task has gone on as far as it can."""
    for _ in range(6):
        await asyncio.sleep(0)


async def test_who_has_fewest_running_is_next() -> None:
    """Behind a flood, another tenant's question gets the first free place, and its second one an equal share."""
    asked = Asked(100, running_questions=4)
    await asked.ask("flood", 50)
    await asked.ask("other", 3)
    assert asked.tenants == {"flood": 4}
    await asked.end()
    assert asked.tenants == {"flood": 3, "other": 1}
    await asked.end()
    assert asked.tenants == {"flood": 2, "other": 2}


async def test_weights_divide_the_places() -> None:
    """Of two tenants with many questions, the one of weight 3 holds three places of four, whoever came first."""
    asked = Asked(200, running_questions=8, tenant_weights={"large": 3.0})
    await asked.ask("small", 40)
    await asked.ask("large", 40)
    for _ in range(16):
        await asked.end()
    assert asked.tenants == {"large": 6, "small": 2}


async def test_one_place_goes_round() -> None:
    """With a single place the tenants take turns."""
    asked, order = Asked(100, running_questions=1), []
    for tenant in ("a", "b", "c"):
        await asked.ask(tenant, 3)
    while asked.running:
        order.append(asked.running[0][0])
        await asked.end()
    assert order[1:] == ["b", "c", "a", "b", "c", "a", "b", "c"]


async def test_a_tenant_has_its_own_maximum() -> None:
    """Beyond its running questions a tenant waits though places are free, and others do not."""
    asked = Asked(100, running_questions=10, tenant_running_questions=2)
    await asked.ask("flood", 5)
    await asked.ask("other")
    assert (asked.tenants, asked.queue.waiting) == ({"flood": 2, "other": 1}, 3)


async def test_a_full_queue_refuses_the_longest_line() -> None:
    """Who fills the queue is refused, newest question first, and another tenant's question is taken in."""
    asked = Asked(10, running_questions=5)
    await asked.ask("flood", 12)
    assert (asked.queue.running, asked.queue.waiting, asked.refused) == (5, 5, {"flood": 2})
    await asked.ask("other")
    assert (asked.queue.waiting, asked.refused) == (5, {"flood": 3})
    await asked.end()
    assert asked.tenants == {"flood": 4, "other": 1}
    with pytest.raises(TooManyRequestsError) as refused:
        await asyncio.gather(*(asyncio.create_task(hold(asked.queue)) for _ in range(2)))
    assert int(refused.value.headers["Retry-After"]) >= 1


async def test_of_equal_lines_the_question_that_arrives_is_refused() -> None:
    """Who has waited for long is not thrown out for a tenant whose line would be as long."""
    asked = Asked(4, running_questions=1)
    for number in range(6):
        await asked.ask(f"t{number}")
    assert (asked.queue.running, asked.queue.waiting, asked.refused) == (1, 3, {"t4": 1, "t5": 1})


async def hold(queue: FairQueue) -> None:
    async with queue.place("flood"):
        pass


async def test_cancelled_questions_leave_no_trace() -> None:
    """Whatever is cancelled when, the limits hold, every place is handed on, and at the end nothing is kept."""
    chance = random.Random(1)
    asked = Asked(30, running_questions=4, tenant_running_questions=3)
    for _ in range(400):
        await asked.ask(chance.choice("abcd"), chance.randrange(4))
        if asked.running and chance.random() < 0.7:
            asked.running[chance.randrange(len(asked.running))][1].set()
        for task in chance.sample(asked.tasks, min(len(asked.tasks), 3)):
            task.cancel()
        if chance.random() < 0.5:
            await settled()
        assert asked.queue.running <= 4
        assert asked.queue.running + asked.queue.waiting <= 30
    while asked.running:
        await asked.end()
    await asyncio.gather(*asked.tasks, return_exceptions=True)
    assert (asked.queue.running, asked.queue.waiting, asked.queue._lines) == (0, 0, {})


GOOGLE = "/v1/projects/p/locations/global/dataStores/kb"
DOORS = {
    "json": ("/knowledgebases/kb/retrieve", ASK, {}),
    "events": ("/knowledgebases/kb/retrieve", ASK, STREAM),
    "answer": (f"{GOOGLE}/servingConfigs/s:answer", {"query": {"text": "Why?"}}, {}),
    "stream": (f"{GOOGLE}/servingConfigs/s:streamAnswer", {"query": {"text": "Why?"}}, {}),
    "check": (
        "/v1/projects/p/locations/global/groundingConfigs/g:check",
        {"answerCandidate": "A.", "facts": [{"factText": "A."}]},
        {},
    ),
    "rank": (
        "/v1/projects/p/locations/global/rankingConfigs/r:rank",
        {"query": "a", "records": [{"content": "a"}]},
        {},
    ),
    "mcp": (
        "/knowledgebases/kb/mcp",
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "knowledge_base_retrieve", "arguments": {"query": "Why?"}},
        },
        {"accept": "application/json, text/event-stream"},
    ),
}


class Tenants:
    """Takes a token for the name of its tenant."""

    async def verify(self, token: str) -> Caller:
        return Caller("somebody", Principal(tenant=token, user="u"))


def test_each_door_counts_a_tenants_questions(tmp_path: Path) -> None:
    """A tenant that asked as often as it may gets 429 at every door, whichever its credentials; others are answered."""
    base = KnowledgeBase(
        [KnowledgeSource("docs", retriever=MemoryRetriever(["The pump."]))], name="kb", effort="minimal"
    )
    service = KnowledgeService(tmp_path / "s.db", bases=[base])
    acme = {"authorization": "Bearer acme"}
    with served_client(service, tenant_questions_per_minute=1, verifier=Tenants(), key=None) as client:

        def ask(door: str, credentials: dict[str, str]) -> httpx.Response:
            path, body, headers = DOORS[door]
            return client.post(path, json=body, headers={**headers, **credentials})

        assert ask("json", acme).status_code == 200
        assert ask("json", {"api-key": QUERY}).status_code == 200
        for door in DOORS:
            refused = ask(door, {"api-key": QUERY, "x-ms-query-source-authorization": "acme"})
            assert "1 questions a minute" in refused.text, door
            if door != "mcp":  # its errors are results
                assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True), door
        assert ask("json", {"authorization": "Bearer other"}).status_code == 200
