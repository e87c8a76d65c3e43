"""``check_grounding`` stands alone: Google's shape, thresholds and limits; citation quality is that of ALCE."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.grounding import check
from llama_index_agentic_kb.grounding.check import check_grounding, citation_quality
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.scorers import ClaimScore, LLMJudge, Premise, verdict_of
from llama_index_agentic_kb.grounding.spans import TextOffsets
from llama_index_agentic_kb.schema.grounding import (
    MAX_ANSWER_TOKENS,
    MAX_FACT_CHARACTERS,
    MAX_FACTS,
    Fact,
    Span,
    Verdict,
)
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply

FACTS = [
    "Titanic is a 1997 American epic romance film. It was directed by James Cameron.",
    "Titanic was released on December 19, 1997. It won eleven Academy Awards.",
]


async def test_claims_and_citations() -> None:
    """Each claim has its score and cites the stretches of the facts that support it, or says what lacks support."""
    answer = (
        "Here is what I found. James Cameron directed Titanic. It won 14 Academy Awards. It is a 1997 film and a book."
    )
    checked = check_grounding(answer, FACTS)
    courtesy, right, wrong, partly = checked.claims
    assert [claim.span.of(answer) for claim in checked.claims] == [claim.claim_text for claim in checked.claims]
    assert (courtesy.verdict, courtesy.score, courtesy.citation_indices) == (Verdict.NOT_CHECKABLE, None, [])
    cited = [checked.cited_chunks[index] for index in right.citation_indices]
    assert any("directed by James Cameron." in chunk.chunk_text for chunk in cited)
    assert all(chunk.span.of(FACTS[chunk.source]) == chunk.chunk_text for chunk in cited)
    assert (wrong.verdict in (Verdict.CONTRADICTED, Verdict.UNSUPPORTED), wrong.citation_indices) == (True, [])
    assert partly.lacking is None or partly.lacking.of(answer) == "and a book."
    scores = [claim.score for claim in (right, wrong, partly) if claim.score is not None]
    assert checked.support_score == pytest.approx(sum(scores) / 3)
    assert await check.acheck_grounding(answer, FACTS) == checked


def test_attributes_are_part_of_a_fact() -> None:
    """Facts come as texts, models or mappings; their attributes count."""
    answer = "Wikipedia cites that Titanic won eleven Academy Awards."
    fact = Fact(text="Titanic won eleven Academy Awards.", attributes={"author": "Wikipedia"})
    for form in (fact, fact.to_dict(), {"text": fact.text, "attributes": fact.attributes}):
        assert check_grounding(answer, [form]).claims[0].verdict is Verdict.SUPPORTED


def test_threshold_and_scores_without_facts() -> None:
    """Above its score a claim cites nothing; the score stays. Without facts it is 0, without claims there is none."""
    answer = "James Cameron directed Titanic."
    loose, strict = (check_grounding(answer, FACTS, citation_threshold=t) for t in (0.1, 1.0))
    assert loose.support_score == strict.support_score
    assert (bool(loose.claims[0].citation_indices), strict.claims[0].citation_indices) == (True, [])
    assert check_grounding(answer, []).support_score == 0.0
    assert check_grounding("Here is what I found.", FACTS).support_score is None


@pytest.mark.parametrize(
    ("answer", "facts", "threshold", "message"),
    [
        (" ", FACTS, 0.6, "answer: is empty"),
        ("a. " * (MAX_ANSWER_TOKENS // 2 + 1), FACTS, 0.6, "answer: has 4098 tokens"),
        ("Red.", ["x"] * (MAX_FACTS + 1), 0.6, "facts: 201 given"),
        ("Red.", ["ok", "x" * (MAX_FACT_CHARACTERS + 1)], 0.6, r"facts\[1\]: has 10001 characters"),
        ("Red.", [{"text": "x" * (MAX_FACT_CHARACTERS + 1)}], 0.6, r"facts\[0\]: has 10001"),
        ("Red.", [{"words": "x"}], 0.6, "text: Field required"),
        ("Red.", FACTS, 1.5, "citation_threshold"),
    ],
    ids=["empty", "long answer", "many facts", "long fact", "long mapping", "wrong field", "threshold"],
)
def test_limits(answer: str, facts: list[str], threshold: float, message: str) -> None:
    """What is beyond the limits is refused, by name."""
    with pytest.raises(InvalidRequestError, match=message):
        check_grounding(answer, facts, citation_threshold=threshold)


def test_at_the_limits() -> None:
    """What is just within them is checked."""
    facts = ["x" * MAX_FACT_CHARACTERS, *["Titanic is a film."] * (MAX_FACTS - 1)]
    assert (
        len(check_grounding("Titanic is a film. " * (MAX_ANSWER_TOKENS // 5), facts).claims) == MAX_ANSWER_TOKENS // 5
    )


def test_slow_scorer_is_given_up() -> None:
    """A scorer that hangs costs the scores, not the call."""
    begun = time.monotonic()
    judge = LLMJudge(ScriptedLLM([ScriptedReply("x", latency=20)]))
    checked = check_grounding("Titanic is a film.", FACTS, scorer=judge, timeout=0.1)
    assert time.monotonic() - begun < 10
    assert (checked.support_score, len(checked.warnings)) == (None, 1)


TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("aé\u0301日😀👩‍🚀\u200d")), min_size=1, max_size=20)


@given(TEXTS, st.data())
@settings(max_examples=100, deadline=None)
def test_a_span_is_the_same_text_in_every_unit(text: str, data: st.DataObject) -> None:
    """In UTF-8 bytes and in UTF-16 units; one that ends behind the text is refused."""
    start = data.draw(st.integers(0, len(text) - 1))
    span = Span(start=start, end=data.draw(st.integers(start + 1, len(text))))
    offsets = TextOffsets(text)
    (first, last), (low, high) = offsets.to_bytes(span), offsets.to_utf16(span)
    assert text.encode("utf-8", "surrogatepass")[first:last] == span.of(text).encode("utf-8", "surrogatepass")
    assert text.encode("utf-16-le", "surrogatepass")[2 * low : 2 * high] == span.of(text).encode(
        "utf-16-le", "surrogatepass"
    )
    with pytest.raises(InvalidRequestError, match=f"behind the text of {len(text)} characters"):
        offsets.to_bytes(Span(start=0, end=len(text) + 1))


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
    found = await check.acitation_quality("In 1977 Voyager 1 was launched [ref_id:0][ref_id:1].", passages)
    assert (found.recall, found.precision) == (1.0, 0.5)
    assert found.f1 == pytest.approx(2 / 3)
    assert found.statements[0].precise == (0,)
    with pytest.raises(LLMError, match="down"):
        citation_quality("Red [ref_id:0].", PASSAGES, Words(LLMError("down")))
