"""A ledger's claims in another form of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb.answering.placing import placed_ledger
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers
from llama_index_agentic_kb.grounding.claims import split_claims
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

ANSWER = "Österreich: Wien. [ref_id:3]\n\n* 日本の首都は東京 [ref_id:7][ref_id:3]。\n* It is [ref_id:7] so 😀. And so."


def ledger_of(answer: str) -> GroundingLedger:
    support = Support(reference_id="0", node_id="n", span=Span(start=0, end=1), quote="x", score=0.9)
    claims = [
        GroundedClaim(text=one.text, span=one.span, verdict=Verdict.SUPPORTED, score=0.9, supports=[support])
        for one in split_claims(answer)
    ]
    value = ConflictingValue(value="1", support=support)
    conflicts = [
        Conflict(claim=number, kind=ConflictKind.NUMBER, values=[value, value]) for number in range(len(claims))
    ]
    return GroundingLedger(claims=claims, grounding_score=0.9 if claims else None, conflicts=conflicts)


def in_form(answer: str, style: Markers) -> str:
    markers = MarkerFilter({3, 7}, style)
    return markers.feed(answer) + markers.close()


@pytest.mark.parametrize("style", list(Markers))
def test_claims_stand_where_they_stand_in_every_form(style: Markers) -> None:
    """With markers, without, or renumbered: each claim is found, with its markers, and nothing else is changed."""
    ledger = ledger_of(ANSWER)
    text = in_form(ANSWER, style)
    placed = placed_ledger(ledger, text)
    placed.check_spans(text)
    assert [one.text for one in placed.claims] == [in_form_of_claims(one.text, style) for one in ledger.claims]
    assert [one.supports for one in placed.claims] == [one.supports for one in ledger.claims]
    assert placed.conflicts == ledger.conflicts
    assert placed.grounding_score == 0.9
    assert (placed is ledger) == (style is Markers.KEEP)


def in_form_of_claims(claim: str, style: Markers) -> str:
    numbers = {"[ref_id:3]": "[ref_id:0]", "[ref_id:7]": "[ref_id:1]"} if style is Markers.RENUMBER else {}
    if style is Markers.STRIP:
        return in_form(claim, style)
    return (
        claim
        if not numbers
        else claim.replace("[ref_id:3]", "<0>")
        .replace("[ref_id:7]", "<1>")
        .replace("<0>", "[ref_id:0]")
        .replace("<1>", "[ref_id:1]")
    )


def test_what_the_text_does_not_hold_is_left_out() -> None:
    """Claims of a text that was cut, or is another one, are never placed anywhere else."""
    ledger = ledger_of("It is so. It was so. It will be so.")
    placed = placed_ledger(ledger, "It is so. It will be so.")
    assert [one.text for one in placed.claims] == ["It is so.", "It will be so."]
    assert [one.claim for one in placed.conflicts] == [0, 1]
    other = placed_ledger(ledger, "We do not have a summary for your query.")
    assert (other.claims, other.conflicts, other.grounding_score) == ([], [], None)


@given(
    st.lists(
        st.sampled_from(["A b", ". ", "[ref_id:3]", " [ref_id:7]", "\n\n", "* ", "é東", "。", "1", "a."]), max_size=14
    ),
    st.sampled_from(list(Markers)),
    st.integers(0, 30),
)
def test_spans_are_always_of_the_text(pieces: list[str], style: Markers, end: int) -> None:
    """Whatever the answer and its form, cut anywhere too: what is placed stands there, in order."""
    answer = "".join(pieces)
    for text in (in_form(answer, style), in_form(answer, style)[:end]):
        placed = placed_ledger(ledger_of(answer), text)
        placed.check_spans(text)
        GroundingLedger.model_validate(placed.model_dump())
