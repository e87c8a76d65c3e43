"""The answer as data: what it may hold, and how the ledger of its claims becomes citations."""

from __future__ import annotations

from typing import Any

import pytest

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer import Answer, ledger_citations, ledger_supports
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger, Span, Support, Verdict
from llama_index_agentic_kb.schema.response import SkippedReason


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


def test_a_withheld_answer_says_so_in_data() -> None:
    """Reasons make an answer a skipped one, and survive a round trip; not classified differs from harmless."""
    answer = Answer(text="Sorry.", skipped_reasons=[SkippedReason.NO_RELEVANT_CONTENT])
    assert answer.skipped
    assert not Answer().skipped
    again = Answer.parse(answer.to_json())
    assert (again, again.query_classifications) == (answer, None)
    assert len(SkippedReason) == 11


def support(reference: str, score: float) -> Support:
    return Support(reference_id=reference, node_id="n", span=Span(start=0, end=1), quote="q", score=score)


def claim(start: int, verdict: Verdict, score: float | None, *supports: Support, check: bool = True) -> GroundedClaim:
    return GroundedClaim(
        text="x",
        span=Span(start=start, end=start + 1),
        verdict=verdict,
        score=score,
        supports=list(supports),
        check_required=check,
    )


def test_the_ledger_becomes_citations() -> None:
    """Only references above the threshold are sources, by their place; what contradicts a claim is none."""
    ledger = GroundingLedger(
        claims=[
            claim(0, Verdict.SUPPORTED, 0.9, support("7", 0.9), support("3", 0.61), support("9", 0.99)),
            claim(1, Verdict.UNSUPPORTED, 0.3, support("3", 0.59)),
            claim(2, Verdict.CONTRADICTED, 0.1, support("3", 0.9)),
            claim(3, Verdict.NOT_CHECKABLE, None, check=False),
        ]
    )
    citations = ledger_citations(ledger, ["3", "7"])
    assert [(one.start, one.end, one.sources) for one in citations] == [(0, 1, [1, 0])]
    assert ledger_citations(ledger, ["3", "7"], threshold=0.5)[1].sources == [0]
    supports = ledger_supports(ledger, ["3", "7"])
    assert [(one.score, one.check_required, one.sources) for one in supports] == [
        (0.9, True, [1, 0]),
        (0.3, True, []),
        (0.1, True, []),
        (None, False, []),
    ]


def test_results_that_are_given_are_not_narrowed() -> None:
    """A query has results or a search, and knows its question and whether it makes a session."""
    request: Any = {"messages": [{"role": "user", "content": "Q?"}]}
    query = AnswerQuery(request=request, session="-", search_results=[])
    assert (query.question, query.makes_session) == ("Q?", True)
    with pytest.raises(ValueError, match="they are not searched"):
        AnswerQuery(request=request, search_results=[], order_by="x")
