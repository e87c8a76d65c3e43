from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb.answering.results import Pieces
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers
from llama_index_agentic_kb.schema.answer_query import CitationPiece, TextPiece

ANSWER = (
    "```\nx = 1. y = 2.\n\nz = 3.\n```\n\n# Launch\n"
    "Apollo 11 was launched in 1969 [ref_id:1][ref_id:0]. Here are its facts:\n"
    "- It was 110.6 m tall [ref_id:0].\n\n- 它很高。[ref_id:1]\nDr. Brown built it. [ref_id:1] 🚀 Nobody else did."
)


def cut(text: str, places: list[int]) -> list[str]:
    """Cut a text at places."""
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def told(deltas: list[str], *, cite: bool = True) -> tuple[str, list[tuple[str, list[int]]]]:
    """The text, and the citations by their claims' words; each claim is told before it is cited."""
    pieces = Pieces(["0", "1"], cite=cite)
    text, cited = "", []
    for piece in [one for delta in deltas for one in pieces.feed(delta)] + pieces.close():
        if isinstance(piece, TextPiece):
            text += piece.text
        else:
            assert isinstance(piece, CitationPiece)
            assert piece.citation.end <= len(text)
            cited.append((piece.citation.of(text), piece.citation.sources))
    return text, cited


CITED = [
    ("Apollo 11 was launched in 1969.", [1, 0]), ("- It was 110.6 m tall.", [0]), ("- 它很高。", [1]),
    ("Dr. Brown built it.", [1]),
]  # fmt: skip


@given(st.lists(st.integers(0, 300), max_size=30))
def test_the_same_comes_of_any_deltas(places: list[int]) -> None:
    """Markers are split anywhere; text is the answer without them, and each claim has its own."""
    text, cited = told(cut(ANSWER, places))
    markers = MarkerFilter({0, 1}, Markers.STRIP)
    assert text == markers.feed(ANSWER) + markers.close()
    assert cited == CITED


@pytest.mark.parametrize("ids", [[], ["0"]], ids=["none", "one"])
def test_a_reference_that_is_not_shown_is_not_cited(ids: list[str]) -> None:
    """Its marker is taken out all the same."""
    pieces = Pieces(ids, cite=True)
    made = [*pieces.feed("It is tall [ref_id:1]. So it is [ref_id:0]."), *pieces.close()]
    text = "".join(piece.text for piece in made if isinstance(piece, TextPiece))
    assert text == "It is tall. So it is."
    assert [piece.citation.sources for piece in made if isinstance(piece, CitationPiece)] == [[0]] * len(ids)


def test_a_marker_that_a_claim_begins_with_leaves_its_span_exact() -> None:
    """The space behind it belongs to no claim."""
    text, cited = told([*"[ref_id:0] It is tall. [ref_id:1]"])
    assert cited == [("It is tall.", [0, 1])]
    assert text == " It is tall."


def test_a_long_answer_is_not_read_again_and_again() -> None:
    """Each paragraph a bounded number of times: a quadratic reader would need minutes."""
    began = time.thread_time()
    pieces = Pieces(["0"], cite=True)
    for _ in range(20_000):
        pieces.feed(". ")
    pieces.close()
    text, cited = told(["It is tall [ref_id:0].\n\n"] * 400)
    assert len(cited) == 400
    assert len(text) == 400 * len("It is tall.\n\n")
    assert time.thread_time() - began < 20
