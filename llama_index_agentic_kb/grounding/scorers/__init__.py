"""Scorers of claims: exact features, the shipped cross-encoder, a named classifier, or a language model as judge."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from llama_index.core.llms import LLM

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.grounding.claims import (
    PARTIAL_THRESHOLD,
    ClaimScore,
    ClaimScorer,
    Evidence,
    Rival,
    verdict_of,
)
from llama_index_agentic_kb.grounding.features import Premise
from llama_index_agentic_kb.grounding.scorers.judges import CrossEncoderScorer, LLMJudge, PairModel
from llama_index_agentic_kb.grounding.scorers.lexical import LexicalScorer, SmallScorer
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD

__all__ = [
    "BETTER", "CITATION_THRESHOLD", "PARTIAL_THRESHOLD", "ClaimScore", "ClaimScorer", "CrossEncoderScorer", "Evidence",
    "LLMJudge", "LexicalScorer", "PairModel", "Premise", "Rival", "ScorerLike", "SmallScorer", "as_scorer",
    "downloaded", "verdict_of",
]  # fmt: skip

ScorerLike = ClaimScorer | LLM | PairModel | str | None

BETTER: Final = (
    "MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli",
    "lytang/MiniCheck-DeBERTa-v3-Large",
    "lytang/MiniCheck-RoBERTa-Large",
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
    "cross-encoder/nli-deberta-v3-large",
    "cross-encoder/nli-deberta-v3-base",
)
"""Larger fact-checking and NLI models, best first; "auto" uses the first one that is already downloaded."""


def as_scorer(scorer: ScorerLike) -> ClaimScorer:
    """Return the scorer for a name, a model or a scorer.

    Args:
        scorer: "auto" or None selects the best local model: one of ``BETTER`` in Hugging Face's cache, if
            sentence-transformers is installed, else the shipped cross-encoder. "lexical" selects the features alone,
            "small" the shipped cross-encoder; any other text names a model or its folder. A language model is used as
            judge, a loaded cross-encoder is wrapped, and a scorer is returned unchanged.

    Raises:
        ConfigurationError: The value is of another type, or its model cannot be loaded.
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
    name = downloaded() or "small" if name == "auto" else name
    if name in ("lexical", "small"):
        return LexicalScorer() if name == "lexical" else SmallScorer()
    if "/" not in name and not Path(name).expanduser().is_dir():
        raise ConfigurationError(
            f"scorer: {name!r} is unknown; known are auto, lexical, small, a model's full name (owner/name), its folder"
        )
    return CrossEncoderScorer(name)


def downloaded() -> str | None:
    """Return the best model of ``BETTER`` in Hugging Face's cache, without network access. None if there is none."""
    if find_spec("sentence_transformers") is None:
        return None
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    places = {name: hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/model.safetensors") for name in BETTER}
    return next((name for name, found in places.items() if any(found)), None)
