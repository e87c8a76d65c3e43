from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.synthesizers import Compact
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply

Nodes = list[NodeWithScore]
NodesOf = Callable[[list[str]], Nodes]


def prompts(llm: ScriptedLLM) -> list[str]:
    return ["\n".join(message.content or "" for message in call) for call in llm.calls]


def ids_in(prompt: str) -> list[int]:
    return [number for number in range(50) if f'<passage ref_id="{number}"' in prompt]


async def test_what_fits_is_one_call(way: Any, nodes: Nodes) -> None:
    """Where all passages fit, there is nothing to refine."""
    llm = ScriptedLLM(ScriptedReply("All [ref_id:2].", chunk_size=4))
    told = await way.ask(Compact(llm, streaming=way.streaming), "?", nodes)
    assert told.text == "All [ref_id:2]."
    assert (len(told.deltas) > 1) is way.streaming
    assert [ids_in(prompt) for prompt in prompts(llm)] == [[0, 1, 2]]


async def test_passages_are_packed_whole_and_in_order(way: Any, nodes_of: NodesOf) -> None:
    """As few calls as fit the window; every passage whole in one of them, under its own number."""
    llm = ScriptedLLM(lambda messages: f"Seen {len(messages)} [ref_id:0].", context_window=1_500, num_output=100)
    texts = [f"Fact {number}: " + "word " * 150 for number in range(20)]
    told = await way.ask(Compact(llm, streaming=way.streaming), "?", nodes_of(texts))
    packed = [ids_in(prompt) for prompt in prompts(llm)]
    assert [number for numbers in packed for number in numbers] == list(range(20))
    assert max(map(len, packed)) >= 4
    assert len(packed) <= 7
    assert all(count_tokens(prompt) <= 1_400 for prompt in prompts(llm))
    assert told.source_ids == [f"n{number}" for number in range(20)]


def test_a_prompt_helpers_sizes_are_kept_to(nodes: Nodes) -> None:
    """A given PromptHelper sets window, output and the most evidence of a call."""
    llm = ScriptedLLM("x")
    helper = PromptHelper(context_window=4_000, num_output=100, chunk_size_limit=70)
    run(Compact(llm, prompt_helper=helper).synthesis(QueryBundle("?"), nodes))
    assert [ids_in(prompt) for prompt in prompts(llm)] == [[0, 1], [2]]


def test_a_huge_node_ends_soon(nodes_of: NodesOf) -> None:
    """A megabyte costs at most a hundred calls, and the loss is said."""
    llm = ScriptedLLM("x", context_window=2_000, num_output=100)
    made = run(Compact(llm).synthesis(QueryBundle("?"), nodes_of(["The end is near. " * 60_000, "Last. " * 2_000])))
    assert len(llm.calls) == 100
    assert made.dropped == 1
    assert made.warnings == [
        "1 passages were cut to fit into the model's window",
        "1 passages are beyond the limit of 100 calls and were left out",
    ]
