"""Citation recall and precision, as ALCE defines them, over any scorer in the place of its NLI model.

Gao et al., "Enabling Large Language Models to Generate Text with Citations", EMNLP 2023, section 4.3:

- *Recall* of a statement is 1 where the passages that it cites, taken together, support it; 0 without citations.
- A citation is *irrelevant* where its passage alone does not support the statement and the others together do without
  it. *Precision* of a citation is 1 where its statement's recall is 1 and it is not irrelevant.

Both are means: recall over the statements that need a check, precision over all citations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, ClaimScorer, Premise, ScorerLike, as_scorer

__all__ = ["CitationQuality", "StatementCitations", "acitation_quality", "citation_quality", "measuring_citations"]


@dataclass(frozen=True, slots=True)
class StatementCitations:
    """The citations of one statement.

    Args:
        claim: The statement.
        recalled: Whether what it cites supports it.
        precise: Its citations that count, by id.
        cited: All of its citations, by id; ids without a passage are among them.
    """

    claim: Claim
    recalled: bool
    precise: tuple[int, ...]
    cited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CitationQuality:
    """Citation recall and precision of an answer; None where there is nothing to take the mean of."""

    recall: float | None
    precision: float | None
    statements: list[StatementCitations] = field(default_factory=list)

    @property
    def f1(self) -> float | None:
        """The harmonic mean of both."""
        if self.recall is None or self.precision is None:
            return None
        return (
            2 * self.recall * self.precision / (self.recall + self.precision) if self.recall + self.precision else 0.0
        )


def citation_quality(
    answer: str,
    passages: Mapping[int, str],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> CitationQuality:
    """Measure the citations of an answer.

    A statement with k citations takes up to 2k + 1 calls of the scorer.

    Args:
        answer: With its reference markers.
        passages: What the ids stand for.
        scorer: Tells whether passages support a statement; what ``as_scorer`` takes; None is "auto".
        threshold: Score from which they do, 0 to 1.
        deadline: ``time.monotonic()`` at which it is given up; None waits.

    Raises:
        DeadlineExceededError: It was late.
        AgenticKBError: The scorer failed.
    """
    return run(measuring_citations(answer, passages, scorer, threshold=threshold, deadline=deadline))


async def acitation_quality(
    answer: str,
    passages: Mapping[int, str],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> CitationQuality:
    """Measure the citations of an answer; see ``citation_quality``."""
    return await arun(measuring_citations(answer, passages, scorer, threshold=threshold, deadline=deadline))


async def measuring_citations(
    answer: str,
    passages: Mapping[int, str],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> CitationQuality:
    """Measure the citations of an answer, as a flow; see ``citation_quality``."""
    judge = _Judge(as_scorer(scorer), passages, threshold, deadline)
    statements = []
    for claim in split_claims(answer):
        if claim.check_required:
            statements.append(await _measured(claim, judge))
    citations = [number for statement in statements for number in statement.cited]
    precise = sum(len(statement.precise) for statement in statements)
    return CitationQuality(
        recall=sum(statement.recalled for statement in statements) / len(statements) if statements else None,
        precision=precise / len(citations) if citations else None,
        statements=statements,
    )


class _Judge:
    """Return whether some passages support a claim."""

    def __init__(
        self, scorer: ClaimScorer, passages: Mapping[int, str], threshold: float, deadline: float | None
    ) -> None:
        self._scorer = scorer
        self._passages = passages
        self._threshold = threshold
        self._deadline = deadline

    async def supports(self, claim: Claim, ids: tuple[int, ...]) -> bool:
        """Return whether passages together support a claim."""
        known = [self._passages[number] for number in ids if number in self._passages]
        if not known:
            return False
        premise = Premise("\n\n".join(known))
        scores = await self._scorer.score([claim], [premise], deadline=self._deadline)
        score = scores[0].score
        return score is not None and score >= self._threshold


async def _measured(claim: Claim, judge: _Judge) -> StatementCitations:
    recalled = await judge.supports(claim, claim.cited)
    if not recalled:
        return StatementCitations(claim, recalled=False, precise=(), cited=claim.cited)
    if len(claim.cited) == 1:
        return StatementCitations(claim, recalled=True, precise=claim.cited, cited=claim.cited)
    precise = []
    for number in claim.cited:
        alone = await judge.supports(claim, (number,))
        others = tuple(other for other in claim.cited if other != number)
        if alone or not (await judge.supports(claim, others)):
            precise.append(number)
    return StatementCitations(claim, recalled=True, precise=tuple(precise), cited=claim.cited)
