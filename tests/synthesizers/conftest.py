from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.settings import Settings

from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.sources import Fields, KnowledgeSource
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer
from llama_index_agentic_kb.testing import LoopbackOpenAI, MemoryRetriever

FACTS = ["Paris is the capital of France.", "Rome is the capital of Italy.", "Madrid is the capital of Spain."]


@dataclass
class Told:
    """A response, read to its end."""

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


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test finds an OpenAI key, and none leaves settings behind."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(Settings, "_prompt_helper", None)
    monkeypatch.setattr(Settings, "_callback_manager", None)
    yield
    Settings._llm = None


def make_nodes(texts: Sequence[str] = FACTS) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"n{number}"), score=1.0 - number / 10)
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def nodes() -> list[NodeWithScore]:
    """Three facts."""
    return make_nodes()


@pytest.fixture
def nodes_of() -> Callable[[Sequence[str]], list[NodeWithScore]]:
    return make_nodes


@pytest.fixture
def atlas() -> KnowledgeSource:
    """A source with field names of its own."""
    return KnowledgeSource(
        "atlas", retriever=MemoryRetriever(FACTS), fields=Fields(title="name", content="body", terms="tags")
    )


@pytest.fixture
def atlas_nodes() -> list[NodeWithScore]:
    """Evidence as our retriever gives it."""
    mark = {"source": "atlas", "activity": 1, "searches": []}
    metadata = {"name": "Gazetteer", "body": "Paris lies on the Seine.", "tags": "river", PROVENANCE_KEY: mark}
    node = TextNode(text="unused", id_="n0", metadata=metadata, excluded_llm_metadata_keys=[PROVENANCE_KEY])
    return [NodeWithScore(node=node, score=0.5)]


@pytest.fixture
def server_of() -> Iterator[Callable[[Any], LoopbackOpenAI]]:
    """Start loopback servers; all are stopped at the end."""
    servers: list[LoopbackOpenAI] = []

    def start(reply: Any) -> LoopbackOpenAI:
        servers.append(LoopbackOpenAI(reply).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
