"""Scorers of claims: exact features, the shipped cross-encoder, a named classifier, or a language model as judge."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from llama_index.core.llms import LLM

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.grounding.scorers.base import (
    CITATION_THRESHOLD,
    PARTIAL_THRESHOLD,
    ClaimScore,
    ClaimScorer,
    Evidence,
    Premise,
    Rival,
    verdict_of,
)
from llama_index_agentic_kb.grounding.scorers.cross_encoder import CrossEncoderScorer, PairModel
from llama_index_agentic_kb.grounding.scorers.judge import JUDGE_TEMPLATE, LLMJudge
from llama_index_agentic_kb.grounding.scorers.lexical import LexicalScorer, SmallScorer
from llama_index_agentic_kb.grounding.scorers.small import is_shipped

__all__ = [
    "CITATION_THRESHOLD",
    "JUDGE_TEMPLATE",
    "PARTIAL_THRESHOLD",
    "ClaimScore",
    "ClaimScorer",
    "CrossEncoderScorer",
    "Evidence",
    "LLMJudge",
    "LexicalScorer",
    "PairModel",
    "Premise",
    "Rival",
    "ScorerLike",
    "SmallScorer",
    "as_scorer",
    "verdict_of",
]

ScorerLike = ClaimScorer | LLM | PairModel | str | None


def as_scorer(scorer: ScorerLike) -> ClaimScorer:
    """Return the scorer that is meant.

    Args:
        scorer: "auto" or None takes the best that is on the machine: the shipped cross-encoder, else the features.
            "lexical" and "small" are these two by name; any other text names a model or its folder; a language model
            becomes the judge; a loaded cross-encoder is wrapped; a scorer is taken as it is.

    Raises:
        ConfigurationError: It is of another kind, or cannot be loaded.
    """
    if scorer is None or isinstance(scorer, str):
        return _named(scorer or "auto")
    if isinstance(scorer, LLM):
        return LLMJudge(scorer)
    if isinstance(scorer, ClaimScorer) and callable(getattr(scorer, "score", None)):
        return scorer
    if callable(getattr(scorer, "predict", None)):
        model: Any = scorer
        return CrossEncoderScorer(model)
    raise ConfigurationError(f"scorer: expected a scorer, a model or a name, got {type(scorer).__name__}")


@cache
def _named(name: str) -> ClaimScorer:
    if name == "auto":
        return SmallScorer() if is_shipped() else LexicalScorer()
    if name == "lexical":
        return LexicalScorer()
    if name == "small":
        return SmallScorer()
    if "/" not in name and not Path(name).expanduser().is_dir():
        raise ConfigurationError(
            f"scorer: {name!r} is unknown; known are auto, lexical, small, a model's full name (owner/name), its folder"
        )
    return CrossEncoderScorer(name)
