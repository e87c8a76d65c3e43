from __future__ import annotations

from typing import Any

from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.synthesizers import NoText


async def test_the_nodes_are_the_response(way: Any, nodes: list[NodeWithScore]) -> None:
    """No text, all nodes, no model."""
    told = await way.ask(NoText(streaming=way.streaming), "?", nodes)
    assert (told.text, told.source_ids) == ("", ["n0", "n1", "n2"])


def test_without_nodes_there_is_no_text_either() -> None:
    """The synthesis of nothing is nothing."""
    assert run(NoText().synthesis(QueryBundle("?"), [])).text == ""
