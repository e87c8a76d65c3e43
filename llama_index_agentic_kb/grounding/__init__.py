"""Grounding: what an answer's reference markers point at."""

from llama_index_agentic_kb.grounding.citations import MarkerFilter, cited_ids, clean_markers

__all__ = ["MarkerFilter", "cited_ids", "clean_markers"]
