"""The package's own source, as syntax trees, for tests that look for what must not be in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_index_agentic_kb


@dataclass(frozen=True)
class Place:
    """A piece of code and where it stands."""

    module: str
    node: ast.AST

    @property
    def code(self) -> str:
        """The code as text."""
        return ast.unparse(self.node)

    def __str__(self) -> str:
        """Tell place and code."""
        return f"{self.module}:{getattr(self.node, 'lineno', 0)}: {self.code}"


@cache
def modules() -> dict[str, ast.Module]:
    """Give every module of the package by its path."""
    root = Path(llama_index_agentic_kb.__file__).parent
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")
    }


def calls(tree: ast.AST, module: str = "") -> Iterator[tuple[str, ast.Call, Place]]:
    """Give every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield name_of(node.func), node, Place(module, node)


def name_of(node: ast.expr) -> str:
    """Give a dotted name; "?" stands for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(tree: ast.AST) -> Iterator[str]:
    """Give the full names of all modules and objects that are imported, at the top or within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{one.name}" for one in node.names)


def constant(node: ast.expr) -> bool:
    """Tell whether an expression is made of literals alone."""
    if isinstance(node, ast.BinOp):
        return constant(node.left) and constant(node.right)
    return isinstance(node, ast.Constant)
