from __future__ import annotations

from dataclasses import replace
from math import factorial

import pytest
from typer.testing import CliRunner

from llama_index_agentic_kb import cli
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation.capacity import RECORDED, Terms, Work, plan, simulate
from llama_index_agentic_kb.schema import ReasoningEffort

LOW = ReasoningEffort.LOW
ONE = Work(1, 1, 0, (0, 0))


@pytest.mark.parametrize(("servers", "load"), [(1, 0.6), (4, 0.7)])
def test_the_simulation_waits_as_queueing_theory_says(servers: int, load: float) -> None:
    """Erlang's C: with random arrivals and exponential service, the mean time is within 10 % of the formula's."""
    offered = servers * load
    blocked = offered**servers / factorial(servers) / (1 - load)
    waits = blocked / (sum(offered**n / factorial(n) for n in range(servers)) + blocked)
    expected = 1 + waits / (servers * (1 - load))
    times = replace(RECORDED, question=0, shard=0, embedding=0, check=0, search=((1, 1.0), (9, 1.0)), spread=1)
    made = simulate(times, ONE, shards=1, chunks=5, cores=servers, processes=1, qps=offered, questions=8_000)
    assert made.mean == pytest.approx(expected, rel=0.1)


def test_a_plan_has_room_for_its_load() -> None:
    """Servers hold their shards, and no core is busy for more than it may be; ten times the load, as many machines."""
    few, many = (plan(1e8, qps, LOW, terms=Terms(model_seconds=0)) for qps in (50, 500))
    assert few.shards == many.shards == 5
    assert 1e8 / few.shards * RECORDED.memory <= 0.8 * 64e9
    assert many.processes == pytest.approx(10 * few.processes, rel=0.1)
    assert many.latency.p50 < many.latency.p99 < 3
    assert few.money[0] == 0
    assert few.limits == ("a day to build on one machine", "memory of one server")
    assert plan(1e5, 1, LOW).limits == ()
    for chunks, qps in ((1e6, 0), (float("inf"), 1), (1e300, 1e300), (1e6, float("nan"))):
        with pytest.raises(ConfigurationError, match="must be above 0"):
            plan(chunks, qps, LOW)


def test_the_command_prints_a_column_a_size() -> None:
    """Recorded times name their machine."""
    done = CliRunner().invoke(cli.app, ["plan-capacity", "--chunks", "1e6", "--chunks", "1e8", "--qps", "5"])
    assert done.exit_code == 0, done.output
    assert "100,000,000" in done.output
    assert "AMD EPYC" in done.output
