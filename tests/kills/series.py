"""SIGKILL at random times while a store is filled or repaired; after each one, is everything still there?

The work is done in forked processes, which start in milliseconds, an interpreter with LlamaIndex in seconds. What
forks imports everything and never opens a store: Chroma does not survive a fork.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from llama_index.core.schema import MetadataMode
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb.schema.answer import Answer, ChunkReference, Session
from llama_index_agentic_kb.store import KnowledgeStore, database, ingest, ingestion, postgres, repair_store
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.testing import HashEmbedding
from tests.kills_sessions.postgres import PostgresServer

Tell: TypeAlias = Callable[[Any], None]


FORK = multiprocessing.get_context("fork")


class Child:
    def __init__(self, work: Callable[[Tell], None]) -> None:
        # One send of a short line is whole or not there, whenever the process is killed.
        self._heard, told = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=work, args=(told.send,))
        self._process.start()
        told.close()

    def end(
        self, seconds: float, *, kill: bool = False, after: int = 0, strike: Callable[[], None] | None = None
    ) -> tuple[list[Any], int]:
        """Wait for its end, or kill it so many seconds after it has sent ``after`` lines; ``strike`` comes instead."""
        lines: list[Any] = []
        deadline = time.monotonic() + (300.0 if after else seconds)
        while True:
            if self._heard.poll(max(0.0, deadline - time.monotonic())):
                try:
                    lines.append(self._heard.recv())
                except (EOFError, OSError):  # OSError: within a line
                    break
                if after and len(lines) >= after:
                    after, deadline = 0, time.monotonic() + seconds
            elif strike is not None:
                strike()
                strike, deadline = None, time.monotonic() + 300.0
            else:
                self._process.kill()
                if not kill:
                    raise TimeoutError(f"a process did not end within {seconds:g} s; it told {lines[-3:]!r}")
                deadline = time.monotonic() + 10.0
        self._process.join()
        assert self._process.exitcode is not None
        return lines, self._process.exitcode

    def answer(self, seconds: float = 300.0) -> Any:
        """Wait for its end and return what it has sent last."""
        lines, code = self.end(seconds)
        if code != 0 or not lines:
            raise RuntimeError(f"a process ended with {code}")
        return lines[-1]


DIMENSIONS = 384  # as all-MiniLM-L6-v2 has

FILES = 120
CHANGED = 0.6  # the share of the files that each round writes anew, renames or deletes

BATCH = 64
"""Chunks that are stored together; 256 outside of tests, which would take four times the files for as many batches."""

GRAPH = 100  # chunks from which on there is a graph; 20,000 outside of tests

SEARCHED = 25
SOURCE = "docs"

_WORDS = [f"{a}{b}" for a in ("ba", "ko", "mi", "ru", "te", "zo") for b in ("lan", "dor", "vik", "sen", "mar", "tul")]


@dataclass
class Result:
    kills: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: int = 0
    not_found: int = 0
    tried: int = 0
    graphs: int = 0


def kills_during_ingestion(
    kills: int, folder: Path, seed: int, tell: Callable[[str], None], server: PostgresServer | None = None
) -> Result:
    """Kill ingestions of a folder whose files change from round to round."""
    drawn = random.Random(seed)
    docs, where = folder / SOURCE, str(folder / "store") if server is None else server.url
    docs.mkdir(parents=True)
    result = Result()
    files = FILES if server is None else FILES // 3
    _change(docs, drawn, 1.0, files)
    told: dict[str, str] = {}
    while result.kills < kills:
        before = dict(told)
        _change(docs, drawn, CHANGED, files)
        child = Child(lambda told: _ingest(docs, where, told))
        # Each third of the kills: while it opens and reads, anywhere, and soon after a batch was stored.
        after = drawn.choice([0, drawn.randrange(files), files // 3])
        moment = drawn.uniform(0.0, 0.2 if after else 1.5)
        if server is not None and result.kills % 2:
            lines, code = child.end(moment, after=after, strike=partial(restart, server))
            result.kills += 1
            assert code == 0, "the writer did not outlive the server"
        else:
            lines, code = child.end(moment, kill=True, after=after)
        acknowledged = {path: _hash(docs / path) for path in lines}
        told.update(acknowledged)
        result.kills += code < 0
        result.acknowledged += len(acknowledged)
        now = {path.name: _hash(path) for path in docs.iterdir()}
        seen = Child(lambda told: told(_look(where))).answer()
        _judge(result, seen, told, before, now)
        told = dict(seen["documents"])
        tell(f"{result.kills:3}/{kills} {len(acknowledged)} acknowledged")
    return result


def restart(server: PostgresServer) -> None:
    server.kill()
    server.start()


def kills_during_repair(
    kills: int, folder: Path, seed: int, tell: Callable[[str], None], server: PostgresServer | None = None
) -> Result:
    """Damage a store's vectors and kill what repairs them, again and again; see ``kills_during_ingestion``."""
    assert server is None, "PostgreSQL has no files to repair"
    drawn = random.Random(seed)
    docs, where = folder / SOURCE, folder / "store"
    docs.mkdir(parents=True)
    result = Result()
    _change(docs, drawn, 1.0)
    lines, _ = Child(lambda told: _ingest(docs, where, told)).end(300.0)
    told = {path: _hash(docs / path) for path in lines}
    longest = 4.0
    while result.kills < kills:
        _damage(where)
        _, code = Child(lambda _: _repair(where)).end(drawn.uniform(0.02, longest), kill=True)
        result.kills += code < 0
        longest = longest * 0.9 if code >= 0 else longest * 1.01
        seen = Child(lambda told: told(_look(where))).answer()
        _judge(result, seen, told, told, told)
        tell(f"{result.kills:3}/{kills}")
    return result


def _judge(
    result: Result, seen: dict[str, Any], told: dict[str, str], before: dict[str, str], now: dict[str, str]
) -> None:
    """What was told is there; what wasn't is as before or as the file is now, and gone only with its file."""
    there: dict[str, str] = seen["documents"]
    for path, wanted in told.items():
        allowed = {wanted, before.get(path, wanted), now.get(path, wanted)} if wanted == before.get(path) else {wanted}
        if there.get(path, "") not in allowed and path in now:
            result.lost.append(path)
    result.not_found += seen["not_found"]
    result.doubled += seen["doubled"]
    result.tried += seen["tried"]
    result.graphs += seen["graph"]


def _ingest(docs: Path, where: Path | str, told: Tell) -> None:
    ingestion._BATCH_CHUNKS = BATCH
    database.EXACT_ROWS = GRAPH
    postgres.INDEXED_ROWS = GRAPH
    with KnowledgeStore.open(where, embed_model=_model(), create=True) as store:
        ingest(docs, store, progress=lambda _done, _total, path: told(Path(path).name))


def _repair(where: Path) -> None:
    database.EXACT_ROWS = GRAPH
    repair_store(where)


def _look(where: Path | str) -> dict[str, Any]:
    """Open a store as a program does that answers questions, and look at all that it holds."""
    with KnowledgeStore.open(where, embed_model=_model(), create=True) as store:
        store.put_source(SOURCE)  # an ingestion may have been killed before it made it
        nodes = {node.node_id: node for node in store.nodes(SOURCE)}
        drawn = random.Random(len(nodes)).sample(sorted(nodes), min(SEARCHED, len(nodes)))
        state = store._source_state(SOURCE)
        return {
            "documents": {path: one.content_hash for path, one in store.stored_documents(SOURCE).items()},
            "not_found": sum(not _is_found(store, nodes[node_id]) for node_id in drawn),
            "tried": len(drawn),
            "graph": bool(state and state.graph),
            "doubled": len(nodes) - len({(one.ref_doc_id, one.metadata["chunk_index"]) for one in nodes.values()}),
        }


def _is_found(store: KnowledgeStore, node: Any) -> bool:
    vector = _model().get_text_embedding(node.get_content(MetadataMode.EMBED))
    found, _ = store.vectors(SOURCE).filtered_search(VectorStoreQuery(query_embedding=vector, similarity_top_k=10))
    by_vector = node.node_id in (found.ids or []) or max(found.similarities or [0.0]) > 1 - 1e-5
    by_words = node.node_id in {hit.node_id for hit in store.lexical(SOURCE).search(node.text, 20, None)}
    return by_vector and by_words


def _model() -> HashEmbedding:
    return HashEmbedding(dimensions=DIMENSIONS, embed_batch_size=64)


def _change(docs: Path, drawn: random.Random, share: float, files: int = FILES) -> None:
    """Write so large a share of the files anew; a few of them are not written but deleted."""
    for number in range(files):
        path = docs / f"{number:04}.md"
        if drawn.random() > share:
            continue
        if drawn.random() < 0.05:
            path.unlink(missing_ok=True)
            continue
        paragraphs = [" ".join(drawn.choices(_WORDS, k=60)) + "." for _ in range(drawn.randrange(1, 9))]
        path.write_text(f"# Number {number}\n\n" + "\n\n".join(paragraphs), encoding="utf-8")


def _damage(where: Path) -> None:
    """Cut the graph's file; a reader goes on without it."""
    for file in (where / "graphs").glob("*"):
        os.truncate(file, file.stat().st_size // 2)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


OWNER = "alice"
WRITERS = 3
LONGEST_WAIT = 0.15  # seconds after a turn was told, at most, before a kill: it hits a write, or the time between two


def kills_of_sessions(
    kills: int, folder: Path, seed: int, tell: Callable[[str], None], server: PostgresServer | None = None
) -> Result:
    """Kill writers that are at work on one session, and in turn the server under one, which goes on writing."""
    url, drawn = str(folder / "sessions.db") if server is None else server.url, random.Random(seed)
    result, first = Result(), 1
    while result.kills < kills:
        with SessionStore(url) as store:
            session_id = store.create(OWNER).id
        strike = partial(restart, server) if server is not None and result.kills % (WRITERS + 1) == WRITERS else None
        writers = 1 if strike else min(WRITERS, kills - result.kills)
        turns = 30 if strike else 1_000_000
        group = [Child(partial(_write, url, session_id, first + 1_000_000 * at, turns)) for at in range(writers)]
        lines: list[str] = []
        for child in group:
            told, code = child.end(drawn.uniform(0.0, LONGEST_WAIT), kill=True, after=2, strike=strike)
            assert strike is None or code == 0, "the writer did not outlive the server"
            lines += told
            result.kills += 1
        with SessionStore(url) as store:
            _check(store.get(OWNER, session_id, include_answers=True), lines, result)
        first += 1_000
        tell(f"{result.kills:3}/{kills} {len(lines)} turns told")
    return result


def _write(url: str, session_id: str, first: int, turns: int, told: Tell) -> None:
    with SessionStore(url, timeout=60.0) as store:
        for number in range(first, first + turns):
            turn = store.add_turn(OWNER, session_id, f"question {number}", _payload(number))
            told(f"{number} {turn.number}")


def _payload(number: int) -> Answer:
    """Return the answer of a number, always the same; some are long enough for many pages of the database."""
    words = random.Random(number)
    text = " ".join(str(words.random()) for _ in range(words.choice((1, 50, 3000))))
    return Answer(id=f"a{number}", text=text, references=[ChunkReference(chunk=str(number), content=text[::-1])])


def _check(session: Session, lines: list[str], result: Result) -> None:
    """What was told is there, in its place; what is there is whole, told or not."""
    there = {int(turn.answer_id[1:]): turn for turn in session.turns}
    result.acknowledged += len(lines)
    result.tried += len(there)
    for number, place in (map(int, line.split()) for line in lines):
        if number not in there or there[number].number != place:
            result.lost.append(f"turn {number}, told as {place}")
    for place, (number, turn) in enumerate(there.items(), start=1):
        if (turn.number, turn.answer, turn.query) != (place, _payload(number), f"question {number}"):
            result.lost.append(f"turn {place} is not whole")
    result.doubled += len(session.turns) - len(there)
