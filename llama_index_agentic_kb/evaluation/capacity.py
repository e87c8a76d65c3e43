"""What a collection and its load need: machines, memory, disk, time and money (``agentic-kb plan-capacity``).

A question is work at two kinds of machine. API processes (Python, one core each) plan, embed the query, merge the lists
of all shards and answer; shard servers search. Both are sized so that they are busy for at most ``BUSY`` of the time. A
discrete-event simulation of the result (simpy) then shows how long questions wait. Service times are those recorded
here, or a machine's own (``make bench-capacity`` measures them). What depends on the model (its seconds and its tokens)
is counted as it was measured with the default prompts; a model's rate limits are not modelled.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import ReasoningEffort

if TYPE_CHECKING:
    import simpy
    from rich.table import Table

    Events: TypeAlias = Generator[simpy.Event, object, None]

BUSY: Final = 0.7  # share of the time for which a core may be busy; beyond it, waits grow fast
FILLED: Final = 0.8  # share of a server's memory that its shard may fill
SIMULATED: Final = 16
"""The maximum number of shards that are simulated; more change the slowest of them little, and take long."""
ANSWER_TOKENS: Final = (2_900, 200)
"""Tokens that the model reads and writes for an answer: ten passages of 254 tokens, and the instructions."""
MOST: Final = 1e15  # chunks, or questions a second: beyond it, numbers of machines overflow
PROCESS_BYTES: Final = 700e6  # memory of an API process with the embedding model


class Work(NamedTuple):
    """The work that one question causes at an effort level; writing the answer is not counted."""

    searches: float  # queries, each searched in every shard
    rounds: int  # of searches that follow one another
    calls: float  # of the planning model
    tokens: tuple[float, float]  # of these calls: read, written


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
    """What the parts of a question take, in seconds of one core of a machine."""

    machine: str  # on which they were measured
    question: float  # at an API process, without its searches
    shard: float  # each search of one, at the API process: its call, its nodes, their merging
    embedding: float  # of a query
    check: float  # of a model's answer of three sentences against ten passages
    search: tuple[tuple[int, float], ...]  # by vector and by words; by the chunks of the shard
    spread: float  # standard deviation of a search's time, as a share of its mean
    chunk: float  # embedding and storing it
    memory: float  # bytes for each chunk that is searched
    disk: float  # bytes for each chunk

    def search_seconds(self, chunks: float) -> float:
        """Return the seconds of a search in so many chunks, interpolated (log-log) between the two nearest sizes."""
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
"""Measured with one thread (``make bench-capacity``), but for a million chunks, memory and disk (``make bench-scale``).
A question over one shard took no measurable time beyond its shard's."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The machines that can be had, and what they and the model cost."""

    cores: int = 16
    memory_gb: float = 64
    price_hour: float = 0.7  # of a machine
    price_in: float = 0.15  # of a million tokens that the model reads
    price_out: float = 0.6  # of a million tokens that the model writes
    model_seconds: float = 1.5  # of a call; 0 answers with extracts, without a model


class Latency(NamedTuple):
    """The seconds of simulated questions."""

    mean: float
    p50: float  # the median
    p99: float  # what one in a hundred exceeds


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection and its load need."""

    chunks: float
    shards: int  # one on each server
    copies: int  # servers that hold the same shard
    processes: int  # of the API
    machines: int  # for servers and processes together
    memory_gb: float  # in use on all machines
    disk_gb: float  # of all stores
    build_hours: float  # core hours of embedding and storing the collection
    latency: Latency
    money: tuple[float, float]  # for 1,000 questions: of the model, of the machines
    limits: tuple[str, ...]  # what has given way at this size, first thing first


def plan(
    chunks: float, qps: float, effort: ReasoningEffort, times: ServiceTimes = RECORDED, terms: Terms = Terms()
) -> Plan:
    """Return what so many chunks and questions a second need; raise ``ConfigurationError`` for impossible numbers."""
    if not (
        1 <= chunks <= MOST and 0 < qps <= MOST and terms.cores > 0 and terms.memory_gb > 0 and terms.model_seconds >= 0
    ):
        raise ConfigurationError(
            f"plan-capacity: chunks, qps, cores and memory must be above 0, model-seconds not below; at most {MOST:.0e}"
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
    merging = work.searches * times.shard
    most = {
        "memory of one server": fits,
        "a day to build on one machine": 86_400 * terms.cores / times.chunk,
        "a second of merging shards": fits / merging if merging else math.inf,  # as small as could be measured
    }
    return Plan(
        chunks, shards, copies, processes, machines,
        memory_gb=(chunks * times.memory * copies + processes * PROCESS_BYTES) / 1e9,
        disk_gb=chunks * times.disk * copies / 1e9,
        build_hours=chunks * times.chunk / 3600,
        latency=latency,
        money=(
            (read * terms.price_in + written * terms.price_out) / 1e3 * with_model,
            machines * terms.price_hour / (qps * 3.6),
        ),
        limits=tuple(name for name, size in sorted(most.items(), key=lambda item: item[1]) if chunks > size),
    )  # fmt: skip


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
    questions: int = 1_000,
) -> Latency:
    """Simulate questions that arrive at random, and return how long they take; chunks and cores are of each shard."""
    import simpy  # noqa: PLC0415 (extra [capacity])

    chance, env, taken = random.Random(7), simpy.Environment(), list[float]()  # noqa: S311 (a simulation)
    api = simpy.Resource(env, processes)
    number = min(shards, SIMULATED)
    servers = [simpy.Resource(env, cores) for _ in range(number)]
    own = times.question + work.searches * times.embedding + times.check * (model_seconds > 0)
    per_round = work.searches / work.rounds
    shape = 1 / max(times.spread, 1e-3) ** 2

    def at(resource: simpy.Resource, seconds: float, *, varies: bool = False) -> Events:
        with resource.request() as turn:
            yield turn
            yield env.timeout(chance.gammavariate(shape, seconds / shape) if varies else seconds)

    def search(server: simpy.Resource) -> Events:
        yield from at(server, times.search_seconds(chunks) * per_round, varies=True)
        yield from at(api, times.shard * per_round * shards / number)

    def ask(begins: float) -> Events:
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
    taken.sort()
    return Latency(statistics.fmean(taken), statistics.median(taken), taken[math.ceil(0.99 * len(taken)) - 1])


# -- the command ------------------------------------------------------------------------------------------------------


def table_of(plans: Sequence[Plan]) -> Table:
    """Return plans as a table, one column a size."""
    from rich.table import Table  # noqa: PLC0415 (only the command shows one)

    table = Table("chunks", *(f"{one.chunks:,.0f}" for one in plans))
    for name, value in {
        "shards, one on each server": "{0.shards:,}",
        "servers for each shard": "{0.copies:,}",
        "API processes": "{0.processes:,}",
        "machines": "{0.machines:,}",
        "memory in use, GB": "{0.memory_gb:,.0f}",
        "stores on disk, GB": "{0.disk_gb:,.0f}",
        "building, core hours": "{0.build_hours:,.0f}",
        "a question, p50 / p99 s": "{0.latency.p50:.2f} / {0.latency.p99:.2f}",
        "1,000 questions: model": "{0.money[0]:,.2f}",
        "1,000 questions: machines": "{0.money[1]:,.2f}",
    }.items():
        table.add_row(name, *map(value.format, plans))
    table.add_row("gave way", *(", then ".join(one.limits) or "nothing" for one in plans))
    return table
