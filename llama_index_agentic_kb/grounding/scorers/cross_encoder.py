"""A local classifier as scorer: any NLI or fact-checking cross-encoder that sentence-transformers can run.

The user chooses and loads the model: HHEM, MiniCheck, an NLI DeBERTa, ...; nothing is downloaded here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb.errors import ConfigurationError, RetrievalError
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.scorers.base import ClaimScore, Evidence, Premise, verdict_of
from llama_index_agentic_kb.grounding.scorers.lexical import bearing_spans, nearest_premises
from llama_index_agentic_kb.grounding.sentences import sentence_ends

__all__ = ["CrossEncoderScorer", "PairModel"]

_MOST_PASSAGES: Final = 8
_WINDOW: Final = 1_600
"""Characters of a passage that are given at once: about 400 tokens of English, where most models take 512."""


class PairModel(Protocol):
    """What scores pairs of texts, as sentence-transformers' ``CrossEncoder`` does."""

    def predict(self, sentences: list[tuple[str, str]], **kwargs: Any) -> Any:
        """Give a number for each pair, or one for each pair and label."""
        ...


class CrossEncoderScorer:
    """Scores claims with a classifier that reads passage and claim together.

        CrossEncoderScorer(CrossEncoder("cross-encoder/nli-deberta-v3-base"), entailment=1, contradiction=0)

    Args:
        model: Loaded by the user.
        entailment: The label whose probability is the score, for models with several labels (their order differs:
            look it up). None (default) is for models that give one number.
        contradiction: The label that says otherwise; None where there is none.
        passages: Passages that each claim is held against: those with most of its words. Default 8.
        window: Characters of a passage that are given at once, whole sentences; default 1,600.
        batch_size: Pairs that are computed at once; default 16.
    """

    def __init__(
        self,
        model: PairModel,
        *,
        entailment: int | None = None,
        contradiction: int | None = None,
        passages: int = _MOST_PASSAGES,
        window: int = _WINDOW,
        batch_size: int = 16,
    ) -> None:
        if not callable(getattr(model, "predict", None)):
            raise ConfigurationError(f"model: expected a CrossEncoder, got {type(model).__name__}")
        if passages < 1 or window < 1 or batch_size < 1:
            raise ConfigurationError("passages, window, batch_size: must be at least 1")
        if contradiction is not None and entailment is None:
            raise ConfigurationError("contradiction: give entailment as well")
        self.model = model
        self.name = f"cross-encoder {_name_of(model)}".strip()
        self.entailment = entailment
        self.contradiction = contradiction
        self.passages = passages
        self.window = window
        self.batch_size = batch_size
        # A tokenizer fails when two threads use it, and the model takes all cores anyway.
        self._pool = WorkerPool("claim-scorer", max_workers=1)

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims on the model's one thread; see ``ClaimScorer``.

        Raises:
            RetrievalError: The model gave something else than a number for each pair.
            DeadlineExceededError: It was late.
        """
        work = partial(self._score, [claim.plain for claim in claims], premises)
        scores: list[ClaimScore] = await Call(sync=work, deadline=deadline, pool=self._pool, what=self.name)
        return scores

    def _score(self, claims: Sequence[str], premises: Sequence[Premise]) -> list[ClaimScore]:
        chosen = nearest_premises(claims, premises, self.passages)
        windows = {number: _windows(premises[number], self.window) for numbers in chosen for number in numbers}
        pairs = [
            (claim, number, window)
            for claim, numbers in enumerate(chosen)
            for number in numbers
            for window in windows[number]
        ]
        if not pairs:
            return [ClaimScore(0.0, verdict_of(0.0)) for _ in claims]
        asked = [(window, claims[claim]) for claim, _, window in pairs]
        given = self.model.predict(asked, batch_size=self.batch_size, show_progress_bar=False)
        rows = _rows(given, len(pairs), self.name)
        best: list[dict[int, tuple[float, float]]] = [{} for _ in claims]
        for (claim, number, _), row in zip(pairs, rows, strict=True):
            supports, denies = self._read(row)
            known = best[claim].get(number, (0.0, 0.0))
            best[claim][number] = (max(known[0], supports), max(known[1], denies))
        return [_claim_score(claim, found, premises) for claim, found in zip(claims, best, strict=True)]

    def _read(self, row: Sequence[float]) -> tuple[float, float]:
        """Give the probabilities of entailment and of contradiction."""
        if self.entailment is None:
            if len(row) != 1:
                raise ConfigurationError(f"entailment: {self.name} has {len(row)} labels, say which one entails")
            return _as_probability(row[0]), 0.0
        if self.entailment >= len(row) or (self.contradiction or 0) >= len(row):
            raise ConfigurationError(f"entailment: {self.name} has only {len(row)} labels")
        shares = _softmax(row)
        return shares[self.entailment], 0.0 if self.contradiction is None else shares[self.contradiction]


def _claim_score(claim: str, found: dict[int, tuple[float, float]], premises: Sequence[Premise]) -> ClaimScore:
    ranked = sorted(found, key=lambda number: (-found[number][0], number))
    evidence = [Evidence(number, found[number][0], bearing_spans(claim, premises[number])) for number in ranked]
    score = evidence[0].score if evidence else 0.0
    denied = max((denies for _, denies in found.values()), default=0.0)
    return ClaimScore(score, verdict_of(score, contradicted=denied > max(score, 0.5)), evidence)


def _windows(premise: Premise, size: int) -> list[str]:
    """Cut a passage into stretches of whole sentences, each headed by its title and attributes."""
    head = "\n".join(
        part for part in (premise.title, *(f"{key}: {value}" for key, value in premise.attributes.items())) if part
    )
    cuts, start, last = [], 0, 0
    for end, following in sentence_ends(premise.text):
        if end - start > size and last > start:
            cuts.append(premise.text[start:last])
            start = last
        last = following
    cuts.append(premise.text[start:])
    texts = [cut.strip() for cut in cuts if cut.strip()] or [premise.text]
    return [f"{head}\n{text}" if head else text for text in texts]


def _rows(given: Any, count: int, name: str) -> list[list[float]]:
    """Read what a model gave: numbers, or rows of them, of numpy, torch or Python."""
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    rows = [list(map(float, row)) if isinstance(row, (list, tuple)) else [float(row)] for row in listed]
    if len(rows) != count or not all(row and all(map(math.isfinite, row)) for row in rows):
        raise RetrievalError(f"{name}: expected {count} finite scores, got {len(rows)} rows")
    return rows


def _as_probability(value: float) -> float:
    """Give a score from 0 to 1 as it is, any other through the logistic function."""
    if 0 <= value <= 1:
        return value
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, value))))


def _softmax(row: Sequence[float]) -> list[float]:
    if all(0 <= value <= 1 for value in row) and math.isclose(sum(row), 1.0, abs_tol=1e-3):
        return list(row)
    highest = max(row)
    shares = [math.exp(value - highest) for value in row]
    return [share / sum(shares) for share in shares]


def _name_of(model: Any) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    return name.rsplit("/", 1)[-1] if isinstance(name, str) and name else type(model).__name__
