"""Runs every attack in every mode, way and effort, and every flow of a secret; writes ``build/injection.json``."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.injection.world import EFFORTS, Case, all_cases, all_flows, attack, few_cases

OUT = Path("build/injection.json")


def main() -> None:
    few = "--few" in sys.argv[1:]  # each kind twice, as the tests do
    logging.disable(logging.WARNING)  # each removed link is warned of
    cases = few_cases() if few else list(all_cases())
    began = time.monotonic()
    found: list[tuple[Case, str]] = []
    for number, case in enumerate(cases, start=1):
        found += [(case, change) for change in attack(case)]
        if number % 500 == 0:
            print(f"{number}/{len(cases)} cases, {len(found)} changes, {time.monotonic() - began:.0f} s", flush=True)
    for case, change in found[:20]:
        print(f"{case}: {change}")
    flows = [flow for effort in EFFORTS for flow in all_flows(effort)][:: 15 if few else 1]
    leaked = [flow for flow in flows if flow.leaks()]
    real = [flow for flow in flows if flow.effort == "medium"]
    trusted = sum(flow.leaks(trusted=True) for flow in real)
    for flow in leaked[:20]:
        print(f"{flow}: the open source received the secret")
    print(f"{len(flows)} flows, {len(leaked)} leaks; {trusted} of {len(real)} where the open source is trusted")
    kinds = Counter(change.partition(":")[0] for _, change in found)
    print(f"{len(cases)} cases, {len(found)} changes {dict(kinds)} in {time.monotonic() - began:.0f} s")
    count = {"cases": len(cases), "changes": len(found), "of": dict(kinds), "seconds": round(time.monotonic() - began)}
    count |= {"flows": len(flows), "leaks": len(leaked), "trusted": {"flows": len(real), "leaks": trusted}}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(count, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(found or leaked))


if __name__ == "__main__":
    main()
