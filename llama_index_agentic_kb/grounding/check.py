"""Checks an answer against given facts, like Google's ``groundingConfigs:check``, and measures its citations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from llama_index_agentic_kb._aio import arun, deadline_after, run
from llama_index_agentic_kb._types import Work
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, Premise, ScorerLike, as_scorer
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.grounding import (
    MAX_ANSWER_TOKENS,
    MAX_FACT_CHARACTERS,
    MAX_FACTS,
    Fact,
    GroundingLedger,
    GroundingQuery,
    Span,
    Verdict,
    answer_tokens,
)


class CitedFact(Model):
    """A part of a fact that a claim cites: the index of the fact, the words, and their place in characters."""

    source: int = Field(ge=0)
    chunk_text: str
    span: Span


class CheckedClaim(Model):
    """One claim of the answer; ``span`` and ``lacking`` (the unsupported part) are in characters."""

    claim_text: str
    span: Span
    grounding_check_required: bool
    citation_indices: list[int] = Field(default_factory=list)  # indices of the ``cited_chunks`` that support the claim
    score: float | None = Field(default=None, ge=0, le=1)
    verdict: Verdict = Verdict.NOT_CHECKABLE
    lacking: Span | None = None


class GroundingCheck(Model):
    """The result of a check."""

    support_score: float | None = Field(default=None, ge=0, le=1)
    """Mean score of the checked claims. None if no claim was scored."""
    claims: list[CheckedClaim] = Field(default_factory=list)
    cited_chunks: list[CitedFact] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


FactLike = str | Fact | Mapping[str, object]


def check_grounding(
    answer: str,
    facts: Sequence[FactLike],
    *,
    scorer: ScorerLike = None,
    citation_threshold: float = CITATION_THRESHOLD,
    timeout: float | None = 30.0,
) -> GroundingCheck:
    """Check how far facts support an answer.

        check = check_grounding("Apollo 11 landed on 20 July 1969.", ["Apollo 11 landed on the Moon on 20 July 1969."])

    Args:
        answer: The answer, at most 4,096 tokens (a word or a full stop counts as one).
        facts: At most 200 facts of at most 10,000 characters each: texts, ``Fact``s, or mappings with the fields of
            ``Fact``.
        scorer: Scorer of the claims; see ``as_scorer``. Defaults to "auto".
        citation_threshold: Minimum score at which a claim cites a fact, 0 to 1. Defaults to 0.6.
        timeout: Seconds after which the check stops, with a warning and no scores. None if unlimited. Defaults to 30.

    Returns:
        The claims with their scores and citations.

    Raises:
        InvalidRequestError: The answer is empty, or an argument is outside its limits.
    """
    return run(_checking(answer, facts, scorer, citation_threshold, deadline_after(timeout)))


async def acheck_grounding(
    answer: str,
    facts: Sequence[FactLike],
    *,
    scorer: ScorerLike = None,
    citation_threshold: float = CITATION_THRESHOLD,
    timeout: float | None = 30.0,  # noqa: ASYNC109 (a deadline of the whole check, as everywhere here)
) -> GroundingCheck:
    """Check how far facts support an answer; see ``check_grounding``."""
    return await arun(_checking(answer, facts, scorer, citation_threshold, deadline_after(timeout)))


def grounding_ledger(
    query: GroundingQuery, scorer: ScorerLike = None, *, deadline: float | None = None
) -> Work[GroundingLedger]:
    """Check an answer against facts for ``wire.google``; a support's ``reference_id`` is the fact's index."""
    sources = [
        GroundingSource(fact.text, attributes=fact.attributes, reference_id=str(number), node_id=str(number))
        for number, fact in enumerate(query.facts)
    ]
    return ground(query.answer, sources, scorer, threshold=query.citation_threshold, deadline=deadline)


async def _checking(
    answer: str, facts: Sequence[FactLike], scorer: ScorerLike, citation_threshold: float, deadline: float | None
) -> GroundingCheck:
    query = _within_limits(answer, facts, citation_threshold)
    ledger = await grounding_ledger(query, scorer, deadline=deadline)
    cited: list[CitedFact] = []
    claims = []
    for claim in ledger.claims:
        indices = []
        for support in claim.supports if claim.verdict is not Verdict.CONTRADICTED else ():
            if support.score >= citation_threshold:
                fact = CitedFact(source=int(support.reference_id), chunk_text=support.quote, span=support.span)
                cited += [] if fact in cited else [fact]
                indices.append(cited.index(fact))
        claims.append(
            CheckedClaim(
                claim_text=claim.text,
                span=claim.span,
                grounding_check_required=claim.check_required,
                citation_indices=indices,
                score=claim.score,
                verdict=claim.verdict,
                lacking=claim.lacking,
            )
        )
    return GroundingCheck(
        support_score=ledger.grounding_score, claims=claims, cited_chunks=cited, warnings=ledger.warnings
    )


def _within_limits(answer: str, facts: Sequence[FactLike], threshold: float) -> GroundingQuery:
    if not answer.strip():
        raise InvalidRequestError("answer: is empty")
    tokens = answer_tokens(answer)
    if tokens > MAX_ANSWER_TOKENS:
        raise InvalidRequestError(f"answer: has {tokens} tokens, at most {MAX_ANSWER_TOKENS} are checked; shorten it")
    if len(facts) > MAX_FACTS:
        raise InvalidRequestError(f"facts: {len(facts)} given, at most {MAX_FACTS} are taken; leave some out")
    if not 0 <= threshold <= 1:
        raise InvalidRequestError(f"citation_threshold: must be from 0 to 1, got {threshold}")
    given = []
    for number, one in enumerate(facts):
        fact = Fact(text=one) if isinstance(one, str) else one if isinstance(one, Fact) else Fact.parse(one)
        if len(fact.text) > MAX_FACT_CHARACTERS:
            raise InvalidRequestError(
                f"facts[{number}]: has {len(fact.text)} characters, at most {MAX_FACT_CHARACTERS} are taken; cut it"
            )
        given.append(fact)
    return GroundingQuery(answer=answer, facts=given, citation_threshold=threshold)


# -- citation quality --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StatementCitations:
    """A statement, whether its cited passages support it, and its correct citations (by reference id)."""

    claim: Claim
    recalled: bool
    precise: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CitationQuality:
    """Citation recall and precision of an answer, as ALCE defines them. None if there are no values to average.

    *Recall* of a statement is 1 if its cited passages together support it, else 0. A citation is *irrelevant* if its
    passage alone does not support the statement and the other citations together do. *Precision* of a citation is 1 if
    its statement's recall is 1 and the citation is not irrelevant, else 0. Recall is averaged over the statements that
    need a check, precision over all citations. (Gao et al., "Enabling Large Language Models to Generate Text with
    Citations", EMNLP 2023, section 4.3.)
    """

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
    """Measure the citations of an answer with its markers against passages by reference id, with any scorer.

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

    statements = [await _statement(claim, supports) for claim in split_claims(answer) if claim.check_required]
    count = sum(len(statement.claim.cited) for statement in statements)
    return CitationQuality(
        recall=sum(statement.recalled for statement in statements) / len(statements) if statements else None,
        precision=sum(len(statement.precise) for statement in statements) / count if count else None,
        statements=statements,
    )


async def _statement(claim: Claim, supports: Callable[[Claim, Sequence[int]], Awaitable[bool]]) -> StatementCitations:
    recalled, precise = await supports(claim, claim.cited), list[int]()
    for number in claim.cited if recalled else ():
        others = [other for other in claim.cited if other != number]
        if not others or await supports(claim, [number]) or not await supports(claim, others):
            precise.append(number)
    return StatementCitations(claim, recalled, tuple(precise))
