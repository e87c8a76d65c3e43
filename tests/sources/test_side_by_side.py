"""Searches of several sources, or shards of one, side by side: which are waited for, and what they find together."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import (
    AgenticRetriever,
    EffortLimits,
    Fields,
    KnowledgeBase,
    KnowledgeSource,
    Permissions,
    Principal,
    ReasoningEffort,
    Resilience,
    RetrievalRequest,
    RetrieverOptions,
    ShardedSource,
)
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import ConfigurationError, RetrievalError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Condition, QueryPlan, SourceActivity, SubQuery
from llama_index_agentic_kb.sources import fan_out as module
from llama_index_agentic_kb.sources.base import select
from llama_index_agentic_kb.sources.fan_out import FanOut
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import MakeIndex

SLOW = 6.0
"""What a source or shard takes that is waited for in vain; far above what is asserted."""

ANSWER = ["rain in Paris", "rain in Oslo"]


def source(name: str, latency: float = 0.0, texts: Any = ANSWER, mode: Any = "sync", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever(texts, latency=latency, mode=mode), **fields)


def retrieved(*sources: KnowledgeSource, native: bool = False, must: str = "", **settings: Any) -> Retrieval:
    """Search sources, of which one may be required."""
    limits = {ReasoningEffort.LOW: EffortLimits(search_seconds=SLOW)}
    retriever = AgenticRetriever(sources, options=RetrieverOptions(limits=limits), **settings)
    params = [{"knowledgeSourceName": must, "failOnError": True}] if must else []
    request = RetrievalRequest.parse({"messages": [{"content": "rain"}], "knowledgeSourceParams": params})
    flow = retriever.retrieval(request)
    return asyncio.run(arun(flow)) if native else run(flow)


def outcomes(made: Retrieval) -> dict[str, str | None]:
    return {r.knowledge_source_name: r.outcome for r in made.log.records if isinstance(r, SourceActivity)}


@pytest.mark.parametrize("native", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_slow_source_costs_its_grace_and_not_its_timeout(native: bool, mode: str) -> None:
    """It is given up when the others have answered; the account says why, and what would change that."""
    started = time.monotonic()
    slow = source("slow", SLOW, mode=mode, resilience=Resilience(straggler_grace=0.1))
    made = retrieved(slow, source("well"), native=native)
    assert time.monotonic() - started < SLOW / 2
    assert outcomes(made) == {"slow": "timeout", "well": "ok"}
    assert "was still running 0.3 s after the others had answered" in made.missing[0].reason
    assert "straggler_grace; None waits for its whole timeout" in made.missing[0].reason


WELL, NOTHING = {"name": "well"}, {"name": "nothing", "texts": []}


@pytest.mark.parametrize(
    ("seconds", "resilience", "others", "must"),
    [
        pytest.param(0.5, {"straggler_grace": None}, [WELL], "", id="without a grace"),
        pytest.param(0.5, {"timeout": 0.7}, [WELL], "", id="with a timeout of its own"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [WELL], "slow", id="a request fails without it"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [NOTHING], "", id="the others found nothing"),
        pytest.param(0.5, {"straggler_grace": 0.05}, [], "", id="there are no others"),
        pytest.param(0.6, {"straggler_grace": 0.01}, [{**WELL, "latency": 0.4}], "", id="all are slow"),
    ],
)
def test_a_slow_source_is_waited_for(seconds: float, resilience: Any, others: list[Any], must: str) -> None:
    """Where it may have its time, where nothing is gained by not waiting, and twice as long as for the others."""
    slow = source("slow", seconds, resilience=Resilience(**resilience))
    made = retrieved(slow, *(source(**other) for other in others), must=must)
    assert outcomes(made)["slow"] == "ok"


def test_of_many_requests_at_once_none_waits_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up earlier, whether it runs or waits for a place, so that all requests end in time."""
    monkeypatch.setattr(module, "_under_way", {object() for _ in range(2_000)})
    monkeypatch.setattr(module, "FINISH_SHARE", 0.9)
    slow = source("slow", SLOW, resilience=Resilience(max_concurrency=1))
    made = retrieved(slow, source("well"), max_runtime_in_seconds=10.0)
    assert outcomes(made) == {"slow": "timeout", "well": "ok"}
    assert "was still running when 2001 requests had to end in time" in made.missing[0].reason


def test_a_grace_of_nothing_keeps_no_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing speaks against a search, it is looked at now and then."""
    looks: list[FanOut] = []
    look = FanOut._look

    def counted(self: FanOut) -> None:
        looks.append(self)
        look(self)

    monkeypatch.setattr(FanOut, "_look", counted)
    made = retrieved(source("slow", 0.5, resilience=Resilience(straggler_grace=0)), source("nothing", texts=[]))
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


def test_the_usual_time_of_a_source_is_waited_for() -> None:
    """What usually takes 0.3 s is not given up after 0.2."""
    slow = source("slow", 0.3, resilience=Resilience(straggler_grace=0.2))
    for _ in range(2):
        assert outcomes(retrieved(slow, source("well"))) == {"slow": "ok", "well": "ok"}


# -- shards -----------------------------------------------------------------------------------------------------------

MODEL = HashEmbedding(dimensions=64)
GRACE = Resilience(straggler_grace=0.05)
RANDOM = np.random.default_rng(5)
NODES = [
    TextNode(
        id_=f"n{number}",
        text=f"rain on day {number}",
        embedding=RANDOM.standard_normal(64).tolist(),
        metadata={"even": number % 2 == 0, "tenant": "acme" if number % 3 else "other"},
    )
    for number in range(36)
]


def shard(name: str, nodes: list[TextNode], model: HashEmbedding, **options: Any) -> KnowledgeSource:
    index = VectorStoreIndex([node.model_copy() for node in nodes], embed_model=model)
    return KnowledgeSource(name, index=index, hybrid=False, **options)


def collection(**options: Any) -> ShardedSource:
    model = HashEmbedding(dimensions=64)
    return ShardedSource("docs", [shard(f"s{at}", NODES[at::4], model, **options) for at in range(4)])


def of_docs(*shards: KnowledgeSource, **settings: Any) -> Retrieval:
    return retrieved(ShardedSource("docs", shards), effort="minimal", **settings)


def memory(name: str, **retriever: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([f"rain {name}"], **retriever), resilience=GRACE)


def record(made: Retrieval) -> SourceActivity:
    (found,) = [one for one in made.log.records if isinstance(one, SourceActivity)]
    return found


@pytest.mark.parametrize("top_k", [1, 5, 36])
@pytest.mark.parametrize("filters", [None, Condition(key="even", value=True)], ids=["all", "filtered"])
def test_shards_find_what_the_whole_finds(top_k: int, filters: Condition | None) -> None:
    """The merged list is that of one big index: the same nodes and scores, filters included."""
    found = []
    for source in (shard("docs", NODES, HashEmbedding(dimensions=64), filters=filters), collection(filters=filters)):
        retriever = AgenticRetriever([source], effort="minimal", similarity_top_k=top_k)
        found.append([(node.node_id, node.score) for node in retriever.retrieve("rain")])
    assert found[0] == found[1]
    assert len(found[0]) == min(top_k, 36 if filters is None else 18)


@pytest.mark.parametrize(
    ("fault", "outcome", "code", "reason"),
    [
        ({"fault": ValueError("disk gone")}, "error", "ValueError", "disk gone"),
        ({"latency": SLOW}, "timeout", "deadlineExceeded", "was still running 0.1 s after the others had answered"),
    ],
    ids=["error", "straggler"],
)
def test_a_shard_that_fails_costs_its_own_documents_only(fault: Any, outcome: str, code: str, reason: str) -> None:
    """The others' documents come, at once; the account and ``missing`` name the shard, and why."""
    started = time.monotonic()
    made = of_docs(memory("s0"), memory("s1", **fault), memory("s2"))
    assert time.monotonic() - started < SLOW / 2
    assert {node.text for node in made.nodes} == {"rain s0", "rain s2"}
    (failed,) = [lane for lane in record(made).lanes or [] if lane.error is not None]
    assert (failed.shard, failed.error and failed.error.code) == ("s1", code)
    (missing,) = made.missing
    assert (missing.what, missing.outcome) == ("docs", outcome)
    assert "search in shard 's1' failed: " in missing.reason
    assert reason in missing.reason


def test_a_shard_that_became_slow_is_not_waited_for_again() -> None:
    """Its own slow answers, which come late, do not make it a source that is usually slow."""
    late = memory("s1", latency=1.0)
    source = ShardedSource("docs", [memory("s0"), late, memory("s2")])
    for _ in range(3):
        assert [part.outcome for part in retrieved(source, effort="minimal").missing] == ["timeout"]
    assert source.usual_seconds is not None
    assert source.usual_seconds < 1.0


def test_fail_on_error_wants_every_shard() -> None:
    """A slow shard gets its time then, and one that fails fails the request."""
    made = of_docs(memory("s0"), memory("s1", latency=0.4), must="docs")
    assert {node.text for node in made.nodes} == {"rain s0", "rain s1"}
    with pytest.raises(RetrievalError, match="failOnError failed: docs: disk gone"):
        of_docs(memory("s0"), memory("s1", fault=ValueError("disk gone")), must="docs")


def test_every_shard_that_failed_is_named() -> None:
    """Without any shard the search fails, with the reason of each."""
    broken = [memory(f"s{at}", fault=ValueError(f"disk {at} gone")) for at in range(2)]
    with pytest.raises(RetrievalError, match="every shard failed: disk 0 gone; disk 1 gone"):
        of_docs(*broken)


def test_permissions_hold_in_every_shard() -> None:
    """No shard returns a document of another tenant, and metadata are counted under the same filter."""
    kb = KnowledgeBase([collection(permissions=Permissions(tenant="tenant"))], effort="minimal")
    principal = Principal(user="ann", tenant="acme")
    response = kb.retrieve("rain", principal=principal)
    assert {int(ref.node_id[1:]) % 3 for ref in response.references} == {1, 2}
    assert kb.count("docs", principal=principal) == 24


def test_a_grant_that_was_removed_from_a_shards_row_counts_no_more(chroma_index: MakeIndex) -> None:
    """The filter is applied by each shard's store, whose row may say less than the node in it."""
    indexes = [chroma_index([TextNode(id_=f"n{at}", text="rain", metadata={"owner": "ann"})], MODEL) for at in range(2)]
    indexes[0].vector_store.client.update(ids=["n0"], metadatas=[{"owner": "bob"}])
    shards = [
        KnowledgeSource(f"s{at}", index=index, permissions=Permissions(owner="owner"))
        for at, index in enumerate(indexes)
    ]
    kb, ann = KnowledgeBase([ShardedSource("docs", shards)], effort="minimal"), Principal(user="ann")
    assert [reference.node_id for reference in kb.retrieve("rain", principal=ann).references] == ["n1"]
    assert kb.count("docs", principal=ann, per="chunk") == 1
    assert [one.document_id for one in kb.documents("docs", principal=ann)] == ["n1"]


@pytest.mark.parametrize(
    "first", [shard("s0", NODES[:9], HashEmbedding(dimensions=64)), memory("s0")], ids=["model", "none"]
)
def test_scores_that_do_not_compare_are_not_mixed(first: KnowledgeSource) -> None:
    """Shards of other embedding models, or of ones that are not known, are merged by turns, and no score is shown."""
    made = of_docs(first, memory("s1"))
    assert {node.score for node in made.nodes} == {None}
    assert "rain s1" in {node.text for node in made.nodes[:2]}


def searching(source: ShardedSource, *others: KnowledgeSource, **request: Any) -> FanOut:
    parsed = RetrievalRequest.parse({"messages": [{"content": "rain"}], **request})
    chosen = select({one.name: one for one in (source, *others)}, parsed, None)
    return FanOut(chosen, ActivityLog(CallbackManager()), top_k=36, search_seconds=SLOW)


def test_a_planners_filter_and_the_collections_number_reach_each_shard() -> None:
    """Each shard returns as many as the collection was given, of those that pass the planner's filter."""
    model = HashEmbedding(dimensions=64)
    shards = [shard(f"s{at}", NODES[at::3], model) for at in range(3)]
    even = Condition(key="even", value=True)
    asked = SubQuery(id="q1", query="rain", sources=["docs"], filters={"docs": even})
    (found,) = run(searching(ShardedSource("docs", shards, similarity_top_k=4)).search(QueryPlan(sub_queries=[asked])))
    assert found.record is not None
    assert [(lane.shard, lane.count) for lane in found.record.lanes or []] == [("s0", 4), ("s1", 4), ("s2", 4)]
    assert len(found.nodes) == 4
    assert found.record.dropped_by_filter == 0
    assert all(node.metadata["even"] for ranked in found.lists for part in ranked.parts for node in part.nodes)


def test_a_collection_with_a_slow_shard_is_not_waited_for_longer_than_its_shard() -> None:
    """A round goes on while the shard, which must answer, is still being searched."""
    source = ShardedSource("docs", [memory("s0"), memory("s1", latency=SLOW)])
    fan_out = searching(
        source, memory("other"), knowledgeSourceParams=[{"knowledgeSourceName": "docs", "failOnError": True}]
    )

    async def waited() -> list[bool]:
        plan = QueryPlan(sub_queries=[SubQuery(id="q1", query="rain", sources=["docs", "other"])])
        searches = fan_out.begin(plan)
        await fan_out.wait_for(searches)
        done = [search.job.done for search in searches]
        for search in searches:
            search.job.cancel()
        return done

    assert asyncio.run(arun(waited())) == [False, True]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([memory("a")], "at least two shards"),
        ([memory("a"), memory("a")], "with different names"),
        ([collection(), memory("a")], "'docs' can't be a shard"),
        (
            [memory("a"), KnowledgeSource("b", retriever=MemoryRetriever([]), fields=Fields(url="link"))],
            "differ in fields",
        ),
        ([memory("a"), KnowledgeSource("b", retriever=MemoryRetriever([]), filters="x eq 1")], "differ in filters"),
        ([memory("a"), KnowledgeSource("b", retriever=MemoryRetriever([]), weight=2)], "no params and no weight"),
    ],
    ids=["one", "names", "nested", "fields", "filters", "weight"],
)
def test_shards_must_be_alike(shards: list[KnowledgeSource], message: str) -> None:
    """The error says what differs."""
    with pytest.raises(ConfigurationError, match=message):
        ShardedSource("docs", shards)


def test_names_of_shards_are_names_of_sources() -> None:
    """A source of the same name as a shard is refused."""
    with pytest.raises(ConfigurationError, match="s1 is given twice"):
        AgenticRetriever([ShardedSource("docs", [memory("s0"), memory("s1")]), memory("s1")])
