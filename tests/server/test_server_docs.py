"""docs/server.md as it stands: its commands, its file, its curl lines, its Python; and the process they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from llama_index_agentic_kb.testing import LoopbackOpenAI, Reply

PAGE = Path(__file__).parents[2].joinpath("docs/server.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
ANSWER = "Hold the red button [ref_id:0]."
ASK = {"messages": [{"role": "user", "content": "How do I reset the pump?"}]}
PROGRAM = [sys.executable, "-c", "from llama_index_agentic_kb.cli import main; main()"]

pytestmark = pytest.mark.slow


class Process:
    """``agentic-kb serve`` in a folder; ``url`` is where it listens, by its own log."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        command = [*PROGRAM, "serve", "kb.yaml"]
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))

    def stop(self) -> list[dict[str, object]]:
        """End it by SIGTERM, and return its log."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=120)
        assert self.process.returncode in (0, -signal.SIGTERM), rest
        return [json.loads(line) for line in [*self.lines, *rest.splitlines()] if line.startswith("{")]


@pytest.fixture(scope="module")
def model() -> Iterator[LoopbackOpenAI]:
    slow = Reply(ANSWER, chunk_size=2, chunk_delay=0.05)
    with LoopbackOpenAI(lambda request: '{"sub_queries": []}' if "You plan" in request.text else slow) as server:
        yield server


@pytest.fixture(scope="module")
def environment(model: LoopbackOpenAI) -> dict[str, str]:
    keys = {"KB_ADMIN_KEY": "admin-0123456789-abcdef", "KB_QUERY_KEY": "query-0123456789-abcdef"}
    openai = {"OPENAI_API_KEY": "sk-test-of-the-server", "OPENAI_BASE_URL": model.base_url}
    return {**os.environ, **openai, **keys, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    made = tmp_path_factory.mktemp("docs")
    (made / "manuals").mkdir()
    (made / "manuals" / "pump.md").write_text("# Pump\n\nTo reset the pump hold the red button.\n")
    (made / "kb.yaml").write_text(next(code for language, code in BLOCKS if language == "yaml") + "port: 0\n")
    ingest = next(line for line in LINES if line.startswith("agentic-kb ingest"))
    subprocess.run([*PROGRAM, *ingest.split()[1:]], cwd=made, env=environment, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def started(processes: list[Process], folder: Path, environment: dict[str, str]) -> Process:
    """The module's server; another one where a test has stopped it."""
    if not processes or processes[-1].process.poll() is not None:
        processes.append(Process(folder, environment))
    return processes[-1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_lines_run(started: Process, environment: dict[str, str]) -> None:
    """Each curl line of the page gets what the page says."""
    lines = [line for line in LINES if line.startswith("curl")]
    shown = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], env={**environment, "KB_URL": started.url}, capture_output=True, text=True, check=True
        )
        assert '"error"' not in done.stdout, done.stdout
        shown.append(done.stdout)
    assert json.loads(shown[0])["response"][0]["content"][0]["text"] == ANSWER
    assert "event: answer.delta" in shown[1]
    assert json.loads(shown[2])["answer"]["answerText"] == "Hold the red button."
    assert {one["name"] for one in json.loads(shown[4])["value"]} == {"kb", "short"}


def test_keys_are_made_by_command(started: Process, folder: Path, environment: dict[str, str]) -> None:
    """A key that the page's command creates is accepted by the running server, and listed without its secret."""
    make, show = [line.split()[1:] for line in LINES if line.startswith("agentic-kb keys")]
    made = subprocess.run([*PROGRAM, *make], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    key = made.stdout.split("key ")[1].strip()
    asked = httpx.post(f"{started.url}/knowledgebases/kb/retrieve", headers={"api-key": key}, json=ASK, timeout=60)
    assert asked.status_code == 200
    listed = subprocess.run([*PROGRAM, *show], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    assert "query" in listed.stdout
    assert key not in listed.stdout


def test_the_python_of_the_page_runs(folder: Path, environment: dict[str, str]) -> None:
    """The page's Python makes an application."""
    code = next(code for language, code in BLOCKS if language == "python")
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True)


async def test_a_store_is_an_mcp_server_over_stdio(folder: Path, environment: dict[str, str]) -> None:
    """The real client starts the page's command and asks."""
    command = next(line for line in re.findall(r"`(agentic-kb mcp [^`]*)`", PAGE)).split()[1:]
    parameters = StdioServerParameters(
        command=PROGRAM[0], args=[*PROGRAM[1:], *command], env=environment, cwd=str(folder)
    )
    async with Client(parameters) as client:
        answered = await client.call_tool("knowledge_base_retrieve", {"query": "How do I reset the pump?"})
    assert ANSWER in answered.content[0].text  # type: ignore[union-attr]


def test_running_answers_are_finished_when_it_stops(started: Process, environment: dict[str, str]) -> None:
    """SIGTERM while an answer streams: the stream ends whole, and the log has each request's id."""
    headers = {"api-key": environment["KB_QUERY_KEY"], "accept": "text/event-stream"}
    url = f"{started.url}/knowledgebases/kb/retrieve"
    with httpx.stream("POST", url, headers=headers, json=ASK, timeout=60) as response:
        request_id, seen = response.headers["request-id"], []
        for line in response.iter_lines():
            seen.append(line)
            if line == "event: answer.delta" and seen.count(line) == 1:
                started.process.send_signal(signal.SIGTERM)
    assert "event: response.completed" in seen
    log = started.stop()
    assert request_id in {entry.get("request_id") for entry in log}
    assert environment["KB_QUERY_KEY"] not in json.dumps(log)
