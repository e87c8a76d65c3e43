"""Evaluation: measures the quality and cost of retrieval, and whether differences are significant.

``read_dataset`` reads a folder in BEIR form, ``evaluate`` runs several systems over one index of it, and ``render_run``
prints a report with bootstrap intervals. Plans come from a language model, from gold fields, or from a recorded file.
"""

from llama_index_agentic_kb.evaluation.dataset import (
    Dataset,
    EvaluationQuery,
    PlannedLLM,
    gold_steps,
    read_dataset,
    recorded_plans,
)
from llama_index_agentic_kb.evaluation.runner import METRICS, EvaluationRun, evaluate, render_run
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, CorpusIndex, Cost, Meter, QueryResult, make_systems

__all__ = [
    "METRICS",
    "SYSTEMS",
    "CorpusIndex",
    "Cost",
    "Dataset",
    "EvaluationQuery",
    "EvaluationRun",
    "Meter",
    "PlannedLLM",
    "QueryResult",
    "evaluate",
    "gold_steps",
    "make_systems",
    "read_dataset",
    "recorded_plans",
    "render_run",
]
