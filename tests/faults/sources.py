"""Faults of sources: they hang, fail, flap, come late; a Chroma server is stopped, killed, restarted; callers leave."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import chromadb
from chromadb.api import ClientAPI
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import MetadataFilters
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Resilience, RetrievalResponse
from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.guard.resilience import BreakerPolicy
from llama_index_agentic_kb.schema import Outcome
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM
from tests.aio.conftest import until
from tests.chroma_server import ChromaServer
from tests.faults.registry import HANGS, failing, fault, searches, timed

SOON = 2.0
"""The deadline of most requests here, in seconds."""

MANY = 6.0
"""The deadline where many requests have to be begun before it."""

TEXTS = ["Rain in Paris.", "Rain in Oslo."]


def well() -> KnowledgeSource:
    return KnowledgeSource("well", retriever=MemoryRetriever(TEXTS))


def base(*sources: KnowledgeSource, seconds: float | None = SOON, **fields: Any) -> KnowledgeBase:
    return KnowledgeBase(list(sources), max_runtime_in_seconds=seconds, **{"effort": "minimal", **fields})


def asked(kb: KnowledgeBase) -> RetrievalResponse:
    return kb.retrieve("rain")


def asked_in_a_loop(kb: KnowledgeBase) -> RetrievalResponse:
    """Ask in an event loop that must not be blocked."""

    async def ask() -> RetrievalResponse:
        ticks: list[None] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                ticks.append(None)

        ticker = asyncio.create_task(tick())
        response = await kb.aretrieve("rain")
        ticker.cancel()
        assert len(ticks) >= 3, "the event loop was held up"
        return response

    return asyncio.run(ask())


def assert_partial(response: RetrievalResponse, name: str, outcome: Outcome) -> None:
    """The answer of the others is there, and what is missing is named."""
    assert response.status_code == 206
    assert {reference.knowledge_source_name for reference in response.references} == {"well"}
    assert (name, outcome) in {(part.what, part.outcome) for part in response.missing}
    (record,) = searches(response, name)
    assert record.error is not None
    assert record.error.target == name
    assert record.error.stage in ("preparation", "search")
    assert record.error.message


def _hangs(mode: Any, ask: Callable[[KnowledgeBase], RetrievalResponse]) -> float:
    with MemoryRetriever(TEXTS, mode=mode, fault="hang") as hung:
        source = KnowledgeSource("hung", retriever=hung)
        response, waited = timed(lambda: ask(base(source, well())))
        assert_partial(response, "hung", Outcome.TIMEOUT)
    assert until(lambda: source.health.abandoned == 0), "its place was not given back"
    return waited


OTHERS = "the others' answer by the deadline"
for injected, promise, mode, how in (
    ("a sync source hangs", f"{OTHERS}, status 206, it is named", "sync", asked),
    ("a sync source hangs in an async call", "the same, and the event loop goes on", "sync", asked_in_a_loop),
    ("an async source hangs", f"{OTHERS}; it is cancelled", "async", asked_in_a_loop),
    ("an async-only source hangs in a sync call", OTHERS, "async_only", asked),
):
    fault("source", injected, promise, deadline=SOON)(partial(_hangs, mode, how))


@fault("source", "an async source refuses to be cancelled", "the others' answer by the deadline", deadline=SOON)
def an_async_source_refuses_to_be_cancelled() -> float:
    ends = threading.Event()

    class Stubborn(MemoryRetriever):
        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            while not ends.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
            return []

    kb = base(KnowledgeSource("hung", retriever=Stubborn(TEXTS)), well())

    async def ask() -> RetrievalResponse:
        response = await kb.aretrieve("rain")
        ends.set()  # asyncio.run waits for tasks that refuse
        return response

    response, waited = timed(lambda: asyncio.run(ask()))
    assert_partial(response, "hung", Outcome.TIMEOUT)
    return waited


@fault("source", "its async method blocks the loop", "native_async=False: searched on a thread", deadline=SOON)
def an_async_method_that_blocks() -> float:
    class Blocking(MemoryRetriever):
        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return self._retrieve(query_bundle)

    with Blocking(TEXTS, fault="hang") as hung:
        kb = base(KnowledgeSource("hung", retriever=hung, native_async=False), well())
        response, waited = timed(lambda: asked_in_a_loop(kb))
    assert_partial(response, "hung", Outcome.TIMEOUT)
    return waited


@fault("source", "its retriever factory hangs", "the others' answer by the deadline", deadline=SOON)
def a_factory_hangs() -> float:
    ends = threading.Event()

    def make(_: MetadataFilters | None) -> MemoryRetriever:
        ends.wait(2 * HANGS)
        return MemoryRetriever(TEXTS)

    source = KnowledgeSource("hung", retriever_factory=make)
    response, waited = timed(lambda: asked(base(source, well())))
    ends.set()
    assert_partial(response, "hung", Outcome.TIMEOUT)
    assert until(lambda: source.health.abandoned == 0)
    return waited


@fault(
    "source", "one of two hangs, and the request has 90 s", "a second more than the other, status 206", deadline=90.0
)
def a_hang_costs_a_second() -> float:
    hanging: list[str] = []
    with MemoryRetriever(TEXTS, fault=lambda _: "hang" if hanging else None) as hung:
        kb = base(KnowledgeSource("hung", retriever=hung), well(), seconds=90.0)
        assert kb.retrieve("rain").status_code == 200
        hanging.append("from now on")
        response, waited = timed(lambda: asked(kb))
    assert_partial(response, "hung", Outcome.TIMEOUT)
    assert "after the others had answered" in response.missing[0].reason
    assert waited < 8, "it was waited for as long as its own timeout"
    return waited


@fault("source", "it answers after the deadline", "its late answer changes nothing; the next one counts", deadline=SOON)
def it_answers_late() -> float:
    slow = MemoryRetriever(["Rain, late."], latency=1.25 * SOON)
    kb = base(KnowledgeSource("slow", retriever=slow), well())
    response, waited = timed(lambda: asked(kb))
    assert_partial(response, "slow", Outcome.TIMEOUT)
    told = response.to_json()
    assert until(lambda: kb.sources["slow"].health.abandoned == 0)
    assert response.to_json() == told
    slow.latency = 0.0
    assert kb.retrieve("rain").status_code == 200
    return waited


@fault("source", "one of two hangs, 20 async requests at once", "each by its deadline, status 206", deadline=MANY)
def one_hangs_among_many_requests() -> float:
    with MemoryRetriever(TEXTS, fault="hang") as hung:
        kb = base(KnowledgeSource("hung", retriever=hung), well(), seconds=MANY)

        async def ask() -> tuple[RetrievalResponse, float]:
            began = time.monotonic()
            return await kb.aretrieve("rain"), time.monotonic() - began

        async def all_of_them() -> list[tuple[RetrievalResponse, float]]:
            return await asyncio.gather(*(ask() for _ in range(20)))

        answered = asyncio.run(all_of_them())
        assert kb.sources["hung"].health.abandoned <= 8
    assert {response.status_code for response, _ in answered} == {206}
    assert all(len(response.references) == 2 for response, _ in answered)
    return max(waited for _, waited in answered)


@fault("source", "a source hangs that a first step is searched at", "the next step goes on with the others' answer")
def a_parent_hangs() -> None:
    plan = [
        {"id": "q1", "query": "Who directed Titanic?", "finds": "the director", "depends_on": []},
        {"id": "q2", "query": "Where was #q1 born?", "finds": "the town", "depends_on": ["q1"]},
    ]
    answer = {"step": "q1", "answers": [{"value": "James Cameron", "ref": None, "confidence": "stated"}]}

    def say(messages: list[ChatMessage]) -> str:
        kind = str(messages[0].content)
        if kind.startswith("You plan"):
            return json.dumps({"sub_queries": plan})
        return json.dumps(answer) if kind.startswith("You read") else json.dumps({"sufficient": True})

    pages = ["Titanic was directed by James Cameron.", "James Cameron was born in Kapuskasing."]
    with MemoryRetriever(pages, fault="hang") as hung:
        docs = KnowledgeSource("well", "pages", retriever=MemoryRetriever(pages))
        kb = base(
            docs,
            KnowledgeSource("hung", "pages", retriever=hung, resilience=Resilience(straggler_grace=0.1)),
            seconds=90.0,
            effort="medium",
            llm=ScriptedLLM(say),
            output_mode="extractiveData",
        )
        response, waited = timed(lambda: kb.retrieve("Where was the director of Titanic born?"))
    assert response.status_code == 206
    assert waited < 8
    searched = {one.arguments.search for one in searches(response) if one.arguments is not None}
    assert "Where was James Cameron born?" in searched


@fault("source", "it raises", "the others' answer, status 206, its reason in words")
def it_raises() -> None:
    kb = base(
        KnowledgeSource("bad", retriever=MemoryRetriever(TEXTS, fault=RuntimeError("disk on fire"))), well(), seconds=20
    )
    response = kb.retrieve("rain")
    assert_partial(response, "bad", Outcome.ERROR)
    assert response.missing[0].reason == "disk on fire"


@fault("source", "it calls sys.exit", "the process, its threads and the others' answer live on")
def it_exits() -> None:
    class Exiting(MemoryRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            raise SystemExit(3)

    kb = base(KnowledgeSource("bad", retriever=Exiting(TEXTS)), well(), seconds=20)
    for response in (kb.retrieve("rain"), asyncio.run(kb.aretrieve("rain"))):
        assert_partial(response, "bad", Outcome.ERROR)


@fault("source", "its connection is refused once", "asked again within the retry budget: the whole answer, status 200")
def it_is_refused_once() -> None:
    failures = [ConnectionRefusedError("refused")]
    flaky = MemoryRetriever(TEXTS, fault=lambda _: failures.pop() if failures else None)
    response = base(KnowledgeSource("flaky", retriever=flaky), well(), seconds=20).retrieve("rain")
    assert response.status_code == 200
    assert [one.retries for one in searches(response)] == [1, None]


@fault("source", "it fails, and comes back (flapping)", "left alone while its circuit is open, asked by a probe after")
def it_flaps() -> None:
    down = [True]
    flapping = MemoryRetriever(TEXTS, fault=lambda _: ConnectionError("down") if down[0] else None)
    breaker = BreakerPolicy(failures=3, cool_down=0.3)
    kb = base(
        KnowledgeSource("flapping", retriever=flapping, resilience=Resilience(breaker=breaker)), well(), seconds=20
    )
    while kb.sources["flapping"].health.circuit != "open":
        assert_partial(kb.retrieve("rain"), "flapping", Outcome.ERROR)
    asked = len(flapping.queries)
    response = kb.retrieve("rain")
    assert "circuit open until" in response.missing[0].reason
    assert len(flapping.queries) == asked, "it was asked although its circuit is open"
    down[0] = False
    assert until(lambda: kb.retrieve("rain").status_code == 200)
    assert kb.sources["flapping"].health.circuit == "closed"


@fault("source", "all sources are down", "one error of status 502 with each one's cause, and without the password")
def all_are_down() -> None:
    bad = [
        KnowledgeSource(
            name, retriever=MemoryRetriever(TEXTS, fault=RuntimeError(f"{name}: http://me:hunter22@{name}/"))
        )
        for name in ("one", "two")
    ]
    error = _raised(base(*bad, seconds=20))
    assert error.status_code == 502
    assert [(one.source, one.stage) for one in error.failures] == [("one", "search"), ("two", "search")]
    assert "hunter22" not in str(error) + repr(error.failures)


def _raised(kb: KnowledgeBase, **fields: Any) -> RetrievalError:
    return failing(RetrievalError, "", lambda: kb.retrieve("rain", **fields))


@fault("source", "the circuits of all sources are open", "at once one error that says so, until when, and why")
def all_circuits_are_open() -> None:
    breaker = BreakerPolicy(failures=1, cool_down=60)
    down = MemoryRetriever(TEXTS, fault=RuntimeError("down"))
    kb = base(KnowledgeSource("only", retriever=down, resilience=Resilience(breaker=breaker)), seconds=20)
    _raised(kb)
    error = _raised(kb)
    assert error.failures[0].code == "circuitOpen"
    assert "circuit open until" in str(error)
    assert len(down.queries) == 1


@fault("source", "a source with failOnError hangs beside one that answers", "the request's error, 502", deadline=SOON)
def one_that_must_answer_hangs() -> float:
    with MemoryRetriever(TEXTS, fault="hang") as hung:
        kb = base(KnowledgeSource("hung", retriever=hung), well())
        must = [{"knowledgeSourceName": "hung", "failOnError": True}]
        error, waited = timed(lambda: _raised(kb, knowledge_source_params=must))
    assert error.status_code == 502
    assert [one.source for one in error.failures] == ["hung"]
    return waited


@fault("source", "more requests than may wait for it", "those too many are answered at once by the others")
def its_bulkhead_is_exhausted() -> None:
    with MemoryRetriever(TEXTS, fault="hang") as hung:
        source = KnowledgeSource("busy", retriever=hung, resilience=Resilience(max_concurrency=2, breaker=None))
        kb = base(source, well(), seconds=SOON)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(kb.retrieve, ["rain"] * 3))
        assert source.health.abandoned == 2
        response, waited = timed(lambda: kb.retrieve("rain", max_runtime_in_seconds=30))
        assert_partial(response, "busy", Outcome.ERROR)
        assert "all its 2 places are held" in response.missing[0].reason
    assert waited < 10
    assert until(lambda: source.health.abandoned == 0)
    hung.fault = None
    assert kb.retrieve("rain", max_runtime_in_seconds=30).status_code == 200


@fault("source", "the caller's task is cancelled", "its searches are cancelled; no task is left, places are free")
def the_caller_is_cancelled() -> None:
    with MemoryRetriever(TEXTS, mode="async", fault="hang") as hung, MemoryRetriever(TEXTS, fault="hang") as thread:
        kb = base(KnowledgeSource("task", retriever=hung), KnowledgeSource("thread", retriever=thread), seconds=90.0)

        async def leave() -> None:
            task = asyncio.create_task(kb.aretrieve("rain"))
            while not (hung.queries and thread.queries):  # noqa: ASYNC110 (the source knows no event)
                await asyncio.sleep(0.01)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(leave())
        assert until(lambda: kb.sources["task"].health.abandoned == 0)
        assert kb.sources["thread"].health.abandoned == 1, "a thread can't be cancelled, it is counted"
    assert until(lambda: kb.sources["thread"].health.abandoned == 0)


@functools.cache
def server() -> ChromaServer:
    """One server for all faults of this process."""
    started = ChromaServer()
    started.start()
    atexit.register(started.__exit__)
    return started


@contextmanager
def over_chroma(**fields: Any) -> Iterator[tuple[KnowledgeBase, ClientAPI, str]]:
    """A knowledge base over a collection of the user's own client, which has no timeout, and a source that is well."""
    client = chromadb.HttpClient("127.0.0.1", server().port)
    name = f"docs-{uuid.uuid4().hex}"
    store = ChromaVectorStore(chroma_collection=client.create_collection(name, embedding_function=None))
    nodes = [TextNode(text=f"Rain, report {number}.") for number in range(20)]
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=HashEmbedding())
    kb = base(KnowledgeSource("chroma", index=index, **fields), well(), seconds=20.0)
    assert kb.retrieve("rain").status_code == 200
    try:
        yield kb, client, name
    finally:
        client._server._session.close()  # type: ignore[attr-defined]  # it has no public end


@fault("source", "its Chroma server is stopped (SIGSTOP)", "the others' answer in time", deadline=SOON)
def a_server_is_stopped() -> float:
    with over_chroma(resilience=Resilience(breaker=None)) as (kb, _, _):
        source = kb.sources["chroma"]
        server().stop()
        try:
            response, waited = timed(lambda: kb.retrieve("rain", max_runtime_in_seconds=SOON))
            assert_partial(response, "chroma", Outcome.TIMEOUT)
            assert until(lambda: source.health.abandoned == 0), "its thread waits for ever"
        finally:
            server().go_on()
        assert kb.retrieve("rain").status_code == 200
    return waited


@fault("source", "its Chroma server is killed, and started again", "the others' answer; then the whole answer again")
def a_server_is_killed() -> None:
    with over_chroma(resilience=Resilience(breaker=BreakerPolicy(cool_down=0.1))) as (kb, _, _):
        server().kill()
        try:
            assert_partial(kb.retrieve("rain"), "chroma", Outcome.ERROR)
        finally:
            server().start()
        assert until(lambda: kb.retrieve("rain").status_code == 200)


@fault("source", "its Chroma collection is deleted", "an error that says so, never an empty answer")
def a_collection_is_deleted() -> None:
    with over_chroma() as (kb, client, name):
        client.delete_collection(name)
        response = kb.retrieve("rain")
        assert_partial(response, "chroma", Outcome.ERROR)
        assert "does not exist" in response.missing[0].reason
        assert kb.sources["chroma"].health.circuit == "closed"
