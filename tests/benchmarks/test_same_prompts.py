"""The comparison of prompts runs, and can fail."""

from __future__ import annotations

from pathlib import Path

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.evaluation import gold_steps, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.benchmarks.same_prompts import PromptRuns, busy
from tests.evaluation.tiny_set import write_set


def test_prompts_are_the_same_on_a_busy_machine(tmp_path: Path) -> None:
    """Two searches of each step and a reading between them: every run has the prompts of the first, byte for byte."""
    made = PromptRuns(read_dataset(write_set(tmp_path / "set")), gold_steps, HashEmbedding(), tmp_path / "cache")
    idle = made.run(2)
    with busy(2):
        loaded = made.run(2)
    assert idle["unnamed"] == loaded["unnamed"] == 0
    assert idle["prompts"] > idle["equal"]
    made.sources.append(KnowledgeSource("new", retriever=MemoryRetriever(["Silent Harbour was directed by nobody."])))
    assert made.run(1)["unnamed"] > 0
    made.close()
