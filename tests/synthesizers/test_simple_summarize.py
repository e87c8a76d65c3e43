from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.synthesizers import SimpleSummarize
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply

Nodes = list[NodeWithScore]


def prompt(llm: ScriptedLLM) -> str:
    return "\n".join(message.content or "" for message in llm.calls[-1])


async def test_one_call_answers(way: Any, nodes: Nodes) -> None:
    """All passages stand in one prompt."""
    llm = ScriptedLLM(ScriptedReply("Three [ref_id:2][ref_id:3].", chunk_size=4))
    told = await way.ask(SimpleSummarize(llm, streaming=way.streaming), "?", nodes)
    assert (told.text, len(llm.calls)) == ("Three [ref_id:2].", 1)


def test_every_passage_gets_its_share(nodes_of: Callable[[list[str]], Nodes]) -> None:
    """Long passages are cut, each to the same length; what short ones leave over is theirs, and nothing is dropped."""
    llm = ScriptedLLM("ok", context_window=1_400, num_output=100)
    long = [" ".join(f"Sentence {number} of {name}." for number in range(300)) for name in ("first", "second", "third")]
    made = run(SimpleSummarize(llm).synthesis(QueryBundle("?"), nodes_of([long[0], "Short.", *long[1:]])))
    counts = [prompt(llm).count(f"of {name}.") for name in ("first", "second", "third")]
    assert "Short." in prompt(llm)
    assert max(counts) - min(counts) <= 1
    assert min(counts) > 40
    assert made.dropped == 0
    assert made.warnings == ["3 passages were cut to fit into the model's window"]
    assert [prompt(llm).index(f'ref_id="{number}"') for number in range(4)] == sorted(
        prompt(llm).index(f'ref_id="{number}"') for number in range(4)
    )


def test_too_many_passages_are_counted(nodes_of: Callable[[list[str]], Nodes]) -> None:
    """Where a share would be a few words, passages are left out and counted, not sent as scraps."""
    llm = ScriptedLLM("ok", context_window=1_000, num_output=100)
    made = run(SimpleSummarize(llm).synthesis(QueryBundle("?"), nodes_of(["A longer text. " * 30] * 60)))
    assert 0 < made.dropped < 60
    assert prompt(llm).count("<passage ref_id") == 60 - made.dropped
