from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llama_index_agentic_kb import cli
from llama_index_agentic_kb.testing import LoopbackOpenAI
from tests.evaluation.tiny_set import write_set

ROOT = Path(__file__).parent.parent
PAGES = {
    path.name: re.findall(r"^```(\w+)( continuation)?\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name != "server.md"  # tests/server runs it
}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]
LINKS = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """README and docs have no code block that the tests below would pass over."""
    assert {language for language, _, _ in BLOCKS} == {"python", "bash"}


def test_links_lead_to_files() -> None:
    """Each relative link of README and docs names a file, and the README leads to every page of text."""
    named = {}
    for path in (*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")):
        named[path.name] = [(path.parent / link).resolve() for link in LINKS.findall(path.read_text("utf-8"))]
        assert all(target.exists() for target in named[path.name]), path.name
    pages = {page for page in (ROOT / "docs").glob("*.md") if page.name not in {"index.md", "reference.md"}}
    assert pages <= set(named["README.md"])


def facts(page: str) -> list[tuple[str, list[str]]]:
    """Return each section's level with what no translation changes: code, links, figures, and how many rows it has."""
    code = re.findall(r"^```.*?^```$", page, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    kept = r"`[^`\n]+`|\]\((?!README)[^)]+\)|(?<![\w`])\d[\d.,]*\d|(?<![\w`])\d|^\||^- "
    heads = re.split(r"^(#+) .*$", prose, flags=re.MULTILINE)[1:]
    sections = zip(heads[::2], heads[1::2], strict=True)
    return [("code", code), *((level, sorted(re.findall(kept, text, re.MULTILINE))) for level, text in sections)]


def test_the_chinese_readme_is_in_step() -> None:
    """Both READMEs have the same sections, code, links, figures and rows: who changes one changes the other."""
    english, chinese = (facts((ROOT / name).read_text("utf-8")) for name in ("README.md", "README.zh-CN.md"))
    assert chinese == english


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 250


@pytest.mark.slow
def test_python_blocks_run_in_order(
    server: LoopbackOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of each page runs from top to bottom, the README's first block without a key."""
    monkeypatch.chdir(tmp_path)
    pages = {name: [code for language, _, code in blocks if language == "python"] for name, blocks in PAGES.items()}
    exec(compile(pages["README.md"][0], "first.py", "exec"), {})
    assert "Saturn V was 110.6 m tall" in capsys.readouterr().out
    whole = [f"exec(compile({chr(10).join(code)!r}, {name!r}, 'exec'), {{}})" for name, code in pages.items()]
    environment = {**os.environ, "OPENAI_API_KEY": "sk-test", "OPENAI_API_BASE": server.base_url}
    command = [sys.executable, "-c", "\n".join(whole)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "110.6 m tall [ref_id:0]" in done.stdout
    assert "['Tickets cost 12 euros.']" in done.stdout


def test_python_use_is_short() -> None:
    first = next(code for language, _, code in PAGES["README.md"] if language == "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def write_user_files(folder: Path) -> None:
    """Write what README and docs speak of: folders of documents, and a set of questions."""
    documents = {"manuals/pump.md": "# Pump\n\nHold the red button.\n", "notes/today.txt": "Reset on Monday.\n"}
    for name, text in documents.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text, encoding="utf-8")
    write_set(folder / "myset")


@pytest.mark.slow
def test_shell_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' commands exist as make targets, or run as they stand on a user's folders."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    write_user_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shown: dict[str, str] = {}
    for line in "\n".join(code for language, _, code in BLOCKS if language == "bash").splitlines():
        command, *arguments = shlex.split(line) or [""]
        if command == "make":
            assert arguments[0] in targets
        elif command:
            assert command == "agentic-kb"
            done = CliRunner().invoke(cli.app, arguments)
            assert done.exit_code == 0, done.output
            shown[arguments[0]] = done.output
    assert "red button" in shown["ask"]
    assert "ORACLE" in shown["bench"]
    assert (tmp_path / "run.json").is_file()
