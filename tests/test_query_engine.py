from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.response_synthesizers import get_response_synthesizer as core_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from llama_index_agentic_kb import AgenticQueryEngine, AgenticRetriever, KnowledgeSource, RetrievalResponse
from llama_index_agentic_kb.schema import ModelAnswerSynthesisActivity, ModelQueryPlanningActivity
from llama_index_agentic_kb.testing import ChatRequest, HashEmbedding, LoopbackOpenAI, MemoryRetriever
from tests.space import ANSWER

if TYPE_CHECKING:
    from tests.conftest import Serve


QUESTION = "How tall was the rocket that launched Apollo 11?"
TEXTS = {
    "missions": ["Apollo 11 was launched by a Saturn V rocket in July 1969.", "Voyager 1 left in 1977."],
    "rockets": ["The Saturn V rocket was 110.6 m tall.", "The Ariane 5 was about 50 m tall."],
}


def sources() -> list[KnowledgeSource]:
    embedding = HashEmbedding()
    return [
        KnowledgeSource(
            name,
            f"articles on {name}",
            index=VectorStoreIndex.from_documents(
                [Document(text=text, metadata={"title": text.split(" was")[0]}) for text in texts],
                embed_model=embedding,
            ),
        )
        for name, texts in TEXTS.items()
    ]


def account(response: object) -> RetrievalResponse:
    return RetrievalResponse.parse(getattr(response, "metadata")["agentic_kb"])  # noqa: B009 (any response class)


@pytest.mark.parametrize("streaming", [False, True])
def test_tokens_are_what_the_server_billed(server: LoopbackOpenAI, *, streaming: bool) -> None:
    """Activity, LlamaIndex's token counter and the server's bill agree, streaming or not."""
    counter = TokenCountingHandler()
    manager = CallbackManager([counter])
    retriever = AgenticRetriever(sources(), llm=server.llm(), callback_manager=manager)
    response = AgenticQueryEngine(retriever, streaming=streaming).query(QUESTION)
    str(response)
    billed = [
        (record.input_tokens or 0, record.output_tokens or 0)
        for record in account(response).activity or []
        if isinstance(record, (ModelQueryPlanningActivity, ModelAnswerSynthesisActivity))
    ]
    assert sum(given for given, _ in billed) == server.billed.prompt_tokens == counter.prompt_llm_token_count
    assert (
        sum(written for _, written in billed) == server.billed.completion_tokens == counter.completion_llm_token_count
    )
    assert server.billed.calls == 2


def test_what_llama_index_s_engine_makes_is_ours(server: LoopbackOpenAI) -> None:
    """``from_args`` needs no model and asks for no key; ``with_retriever`` keeps synthesizer and settings."""
    plain = AgenticQueryEngine.from_args(AgenticRetriever(sources()), node_postprocessors=None)
    assert account(plain.query("Saturn V rocket")).extracts
    cut = SimilarityPostprocessor(similarity_cutoff=2.0)
    engine = AgenticQueryEngine.from_args(
        AgenticRetriever(sources()), server.llm(), response_mode=ResponseMode.REFINE, node_postprocessors=[cut]
    )
    other = AgenticQueryEngine(engine.retriever, engine.synthesizer).with_retriever(
        MemoryRetriever(["Saturn V rocket"])
    )
    assert type(other) is AgenticQueryEngine
    assert str(other.query("Saturn V rocket")) == ANSWER
    assert engine.with_retriever(AgenticRetriever(sources())).query(QUESTION).source_nodes == []


class Hanging(BaseNodePostprocessor):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ends = threading.Event()

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._ends.wait(60)
        return nodes


@pytest.mark.parametrize("where", ["retriever", "engine"])
def test_a_hanging_postprocessor_is_never_passed_by(where: str) -> None:
    """What it was given is withheld, and told, by the deadline."""
    kwargs: dict[str, Any] = {"retriever": {}, "engine": {}}
    hanging = Hanging()
    kwargs[where] = {"node_postprocessors": [hanging]}
    retriever = AgenticRetriever(sources(), max_runtime_in_seconds=1.5, **kwargs["retriever"])
    response = AgenticQueryEngine(retriever, **kwargs["engine"]).query(QUESTION)
    assert not hanging._ends.is_set()
    hanging._ends.set()
    assert response.source_nodes == []
    told = account(response)
    assert told.status_code == 206
    assert [(part.what, part.outcome) for part in told.missing] == [
        ("node postprocessor Hanging", "timeout"),
        ("evidence", "empty"),
    ]


def test_no_evidence_is_told_in_data(server: LoopbackOpenAI) -> None:
    """Where nothing is found no model is called for an answer, and the account says what is missing."""
    engine = AgenticQueryEngine(
        AgenticRetriever([KnowledgeSource("empty", retriever=MemoryRetriever([]))], llm=server.llm())
    )
    response = engine.query(QUESTION)
    assert str(response) == "Empty Response"
    assert [(part.what, part.outcome) for part in account(response).missing] == [("evidence", "empty")]
    assert account(response).status_code == 200
    assert server.billed.calls == 1


async def test_streams_of_llama_index_s_synthesizers_pass_through(server: LoopbackOpenAI) -> None:
    """A streaming synthesizer of LlamaIndex's own streams token by token, sync and async."""
    synthesizer = core_synthesizer(llm=server.llm(), response_mode=ResponseMode.COMPACT, streaming=True)
    engine = AgenticQueryEngine(AgenticRetriever(sources()), synthesizer)
    response = await asyncio.to_thread(engine.query, QUESTION)
    assert isinstance(response, StreamingResponse)
    assert "".join(response.response_gen) == ANSWER
    again = await engine.aquery(QUESTION)
    assert isinstance(again, AsyncStreamingResponse)
    deltas = [delta async for delta in again.async_response_gen()]
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 3


def test_a_stream_that_is_read_late_keeps_its_time(server: LoopbackOpenAI) -> None:
    """The time that a reader takes before the first token is not taken off the answer's."""
    retriever = AgenticRetriever(sources(), llm=server.llm(), max_runtime_in_seconds=2.5)
    response = AgenticQueryEngine(retriever, streaming=True).query(QUESTION)
    time.sleep(2.6)  # longer than the request may take
    assert str(response) == ANSWER


TEXT = "The Saturn V rocket was 110.6 m tall."
HEIGHT = "It was 110.6 m tall."


def answer(request: ChatRequest) -> str:
    if "You plan searches" in request.text:
        return json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V", "sources": ["rockets"]}]})
    if "Some choices are given below" in request.text:
        return json.dumps([{"choice": 1, "reason": "rockets"}])
    if "standalone question" in request.text.lower():
        return "How tall was the Saturn V rocket?"
    return HEIGHT


@pytest.fixture
def routed(serve: Serve) -> LoopbackOpenAI:
    return serve(answer)


def retriever(routed: LoopbackOpenAI, memory: ChatMemoryBuffer | None = None) -> AgenticRetriever:
    source = KnowledgeSource("rockets", retriever=MemoryRetriever([TextNode(id_="n", text=TEXT)]))
    return AgenticRetriever([source], llm=routed.llm(), memory=memory)


async def test_a_router_takes_it(routed: LoopbackOpenAI) -> None:
    made = retriever(routed)
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
        assert str(response) == HEIGHT
        assert [node.node_id for node in response.source_nodes] == ["n"]
    tools = [RetrieverTool.from_defaults(made, description=text) for text in ("rockets", "weather")]
    retrievers = RouterRetriever(LLMSingleSelector.from_defaults(llm=made.llm), tools, llm=made.llm)
    for nodes in (retrievers.retrieve("How tall was it?"), await retrievers.aretrieve("How tall was it?")):
        assert [node.node_id for node in nodes] == ["n"]


async def test_a_retriever_tool_takes_it(routed: LoopbackOpenAI) -> None:
    """The tool's output is the evidence, without our provenance."""
    tool = RetrieverTool.from_defaults(retriever(routed), name="rockets", description="launch vehicles")
    for output in (tool.call("height of the rocket"), await tool.acall("height of the rocket")):
        assert TEXT in output.content
        assert "agentic_kb" not in output.content


def test_fusion_merges_what_several_queries_find(routed: LoopbackOpenAI) -> None:
    """LlamaIndex's fusion compares nodes by their hashes: one that two queries find is the same node."""
    made = retriever(routed)
    fused = QueryFusionRetriever([made], llm=made.llm, num_queries=3, use_async=False).retrieve("Saturn V")
    assert [node.node_id for node in fused] == ["n"]
    assert fused[0].node.metadata == {}
