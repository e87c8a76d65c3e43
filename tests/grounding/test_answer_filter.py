from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.grounding import AnswerFilter, AnswerRules, CheckedText, cited_ids, clean_answer
from llama_index_agentic_kb.grounding.answers import clean_values

RULES = AnswerRules({0, 1}, {"https://a.org/x"})
PIECES = st.lists(
    st.sampled_from(
        [
            *("[ref_id:0]", "[ref_id:9]", "[ref_", "id:1]", "\u200b", "\u200d", "\U000e0041", "\n", " ", "\r"),
            *("https://", "evil.com/?q", "https://a.org/x", "](", ")", "[a", "<", "img src=", ">", "word", "\u6771"),
        ]
    ),
    max_size=20,
)


def test_an_answer_is_checked_in_one_pass() -> None:
    """Hidden characters, markers and links; each is counted."""
    text = "A\u200b [ref_id:0] [ref_id:7] ![x](https://evil.com/) [y](https://a.org/x)"
    left = "A [ref_id:0] ![x] (link removed) [y](https://a.org/x)"
    assert clean_answer(text, RULES) == CheckedText(left, markers=1, links=1, hidden=1)


def test_what_is_taken_out_joins_no_link() -> None:
    """Neither a marker nor a hidden character in the middle hides an address."""
    assert clean_answer("htt[ref_id:9]ps://evil.com/x", RULES).text == "(link removed)"
    assert clean_answer("ht\u200btps://evil.com/x", RULES).text == "(link removed)"
    assert clean_answer("[ref\u200b_id:9]", RULES) == CheckedText("", markers=1, hidden=1)


def test_all_links_may_be_let_through() -> None:
    """Markers and hidden characters are checked all the same."""
    rules = AnswerRules((), None)
    assert clean_answer("![x](https://evil.com) [ref_id:0]", rules) == CheckedText("![x](https://evil.com)", markers=1)


@settings(max_examples=200)
@given(PIECES, st.integers(1, 6))
def test_a_stream_tells_the_same(pieces: list[str], size: int) -> None:
    """However the text is cut; what is left cites and links to what is known alone."""
    text = "".join(pieces)
    answer = AnswerFilter(RULES)
    told = "".join(answer.feed(text[at : at + size]) for at in range(0, len(text), size)) + answer.close()
    assert answer.checked(told) == clean_answer(text, RULES)
    assert set(cited_ids(told)) <= {0, 1}
    assert "//evil.com" not in told


def test_texts_in_data_are_checked() -> None:
    """At any depth; numbers, keys and structure stay."""
    value = {"a": ["x [ref_id:9]", 1, None], "https://evil.com": {"b": "see https://evil.com \u200b"}}
    assert clean_values(value, RULES) == (
        {"a": ["x", 1, None], "https://evil.com": {"b": "see (link removed) "}},
        CheckedText("", markers=1, links=1, hidden=1),
    )
