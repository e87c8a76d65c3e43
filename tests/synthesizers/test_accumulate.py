from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore, QueryBundle
from pydantic import BaseModel

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.synthesizers import Accumulate, CompactAccumulate
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply

Nodes = list[NodeWithScore]
CITIES = ["Paris", "Rome", "Madrid"]


class Capital(BaseModel):
    city: str


def city(messages: list[ChatMessage]) -> str:
    shown = "\n".join(message.content or "" for message in messages)
    number = next(number for number, name in enumerate(CITIES) if name in shown)
    return f"{CITIES[number]} [ref_id:{number}]"


async def test_each_passage_is_answered_from_alone(way: Any, nodes: Nodes) -> None:
    """One answer a passage, joined as LlamaIndex joins them; streamed, each is told as soon as its turn has come."""
    llm = ScriptedLLM(lambda messages: ScriptedReply(city(messages), latency=0.1 if "Paris" in str(messages) else 0.0))
    told = await way.ask(Accumulate(llm, streaming=way.streaming), "?", nodes)
    assert told.text == (
        "Response 1: Paris [ref_id:0]\n---------------------\n"
        "Response 2: Rome [ref_id:1]\n---------------------\n"
        "Response 3: Madrid [ref_id:2]"
    )
    assert len(told.deltas) == (3 if way.streaming else 1)
    assert len(llm.calls) == 3


def test_a_passage_can_only_cite_itself(nodes: Nodes) -> None:
    """An answer from one passage names no other."""
    text = str(Accumulate(ScriptedLLM("x [ref_id:1]")).synthesize("?", nodes, separator=" | "))
    assert text == "Response 1: x | Response 2: x [ref_id:1] | Response 3: x"


async def test_compact_accumulate_packs_first(way: Any, nodes: Nodes) -> None:
    """Passages that fit into one call make one answer."""
    llm = ScriptedLLM("All [ref_id:0][ref_id:2].")
    told = await way.ask(CompactAccumulate(llm, streaming=way.streaming), "?", nodes)
    assert told.text == "Response 1: All [ref_id:0][ref_id:2]."


def test_a_big_passage_makes_several_answers(nodes_of: Callable[[list[str]], Nodes]) -> None:
    """Each part of a split passage is answered from, under the passage's number."""
    llm = ScriptedLLM("x [ref_id:0]", context_window=1_000, num_output=100)
    text = run(Accumulate(llm).synthesis(QueryBundle("?"), nodes_of(["A sentence. " * 600]))).text
    assert text.count("x [ref_id:0]") == len(llm.calls) > 2
