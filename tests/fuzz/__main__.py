"""Feeds a reader with made-up input until it fails or the time is over.

    python -m tests.fuzz --target odata --seconds 600

Guided by coverage where atheris is installed (``pip install atheris``); else by chance, with hypothesis.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

_NAMES = ("odata", "plan", "citations", "findings", "request", "google")


def main() -> None:
    """Read the arguments and fuzz; ends with status 1 where an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=_NAMES, required=True, help="what is fed")
    parser.add_argument("--seconds", type=int, default=600, help="for how long")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), help="default: atheris where it is installed")
    arguments = parser.parse_args()
    engine = arguments.engine or ("atheris" if importlib.util.find_spec("atheris") else "hypothesis")
    print(f"{arguments.target}: {arguments.seconds} s with {engine}", flush=True)
    if engine == "atheris":
        _guided(importlib.import_module("atheris"), arguments.target, arguments.seconds)
    _by_chance(arguments.target, arguments.seconds)


def _guided(atheris: ModuleType, name: str, seconds: int) -> None:
    """Fuzz by coverage; does not return: libFuzzer ends the process, and prints the input that failed."""
    packages = ["llama_index_agentic_kb", "lark", "json_repair"]
    with atheris.instrument_imports(include=packages):
        from tests.fuzz.targets import TARGETS, check, text_of  # noqa: PLC0415 (instrumented as it is imported)
    target = TARGETS[name]

    def feed(data: bytes) -> None:
        text = text_of(data)
        try:
            check(target, text)
        except BaseException:
            print(f"failed with {text!r}", flush=True)
            raise

    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_text(seed, encoding="utf-8")
    words = "".join('"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"\n' for word in target.words)
    (folder / "words").write_text(words, encoding="ascii")
    flags = [f"-max_total_time={seconds}", "-max_len=6000", "-timeout=60", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *flags, f"-dict={folder / 'words'}", f"-artifact_prefix={folder}/", str(corpus)], feed)
    atheris.Fuzz()


def _by_chance(name: str, seconds: int) -> None:
    from hypothesis import HealthCheck, Phase, given, settings  # noqa: PLC0415 (only where atheris is not there)

    from tests.fuzz.strategies import texts  # noqa: PLC0415 (same)
    from tests.fuzz.targets import TARGETS, check  # noqa: PLC0415 (same)

    target: Target = TARGETS[name]
    executed = 0

    @settings(
        max_examples=2_000, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(texts(target))
    def feed(text: str) -> None:
        nonlocal executed
        executed += 1
        check(target, text)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        feed()
    print(f"{executed} executions, no failure")


if __name__ == "__main__":
    main()
