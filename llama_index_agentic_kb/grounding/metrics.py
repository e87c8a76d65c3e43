"""Citation recall and precision, as ALCE defines them, over any scorer in the place of its NLI model.

Gao et al., "Enabling Large Language Models to Generate Text with Citations", EMNLP 2023, section 4.3:

- *Recall* of a statement is 1 where the passages that it cites, taken together, support it; 0 without citations.
- A citation is *irrelevant* where its passage alone does not support the statement and the others together do without
  it. *Precision* of a citation is 1 where its statement's recall is 1 and it is not irrelevant.

Both are means: recall over the statements that need a check, precision over all citations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, Premise, ScorerLike, as_scorer


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
        return 2 * self.recall * self.precision / ((self.recall + self.precision) or 1.0)


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
    return run(_measured(answer, passages, scorer, threshold, deadline))


async def acitation_quality(
    answer: str,
    passages: Mapping[int, str],
    scorer: ScorerLike = None,
    *,
    threshold: float = CITATION_THRESHOLD,
    deadline: float | None = None,
) -> CitationQuality:
    """Measure the citations of an answer; see ``citation_quality``."""
    return await arun(_measured(answer, passages, scorer, threshold, deadline))


async def _measured(
    answer: str, passages: Mapping[int, str], scorer: ScorerLike, threshold: float, deadline: float | None
) -> CitationQuality:
    judge = as_scorer(scorer)

    async def supports(claim: Claim, ids: Sequence[int]) -> bool:
        """Return whether passages together support a claim."""
        known = [passages[number] for number in ids if number in passages]
        if not known:
            return False
        [found] = await judge.score([claim], [Premise("\n\n".join(known))], deadline=deadline)
        return found.score is not None and found.score >= threshold

    statements: list[StatementCitations] = []
    for claim in split_claims(answer):
        if claim.check_required:
            cited = claim.cited
            recalled = await supports(claim, cited)
            precise = list(cited) if recalled and len(cited) == 1 else []
            for number in cited if recalled and not precise else ():
                others = [other for other in cited if other != number]
                if await supports(claim, [number]) or not await supports(claim, others):
                    precise.append(number)
            statements.append(StatementCitations(claim, recalled, tuple(precise), cited))
    count = sum(len(statement.cited) for statement in statements)
    return CitationQuality(
        recall=sum(statement.recalled for statement in statements) / len(statements) if statements else None,
        precision=sum(len(statement.precise) for statement in statements) / count if count else None,
        statements=statements,
    )
