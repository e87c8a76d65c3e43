"""What a reasoning model thinks aloud is read by nobody."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.llm.thoughts import ThoughtFilter, without_thoughts
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply

CASES = [
    ("<think>\nHm, [ref_id:9].\n</think>\n\nIt was tall.", "It was tall."),
    ("<THINKING>a</thinking>It <reasoning>b</reasoning>was.", "It was."),
    ("thoughts that began in the prompt</think>\nIt was.", "It was."),
    ("<think></think>It was.", "It was."),
    ("<think>it never ends", ""),
    ("The tag `<think>` opens, `</think>` closes.", "The tag `<think>` opens, `</think>` closes."),
    ("a < b <thin", "a < b <thin"),
    ("  It was.", "  It was."),
    ("<think>a <b> </thought> c</think>It was.", "It was."),
]


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_thoughts_are_left_out_of_a_reply(text: str, shown: str) -> None:
    """Blocks of any name, in any case, not closed, not opened; what is no block stays."""
    assert without_thoughts(text)[0] == shown


@given(st.sampled_from([case for case in CASES if "prompt" not in case[0]]), st.lists(st.integers(0, 60), max_size=20))
def test_a_stream_is_the_same(case: tuple[str, str], places: list[int]) -> None:
    """However it is cut."""
    text, shown = case
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    thoughts = ThoughtFilter()
    assert "".join(thoughts.feed(text[start:end]) for start, end in pairwise(bounds)) + thoughts.close() == shown


def think(request: ChatRequest) -> Reply:
    thought = '<think>{"sub_queries": [{"id": "q9", "query": "SECRET thought"}]} or [ref_id:7]?</think>\n\n'
    if "You plan searches" in request.text:
        return Reply(thought + json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V rocket"}]}))
    return Reply(thought + "It was 110.6 m tall [ref_id:0].", chunk_size=3)


def test_neither_plan_nor_answer_nor_claims_nor_reader_get_a_thought() -> None:
    """Whole, as an answer, streamed and in a chat; the account counts them."""
    with LoopbackOpenAI(think) as server:
        source = KnowledgeSource("docs", retriever=MemoryRetriever(["The Saturn V rocket was 110.6 m tall."]))
        kb = KnowledgeBase([source], llm=server.llm())
        response = kb.retrieve("How tall was the Saturn V rocket?")
        assert response.text == "It was 110.6 m tall [ref_id:0]."
        assert "SECRET" not in response.to_json()
        assert response.plan is not None
        assert [sub_query.query for sub_query in response.plan.sub_queries][-1] == "height of the Saturn V rocket"
        assert response.grounding is not None
        assert [claim.text for claim in response.grounding.claims] == ["It was 110.6 m tall [ref_id:0]."]
        assert "characters of thoughts were left out" in str((response.activity or [])[-1].warning)
        assert kb.answer("How tall was the Saturn V rocket?").answer.text == "It was 110.6 m tall."
        told = "".join(piece.text for piece in kb.stream_answer("How tall was the rocket?") if piece.kind == "text")
        assert told == "It was 110.6 m tall."
        assert "".join(kb.as_chat_engine().stream_chat("How tall was it?").response_gen) == response.text
