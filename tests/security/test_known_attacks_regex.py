"""Regular expressions that take quadratic time, or worse, on a hostile text (ReDoS), and ones from outside."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import llama_index_agentic_kb
from tests.security.package_code import Place, calls, constant, modules

SIZES = (30, 20_000)
MOST_SECONDS = 0.25
"""Time of the processor for 20,000 characters; linear ones take some thousandths, quadratic ones half a second."""

UNITS = (" ", " \n", "[", "(", "<", "{", "'", "*", "|", "0", "a", "1,", "[](")
FUNCTIONS = ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn")

OURS = {
    ("answering/related.py", "re.compile"): "a quote of a model's, escaped",
    ("planning/passages.py", "re.search"): "an answer of 200 characters, escaped",
    ("grounding/scorers/judge.py", "re.search"): "a claim's words, escaped",
    ("guard/text.py", "re.compile"): "our own tables of look-alikes",
    ("evaluation/plans.py", "re.compile"): "a value of the data set, escaped",
    ("evaluation/plans.py", "re.fullmatch"): "a plan of the data set, escaped",
    ("schema/filter_text.py", "re.match"): "the tables of hints",
    ("_text.py", "re.compile"): "our own patterns of secrets, compiled at first use",
    ("schema/odata.py", "re.split"): "a class of escaped characters",
    ("wire/_proto.py", "re.search"): "a message's class, in what protobuf says",
    ("wire/google_names.py", "re.fullmatch"): "our own table of names",
    ("search/tokenizing.py", "re.compile"): "classes of the table of languages",
}
"""Patterns that are made as the program runs, with what they are made of."""


@dataclass(frozen=True)
class Used:
    """A pattern and how it is used."""

    pattern: re.Pattern[Any]
    searches: bool


def patterns() -> dict[str, Used]:
    """Give all patterns of the package: values of its modules, and those that are written in calls."""
    ways: dict[tuple[str, str], set[str]] = {}
    for module, tree in modules().items():
        for name, _, _ in calls(tree, module):
            owner, _, function = name.rpartition(".")
            ways.setdefault((module, owner), set()).add(function)
    found: dict[str, Used] = {}
    for one in pkgutil.walk_packages(llama_index_agentic_kb.__path__, "llama_index_agentic_kb."):
        if one.name.endswith((".__main__", ".env")) or ".versions" in one.name:
            continue
        loaded = importlib.import_module(one.name)
        path = Path(str(loaded.__file__)).relative_to(Path(llama_index_agentic_kb.__path__[0])).as_posix()
        for name, value in vars(loaded).items():
            used = ways.get((path, name), set())  # names with an underscore are used in their own module only
            only_matched = name.startswith("_") and bool(used) and used <= {"match", "fullmatch"}
            for pattern in _within([value]):
                found.setdefault(f"{one.name}.{name} {pattern.pattern!r}", Used(pattern, not only_matched))
    for path, tree in modules().items():
        for name, call, _ in _regex_calls(tree, path):
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes) and name != "re.compile":
                searches = name not in ("re.match", "re.fullmatch")
                found.setdefault(f"{path} {first.value!r}", Used(re.compile(first.value), searches))
    distinct = {(used.pattern.pattern, used.pattern.flags, used.searches): name for name, used in found.items()}
    return {name: found[name] for name in distinct.values()}


def _within(values: list[Any], depth: int = 0) -> Iterator[re.Pattern[Any]]:
    for value in values:
        if isinstance(value, re.Pattern):
            yield value
        elif isinstance(value, dict) and depth < 2:
            yield from _within(list(value.values()), depth + 1)
        elif isinstance(value, list | tuple | frozenset) and depth < 2:
            yield from _within(list(value)[:1_000], depth + 1)


def _regex_calls(tree: ast.AST, module: str) -> Iterator[tuple[str, ast.Call, Place]]:
    for name, call, place in calls(tree, module):
        head, _, function = name.rpartition(".")
        if head == "re" and function in FUNCTIONS and call.args:
            yield name, call, place


def slow_on(used: Used) -> str:
    """Tell the text on which a pattern is slow; "" where it is quick on all."""
    for unit in UNITS:
        for size in SIZES:
            text: Any = (unit * size)[:size] + "\x00"
            text = text.encode() if isinstance(used.pattern.pattern, bytes) else text
            began = time.thread_time()
            if used.searches:
                used.pattern.sub(b"" if isinstance(text, bytes) else "", text)
            used.pattern.fullmatch(text)
            used.pattern.match(text)
            took = time.thread_time() - began
            if took > MOST_SECONDS:
                return f"{unit!r} * {size}: {took:.1f} s"
    return ""


@pytest.mark.slow
def test_every_pattern_takes_linear_time() -> None:
    """CVE-2025-1752 is of this class, endless work for a short text: long runs of what they look for are no work."""
    found = patterns()
    assert len(found) > 100
    assert {name: slow for name, used in found.items() if (slow := slow_on(used))} == {}


@pytest.mark.slow
def test_the_search_finds_slow_patterns() -> None:
    """A quadratic one is found."""
    assert slow_on(Used(re.compile(r"\s+$"), searches=True))


def test_no_pattern_comes_from_outside() -> None:
    """No regular expression from outside runs: those that are made as the program runs are escaped text."""
    found = {
        (place.module, name)
        for module, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name, call, place in _regex_calls(function, module)
        if not constant(call.args[0])
    }
    assert found  # the search finds some
    assert found - OURS.keys() == set()
