from __future__ import annotations

from typing import Any

from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.synthesizers import Generation
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply


async def test_the_model_is_asked_alone(way: Any, nodes: list[NodeWithScore]) -> None:
    """The question is all that the model sees, the nodes stay the sources, and nothing can be cited."""
    llm = ScriptedLLM(ScriptedReply("From memory [ref_id:0].", chunk_size=4))
    told = await way.ask(Generation(llm, streaming=way.streaming), "Why?", nodes)
    assert told.text == "From memory."
    assert told.source_ids == ["n0", "n1", "n2"]
    assert [message.content for message in llm.calls[0]] == ["Why?"]


async def test_it_needs_no_nodes(way: Any) -> None:
    """Without nodes the model is asked all the same, as in LlamaIndex."""
    template = PromptTemplate("Be {tone}: {query_str}")
    llm = ScriptedLLM("Sure.")
    told = await way.ask(Generation(llm, streaming=way.streaming, simple_template=template), "Why?", [], tone="kind")
    assert told.text == "Sure."
    assert llm.calls[0][0].content == "Be kind: Why?"
