from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_was_told_as_stored_outlives_sigkill(tmp_path: Path) -> None:
    """The short form of ``python -m tests.kills``: ingestions and a repair killed at random; nothing is lost."""
    command = [sys.executable, "-m", "tests.kills", "--kills", "2", "--repairs", "1", "--out", str(tmp_path / "kills")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "kills").read_text())
    assert {name: result["kills"] for name, result in results.items()} == {"ingestion": 2, "repair": 1}
    for result in results.values():
        assert (result["lost"], result["not_found"]) == ([], 0)
        assert result["tried"] > 0
