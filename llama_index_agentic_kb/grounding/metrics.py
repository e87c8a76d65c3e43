"""Citation recall and precision, as defined by ALCE, with any scorer instead of its NLI model.

Gao et al., "Enabling Large Language Models to Generate Text with Citations", EMNLP 2023, section 4.3:

- *Recall* of a statement is 1 if its cited passages together support it, else 0.
- A citation is *irrelevant* if its passage alone does not support the statement and the other citations together do.
  *Precision* of a citation is 1 if its statement's recall is 1 and the citation is not irrelevant, else 0.

Recall is averaged over the statements that need a check, precision over all citations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, Premise, ScorerLike, as_scorer


@dataclass(frozen=True, slots=True)
class StatementCitations:
    """A statement, whether its cited passages support it, and its correct citations (by reference id)."""

    claim: Claim
    recalled: bool
    precise: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CitationQuality:
    """Citation recall and precision of an answer. None if there are no values to average."""

    recall: float | None
    precision: float | None
    statements: list[StatementCitations] = field(default_factory=list)

    @property
    def f1(self) -> float | None:
        """The harmonic mean of recall and precision. None if either is None."""
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
    """Measure the citations of an answer with its markers against passages by reference id.

    A statement with k citations takes up to 2k + 1 calls of the scorer ("auto" by default; see ``as_scorer``). Passages
    support it from a score of ``threshold`` on.

    Raises:
        DeadlineExceededError: The deadline has passed.
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
            statements.append(StatementCitations(claim, recalled, tuple(precise)))
    count = sum(len(statement.claim.cited) for statement in statements)
    return CitationQuality(
        recall=sum(statement.recalled for statement in statements) / len(statements) if statements else None,
        precision=sum(len(statement.precise) for statement in statements) / count if count else None,
        statements=statements,
    )
