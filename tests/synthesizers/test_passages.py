from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.synthesizers.passages import MAX_PARTS, Packed, cost, fit, pack, share, singly

TEXTS = st.lists(
    st.lists(st.sampled_from(["A sentence. ", "word ", "日本語。", "x" * 40, "\n", "<evidence>"]), max_size=120).map(
        "".join
    ),
    max_size=8,
)


def kept(packed: Packed) -> list[Passage]:
    return [passage for group in packed.groups for passage in group]


def make(texts: list[str]) -> list[Passage]:
    return [Passage(number, f"t{number}", text) for number, text in enumerate(texts)]


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 600))
def test_nothing_overflows_and_nothing_is_lost_in_silence(texts: list[str], room: int) -> None:
    """Every group fits its room; every passage is kept under its number, or counted."""
    given_ones = make(texts)
    for packer in (fit, share, singly, pack):
        packed = packer(given_ones, room)
        ids = [passage.ref_id for passage in kept(packed)]
        assert all(sum(map(cost, group)) <= room for group in packed.groups if len(group) > 1 or packer in (fit, share))
        assert len(set(ids)) + packed.dropped == len(texts)
        assert ids == sorted(ids)
        assert all(packed.groups)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(60, 400))
def test_splitting_loses_nothing(texts: list[str], room: int) -> None:
    """The parts of a passage are the passage, but for spaces between them, and each fits."""
    packed = pack(make(texts), room)
    assert packed.dropped == packed.cut == 0
    assert all(cost(passage) <= room for passage in kept(packed))
    for number, text in enumerate(texts):
        parts = [passage.content for passage in kept(packed) if passage.ref_id == number]
        assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["Short sentences are here. " * 40_000, "x" * 1_000_000, "日" * 300_000])
def test_a_megabyte_is_split_soon(text: str) -> None:
    """A hostile document costs seconds at most, and no more than so many parts."""
    started = time.monotonic()
    packed = singly(make([text]), 1_000)
    assert time.monotonic() - started < 6
    assert len(packed.groups) == MAX_PARTS
    assert (packed.cut, packed.dropped) == (1, 0)
