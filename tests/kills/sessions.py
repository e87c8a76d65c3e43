"""Writers of sessions, or the server under them, are killed: no turn is lost, and none is half there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llama_index_agentic_kb.schema.answer import Answer, ChunkReference, Session
from llama_index_agentic_kb.store.sessions import SessionStore
from tests.kills.series import Child, Result, Tell, restart
from tests.kills_sessions.postgres import PostgresServer

OWNER = "alice"
WRITERS = 3
LONGEST_WAIT = 0.15
"""Seconds after a turn was told, at most, before a kill: it hits a write, or the time between two."""


def kills_of_sessions(
    kills: int, folder: Path, seed: int, tell: Callable[[str], None], server: PostgresServer | None = None
) -> Result:
    """Kill writers that are at work on one session, and in turn the server under one, which goes on writing."""
    url, drawn = str(folder / "sessions.db") if server is None else server.url, random.Random(seed)
    result, began, first = Result(), time.monotonic(), 1
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
    result.seconds = time.monotonic() - began
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
