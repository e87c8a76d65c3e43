"""Generate many cases and count the leaks: ``python -m tests.leaks --cases 10000``."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from hypothesis import seed

from tests.leaks.machine import LeakError, LeakMachine, Tally, run_machine, run_searches
from tests.leaks.world import KINDS, SHARED_KINDS

EXAMPLES = 50
"""Worlds that are made between two looks at the number of cases."""


def main() -> int:
    """Run until enough cases were looked through; give 1 where something leaked."""
    parser = argparse.ArgumentParser(prog="python -m tests.leaks", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many cases at least (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other cases (default 0)")
    every = (*KINDS, *SHARED_KINDS)
    parser.add_argument("--kinds", nargs="+", choices=every, default=KINDS, help="the kinds of stores")
    parser.add_argument("--searches", action="store_true", help="of one source alone, without a model")
    given = parser.parse_args()
    if given.searches:
        for kind in given.kinds:
            print(kind, run_searches(kind, given.cases, given.seed), flush=True)
        return 0
    LeakMachine.kinds = tuple(given.kinds)
    logging.getLogger("llama_index_agentic_kb").propagate = False  # it is listened to, not printed
    began, leaks, rounds = time.monotonic(), 0, 0
    tally = LeakMachine.tally = Tally()
    while tally.cases < given.cases:
        machine = seed(1_000 * given.seed + rounds)(type("LeakMachine", (LeakMachine,), {}))
        try:
            run_machine(machine, examples=EXAMPLES, steps=20)
        except LeakError as leak:
            leaks += 1
            print(f"LEAK (seed {given.seed}, round {rounds}): {leak}", flush=True)
        rounds += 1
        print(f"{tally.cases} cases, {leaks} leaks, {time.monotonic() - began:.0f} s", flush=True)
    by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kinds.items()))
    print(
        f"\n{tally.cases} generated cases ({by_kind}) in {rounds * EXAMPLES} worlds: {leaks} leaks. "
        f"{tally.refused} were refused, {tally.secrets} secrets were shown to those who may read them."
    )
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
