from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI
from tests.evaluation.tiny_set import write_set

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)( continuation)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def reply(request: ChatRequest) -> str:
    if "You plan searches" in request.text:
        return json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V"}]})
    return "The Saturn V was 110.6 m tall [ref_id:0]."


def environment(server: LoopbackOpenAI) -> dict[str, str]:
    """Give the environment of a user with a key, whose requests go to the loopback server."""
    return {**os.environ, "OPENAI_API_KEY": "sk-test", "OPENAI_API_BASE": server.base_url}


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """The README has no code block that the tests below would pass over."""
    assert {language for language, _, _ in BLOCKS} == {"python", "bash"}


@pytest.mark.slow
def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    """The README's Python runs from top to bottom, the first block without a key."""
    blocks = [code for language, _, code in BLOCKS if language == "python"]
    first = tmp_path / "first.py"
    first.write_text(blocks[0], encoding="utf-8")
    keyless = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    done = subprocess.run(
        [sys.executable, first], env=keyless, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Saturn V was 110.6 m tall" in done.stdout
    whole = tmp_path / "whole.py"
    whole.write_text("\n".join(blocks), encoding="utf-8")
    with LoopbackOpenAI(reply) as server:
        done = subprocess.run(
            [sys.executable, whole], env=environment(server), cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "110.6 m tall [ref_id:0]" in done.stdout
    assert "['Tickets cost 12 euros.']" in done.stdout


def test_python_use_is_short() -> None:
    """The first use from Python has at most 15 lines of code."""
    first = next(code for language, _, code in BLOCKS if language == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


@pytest.mark.slow
def test_shell_blocks_run(tmp_path: Path) -> None:
    """The README's commands exist as make targets, or run as they stand on a user's folders."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for folder in ("manuals", "notes"):
        (tmp_path / folder).mkdir()
    (tmp_path / "manuals" / "pump.md").write_text(
        "# Pump\n\nHold the red button to reset the pump.\n", encoding="utf-8"
    )
    (tmp_path / "notes" / "today.txt").write_text("The pump was reset on Monday.\n", encoding="utf-8")
    write_set(tmp_path / "myset")
    keyless = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    told: dict[str, str] = {}
    for line in "\n".join(code for language, _, code in BLOCKS if language == "bash").splitlines():
        if not line:
            continue
        command, *arguments = line.split()
        if command == "make":
            assert arguments[0] in targets
            continue
        binary = Path(sys.executable).parent / command
        done = subprocess.run(
            f"{binary} {line.removeprefix(command)}",
            shell=True,
            env=keyless,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told[arguments[0]] = done.stdout
    assert "red button" in told["ask"]
    assert "ORACLE" in told["bench"]
    assert (tmp_path / "run.json").is_file()
