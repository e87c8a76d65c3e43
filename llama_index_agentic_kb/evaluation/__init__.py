"""Evaluation: what retrieval finds, what it costs, and whether a difference is one.

A BEIR-form folder goes in (``read_dataset``), systems are run side by side over one index of it (``evaluate``), and a
report with bootstrap intervals comes out. Plans come from a language model, from gold fields, or from a recorded file.
"""

from llama_index_agentic_kb.evaluation.comparison import RunDifference, compare_runs
from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery, read_dataset
from llama_index_agentic_kb.evaluation.metering import Cost, Meter
from llama_index_agentic_kb.evaluation.metrics import (
    all_at,
    bootstrap_interval,
    ndcg_at,
    paired_bootstrap,
    precision_at,
    recall_at,
    reciprocal_rank_at,
)
from llama_index_agentic_kb.evaluation.plans import GoldPlans, PlannedLLM, PlanSource, RecordedPlans
from llama_index_agentic_kb.evaluation.recordings import RecordedRetrieval, assert_same_evidence, recorded_llm
from llama_index_agentic_kb.evaluation.runner import EvaluationRun, QueryResult, SystemRun, aevaluate, evaluate
from llama_index_agentic_kb.evaluation.summary import SystemSummary, summarize
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, System, make_systems

__all__ = [
    "SYSTEMS",
    "CorpusIndex",
    "Cost",
    "Dataset",
    "EvaluationQuery",
    "EvaluationRun",
    "GoldPlans",
    "Meter",
    "PlanSource",
    "PlannedLLM",
    "QueryResult",
    "RecordedPlans",
    "RecordedRetrieval",
    "RunDifference",
    "System",
    "SystemRun",
    "SystemSummary",
    "aevaluate",
    "all_at",
    "assert_same_evidence",
    "bootstrap_interval",
    "compare_runs",
    "evaluate",
    "make_systems",
    "ndcg_at",
    "paired_bootstrap",
    "precision_at",
    "read_dataset",
    "recall_at",
    "reciprocal_rank_at",
    "recorded_llm",
    "summarize",
]
