"""Claims: hand-labelled answers in four languages, what needs a check, and hostile texts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.grounding.claims import Claim, plain_claim, split_claims

SPECIAL = st.text(alphabet='ab AZ.!?…。！？\n-*|#:`"“”„()「」[]ref_id:0123456789', max_size=60)  # noqa: RUF001 (wide)


class Labelled(NamedTuple):
    name: str
    text: str
    spans: list[tuple[int, int]]


def labelled(file: str) -> list[Labelled]:
    """Read texts, each under a line ``=== language name``, in which each claim stands between ⟦ and ⟧."""
    read = (Path(__file__).parent / "data" / file).read_text(encoding="utf-8")
    parts = re.split(r"^=== (.*)$", read, flags=re.MULTILINE)[1:]
    found = []
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        marked = body.strip("\n")
        signs = [match.start() - number for number, match in enumerate(re.finditer("[⟦⟧]", marked))]
        text = re.sub("[⟦⟧]", "", marked)
        found.append(Labelled(name, text, list(zip(signs[::2], signs[1::2], strict=True))))
    return found


def spans(text: str) -> list[tuple[int, int]]:
    return [(claim.span.start, claim.span.end) for claim in split_claims(text)]


@pytest.mark.parametrize("one", labelled("claims_labelled.txt"), ids=lambda one: one.name)
def test_labelled(one: Labelled) -> None:
    """The claims of a labelled answer have exactly the labelled spans."""
    assert [one.text[start:end] for start, end in spans(one.text)] == [one.text[start:end] for start, end in one.spans]
    assert spans(one.text) == one.spans


def test_blind() -> None:
    """Of the set that was labelled afterwards, all but a few claims are found, and hardly anything else."""
    found, wanted = set(), set()
    for one in labelled("claims_blind.txt"):
        found |= {(one.name, *span) for span in spans(one.text)}
        wanted |= {(one.name, *span) for span in one.spans}
    assert len(found & wanted) >= 0.9 * max(len(wanted), len(found))


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("Is it red?", False),
        ("火星是红色的吗？", False),  # noqa: RUF001 (full width)
        ("- Sputnik 1 (1957)", True),
        ("If you have a fever above 39 C, take ten tablets.", True),
        ("I can confirm that the dose is 500 mg.", True),
        ("Based on the sources, it opened in 1969.", True),
    ],
)
def test_needs_a_check(text: str, check: bool) -> None:
    """Only a question needs none: no way to begin a sentence keeps it from being checked."""
    [claim] = split_claims(text)
    assert claim.check_required is check


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Not covered by the warranty:\n- Water damage", "Not covered by the warranty: Water damage"),
        ("## Not covered\n\n- Damage to the big screen of it", "Not covered: Damage to the big screen of it"),
        ("Facts:\n- Apollo 11 landed on the Moon in 1969.", "Apollo 11 landed on the Moon in 1969."),
        ("Fees:\n- Gold\n\nIt is cold there.", "It is cold there."),
    ],
)  # fmt: skip
def test_headings_belong_to_the_items_below(answer: str, said: str) -> None:
    """A fragment, or whatever stands under a negation, is held against the evidence with what is above it."""
    assert split_claims(answer)[-1].said == said


def test_carries_markers_and_context() -> None:
    """A claim knows what it cites, what it says without signs, and under which lead-in or head it stands."""
    listed = "- **Spirit** landed in 2004 [ref_id:3][ref_id:1]"
    item, row = split_claims(f"The rovers:\n{listed}\n\n| Name | Year |\n|---|---|\n| Ingenuity | 2021 |")
    assert item == Claim(listed, item.span, "Spirit landed in 2004", (3, 1), context="The rovers:")
    assert (row.plain, row.context) == ("Ingenuity, 2021", "Name, Year")
    assert plain_claim("* the *field* `max_output_size` is __new__ 🚀") == "the field max_output_size is new"


@given(SPECIAL)
@settings(max_examples=150, deadline=None)
def test_spans_are_in_order(text: str) -> None:
    """Whatever the text, claims stand in it in order, without space around them, and apart."""
    position = 0
    for claim in split_claims(text):
        assert claim.span.start >= position
        assert claim.span.of(text) == claim.text == claim.text.strip()
        position = claim.span.end


@pytest.mark.parametrize(
    "text",
    ["." * 50_000, "(" * 50_000, "“" * 50_000, "a. " * 20_000, "\n- a" * 10_000, "|" * 50_000, "[ref_id:" * 10_000],
    ids=["points", "brackets", "quotes", "letters", "items", "bars", "markers"],
)
def test_takes_linear_time(text: str) -> None:
    """No text takes long (a quadratic way would take minutes)."""
    begun = time.process_time()
    split_claims(text)
    assert time.process_time() - begun < 20
