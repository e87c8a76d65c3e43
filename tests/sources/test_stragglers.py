from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb import (
    AgenticRetriever,
    EffortLimits,
    KnowledgeSource,
    ReasoningEffort,
    Resilience,
    RetrievalRequest,
    RetrieverOptions,
)
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import SourceActivity
from llama_index_agentic_kb.sources import fan_out
from llama_index_agentic_kb.sources.fan_out import FanOut
from llama_index_agentic_kb.testing import MemoryRetriever

LONG = 6.0
"""What a source takes that is waited for in vain; far above what is asserted."""

ANSWER = ["rain in Paris", "rain in Oslo"]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def source(name: str, latency: float = 0.0, texts: Any = ANSWER, mode: Any = "sync", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever(texts, latency=latency, mode=mode), **fields)


def retrieved(native: bool, *sources: KnowledgeSource, params: Any = (), seconds: float = 60.0) -> Retrieval:
    limits = {ReasoningEffort.LOW: EffortLimits(search_seconds=LONG)}
    retriever = AgenticRetriever(sources, options=RetrieverOptions(limits=limits))
    asked = {"messages": [{"content": "rain"}], "knowledgeSourceParams": list(params), "maxRuntimeInSeconds": seconds}
    request = RetrievalRequest.parse(asked)
    flow = retriever.retrieval(request)
    return asyncio.run(arun(flow)) if native else run(flow)


def outcomes(made: Retrieval) -> dict[str, str | None]:
    return {r.knowledge_source_name: r.outcome for r in made.log.records if isinstance(r, SourceActivity)}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_slow_source_costs_its_grace_and_not_its_timeout(native: bool, mode: str) -> None:
    """It is given up when the others have answered; the account says why, and what would change that."""
    started = time.monotonic()
    made = retrieved(
        native, source("slow", LONG, mode=mode, resilience=Resilience(straggler_grace=0.1)), source("well")
    )
    assert time.monotonic() - started < LONG / 2
    assert outcomes(made) == {"slow": "timeout", "well": "ok"}
    assert "was still running 0.3 s after the others had answered" in made.missing[0].reason
    assert "straggler_grace; None waits for its whole timeout" in made.missing[0].reason


WELL, NOTHING = {"name": "well"}, {"name": "nothing", "texts": []}
MUST = [{"knowledgeSourceName": "slow", "failOnError": True}]


@pytest.mark.parametrize(
    ("seconds", "resilience", "others", "params"),
    [
        pytest.param(0.5, {"straggler_grace": None}, [WELL], [], id="without a grace"),
        pytest.param(0.5, {"timeout": 0.7}, [WELL], [], id="with a timeout of its own"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [WELL], MUST, id="a request fails without it"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [NOTHING], [], id="the others found nothing"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [], [], id="there are no others"),
        pytest.param(0.6, {"straggler_grace": 0.01}, [{**WELL, "latency": 0.4}], [], id="all are slow"),
    ],
)
def test_a_slow_source_is_waited_for(
    native: bool, seconds: float, resilience: Any, others: list[Any], params: Any
) -> None:
    """Where it may have its time, where nothing is gained by not waiting, and twice as long as for the others."""
    slow = source("slow", seconds, resilience=Resilience(**resilience))
    made = retrieved(native, slow, *(source(**other) for other in others), params=params)
    assert outcomes(made)["slow"] == "ok"


def test_of_many_requests_at_once_none_waits_until_its_deadline(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up earlier, whether it runs or waits for a place, so that all requests end in time."""
    monkeypatch.setattr(fan_out, "_under_way", {object() for _ in range(2_000)})
    monkeypatch.setattr(fan_out, "FINISH_SHARE", 0.9)
    slow = source("slow", LONG, resilience=Resilience(max_concurrency=1))
    made = retrieved(native, slow, source("well"), seconds=10.0)
    assert outcomes(made) == {"slow": "timeout", "well": "ok"}
    assert "was still running when 2001 requests had to end in time" in made.missing[0].reason


def test_a_grace_of_nothing_keeps_no_loop_busy(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing speaks against a search, it is looked at now and then."""
    looks: list[FanOut] = []
    look = FanOut._look

    def counted(self: FanOut) -> None:
        looks.append(self)
        look(self)

    monkeypatch.setattr(FanOut, "_look", counted)
    made = retrieved(native, source("slow", 0.5, resilience=Resilience(straggler_grace=0)), source("nothing", texts=[]))
    assert outcomes(made) == {"slow": "ok", "nothing": "empty"}
    assert 0 < len(looks) < 500


def test_a_later_look_does_not_put_off_an_earlier_one() -> None:
    """Searches that begin while others are watched leave the check of those when it was due."""

    async def due() -> list[float]:
        fan_out, times = FanOut({}, ActivityLog(CallbackManager()), top_k=1, search_seconds=1), []
        for seconds in (50.0, 100.0, 25.0):
            fan_out._look_in(seconds)
            assert fan_out._timer is not None
            times.append(fan_out._timer.when())
        return times

    first, second, third = asyncio.run(due())
    assert first == second > third


def test_waiting_for_a_place_is_no_fault_of_the_source() -> None:
    """Searches that wait their turn behind others of the same source are not given up."""
    busy = source("busy", 0.1, resilience=Resilience(max_concurrency=1, straggler_grace=0.15))
    retriever = AgenticRetriever([busy, source("well")])

    async def ask() -> list[Retrieval]:
        request = retriever.request_for("rain")
        return await asyncio.gather(*(arun(retriever.retrieval(request)) for _ in range(8)))

    assert [outcomes(made) for made in asyncio.run(ask())] == [{"busy": "ok", "well": "ok"}] * 8


@pytest.mark.parametrize("grace", [-1, float("nan"), "long", True])
def test_a_grace_is_a_number(grace: Any) -> None:
    """The error names the source and the field."""
    with pytest.raises(ConfigurationError, match="straggler_grace must be 0 or more, None, or 'auto'"):
        source("x", resilience=Resilience(straggler_grace=grace))


def test_the_usual_time_of_a_source_is_waited_for(native: bool) -> None:
    """What usually takes 0.3 s is not given up after 0.2."""
    slow = source("slow", 0.3, resilience=Resilience(straggler_grace=0.2))
    for _ in range(2):
        assert outcomes(retrieved(native, slow, source("well"))) == {"slow": "ok", "well": "ok"}
