"""Builds the wheel, installs it into an empty environment, and follows the README there with a user's documents.

Downloads every dependency and takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from tests.test_readme import PAGES, ROOT, write_user_files


def main() -> int:
    """Return 0 where the README's commands and its first Python ran as they stand."""
    with tempfile.TemporaryDirectory(prefix="kb-wheel-") as name:
        folder = Path(name)
        _run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT])
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        _run([*pip, "torch"])
        _run([*pip, f"{wheel}[offline]"])
        _follow(python, folder / "work")
    print("the wheel installs, and the README runs from it")
    return 0


def _follow(python: Path, folder: Path) -> None:
    folder.mkdir()
    write_user_files(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PYTHONPATH"))}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    blocks = PAGES["README.md"]
    bash = [code for language, _, code in blocks if language == "bash"]
    commands = [line for code in bash for line in code.splitlines() if line.strip()]
    for command in commands:
        if not command.startswith(("make", "pip", "git", "cd ")):
            _run(command, cwd=folder, env=environment, shell=True)
    first = next(code for language, _, code in blocks if language == "python")
    _run([python, "-c", first], cwd=folder, env=environment)


def _run(command: Any, **options: Any) -> None:
    print("$", command if isinstance(command, str) else " ".join(map(str, command)), flush=True)
    subprocess.run(command, check=True, **options)


if __name__ == "__main__":
    sys.exit(main())
