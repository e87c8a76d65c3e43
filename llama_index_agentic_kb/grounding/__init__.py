"""Grounding: what an answer's reference markers point at."""

from llama_index_agentic_kb.grounding.answers import AnswerFilter, AnswerRules, CheckedText, clean_answer
from llama_index_agentic_kb.grounding.citations import MarkerFilter, cited_ids, clean_markers

__all__ = [
    "AnswerFilter",
    "AnswerRules",
    "CheckedText",
    "MarkerFilter",
    "cited_ids",
    "clean_answer",
    "clean_markers",
]
