"""Reference markers and all else that an answer may hold, checked whole and in streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, check_grounding
from llama_index_agentic_kb.grounding.citations import (
    AnswerFilter,
    AnswerRules,
    CheckedText,
    OwnCitations,
    clean_markers,
    clean_values,
)
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, ScriptedReply

RULES = AnswerRules({0, 1}, {"https://a.org/x"})


@pytest.mark.parametrize(
    ("text", "cleaned", "removed"),
    [
        ("Paris [ref_id: 1 ].", "Paris [ref_id:1].", 0), ("Paris [REF_ID:1].", "Paris [ref_id:1].", 0),
        ("Paris [ref_id:0, ref_id:1].", "Paris [ref_id:0][ref_id:1].", 0),
        ("Paris [ref_id:1;1].", "Paris [ref_id:1].", 0),
        ("Paris [ref_id:0][ref_id:1].", "Paris [ref_id:0][ref_id:1].", 0), ("Paris [ref_id:7].", "Paris.", 1),
        ("Paris [ref_id:7, 1].", "Paris [ref_id:1].", 1), ("Paris [ref_id:7, 8] is big.", "Paris is big.", 2),
        ("Paris [ref_id:N].", "Paris.", 1), ("Paris [ref_id:-1].", "Paris.", 1),
        ("Paris [ref_id:99999999999999999999].", "Paris.", 1), ("Paris [ref_id:].", "Paris.", 1),
        ("Paris [ref_id:1", "Paris", 1), ("Paris [ref", "Paris [ref", 0),
        ("a[0] and [1] and [see there]", "a[0] and [1] and [see there]", 0), ("[ref_id:\n1]", "[ref_id:\n1]", 0),
        ("[ref_[ref_id:9]id:7]", "[ref_[]id:7]", 1), ("", "", 0),
    ],
)  # fmt: skip
def test_markers_take_one_form_and_stay_in_range(text: str, cleaned: str, removed: int) -> None:
    """Markers naming a valid id come out in one form; what names none is removed, counted, and makes no other."""
    assert clean_markers(text, {0, 1}) == (cleaned, removed)


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
    assert AnswerFilter(RULES).checked(text) == expected


def test_texts_in_data_are_checked() -> None:
    """At any depth; numbers, keys and structure stay."""
    value = {"a": ["x [ref_id:9]", 1, None], "https://evil.com": {"b": "see https://evil.com \u200b"}}
    assert clean_values(value, RULES) == (
        {"a": ["x", 1, None], "https://evil.com": {"b": "see (link removed) "}},
        CheckedText("", markers=1, links=1, hidden=1),
    )


TALL = "The Saturn V was 110.6 m tall"
LINKED = "See [1](https://a.example) and\n[1] Title\n[^1]: note"
STYLES = ["[{}]", " [{}]", " ({})", " [Source {}]", "【{}】", "[^{}]", " [Doc {}]", "【{}†source】"]
CASES = [
    (f"{TALL} [3].", 3, f"{TALL} [ref_id:2]."),
    (f"{TALL} [0].", 3, f"{TALL} [ref_id:0]."),
    (f"{TALL} [3][1].", 3, f"{TALL} [ref_id:2][ref_id:0]."),
    (f"{TALL} [0, 2]; so [1].", 3, f"{TALL} [ref_id:0][ref_id:2]; so [ref_id:1]."),
    (f"{TALL} [1].", 3, f"{TALL}."),
    (f"{TALL} [7].", 3, f"{TALL}."),
    (f"{TALL} [ref_id:1] [1].", 3, f"{TALL} [ref_id:1]."),
    (f"{TALL} [2019].", 3, f"{TALL} [2019]."),
    (f"{TALL}, (1) and (2) aside.", 3, f"{TALL}, (1) and (2) aside."),
    ("Use `a[1]` or:\n```\nb[2] = c[3]\n```\n", 3, "Use `a[1]` or:\n```\nb[2] = c[3]\n```\n"),
    (LINKED, 1, LINKED),
    (f"{TALL} [1].", 0, f"{TALL} [1]."),
]


def read(pieces: list[str], passages: int) -> str:
    citations = OwnCitations(range(passages))
    return "".join(map(citations.feed, pieces)) + citations.close()


@pytest.mark.parametrize(("text", "passages", "shown"), CASES)
def test_numbers_that_mean_one_passage_are_markers(text: str, passages: int, shown: str) -> None:
    """The others are taken out; code, links, footnotes and years are text."""
    assert read([text], passages) == shown


@given(st.sampled_from(CASES), st.lists(st.integers(0, 80), max_size=20))
def test_a_stream_is_the_same(case: tuple[str, int, str], places: list[int]) -> None:
    """However it is cut."""
    text, passages, shown = case
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    assert read([text[start:end] for start, end in pairwise(bounds)], passages) == shown


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_read_at_every_door(style: str) -> None:
    """The claim is supported, and not withheld; the number is no part of it; what is shown has our marker alone."""
    source = KnowledgeSource("docs", retriever=MemoryRetriever([f"{TALL}."]))
    reply = ScriptedReply(f"{TALL}{style.format(1)}.", chunk_size=3)
    kb = KnowledgeBase([source], llm=ScriptedLLM(lambda _: reply), effort="minimal")
    answer = kb.answer("How tall was the Saturn V?", filtering_level="low").answer
    assert (answer.text, answer.skipped_reasons) == (f"{TALL}.", [])
    assert [citation.sources for citation in answer.citations] == [[0]]
    engine = kb.as_query_engine(streaming=True)
    marked = str(engine.query("How tall was the Saturn V?"))
    assert "".join(marked.split()) == f"{TALL}[ref_id:0].".replace(" ", "")
    (claim,) = check_grounding(f"{TALL}{style.format(1)}.", [f"{TALL}."]).claims
    assert claim.verdict == "supported"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ("\n```markdown\nTall [0].\n\nYes.\n```\n", "Tall [ref_id:0].\n\nYes.\n"), ("```md\nTall.\n```", "Tall.\n"),
        ("```markdown\nRun:\n```sh\nls `a`\n```\nDone.\n```\nBye.", "Run:\n```sh\nls `a`\n```\nDone.\nBye."),
        ("```markdown\nCut", "Cut"), ("```markdownish\nx\n```", "```markdownish\nx\n```"),
        ("```sh\nls\n```", "```sh\nls\n```"), ("```", "```"), ("Tall ```markdown\nx\n```", "Tall ```markdown\nx\n```"),
    ],
)  # fmt: skip
def test_a_fence_around_the_answer_goes(reply: str, shown: str, size: int) -> None:
    """A whole answer in a Markdown fence loses it, however it is streamed; other fences stay."""
    answer = AnswerFilter(AnswerRules({0, 1, 2}))
    streamed = [answer.feed(reply[start : start + size]) for start in range(0, len(reply), size)]
    assert "".join(streamed) + answer.close() == shown
