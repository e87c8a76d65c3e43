from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever

if TYPE_CHECKING:
    from tests.conftest import Serve

TEXT = "The Saturn V rocket was 110.6 m tall."
ANSWER = "It was 110.6 m tall."


def answer(request: ChatRequest) -> str:
    if "You plan searches" in request.text:
        return json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V", "sources": ["rockets"]}]})
    if "Some choices are given below" in request.text:
        return json.dumps([{"choice": 1, "reason": "rockets"}])
    if "standalone question" in request.text.lower():
        return "How tall was the Saturn V rocket?"
    return ANSWER


@pytest.fixture
def server(serve: Serve) -> LoopbackOpenAI:
    return serve(answer)


def retriever(server: LoopbackOpenAI, memory: ChatMemoryBuffer | None = None) -> AgenticRetriever:
    source = KnowledgeSource("rockets", retriever=MemoryRetriever([TextNode(id_="n", text=TEXT)]))
    return AgenticRetriever([source], llm=server.llm(), memory=memory)


async def test_a_router_takes_it(server: LoopbackOpenAI) -> None:
    """LlamaIndex's own query engine over our retriever can be routed to."""
    made = retriever(server)
    assert made.llm is not None
    inner = RetrieverQueryEngine.from_args(made, llm=made.llm, response_mode=ResponseMode.COMPACT)
    router = RouterQueryEngine(
        selector=LLMSingleSelector.from_defaults(llm=made.llm),
        query_engine_tools=[
            QueryEngineTool.from_defaults(inner, description="rockets"),
            QueryEngineTool.from_defaults(inner, description="weather"),
        ],
        llm=made.llm,
    )
    for response in (router.query("How tall was the rocket?"), await router.aquery("How tall was the rocket?")):
        assert str(response) == ANSWER
        assert [node.node_id for node in response.source_nodes] == ["n"]


async def test_a_retriever_tool_takes_it(server: LoopbackOpenAI) -> None:
    """The tool's output is the evidence, without our provenance."""
    tool = RetrieverTool.from_defaults(retriever(server), name="rockets", description="launch vehicles")
    for output in (tool.call("height of the rocket"), await tool.acall("height of the rocket")):
        assert TEXT in output.content
        assert "agentic_kb" not in output.content


def test_fusion_merges_what_several_queries_find(server: LoopbackOpenAI) -> None:
    """LlamaIndex's fusion compares nodes by their hashes: one that two queries find is the same node."""
    made = retriever(server)
    fused = QueryFusionRetriever([made], llm=made.llm, num_queries=3, use_async=False).retrieve("Saturn V")
    assert [node.node_id for node in fused] == ["n"]
    assert fused[0].node.metadata == {}
