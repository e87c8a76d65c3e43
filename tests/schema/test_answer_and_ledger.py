"""The answer and the ledger of its claims as data: what they may hold, and how the ledger becomes citations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import Answer, ledger_citations, ledger_supports
from llama_index_agentic_kb.schema.grounding import (
    Conflict,
    ConflictingValue,
    ConflictKind,
    GroundedClaim,
    GroundingLedger,
    Span,
    Support,
    Verdict,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"citations": [{"start": 1, "end": 1}]}, "citations.0: start (1) must be below end (1)"),
        ({"citations": [{"start": 0, "end": 4}]}, "citations.0.end: 4 is beyond the text of 3 characters"),
        ({"citations": [{"start": 0, "end": 1, "sources": [1]}]}, "citations.0.sources: there is no reference 1"),
        ({"groundingSupports": [{"start": 0, "end": 9}]}, "groundingSupports.0.end: 9 is beyond"),
        (
            {"groundingSupports": [{"start": 0, "end": 1, "checkRequired": False, "score": 0.5}]},
            "groundingSupports.0: score: a claim that needs no check has neither",
        ),
        ({"groundingScore": 1.1}, "groundingScore: Input should be less than or equal to 1"),
        ({"groundingScore": float("nan")}, "groundingScore: Input should be"),
        ({"createdAt": "2024-01-31T00:00:00"}, "createdAt: Input should have timezone info"),
    ],
)
def test_what_an_answer_can_not_hold_is_refused(fields: Any, message: str) -> None:
    """Spans lie in the text, references exist, scores lie from 0 to 1, times have a zone."""
    good = {"text": "abc", "references": [{"kind": "chunk"}]}
    assert Answer.parse(good).to_dict()["text"] == "abc"
    with pytest.raises(InvalidRequestError) as refused:
        Answer.parse({**good, **fields})
    assert message in str(refused.value)


def support(reference: str, score: float) -> Support:
    return Support(reference_id=reference, node_id="n", span=Span(start=0, end=1), quote="q", score=score)


def claim(start: int = 0, verdict: Any = Verdict.SUPPORTED, score: float | None = 0.9, **fields: Any) -> GroundedClaim:
    return GroundedClaim(text="x", span=Span(start=start, end=start + 1), verdict=verdict, score=score, **fields)


def test_the_ledger_becomes_citations() -> None:
    """Only references above the threshold are sources, by their place; what contradicts a claim is none."""
    ledger = GroundingLedger(
        claims=[
            claim(0, supports=[support("7", 0.9), support("3", 0.61), support("9", 0.99)]),
            claim(1, Verdict.UNSUPPORTED, 0.3, supports=[support("3", 0.59)]),
            claim(2, Verdict.CONTRADICTED, 0.1, supports=[support("3", 0.9)]),
            claim(3, Verdict.NOT_CHECKABLE, None, check_required=False),
        ]
    )
    citations = ledger_citations(ledger, ["3", "7"])
    assert [(one.start, one.end, one.sources) for one in citations] == [(0, 1, [1, 0])]
    assert ledger_citations(ledger, ["3", "7"], threshold=0.5)[1].sources == [0]
    supports = [(one.score, one.check_required, one.sources) for one in ledger_supports(ledger, ["3", "7"])]
    assert supports == [(0.9, True, [1, 0]), (0.3, True, []), (0.1, True, []), (None, False, [])]


@pytest.mark.parametrize(
    "fields",
    [
        {"check_required": False},
        {"check_required": False, "score": None, "verdict": "notCheckable", "supports": [support("0", 0.9)]},
        {"score": None},
        {"verdict": Verdict.NOT_CHECKABLE},
        *({"score": score} for score in (-0.1, 1.1, math.nan, math.inf)),
    ],
    ids=str,
)
def test_a_claim_has_a_score_if_it_is_checked(fields: dict[str, Any]) -> None:
    """A share from 0 to 1; only what needs a check has one, and what has one has a verdict."""
    assert claim().score == 0.9
    with pytest.raises(ValueError, match="score"):
        claim(**fields)


def test_a_ledger_is_in_order_and_of_its_answer() -> None:
    """Claims don't overlap, a score is of claims, conflicts are of claims that there are; another answer is refused."""
    other = ConflictingValue(value="x", support=support("0", 0.9))
    with pytest.raises(ValueError, match="inside of the claim before"):
        GroundingLedger(claims=[claim(0), claim(0)])
    with pytest.raises(ValueError, match="no claim has a score"):
        GroundingLedger(grounding_score=0.5)
    with pytest.raises(ValueError, match="no such claim"):
        GroundingLedger(conflicts=[Conflict(claim=0, kind=ConflictKind.DATE, values=[other, other])])
    with pytest.raises(ValueError, match="must be below end"):
        Span(start=3, end=2)
    ledger = GroundingLedger(claims=[claim(cited=["0"], supports=[support("0", 0.9)])], grounding_score=0.9)
    ledger.check_spans("x marks it")
    with pytest.raises(InvalidRequestError, match=r"claims\[0\]"):
        ledger.check_spans("nothing does")
    assert GroundingLedger.parse(ledger.to_json()) == ledger
    assert ledger.to_dict()["claims"][0]["supports"][0]["referenceId"] == "0"
