"""The scorer without a model: what it takes for supported, what it doesn't, and what it shows for it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import split_claims
from llama_index_agentic_kb.grounding.scorers import ClaimScore, ClaimScorer, LexicalScorer, Premise
from llama_index_agentic_kb.schema.grounding import ConflictKind, Verdict

FINAL = Premise(
    "Bob Hewitt and Frew McMillan defeated Fletcher and his partner Roy Emerson in the final to win the title in 1967. "
    "Newcombe partnered with Tony Roche but lost in the quarterfinals to Peter Curtis. Hewitt was born on 12 January "
    "1940 in Sydney. The course was 5 km long. Scientists approved the plan.",
    "1967 Championships",
)
LANDING = Premise("The Eagle landed on the Moon on 20 July 1969. It carried two astronauts.", "Apollo 11")
MINI = Premise(
    "Elizabeth Cord (born 3 May 1950) is a painter. Her brother Paul Cord directed the film Dusk in 1981.",
    "Elizabeth Cord",
)


def score(claim: str, *premises: Premise) -> ClaimScore:
    return LexicalScorer().judge([claim], premises or [FINAL])[0]


@pytest.mark.parametrize(
    "claim",
    [
        "Fletcher was beaten by Hewitt and McMillan in the 1967 final.",
        "In 1967, Hewitt and McMillan beat Fletcher.",
        "Hewitt's birth was on 1940-01-12.",
        "5,000 metres was the length of the course.",
        "The plan was approved by scientists.",
        "Newcombe lost to Peter Curtis in the quarterfinals.",
    ],
)
def test_supported(claim: str) -> None:
    """What the passage says in other words is supported."""
    found = score(claim)
    assert found.verdict is Verdict.SUPPORTED
    assert found.evidence[0].spans


@pytest.mark.parametrize(
    ("claim", "kind"),
    [
        ("Hewitt was born on 12 January 1941 in Sydney.", ConflictKind.DATE),
        ("The course was 7 km long.", ConflictKind.NUMBER),
        ("The course was 5 m long.", ConflictKind.NUMBER),
        ("The plan was not approved by scientists.", ConflictKind.POLARITY),
        ("Scientists rejected the plan.", ConflictKind.POLARITY),
        ("Newcombe never lost in the quarterfinals.", ConflictKind.POLARITY),
        ("Newcombe partnered with Peter Curtis.", ConflictKind.NAME),
        ("Hewitt and McMillan were beaten by Fletcher in the final.", ConflictKind.NAME),
    ],
)
def test_contradicted(claim: str, kind: ConflictKind) -> None:
    """Another date, number, unit, name, role or polarity contradicts, and the passage's own words are shown."""
    found = score(claim)
    assert found.verdict is Verdict.CONTRADICTED
    assert found.score is not None
    assert found.score < 0.35
    rival = next(rival for rival in found.rivals if rival.kind is kind)
    assert rival.span.of(FINAL.text) == rival.told


@pytest.mark.parametrize(
    "claim", ["Paris is the capital of France.", "The stadium holds 80,000 people.", "Wine is made of grapes."]
)
def test_unsupported(claim: str) -> None:
    """What the passage does not speak of is unsupported, not contradicted."""
    assert score(claim).verdict is Verdict.UNSUPPORTED


def test_merged_facts() -> None:
    """What is said of two different people is not supported of one; of each, it is."""
    assert (
        score("Elizabeth Cord is a painter who directed the film Dusk in 1981.", MINI).verdict is not Verdict.SUPPORTED
    )
    assert score("Elizabeth Cord paints, and her brother Paul Cord directed Dusk.", MINI).verdict is Verdict.SUPPORTED


def test_two_passages_together() -> None:
    """A claim of two things is borne out by the two passages that say one each."""
    one = Premise("Viking 1 landed on Mars on 20 July 1976.", "Viking 1")
    two = Premise("Venera 7 landed on Venus on 15 December 1970.", "Venera 7")
    found = score("Viking 1 landed on Mars in 1976, and Venera 7 landed on Venus in 1970.", one, two, FINAL)
    assert found.verdict is Verdict.SUPPORTED
    assert {evidence.premise for evidence in found.evidence} == {0, 1}


def test_topic_is_spoken_of_by_pronouns() -> None:
    """A pronoun, and a sentence without a name, speak of the passage's title."""
    assert score("Apollo 11 carried two astronauts.", LANDING).verdict is Verdict.SUPPORTED


def test_attributes_are_part_of_the_premise() -> None:
    """With its author, a passage bears out who says it."""
    told = Premise("The river is 120 km long.", attributes={"author": "Wikipedia"})
    assert score("Wikipedia says that the river is 120 km long.", told).verdict is Verdict.SUPPORTED


@pytest.mark.parametrize(
    ("passage", "claim", "verdict"),
    [
        ("Die Rakete startete am 3. Oktober 1990 in Kourou.", "Am 3.10.1990 startete die Rakete.", Verdict.SUPPORTED),
        ("Die Rakete startete am 3. Oktober 1990.", "Die Rakete startete am 4. Oktober 1990.", Verdict.CONTRADICTED),
        ("Die Rakete startete nicht in Kourou.", "Die Rakete startete in Kourou.", Verdict.CONTRADICTED),
        ("嫦娥五号于2020年11月24日发射。", "2020年嫦娥五号发射。", Verdict.SUPPORTED),
        ("嫦娥五号于2020年发射。", "嫦娥五号于2018年发射。", Verdict.CONTRADICTED),
        ("火星探査の新しい計画は承認された。", "火星探査の新しい計画は承認されなかった。", Verdict.CONTRADICTED),
    ],
)
def test_other_languages(passage: str, claim: str, verdict: Verdict) -> None:
    """Dates, numbers and negation are checked in other languages, too."""
    assert score(claim, Premise(passage)).verdict is verdict


def test_nothing_to_hold_against() -> None:
    """Without passages, or with empty ones, nothing is supported."""
    assert LexicalScorer().judge(["Mars is red."], [])[0].verdict is Verdict.UNSUPPORTED
    assert score("Mars is red.", Premise("")).score == 0.0
    assert LexicalScorer().judge([], [FINAL]) == []


async def test_sync_and_async_agree() -> None:
    """It is a ``ClaimScorer``, and its flow gives the same in both ways."""
    scorer: ClaimScorer = LexicalScorer()
    claims = split_claims("Hewitt was born in 1940. The course was 7 km long.")
    assert isinstance(scorer, ClaimScorer)
    assert await arun(scorer.score(claims, [FINAL])) == LexicalScorer().judge([one.plain for one in claims], [FINAL])


def test_is_not_begun_late() -> None:
    """A deadline that has passed is told."""
    with pytest.raises(DeadlineExceededError):
        run(LexicalScorer().score(split_claims("Mars is red."), [FINAL], deadline=time.monotonic() - 1))


@given(st.text(max_size=80), st.text(max_size=120))
@settings(max_examples=40, deadline=None)
def test_judges_any_text(claim: str, passage: str) -> None:
    """Whatever the texts, a score is from 0 to 1 and spans stand in the passage."""
    [found] = LexicalScorer().judge([claim], [Premise(passage)])
    assert found.score is not None
    assert 0 <= found.score <= 1
    for evidence in found.evidence:
        assert all(0 <= span.start < span.end <= len(passage) for span in evidence.spans)


@pytest.mark.parametrize(
    "passage",
    [
        "word " * 60_000,
        "A B " * 30_000,
        "1 2 " * 30_000,
        "\n " * 60_000,
        "not " * 30_000,
        "日本" * 60_000,
        "9" * 60_000,
    ],
    ids=["words", "names", "numbers", "lines", "negations", "signs", "digits"],
)
def test_huge_passages(passage: str) -> None:
    """No passage takes for ever: a quadratic way would take minutes."""
    begun = time.process_time()
    LexicalScorer().judge(["The word is not 1 of Ann Berger in 日本."], [Premise(passage), FINAL])
    assert time.process_time() - begun < 30


@pytest.mark.parametrize("claim", ["1 2 3 4 5 " * 50_000, "Ann1 met Bob2 and " * 30_000], ids=["numbers", "names"])
def test_endless_claims(claim: str) -> None:
    """A claim without end is read up to a bound; each of its numbers against each other would take for ever."""
    begun = time.process_time()
    LexicalScorer().judge([claim], [Premise(claim[:5_000]), FINAL])
    assert time.process_time() - begun < 30


def test_stops_when_late() -> None:
    """A thread that nobody waits for any more stops at the deadline, claim by claim."""
    with pytest.raises(DeadlineExceededError, match="late after 0 claims"):
        LexicalScorer().judge(["Mars is red."] * 3, [FINAL], deadline=time.monotonic())


def test_said_twice_is_scored_once() -> None:
    """The same claim has the same score wherever it stands."""
    first, second, third = LexicalScorer().judge(["Mars is red.", "Hewitt was born in 1940.", "Mars is red."], [FINAL])
    assert first is third
    assert second.score != first.score
