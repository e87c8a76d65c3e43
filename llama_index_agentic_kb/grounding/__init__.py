"""Grounding: checks an answer's reference markers and the evidence for its claims.

Names are imported on first access. ``repair`` is a module:
``from llama_index_agentic_kb.grounding.repair import repair``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index_agentic_kb.grounding.answers import AnswerFilter as AnswerFilter
    from llama_index_agentic_kb.grounding.answers import AnswerRules as AnswerRules
    from llama_index_agentic_kb.grounding.answers import CheckedText as CheckedText
    from llama_index_agentic_kb.grounding.answers import clean_answer as clean_answer
    from llama_index_agentic_kb.grounding.check import acheck_grounding as acheck_grounding
    from llama_index_agentic_kb.grounding.check import check_grounding as check_grounding
    from llama_index_agentic_kb.grounding.check import grounding_ledger as grounding_ledger
    from llama_index_agentic_kb.grounding.citations import MarkerFilter as MarkerFilter
    from llama_index_agentic_kb.grounding.citations import Markers as Markers
    from llama_index_agentic_kb.grounding.citations import cited_ids as cited_ids
    from llama_index_agentic_kb.grounding.citations import clean_markers as clean_markers
    from llama_index_agentic_kb.grounding.claims import Claim as Claim
    from llama_index_agentic_kb.grounding.claims import split_claims as split_claims
    from llama_index_agentic_kb.grounding.ledger import GroundingSource as GroundingSource
    from llama_index_agentic_kb.grounding.ledger import ground as ground
    from llama_index_agentic_kb.grounding.ledger import grounding_score as grounding_score
    from llama_index_agentic_kb.grounding.metrics import acitation_quality as acitation_quality
    from llama_index_agentic_kb.grounding.metrics import citation_quality as citation_quality
    from llama_index_agentic_kb.grounding.ranking import arank as arank
    from llama_index_agentic_kb.grounding.ranking import rank as rank
    from llama_index_agentic_kb.grounding.repair import is_low_grounded as is_low_grounded
    from llama_index_agentic_kb.grounding.scorers import ClaimScorer as ClaimScorer
    from llama_index_agentic_kb.grounding.scorers import CrossEncoderScorer as CrossEncoderScorer
    from llama_index_agentic_kb.grounding.scorers import LexicalScorer as LexicalScorer
    from llama_index_agentic_kb.grounding.scorers import LLMJudge as LLMJudge
    from llama_index_agentic_kb.grounding.settings import Grounding as Grounding
    from llama_index_agentic_kb.grounding.spans import TextOffsets as TextOffsets

_HOMES = {
    "answers": "AnswerFilter AnswerRules CheckedText clean_answer",
    "check": "acheck_grounding check_grounding grounding_ledger",
    "citations": "MarkerFilter Markers cited_ids clean_markers",
    "claims": "Claim split_claims",
    "ledger": "GroundingSource ground grounding_score",
    "metrics": "acitation_quality citation_quality",
    "ranking": "arank rank",
    "repair": "is_low_grounded",
    "scorers": "ClaimScorer CrossEncoderScorer LLMJudge LexicalScorer",
    "settings": "Grounding",
    "spans": "TextOffsets",
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [*_HOME_OF]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import a name from its module on first access (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
