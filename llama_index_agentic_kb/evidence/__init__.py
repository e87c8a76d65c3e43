"""Evidence: from the ranked lists of many searches to one list, each piece with its provenance.

    candidates (every node once) ─▶ reranking ─▶ fusion, each sub-query's best covered ─▶ postprocessing ─▶ arrangement

``gathering`` goes this way; its ``EvidenceOptions`` say how.
"""

from llama_index_agentic_kb.evidence.gathering import EvidenceOptions, gather_evidence
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance, references

__all__ = ["PROVENANCE_KEY", "EvidenceOptions", "gather_evidence", "provenance", "references"]
