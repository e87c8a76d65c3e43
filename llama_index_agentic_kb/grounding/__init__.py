"""Grounding: what an answer's reference markers point at, and what its claims rest on.

Markers and answer rules load at once; the ledger, its scorers, metrics and ranking load when first asked for.
``repair`` is a module: ``from llama_index_agentic_kb.grounding.repair import repair``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llama_index_agentic_kb.grounding.answers import AnswerFilter, AnswerRules, CheckedText, clean_answer
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, cited_ids, clean_markers

if TYPE_CHECKING:
    from llama_index_agentic_kb.grounding.check import acheck_grounding, check_grounding, grounding_ledger
    from llama_index_agentic_kb.grounding.claims import Claim, split_claims
    from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground, grounding_score
    from llama_index_agentic_kb.grounding.metrics import acitation_quality, citation_quality
    from llama_index_agentic_kb.grounding.ranking import arank, rank
    from llama_index_agentic_kb.grounding.repair import Repaired, is_low_grounded
    from llama_index_agentic_kb.grounding.scorers import ClaimScorer, CrossEncoderScorer, LexicalScorer, LLMJudge
    from llama_index_agentic_kb.grounding.settings import Grounding
    from llama_index_agentic_kb.grounding.spans import TextOffsets

_MODULES = {
    "Claim": "claims",
    "ClaimScorer": "scorers",
    "CrossEncoderScorer": "scorers",
    "Grounding": "settings",
    "GroundingSource": "ledger",
    "LLMJudge": "scorers",
    "LexicalScorer": "scorers",
    "Repaired": "repair",
    "TextOffsets": "spans",
    "acheck_grounding": "check",
    "acitation_quality": "metrics",
    "arank": "ranking",
    "check_grounding": "check",
    "citation_quality": "metrics",
    "ground": "ledger",
    "grounding_ledger": "check",
    "grounding_score": "ledger",
    "is_low_grounded": "repair",
    "rank": "ranking",
    "split_claims": "claims",
}

__all__ = [
    "AnswerFilter",
    "AnswerRules",
    "CheckedText",
    "Claim",
    "ClaimScorer",
    "CrossEncoderScorer",
    "Grounding",
    "GroundingSource",
    "LLMJudge",
    "LexicalScorer",
    "MarkerFilter",
    "Markers",
    "Repaired",
    "TextOffsets",
    "acheck_grounding",
    "acitation_quality",
    "arank",
    "check_grounding",
    "citation_quality",
    "cited_ids",
    "clean_answer",
    "clean_markers",
    "ground",
    "grounding_ledger",
    "grounding_score",
    "is_low_grounded",
    "rank",
    "split_claims",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
