"""Asks recorded questions again and again, idle and beside busy processes, and compares the planning model's prompts.

What a prompt holds may depend on what was searched, not on which search came first or on how busy the machine is. Each
question's prompts are compared byte for byte with those of its first run in which nothing was missing; a difference
must be named in the account.

    python -m tests.benchmarks.same_prompts FOLDER --plans FILE.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource, RetrieverOptions
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    PlannedLLM,
    read_dataset,
    recorded_plans,
)
from llama_index_agentic_kb.evaluation.dataset import Steps
from tests.benchmarks.measure import busy


class _NotingLLM(PlannedLLM):
    """A model with given plans that notes its prompts."""

    _prompts: list[str] = PrivateAttr(default_factory=list)

    def __init__(self, steps: Steps, queries: Sequence[EvaluationQuery]) -> None:
        super().__init__("given plans", steps, queries)

    def reply_to(self, prompt: str) -> str:
        """Note the prompt, and return the planned reply."""
        self._prompts.append(prompt)
        return super().reply_to(prompt)


class PromptRuns:
    """Repeated runs of the same questions over a corpus, searched as two sources: hybrid, and by words alone.

    Args:
        dataset: The questions and their documents.
        steps: The plan and the answers of a question.
        embed_model: Embeds documents and queries; queries anew in each run.
        cache: Where the documents' vectors are kept.
    """

    def __init__(self, dataset: Dataset, steps: Steps, embed_model: BaseEmbedding, cache: Path) -> None:
        self._queries = dataset.queries
        self._first: dict[str, list[str]] = {}
        self.differences: list[str] = []
        """The changed lines of prompts that differ without being named."""
        self._corpus = CorpusIndex(dataset, embed_model, cache)
        self.close = self._corpus.close
        self._llm = _NotingLLM(steps, dataset.queries)
        words = [KnowledgeSource(f"words of {name}", retriever=one) for name, one in self._corpus.lexical.items()]
        self.sources = [*self._corpus.sources(), *words]

    def run(self, runs: int) -> Counter[str]:
        """Return the number of questions with "equal" prompts, a "named" difference, or an "unnamed" one."""
        options = RetrieverOptions(embedding_cache=None, spotlighting=None)  # marks are random
        retriever = AgenticRetriever(self.sources, llm=self._llm, effort="medium", options=options)
        found: Counter[str] = Counter()
        for query in [*self._queries] * runs:
            made = run(retriever.retrieval(retriever.request_for(query.text)))
            prompts, self._llm._prompts = self._llm._prompts, []
            found["prompts"] += len(prompts)
            named = made.missing or any("the model read without" in text for text in made.outcome.plan.warnings)
            if not named:
                self._first.setdefault(query.id, prompts)
            if prompts == self._first.get(query.id):
                found["equal"] += 1
            elif named:
                found["named"] += 1
            else:
                found["unnamed"] += 1
                self.differences += _difference(query.id, self._first[query.id], prompts)
        return found


def _difference(question: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the lines that differ between the prompts of two runs, each after its question."""
    before, after = ("\n".join(prompts).splitlines() for prompts in (first, second))
    lines = [*unified_diff(before, after, lineterm="", n=0)][2:]
    return [f"{question} {line[:160]}" for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, run, and print both counts; the exit code says whether a difference was not named."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.same_prompts", description=__doc__)
    parser.add_argument("folder", type=Path, help="a set in BEIR form")
    parser.add_argument("--plans", type=Path, required=True, help="recorded plans and answers, as for agentic-kb bench")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10, help="idle, and as many beside busy processes")
    parser.add_argument("--busy", type=int, default=8, help="busy processes")
    parser.add_argument("--cache", type=Path, default=Path(gettempdir()) / "agentic-kb-vectors")
    chosen = parser.parse_args(arguments)
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    plans: Mapping[str, Any] = recorded_plans(chosen.plans)
    dataset = read_dataset(chosen.folder)
    asked = [query.id for query in dataset.queries if query.id in plans][: chosen.questions]
    made = PromptRuns(
        dataset.only(asked, "not asked"), lambda query: plans[query.id], default_embed_model(), chosen.cache
    )
    idle = made.run(chosen.runs)
    with busy(chosen.busy):
        loaded = made.run(chosen.runs)
    made.close()
    for name, found in (("idle", idle), (f"beside {chosen.busy} busy processes", loaded)):
        print(f"{name}: {len(asked)} questions, {chosen.runs} runs, {dict(found)}")
    print("\n".join(made.differences[:40]))
    sys.exit(bool(idle["unnamed"] or loaded["unnamed"]))


if __name__ == "__main__":
    main()
