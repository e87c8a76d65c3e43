"""What a collection and its load need: machines, memory, disk, time and money (``agentic-kb plan-capacity``).

A question is work at two kinds of machine. API processes (Python, one core each) plan, embed the query, merge the lists
of all shards and answer; shard servers search. Both are sized so that they are busy for at most ``BUSY`` of the time. A
discrete-event simulation of the result (simpy) then tells how long questions wait. The service times are measured on a
machine (``measure``), or those recorded here. What depends on the model (its seconds and its tokens) is counted as it
was measured with the default prompts; a model's rate limits are not modelled.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import ReasoningEffort

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from rich.table import Table

    from llama_index_agentic_kb.sources import KnowledgeSource
    from llama_index_agentic_kb.store import KnowledgeStore

BUSY: Final = 0.7
"""The share of the time for which a core may be busy; beyond it, waits grow fast."""
FILLED: Final = 0.8
"""The share of a server's memory that its shard may fill."""
SIMULATED: Final = 16
"""The maximum number of shards that are simulated; more change the slowest of them little, and take long."""
ANSWER_TOKENS: Final = (2_900, 200)
"""Tokens that the model reads and writes for an answer: ten passages of 254 tokens, and the instructions."""
PROCESS_BYTES: Final = 700e6
"""The memory of an API process with the embedding model."""


class Work(NamedTuple):
    """What a question of an effort causes, without its answer.

    Args:
        searches: The number of queries, each searched in every shard.
        rounds: The number of searches that follow one another.
        calls: The number of calls of the planning model.
        tokens: The tokens of these calls: read, written.
    """

    searches: float
    rounds: int
    calls: float
    tokens: tuple[float, float]


_DEEP: Final = Work(5, 3, 2.7, (2_400, 400))
WORK: Final[Mapping[ReasoningEffort, Work]] = {
    ReasoningEffort.MINIMAL: Work(1, 1, 0, (0, 0)),
    ReasoningEffort.LOW: Work(4, 1, 1, (340, 100)),
    ReasoningEffort.MEDIUM: _DEEP,
    ReasoningEffort.AUTO: Work(3, 2, 1.35, (1_200, 200)),
}
"""Measured with plans for 2WikiMultiHopQA (``docs/evaluation.md``); auto: every second question is planned."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """What the parts of a question take, in seconds of one core of a machine.

    Args:
        machine: The machine that they were measured on.
        question: A question at an API process, without its searches.
        shard: Each search of a shard, at the API process: its call, its nodes, their merging.
        embedding: The vector of a query.
        check: Checking a model's answer of three sentences against ten passages.
        search: A search by vector and by words, by the number of chunks of the shard.
        spread: The standard deviation of a search's time, as a share of its mean.
        chunk: Embedding and storing a chunk.
        memory: Bytes of memory for each chunk that is searched.
        disk: Bytes of disk for each chunk.
    """

    machine: str
    question: float
    shard: float
    embedding: float
    check: float
    search: tuple[tuple[int, float], ...]
    spread: float
    chunk: float
    memory: float
    disk: float

    def search_seconds(self, chunks: float) -> float:
        """Return the time of a search in so many chunks: on a line through the nearest two sizes, in logarithms."""
        points = [(math.log(size), math.log(seconds)) for size, seconds in self.search]
        at = math.log(max(chunks, 1))
        left, right = next((pair for pair in pairwise(points) if at <= pair[1][0]), points[-2:])
        slope = max(0.0, (right[1] - left[1]) / (right[0] - left[0]))
        return math.exp(left[1] + slope * (at - left[0]))


RECORDED: Final = ServiceTimes(
    machine="one core of an AMD EPYC that was busy with other work, November 2026",
    question=0.0,
    shard=0.0073,
    embedding=0.012,
    check=0.067,
    search=((2_000, 0.0031), (20_000, 0.0052), (1_000_000, 0.033)),
    spread=0.2,
    chunk=0.072,
    memory=2_200,
    disk=6_300,
)
"""Measured by ``measure`` with one thread, but for a million chunks, memory and disk (``make bench-scale``). A question
over one shard took no measurable time beyond its shard's."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The machines that can be had, and what they and the model cost.

    Args:
        cores: The cores of a machine.
        memory_gb: The memory of a machine.
        price_hour: The price of a machine for an hour.
        price_in: The price of a million tokens that the model reads.
        price_out: The price of a million tokens that the model writes.
        model_seconds: The duration of a call of the model; 0 answers with extracts, without a model.
    """

    cores: int = 16
    memory_gb: float = 64
    price_hour: float = 0.7
    price_in: float = 0.15
    price_out: float = 0.6
    model_seconds: float = 1.5


@dataclass(frozen=True, slots=True)
class Latency:
    """The seconds of simulated or real questions.

    Args:
        mean: Their mean.
        p50: Their median.
        p99: What one in a hundred exceeds.
        per_second: The number of questions that were answered in a second.
    """

    mean: float
    p50: float
    p99: float
    per_second: float

    @classmethod
    def of(cls, seconds: Sequence[float], whole: float) -> Latency:
        """Return the figures of questions that took so long, in a whole time."""
        ordered = sorted(seconds)
        last = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return cls(statistics.fmean(ordered), statistics.median(ordered), last, len(ordered) / whole)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection and its load need.

    Args:
        chunks: The size of the collection.
        shards: The number of its shards, one on each server.
        copies: The number of servers that hold the same shard.
        processes: The number of API processes.
        machines: The number of machines for servers and processes together.
        memory_gb: The memory in use on all machines.
        disk_gb: The size of all stores.
        build_hours: The core hours of embedding and storing the collection.
        latency: The seconds of a question.
        money: The price of 1,000 questions: of the model, of the machines.
        limits: What has given way at this size, first thing first.
    """

    chunks: float
    shards: int
    copies: int
    processes: int
    machines: int
    memory_gb: float
    disk_gb: float
    build_hours: float
    latency: Latency
    money: tuple[float, float]
    limits: tuple[str, ...]


def plan(
    chunks: float, qps: float, effort: ReasoningEffort, times: ServiceTimes = RECORDED, terms: Terms = Terms()
) -> Plan:
    """Return what so many chunks and questions a second need; raise ``ConfigurationError`` for impossible numbers."""
    if not (chunks >= 1 and qps > 0 and terms.cores > 0 and terms.memory_gb > 0 and terms.model_seconds >= 0):
        raise ConfigurationError(
            "plan-capacity: chunks, qps, cores and memory must be above 0, model-seconds not below"
        )
    work, fits = WORK[effort], FILLED * terms.memory_gb * 1e9 / times.memory
    shards = math.ceil(chunks / fits)
    searching = work.searches * times.search_seconds(chunks / shards)
    copies = math.ceil(qps * searching / (terms.cores * BUSY))
    with_model = terms.model_seconds > 0
    own = times.question + work.searches * (times.embedding + shards * times.shard) + times.check * with_model
    processes = math.ceil(qps * own / BUSY)
    machines = shards * copies + math.ceil(processes / terms.cores)
    latency = simulate(
        times, work, shards=shards, chunks=chunks / shards, cores=terms.cores * copies, processes=processes, qps=qps,
        model_seconds=terms.model_seconds,
    )  # fmt: skip
    read, written = (planned + answer for planned, answer in zip(work.tokens, ANSWER_TOKENS, strict=True))
    model = (read * terms.price_in + written * terms.price_out) / 1e3 * with_model
    hours = chunks * times.chunk / 3600
    return Plan(
        chunks, shards, copies, processes, machines,
        memory_gb=(chunks * times.memory * copies + processes * PROCESS_BYTES) / 1e9,
        disk_gb=chunks * times.disk * copies / 1e9,
        build_hours=hours,
        latency=latency,
        money=(model, machines * terms.price_hour / (qps * 3.6)),
        limits=_limits(chunks, fits, work, times, terms),
    )  # fmt: skip


def _limits(chunks: float, fits: float, work: Work, times: ServiceTimes, terms: Terms) -> tuple[str, ...]:
    """Return what has given way at a size, in the order in which it does as collections grow."""
    day, merging = 86_400 * terms.cores / times.chunk, work.searches * times.shard
    found = {
        "memory of one server": fits,
        "a day to build on one machine": day,
        "a second of merging shards": fits / merging if merging else math.inf,  # as small as could be measured
    }
    return tuple(name for name, size in sorted(found.items(), key=lambda item: item[1]) if chunks > size)


# -- simulation -------------------------------------------------------------------------------------------------------


def simulate(
    times: ServiceTimes,
    work: Work,
    *,
    shards: int,
    chunks: float,
    cores: int,
    processes: int,
    qps: float,
    model_seconds: float = 0.0,
    together: bool = False,
    questions: int = 1_000,
) -> Latency:
    """Simulate questions that arrive at random, and return how long they take.

    Args:
        times: The service times.
        work: What each question causes.
        shards: The number of shards.
        chunks: The chunks of each shard.
        cores: The cores that search each shard.
        processes: The API processes.
        qps: The questions a second, on average.
        model_seconds: The duration of a call of the model.
        together: Whether the API process searches its embedded stores itself: its interpreter does all the work.
        questions: The number of simulated questions.
    """
    import simpy  # noqa: PLC0415 (extra [capacity])

    chance, env, taken = random.Random(7), simpy.Environment(), list[float]()  # noqa: S311 (a simulation)
    api = simpy.Resource(env, processes)
    number = min(shards, SIMULATED)
    servers = [api if together else simpy.Resource(env, cores) for _ in range(number)]
    own = times.question + work.searches * times.embedding + times.check * (model_seconds > 0)
    per_round = work.searches / work.rounds
    shape = 1 / max(times.spread, 1e-3) ** 2

    def at(resource: Any, seconds: float, *, varies: bool = False) -> Generator[Any, Any, None]:
        with resource.request() as turn:
            yield turn
            yield env.timeout(chance.gammavariate(shape, seconds / shape) if varies else seconds)

    def search(server: Any) -> Generator[Any, Any, None]:
        yield from at(server, times.search_seconds(chunks) * per_round, varies=True)
        yield from at(api, times.shard * per_round * shards / number)

    def ask(begins: float) -> Generator[Any, Any, None]:
        yield env.timeout(begins)
        yield from at(api, own / 2)
        for _ in range(work.rounds):
            yield env.all_of([env.process(search(server)) for server in servers])
        yield from at(api, own / 2)
        yield env.timeout((work.calls + 1) * model_seconds)
        taken.append(env.now - begins)

    begins = 0.0
    for _ in range(questions):
        begins += chance.expovariate(qps)
        env.process(ask(begins))
    env.run()
    return Latency.of(taken, env.now)


# -- measuring --------------------------------------------------------------------------------------------------------

SOURCE: Final = "measured"
SIZES: Final = (2_000, 20_000)
SHARDS: Final = 4
ANSWER: Final = "The first word is word1. The second of them was word7. Both were found in 12 places."


def measure(progress: Callable[[str], None] = lambda _: None, embed_model: BaseEmbedding | None = None) -> ServiceTimes:
    """Measure this machine with stores of synthetic chunks: processor time, so that other work disturbs little.

    Args:
        progress: Called with what is measured next.
        embed_model: The embedding model. Defaults to the package's own.

    Raises:
        ConfigurationError: The default embedding model can't be loaded.
    """
    from llama_index_agentic_kb.grounding import check_grounding  # noqa: PLC0415 (loads onnxruntime)
    from llama_index_agentic_kb.store import KnowledgeStore, default_embed_model  # noqa: PLC0415 (loads torch)

    model = embed_model or default_embed_model()
    progress("embedding and checking")
    texts = [_text(number) for number in range(64)]
    embedding = mean_seconds(lambda: model.get_query_embedding(f"question {random.random()}"), 40)  # noqa: S311
    batch = mean_seconds(lambda: model.get_text_embedding_batch(texts), 2) / len(texts)
    check = mean_seconds(lambda: check_grounding(ANSWER, texts[:10]), 2)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        stores = [
            opened.enter_context(KnowledgeStore.open(f"{folder}/{number}", embed_model=model, create=True))
            for number in range(SHARDS + 1)
        ]
        stored = 0.0
        for number, store in enumerate(stores):
            size = SIZES[number == SHARDS]
            progress(f"a store of {size:,} chunks")
            began = time.process_time()
            fill(store, size, first=number * size)
            stored = (time.process_time() - began) / size
        searches = [_searches(stores[at], 200) for at in (0, SHARDS)]
        search = [statistics.fmean(seconds) for seconds in searches]
        progress("questions")
        one, some = (question_seconds(stores[:shards]) - embedding for shards in (1, SHARDS))
        disk = stores[SHARDS].size() / SIZES[1]
    shard = max(0.0, min(one, (some - one) / (SHARDS - 1)) - search[0])
    largest = RECORDED.search[-1]
    grown = largest[1] / RECORDED.search_seconds(SIZES[1])
    return ServiceTimes(
        machine=f"{os.cpu_count()} cores, {platform.machine()}, measured now",
        question=max(0.0, one - shard - search[0]),
        shard=shard,
        embedding=embedding,
        check=check,
        search=(*zip(SIZES, search, strict=True), (largest[0], search[1] * grown)),
        spread=statistics.pstdev(searches[1]) / search[1],
        chunk=batch + stored,
        memory=RECORDED.memory,
        disk=max(disk, RECORDED.disk),  # with the graph, which small stores do not have
    )


def fill(store: KnowledgeStore, size: int, *, first: int = 0) -> None:
    """Put synthetic chunks into a store: words at random, vectors at random around 200 topics."""
    import numpy as np  # noqa: PLC0415 (numpy loads slowly)

    from llama_index_agentic_kb.store.database import Chunk, StoredDocument  # noqa: PLC0415 (with numpy)

    rng, dimension = np.random.default_rng(first), store.fingerprint.dimension
    topics = np.random.default_rng(0).standard_normal((200, dimension))
    with store.writing():
        store.documents.put_source(SOURCE, "Synthetic chunks.")
        for start in range(first, first + size, 100):
            numbers = range(start, min(start + 100, first + size))
            vectors = topics[rng.integers(0, 200, len(numbers))] + rng.standard_normal((len(numbers), dimension))
            path = f"{start}.txt"
            named = {"title": path, "source": SOURCE, "document_id": f"{SOURCE}/{path}", "file_path": path}
            chunks = [
                Chunk(f"chunk-{number}", at, _text(number), {**named, "chunk_index": at}, f"{number}", None, None)
                for at, number in enumerate(numbers)
            ]
            document = StoredDocument(SOURCE, path, f"/{path}", "/", path, "measured")
            store.documents.put_document(document, zip(chunks, vectors.astype(np.float32), strict=True))
        store.update_indexes(SOURCE)


def question_of(number: int) -> str:
    """Return a question of six words of a chunk."""
    return " ".join(_text(number).split()[:6])


def _text(number: int) -> str:
    chance = random.Random(number)  # noqa: S311 (synthetic)
    return " ".join(f"word{int(chance.paretovariate(0.6)) % 30_000}" for _ in range(100))


def _searches(store: KnowledgeStore, number_of: int) -> list[float]:
    """Return the processor seconds of searches by vector and by words, lists of 50."""
    from llama_index.core.vector_stores.types import VectorStoreQuery  # noqa: PLC0415 (loads LlamaIndex)

    vectors, lexical, taken = store.vectors(SOURCE), store.lexical(SOURCE), []
    for number in range(number_of + 10):
        vector = [random.gauss(0, 1) for _ in range(store.fingerprint.dimension)]
        began = time.process_time()
        vectors.search(VectorStoreQuery(query_embedding=vector, similarity_top_k=50))
        lexical.search(question_of(number), 50, None)
        taken.append(time.process_time() - began)
    return taken[10:]  # the first ones load


def source_of(stores: Sequence[KnowledgeStore]) -> KnowledgeSource:
    """Return measured stores as one source, searched by vector and by words."""
    from llama_index_agentic_kb.sources import KnowledgeSource, ShardedSource  # noqa: PLC0415 (loads LlamaIndex)

    made = [
        KnowledgeSource(f"shard-{at}", index=store.index(SOURCE), hybrid=store.lexical(SOURCE))
        for at, store in enumerate(stores)
    ]
    return made[0] if len(made) == 1 else ShardedSource("shards", made)


def question_seconds(stores: Sequence[KnowledgeStore], questions: int = 100) -> float:
    """Return the mean processor time of questions over stores, asked one after another in one event loop."""
    from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions  # noqa: PLC0415 (as above)

    options = RetrieverOptions(embedding_cache=None)
    retriever = AgenticRetriever([source_of(stores)], effort="minimal", options=options)

    async def ask() -> float:
        began = 0.0
        for number in range(-10, questions):  # the first ones load
            began = began if number else time.process_time()
            await retriever.aretrieve(question_of(number + 10))
        return (time.process_time() - began) / questions

    return asyncio.run(ask())


def mean_seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean processor time of a call, after first ones that may load something."""
    for _ in range(3):
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


# -- the command ------------------------------------------------------------------------------------------------------

_ROWS: Final[tuple[tuple[str, Callable[[Plan], str]], ...]] = (
    ("shards, one on each server", lambda plan: f"{plan.shards:,}"),
    ("servers for each shard", lambda plan: f"{plan.copies:,}"),
    ("API processes", lambda plan: f"{plan.processes:,}"),
    ("machines", lambda plan: f"{plan.machines:,}"),
    ("memory in use, GB", lambda plan: f"{plan.memory_gb:,.0f}"),
    ("stores on disk, GB", lambda plan: f"{plan.disk_gb:,.0f}"),
    ("building, core hours", lambda plan: f"{plan.build_hours:,.0f}"),
    ("a question, p50 / p99 s", lambda plan: f"{plan.latency.p50:.2f} / {plan.latency.p99:.2f}"),
    ("1,000 questions: model", lambda plan: f"{plan.money[0]:,.2f}"),
    ("1,000 questions: machines", lambda plan: f"{plan.money[1]:,.2f}"),
    ("gave way", lambda plan: ", then ".join(plan.limits) or "nothing"),
)


def table_of(plans: Sequence[Plan]) -> Table:
    """Return plans as a table, one column a size."""
    from rich.table import Table  # noqa: PLC0415 (only the command shows one)

    table = Table("chunks", *(f"{one.chunks:,.0f}" for one in plans))
    for name, value in _ROWS:
        table.add_row(name, *map(value, plans))
    return table
