"""The ledger's models refuse what Google's protos would take."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
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

SPAN = Span(start=0, end=4)
SUPPORT = Support(reference_id="0", node_id="n", span=SPAN, quote="Mars", score=0.9)


def claim(**fields: Any) -> GroundedClaim:
    return GroundedClaim(**{"text": "Mars", "span": SPAN, "verdict": Verdict.SUPPORTED, "score": 0.9, **fields})


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 2), (-1, 2)])
def test_span_is_not_empty(start: int, end: int) -> None:
    """A span has a start below its end, and none below 0."""
    with pytest.raises(ValidationError):
        Span(start=start, end=end)


@pytest.mark.parametrize("score", [-0.1, 1.1, math.nan, math.inf])
def test_score_is_a_share(score: float) -> None:
    """A score is a number from 0 to 1."""
    with pytest.raises(ValidationError):
        claim(score=score)
    with pytest.raises(ValidationError):
        Support(reference_id="0", node_id="n", span=SPAN, quote="Mars", score=score)


@pytest.mark.parametrize(
    "fields",
    [
        {"check_required": False},
        {"check_required": False, "score": None, "verdict": Verdict.NOT_CHECKABLE, "supports": [SUPPORT]},
        {"score": None},
        {"verdict": Verdict.NOT_CHECKABLE},
    ],
    ids=["score without a check", "support without a check", "verdict without a score", "score without a verdict"],
)
def test_scores_what_is_checked(fields: dict[str, Any]) -> None:
    """Only what needs a check has a score, and what has a score has a verdict."""
    with pytest.raises(ValidationError):
        claim(**fields)


def test_ledger_is_in_order() -> None:
    """Claims don't overlap, a score is of claims, and conflicts are of claims that there are."""
    other = ConflictingValue(value="x", support=SUPPORT)
    with pytest.raises(ValidationError, match="inside of the claim before"):
        GroundingLedger(claims=[claim(), claim(span=Span(start=3, end=7))])
    with pytest.raises(ValidationError, match="no claim has a score"):
        GroundingLedger(grounding_score=0.5)
    with pytest.raises(ValidationError, match="no such claim"):
        GroundingLedger(conflicts=[Conflict(claim=0, kind=ConflictKind.DATE, values=[other, other])])


def test_spans_are_of_the_answer() -> None:
    """A ledger of another answer is told."""
    ledger = GroundingLedger(claims=[claim()], grounding_score=0.9)
    ledger.check_spans("Mars is red.")
    with pytest.raises(InvalidRequestError, match=r"claims\[0\]"):
        ledger.check_spans("Venus is not.")


def test_goes_over_the_wire() -> None:
    """A ledger is the same after a trip as JSON."""
    ledger = GroundingLedger(claims=[claim(supports=[SUPPORT], cited=["0"])], grounding_score=0.9, scorer="lexical")
    assert GroundingLedger.parse(ledger.to_json()) == ledger
    assert ledger.to_dict()["claims"][0]["supports"][0]["referenceId"] == "0"
