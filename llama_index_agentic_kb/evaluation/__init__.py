"""Evaluation: what retrieval finds, what it costs, and whether a difference is one.

A BEIR-form folder goes in (``read_dataset``), systems are run side by side over one index of it (``evaluate``), and a
report with bootstrap intervals comes out (``report``). Plans come from a language model, from gold fields, or from a
recorded file.
"""

from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery, read_dataset
from llama_index_agentic_kb.evaluation.meter import Cost, Meter
from llama_index_agentic_kb.evaluation.plans import PlannedLLM, gold_steps, recorded_plans
from llama_index_agentic_kb.evaluation.runner import METRICS, EvaluationRun, QueryResult, SystemRun, evaluate
from llama_index_agentic_kb.evaluation.systems import SYSTEMS, System, make_systems

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
    "System",
    "SystemRun",
    "evaluate",
    "gold_steps",
    "make_systems",
    "read_dataset",
    "recorded_plans",
]
