from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kills_sessions.postgres import why_not

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_was_told_as_stored_outlives_sigkill(tmp_path: Path) -> None:
    """The short form of ``python -m tests.kills``: writers, repairs and PostgreSQL killed; nothing is lost."""
    kills = {"ingestion": 2, "repair": 1, "sessions": 4}
    kills |= {} if why_not() else {"postgres": 2, "sessions in postgres": 4}
    options = ["--kills", "2", "--repairs", "1", "--sessions", "4", "--postgres", str(kills.get("postgres", 0))]
    command = [sys.executable, "-m", "tests.kills", *options, "--out", str(tmp_path / "kills")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "kills").read_text())
    assert {name: result["kills"] for name, result in results.items()} == kills
    for result in results.values():
        assert (result["lost"], result["doubled"], result["not_found"]) == ([], 0, 0)
        assert result["tried"] > 0
