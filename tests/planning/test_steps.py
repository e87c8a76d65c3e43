from __future__ import annotations

from llama_index_agentic_kb.planning.rounds import Steps
from llama_index_agentic_kb.schema import Confidence, Finding, SubQuery


def finding(step: str, value: str, confidence: Confidence = Confidence.STATED) -> Finding:
    return Finding(sub_query_id=step, value=value, confidence=confidence)


def values(answers: list[Finding]) -> list[str]:
    return [answer.value for answer in answers]


def search(name: str, part_of: str | None = None) -> SubQuery:
    return SubQuery(id=name, query=name, sources=[], part_of=part_of)


def test_a_steps_answers_are_those_of_its_searches() -> None:
    """The best of each branch comes before the second of any; each value once, no more than wanted."""
    answers = Steps()
    for name in ("q1.1", "q1.2"):
        answers.note(search(name, "q1"), [])
    answers.take("q1.1", [finding("q1.1", "Ann"), finding("q1.1", "Bob")])
    answers.take("q1.2", [finding("q1.2", "Cid"), finding("q1.2", "ANN"), finding("q1.2", "Dan")])
    assert values(answers.answers_of("q1")) == ["Ann", "Cid", "Bob"]
    assert answers.searches_of(["q1"]) == ["q1.1", "q1.2"]


def test_one_search_may_serve_two_steps() -> None:
    """Both have its answers, whichever came first."""
    answers = Steps()
    answers.note(search("q1"), [])
    answers.take("q1", [finding("q1", "Ann")])
    answers._share("q1", "q2")
    answers._share("q1", "q2")
    assert values(answers.answers_of("q2")) == values(answers.answers_of("q1")) == ["Ann"]


def test_what_was_read_again_replaces_what_was_read() -> None:
    """The answers that were wrong are given; a repetition, nothing and a guess are no correction."""
    answers = Steps()
    answers.note(search("q1"), [])
    implied = finding("q1", "Ann", Confidence.IMPLIED)
    assert answers.take("q1", [implied]) == []
    assert answers.take("q1", []) == []
    assert answers.take("q1", [finding("q1", "Bob")]) == [implied]
    assert answers.take("q1", [finding("q1", "Cid", Confidence.IMPLIED)]) == []
    assert answers.take("q1", [finding("q1", "bob"), finding("q1", "Dan")]) == []
    assert values(answers.answers_of("q1")) == ["bob", "Dan"]
