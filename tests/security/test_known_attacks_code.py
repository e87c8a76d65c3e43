"""Attacks that need dangerous calls, or a pattern that takes quadratic time: the package's own code has none."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import llama_index_agentic_kb

Trees = Mapping[str, ast.AST]
"""Code by the path of its module."""


@cache
def modules() -> dict[str, ast.Module]:
    root = Path(llama_index_agentic_kb.__file__).parent
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")
    }


def of(code: str) -> Trees:
    return {"": ast.parse(code)}


def calls(trees: Trees) -> Iterator[tuple[str, str, ast.Call]]:
    """Return the module of every call, the dotted name of what is called, and the call."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield module, name_of(node.func), node


def name_of(node: ast.expr) -> str:
    """Return a dotted name; "?" stands for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(tree: ast.AST) -> Iterator[str]:
    """Return the full names of all modules and objects that are imported, at the top or within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{one.name}" for one in node.names)


def constant(node: ast.expr) -> bool:
    """Return whether an expression is made of literals alone."""
    if isinstance(node, ast.BinOp):
        return constant(node.left) and constant(node.right)
    return isinstance(node, ast.Constant)


def written(node: ast.expr) -> bool:
    """Return whether an expression is made of literals, of constants of modules (in capitals), and of escaped text."""
    if isinstance(node, ast.JoinedStr):
        return all(written(part) for part in node.values)
    if isinstance(node, ast.FormattedValue | ast.Subscript):
        return written(node.value)
    name = name_of(node.func if isinstance(node, ast.Call) else node)
    return constant(node) or name == "re.escape" or name.rpartition(".")[2].isupper()


RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "pty.spawn"}
LOADS_OBJECTS = {
    "cloudpickle", "dill", "jinja2", "joblib", "jsonpickle", "lxml", "marshal", "pickle", "shelve", "xml.sax", "yaml",
}  # fmt: skip
UNSAFE = {"torch.load", "tempfile.mktemp", "pd.read_pickle"}
SWITCHES = {"allow_pickle": False, "trust_remote_code": False, "shell": False, "verify": True}
"""Arguments that must not be given another value."""


def runs_code(trees: Trees) -> set[tuple[str, str]]:
    """Return calls that run text as code, or load objects out of bytes."""
    return {
        (module, ast.unparse(call))
        for module, name, call in calls(trees)
        if name in RUNS_CODE | UNSAFE
        or name.rpartition(".")[2] in {"import_string", "unsafe_load", "mktemp"}
        or any(one.arg in SWITCHES and ast.unparse(one.value) != str(SWITCHES[one.arg]) for one in call.keywords)
    }


def loads_objects(tree: ast.AST) -> Iterator[str]:
    """Return imports of modules that make objects, or read entities, out of what somebody wrote."""
    for name in imported(tree):
        parts = name.split(".")
        if {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & LOADS_OBJECTS:
            yield name


def formats(trees: Trees) -> set[str]:
    """Return calls of ``str.format`` on what is not written in the code: an attribute of an argument can be reached."""
    return {
        ast.unparse(call)
        for _, _, call in calls(trees)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("format", "format_map")
        and not written(call.func.value)
    }


def names_modules(trees: Trees) -> set[str]:
    """Return modules with an import of one whose name is not written in the code."""
    named = ((module, call) for module, name, call in calls(trees) if name.rpartition(".")[2] == "import_module")
    return {module for module, call in named if not constant(call.args[0])}


BAD = (
    "eval(text)", "def f():\n    exec(text)", "import torch\ntorch.load(path)", "np.load(path, allow_pickle=True)",
    "SentenceTransformer(name, trust_remote_code=given)", "subprocess.run(line, shell=True)", "tempfile.mktemp()",
)  # fmt: skip


def test_nothing_runs_text_as_code() -> None:
    """CVE-2024-3098, 2024-3271, 2024-45201, 2023-39662, 2024-4181, 2026-45829, 2025-7647, 2025-7707: nothing does.

    They are safe_eval, exec of an import, eval and exec of a reply, trust_remote_code, and foreseen temporary files.
    """
    assert [code for code in BAD if not runs_code(of(code))] == []
    ours = {("testing/openai_api.py", "httpx.Client(verify=False)")}  # of the test server, over loopback without TLS
    assert runs_code(modules()) - ours == set()


def test_nothing_loads_objects() -> None:
    """CVE-2024-5998 (pickle), CVE-2024-41950 (Jinja), CVE-2025-6984 (XML entities), yaml.load."""
    found = loads_objects(ast.parse("def f():\n    from pickle import loads\n    import xml.sax.handler"))
    assert {*found} == {"pickle.loads", "xml.sax.handler"}
    assert list(loads_objects(ast.parse("from llama_index_agentic_kb.pickled import pickle_of"))) == []
    loaded = {name for tree in modules().values() for name in loads_objects(tree)}
    page = ["jinja2.Template", "jinja2.Environment", "jinja2.Undefined"]  # of a template that is a file of the package
    assert list(loads_objects(modules()["_html.py"])) == page
    assert loaded - {*page, "yaml"} == set()
    nodes = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert {node.attr for node in nodes if name_of(node.value) == "yaml"} == {"safe_load", "YAMLError"}


def test_only_our_own_text_is_a_format() -> None:
    """CVE-2025-65106 (attributes reached by a template): what is formatted is written in the code."""
    assert formats(of("question.format(x=1)"))
    ours = {
        "name.format(dash)",  # a table of its module
        "self._what.format(self._per_minute)",  # words of its module
        "Markup('<p>{}</p>').format(_cut(_plain(text), MOST))",  # markupsafe escapes what is put in
    }
    assert formats(modules()) - ours == set()


def test_no_text_from_outside_names_a_module() -> None:
    """CVE-2025-68664 (a serialised object names the class to build): modules are named in the code."""
    assert names_modules(of("importlib.import_module(data['module'])"))
    tables = {module for module in modules() if module.endswith("__init__.py")}  # of their exports, and of their modes
    clients = {"sources/elastic.py"}  # one of two packages, both named there
    assert names_modules(modules()) - tables == clients


SIZES = (30, 20_000)
MOST_SECONDS = 0.25
"""Time of the processor for 20,000 characters; linear ones take some thousandths, quadratic ones half a second."""

UNITS = (" ", " \n", "[", "(", "<", "{", "'", "*", "|", "0", "a", "1,", "[](")
FUNCTIONS = ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn")

OURS = {
    ("_text.py", "escaped"): "our own keys, escaped",
    ("_text.py", "text"): "our own patterns of secrets, compiled at first use",
    ("evaluation/dataset.py", "'.+?'.join(parts)"): "a plan of the data set, escaped",
    ("grounding/scorers/judges.py", "pattern"): "a claim's words, escaped",
    ("guard/text.py", "f\"[{''.join(map(chr, sorted(table)))}]\""): "our own tables of look-alikes",
    ("planning/findings.py", "f'(?<![a-z0-9]){pattern}(?![a-z0-9])'"): "an answer of 200 characters, its parts escaped",
    (
        "planning/plan_graph.py",
        "f'(?<!\\\\w)({answer})(?:,? {answer})+(?!\\\\w)'",
    ): "an answer of 200 characters, its parts escaped",
    ("planning/plan_graph.py", "f'(?<!\\\\w){answer}(?!\\\\w)'"): "an answer of 200 characters, its parts escaped",
    ("schema/odata.py", "pattern"): "the tables of tokens",
    ("search/tokenizing.py", "f'[{_PAIRED}]+|{word}'"): "classes of the table of languages",
    ("search/tokenizing.py", "f'[{_PAIRED}{marks}]'"): "classes of the table of languages",
    ("store/sql.py", "words"): "the table of remedies",
    (
        "wire/google_messages.py",
        "f' at \"?{kind}\\\\.?([\\\\w.\\\\[\\\\]]*?)\"?\\\\.*(?:\\\\n|$)'",
    ): "a message's class, in what protobuf says",
    (
        "wire/google_messages.py",
        "re.sub('\\\\{(\\\\w+)\\\\}', lambda part: f\"({(_PARENT if part[1] == 'parent' else _PART)})\", shape)",
    ): "the shapes of names, all of its module",
}
"""Patterns that are made as the program runs, by their modules, with what they are made of."""


@dataclass(frozen=True)
class Used:
    pattern: re.Pattern[Any]
    searches: bool


def patterns() -> dict[str, Used]:
    """Return all patterns of the package: values of its modules, and those that are written in calls."""
    ways: dict[tuple[str, str], set[str]] = {}
    for module, name, _ in calls(modules()):
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
    for path, name, call in _regex_calls(modules()):
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


def _regex_calls(trees: Trees) -> Iterator[tuple[str, str, ast.Call]]:
    for module, name, call in calls(trees):
        if name.startswith("re.") and name.removeprefix("re.") in FUNCTIONS and call.args:
            yield module, name, call


def slow_on(used: Used) -> str:
    """Return the text on which a pattern is slow; "" where it is quick on all."""
    for unit in UNITS:
        for size in SIZES:
            text: Any = (unit * size)[:size] + "\x00"
            text = text.encode() if isinstance(used.pattern.pattern, bytes) else text
            replaced = partial(used.pattern.sub, b"" if isinstance(text, bytes) else "")
            for way in (replaced, used.pattern.fullmatch, used.pattern.match)[not used.searches :]:
                for _ in range(3):  # a machine that gives its processor away counts that time too
                    began = time.thread_time()
                    way(text)
                    if (took := time.thread_time() - began) <= MOST_SECONDS:
                        break
                else:
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
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    made = ((path, one) for path, tree in modules().items() for one in ast.walk(tree) if isinstance(one, functions))
    found = {
        (path, ast.unparse(call.args[0]))
        for path, function in made
        for _, _, call in _regex_calls({path: function})
        if not written(call.args[0])
    }
    assert found  # the search finds some
    assert found - OURS.keys() == set()
