"""Citations in a model's own style lead to our passages, or nowhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, check_grounding
from llama_index_agentic_kb.grounding.citations import AnswerFilter, AnswerRules, OwnCitations, clean_answer
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM, ScriptedReply

TALL = "The Saturn V was 110.6 m tall"
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
    (
        "See [1](https://a.example) and\n[1] Title\n[^1]: note",
        1,
        "See [1](https://a.example) and\n[1] Title\n[^1]: note",
    ),
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
    """The claim is supported, and not withheld; what the reader sees has our marker alone, streamed or not."""
    source = KnowledgeSource("docs", retriever=MemoryRetriever([f"{TALL}."]))
    reply = ScriptedReply(f"{TALL}{style.format(1)}.", chunk_size=3)
    kb = KnowledgeBase([source], llm=ScriptedLLM(lambda _: reply), effort="minimal")
    answer = kb.answer("How tall was the Saturn V?", filtering_level="low").answer
    assert (answer.text, answer.skipped_reasons) == (f"{TALL}.", [])
    assert [citation.sources for citation in answer.citations] == [[0]]
    engine = kb.as_query_engine(streaming=True)
    marked = str(engine.query("How tall was the Saturn V?"))
    assert "".join(marked.split()) == f"{TALL}[ref_id:0].".replace(" ", "")


@pytest.mark.parametrize("style", STYLES)
def test_they_are_no_part_of_what_is_judged(style: str) -> None:
    """A number of a style that nobody asked for is no number of the claim."""
    (claim,) = check_grounding(f"{TALL}{style.format(1)}.", [f"{TALL}."]).claims
    assert claim.verdict == "supported"


def test_they_are_counted_as_markers() -> None:
    """What was taken out is in the count of removed markers."""
    assert clean_answer(f"{TALL} [1] [9].", AnswerRules({0, 1, 2})).markers == 2


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ("\n```markdown\nTall [0].\n\nYes.\n```\n", "Tall [ref_id:0].\n\nYes.\n"),
        ("```md\nTall.\n```", "Tall.\n"),
        ("```markdown\nRun:\n```sh\nls `a`\n```\nDone.\n```\nBye.", "Run:\n```sh\nls `a`\n```\nDone.\nBye."),
        ("```markdown\nCut", "Cut"),
        ("```markdownish\nx\n```", "```markdownish\nx\n```"),
        ("```sh\nls\n```", "```sh\nls\n```"),
        ("```", "```"),
        ("Tall ```markdown\nx\n```", "Tall ```markdown\nx\n```"),
    ],
)
def test_a_fence_around_the_answer_goes(reply: str, shown: str, size: int) -> None:
    """A whole answer in a Markdown fence loses it, however it is streamed; other fences stay."""
    answer = AnswerFilter(AnswerRules({0, 1, 2}))
    streamed = (
        "".join(answer.feed(reply[start : start + size]) for start in range(0, len(reply), size)) + answer.close()
    )
    assert streamed == shown
