from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb import EffortLimits
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.planning import Scope
from llama_index_agentic_kb.planning.plan_graph import (
    PlanGraph,
    PlannerSource,
    Proposal,
    description_of,
    fill,
    plain_plan,
    refers,
)
from llama_index_agentic_kb.planning.planner import read_partial_plan, read_proposals
from llama_index_agentic_kb.schema import SubQuery

QUESTION = "Where was the director of Titanic born?"
SOURCES = [PlannerSource("docs", ""), PlannerSource("wiki", "")]


def graph(*proposals: Proposal, sub_queries: int = 10) -> tuple[PlanGraph, list[SubQuery]]:
    made = PlanGraph(plain_plan(Scope(QUESTION), SOURCES), SOURCES, EffortLimits(sub_queries=sub_queries))
    ready = made.add(proposals)
    made.finish()
    return made, ready


def planned(*proposals: Proposal) -> list[SubQuery]:
    return graph(*proposals)[0].plan.sub_queries[1:]


def step(name: str, query: str, *parents: str, finds: str = "", sources: tuple[str, ...] = ()) -> Proposal:
    return Proposal(name, query, sources, parents, finds)


@pytest.mark.parametrize("written", ["#q1", "{q1}", "{{q1}}", "{#q1}", "<q1>", "<#q1>", "[q1]", "[#q1]", "#1"])
def test_every_way_of_writing_a_reference_is_read(written: str) -> None:
    """The template has our id, and the query the question's own words."""
    _, child = planned(
        step("q1", "Who directed Titanic?", finds="the director"), step("q2", f"age of {written}!", "q1")
    )
    assert child.template == "age of #q1!"
    assert child.query == "age of the director!"
    assert (child.depends_on, child.wave) == (["q1"], 2)


@pytest.mark.parametrize("text", ["C# and F#", "#MeToo [sic]", "a {set} of <b>", "5 # 7", "q1 2020"])
def test_what_looks_like_a_reference_stays(text: str) -> None:
    """Signs that belong to a query are left as they are."""
    ((one,), again) = planned(step("q1", text)), planned(step("q1", "x"), step("q2", text, "q1"))
    assert one.query == text
    assert again[1].template == text
    assert not refers(text)


def test_references_make_dependencies_that_were_not_named() -> None:
    """A step that says #a builds on it, before or after it, whatever its list says."""
    first, second, third = planned(step("b", "age of #a"), step("a", "who?"), step("c", "home of {b}"))
    assert (first.depends_on, second.depends_on, third.depends_on) == (["q2"], [], ["q1"])
    assert [first.wave, second.wave, third.wave] == [2, 1, 3]
    assert third.query == "home of age of who"


def test_what_builds_on_the_question_has_its_words() -> None:
    """A step that repeats the question is no step; what refers to it has the question in its place."""
    (child,) = planned(step("q1", QUESTION.upper()), step("q2", "age of #q1", "q1"))
    assert (child.query, child.depends_on) == ("age of the director of Titanic born", [])


@pytest.mark.parametrize(
    ("proposal", "query"),
    [
        (step("a", "capital of #q9", finds="the capital of France"), "the capital of France"),
        (step("a", "capital of #q9"), "capital of"),
        (step("a", "#q9"), QUESTION),
        (step("a", "age of #a", "a", finds="the age of #a"), "age of"),
        (step("a", "age of #q9", finds="age of #q9"), "age of"),
    ],
)
def test_no_reference_is_left_without_its_step(proposal: Proposal, query: str) -> None:
    """What refers to nothing is told by what it finds, or else by what is left of it, or by the question."""
    (one,) = planned(proposal)
    assert one.query == query
    assert not refers(one.query)
    assert not refers(one.finds or "")


def test_what_can_be_searched_is_given_once() -> None:
    """Ready are steps that build on nothing, and later their further sources alone; each is a copy."""
    made = PlanGraph(plain_plan(Scope(QUESTION), SOURCES), SOURCES, EffortLimits())
    first = step("q1", "rain", sources=("wiki",))
    (ready,) = made.add([first, step("q2", "of #q1", "q1"), step("q3", "on {q7}")])
    assert (ready.id, ready.sources) == ("q1", ["wiki"])
    (more,) = made.add([first, step("q4", "Rain", sources=("wiki", "docs"), finds="the rain")])
    assert (more.id, more.sources) == ("q1", ["docs"])
    assert ready.sources == ["wiki"]
    assert made.plan.sub_queries[1].sources == ["docs", "wiki"]
    assert made.plan.sub_queries[1].finds == "the rain"
    assert made.add([step("q5", "of #q1", sources=("wiki",))]) == []


def test_cycles_are_cut_at_their_first_step() -> None:
    """A circle of three is searched as a chain; a step that depends on itself alone."""
    made, _ = graph(step("a", "1", "c"), step("b", "2", "a"), step("c", "3", "b"), step("d", "4", "d"))
    assert [one.depends_on for one in made.plan.sub_queries[1:]] == [[], ["q1"], ["q2"], []]
    assert [one.wave for one in made.plan.sub_queries[1:]] == [1, 2, 3, 1]
    assert len(made.plan.warnings) == 2


@pytest.mark.parametrize(
    ("query", "finds", "words"),
    [
        ("Who is the director of Titanic?", None, "the director of Titanic"),
        ("Who's the director of Titanic?", None, "the director of Titanic"),
        ("Who directed Titanic?", "the director", "the director"),
        ("Who directed Titanic?", None, "Who directed Titanic"),
        ("What is it?", None, "What is it"),
        ("?", None, "?"),
    ],
)
def test_what_a_step_finds_is_told_in_words(query: str, finds: str | None, words: str) -> None:
    """Its own words for it, or what its question asks for; never nothing."""
    assert description_of(SubQuery(id="q1", query=query, sources=[], finds=finds)) == words


@pytest.mark.parametrize(
    ("template", "answers", "text"),
    [
        ("born #q1?", {"q1": "Ann"}, "born Ann?"), ("born?", {"q1": "Ann"}, "born? Ann"),
        ("when was ann born?", {"q1": "Ann"}, "when was ann born?"),
        ("#q1 and #q2", {"q1": "#q2", "q2": "Bob"}, "#q2 and Bob"), ("#q1 or #q10", {"q1": "A", "q10": "B"}, "A or B"),
        ("#q1", {"q1": "two\nlines"}, "two lines"), ("the #1 of #q1", {"q1": "A"}, "the #1 of A"),
        ("in #q2, #q1?", {"q1": "Ohio", "q2": "Lima, Ohio"}, "in Lima, Ohio?"), ("#q1 #q1, Bs", {"q1": "B"}, "B, Bs"),
        ("mayor of New York, #q1", {"q1": "New York"}, "mayor of New York, New York"),
    ],
)  # fmt: skip
def test_answers_are_put_in_their_place(template: str, answers: dict[str, str], text: str) -> None:
    """Each where it is referred to, never twice in a row; one without a place is added."""
    assert fill(template, answers) == text


PLAN = {
    "sub_queries": [
        {"id": "a", "query": "Who built it?", "sources": ["docs"], "depends_on": []},
        {"id": "b", "query": "When was it built?", "sources": ["docs", "wiki"], "depends_on": ["a"]},
    ]
}
READ = [Proposal("a", "Who built it?", ("docs",)), Proposal("b", "When was it built?", ("docs", "wiki"), ("a",))]
TEXT = json.dumps(PLAN)


@pytest.mark.parametrize(
    "reply",
    [
        TEXT, PLAN, json.dumps(PLAN, indent=2), f"{TEXT}\n\nI hope this helps.",
        f"Here you are:\n```json\n{TEXT}\n```\nAnything else?", f"```JSON{TEXT}```", json.dumps(PLAN["sub_queries"]),
        json.dumps({"plan": PLAN}), f'{{"thought": "two facts"}}\n{TEXT}',
        TEXT.replace('"sub_queries"', '"subQueries"').replace('"depends_on"', '"dependsOn"'),
        TEXT.replace('"sub_queries"', '"Sub-Questions"').replace('"query"', '"Sub Question"'),
        TEXT.replace('"sources"', '"tool_name"'), TEXT.replace('"', "'"), TEXT[:-1], TEXT.replace("]}", "],}"),
        "\ufeff" + TEXT,
    ],
)  # fmt: skip
def test_plans_are_read_in_whatever_dress_they_come(reply: str | dict[str, Any]) -> None:
    """Preamble, fences, wrappers, other spellings of keys and small breaks change nothing."""
    assert read_proposals(reply) == READ


@pytest.mark.parametrize(
    ("reply", "queries"),
    [
        ("1. Who built it?\n2. When was it built?", ["Who built it?", "When was it built?"]),
        ("Plan:\n\n (1) First one \n (2) Second one\nDone.", ["First one", "Second one"]),
        ("- Rain in Paris\n* Snow in Oslo\n• Fog", ["Rain in Paris", "Snow in Oslo", "Fog"]),
        ('["Rain in Paris", "Snow in Oslo"]', ["Rain in Paris", "Snow in Oslo"]),
        ('{"queries": ["1. Rain", "2) Snow", "  ", ""]}', ["Rain", "Snow"]),
        ('{"sub_queries": []}', []),
        (TEXT[:110], ["Who built it?"]),
        ('{"query": "Rain"}\n{"query": "Snow"}', ["Rain", "Snow"]),
        ('The plan:\n{"query": "Rain"}\n{"query": "Snow"}\nThat is all.', ["Rain", "Snow"]),
        ('[{"question": "\\"Rain?\\""}, 7, null, {"note": "x"}, {"query": "..."}]', ["Rain?"]),
        ('{"sub_queries": [{"query": "line one\\n  line two"}]}', ["line one line two"]),
    ],
)
def test_lists_of_queries_are_plans(reply: str, queries: list[str]) -> None:
    """Lists of any kind, single objects and the start of a cut plan are read; what holds no query is left out."""
    assert [proposal.query for proposal in read_proposals(reply)] == queries


def test_fields_are_taken_as_they_may_be_meant() -> None:
    """Sources may be one name or several in a text, ids may be numbers or missing; what is no name is left out."""
    reply: Any = {
        "sub_queries": [
            {"id": 1, "query": "Rain", "source": "docs, wiki", "dependencies": [2, None, {}]},
            {"query": "Snow", "sources": [{"name": "docs"}, "wiki"]},
        ]
    }
    assert read_proposals(reply) == [Proposal("1", "Rain", ("docs", "wiki"), ("2",)), Proposal("q2", "Snow", ("wiki",))]


@pytest.mark.parametrize(
    "reply",
    [
        "", "I'm sorry, but I can't help with that.", "<html><body><h1>502 Bad Gateway</h1></body></html>", "{}", "[]",
        '{"sub_queries": "none"}', "{{{{", "```json\n```",
    ],
)  # fmt: skip
def test_what_holds_no_plan_is_refused(reply: str) -> None:
    """Prose, pages of HTML, other JSON and nothing at all are no plan."""
    with pytest.raises(PlanningError, match="holds no plan"):
        read_proposals(reply)


@pytest.mark.parametrize(
    "hostile",
    [
        "\n" * 100_000, "1." + " " * 100_000, ("1." + " " * 300 + "\n") * 300, "- a" + " " * 100_000 + "\x0bb",
        "```" + " " * 100_000, "`" * 100_000, "```json" * 15_000, "[" * 100_000, "{" * 100_000, "(" * 100_000,
        '{"a":' * 20_000, '{"' + "\\" * 100_000, '{"sub_queries": [' + "{" * 100_000, '{"' + '"' * 100_000,
        "{}" * 50_000, "[]" + " " * 100_000,
    ],
    ids=lambda text: text[:10],
)  # fmt: skip
def test_hostile_replies_end(hostile: str) -> None:
    """No reply keeps the reader busy for long (a quadratic reader would need minutes for some of these)."""
    started = time.thread_time()  # of the processor: a busy machine is not the reader's fault
    with contextlib.suppress(PlanningError):
        assert isinstance(read_proposals(hostile), list)
    assert time.thread_time() - started < 20


@pytest.mark.parametrize(
    ("written", "queries"),
    [
        ("", []),
        ("Let me think", []),
        ('{"sub_queries": [{"id": "a", "query": "rain', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "sources": ["docs"]', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "sources": ["docs"], "depends_on": []', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "depends_on": [], "finds": "the', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the rain", "depends_on": ["b"', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the', []),
        ('{"sub_queries": [{"id": "a", "query": "rain"}', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain"}, {"id": "b", "query": "sn', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain"}, {"id": "b", "query": "snow"}]', ["rain", "snow"]),
        ('Plan:\n```json\n[{"query": "rain"}, {"query": "snow"}', ["rain", "snow"]),
        ('{"query": "rain", "sources": ["docs"]', []),
        ('{"query": "rain", "sources": ["docs"]}', []),
        ('{"id": "a", "query": "rain"}\n{"id": "b", "query": "snow"}', []),
        ('{"a": [[{[', []),
    ],
)
def test_what_is_still_written_is_read_as_far_as_it_can_be_searched(written: str, queries: list[str]) -> None:
    """A sub-query counts when it is known what it builds on: at its end, or where its last key begins."""
    assert [proposal.query for proposal in read_partial_plan(written)] == queries


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(TEXT)))
def test_nothing_is_begun_that_the_plan_does_not_hold(end: int) -> None:
    """Wherever a stream stands, what was read of it is the start of the plan, dependencies and all."""
    begun = read_partial_plan(TEXT[:end])
    assert begun == READ[: len(begun)]
