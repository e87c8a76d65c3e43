from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import seed

from llama_index_agentic_kb import KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.evidence import postprocessing
from llama_index_agentic_kb.guard.permissions import ConversationOwner
from llama_index_agentic_kb.schema import Condition, FilterOperator, any_of
from llama_index_agentic_kb.sources import base, metadata, search
from tests.leaks.machine import LeakError, LeakMachine, Tally, run_machine
from tests.leaks.world import SHARED_KINDS


def test_nothing_leaks() -> None:
    """Whatever is stored, planned, asked, listed and chatted: nobody is shown another's secret, count or sharer."""
    machine: type[LeakMachine] = seed(0)(type("LeakMachine", (LeakMachine,), {"tally": Tally()}))
    run_machine(machine, examples=40, steps=6)
    assert machine.tally.cases > 100, machine.tally
    assert machine.tally.secrets > 50, machine.tally


ALL = Condition(key="size", operator=FilterOperator.GE, value=0)


def _everything_is_allowed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Permissions, "filter_for", lambda _self, _who: ALL)


def _callers_widen(patch: pytest.MonkeyPatch) -> None:
    def effective(_self: Any, caller: Any = None, planner: Any = None) -> Any:
        given = [one for one in (caller, planner) if one is not None]
        return any_of(*given) if given else None

    patch.setattr(KnowledgeSource, "effective_filter", effective)


def _nothing_is_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(search, "matcher", lambda _filters: lambda _metadata: True)


def _postprocessors_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(postprocessing, "passing", lambda _selected, _found_by: lambda _node: True)


def _lists_are_everybodys(patch: pytest.MonkeyPatch) -> None:
    passing: Callable[..., Any] = metadata._passing
    patch.setattr(metadata, "_passing", lambda rows, _filters, deadline: passing(rows, None, deadline))


def _conversations_are_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConversationOwner, "claim", lambda _self, _who: None)


def _sharing_is_told(patch: pytest.MonkeyPatch) -> None:
    def without(_self: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return dict(given)

    patch.setattr(Permissions, "without", without)


def _hidden_documents_are_counted(patch: pytest.MonkeyPatch) -> None:
    prepared = search.PreparedSource
    patch.setattr(base, "PreparedSource", lambda *given, **fields: prepared(*given, **fields | {"is_private": False}))


def walk(kind: str) -> None:
    """Take every rule of the machine once."""
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


@pytest.mark.parametrize(
    "sabotage",
    [
        _everything_is_allowed,
        _callers_widen,
        _nothing_is_checked,
        _postprocessors_are_trusted,
        _lists_are_everybodys,
        _conversations_are_open,
        _sharing_is_told,
        _hidden_documents_are_counted,
    ],
    ids=lambda sabotage: sabotage.__name__.strip("_"),
)
def test_a_leak_would_be_found(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is no decoration: with any one of the guards taken out it finds something."""
    sabotage(monkeypatch)
    with pytest.raises(LeakError):
        walk("memory")
