"""Citation recall and precision are those of ALCE."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.metrics import acitation_quality, citation_quality
from llama_index_agentic_kb.grounding.scorers import ClaimScore, Premise, verdict_of

PASSAGES = {0: "red", 1: "big", 2: "cold", 3: "red big"}


class Words:
    """Supports a claim where the premise has all of the claim's words; counts what it is asked."""

    name = "words"

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.error = error

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        if self.error is not None:
            raise self.error
        [claim], [premise] = claims, premises
        self.asked.append((claim.plain, premise.text))
        score = float(set(claim.plain.casefold().strip(".").split()) <= set(premise.text.split()))
        return [ClaimScore(score, verdict_of(score))]


@pytest.mark.parametrize(
    ("answer", "recall", "precision"),
    [
        ("Red [ref_id:0].", 1.0, 1.0),
        ("Red [ref_id:1].", 0.0, 0.0),
        ("Red big [ref_id:0][ref_id:1].", 1.0, 1.0),  # neither alone, both together
        ("Red [ref_id:0][ref_id:2].", 1.0, 0.5),  # the second alone does not, and is not needed
        ("Red [ref_id:0][ref_id:3].", 1.0, 1.0),  # each alone does
        ("Red big [ref_id:0][ref_id:1][ref_id:3].", 1.0, 1 / 3),  # not needed, and not enough alone
        ("Red [ref_id:0]. Big.", 0.5, 1.0),  # without a citation: no recall
        ("Red [ref_id:0]. Cold [ref_id:1].", 0.5, 0.5),
        ("Red [ref_id:9].", 0.0, 0.0),  # no such passage
        ("What is red?", None, None),
        ("Red.", 0.0, None),
    ],
)
def test_definitions(answer: str, recall: float | None, precision: float | None) -> None:
    """Recall is of statements, precision of citations; worked by hand. k citations take 2k + 1 calls at most."""
    words = Words()
    found = citation_quality(answer, PASSAGES, words)
    assert found.recall == recall
    assert found.precision == pytest.approx(precision)
    assert len(words.asked) <= sum(
        2 * len(one.claim.cited) + 1 if len(one.claim.cited) > 1 else 1 for one in found.statements
    )


async def test_by_default_offline_and_async() -> None:
    """Without a scorer the offline one is asked; f1 is the harmonic mean; a failure is raised."""
    passages = {0: "Voyager 1 was launched in 1977.", 1: "Bananas are yellow."}
    found = await acitation_quality("In 1977 Voyager 1 was launched [ref_id:0][ref_id:1].", passages)
    assert (found.recall, found.precision) == (1.0, 0.5)
    assert found.f1 == pytest.approx(2 / 3)
    assert found.statements[0].precise == (0,)
    with pytest.raises(LLMError, match="down"):
        citation_quality("Red [ref_id:0].", PASSAGES, Words(LLMError("down")))
