"""What importing the package adds to importing LlamaIndex, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any, Final

from tests.benchmarks.report import Row

__all__ = ["import_time"]

BUDGET_MS: Final = 50
HEAVY: Final = ("torch", "chromadb", "transformers", "openai")

OURS: Final = f"""
import json, sys, time
def heavy():
    return [name for name in {HEAVY!r} if name in sys.modules]
start = time.perf_counter()
import llama_index.core
core = time.perf_counter()
before = heavy()
import llama_index_agentic_kb as package
added = time.perf_counter()
loaded = heavy()
package.KnowledgeBase, package.KnowledgeSource, package.AgenticRetriever, package.AgenticQueryEngine
names = time.perf_counter()
print(json.dumps({{
    "core": core - start, "package": added - core, "names": names - added,
    "loaded": [name for name in loaded if name not in before], "loaded_names": heavy(),
}}))
"""

PEER: Final = """
import json, time
import llama_index.core
core = time.perf_counter()
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.query_engine import CitationQueryEngine, SubQuestionQueryEngine
print(json.dumps({"names": time.perf_counter() - core}))
"""


def import_time(runs: int) -> list[Row]:
    """Measure imports, each pair of runs in fresh processes.

    The added time is taken in the process that has just imported ``llama_index.core``: the two belong together.
    """
    if runs > 1:
        _probe(OURS), _probe(PEER)  # compiles, and warms the disk's cache
    pairs = [(_probe(OURS), _probe(PEER)) for _ in range(runs)]

    def milliseconds(side: int, name: str) -> float:
        return float(1000 * median(pair[side][name] for pair in pairs))

    def most_loaded(name: str) -> int:
        return max(len(pair[0][name]) for pair in pairs)

    none_allowed = f"none of {', '.join(HEAVY)}"
    return [
        Row("import/added by the package", milliseconds(0, "package"), BUDGET_MS, "budget", "ms", runs),
        Row(
            "import/added by the package",
            milliseconds(0, "package"),
            milliseconds(0, "core"),
            "import llama_index.core",
            "ms",
            runs,
        ),
        Row(
            "import/added by the main names",
            milliseconds(0, "names"),
            milliseconds(1, "names"),
            "QueryFusionRetriever, SubQuestionQueryEngine, CitationQueryEngine",
            "ms",
            runs,
        ),
        Row("import/heavy modules loaded by the package", most_loaded("loaded"), 0, none_allowed, "modules", runs),
        Row(
            "import/heavy modules loaded by the main names",
            most_loaded("loaded_names"),
            0,
            none_allowed,
            "modules",
            runs,
        ),
    ]


def _probe(program: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
