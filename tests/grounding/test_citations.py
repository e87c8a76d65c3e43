"""Reference markers and all else that an answer may hold, checked whole and in streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.grounding.citations import (
    AnswerFilter,
    AnswerRules,
    CheckedText,
    MarkerFilter,
    Markers,
    cited_ids,
    clean_answer,
    clean_markers,
    clean_values,
)

RULES = AnswerRules({0, 1}, {"https://a.org/x"})
SIGNS = st.lists(
    st.sampled_from(["Paris", " ", "  ", "[", "]", "[ref_id:", "[ref_id:0]", "[ref_id:9]", "ref_", "id", ":", "1", ", ",
                     "\n", "REF_ID", "."]),
    max_size=30,
)  # fmt: skip
PIECES = st.lists(
    st.sampled_from(["[ref_id:0]", "[ref_id:9]", "[ref_", "id:1]", "\u200b", "\u200d", "\U000e0041", "\n", " ", "\r",
                     "https://", "evil.com/?q", "https://a.org/x", "](", ")", "[a", "<", "img src=", ">", "word"]),
    max_size=20,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cleaned", "removed"),
    [
        ("Paris [ref_id: 1 ].", "Paris [ref_id:1].", 0),
        ("Paris [REF_ID:1].", "Paris [ref_id:1].", 0),
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
        ("[ref_[ref_id:9]id:7]", "[ref_[]id:7]", 1),
        ("", "", 0),
    ],
)
def test_markers_take_one_form_and_stay_in_range(text: str, cleaned: str, removed: int) -> None:
    """Markers naming a valid id come out in one form; what names none is removed, counted, and makes no other."""
    assert clean_markers(text, {0, 1}) == (cleaned, removed)


def test_a_marker_split_across_deltas_is_never_shown_in_part() -> None:
    """What may become a marker is held back until it is clear, and no longer than that."""
    markers = MarkerFilter({0})
    given_out = [markers.feed(piece) for piece in ("Paris", " [", "ref_", "id", ":7", "] is", " [ref_id:0", "]. See [")]
    assert given_out == ["Paris", "", "", "", "", " is", "", " [ref_id:0]. See"]
    assert (markers.feed("1]"), markers.feed(" and [r"), markers.close(), markers.removed) == (" [1]", " and", " [r", 1)
    unclosed = "[ref_id:" + "x" * 500
    assert markers.feed(unclosed) + markers.close() == unclosed


def test_markers_are_renumbered_or_stripped() -> None:
    """In order of appearance; what was cited is known either way."""
    for style, text in ((Markers.RENUMBER, "b [ref_id:0] a [ref_id:1][ref_id:0]"), (Markers.STRIP, "b a")):
        markers = MarkerFilter({0, 2}, style)
        assert markers.feed("b [ref_id:2] a [ref_id:0, 2]") + markers.close() == text
        assert markers.cited == [2, 0]


@given(SIGNS)
def test_pieces_change_nothing(pieces: list[str]) -> None:
    """However a text is cut into deltas, the same comes out and the same number of markers is removed."""
    markers = MarkerFilter({0, 1})
    text = "".join(markers.feed(piece) for piece in pieces) + markers.close()
    assert (text, markers.removed) == clean_markers("".join(pieces), {0, 1})
    assert set(cited_ids(text)) <= {0, 1}


def test_cited_ids_come_once_in_order_of_mention() -> None:
    """The ids of an answer are those of its markers."""
    assert cited_ids("b [ref_id:2] a [ref_id:0, 2] c [ref_id:x] d [3]") == [2, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "A\u200b [ref_id:0] [ref_id:7] ![x](https://evil.com/) [y](https://a.org/x)",
            CheckedText("A [ref_id:0] ![x] (link removed) [y](https://a.org/x)", markers=1, links=1, hidden=1),
        ),
        ("htt[ref_id:9]ps://evil.com/x", CheckedText("(link removed)", markers=1, links=1)),
        ("ht\u200btps://evil.com/x", CheckedText("(link removed)", links=1, hidden=1)),
        ("[ref\u200b_id:9]", CheckedText("", markers=1, hidden=1)),
    ],
    ids=["all", "joined by a marker", "joined by a hidden sign", "hidden in a marker"],
)
def test_an_answer_is_checked_in_one_pass(text: str, expected: CheckedText) -> None:
    """Hidden characters, markers and links; each is counted, and what is taken out joins no link."""
    assert clean_answer(text, RULES) == expected


@settings(max_examples=200)
@given(PIECES, st.integers(1, 6))
def test_a_stream_gives_the_same(pieces: list[str], size: int) -> None:
    """However the text is cut; what is left cites and links to what is known alone."""
    text = "".join(pieces)
    answer = AnswerFilter(RULES)
    shown = "".join(answer.feed(text[at : at + size]) for at in range(0, len(text), size)) + answer.close()
    assert shown == clean_answer(text, RULES).text
    assert set(cited_ids(shown)) <= {0, 1}
    assert "//evil.com" not in shown


def test_texts_in_data_are_checked() -> None:
    """At any depth; numbers, keys and structure stay."""
    value = {"a": ["x [ref_id:9]", 1, None], "https://evil.com": {"b": "see https://evil.com \u200b"}}
    assert clean_values(value, RULES) == (
        {"a": ["x", 1, None], "https://evil.com": {"b": "see (link removed) "}},
        CheckedText("", markers=1, links=1, hidden=1),
    )
