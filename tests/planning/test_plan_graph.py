from __future__ import annotations

import pytest

from llama_index_agentic_kb import EffortLimits
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
from llama_index_agentic_kb.schema import SubQuery, SubQueryOrigin

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
        ("born #q1?", {"q1": "Ann"}, "born Ann?"),
        ("born?", {"q1": "Ann"}, "born? Ann"),
        ("when was ann born?", {"q1": "Ann"}, "when was ann born?"),
        ("#q1 and #q2", {"q1": "#q2", "q2": "Bob"}, "#q2 and Bob"),
        ("#q1 or #q10", {"q1": "A", "q10": "B"}, "A or B"),
        ("#q1", {"q1": "two\nlines"}, "two lines"),
        ("the #1 of #q1", {"q1": "A"}, "the #1 of A"),
    ],
)
def test_answers_are_put_in_their_place(template: str, answers: dict[str, str], text: str) -> None:
    """Each where it is referred to, once; one without a place is added."""
    assert fill(template, answers) == text


def test_a_revision_builds_on_what_was_planned() -> None:
    """Its searches have ids, origin and round of their own, and may build on one another and on earlier steps."""
    known = plain_plan(Scope(QUESTION), SOURCES)
    rain = SubQuery(id="q1", query="rain", sources=["docs"])
    known.sub_queries.append(rain)
    made = PlanGraph(known, SOURCES, EffortLimits(sub_queries=9), revision=1, steps={"q1": rain}, first_round=3)
    ready = made.add([step("r1", "snow"), step("r2", "RAIN"), step("r3", "of #q1"), step("r4", "on #r3", "r3")])
    made.finish()
    own = {one.id: one for one in made.plan.sub_queries[2:]}
    assert [(one.template, one.depends_on, one.wave) for one in own.values()] == [
        (None, [], 3),
        ("of #q1", ["q1"], 3),
        ("on #r1.2", ["r1.2"], 4),
    ]
    assert {one.origin for one in own.values()} == {SubQueryOrigin.REVISION}
    assert own["r1.3"].query == "on of rain"
    assert [(one.id, one.query, one.sources) for one in ready] == [
        ("r1.1", "snow", ["docs", "wiki"]),
        ("q1", "rain", ["wiki"]),
    ]
