"""Evidence: turns the ranked lists of many searches into one list of nodes with provenance.

    candidates (deduplicated) ─▶ reranking ─▶ fusion, each sub-query's best covered ─▶ postprocessing ─▶ arrangement

``gathering`` runs this pipeline; ``EvidenceOptions`` configures it.
"""

from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY, provenance, references
from llama_index_agentic_kb.evidence.gathering import EvidenceOptions, gather_evidence

__all__ = ["PROVENANCE_KEY", "EvidenceOptions", "gather_evidence", "provenance", "references"]
