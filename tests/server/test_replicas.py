"""Two servers on one PostgreSQL behind a plain TCP balancer: one is replaced, one is killed under load."""

from __future__ import annotations

import pytest

from tests.kills_sessions.postgres import why_not
from tests.server.replicas import Load, replace_and_kill

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


async def test_servers_come_and_go_under_load() -> None:
    """Definitions made on one server hold on both; every request is answered at last, and no answered turn is lost."""

    async def wait(load: Load) -> None:
        await load.more(4)

    load, lost, _ = await replace_and_kill(4, wait, rolled=1)
    assert (load.failed, lost) == ([], 0)
    assert load.turns >= 16
