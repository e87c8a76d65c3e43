from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, RetrievalRequest, knowledge_base
from llama_index_agentic_kb.sources import plugins
from llama_index_agentic_kb.testing import MemoryRetriever

MODULE = """
import threading
from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.testing import MemoryRetriever

def source(name, text):
    return KnowledgeSource(name, retriever=MemoryRetriever([text]))

def hours():
    return source("hours", "Open from TIME.")

with open(__file__ + ".runs", "a") as runs:
    runs.write("x")
threading.Event().wait(0.05)  # time for the threads of other entry points to come by

both = [source("menu", "Soup of the day."), source("wine", "Wine list.")]
clash = source("docs", "x")
number = lambda: 7
nothing = [None]

def leaves():
    raise SystemExit("bye")
"""
POINTS = {"a": "hours", "b": "both", "c": "clash", "d": "number", "e": "leaves", "f": "missing", "h": "nothing"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages: one with a module of plugins, one whose module is not there."""
    (tmp_path / "cafe_plugin.py").write_text(MODULE.replace("TIME", "nine"))
    install(tmp_path, "cafe", {name: f"cafe_plugin:{value}" for name, value in POINTS.items()})
    install(tmp_path, "gone", {"g": "no_such_module:source"})
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("cafe_plugin", "hanging_plugin"):
        sys.modules.pop(name, None)


def install(site: Path, name: str, points: dict[str, str]) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(f"{point} = {value}" for point, value in points.items())
    (folder / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{lines}\n")


def test_plugins_are_searched_and_failures_are_reported(site: Path) -> None:
    """A plugin that raises, exits, is missing or takes a taken name costs only itself."""
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(["Rain in Paris"]))])
    failures = {failure.name: failure.reason for failure in kb.load_plugins()}
    assert list(kb.sources) == ["docs", "hours", "menu", "wine"]
    assert failures.keys() == {"c", "d", "e", "f", "g", "h"}
    assert "named 'docs' already" in failures["c"]
    assert "not iterable" in failures["d"]
    assert "bye" in failures["e"]
    assert "got NoneType" in failures["h"]
    assert "no_such_module" in failures["g"]
    response = kb.retrieve("soup")
    assert [one.knowledge_source_name for one in response.references] == ["menu"]
    assert (site / "cafe_plugin.py.runs").read_text() == "x", "the threads of its entry points run a module once"


def test_plugins_are_loaded_again(site: Path) -> None:
    """Changed, new and removed plugins are seen without a restart; engines made before keep their sources."""
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(["Rain in Paris"]))])
    kb.load_plugins()
    before = kb.as_retriever()
    module = site / "cafe_plugin.py"
    module.write_text(MODULE.replace("TIME", "ten"))

    os.utime(module, (2_000_000_000, 2_000_000_000))
    install(site, "cafe", {"a": "cafe_plugin:hours"})
    assert [failure.name for failure in kb.load_plugins()] == ["g"]
    assert list(kb.sources) == ["docs", "hours"]
    assert "ten" in kb.retrieve("Open from").text
    assert list(before.sources) == ["docs", "hours", "menu", "wine"]


def test_a_plugin_that_hangs_is_left_behind(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are loaded within the time limit, which is longer here where a busy machine needs it."""
    hanging = "import threading\ndef source():\n    threading.Event().wait(60)\n"
    (site / "hanging_plugin.py").write_text(hanging)
    install(site, "gone", {"g": "hanging_plugin:source"})
    for seconds in (0.5, 2.0, 8.0):
        monkeypatch.setattr(plugins, "LOAD_SECONDS", seconds)
        sources, failures = plugins.discover_sources()
        if [source.name for source in sources] == ["hours", "menu", "wine", "docs"]:
            break
    else:
        pytest.fail(f"{sources}, {failures}")
    assert "plugin 'g'" in next(failure.reason for failure in failures if failure.name == "g")


def test_replies_stay_away_from_a_plugin_that_is_trusted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a source said before is not searched for in one that may not learn from it, whenever that one was added."""
    asked = MemoryRetriever(["Zephyrmann was born in 1950."])
    plugin = KnowledgeSource("web", retriever=asked, trust=0)
    monkeypatch.setattr(knowledge_base, "discover_sources", lambda _: ([plugin], []))
    kb = KnowledgeBase([KnowledgeSource("hr", retriever=MemoryRetriever(["It is Karl Zephyrmann."]), trust=1)])
    kb.load_plugins()
    turns = [("user", "Who leads the project?"), ("assistant", "Karl Zephyrmann."), ("user", "How old is he?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    kb.retrieve(RetrievalRequest.model_validate({"messages": messages}))
    assert asked.queries
    assert not any("Zephyrmann" in query for query in asked.queries)
