"""Grounding: checks an answer's reference markers, and the evidence for its claims.

    claims ─▶ features ─▶ scorers ─▶ ledger ─▶ repair          citations: markers and links of an answer

The names that stand alone are imported on first access.
"""

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "check": "acheck_grounding acitation_quality check_grounding citation_quality grounding_ledger",
    "ledger": "ground",
    "scorers": "ClaimScorer CrossEncoderScorer LLMJudge LexicalScorer",
    "settings": "Grounding",
    "spans": "TextOffsets",
}


def __getattr__(name: str) -> Any:
    """Import a name from its module on first access (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
