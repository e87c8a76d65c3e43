from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS, check, texts

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

FOUND: dict[str, tuple[str, ...]] = {
    # Removing the marker in the middle made one of what stood around it.
    "odata": (
        "name eq '\ud800'",  # a lone surrogate, which no JSON text could be made of
        "[$or] eq 1",  # pydantic's error instead of ours
        "[_node_type] ne null",
        "not (b in (1, 2))",  # written with two pairs of parentheses, and read back with one
    ),
    "plan": (
        '[{"query": "\udc81", "sources": ["d\udc81"]}]',  # TypeError while it streamed
        f'{{"sub_queries": [{{"query": {"9" * 5_000}}}]}}',  # more digits than Python writes
    ),
    "request": (
        '{"role": "use\\ud800r", "content": "?"}',
        '{"knowledgeSourceName": "docs", "kind": "\\udcf6", "more": 1e9991}',
        '{"filters": ' * 2_000,
        '{"messages": ' + "[" * 900 + "]" * 900 + "}",  # RecursionError
    ),
    "citations": ("[ref_[ref_id:9]id:7]", "[[ref_id:9]ref_id:7]", "[ref_id:[ref_id:9]7]"),
}
"""What the fuzzer found once."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks_a_reader(name: str) -> None:
    """Whatever comes, a reader reads it or raises this library's own errors, soon; ``make fuzz`` is the long form."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(texts(TARGETS[name]))
    def feed(text: str) -> None:
        check(TARGETS[name], text)

    feed()


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in TARGETS for text in (*TARGETS[name].seeds, *FOUND.get(name, ()))]
)
def test_seeds_are_read_and_what_was_found_once_stays_mended(name: str, text: str) -> None:
    """What the fuzzer begins with, and inputs that broke a reader, hold every promise."""
    check(TARGETS[name], text)
