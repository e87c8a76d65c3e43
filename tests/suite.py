"""Runs the tests in two halves: side by side, then alone those that look at how long things take.

Both halves run whatever the first one says. The last line is the sum of both; the status is the worse one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ALONE = "tests/test_retriever_concurrency.py"
"""The tests that look at how long things take; the second half collects no others."""
_HALVES = (
    ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone and not long"],
    ["-m", "alone and not long", ALONE],
)
_NO_TESTS = 5
"""pytest's status where nothing was selected."""


def main(options: list[str]) -> int:
    """Run both halves with the options given, and print the sum."""
    began, sums, worst = time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for number, half in enumerate(_HALVES):
            report = Path(folder) / f"{number}.xml"
            command = [sys.executable, "-m", "pytest", *half, f"--junitxml={report}", *options]
            status = subprocess.run(command, check=False).returncode
            sums += _counts(report, status)
            worst = max(worst, abs(status) if status != _NO_TESTS else 0)
    kinds = ", ".join(f"{sums[kind]} {kind}" for kind in ("passed", "failed", "errors", "skipped"))
    print(f"{kinds} in {time.monotonic() - began:.0f} s", flush=True)
    return worst


def _counts(report: Path, status: int) -> Counter[str]:
    """Return the sums of one half; one that ended before its tests did is an error."""
    if not report.exists() or status not in (0, 1, _NO_TESTS):
        return Counter(errors=1)
    (suite,) = ET.parse(report).getroot().iter("testsuite")
    tests, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    return Counter(passed=tests - failed - errors - skipped, failed=failed, errors=errors, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
