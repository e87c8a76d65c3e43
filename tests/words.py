"""Checks the wording of package, README and docs: plain technical English, without a few words that hide the meaning.

python -m tests.words            one line a finding; status 1 where there are any
python -m tests.words --report   the number of findings in each room; status 0
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "llama_index_agentic_kb"

_OPENINGS = re.compile(r"(Give|Tell|Let)s?\b")
_WORDS = re.compile(r"\b(_?told|told_\w+|does without|(?<![Tt]here )is none|as are|of ours|for ever)\b")


def findings() -> Iterator[tuple[Path, int, str]]:
    """Yield the file, the line and the words of each finding."""
    files = [*(ROOT / PACKAGE).rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            yield from ((path, number, f'"{match.group()}"') for match in _WORDS.finditer(line))
        if path.suffix == ".py":
            yield from ((path, number, f'a docstring begins with "{word}"') for number, word in _openings(text))


def _openings(code: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = _OPENINGS.match(ast.get_docstring(node) or "")
            if match is not None:
                yield node.body[0].lineno, match.group()


def main(arguments: list[str]) -> int:
    """Print the findings, or how many each room has."""
    found = [(path.relative_to(ROOT), line, words) for path, line, words in findings()]
    if "--report" in arguments:
        rooms = Counter("/".join(path.parts[:2]) for path, _, _ in found)
        print(f"{len(found)} words to replace", *(f"{count:5} {room}" for room, count in rooms.most_common()), sep="\n")
        return 0
    for path, line, words in found:
        print(f"{path}:{line}: {words}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
