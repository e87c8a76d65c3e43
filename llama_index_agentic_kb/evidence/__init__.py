"""Evidence: from the ranked lists of many searches to one list, each piece with its provenance.

    candidates (every node once) ─▶ reranking ─▶ fusion, each sub-query's best covered ─▶ arrangement (neighbours, caps)

``gathering`` goes this way; ``options`` says how.
"""

from llama_index_agentic_kb.evidence.gathering import Counts, Fusion, Gathered, gather_evidence
from llama_index_agentic_kb.evidence.options import EvidenceOptions
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance, references

__all__ = [
    "PROVENANCE_KEY",
    "Counts",
    "EvidenceOptions",
    "Fusion",
    "Gathered",
    "gather_evidence",
    "provenance",
    "references",
]
