from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY
from llama_index_agentic_kb.sources import Fields, KnowledgeSource
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer
from llama_index_agentic_kb.testing import MemoryRetriever

Nodes: TypeAlias = list[NodeWithScore]
FACTS = ["Paris is the capital of France.", "Rome is the capital of Italy.", "Madrid is the capital of Spain."]


@dataclass
class Told:
    text: str
    deltas: list[str]
    response: Response | PydanticResponse | StreamingResponse | AsyncStreamingResponse

    @property
    def source_ids(self) -> list[str]:
        return [node.node.node_id for node in self.response.source_nodes]

    @property
    def metadata(self) -> dict[str, Any] | None:
        return self.response.metadata


@dataclass
class Way:
    """One of the four ways to ask a synthesizer; modes are tested by two of them, which differ in all."""

    name: str

    @property
    def streaming(self) -> bool:
        return self.name.endswith("stream")

    async def ask(
        self, synthesizer: AgenticSynthesizer, question: str, nodes: Sequence[NodeWithScore], **kwargs: Any
    ) -> Told:
        assert synthesizer._streaming is self.streaming
        if self.name.startswith("a"):
            response = await synthesizer.asynthesize(question, list(nodes), **kwargs)
        else:
            response = synthesizer.synthesize(question, list(nodes), **kwargs)
        if isinstance(response, StreamingResponse):
            deltas = list(response.response_gen)
        elif isinstance(response, AsyncStreamingResponse):
            deltas = [delta async for delta in response.response_gen]
        else:
            deltas = [str(response)] if isinstance(response, PydanticResponse) else [response.response or ""]
        return Told("".join(deltas), deltas, response)


@pytest.fixture(params=["sync", "astream"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


def make_nodes(texts: Sequence[str] = FACTS) -> Nodes:
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"n{number}"), score=1.0 - number / 10)
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def nodes() -> Nodes:
    return make_nodes()


@pytest.fixture
def atlas() -> KnowledgeSource:
    return KnowledgeSource(
        "atlas", retriever=MemoryRetriever(FACTS), fields=Fields(title="name", content="body", terms="tags")
    )


@pytest.fixture
def atlas_nodes() -> Nodes:
    mark = {"source": "atlas", "activity": 1, "searches": []}
    metadata = {"name": "Gazetteer", "body": "Paris lies on the Seine.", "tags": "river", PROVENANCE_KEY: mark}
    node = TextNode(text="unused", id_="n0", metadata=metadata, excluded_llm_metadata_keys=[PROVENANCE_KEY])
    return [NodeWithScore(node=node, score=0.5)]
