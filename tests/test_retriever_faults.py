from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import MetadataFilters

from llama_index_agentic_kb import (
    AgenticRetriever,
    EffortLimits,
    KnowledgeBase,
    KnowledgeSource,
    ReasoningEffort,
    Resilience,
    RetrievalRequest,
    RetrieverOptions,
)
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.errors import DeniedError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Condition, Outcome, SourceActivity
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM, ScriptedReply, Verbatim
from tests.faulty_server import Fault

if TYPE_CHECKING:
    from tests.conftest import Serve

TEXTS = ["rain in Paris", "rain in Oslo"]
ACME = Condition(key="tenant", value="acme")
WAYS = ["sync", "async"]


class DownEmbedding(HashEmbedding):
    """A model whose server is down."""

    def _get_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")

    async def _aget_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")


def source(name: str, **fields: Any) -> KnowledgeSource:
    known = {key: fields.pop(key) for key in ("fault", "latency", "mode") if key in fields}
    return KnowledgeSource(name, retriever=MemoryRetriever(TEXTS, **known), **fields)


async def retrieved(way: str, sources: Sequence[KnowledgeSource], params: Any = (), **fields: Any) -> Retrieval:
    retriever = AgenticRetriever(sources, **fields)
    request = RetrievalRequest.parse({"messages": [{"content": "rain"}], "knowledgeSourceParams": list(params)})
    return run(retriever.retrieval(request)) if way == "sync" else await arun(retriever.retrieval(request))


def outcomes(made: Retrieval) -> dict[str, str | None]:
    return {r.knowledge_source_name: r.outcome for r in made.log.records if isinstance(r, SourceActivity)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["sync", "async", "async_only"])
async def test_a_hanging_source_costs_only_itself(way: str, mode: str) -> None:
    """It is given up at its timeout; the others' results are there, and what is missing is told."""
    hanging = source("slow", fault="hang", mode=mode, resilience=Resilience(timeout=0.8))
    started = time.monotonic()
    made = await retrieved(way, [hanging, source("well")])
    assert time.monotonic() - started < 5
    assert len(made.nodes) == 2
    assert outcomes(made) == {"slow": Outcome.TIMEOUT, "well": Outcome.OK}
    (missing,) = made.missing
    assert (missing.what, missing.outcome, missing.sub_query_id) == ("slow", Outcome.TIMEOUT, "q0")
    assert "source 'slow' was" in missing.reason
    assert "deadline" in missing.reason


@pytest.mark.parametrize("way", WAYS)
async def test_the_requests_deadline_bounds_every_source(way: str) -> None:
    """A short runtime ends a search that its own timeout would let go on."""
    started = time.monotonic()
    made = await retrieved(way, [source("slow", fault="hang"), source("well")], max_runtime_in_seconds=0.3)
    assert time.monotonic() - started < 5
    assert outcomes(made) == {"slow": Outcome.TIMEOUT, "well": Outcome.OK}


@pytest.mark.parametrize("way", WAYS)
async def test_a_hanging_embedding_model_is_bounded_by_the_search(way: str) -> None:
    """A model that doesn't answer costs its sources their own time, not the request's."""
    index = VectorStoreIndex([TextNode(text="rain")], embed_model=HashEmbedding())
    model = HashEmbedding(latency=2.0)
    index._embed_model = model
    limits = {ReasoningEffort.LOW: EffortLimits(search_seconds=0.2)}
    started = time.monotonic()
    slow = KnowledgeSource("slow", index=index, hybrid=False)
    made = await retrieved(way, [slow, source("well")], options=RetrieverOptions(limits=limits))
    assert time.monotonic() - started < 1.9
    assert outcomes(made) == {"slow": Outcome.TIMEOUT, "well": Outcome.OK}
    assert "embedding model hash" in made.missing[0].reason


@pytest.mark.parametrize("way", WAYS)
async def test_a_hanging_factory_is_bounded(way: str) -> None:
    """Making a retriever counts against its search's time."""
    released = threading.Event()

    def make(_: MetadataFilters | None) -> BaseRetriever:
        released.wait(20)
        return MemoryRetriever(TEXTS)

    with contextlib.ExitStack() as end:
        end.callback(released.set)
        slow = KnowledgeSource("slow", retriever_factory=make, resilience=Resilience(timeout=0.2))
        made = await retrieved(way, [slow, source("well")])
    assert outcomes(made) == {"slow": Outcome.TIMEOUT, "well": Outcome.OK}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ConnectionError("down"), "ConnectionError"),
        (KeyError("x"), "KeyError"),
        (TimeoutError(), "TimeoutError"),
        (RecursionError("deep"), "RecursionError"),
        (Verbatim(None), "retrievalFailed"),
        (Verbatim([1]), "retrievalFailed"),
    ],
    ids=repr,
)
async def test_a_failing_source_costs_only_itself(way: str, fault: Any, code: str) -> None:
    """Whatever it raises or returns, its outcome is an error and never "empty"; the reason is in words."""
    made = await retrieved(way, [source("bad", fault=fault), source("well")])
    assert len(made.nodes) == 2
    assert outcomes(made) == {"bad": Outcome.ERROR, "well": Outcome.OK}
    record = made.log.records[0]
    assert record.error is not None
    assert (record.error.code, record.error.target) == (code, "bad")
    assert made.missing[0].reason


@pytest.mark.parametrize("way", WAYS)
async def test_a_failing_embedding_model_costs_only_its_sources(way: str) -> None:
    """Sources of another model, and those that need none, answer."""
    model = HashEmbedding()
    sound = VectorStoreIndex([TextNode(text="rain")], embed_model=model)
    broken = VectorStoreIndex([TextNode(text="rain")], embed_model=HashEmbedding())
    broken._embed_model = DownEmbedding()
    made = await retrieved(
        way,
        [KnowledgeSource("bad", index=broken, hybrid=False), KnowledgeSource("good", index=sound), source("plain")],
    )
    assert outcomes(made) == {"bad": Outcome.ERROR, "good": Outcome.OK, "plain": Outcome.OK}
    assert made.missing[0].reason == "embedding server down"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [DownEmbedding(), HashEmbedding(latency=8.0)], ids=["down", "slow"])
async def test_without_its_embedding_model_a_source_is_searched_by_words(way: str, model: HashEmbedding) -> None:
    """The lexical search does not wait for the query's vector, and stands when there is none; the account says why."""
    index = VectorStoreIndex([TextNode(text="rain in Oslo")], embed_model=HashEmbedding())
    index._embed_model = model
    started = time.monotonic()
    made = await retrieved(way, [KnowledgeSource("words", index=index, resilience=Resilience(timeout=2.0))])
    assert time.monotonic() - started < 7.9
    assert [node.text for node in made.nodes] == ["rain in Oslo"]
    (record,) = [record for record in made.log.records if isinstance(record, SourceActivity)]
    assert record.lanes is not None
    dense, lexical = record.lanes
    assert (dense.kind, dense.count, lexical.kind, lexical.count, lexical.error) == ("dense", 0, "lexical", 1, None)
    assert dense.error is not None
    assert made.missing == []


@pytest.mark.parametrize("way", WAYS)
async def test_all_failing_is_one_error_with_every_cause(way: str) -> None:
    """The error tells each source's reason and holds each search's exception."""
    first, second = ConnectionError("no route"), ValueError("bad query")
    faulty = [source("a", fault=first), source("b", fault=second)]
    with pytest.raises(RetrievalError, match=r"every selected source failed: .*no route.*") as raised:
        await retrieved(way, faulty)
    assert dict(raised.value.causes) == {"a: rain": first, "b: rain": second}
    assert not isinstance(raised.value, DeniedError)


@pytest.mark.parametrize("way", WAYS)
async def test_a_source_that_must_answer_fails_the_request(way: str) -> None:
    """With ``failOnError`` one source's failure is the request's."""
    params = [{"knowledgeSourceName": "bad", "failOnError": True}]
    with pytest.raises(RetrievalError, match="a source with failOnError failed: bad: down") as raised:
        await retrieved(way, [source("bad", fault=ConnectionError("down")), source("well")], params)
    assert list(raised.value.causes) == ["bad: rain"]
    other = [{"knowledgeSourceName": "well", "failOnError": True}]
    assert len((await retrieved(way, [source("bad", fault=ConnectionError("down")), source("well")], other)).nodes) == 2


async def test_a_source_that_can_not_keep_its_filter_is_denied() -> None:
    """Beside others it is left out and told; alone it is a ``DeniedError``."""
    plain = MemoryRetriever(TEXTS)
    denied = KnowledgeSource("plain", retriever=plain, filters=ACME)
    made = await retrieved("sync", [denied, source("well")])
    assert outcomes(made) == {"plain": Outcome.DENIED, "well": Outcome.OK}
    assert made.missing[0].outcome is Outcome.DENIED
    with pytest.raises(DeniedError, match=r"every selected source failed: plain: .* its filter can't be applied"):
        await retrieved("async", [denied])
    with pytest.raises(DeniedError):
        await retrieved("sync", [source("a"), source("b")], filters=ACME)
    assert plain.queries == []


async def test_an_odata_filter_is_never_ignored() -> None:
    """A source that can't keep to ``filterAddOn`` is not searched without it; a bad one is the request's error."""
    params = [{"knowledgeSourceName": "a", "filterAddOn": "tenant eq 'acme'"}]
    made = await retrieved("sync", [source("a"), source("b")], params)
    assert outcomes(made) == {"a": Outcome.DENIED, "b": Outcome.OK}
    with pytest.raises(DeniedError, match="its filter can't be applied"):
        await retrieved("sync", [source("a")], params)
    with pytest.raises(InvalidRequestError, match=r"knowledgeSourceParams\[a\].filterAddOn: OData filter, character 8"):
        await retrieved("async", [source("a")], [{"knowledgeSourceName": "a", "filterAddOn": "tenant = 'acme'"}])


async def test_denied_and_failed_sources_together_are_no_mere_denial() -> None:
    """Where one was denied and another failed, the error is the general one."""
    with pytest.raises(RetrievalError) as raised:
        await retrieved("sync", [source("a", filters=ACME), source("b", fault=ConnectionError("down"))])
    assert type(raised.value) is RetrievalError


async def test_empty_is_no_failure() -> None:
    """A source that finds nothing is missing nothing."""
    nothing = KnowledgeSource("none", retriever=MemoryRetriever([]))
    made = await retrieved("sync", [nothing])
    assert made.nodes == []
    assert made.missing == []
    assert outcomes(made) == {"none": Outcome.EMPTY}
    assert made.log.records[-1].outcome is Outcome.EMPTY


async def test_requests_that_fit_no_source_are_refused() -> None:
    """An unknown source's name is an error before anything is searched or planned."""
    llm = ScriptedLLM("{}")
    with pytest.raises(InvalidRequestError, match="no source is named 'nope'"):
        await retrieved("sync", [source("a")], [{"knowledgeSourceName": "nope"}], llm=llm)
    assert llm.calls == []


@pytest.mark.parametrize("fault", [Fault.status(500), Fault.refusal(), Fault.hang(), Fault.html()], ids=str)
@pytest.mark.parametrize("way", WAYS)
async def test_a_failing_planner_never_costs_the_evidence(serve: Serve, fault: Fault, way: str) -> None:
    """The question is searched as it is; the record says why, and nothing is missing from the sources."""
    llm = serve(fault).llm(max_retries=0)
    limits = {ReasoningEffort.LOW: EffortLimits(planning_seconds=0.4 if fault == Fault.hang() else 20)}
    made = await retrieved(way, [source("a"), source("b")], llm=llm, options=RetrieverOptions(limits=limits))
    await llm._get_aclient().close()
    assert len(made.nodes) == 2
    planning = made.log.records[0]
    assert planning.outcome is Outcome.ERROR
    assert planning.error is not None
    assert planning.warning is not None
    assert planning.warning.startswith("planning failed")
    assert made.missing == []


async def test_a_hanging_memory_is_given_up() -> None:
    """The question is searched without its conversation, and that is told."""

    class Hanging(ChatMemoryBuffer):
        def get(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(2)

    started = time.monotonic()
    made = await retrieved("sync", [source("a")], memory=Hanging.from_defaults(), max_runtime_in_seconds=1.0)
    assert time.monotonic() - started < 1.9
    assert len(made.nodes) == 2
    assert [(part.what, part.outcome) for part in made.missing] == [("memory", Outcome.TIMEOUT)]


async def test_a_failing_observer_breaks_nothing() -> None:
    """What an observer raises is logged."""

    def observe(_: Any) -> None:
        raise RuntimeError("observer")

    assert len((await retrieved("sync", [source("a")], observer=observe)).nodes) == 2


async def test_searches_that_are_late_are_not_begun() -> None:
    """Where planning used the time up, the searches say that they were not begun, and all is one error."""
    llm = ScriptedLLM(lambda _: (time.sleep(0.3), "{}")[1])  # type: ignore[func-returns-value]
    with pytest.raises(RetrievalError, match="deadline"):
        await retrieved("sync", [source("a", latency=0.5)], llm=llm, max_runtime_in_seconds=0.2)


# -- callers that leave ------------------------------------------------------------------------------------------------


async def test_a_cancelled_task_leaves_nothing_behind() -> None:
    """Its async searches are cancelled, those on threads counted until they return; none of its tasks is left."""
    with MemoryRetriever(TEXTS, mode="async", fault="hang") as task, MemoryRetriever(TEXTS, fault="hang") as thread:
        sources = [KnowledgeSource("task", retriever=task), KnowledgeSource("thread", retriever=thread)]
        asking = asyncio.create_task(AgenticRetriever(sources).aretrieve("rain"))
        assert await awaited(lambda: bool(task.queries and thread.queries))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert await awaited(lambda: sources[0].health.abandoned == 0)
        assert sources[1].health.abandoned == 1
    assert await awaited(lambda: sources[1].health.abandoned == 0)
    assert all(one.health.circuit == "closed" for one in sources)


async def awaited(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 (of any kind, also of threads)
        await asyncio.sleep(0.01)
    return condition()


class LeavingError(Exception):
    """What ends a sync caller from outside, as Ctrl-C does."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_an_interrupted_sync_call_leaves_nothing_behind() -> None:
    """As after Ctrl-C: its searches are counted as abandoned until they return, and nothing waits in a queue."""

    def leave(*_: object) -> None:
        raise LeavingError

    before = signal.signal(signal.SIGALRM, leave)
    with MemoryRetriever(TEXTS, fault="hang") as hung:
        hanging = KnowledgeSource("hung", retriever=hung, resilience=Resilience(max_concurrency=1))
        plan = json.dumps({"sub_queries": [{"query": "rain today", "sources": ["hung"]}]})
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(LeavingError):
                AgenticRetriever([hanging], llm=ScriptedLLM(plan)).retrieve("rain")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        health = hanging.health
        assert (health.at_work, health.waiting, health.abandoned) == (0, 0, 1)
    assert asyncio.run(awaited(lambda: hanging.health.abandoned == 0))


async def test_a_reader_that_leaves_a_stream_ends_it() -> None:
    """After one token of an answer the reader goes: no task of ours is left."""
    llm = ScriptedLLM(ScriptedReply("Rain falls in Paris, and in Oslo.", chunk_delay=0.05, chunk_size=4))
    engine = KnowledgeBase([source("well")], llm=llm, effort="minimal").as_query_engine(streaming=True)
    response = await engine.aquery("rain")
    assert isinstance(response, AsyncStreamingResponse)
    tokens = response.async_response_gen()
    assert await anext(tokens)
    await tokens.aclose()
    assert await awaited(lambda: asyncio.all_tasks() == {asyncio.current_task()})


# -- what a request is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_no_secret_of_a_client_reaches_the_account(way: str) -> None:
    """Addresses with passwords, headers and keys in errors are redacted in records, missing parts and errors."""
    told = "GET http://admin:hunter22@db:8000/?api_key=abcd1234 failed: Authorization: Bearer eyJhbGciOi.x"
    faulty = source("bad", fault=RuntimeError(told))
    made = await retrieved(way, [faulty, source("well")])
    shown = json.dumps([record.to_dict() for record in made.log.records]) + made.missing[0].reason
    with pytest.raises(RetrievalError) as raised:
        await retrieved(way, [faulty])
    shown += str(raised.value) + repr(raised.value.failures)
    assert "failed" in shown
    for secret in ("hunter22", "abcd1234", "eyJhbGciOi"):
        assert secret not in shown


@pytest.mark.parametrize("way", WAYS)
async def test_retries_are_counted_in_the_account(way: str) -> None:
    """A source's record says how often it was asked again; the request's budget paid for it."""
    failures = [ConnectionRefusedError("refused")]
    flaky = source("flaky", fault=lambda _: failures.pop() if failures else None)
    made = await retrieved(way, [flaky, source("well")])
    records = {one.knowledge_source_name: one for one in made.log.records if isinstance(one, SourceActivity)}
    assert outcomes(made) == {"flaky": Outcome.OK, "well": Outcome.OK}
    assert [one.retries for one in records.values()] == [1, None]
    assert made.budget.retries.retries == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_source_without_a_breaker_is_asked_each_time(way: str) -> None:
    """``breaker=None`` never leaves it alone; by default it is after five failures in a row."""
    ways: list[tuple[dict[str, Any], int]] = [({"resilience": Resilience(breaker=None)}, 8), ({}, 5)]
    for fields, asked in ways:
        down = MemoryRetriever(TEXTS, fault=RuntimeError("down"))
        kept = KnowledgeSource("down", retriever=down, **fields)
        for _ in range(8):
            made = await retrieved(way, [kept, source("well")])
        assert len(down.queries) == asked
        assert outcomes(made) == {"down": Outcome.ERROR, "well": Outcome.OK}
