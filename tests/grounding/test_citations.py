from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb.grounding import MarkerFilter, cited_ids, clean_markers

PIECES = st.lists(
    st.sampled_from(
        [
            "Paris",
            " ",
            "  ",
            "[",
            "]",
            "[ref_id:",
            "[ref_id:0]",
            "[ref_id:9]",
            "ref_",
            "id",
            ":",
            "1",
            ", ",
            "\n",
            "REF_ID",
            ".",
        ]
    ),
    max_size=30,
)


@pytest.mark.parametrize(
    ("text", "cleaned", "removed"),
    [
        ("Paris [ref_id:0].", "Paris [ref_id:0].", 0),
        ("Paris [ref_id: 1 ].", "Paris [ref_id:1].", 0),
        ("Paris [REF_ID:1].", "Paris [ref_id:1].", 0),
        ("Paris [ref_id:0, 1].", "Paris [ref_id:0][ref_id:1].", 0),
        ("Paris [ref_id:0, ref_id:1].", "Paris [ref_id:0][ref_id:1].", 0),
        ("Paris [ref_id:1;1].", "Paris [ref_id:1].", 0),
        ("Paris [ref_id:0][ref_id:1].", "Paris [ref_id:0][ref_id:1].", 0),
        ("Paris [ref_id:7].", "Paris.", 1),
        ("Paris [ref_id:7, 1].", "Paris [ref_id:1].", 1),
        ("Paris [ref_id:7, 8] is big.", "Paris is big.", 2),
        ("Paris [ref_id:N].", "Paris.", 1),
        ("Paris [ref_id:-1].", "Paris.", 1),
        ("Paris [ref_id:99999999999999999999].", "Paris.", 1),
        ("Paris [ref_id:].", "Paris.", 1),
        ("Paris [ref_id:1", "Paris", 1),
        ("Paris [ref", "Paris [ref", 0),
        ("a[0] and [1] and [see there]", "a[0] and [1] and [see there]", 0),
        ("[ref_id:\n1]", "[ref_id:\n1]", 0),
        ("no marker", "no marker", 0),
        ("", "", 0),
    ],
)
def test_markers_take_one_form_and_stay_in_range(text: str, cleaned: str, removed: int) -> None:
    """Markers naming a valid id come out in one form; what names none is removed and counted."""
    assert clean_markers(text, {0, 1}) == (cleaned, removed)


def test_a_marker_split_across_deltas_is_never_told_in_part() -> None:
    """What may become a marker is held back until it is clear."""
    markers = MarkerFilter({0})
    assert [markers.feed(piece) for piece in ("Paris", " [", "ref_", "id", ":7", "] is", " [ref_id:0", "].")] == [
        "Paris",
        "",
        "",
        "",
        "",
        " is",
        "",
        " [ref_id:0].",
    ]
    assert markers.close() == ""
    assert markers.removed == 1


def test_what_turns_out_to_be_no_marker_is_told() -> None:
    """A bracket that was held back comes out as soon as it can't become a marker, at the latest at the end."""
    markers = MarkerFilter({0})
    assert (markers.feed("see ["), markers.feed("1]"), markers.feed(" and [r"), markers.close()) == (
        "see",
        " [1]",
        " and",
        " [r",
    )
    assert markers.removed == 0


def test_an_unclosed_marker_holds_back_a_bounded_length() -> None:
    """A bracket that is never closed doesn't keep the rest of the answer."""
    markers = MarkerFilter({0})
    told = markers.feed("[ref_id:" + "x" * 500) + markers.close()
    assert told == "[ref_id:" + "x" * 500


@given(PIECES)
def test_pieces_change_nothing(pieces: list[str]) -> None:
    """However a text is cut into deltas, the same is told and the same number of markers removed."""
    markers = MarkerFilter({0, 1})
    told = "".join(markers.feed(piece) for piece in pieces) + markers.close()
    assert (told, markers.removed) == clean_markers("".join(pieces), {0, 1})
    assert set(cited_ids(told)) <= {0, 1}


def test_cited_ids_come_once_in_order_of_mention() -> None:
    """The ids of an answer are those of its markers."""
    assert cited_ids("b [ref_id:2] a [ref_id:0, 2] c [ref_id:x] d [3]") == [2, 0]
