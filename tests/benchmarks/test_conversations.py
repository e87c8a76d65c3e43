"""The benchmark of conversations runs, on a set of one conversation for each of two sources."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

from llama_index_agentic_kb.evaluation import CorpusIndex, read_dataset
from llama_index_agentic_kb.testing import HashEmbedding
from tests.benchmarks.conversations import Bench, cases_of, run

ROCKETS = ["Who built the Saturn V rocket?", "How tall was it?", "And its thrust?"]
GARDENS = ["What is compost made of?", "How long does it take?", "And in winter?"]


def test_every_system_answers_every_case(tmp_path: Path) -> None:
    """Questions in their conversation, and after the other one; the scope keeps what a small corpus holds."""
    corpus, queries, qrels = [], [], ["query-id\tcorpus-id\tscore"]
    for source, texts in {"rockets": ROCKETS, "gardens": GARDENS, "more rockets": ROCKETS}.items():
        kind, history = source.split()[-1], list[dict[str, str]]()
        for at, text in enumerate(texts):
            corpus.append({"_id": f"{source}{at}", "title": "", "text": text, "metadata": {"source": kind}})
            queries.append({"_id": f"{source}<{at}", "text": text, "rewrite": text, "history": history, "source": kind})
            qrels.append(f"{source}<{at}\t{source}{at}\t1")
            history = [*history, {"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    for name, rows in (("corpus.jsonl", corpus), ("queries.jsonl", queries)):
        (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    (tmp_path / "qrels.tsv").write_text("\n".join(qrels), "utf-8")
    dataset = read_dataset(tmp_path)
    cases = cases_of(dataset)
    assert {case.kind for case in cases} >= {"first", "continuing", "shift, other source"}
    assert {case.half for case in cases} == {0, 1}
    corpus_index = CorpusIndex(dataset, HashEmbedding(), tmp_path / "vectors", source_field="source")
    with closing(corpus_index) as index, Bench(index, dataset) as bench:
        scores = asyncio.run(run(bench, cases, dataset))
    continuing = {system: score.row()[0] for (part, system), score in scores.items() if part == "continuing"}
    assert set(continuing) == {
        *("last message", "previous + last", "gold rewrite", "the article's", "ours", "ours, scope"),
    }
    assert continuing["ours"] == continuing["ours, scope"]
