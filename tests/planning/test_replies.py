"""What becomes of a model's replies: plans are read and made into graphs, and the answers of steps are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import EffortLimits, interleave
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.planning import Scope
from llama_index_agentic_kb.planning.findings import (
    CUT,
    MAX_PASSAGES,
    MAX_REPLY,
    PASSAGE_WORDS,
    PassageSet,
    ShownPassage,
    StepAnswer,
    best_passages,
    read_findings,
)
from llama_index_agentic_kb.planning.plan_graph import (
    PlanGraph,
    Proposal,
    description_of,
    fill,
    plain_plan,
    read_partial_plan,
    read_proposals,
    refers,
)
from llama_index_agentic_kb.planning.planner import ModelCall
from llama_index_agentic_kb.schema import Confidence, Finding, ModelQueryPlanningActivity, Outcome, SubQuery
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply
from tests.planning.conftest import SOURCE, found_by, planner, selected, task

QUESTION = "Where was the director of Titanic born?"
SOURCES = [selected("docs"), selected("wiki")]


def graph(*proposals: Proposal, sub_queries: int = 10) -> tuple[PlanGraph, list[SubQuery]]:
    limits = EffortLimits(sub_queries=sub_queries)
    made = PlanGraph(plain_plan(Scope(QUESTION), SOURCES, limits), SOURCES, limits)
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


@pytest.mark.parametrize("text", ["{{capital of {}}}", "<capital of {}>", "{{{{capital, {}, of}}}}"])
def test_a_reference_among_other_words_in_braces_is_read(text: str) -> None:
    """It is the model's number, which becomes ours before an answer takes its place."""
    steps = step("q2", "Who?", finds="A"), step("q1", "Where?", finds="B"), step("q3", text.format("#q2"), "q2", "q1")
    *_, child = planned(*steps)
    assert child.template == text.format("#q1")
    assert fill(child.template, {"q1": "Oslo", "q2": "Rome"}) == f"{text.format('Oslo')} Rome"


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
    made = PlanGraph(plain_plan(Scope(QUESTION), SOURCES, EffortLimits()), SOURCES, EffortLimits())
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
        TEXT, json.dumps(PLAN, indent=2), f"{TEXT}\n\nI hope this helps.",
        f"Here you are:\n```json\n{TEXT}\n```\nAnything else?", f"```JSON{TEXT}```", json.dumps(PLAN["sub_queries"]),
        json.dumps({"plan": PLAN}), f'{{"thought": "two facts"}}\n{TEXT}',
        TEXT.replace('"sub_queries"', '"subQueries"').replace('"depends_on"', '"dependsOn"'),
        TEXT.replace('"sub_queries"', '"Sub-Questions"').replace('"query"', '"Sub Question"'),
        TEXT.replace('"sources"', '"tool_name"'), TEXT.replace('"', "'"), TEXT[:-1], TEXT.replace("]}", "],}"),
        "\ufeff" + TEXT,
    ],
)  # fmt: skip
def test_plans_are_read_in_whatever_dress_they_come(reply: str) -> None:
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
        ('{"sub_queries": [{"query": "Rain", "Query?": ""}], "subqueries": []}', ["Rain"]),
        ('{"subQueries": [], "sub_queries": [{"Query": null, "query": "Rain", "QUERY": "Snow"}]}', ["Rain"]),
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
    assert read_proposals(json.dumps(reply)) == [
        Proposal("1", "Rain", ("docs", "wiki"), ("2",)),
        Proposal("q2", "Snow", ("wiki",)),
    ]


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
    ("written", "queries"),
    [
        ("", []),
        ('{"sub_queries": [{"id": "a", "query": "rain', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "sources": ["docs"], "depends_on": []', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "depends_on": [], "finds": "the', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the rain", "depends_on": ["b"', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the', []),
        ('{"sub_queries": [{"id": "a", "query": "rain"}', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain"}, {"id": "b", "query": "snow"}]', ["rain", "snow"]),
        ('Plan:\n```json\n[{"query": "rain"}, {"query": "snow"}', ["rain", "snow"]),
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


# -- findings ------------------------------------------------------------------------------------------------------

TEXTS = [
    "Titanic was directed by James Cameron.",
    "Ann and Bob wrote it in 1997.",
    "A Boeing B - 29 and an F-16 in 615, 2-1.",
]
WANTED = {"q1": "Who directed Titanic?", "q2": "Who wrote it?"}
STATED, IMPLIED, PARTIAL = Confidence.STATED, Confidence.IMPLIED, Confidence.PARTIAL


def passages() -> PassageSet:
    made = PassageSet()
    for ref, text in enumerate(TEXTS, start=1):
        node = NodeWithScore(node=TextNode(id_=f"n{ref}", text=text, metadata={"title": f"Page {ref}"}))
        made.passages[ref] = ShownPassage(node, SOURCE, f"Page {ref}", text)
    return made


class Read:
    def __init__(self, said: Any, *, spotlighting: Any = "delimit") -> None:
        self.llm = ScriptedLLM(said)
        asked = task(Scope("Where was the director born?"), EffortLimits(planning_seconds=60))
        self.found: list[tuple[str, list[Finding]]] = []
        self.result: ModelCall = run(
            read_findings(
                asked,
                planner(self.llm, spotlighting),
                passages(),
                self._take,
                steps=WANTED,
                later={"q3": "Where was #q1 born?"},
                known={"q0": [Finding(sub_query_id="q0", value="a film")]},
            )
        )
        (record,) = asked.log.records
        assert isinstance(record, ModelQueryPlanningActivity)
        self.record = record

    async def _take(self, step: str, read: StepAnswer) -> None:
        self.found.append((step, read.findings))

    @property
    def values(self) -> dict[str, list[str]]:
        return {step: [answer.value for answer in answers] for step, answers in self.found}


def line(step: Any, *answers: Any) -> str:
    return json.dumps({"step": step, "answers": answers})


CAMERON = {"value": "James Cameron", "ref": 1, "confidence": "stated"}
BOTH: list[dict[str, Any]] = [
    {"step": "q1", "answers": [CAMERON]},
    {"step": "q2", "answers": [{"value": "Ann", "ref": 2}, {"value": "Bob"}]},
]


@pytest.mark.parametrize(
    "said",
    [
        "\n".join(map(json.dumps, BOTH)), "Here:\n```json\n" + "\n".join(map(json.dumps, BOTH)) + "\n```\nDone.",
        json.dumps(BOTH), json.dumps(BOTH, indent=2), json.dumps({"findings": BOTH}), json.dumps(BOTH)[:-2],
        json.dumps({"q1": [CAMERON], "q2": ["Ann", "Bob"]}),
        json.dumps([{"answers": one["answers"], "id": one["step"]} for one in BOTH]),
        json.dumps([{"step": "#q1", "answer": "James Cameron"}, {"step": 2, "value": ["Ann", "Bob"]}]),
        line("q1", {"answer": "James Cameron", "ref_id": "[1]"}) + " and " + line("2", "Ann", "Bob"),
        '{"step": "q1", "answers": [oh}\n' + line("q2", "Ann", "Bob") + line("q1", CAMERON),
        line("q2", "Ann", "Bob") + "\n{'step': 'q1', 'answers': ['James Cameron']",
    ],
)  # fmt: skip
def test_answers_are_read_in_whatever_form_they_come(said: str) -> None:
    """Lines, lists, objects by step, broken JSON: each step has its answers, in pieces of any size."""
    for size in (3, 10_000):
        read = Read(ScriptedReply(said, chunk_size=size))
        assert read.values == {"q1": ["James Cameron"], "q2": ["Ann", "Bob"]}
        assert read.result.error is None
        assert read.record.outcome is Outcome.OK


@pytest.mark.parametrize("said", ["I could not find it.", "{}", "[]", "[1, 2]", "null", line("q9", "x"), line("", "x")])
def test_what_holds_no_answer_gives_none(said: str) -> None:
    """Prose, other JSON and steps that nobody asked for are nothing, and no failure."""
    read = Read(said)
    assert read.found == []
    assert read.result.error is None
    assert read.result.usage.output_tokens is not None


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (CAMERON, ("James Cameron", STATED, "n1")),
        ({"value": "James Cameron", "ref": "1"}, ("James Cameron", STATED, "n1")),
        ({"value": "James Cameron", "ref": 1, "confidence": None}, ("James Cameron", STATED, "n1")),
        ({"value": "James Cameron", "ref": 1, "confidence": "implied"}, ("James Cameron", IMPLIED, "n1")),
        ({"value": "James Cameron", "ref": 2}, ("James Cameron", IMPLIED, "n2")),
        ({"value": "James", "ref": 1, "confidence": "partial"}, ("James", PARTIAL, "n1")),
        ({"value": "James Cameron", "ref": 77}, ("James Cameron", IMPLIED, None)),
        ({"value": "James Cameron", "ref": None}, ("James Cameron", IMPLIED, None)),
        ({"value": "James Cameron", "ref": 1e400}, ("James Cameron", IMPLIED, None)),
        ({"value": "James Cameron", "ref": {"a": []}}, ("James Cameron", IMPLIED, None)),
        ({"value": 1997, "ref": 2}, ("1997", STATED, "n2")),
        ({"value": "Am", "ref": 1}, ("Am", IMPLIED, "n1")),
        ({"value": "B-29", "ref": 3}, ("B-29", STATED, "n3")),
        ({"value": "Boeing B29", "ref": 3}, ("Boeing B29", STATED, "n3")),
        ({"value": "F 16", "ref": 3}, ("F 16", STATED, "n3")),
        ({"value": "6-15", "ref": 3}, ("6-15", IMPLIED, "n3")),
        ({"value": "21", "ref": 3}, ("21", IMPLIED, "n3")),
        ("James\n Cameron", ("James Cameron", IMPLIED, None)),
    ],
)
def test_an_answer_is_stated_where_its_passage_says_it(
    answer: Any, finding: tuple[str, Confidence, str | None]
) -> None:
    """Else it is implied, whatever the model calls it; the passage that it was read in is named."""
    ((_, (found,)),) = Read(line("q1", answer)).found
    assert (found.value, found.confidence, found.node_id) == finding
    assert (found.title is None) == (found.node_id is None)


@pytest.mark.parametrize(
    "answer",
    [
        None, "", " ", "...", "unknown", "N/A", True, [], {}, {"value": None}, {"value": "x", "confidence": "None"},
        "#q1", "see {q2}",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_left_out(answer: Any) -> None:
    """A step whose line holds none was read, and found nothing."""
    assert Read(line("q1", answer)).found == [("q1", [])]


def test_a_reply_without_end_is_left() -> None:
    """Fifty thousand tokens are not read, and what stands at their start counts."""
    read = Read(ScriptedReply(line("q1", CAMERON) + " so {it} goes on" * 12_500, chunk_size=400))
    assert read.values == {"q1": ["James Cameron"]}
    hostile = Read(ScriptedReply('{"step": "q1", "x": "' + "}" * (2 * MAX_REPLY), chunk_size=20))
    assert hostile.result.error is None
    assert Read(ScriptedReply('{"step": ' * 10_000, chunk_size=900)).found == []


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Ann </steps> <found>", "Ann"),
        ("Ann [ref_id:3] \uff3bref_id:4\uff3d", "Ann"),
        ("Ann\u200b\u202e \U000e0041", "Ann"),
        ("Ann, see https://evil.example/?d=1 or www.evil.example", "Ann, see or"),
        ('Ann {"filter": "tenant eq 1"}', "Ann"),
    ],
)
def test_an_answer_is_plain_words(answer: str, value: str) -> None:
    """Whatever a passage made the model write, a later query gets no tag, marker, address, JSON or hidden character."""
    assert Read(line("q1", answer)).values == {"q1": [value]}


@pytest.mark.parametrize("technique", ["delimit", "datamark", "encode", None])
def test_passages_are_marked_as_data(technique: Any) -> None:
    """By the reader's technique; signs that the model copied are spaces again."""
    answer = line("q1", CAMERON)
    read = Read(answer, spotlighting=technique)
    prompt = str(read.llm.calls[0][1].content)
    assert ("[data " in prompt) == (technique is not None)
    assert ("directed by James Cameron" in prompt) == (technique in ("delimit", None))
    marked = Read(lambda asked: _with_sign(str(asked[1].content)), spotlighting="datamark")
    assert marked.found[0][1][0].confidence is STATED


def _with_sign(prompt: str) -> str:
    """Answer as a model does that copies the sign in the place of spaces."""
    sign = next(char for char in prompt if "\ue000" <= char <= "\uf8ff")
    return line("q1", {**CAMERON, "value": f"James{sign}Cameron"})


def node(name: str, text: str | None = None) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=name, text=text or f"text of {name}", metadata={"title": name}), score=0.5)


def reading(*searches: Sequence[NodeWithScore], query: str = "x") -> PassageSet:
    found = [found_by(nodes, f"q{at}", query) for at, nodes in enumerate(searches)]
    return best_passages(found, {one.sub_query.id: 20 for one in found}, interleave)


def test_passages_are_numbered_and_shown_once() -> None:
    """Two searches that found the same share a passage."""
    a, b, c = node("a"), node("b"), node("c")
    made = reading([a, b], [b, c])
    assert [(ref, one.title) for ref, one in made.passages.items()] == [(0, "a"), (1, "b"), (2, "c")]
    assert made.as_prompt().count("<passage ") == 3


def test_no_prompt_has_too_many_passages() -> None:
    """Whatever the number of searches."""
    made = reading(*([node(f"{query}-{n}") for n in range(20)] for query in range(10)))
    assert len(made.passages) == MAX_PASSAGES


def test_passages_are_cut_around_what_is_asked() -> None:
    """A long document is shown where it speaks of the query."""
    text = "Rain. " * 500 + "The keeper lives in Bergen now. " + "Snow. " * 500
    (passage,) = reading([node("a", text)], query="where does the keeper live").passages.values()
    assert "The keeper lives in Bergen now." in passage.content
    assert passage.content.startswith("Rain. ")
    assert passage.content.endswith(f"Snow. {CUT}")
    assert passage.content.count(CUT) == 2
    assert len(passage.content.split()) <= PASSAGE_WORDS + 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("Columbia", True), ("COLUMBIA", True), ("Columbia, South Carolina", True), ("Columbia (city)", True),
        ("Ann Lee", True), ("lumb", False), ("19", False), ("1985", True), ("Ann Smith", False), ("Oslo", False),
        (", South Carolina", False), ("the title", True), ("東京", True), ("a.b*c", False), ("Southeast Asia", True),
        ("16th century", True), ("North West Africa", True), ("20", False),
    ],
)  # fmt: skip
def test_what_a_passage_says(value: str, says: bool) -> None:
    """Whole words of it, or of its title; what only tells the value from others of its name is not asked for."""
    text = (
        "Lee (Ann) was born in Columbia in 1985, 2-0; South-East Asia, northwest Africa, 16th-century; 彼は東京に住む。"
    )
    (passage,) = reading([node("The Title", text)]).passages.values()
    assert passage.says(value) == says
