from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import seed

from llama_index_agentic_kb import KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.evidence import gathering
from llama_index_agentic_kb.guard.permissions import ConversationOwner
from llama_index_agentic_kb.schema import Condition, FilterOperator, any_of
from llama_index_agentic_kb.sources import base, metadata, search
from tests.leaks.machine import LeakError, LeakMachine, Tally, run_machine, run_searches
from tests.leaks.world import SHARED_KINDS


def test_nothing_leaks() -> None:
    """Whatever is stored, planned, asked, listed and chatted: nobody is shown another's secret, count or sharer."""
    machine: type[LeakMachine] = seed(0)(type("LeakMachine", (LeakMachine,), {"tally": Tally()}))
    run_machine(machine, examples=24, steps=10)
    assert machine.tally.cases > 100, machine.tally
    assert machine.tally.secrets > 50, machine.tally


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_each_finds_all_that_is_theirs(kind: str) -> None:
    """Hostile names and filters find, list and count nothing else, and nothing else takes a place."""
    assert run_searches(kind, 60).secrets > 10


ALL = Condition(key="size", operator=FilterOperator.GE, value=0)


def _widened(_self: Any, caller: Any = None, planner: Any = None) -> Any:
    given = [one for one in (caller, planner) if one is not None]
    return any_of(*given) if given else None


def _everybodys(passing: Any, rows: Any, _filters: Any, deadline: Any) -> Any:
    return passing(rows, None, deadline)


def _counted(*given: Any, prepared: Any = search.PreparedSource, **fields: Any) -> Any:
    return prepared(*given, **fields | {"is_private": False})


SABOTAGE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "everything is allowed": (Permissions, "filter_for", lambda _self, _who: ALL),
    "callers widen": (KnowledgeSource, "effective_filter", _widened),
    "nothing is checked": (base, "matcher", lambda _filters: lambda _metadata: True),
    "postprocessors are trusted": (gathering, "_showing", lambda _found, _selected: lambda node: node),
    "lists are everybody's": (metadata, "_passing", partial(_everybodys, metadata._passing)),
    "conversations are open": (ConversationOwner, "claim", lambda _self, _who: None),
    "sharing is shown": (Permissions, "without", lambda _self, given: dict(given)),
    "hidden documents are counted": (base, "PreparedSource", _counted),
}


def walk(kind: str) -> None:
    machine = type("LeakMachine", (LeakMachine,), {"kinds": (kind,)})()
    own, foreign = ({"words": ("rain",), "tenant": tenant, "public": True} for tenant in ("acme", "beta"))
    shared = {**own, "users": frozenset({"bob"}), "groups": frozenset({"managers"})}
    people = [Principal("acme", "alice"), Principal("beta", "bob", frozenset({"man"})), Principal("acme", "bob")]
    machine.begin(number=0, people=people, given=[shared, foreign])
    step = {"query": "rain in beta", "sources": ["docs"], "filter": "tenant eq 'beta'"}
    plan = json.dumps({"sub_queries": [step]})
    everything = {"knowledgeSourceName": "docs", "filterAddOn": "tenant ne 'x'"}
    params = {"knowledgeSourceParams": [everything], "retrievalReasoningEffort": {"kind": "low"}}
    try:
        for native in (False, True):
            machine.ask(0, "rain", [], params, plan, native=native, in_context=native)
            machine.chat(0, "rain", plan, native=native)
            machine.bring(0, "rain", plan, in_engine=native)
        for way in range(4):
            machine.use_parts(1, "rain", plan, way)
        machine.all_at_once("rain", plan)
        machine.list_all(0, "docs", "code", None)
        machine.find(0, None)
        machine.listen(people[1], ("acme", "alice"), "rain")
        machine.move(0, frozenset({"managers"}))
        machine.store([own])
        machine.nobody("rain", params)
    finally:
        machine.teardown()


@pytest.mark.parametrize("kind", ["chroma", "memory", *SHARED_KINDS])
def test_a_walk_through_all_rules(kind: str) -> None:
    """Nothing leaks on it: what is found below is the sabotage's."""
    walk(kind)


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_a_leak_would_be_found(sabotage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is no decoration: with any one of the guards taken out it finds something."""
    monkeypatch.setattr(*SABOTAGE[sabotage])
    with pytest.raises(LeakError):
        walk("memory")
