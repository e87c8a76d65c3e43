"""Every error of the library has a code, a cause, a remedy, and a section in docs/troubleshooting.md."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import llama_index_agentic_kb as package
from llama_index_agentic_kb.errors import AgenticKBError

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OF_NO_CLASS = {"cancelled", "internalError", "methodNotAllowed"}
"""Codes in activity records and in the server's responses that no exception has."""


def classes() -> list[type[AgenticKBError]]:
    """Return every error class of the package."""
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
