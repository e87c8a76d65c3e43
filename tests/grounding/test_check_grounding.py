"""``check_grounding`` stands alone: Google's shape, thresholds and limits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.check import acheck_grounding, check_grounding
from llama_index_agentic_kb.grounding.scorers import LLMJudge
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
    assert await acheck_grounding(answer, FACTS) == checked


def test_attributes_are_part_of_a_fact() -> None:
    """Facts come as texts, models or mappings; their attributes count."""
    answer = "Wikipedia cites that Titanic won eleven Academy Awards."
    fact = Fact(text="Titanic won eleven Academy Awards.", attributes={"author": "Wikipedia"})
    for form in (fact, fact.to_dict(), {"text": fact.text, "attributes": fact.attributes}):
        assert check_grounding(answer, [form]).claims[0].verdict is Verdict.SUPPORTED


def test_threshold() -> None:
    """Above its score a claim cites nothing; the score stays."""
    loose, strict = (
        check_grounding("James Cameron directed Titanic.", FACTS, citation_threshold=t) for t in (0.1, 1.0)
    )
    assert loose.support_score == strict.support_score
    assert (bool(loose.claims[0].citation_indices), strict.claims[0].citation_indices) == (True, [])


def test_no_facts_and_nothing_to_check() -> None:
    """Without facts nothing is grounded; without claims there is no score."""
    assert check_grounding("Titanic is a film.", []).support_score == 0.0
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
    """What is beyond the limits is refused, by name; what is just within them is checked."""
    with pytest.raises(InvalidRequestError, match=message):
        check_grounding(answer, facts, citation_threshold=threshold)


def test_at_the_limits() -> None:
    """What is just within them is checked."""
    facts = ["x" * MAX_FACT_CHARACTERS, *["Titanic is a film."] * (MAX_FACTS - 1)]
    count = MAX_ANSWER_TOKENS // 5
    assert len(check_grounding("Titanic is a film. " * count, facts).claims) == count


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
