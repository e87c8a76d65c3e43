"""Whether a question is planned, and the rounds of its search."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import EffortLimits, KnowledgeSource, RetrievalRequest, interleave
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.planning import DEFAULT_LIMITS, Scope
from llama_index_agentic_kb.planning.plan_graph import PlanGraph, fill, plain_plan, read_proposals, refers
from llama_index_agentic_kb.planning.scope import coverage_of, is_simple
from llama_index_agentic_kb.retriever import Retrieval, scope_of
from llama_index_agentic_kb.schema import Confidence, Outcome, ReasoningEffort, SubQuery
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, ScriptedReply
from tests.planning.conftest import (
    World,
    found_by,
    line,
    planning_of,
    queries_of,
    reasoning_of,
    refs,
    searches_of,
    selected,
    steps,
    sufficient,
)

QUESTION = "In which town was the director of Titanic born?"
PAGES = {
    "Titanic": "Titanic is a film directed by James Cameron.",
    "James Cameron": "James Cameron, a Canadian, was born in Kapuskasing, Ontario.",
    "Kapuskasing": "Kapuskasing is a town on the Kapuskasing River.",
    "Rain": "Rain falls in Paris.",
}
DIRECTOR = {"query": "Who directed Titanic?", "finds": "the director of Titanic"}
BIRTHPLACE = {"query": "Where was #q1 born?", "depends_on": ["q1"], "finds": "the birthplace of #q1"}
RIVER = {"query": "river of #q2", "depends_on": ["q2"], "finds": "the river of #q2"}
THREE = steps(DIRECTOR, BIRTHPLACE, RIVER)
OWN_WORDS, FILLED = "Where was the director of Titanic born?", "Where was James Cameron born?"
Read = Callable[[str], str]


def reads(value: str, title: str, step: str = "q1", confidence: str = "stated") -> Read:
    """A reading that names the passage with a title."""
    return lambda prompt: line(step, (value, refs(prompt)[title], confidence))


cameron, kapuskasing = reads("James Cameron", "Titanic"), reads("Kapuskasing", "James Cameron", "q2")


def early(value: str, title: str, confidence: str = "stated") -> Read:
    return lambda prompt: reads(value, title, "q2", confidence)(prompt) + "\n" + cameron(prompt)


def corrected(prompt: str) -> str:
    assert "q1: Ann" in prompt
    return cameron(prompt) + "\n" + line("q2", "Rome")


def world(**fields: Any) -> World:
    return World(**{"pages": PAGES, "plan": steps(DIRECTOR, BIRTHPLACE), "findings": cameron, **fields})


NOTHING: tuple[dict[str, str], list[str], str] = (
    {"q2": OWN_WORDS},
    [],
    "q1 found no answer; q2 was searched in the question's own words",
)
CROWD = {f"Film {n}": "James Cameron born, James Cameron born, where was James Cameron born?" for n in range(8)}
CASES: dict[str, tuple[dict[str, Any], dict[str, str], list[str], str]] = {
    "its parent's answer": ({}, {"q2": FILLED}, ["James Cameron"], ""),
    "no line's answers": ({"findings": line("q1")}, *NOTHING),
    "several answers, once each, up to the limit": (
        {"findings": line("q1", "Ann", "Bob", "ann", "Cid", "Dan")},
        {f"q2.{n}": f"Where was {who} born?" for n, who in enumerate(("Ann", "Bob", "Cid"), start=1)},
        ["Ann", "Bob", "Cid"],
        "q1 has more than 3 answers; not used: Dan",
    ),
    "an early answer that no passage says": ({"findings": early("Kapuskasing", "Titanic")}, {"q2": FILLED}, [], ""),
    "an early answer that is a part of a word": ({"findings": early("am", "Titanic")}, {"q2": FILLED}, [], ""),
    "the page of a known name, which others name more often": (
        {
            "pages": {**CROWD, **PAGES},
            "plan": THREE,
            "source": {"similarity_top_k": 20},
            "findings": [cameron, kapuskasing],
        },
        {"q3": "river of Kapuskasing"},
        ["James Cameron", "Kapuskasing"],
        "",
    ),
    "a guess after what a passage says": (
        {"plan": THREE, "findings": [cameron, line("q1", "Ann") + line("q2", "Rome")]},
        {"q2": FILLED, "q3": "river of Rome"},
        ["James Cameron", "Rome"],
        "",
    ),
    "a stream that breaks off": (
        {"findings": lambda prompt: ScriptedReply(cameron(prompt) + '\n{"step', error=ConnectionError("gone"))},
        {"q2": FILLED},
        ["James Cameron"],
        "could not be read",
    ),
}


@pytest.mark.parametrize(("fields", "queries", "values", "warning"), CASES.values(), ids=CASES)
def test_a_child_is_searched_with_what_was_read(
    fields: dict[str, Any], queries: dict[str, str], values: list[str], warning: str
) -> None:
    """Never with a blank: where nothing was found it has the question's own words, and the account says why."""
    made = world(**fields).search(QUESTION)
    assert {name: query for name, query in queries_of(made).items() if name in queries} == queries
    assert not values or [one.value for one in made.outcome.findings] == values
    assert any(warning in one for one in made.outcome.plan.warnings) if warning else made.outcome.plan.warnings == []


def test_a_bridge_takes_two_waves_and_is_accounted_for() -> None:
    """The page that the question's words do not name is found; waves, queries and all tokens stand beside the plan."""
    made = world().search(QUESTION, limits={"sub_queries": 5, "rounds": 3, "tokens": 9_000, "seconds": 30})
    assert [one.wave for one in made.outcome.plan.sub_queries] == [1, 1, 2]
    assert "James Cameron" in {node.node_id for node in made.nodes}
    (finding,) = made.outcome.findings
    assert (finding.sub_query_id, finding.confidence, finding.node_id) == ("q1", Confidence.STATED, "Titanic")
    (read,) = planning_of(made, "findings")
    assert read.outcome is Outcome.OK
    record = reasoning_of(made)
    planned, spent = record.planned, record.spent
    assert planned is not None
    assert spent is not None
    assert (planned.sub_queries, planned.waves, planned.revisions, planned.tokens) == (5, 3, 1, 9_000)
    assert (spent.sub_queries, spent.waves, spent.revisions, spent.sources) == (2, 2, 1, 1)
    calls = [one for kind in ("plan", "findings", "revision") for one in planning_of(made, kind)]
    assert spent.tokens == sum((one.input_tokens or 0) + (one.output_tokens or 0) for one in calls) > 0
    assert 0 < spent.seconds < 30 == planned.seconds
    assert record.decision == "the evidence is sufficient"


def test_low_effort_searches_everything_at_once() -> None:
    """One planning call and one wave: what would depend is searched in the question's own words."""
    searched = world()
    made = searched.search(QUESTION, "low")
    assert queries_of(made)["q2"] == OWN_WORDS
    assert {one.wave for one in made.outcome.plan.sub_queries} == {1}
    assert [kind for kind, _ in searched.prompts] == ["plan"]


def test_a_child_begins_while_the_findings_are_still_written() -> None:
    """A step's search starts as its answer stands in the stream, not when the stream ends."""
    plan = steps(DIRECTOR, BIRTHPLACE, {"query": "rain"}, {"query": "What falls in #q3?", "depends_on": ["q3"]})

    def slow(prompt: str) -> ScriptedReply:
        said = cameron(prompt) + "\n" + " " * 200 + line("q3", ("Paris", refs(prompt)["Rain"]))
        return ScriptedReply(said, chunk_size=20, chunk_delay=0.05)

    made = world(plan=plan, findings=slow).search(QUESTION)
    (read,) = planning_of(made, "findings")
    began: dict[str, Any] = {one.sub_query_id: one.started_at for one in searches_of(made)}
    assert read.completed_at is not None
    assert began["q2"] < began["q4"]
    assert (read.completed_at - began["q2"]).total_seconds() > 0.2


def test_a_model_that_can_not_stream_reads_answers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole reply is read, as a plan is."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(ScriptedLLM, "astream_chat", refuse)
    made = world().search(QUESTION)
    assert queries_of(made)["q2"] == FILLED
    assert made.outcome.plan.warnings == []


def test_a_step_that_is_answered_already_is_not_searched() -> None:
    """Where a passage says it, neither a search nor a verdict is needed, and the passage is in the evidence."""
    pages = {**PAGES, "Titanic": "Titanic is a film by James Cameron, who was born in Kapuskasing."}
    searched = world(pages=pages, findings=early("Kapuskasing", "Titanic"))
    made = searched.search(QUESTION)
    assert "q2" not in queries_of(made)
    assert not any("James Cameron born" in query for query in searched.asked)
    decision = reasoning_of(made).decision or ""
    assert "q2 needed no search: a passage states its answer" in decision
    (titanic,) = [node for node in made.nodes if node.node_id == "Titanic"]
    assert titanic.node.metadata["agentic_kb"]["proof"] == [
        {"step": "q1", "finding": "James Cameron", "rank": 0},
        {"step": "q2", "finding": "Kapuskasing", "rank": 1},
    ]
    assert searched.calls("revision") == 0
    assert "sufficient without a verdict" in decision


def test_an_implied_early_answer_is_kept_and_its_search_confirms_it() -> None:
    """The next step is searched with it at once, and a verdict sees it, unless every step has an answer."""
    searched = world(plan=THREE, findings=early("Kapuskasing", "Titanic", "implied"))
    made = searched.search(QUESTION)
    queries = queries_of(made)
    assert (queries["q2"], queries["q3"]) == (FILLED, "river of Kapuskasing")
    assert (searched.calls("findings"), searched.calls("revision")) == (1, 1)
    (verdict,) = searched.prompts_of("revision")
    assert f"\nq2: {FILLED} -> Kapuskasing (implied, ref_id {refs(verdict)['Titanic']})" in verdict
    assert [one.confidence for one in made.outcome.findings] == [Confidence.IMPLIED, Confidence.STATED]
    whole = world(findings=early("Kapuskasing", "Titanic", "implied"))
    assert "sufficient without a verdict" in (reasoning_of(whole.search(QUESTION)).decision or "")
    assert whole.calls("revision") == 0


def test_a_later_prompt_shows_what_is_new_and_the_proof() -> None:
    """What an earlier call has read is not paid for again; the verdict sees the question's best too."""
    searched = world(
        pages={"Snow": "Snow falls on the directed.", **PAGES}, plan=THREE, findings=[cameron, kapuskasing]
    )
    searched.search("Who directed Titanic, and what does snow do?")
    first, second, verdict = (text for kind, text in searched.prompts if kind != "plan")
    assert f"q1: James Cameron (stated, ref_id {refs(second)['Titanic']})" in second
    assert ["<found>" in text for text in (first, second)] == [False, True]
    assert ["Snow" in refs(text) for text in (first, second, verdict)] == [True, False, True]
    assert {"Titanic", "James Cameron"} <= {*refs(second)}


def test_a_later_call_corrects_an_answer() -> None:
    """What was built on the wrong answer is searched with the right one too, and the account says so."""
    made = world(plan=THREE, findings=[line("q1", "Ann"), corrected]).search(QUESTION)
    assert {"Where was Ann born?", FILLED} <= {*queries_of(made).values()}
    assert [one.value for one in made.outcome.findings if one.sub_query_id == "q1"] == ["James Cameron"]
    assert "q1 was read again: James Cameron, not Ann" in made.outcome.plan.warnings


def test_one_query_from_two_branches_is_searched_once() -> None:
    """Both steps get what it finds, and so do both their children."""
    queries = ["Who wrote Titanic?", "birthplace of #q1", "Birthplace of #q2", "river of #q3", "mayor of #q4"]
    plan = steps(DIRECTOR, *({"query": one, "depends_on": [one[-2:]] if "#" in one else []} for one in queries))

    def read(prompt: str) -> str:
        if "q3:" in prompt.split("<steps>")[1].split("</steps>", maxsplit=1)[0]:
            return line("q3", "Kapuskasing")
        return "\n".join(reads("James Cameron", "Titanic", step)(prompt) for step in ("q1", "q2"))

    searched = world(plan=plan, findings=read)
    made = searched.search(QUESTION)
    assert sum(query.casefold() == "birthplace of james cameron" for query in searched.asked) == 1
    assert (queries_of(made)["q5"], queries_of(made)["q6"]) == ("river of Kapuskasing", "mayor of Kapuskasing")


def test_plans_deeper_than_the_effort_are_searched_to_their_end() -> None:
    """What lies deeper than the waves go is searched with what is known by then, and the account says so."""
    plan = steps(DIRECTOR, *({"query": f"step {n} of #q{n - 1}", "depends_on": [f"q{n - 1}"]} for n in range(2, 7)))
    searched = world(plan=plan, findings=[cameron, line("q2", "Rome")])
    made = searched.search(QUESTION, limits={"rounds": 3})
    queries = queries_of(made)
    assert (queries["q2"], queries["q3"]) == ("step 2 of James Cameron", "step 3 of Rome")
    assert queries["q4"].startswith("step 4 of step 3 of")
    assert (len(queries), searched.calls("findings")) == (7, 2)
    assert any("EffortLimits.rounds is 3" in warning for warning in made.outcome.plan.warnings)
    assert max(one.wave for one in made.outcome.plan.sub_queries) == 3


@pytest.mark.parametrize(
    "said",
    [OSError("gone"), "", ScriptedReply("", latency=20), ScriptedReply('{"step": "q', chunk_delay=20, chunk_size=5)],
    ids=["fails", "empty", "hangs", "hangs midway"],
)  # fmt: skip
def test_a_reading_that_fails_costs_only_itself(said: Any) -> None:
    """What waits is searched in the question's own words, the account has the error, and no second call is made."""
    searched = world(findings=said)
    started = time.monotonic()
    made = searched.search(QUESTION, limits={"planning_seconds": 0.6})
    assert time.monotonic() - started < 8
    assert made.nodes
    assert queries_of(made)["q2"] == OWN_WORDS
    assert searched.calls("findings") == 1
    (read,) = planning_of(made, "findings")
    assert (read.outcome, read.error is not None) == (Outcome.ERROR, True)
    assert any("could not be read" in warning for warning in made.outcome.plan.warnings)


@pytest.mark.parametrize("spent", ["tokens", "seconds"])
def test_when_tokens_or_time_are_spent_no_call_is_made(spent: str) -> None:
    """The plan is searched as far as there is time, without reading; the account names limit and missing part."""
    with MemoryRetriever(["directed"], fault="hang") as slow:
        searched = world()
        sources = [KnowledgeSource("docs", retriever=searched.memory), KnowledgeSource("slow", retriever=slow)]
        started = time.monotonic()
        limits = {"tokens": 10} if spent == "tokens" else {"seconds": 0.8}
        made = searched.search(QUESTION, sources=sources[: 1 if spent == "tokens" else 2], limits=limits)
        assert time.monotonic() - started < 8
    assert [kind for kind, _ in searched.prompts] == ["plan"]
    assert any(f"EffortLimits.{spent}" in warning for warning in made.outcome.plan.warnings)
    assert made.nodes
    assert {missing.what for missing in made.missing} >= ({"slow"} if spent == "seconds" else set())
    assert {missing.sub_query_id for missing in made.missing if missing.what == "docs"} <= {"q2"}


# -- whether a question is planned ---------------------------------------------------------------------------------


def request(*messages: tuple[str, str]) -> RetrievalRequest:
    return RetrievalRequest.parse({"messages": [{"role": role, "content": text} for role, text in messages]})


def test_the_last_user_message_is_the_question() -> None:
    """What came before it is the history, oldest first, without empty messages; system messages are instructions."""
    scope = scope_of(request(("system", "Be brief."), ("user", "Hi"), ("assistant", " "), ("user", " Who? ")))
    assert scope.question == "Who?"
    assert scope.history == (("user", "Hi"),)
    assert scope.answer_instructions == scope.retrieval_instructions == "Be brief."
    assert scope.intents == ()


def test_memory_is_the_history_of_a_request_without_one() -> None:
    """Its user and assistant turns are read, not empty ones, nor the question that a chat engine has stored already."""
    turns = [("system", "You are kind."), ("user", "Who built it?"), ("assistant", None), ("tool", "42")]
    turns += [("assistant", "Eiffel."), ("user", "  When?\n")]
    memory = [ChatMessage(role=MessageRole(role), content=text) for role, text in turns]
    kept = (("user", "Who built it?"), ("assistant", "Eiffel."))
    assert scope_of(request(("user", "When? ")), memory).history == kept
    asked = request(("user", "a"), ("user", "When?"))
    assert scope_of(asked, memory).history == (("user", "a"),)


@pytest.mark.parametrize(
    "question",
    [
        "What is the capital of France?", "Who is the director of Titanic?", "Who wrote Hamlet?",
        "When did Titanic sink?", "How do I reset my password?", "error 0x80070057", "return policy",
        "What's the capital of France?",
    ],
)  # fmt: skip
def test_questions_for_one_fact_are_simple(question: str) -> None:
    """Short ones that ask for one relation, or a fact of what they name."""
    assert is_simple(Scope(question))


@pytest.mark.parametrize(
    "question",
    [
        "Where was the director of Titanic born?", "How tall was the rocket of Apollo 11?",
        "When did Obama's wife study law?", "Who was the father of the king of Spain?",
        "Who is the director's mother's employer?", "Which film is older, Alien or Jaws?", "Who is Ann's grandfather?",
        "Who is Ann's mother-in-law?", "Would a Pict be confused by Old English?", "Isn't Hamlet older?",
        "rain and snow", "the man who sold the world", "Wo wurde der Regisseur von Titanic geboren?",
        "Dónde nació el director de Titanic?", "タイタニックの監督の出身地は",
        "Tell me all there is to know on rain in Paris today please", "Who wrote Hamlet?\nAnd when?", "",
    ],
)  # fmt: skip
def test_all_others_are_planned(question: str) -> None:
    """Relations that lead to a fact, comparisons, kinship, other languages, follow-ups: in doubt a plan is made."""
    assert not is_simple(Scope(question))
    assert not is_simple(Scope("Who wrote it?", (("user", question),)))


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (Scope("When did the Olympic sink?"), "too few"),
        (Scope("Where was the director of Titanic born?"), "joins"),
        (Scope("Titanic and Olympic"), "joins"),
        (Scope("Titanic", (("user", "x"),)), "conversation"),
    ],
)
def test_weak_evidence_says_why(scope: Scope, reason: str) -> None:
    """Words that no passage holds, several facts, and conversations want a plan."""
    found = found_by([NodeWithScore(node=TextNode(text="Titanic director born"), score=0.5)])
    assert reason in coverage_of(scope, [found], interleave)[1]


def decision(made: Retrieval) -> str:
    return reasoning_of(made).decision or ""


def test_minimal_effort_asks_no_model() -> None:
    """The question is searched as it is."""
    searched = world()
    made = searched.search(QUESTION, "minimal")
    assert searched.prompts == []
    assert queries_of(made) == {"q0": QUESTION}
    record = reasoning_of(made)
    assert record.planned is not None
    assert record.spent is not None
    assert (record.planned.waves, record.planned.tokens, record.spent.tokens, record.spent.waves) == (1, 0, 0, 1)


def test_a_simple_question_goes_straight_to_search_at_auto_effort() -> None:
    """No model is asked, and the account says why; other efforts plan it."""
    searched = world()
    made = searched.search("Who wrote Hamlet?", "auto")
    assert searched.prompts == []
    assert decision(made) == "not planned: a simple question"
    assert reasoning_of(made).retrieval_reasoning_effort is ReasoningEffort.MINIMAL
    planned = world()
    planned.search("Who wrote Hamlet?", "low")
    assert planned.calls("plan") == 1


def test_strong_evidence_is_enough() -> None:
    """Auto effort asks no model where the question's own evidence holds its words, and reports its signals."""
    searched = world()
    made = searched.search("Titanic film directed James Cameron", "auto")
    assert searched.prompts == []
    record = reasoning_of(made)
    assert record.signals is not None
    assert record.signals["coverage"] == 1.0
    assert decision(made) == "not planned: the question's own evidence is strong"
    assert record.logical_reasoning_effort is ReasoningEffort.AUTO
    assert record.retrieval_reasoning_effort is ReasoningEffort.MINIMAL


def test_weak_evidence_is_planned() -> None:
    """Auto effort escalates, does not search the question twice, and reports its signals."""
    searched = world()
    made = searched.search(QUESTION, "auto")
    assert searched.calls("plan") == 1
    assert searched.asked.count(QUESTION) == 1
    assert queries_of(made)["q2"] == FILLED
    assert set(reasoning_of(made).signals or {}) == {"coverage"}
    assert decision(made).startswith("planned: the question joins several facts")
    assert reasoning_of(made).retrieval_reasoning_effort is ReasoningEffort.AUTO


@pytest.mark.parametrize("name", [f.name for f in fields(EffortLimits)])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    """Zero and less are refused by the field's name; there may be no revision, but not fewer."""
    for value in (-1,) if name == "revisions" else (0, -1):
        with pytest.raises(ConfigurationError, match=rf"EffortLimits\.{name}"):
            EffortLimits(**{name: value})
    assert EffortLimits(revisions=0).revisions == 0


# -- any plan and any reading --------------------------------------------------------------------------------------

WORDS = st.sampled_from(["a", "b of #q1", "#q2 #q1", "c of {q3}", "[q9]", "d #7", "#x of <y>", "Rain", QUESTION, "?"])
IDS = st.sampled_from(["q1", "q2", "q3", "x", "y", "7", "q9", ""])
PLANS = st.lists(
    st.fixed_dictionaries(
        {"query": WORDS},
        optional={
            "id": IDS,
            "depends_on": st.lists(IDS, max_size=3),
            "finds": WORDS,
            "sources": st.just(["docs", "no"]),
        },
    ),
    max_size=7,
).map(lambda items: json.dumps({"sub_queries": items}))
VALUES = st.sampled_from(
    ["Ann", "Bob", "#q1", "", "unknown", "a\nb", "James Cameron", None, 7, True, {"value": "Z", "ref": 1}]
)
LINES = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.sampled_from(["q1", "q2", "q3", "q4", "q2.1", "q0", "1", "zz"]),
            "answers": st.lists(VALUES, max_size=4) | VALUES,
        }
    ),
    max_size=6,
)
READINGS = (
    st.text(max_size=30)
    | LINES.map(json.dumps)
    | LINES.map(lambda lines: "\n".join(map(json.dumps, lines)))
    | LINES.map(lambda lines: json.dumps({"findings": lines})[:-3])
)
VERDICTS = st.sampled_from(
    [sufficient(), "", "no", '{"sub_queries": [{"query": "#q1"}, {"query": "Rain"}, {"query": "new"}]}']
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(PLANS, READINGS, VERDICTS)
@example(steps({"query": "#q1"}, {"query": "#q1 #q2 #q3"}), line("q1", "#q2"), "")
def test_any_plan_and_any_reading_end_in_a_finished_search(plan: str, reading: str, verdict: str) -> None:
    """Every planned step was searched, answered early, or stands behind an equal query; none with a reference in it."""
    searched = world(plan=plan, findings=reading, revision=verdict)
    made = searched.search(QUESTION)
    served = {one.part_of or one.id for one in made.outcome.plan.sub_queries}
    served |= {one.sub_query_id for one in searches_of(made)}
    asked = {" ".join(query.casefold().split()) for query in searched.asked}
    assert len(asked) == len(searched.asked)
    assert not any("#q" in query or refers(query) or not query.strip() for query in searched.asked)
    assert asked == {" ".join(query.casefold().split()) for query in queries_of(made).values()}
    assert all(one.completed_at is not None for one in made.log.records)
    for step in planned_steps(plan):
        assert step.id in served or asked & could_be(step, made), step
    assert made.nodes


def planned_steps(plan: str) -> list[SubQuery]:
    sources = [selected("docs")]
    limits = DEFAULT_LIMITS[ReasoningEffort.MEDIUM]
    graph = PlanGraph(plain_plan(Scope(QUESTION), sources, limits), sources, limits)
    graph.add(read_proposals(plan))
    graph.finish()
    return graph.plan.sub_queries


def could_be(step: SubQuery, made: Retrieval) -> set[str]:
    """Every query that a step can become with what was found, in the form in which queries are told apart."""
    values = [*(one.value for one in made.outcome.findings)]
    chosen = product(values, repeat=len(step.depends_on))
    queries = [fill(step.template or step.query, dict(zip(step.depends_on, one, strict=True))) for one in chosen]
    return {" ".join(query.casefold().split()) for query in (step.query, *queries)}
