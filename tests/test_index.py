from __future__ import annotations

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from llama_index_agentic_kb import (
    AgenticChatEngine,
    AgenticVectorStoreIndex,
    ConfigurationError,
    DeniedError,
    KnowledgeBase,
    KnowledgeSource,
    Permissions,
    Principal,
)
from llama_index_agentic_kb.testing import HashEmbedding, LoopbackOpenAI, MemoryRetriever
from tests.space import ANSWER

DOCUMENTS = [
    Document(text="The Saturn V rocket was 110.6 m tall.", metadata={"title": "Saturn V", "kind": "rocket"}),
    Document(text="Apollo 11 was launched by a Saturn V rocket.", metadata={"title": "Apollo 11", "kind": "mission"}),
    Document(text="Voyager 1 left Earth in 1977.", metadata={"title": "Voyager 1", "kind": "mission"}),
]


@pytest.fixture
def embedding() -> HashEmbedding:
    return HashEmbedding()


@pytest.fixture
def index(embedding: HashEmbedding) -> AgenticVectorStoreIndex:
    return AgenticVectorStoreIndex.from_documents(DOCUMENTS, embed_model=embedding)


def test_from_index_shares_the_store(embedding: HashEmbedding) -> None:
    """An agentic twin of a plain index searches the same vectors; nothing is embedded again."""
    plain = VectorStoreIndex.from_documents(DOCUMENTS, embed_model=embedding)
    calls = len(embedding.calls)
    agentic = AgenticVectorStoreIndex.from_index(plain, name="space", description="space flight")
    assert len(embedding.calls) == calls
    retriever = agentic.as_retriever()
    assert list(retriever.sources) == ["space"]
    assert retriever.retrieve("Voyager 1")[0].text == DOCUMENTS[2].text
    plain.insert(Document(text="New Horizons flew by Pluto."))
    assert any("Pluto" in node.text for node in agentic.as_retriever().retrieve("Pluto"))


def test_as_plain_retriever_is_llama_index_s_own(index: AgenticVectorStoreIndex) -> None:
    """The plain retriever underneath is reachable, and an agentic one over the index does not call itself."""
    assert isinstance(index.as_plain_retriever(similarity_top_k=1), VectorIndexRetriever)
    assert len(index.as_retriever().retrieve("Saturn V rocket")) == 3


def test_llama_index_s_arguments_work(index: AgenticVectorStoreIndex) -> None:
    """``similarity_top_k``, ``filters`` and ``node_postprocessors`` do what they do in LlamaIndex."""
    assert len(index.as_retriever(similarity_top_k=2).retrieve("Saturn V rocket")) == 2
    missions = MetadataFilters(filters=[MetadataFilter(key="kind", value="mission")])
    found = index.as_retriever(filters=missions).retrieve("Saturn V rocket")
    assert {node.metadata["kind"] for node in found} == {"mission"}
    engine = index.as_query_engine(
        similarity_top_k=3, filters=missions, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.3)]
    )
    response = engine.query("Apollo 11 launched by a rocket")
    assert [node.metadata["title"] for node in response.source_nodes] == ["Apollo 11"]
    assert index.as_retriever(node_postprocessors=None).retrieve("Saturn V rocket")
    assert index.as_query_engine(node_postprocessors=None).query("Saturn V rocket").source_nodes


def test_chat_modes(index: AgenticVectorStoreIndex, server: LoopbackOpenAI) -> None:
    kinds: dict[ChatMode, type[BaseChatEngine]] = {
        ChatMode.BEST: AgenticChatEngine,
        ChatMode.CONTEXT: ContextChatEngine,
        ChatMode.CONDENSE_QUESTION: CondenseQuestionChatEngine,
        ChatMode.SIMPLE: SimpleChatEngine,
    }
    for mode, kind in kinds.items():
        memory = ChatMemoryBuffer.from_defaults(token_limit=2_000)
        chat = index.as_chat_engine(mode, llm=server.llm(), memory=memory)
        assert isinstance(chat, kind)
        assert ANSWER in str(chat.chat("How tall was it?"))
        assert len(memory.get_all()) == 2
    with pytest.raises(ConfigurationError, match="needs a language model"):
        index.as_chat_engine(ChatMode.CONTEXT)


def test_it_may_have_permissions(embedding: HashEmbedding) -> None:
    """Everything that is made of it is for one principal then."""
    access = Permissions(tenant="tenant")
    texts = {"acme": "rain in acme", "beta": "rain in beta"}
    documents = [Document(text=text, metadata=access.stamp({}, tenant=tenant)) for tenant, text in texts.items()]
    plain = VectorStoreIndex.from_documents(documents, embed_model=embedding)
    agentic = AgenticVectorStoreIndex.from_index(plain, permissions=access)
    for tenant, text in texts.items():
        made = agentic.as_retriever(principal=Principal(tenant=tenant)).retrieve("rain")
        assert [node.node.get_content() for node in made] == [text]
        assert text in str(agentic.as_chat_engine(principal=Principal(tenant=tenant)).chat("rain"))
    with pytest.raises(DeniedError, match="no principal was given"):
        agentic.as_query_engine().query("rain")


@pytest.mark.parametrize("mode", [ChatMode.BEST, ChatMode.CONTEXT])
def test_a_base_with_a_memory_is_chatted_with_in_it(mode: ChatMode, server: LoopbackOpenAI) -> None:
    """The planner reads the memory that the chat engine writes."""
    memory = ChatMemoryBuffer.from_defaults()
    source = KnowledgeSource("docs", retriever=MemoryRetriever(["The Saturn V rocket was 110.6 m tall."]))
    chat = KnowledgeBase([source], llm=server.llm(), memory=memory).as_chat_engine(mode)
    chat.chat("How tall was the Saturn V rocket?")
    assert len(memory.get_all()) == 2
