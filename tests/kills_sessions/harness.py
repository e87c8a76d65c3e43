"""Kills writers, or the server under them, and looks at what is stored."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from llama_index_agentic_kb.schema.answer import Session
from llama_index_agentic_kb.store.sessions import SessionStore
from tests.kills_sessions.writer import OWNER, payload

FIRST_TURN_SECONDS = 120.0
LONGEST_WAIT = 0.15
"""Seconds after a turn was told, at most, before a kill: it hits a write, or the time between two."""


@dataclass
class Tally:
    """What came of the kills."""

    kills: int = 0
    told: int = 0
    """Turns that a writer said were stored."""
    stored: int = 0
    lost: int = 0
    """Told, and not there."""
    broken: int = 0
    """There, and not whole; or out of order."""
    under_way: int = 0
    """There without being told: the kill came between the two."""
    longest_gap: float = 0.0
    """Seconds without a stored turn, where a writer outlived the server."""
    problems: list[str] = field(default_factory=list)


class Writer:
    """A process that stores turns."""

    def __init__(self, url: str, session_id: str, first: int) -> None:
        command = [sys.executable, "-m", "tests.kills_sessions.writer", url, session_id, str(first)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.told: list[tuple[int, int]] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # killed while it told: what it says is not whole
            with self._came:
                number, turn = line.split()
                self.told.append((int(number), int(turn)))
                self._came.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until it has told so many turns."""
        with self._came:
            if not self._came.wait_for(lambda: len(self.told) >= count, FIRST_TURN_SECONDS):
                raise TimeoutError(f"the writer told {len(self.told)} turns, exit code {self.process.poll()}")

    def kill(self) -> None:
        """Kill it (SIGKILL), and read what it told to the end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def kill_writers(url: str, kills: int, writers: int = 2, seed: int = 0) -> Tally:
    """Kill so many writers, several at work on one session, each at some moment of a write."""
    moments, tally = random.Random(seed), Tally()
    with SessionStore(url) as store:
        _kill_writers(store, url, kills, writers, moments, tally)
    return tally


def _kill_writers(
    store: SessionStore, url: str, kills: int, writers: int, moments: random.Random, tally: Tally
) -> None:
    session_id = store.create(OWNER).id
    first = 1
    while tally.kills < kills:
        group = [Writer(url, session_id, first + 1_000_000 * at) for at in range(min(writers, kills - tally.kills))]
        for writer in group:
            writer.wait_for(1)
        for writer in group:
            writer.wait_for(len(writer.told) + 1)
            time.sleep(moments.uniform(0, LONGEST_WAIT))
            writer.kill()
            tally.kills += 1
        told = {number: turn for writer in group for number, turn in writer.told}
        _check(store.get(OWNER, session_id, include_answers=True), told, tally)
        session_id = store.create(OWNER).id  # another one: what was checked is not read again
        first += 1000


def kill_servers(server: Any, kills: int, seed: int = 0) -> Tally:
    """Kill the server so many times while one process goes on writing into it."""
    moments, tally = random.Random(seed), Tally()
    with SessionStore(server.url) as store:
        _kill_servers(store, server, kills, moments, tally)
    return tally


def _kill_servers(store: SessionStore, server: Any, kills: int, moments: random.Random, tally: Tally) -> None:
    session_id = store.create(OWNER).id
    writer = Writer(server.url, session_id, 1)
    try:
        for _ in range(kills):
            writer.wait_for(len(writer.told) + 2)
            time.sleep(moments.uniform(0, LONGEST_WAIT))
            server.kill()
            tally.kills += 1
            killed = time.monotonic()
            server.start()
            writer.wait_for(len(writer.told) + 1)
            tally.longest_gap = max(tally.longest_gap, time.monotonic() - killed)
    finally:
        writer.kill()
    _check(store.get(OWNER, session_id, include_answers=True), dict(writer.told), tally)


def _check(session: Session, told: dict[int, int], tally: Tally) -> None:
    """Count what is lost, broken, or stored without having been told."""
    by_number = {int(turn.answer_id[1:]): turn for turn in session.turns}
    tally.told += len(told)
    tally.stored += len(session.turns)
    tally.under_way += len(set(by_number) - set(told))
    for number, turn_number in told.items():
        if number not in by_number or by_number[number].number != turn_number:
            tally.lost += 1
            tally.problems.append(f"turn {number} was told as {turn_number}, and is not there")
    for place, turn in enumerate(session.turns, start=1):
        answer = turn.answer
        number = int(turn.answer_id[1:])
        if turn.number != place or answer != payload(number) or turn.query != f"question {number}":
            tally.broken += 1
            tally.problems.append(f"turn {place} is not whole: {turn.answer_id}")
