"""The short form of the kills; ``python -m tests.kills_sessions`` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills_sessions.harness import Tally, kill_servers, kill_writers
from tests.kills_sessions.postgres import PostgresServer, why_not

needs_postgres = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A real server, for these tests alone: it is killed."""
    with PostgresServer() as server:
        yield server


def whole(tally: Tally, kills: int) -> bool:
    """Whether so many kills cost nothing, and something was there to lose."""
    assert tally.problems == []
    return tally.kills == kills and tally.told >= kills and (tally.lost, tally.broken) == (0, 0)


@pytest.mark.slow
def test_killed_writers_lose_no_turn_in_sqlite(tmp_path: Path) -> None:
    """What a killed process said was stored is there, whole and in order; what it was storing is there whole or not."""
    assert whole(kill_writers(str(tmp_path / "sessions.db"), 3, writers=3), 3)


@pytest.mark.slow
@needs_postgres
def test_killed_writers_lose_no_turn_in_postgresql(postgres: PostgresServer) -> None:
    """The same in PostgreSQL."""
    assert whole(kill_writers(postgres.url, 3, writers=3), 3)


@pytest.mark.slow
@needs_postgres
def test_a_killed_server_loses_no_turn_and_writers_go_on(postgres: PostgresServer) -> None:
    """The server and all its backends are killed under a writer: it waits, goes on, and nothing is lost."""
    assert whole(kill_servers(postgres, 3), 3)
