from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from llama_index_agentic_kb import cli
from llama_index_agentic_kb._terminal import Watch
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.testing import LoopbackOpenAI

runner = CliRunner()


def invoke(*arguments: str | Path, status: int = 0, **options: Any) -> Result:
    """Run a command, which must end with this status."""
    done = runner.invoke(cli.app, [*map(str, arguments)], **options)
    assert done.exit_code == status, done.output
    return done


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small store, ingested through the command line."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in {
        "rockets": "The Saturn V was 110.6 m tall.",
        "missions": "Apollo 11 flew on a Saturn V.",
    }.items():
        (folder / name).mkdir()
        (folder / name / "one.md").write_text(f"# {name.title()}\n\n{text}\n", encoding="utf-8")
    done = invoke("ingest", folder / "rockets", folder / "missions", "--store", folder / "kb")
    assert "2 added" in done.output
    assert "rockets: 1 documents, 1 chunks" in done.output
    return folder / "kb"


@pytest.mark.slow
def test_ask_without_a_key_gives_extracts(store: Path) -> None:
    """Without a key ``ask`` prints numbered extracts and says how to get more."""
    done = invoke("ask", "How tall was the Saturn V?", "--store", store)
    assert "[1] Rockets" in done.output
    assert "110.6 m tall" in done.output
    assert "OPENAI_API_KEY" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_what_is_done(
    store: Path, server: LoopbackOpenAI, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Searches and the text so far are shown and removed again; a pipe receives the result alone."""
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, force_terminal=terminal, width=100))
    seen: list[str] = []

    class Seen(Watch):
        def write(self, text: str) -> None:
            seen.append(text)
            super().write(text)

    monkeypatch.setattr(cli, "Watch", Seen)
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    invoke("ask", "How tall was it?", "--store", store)
    assert ("".join(seen) == "It was 110.6 m tall [ref_id:0].", "\x1b[2K" in out.getvalue()) == (terminal, terminal)
    assert (len(seen) > 1) == terminal
    assert "It was 110.6 m tall [1]." in out.getvalue().rsplit("Answer", 1)[1]


@pytest.mark.slow
def test_commands_that_need_no_model_load_none(store: Path, tmp_path: Path) -> None:
    """Neither LlamaIndex nor torch, so that they start in under a second."""
    kept = shutil.copytree(store, tmp_path / "kb")
    (config := tmp_path / "kb.yaml").write_text("stores: []")
    stored = [["list"], ["info"], ["repair"], ["ingest", str(store.parent / "rockets")], ["remove", "missions"]]
    keys = [["keys", str(config), *more] for more in ([], ["--new", "query"])]
    commands = [["--version"], ["--help"], *([*one, "--store", str(kept)] for one in stored), *keys]
    program = (
        "import json, sys\nfrom llama_index_agentic_kb import cli\nfor command in json.loads(sys.argv[1]):\n"
        "    cli.app(command, standalone_mode=False)\n"
        "    print(command, [name for name in ('llama_index', 'torch', 'chromadb') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" []\n") == len(commands), done.stdout


@pytest.mark.slow
def test_repair_tells_what_it_did(store: Path, tmp_path: Path) -> None:
    """A whole store is left alone; ``--rebuild`` builds its indexes again; damaged documents are refused."""
    kept = Path(shutil.copytree(store, tmp_path / "kb"))
    assert "The store is whole: 2 documents, 2 chunks" in invoke("repair", "--store", kept).output
    shutil.rmtree(kept / "lexical")
    done = invoke("repair", "--store", kept, "--rebuild")
    assert "built again: the indexes of 2 documents, 2 chunks" in " ".join(done.output.split())
    invoke("ask", "How tall was the Saturn V?", "--store", kept, "--json")
    (kept / "documents.db").write_bytes(b"nothing")
    invoke("repair", "--store", kept, status=1)


@pytest.mark.slow
def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    """Kinds that are not read make status 3, files that can't be read status 1; the others are stored."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "good.md").write_text("Snow falls.")
    for at in range(25):
        (docs / f"{at}.png").write_bytes(b"\x89PNG")
    arguments = ("ingest", docs, "--store", tmp_path / "kb")
    shown = " ".join(invoke(*arguments, status=3).output.split())
    assert ("1 added" in shown, "25 skipped" in shown) == (True, True)
    assert "0.png:isofakindthatisnotread(.png)" in shown.replace(" ", "")  # a long path is wrapped
    assert "and 5 more" in shown
    (docs / "bad.json").write_text("{")
    invoke(*arguments, status=1)
    invoke("list", *arguments[2:])


@pytest.mark.slow
def test_a_path_that_is_not_there_is_an_error(store: Path, tmp_path: Path) -> None:
    """No empty store is made of a slip of the pen; one that is there takes the other paths, and the status says so."""
    invoke("ingest", tmp_path / "TYPO", "--store", tmp_path / "kb", status=1)
    assert not (tmp_path / "kb").exists()
    kept = Path(shutil.copytree(store, tmp_path / "kept"))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "titan.md").write_text("---\nacl_public: true\n---\nTitan has lakes.", encoding="utf-8")
    stamp = ("--tenant", "acme", "--group", "hr", "--group", "it")
    done = invoke("ingest", tmp_path / "TYPO", tmp_path / "more", "--store", kept, *stamp, status=1)
    assert "1 added" in done.output
    with KnowledgeStore.open(kept) as opened:
        (node,) = opened.nodes("more")
    access = {key: value for key, value in node.metadata.items() if key.startswith(("tenant", "acl_"))}
    assert access == {"tenant": "acme", "acl_group_hr": True, "acl_group_it": True, "acl_public": False}


@pytest.mark.parametrize("arguments", [["ask", "x", "--store", "no"], ["ask", "x", "--model", "m"], ["bench", "."]])
def test_errors_are_short(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be done is an error and its remedy on stderr and exit status 1, no traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["agentic-kb", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr().err
    assert left.value.code == 1
    assert shown.startswith("agentic-kb: ")
    assert "More: docs/troubleshooting.md#" in shown.splitlines()[-1]
    assert "Traceback" not in shown


@pytest.mark.parametrize(("command", "extra"), [("ingest", "ocr"), ("plan-capacity", "capacity"), ("serve", "server")])
def test_help_names_the_extra_that_a_command_needs(command: str, extra: str) -> None:
    """Square brackets would be rich's markup, and not shown."""
    assert f"Needs the extra {extra}." in re.sub(r"[│\s]+", " ", invoke(command, "--help").output)


@pytest.mark.slow
def test_demo_shows_extracts_and_the_recorded_answer(tmp_path: Path) -> None:
    """The demo prints extracts over all three sources, then the recorded answer with its real sources."""
    before, after = invoke("demo", "--store", tmp_path / "demo").output.split("RECORDED")
    assert "Extracts (" in before
    for source in ("missions", "vehicles", "destinations"):
        assert source in before
    assert "Titan IVB" in before
    assert "121.6 g of Bennu [" in " ".join(after.split())
    assert "could not be read" not in after
    assert "claims supported" in after
    assert "q4.2" in after
    for title in ("OSIRIS-REx", "Hayabusa2", "Bennu", "Ryugu", "Atlas V", "H-IIA"):
        assert title in after.split("Sources")[1]


def test_a_store_is_looked_at_and_emptied(store: Path, tmp_path: Path) -> None:
    """``list``, ``info`` and ``doctor`` show a store, ``remove`` takes a source away; what is not there is an error."""
    kept = shutil.copytree(store, tmp_path / "kb")
    assert invoke("--version").output.startswith("0.")
    invoke("--", status=2)
    assert "rockets: 1 documents, 1 chunks" in invoke("list", "--store", kept).output
    assert "all-MiniLM-L6-v2" in invoke("info", "--store", kept).output
    assert "store: 2 sources" in invoke("doctor", "--store", kept).output
    invoke("doctor", "--store", tmp_path / "none", status=1)
    invoke("remove", "rockets", "--store", kept)
    assert "rockets" not in invoke("list", "--store", kept).output


@pytest.mark.slow
def test_ask_searches_what_is_named(store: Path) -> None:
    """``--source`` and ``--filter`` narrow a question; a source that the store lacks is an error."""
    asked = ("ask", "How tall was the Saturn V?", "--store", store)
    narrowed = invoke(*asked, "--source", "missions", "--json")
    found = RetrievalResponse.parse(narrowed.stdout).references
    assert {reference.knowledge_source_name for reference in found} == {"missions"}
    none = invoke(*asked, "--filter", "title eq 'Nothing'", "--json")
    assert not RetrievalResponse.parse(none.stdout).references
    refused = str(invoke(*asked, "--source", "moons", status=1).exception)
    assert ("moons" in refused, "rockets" in refused) == (True, True)


def test_options_stand_in_a_file(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """agentic-kb.toml holds options by name; one that no command has is an error."""
    monkeypatch.chdir(tmp_path)
    config = Path("agentic-kb.toml")
    config.write_text(f'store = "{store}"\n[ask]\neffort = "minimal"\n', encoding="utf-8")
    assert "rockets" in invoke("list").output
    invoke("list", "--store", "elsewhere", status=1)
    for text, unknown in (("[ask]\neffrt = 1\n", "ask.effrt"), ("ask = 1", "ask"), ("[aks]\n", "aks")):
        config.write_text(text, encoding="utf-8")
        assert f"unknown: {unknown};" in str(invoke("list", status=1).exception)
    config.write_text("store = ", encoding="utf-8")
    assert "TOML" in str(invoke("list", status=1).exception)


@pytest.mark.slow
def test_a_chat_remembers(store: Path, server: LoopbackOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chat`` answers line after line with the turns before it, and needs a model."""
    assert "language model" in str(invoke("chat", "--store", store, status=1).exception)
    monkeypatch.setenv("OPENAI_API_BASE", server.base_url)
    lines = "How tall was the Saturn V?\nWho flew on it?\n\n"
    done = invoke("chat", "--store", store, input=lines)
    assert done.output.count("It was 110.6 m tall [1].") == 2
    assert done.output.count("\n  [1] ") == 2
    assert "  [2] " not in done.output
    assert "How tall was the Saturn V?" in server.chats[-1].text
