"""Attacks that need dangerous calls: the package has none of these."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.security.package_code import Place, calls, constant, imported, modules

RUNS_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput", "pty.spawn"}
LOADS_OBJECTS = {
    "cloudpickle", "dill", "jinja2", "joblib", "jsonpickle", "lxml", "marshal", "pickle", "shelve", "xml.sax", "yaml",
}  # fmt: skip
UNSAFE = {"torch.load", "tempfile.mktemp", "pd.read_pickle"}
SWITCHES = {"allow_pickle": False, "trust_remote_code": False, "shell": False, "verify": True}
"""Arguments that must not be given another value."""


def runs_code(tree: ast.AST, module: str = "") -> Iterator[Place]:
    """Give calls that run text as code, or load objects out of bytes."""
    for name, call, place in calls(tree, module):
        if name in RUNS_CODE | UNSAFE or name.rpartition(".")[2] in {"import_string", "unsafe_load", "mktemp"}:
            yield place
        for one in call.keywords:
            if one.arg in SWITCHES and not (
                isinstance(one.value, ast.Constant) and one.value.value == SWITCHES[one.arg]
            ):
                yield place


def loads_objects(tree: ast.AST) -> Iterator[str]:
    """Give imports of modules that make objects, or read entities, out of what somebody wrote."""
    for name in imported(tree):
        parts = name.split(".")
        if {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & LOADS_OBJECTS:
            yield name


def formats(tree: ast.AST, module: str = "") -> Iterator[Place]:
    """Give calls of ``str.format`` on what is not written in the code: an attribute of an argument can be reached."""
    for _, call, place in calls(tree, module):
        is_format = isinstance(call.func, ast.Attribute) and call.func.attr in ("format", "format_map")
        if is_format and isinstance(call.func, ast.Attribute) and not constant(call.func.value):
            yield place


def names_modules(tree: ast.AST, module: str = "") -> Iterator[Place]:
    """Give imports of a module whose name is not written in the code."""
    for name, call, place in calls(tree, module):
        if name.rpartition(".")[2] == "import_module" and not constant(call.args[0]):
            yield place


BAD = {
    "eval": "eval(text)",
    "exec": "def f():\n    exec(text)",
    "torch.load": "import torch\ntorch.load(path)",
    "switch": "np.load(path, allow_pickle=True)",
    "remote code": "SentenceTransformer(name, trust_remote_code=given)",
    "shell": "subprocess.run(line, shell=True)",
    "temporary name": "import tempfile\ntempfile.mktemp()",
}


@pytest.mark.parametrize("code", BAD.values(), ids=BAD)
def test_the_search_finds_calls(code: str) -> None:
    """The search below would find them."""
    assert list(runs_code(ast.parse(code)))


def test_nothing_runs_text_as_code() -> None:
    """CVE-2024-3098, 2024-3271, 2024-45201, 2023-39662, 2024-4181, 2026-45829, 2025-7647, 2025-7707: nothing does.

    They are safe_eval, exec of an import, eval and exec of a reply, trust_remote_code, and foreseen temporary files.
    """
    ours = {("testing/server.py", "httpx.Client(verify=False)")}  # of the test server, over loopback without TLS
    found = {(place.module, place.code) for module, tree in modules().items() for place in runs_code(tree, module)}
    assert found - ours == set()


def test_nothing_loads_objects() -> None:
    """CVE-2024-5998 (pickle), CVE-2024-41950 (Jinja), CVE-2025-6984 (XML entities), yaml.load."""
    assert list(loads_objects(ast.parse("def f():\n    from pickle import loads\n    import xml.sax.handler"))) == [
        "pickle.loads",
        "xml.sax.handler",
    ]
    assert list(loads_objects(ast.parse("from llama_index_agentic_kb.pickled import pickle_of"))) == []
    found = {name for tree in modules().items() for name in loads_objects(tree[1])}
    page = ["jinja2.Template", "jinja2.Environment", "jinja2.Undefined"]  # of a template that is a file of the package
    assert list(loads_objects(modules()["_html.py"])) == page
    assert found - {*page, "yaml"} == set()
    nodes = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert {node.attr for node in nodes if _is_yaml(node.value)} == {"safe_load", "YAMLError"}


def _is_yaml(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "yaml"


def test_only_our_own_text_is_a_format() -> None:
    """CVE-2025-65106 (attributes reached by a template): what is formatted is written in the code."""
    assert list(formats(ast.parse("question.format(x=1)")))
    ours = {
        ("planning/planner.py", "DEPENDENT.format(max_rounds=limits.rounds)"),  # a constant of prompts.py
        ("planning/classification.py", "LABEL.format(name=quoted(name))"),  # the same
        ("planning/classification.py", "CLASSIFICATION.format(classes='\\n'.join(lines), form=form)"),  # the same
        ("search/rerank.py", "name.format(dash)"),  # a table of the module
        (
            "schema/odata.py",  # a table of the module
            "_WRITTEN[operator].format(key, '' if operator in _UNARY else _literal(condition.values[0]))",
        ),
        ("_html.py", "_PAGE.format(title=html.escape(title), body=response_html(data, limit=None))"),  # a constant
        ("_html.py", "Markup('<p>{}</p>').format(_cut(_plain(text), MOST))"),  # markupsafe escapes what is put in
        ("server/openapi.py", "_REF.format(model=known.body.__name__)"),  # a constant, with names of classes
        ("server/openapi.py", "_REF.format(model='RetrievalResponse')"),
        ("server/openapi.py", "_REF.format(model='Error')"),
        ("guard/spotlighting.py", "_NOTES[self.technique].format(sign=self.sign)"),  # constants of the module
    }
    found = {(place.module, place.code) for module, tree in modules().items() for place in formats(tree, module)}
    assert found - ours == set()


def test_no_text_from_outside_names_a_module() -> None:
    """CVE-2025-68664 (a serialised object names the class to build): modules are named in the code."""
    assert list(names_modules(ast.parse("importlib.import_module(data['module'])")))
    found = {place.module for module, tree in modules().items() for place in names_modules(tree, module)}
    tables: set[str] = set()  # packages have one of their exports, and of their modes
    assert {module for module in found - tables if not module.endswith("__init__.py")} == set()
