"""What was found reaches the answer: proof first, the chain in its prompts, a revision that is a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.schema import Confidence, RetrievalResponse, SubQueryOrigin
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from tests.planning.conftest import KINDS, World, line, queries_of, reasoning_of, refs, steps

QUESTION = "Which river crosses the birthplace of the director of Titanic?"
NOISE = {f"River {n}": f"Which river? The river {n} crosses a birthplace." for n in range(12)}
PAGES = {
    **NOISE,
    "Titanic": "Titanic is a film by James Cameron.",
    "James Cameron": "James Cameron was born in Kapuskasing.",
    "Kapuskasing": "Kapuskasing lies on the Kapuskasing River, which crosses it.",
}
PLAN = steps(
    {"query": "Who directed Titanic?", "finds": "the director of Titanic"},
    {"query": "Where was #q1 born?", "depends_on": ["q1"], "finds": "the birthplace of #q1"},
    {"query": "Which river crosses #q2?", "depends_on": ["q2"], "finds": "the river of #q2"},
)

NEXT = "town of Cochrane <b> where Cameron was born"


def first(prompt: str) -> str:
    return line("q1", ("James Cameron", refs(prompt)["Titanic"]))


def second(prompt: str) -> str:
    return line("q2", ("Kapuskasing", refs(prompt)["James Cameron"]))


def verdict(*queries: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"sufficient": False, "gaps": ["the river"], "sub_queries": queries, **fields})


def world(**fields: Any) -> World:
    return World(
        **{"pages": PAGES, "plan": PLAN, "findings": [first, second], "source": {"similarity_top_k": 9}, **fields}
    )


def test_what_proves_the_chain_comes_first() -> None:
    """Passages behind findings in the chain's order, then those of the verdict, whatever else was found."""

    def sufficient(prompt: str) -> str:
        found = refs(prompt)
        return json.dumps({"sufficient": True, "refs": [found["Kapuskasing"], found["Titanic"], 99]})

    made = world(revision=sufficient).search(QUESTION, similarity_top_k=4)
    assert [node.node_id for node in made.nodes][:3] == ["Titanic", "James Cameron", "Kapuskasing"]
    assert [node.metadata["agentic_kb"].get("proof") for node in made.nodes] == [
        [{"step": "q1", "finding": "James Cameron", "rank": 0}, {"step": "verdict", "rank": 3}],
        [{"step": "q2", "finding": "Kapuskasing", "rank": 1}],
        [{"step": "verdict", "rank": 2}],
        None,
    ]


def test_what_is_not_answered_comes_after_the_proof() -> None:
    """A revision's best in turns, then the best of each step without an answer, before what the question found."""
    revision = verdict({"query": "one rare pelican"}, {"query": "two rare herons"})
    birds = {"Heron": "Two rare herons.", "Pelican": "One rare pelican."}
    searched = world(pages={**PAGES, **birds}, findings=[first, line("q2")], revision=revision)
    made = searched.search(QUESTION, similarity_top_k=6, limits={"rounds": 2})
    assert [node.node_id for node in made.nodes][:4] == ["Titanic", "Pelican", "Heron", "James Cameron"]


def test_a_passage_that_says_nothing_new_comes_last() -> None:
    """A near-duplicate of a page makes room for others; proof never does."""
    long = "Titanic is a film by James Cameron, and it won eleven prizes in one night."
    texts = {"Titanic": long, "copy": f"{long} Again.", "Snow": "Snow fell on the film.", "Rain": "Rain fell."}
    searched = world(findings=[first, line("q2", "Kapuskasing")])
    titles = {"copy": "Titanic"}
    searched.memory = MemoryRetriever(
        [TextNode(id_=name, text=text, metadata={"title": titles.get(name, name)}) for name, text in texts.items()],
        similarity_top_k=9,
    )
    made = searched.search("Titanic, a film by James Cameron, and rain or snow?")
    assert {node.node_id for node in made.nodes} == set(texts)
    found = [node.node_id for node in made.nodes]
    assert {found[0], found[-1]} == {"Titanic", "copy"}


def answered(pages: dict[str, str], revision: Any) -> tuple[dict[str, list[str]], RetrievalResponse]:
    """The prompts of a whole answer by their kind, and the response."""
    asked: dict[str, list[str]] = {}

    def say(messages: Any) -> str:
        system, user = (str(message.content) for message in messages)
        kind = next((name for start, name in KINDS.items() if system.startswith(start)), "answer")
        asked.setdefault(kind, []).append(user)
        replies = {"plan": PLAN, "revision": revision(user), "answer": "It is the river [ref_id:0]."}
        reads = [first, second]
        return reads[len(asked[kind]) - 1](user) if kind == "findings" else replies[kind]

    kb = KnowledgeBase(
        [KnowledgeSource("docs", retriever=world(pages=pages).memory)], llm=ScriptedLLM(say), effort="medium"
    )
    return asked, kb.retrieve(QUESTION)


@pytest.mark.parametrize("found", [["Kapuskasing"], ["Titanic", "Kapuskasing"], []])
def test_a_sufficient_verdict_leaves_the_proof_and_little_else_to_the_answers_prompt(found: list[str]) -> None:
    """Numbers and references stay as they are; without named passages, or with none of them shown, all are used."""

    def sufficient(prompt: str) -> str:
        numbers = refs(prompt)
        return json.dumps({"sufficient": True, "refs": [numbers.get(title, 99) for title in found]})

    asked, response = answered(PAGES, sufficient)
    shown = refs(asked["answer"][0])
    titles = [reference.title for reference in response.references]
    assert titles[:3] == ["Titanic", "James Cameron", "Kapuskasing"] or not found
    assert shown == {title: at for at, title in enumerate(titles[: 3 + 3 if found else None])}


def test_the_chain_stands_in_the_verdicts_and_the_answers_prompts() -> None:
    """Each step with value, confidence and reference; the passages that prove it are whole."""
    cameron = PAGES["James Cameron"] + " He made films." * 150
    asked, response = answered({**PAGES, "James Cameron": cameron}, lambda _: '{"sufficient": true}')
    (verdict_prompt,), (answer_prompt,) = asked["revision"], asked["answer"]
    found = refs(verdict_prompt)
    told = "Who directed Titanic? -> James Cameron", "Where was James Cameron born? -> Kapuskasing"
    chain = [f"{row} (stated, ref_id {{}})" for row in told]
    for number, (row, title) in enumerate(zip(chain, ("Titanic", "James Cameron"), strict=True)):
        assert f"\nq{number + 1}: " + row.format(found[title]) in verdict_prompt
        assert "- " + row.format(number) in answer_prompt
    assert verdict_prompt.count("He made films.") > 100
    assert answer_prompt.count("<found>") == answer_prompt.count("</found>") == 1
    assert [reference.node_id for reference in response.references][:2] == ["Titanic", "James Cameron"]


@pytest.mark.parametrize("enough", [True, False])
def test_a_verdict_writes_the_values_of_open_steps(enough: bool) -> None:
    """With their passages, which are proof; a revision's searches have them, and what was answered stays."""

    def judge(prompt: str) -> str:
        river = {"step": "q3", "value": "Kapuskasing River", "ref": refs(prompt)["Kapuskasing"]}
        values = [{"step": "q1", "value": "Ann"}, {"step": "q9", "value": "x"}, "y", river]
        onward = {"query": "mouth of #q3", "depends_on": ["q3"]}
        return verdict(onward, sufficient=enough, values=values)

    made = world(revision=judge).search(QUESTION)
    found = [("James Cameron", "Titanic"), ("Kapuskasing", "James Cameron"), ("Kapuskasing River", "Kapuskasing")]
    assert [(one.value, one.node_id) for one in made.findings] == found
    assert [node.node_id for node in made.nodes][:3] == [page for _, page in found]
    assert queries_of(made).get("r1.1") == (None if enough else "mouth of Kapuskasing River")


def test_a_revision_is_a_plan() -> None:
    """Its searches build on one another and on earlier steps, and what they find is read."""
    pages = {**PAGES, "Ontario": "Kapuskasing is a town in Ontario.", "Toronto": "Toronto is the capital of Ontario."}
    revision = verdict(
        {"id": "r1", "query": "province of #q2", "depends_on": ["q2"]},
        {"id": "r2", "query": "capital of #r1", "depends_on": ["r1"], "finds": "the capital of #r1"},
        {"id": "r3", "query": "mayor of #r2", "depends_on": ["r2"]},
    )

    def third(prompt: str) -> str:
        assert "r1.1: province of Kapuskasing" in prompt
        return line("r1.1", ("Ontario", refs(prompt)["Ontario"]))

    searched = world(pages=pages, revision=revision, findings=[first, second, third])
    made = searched.search(QUESTION, limits={"rounds": 5})
    queries = queries_of(made)
    assert (queries["r1.1"], queries["r1.2"]) == ("province of Kapuskasing", "capital of Ontario")
    assert queries["r1.3"] == "mayor of the capital of Ontario"
    assert {one.origin for one in made.plan.sub_queries[-3:]} == {SubQueryOrigin.REVISION}
    assert [one.wave for one in made.plan.sub_queries[-3:]] == [4, 5, 6]
    assert searched.calls("revision") == 1
    assert "Toronto" in {node.node_id for node in made.nodes}


@pytest.mark.parametrize(
    ("found", "last", "query"),
    [
        ("the birthplace of #q1", {}, "Which river crosses the birthplace of James Cameron?"),
        ("the birthplace of the director", {}, "Which river crosses the birthplace of the director James Cameron?"),
        (
            "the birthplace of the director",
            {"query": "Which river crosses #q2, #q1?", "depends_on": ["q1", "q2"]},
            "Which river crosses the birthplace of the director, James Cameron?",
        ),
    ],
)
def test_known_values_are_put_into_what_is_not_known(found: str, last: dict[str, Any], query: str) -> None:
    """A step without an answer passes its description on, with the values of its own parents."""
    plan = json.loads(PLAN)["sub_queries"]
    plan[1]["finds"] = found
    made = world(plan=steps(*plan[:2], plan[2] | last), findings=[first, line("q2")]).search(QUESTION)
    assert queries_of(made)["q3"] == query


@pytest.mark.parametrize("inside", [True, False])
def test_a_nearer_fact_is_searched_on(inside: bool) -> None:
    """A partial answer is no answer: its own next search is made for the same step, which stays open.

    The search is read in the answer as well as beside it; without one, the next step has the nearer fact alone.
    """
    partial, onward = ({"value": "Cochrane", "ref": 0, "confidence": "partial"}, {"next": NEXT})
    near = json.dumps(
        {"step": "q2", "answers": [partial | onward]} if inside else {"step": "q2", "answers": [partial], **onward}
    )
    searched = world(findings=[first, near, line("q2.1", "Kapuskasing")])
    made = searched.search(QUESTION, limits={"rounds": 5})
    queries = queries_of(made)
    assert queries["q2.1"] == "town of Cochrane where Cameron was born"
    assert queries["q3"] == "Which river crosses Kapuskasing?"
    assert [one.confidence for one in made.findings] == [Confidence.STATED, Confidence.PARTIAL, Confidence.IMPLIED]
    hopeless = world(findings=[first, line("q2", ("Cochrane", 0, "partial")), line("q2")]).search(QUESTION)
    assert queries_of(hopeless)["q3"] == "Which river crosses Cochrane?"


def test_a_nearer_fact_that_was_searched_on_needs_no_verdict() -> None:
    """A step is answered where one of its searches is, and the others found something nearer."""
    near = {"step": "q1", "answers": [{"value": "a Canadian", "ref": 0, "confidence": "partial"}], "next": "Cameron"}

    def read(prompt: str) -> str:
        found = refs(prompt)
        known = line("q1.1", ("James Cameron", found["Titanic"])), line("q2", ("Kapuskasing", found["James Cameron"]))
        return "\n".join(known)

    searched = world(plan=steps(*json.loads(PLAN)["sub_queries"][:2]), findings=[json.dumps(near), read])
    assert "sufficient without a verdict" in (reasoning_of(searched.search(QUESTION)).decision or "")
    assert searched.calls("revision") == 0


def test_what_a_round_reads_does_not_depend_on_which_search_came_first() -> None:
    """A search that no step needs is waited for; without it the account says what was not read."""
    prompts = []
    for latency in (0.0, 0.3):
        searched = world(plan=PLAN.replace('{"id": "q1",', '{"sources": ["docs"], "id": "q1",'))
        slow = MemoryRetriever(["Titanic was directed somewhere."], latency=latency)
        sources = [KnowledgeSource("docs", retriever=searched.memory), KnowledgeSource("slow", retriever=slow)]
        searched.search(QUESTION, sources=sources)
        prompts.append(next(text.split("]", 1)[1] for kind, text in searched.prompts if kind == "findings"))
    assert prompts[0].rpartition("[end of data")[0] == prompts[1].rpartition("[end of data")[0]


@pytest.mark.parametrize("words", [120, 600])
def test_a_passage_is_shown_whole_where_the_model_asks(words: int) -> None:
    """A step whose answer may stand where a passage is cut is read once more, with the whole, before its children."""
    long = "Titanic is a film. " + "It is long. " * words + "By the way, its maker was one Jim."

    def ask(prompt: str) -> str:
        assert "one Jim" not in prompt
        assert "[...]" in prompt
        return json.dumps({"step": "q1", "answers": [], "whole": [refs(prompt)["Titanic"]]})

    def read(prompt: str) -> str:
        return line("q1", ("Jim", refs(prompt)["Titanic"])) if "one Jim" in prompt else ask(prompt)

    searched = world(pages={**PAGES, "Titanic": long}, findings=[ask, read, line("q2", "x")])
    made = searched.search(QUESTION)
    assert queries_of(made)["q2"] == "Where was Jim born?"
    assert [asked for asked in searched.asked if "born" in asked] == ["Where was Jim born?"]


def test_a_reader_that_asks_for_the_same_passage_again_is_not_asked_again() -> None:
    """A passage too long to be shown whole ends in a search by description, as any step without an answer."""
    pages = {**PAGES, "Titanic": "Titanic is a film. " + "It is long. " * 1_000}
    asks = [json.dumps({"step": "q1", "answers": [], "whole": [0, 1, 2]})] * 2
    searched = world(pages=pages, findings=[*asks, line("q2", "x")], source={"similarity_top_k": 1})
    assert queries_of(searched.search(QUESTION))["q2"] == "Where was the director of Titanic born?"


def test_the_account_names_what_was_not_read() -> None:
    """A source that hangs is not waited for long, and the plan's warnings say what is missing from the prompt."""
    with MemoryRetriever(["x"], fault="hang", mode="async") as slow:
        searched = world(plan=PLAN.replace('{"id"', '{"sources": ["docs"], "id"'))
        sources = [KnowledgeSource("docs", retriever=searched.memory), KnowledgeSource("slow", retriever=slow)]
        made = searched.search(QUESTION, sources=sources, limits={"revisions": 0, "search_seconds": 2})
    assert "the model read without what slow finds for q0: it was too slow" in made.plan.warnings
    assert reasoning_of(made).findings == made.findings
