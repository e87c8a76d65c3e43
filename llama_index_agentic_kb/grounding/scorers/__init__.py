"""Scorers of claims: a language model as judge, a local classifier, or alignment without either."""

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
from llama_index_agentic_kb.grounding.scorers.lexical import LexicalScorer

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
    "verdict_of",
]
