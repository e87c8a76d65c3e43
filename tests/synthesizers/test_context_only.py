from __future__ import annotations

from typing import Any

from llama_index.core.response_synthesizers.context_only import ContextOnly as CoresContextOnly
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.synthesizers import ContextOnly
from llama_index_agentic_kb.testing import ScriptedLLM


async def test_the_passages_are_the_text(way: Any, nodes: list[NodeWithScore]) -> None:
    """The text is what LlamaIndex's own mode gives; no model is needed."""
    told = await way.ask(ContextOnly(streaming=way.streaming), "?", nodes)
    Settings.llm = ScriptedLLM()
    assert told.text == str(CoresContextOnly().synthesize("?", nodes))
    assert told.source_ids == ["n0", "n1", "n2"]


def test_a_budget_cuts_and_counts(nodes: list[NodeWithScore]) -> None:
    """With a budget the text keeps to it, and says what is missing."""
    made = run(ContextOnly().synthesis(QueryBundle("?"), nodes, max_output_tokens=60))
    assert 0 < count_tokens(made.text) <= 60
    assert made.dropped > 0
    assert "the output's budget" in made.warnings[0]


def test_a_known_source_tells_the_content(atlas: KnowledgeSource, atlas_nodes: list[NodeWithScore]) -> None:
    """The content is the field that the source names."""
    assert run(ContextOnly().synthesis(QueryBundle("?"), atlas_nodes, sources={"atlas": atlas})).text == (
        "Paris lies on the Seine."
    )
