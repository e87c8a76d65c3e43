"""Every error of the library has a code, a cause, a remedy, and a section in docs/troubleshooting.md."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llama_index_agentic_kb as package
from llama_index_agentic_kb.errors import AgenticKBError

HEAVY = ("torch", "chromadb", "transformers", "openai", "llama_index.llms.openai", "sentence_transformers")


@pytest.mark.parametrize("name", package.__all__)
def test_every_name_can_be_had(name: str) -> None:
    assert getattr(package, name) is not None
    assert name in dir(package)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="'llama_index_agentic_kb' has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


def test_both_lists_of_names_agree() -> None:
    """What type checkers read and what is imported lazily are the same names of the same homes."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.name == alias.asname
            typed[alias.name] = str(node.module).removeprefix("llama_index_agentic_kb.")
    assert typed == package._HOME_OF
    assert package.__all__ == ["__version__", *sorted(typed)]


LIGHT = """
import json, sys
import llama_index_agentic_kb
assert 'llama_index.core' not in sys.modules
from llama_index_agentic_kb import KnowledgeBase, AgenticRetriever, SourceParams
assert not [name for name in sys.modules if 'agentic_kb.store' in name]
import llama_index_agentic_kb.llm
before = [name for name in HEAVY if name in sys.modules]
from llama_index_agentic_kb import OpenAICompatible
print(json.dumps([before, [name for name in HEAVY if name in sys.modules]]))
from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
source = KnowledgeSource('a', retriever=MemoryRetriever([]))
KnowledgeBase([source], llm=ScriptedLLM('x'), grounding=False).warm_up()
assert 'llama_index_agentic_kb.answering.engine' in sys.modules  # which the first answer would load
assert not [name for name in sys.modules if 'agentic_kb.store' in name]
"""


def test_importing_the_package_is_light() -> None:
    """The package, and the doors that need no model, load no model's library and no client; OpenAICompatible does."""
    command = [sys.executable, "-W", "error", "-c", f"HEAVY = {HEAVY}\n{LIGHT}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], ["openai", "llama_index.llms.openai"]]


def test_errors_keep_what_caused_them() -> None:
    errors = importlib.import_module("llama_index_agentic_kb.errors")
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert str(errors.RetrievalError("all", {"a: q": OSError("x")}).causes["a: q"]) == "x"
    assert errors.RetrievalError("none").causes == {}
    error = errors.SynthesisError("m", step=2, partial="p")
    assert (error.step, error.partial, str(error)) == (2, "p", "m")


PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_NO_CLASS = {"cancelled", "internalError", "methodNotAllowed"}
"""Codes in activity records and in the server's responses that no exception has."""


def classes() -> list[type[AgenticKBError]]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "migrations" not in module.name:
            importlib.import_module(module.name)
    found = [AgenticKBError]
    for known in found:
        found += [kind for kind in known.__subclasses__() if kind not in found]
    return [kind for kind in found if kind.__module__.startswith(package.__name__)]


def section(code: str) -> str:
    """Return what the page says on a code, on one line, with code in single backticks."""
    found = re.search(rf"^### {code}$(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return " ".join(found.group(1).split()).replace("``", "`") if found else ""


def test_every_error_has_code_cause_remedy_and_section() -> None:
    """A class with a code of its own has a remedy of its own, and the page says both, with cause and status."""
    lacking, codes = [], []
    for kind in classes():
        assert inspect.getdoc(kind), kind
        if "code" not in vars(kind):
            continue
        cause = str(inspect.getdoc(kind)).partition("\n\n")[0].replace("\n", " ").replace("``", "`")
        said = section(kind.code)
        status = "" if kind.status_code is None else f"HTTP {kind.status_code}"
        codes.append(kind.code)
        assert kind.__new__(kind).docs == f"docs/troubleshooting.md#{kind.code.lower()}"  # as renderers make anchors
        lacking += [
            f"{kind.code}: {text}"
            for text in (f"`{kind.__name__}`", cause, vars(kind)["remedy"], status)
            if text not in said
        ]
    assert lacking == []
    assert len(set(codes)) == len(codes) >= 28
    assert {*re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)} == {*codes, *OF_NO_CLASS}
