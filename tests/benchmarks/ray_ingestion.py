"""Core seconds of a document: ingestion on Ray, in one process, and LlamaIndex's ``IngestionPipeline``.

``python -m tests.benchmarks.ray_ingestion --documents 20000``: the same files, the default embedding model with one
thread, into PostgreSQL; the pipeline embeds and stores into memory. Processor time is compared, which other work on
the machine disturbs least; what is loaded once is left out. Needs the extras [ray] and [postgres].
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
from llama_index.core import SimpleDirectoryReader
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index_agentic_kb import default_embed_model
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.store.ray_ingestion import ingest_on_ray
from tests.kills_ray.__main__ import actors, write_documents
from tests.kills_sessions.postgres import PostgresServer


def core_seconds(processes: list[Any]) -> float:
    """Return the processor time of processes and of the children that they waited for."""
    times = [one.cpu_times() for one in processes]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


def on_ray(folder: str, url: str) -> float:
    """Return the core seconds of a document at actors, after the first batches, for which each loads its model."""
    seen: list[tuple[int, float]] = []

    def progress(done: int, total: int, _: str) -> None:
        print(f"{done} of {total}", flush=True)
        seen.append((done, core_seconds([below for one in actors(os.getpid()) for below in (one, *one.children())])))

    ingest_on_ray([folder], url, progress=progress)
    start = len(seen) // 3
    return (seen[-1][1] - seen[start][1]) / (seen[-1][0] - seen[start][0])


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ray_ingestion", description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    documents = parser.parse_args().documents
    os.environ["OMP_NUM_THREADS"] = "1"
    model, found = default_embed_model(), {}
    with tempfile.TemporaryDirectory() as root, PostgresServer() as server:
        folder = Path(root) / "docs"
        folder.mkdir()
        write_documents(folder, documents)
        began = time.process_time()
        splitter = SentenceSplitter(chunk_size=254, chunk_overlap=32)
        pipeline = IngestionPipeline(transformations=[splitter, model], vector_store=SimpleVectorStore())
        nodes = pipeline.run(documents=SimpleDirectoryReader(str(folder)).load_data())
        found["IngestionPipeline"] = (time.process_time() - began) / documents
        print(f"{len(nodes)} nodes, {found}", flush=True)
        with KnowledgeStore.open(server.url, embed_model=model, create=True) as store:
            began = core_seconds([psutil.Process()])
            report = ingest(folder, store, source="one")
            found["ingest"] = (core_seconds([psutil.Process()]) - began) / documents
            print(f"{report.chunks_embedded} chunks, {found}", flush=True)
            store.remove_source("one")
        found["on Ray"] = on_ray(str(folder), server.url)
    for name, seconds in found.items():
        print(f"{name}: {1000 * seconds:.0f} core ms a document")


if __name__ == "__main__":
    main()
