"""What importing the package adds to importing LlamaIndex, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any, Final

from tests.benchmarks.measure import Row

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
PEER_NAMES: Final = "QueryFusionRetriever, SubQuestionQueryEngine, CitationQueryEngine"


def import_time(runs: int) -> list[Row]:
    """Measure imports, each pair of runs in fresh processes.

    The added time is taken in the process that has just imported ``llama_index.core``: the two belong together.
    """
    if runs > 1:
        _probe(OURS), _probe(PEER)  # compiles, and warms the disk's cache
    pairs = [(_probe(OURS), _probe(PEER)) for _ in range(runs)]
    core, package, names = (1000 * median(ours[part] for ours, _ in pairs) for part in ("core", "package", "names"))
    peer = 1000 * median(theirs["names"] for _, theirs in pairs)
    loaded, loaded_names = (max(len(ours[part]) for ours, _ in pairs) for part in ("loaded", "loaded_names"))
    allowed = f"none of {', '.join(HEAVY)}"
    return [
        Row("import/added by the package", package, BUDGET_MS, "budget", "ms", runs),
        Row("import/added by the package", package, core, "import llama_index.core", "ms", runs),
        Row("import/added by the main names", names, peer, PEER_NAMES, "ms", runs),
        Row("import/heavy modules loaded by the package", loaded, 0, allowed, "modules", runs),
        Row("import/heavy modules loaded by the main names", loaded_names, 0, allowed, "modules", runs),
    ]


def _probe(program: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured
