"""Kills actors, drivers and PostgreSQL while Ray ingests, and counts: ``python -m tests.kills_ray --kills 30``.

Each victim is killed by its process id (SIGKILL), after a time drawn at random. A driver is started again as a user
would; the server as its supervisor would. At the end every document must be stored once, with the chunks that an
undisturbed ingestion makes, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types

from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.store.ray_ingestion import ingest_on_ray
from llama_index_agentic_kb.testing import HashEmbedding
from tests.kills_sessions.postgres import PostgresServer

ACTOR = "ray::_Worker"


def write_documents(folder: Path, count: int, corpora: Sequence[Path] = ()) -> None:
    """Write the texts of corpora in BEIR form as documents, or else generated ones of three chunks each."""
    lines = itertools.chain.from_iterable(corpus.read_text().splitlines() for corpus in corpora)
    texts = (f"# {row['title']}\n\n{row['text']}\n" for row in map(json.loads, lines) if row["text"].strip())
    for number in range(count):
        words = " ".join(f"word{(number + at) % 997}" for at in range(600))
        text = next(texts) if corpora else f"# Document {number}\n\n{words}\n"
        (folder / f"{number}.md").write_text(text)


def drive(folder: str, url: str) -> None:
    report = ingest_on_ray([folder], url, embed_model=HashEmbedding(latency=0.2), cpus=0.5)
    print(len(report.added), len(report.unchanged), report.failed, flush=True)
    sys.exit(bool(report.failed))


def actors(driver: int) -> list[psutil.Process]:
    try:
        return [one for one in psutil.Process(driver).children(recursive=True) if ACTOR in " ".join(one.cmdline()[:1])]
    except psutil.NoSuchProcess:
        return []


class Series:
    """Kills, one after another, with a pause of ``pause`` seconds in the mean."""

    def __init__(self, drive: list[str], server: PostgresServer, pause: float, seed: int) -> None:
        self._command = [sys.executable, "-m", "tests.kills_ray", *drive]
        self._server = server
        self._pause = pause
        self._chance = random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.drivers = 0

    def run(self, kills: int) -> None:
        """Ingest again and again until a driver ends well, and kill until there were enough kills."""
        while True:
            self.drivers += 1
            driver = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
            self._disturb(driver, kills)
            if driver.wait() == 0:
                return

    def _disturb(self, driver: subprocess.Popen[bytes], kills: int) -> None:
        while driver.poll() is None and not actors(driver.pid):
            time.sleep(0.2)
        while driver.poll() is None and self.killed.total() < kills:
            time.sleep(self._chance.uniform(0.3, 1.7) * self._pause)
            running = actors(driver.pid)
            if driver.poll() is not None or not running:
                continue
            victim = self._chance.choices(["actor", "server", "driver"], [6, 3, 1])[0]
            self.killed[victim] += 1
            print(f"{self.killed.total()}: {victim}", flush=True)
            if victim == "actor":
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._chance.choice(running).kill()
            elif victim == "driver":
                below = psutil.Process(driver.pid).children(recursive=True)
                driver.kill()
                psutil.wait_procs(below, timeout=30)  # they end with their driver
                return
            else:
                self._server.kill()
                time.sleep(self._chance.uniform(0, 2))
                self._server.start()


def compare(folder: Path, url: str) -> tuple[int, int]:
    """Return how many chunks are lost and how many doubled, beside those into which the documents are cut here."""
    with KnowledgeStore.open(folder.with_name("undisturbed"), embed_model=HashEmbedding(), create=True) as store:
        ingest(folder, store)
        right = Counter(node.node_id for node in store.nodes(folder.name))
    with KnowledgeStore.open(url, embed_model=HashEmbedding()) as store:
        found = Counter(node.node_id for node in store.nodes(folder.name))
    print(f"{right.total()} chunks expected, {found.total()} stored", flush=True)
    return (right - found).total(), (found - right).total()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills_ray", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpora", type=Path, nargs="*", default=[], help="Files in BEIR form, for real texts.")
    parser.add_argument("--pause", type=float, default=1.75, help="The mean time between kills in seconds.")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(*given.drive)
    with tempfile.TemporaryDirectory() as root, PostgresServer() as server:
        folder = Path(root) / "docs"
        folder.mkdir()
        write_documents(folder, given.documents, given.corpora)
        began = time.monotonic()
        series = Series(["--drive", str(folder), server.url], server, given.pause, given.seed)
        series.run(given.kills)
        lost, doubled = compare(folder, server.url)
    print(f"killed: {dict(series.killed)}; {series.drivers} drivers in {time.monotonic() - began:.0f} s")
    print(f"{lost} lost, {doubled} doubled")
    sys.exit(bool(lost or doubled or series.killed.total() < given.kills))


if __name__ == "__main__":
    main()
