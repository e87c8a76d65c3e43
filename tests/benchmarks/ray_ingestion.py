"""Core seconds of a document: ingestion on Ray, in one process, and LlamaIndex's ``IngestionPipeline``.

``python -m tests.benchmarks.ray_ingestion --documents 1024 --corpora corpus.jsonl``: the same files, the default
embedding model with one thread, into PostgreSQL; the pipeline embeds and stores into memory. The ways take turns, 512
documents each, so that all meet the same machine; the first turn, in which models are loaded, is left out. Processor
time is compared, which other work disturbs least. Needs the extras [ray] and [postgres].
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
from llama_index.core import SimpleDirectoryReader
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index_agentic_kb import default_embed_model
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.store.ingestion import DEFAULT_CHUNK_OVERLAP, DEFAULT_CHUNK_SIZE
from llama_index_agentic_kb.store.ray_ingestion import ingest_on_ray
from tests.kills_ray.__main__ import actors, write_documents
from tests.kills_sessions.postgres import PostgresServer

TURN = 512
"""The number of documents of a turn."""


def core_seconds(processes: list[Any]) -> float:
    """Return the processor time of processes and of the children that they waited for."""
    times = [one.cpu_times() for one in processes]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


class Turns:
    """The core seconds of each way in each turn."""

    def __init__(self, folders: list[Path], store: KnowledgeStore, model: Any) -> None:
        self._left = list(folders)
        self._store = store
        splitter = SentenceSplitter(chunk_size=DEFAULT_CHUNK_SIZE, chunk_overlap=DEFAULT_CHUNK_OVERLAP)
        self._pipeline = IngestionPipeline(transformations=[splitter, model], vector_store=SimpleVectorStore())
        self._before = 0.0
        self.seconds: dict[str, list[float]] = {"IngestionPipeline": [], "ingest": [], "on Ray": []}

    def progress(self, done: int, total: int, _: str) -> None:
        """Note what a turn took at Ray's actors, which are idle at its end, and give the others their turn."""
        if done % TURN and done != total:
            return
        now = core_seconds([below for one in actors(os.getpid()) for below in (one, *one.children())])
        self.seconds["on Ray"].append(now - self._before)
        self._before, folder, here = now, self._left.pop(0), [psutil.Process()]
        began = core_seconds(here)
        nodes = self._pipeline.run(documents=SimpleDirectoryReader(str(folder)).load_data())
        between = core_seconds(here)
        report = ingest(folder, self._store, source=f"one {folder.name}")
        self.seconds["ingest"].append(core_seconds(here) - between)
        self.seconds["IngestionPipeline"].append(between - began)
        print(f"{done} of {total}: {len(nodes)} chunks, {report.chunks_embedded} by ingest", flush=True)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ray_ingestion", description=__doc__)
    parser.add_argument("--documents", type=int, default=2_048, help="A multiple of 512.")
    parser.add_argument("--corpora", type=Path, nargs="*", default=[], help="Files in BEIR form, for real texts.")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    model = default_embed_model()
    with tempfile.TemporaryDirectory() as root, PostgresServer() as server:
        written, folders = Path(root, "all"), [Path(root, f"turn{at}") for at in range(given.documents // TURN)]
        for folder in (written, *folders):
            folder.mkdir()
        write_documents(written, given.documents, given.corpora)
        for number, path in enumerate(sorted(written.iterdir())):  # by name: each turn has documents of all kinds
            path.rename(folders[number // TURN] / path.name)
        with KnowledgeStore.open(server.url, embed_model=model, create=True) as store:
            turns = Turns(folders, store, model)
            ingest_on_ray([str(folder) for folder in folders], server.url, progress=turns.progress)
    for name, seconds in turns.seconds.items():
        each = sorted(1000 * one / TURN for one in seconds[1:])
        print(f"{name}: {median(each):.0f} core ms a document ({each[0]:.0f} to {each[-1]:.0f} in {len(each)} turns)")


if __name__ == "__main__":
    main()
