from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import QueryBundle

from llama_index_agentic_kb import (
    AgenticChatEngine,
    AgenticQueryEngine,
    AgenticRetriever,
    ConfigurationError,
    DeniedError,
    KnowledgeBase,
    KnowledgeSource,
    Principal,
    SynthesisError,
)
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply
from tests.faulty_server import Fault

TEXTS = ["Apollo 11 was launched by a Saturn V rocket.", "The Saturn V rocket was 110.6 m tall."]
ANSWER = "It was 110.6 m tall [ref_id:0]."


def reply(request: ChatRequest) -> str | Reply:
    if "You plan searches" in request.text:
        return json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V rocket"}]})
    return Reply(ANSWER, chunk_size=6)


@pytest.fixture
def server() -> Iterator[LoopbackOpenAI]:
    with LoopbackOpenAI(reply) as running:
        yield running


def engine(server: LoopbackOpenAI | None, memory: ChatMemoryBuffer | None = None) -> AgenticChatEngine:
    llm = None if server is None else server.llm(max_retries=0)
    retriever = AgenticRetriever([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], llm=llm)
    return AgenticChatEngine(AgenticQueryEngine(retriever), memory=memory)


def test_given_history_replaces_the_memory(server: LoopbackOpenAI) -> None:
    """``chat_history`` takes the memory's place from then on, as in LlamaIndex."""
    chat = engine(server)
    chat.chat("Forget this.")
    chat.chat("And how tall was it?", [ChatMessage(role=MessageRole.USER, content="Which rocket?")])
    assert [message.content for message in chat.chat_history] == ["Which rocket?", "And how tall was it?", ANSWER]


def test_streams_and_remembers_at_the_end(server: LoopbackOpenAI) -> None:
    """A streamed turn comes in deltas and is stored once it was read."""
    chat = engine(server)
    response = chat.stream_chat("How tall was the Saturn V rocket?")
    assert chat.chat_history == []
    deltas = list(response.response_gen)
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 2
    assert response.source_nodes
    assert [message.content for message in chat.chat_history] == ["How tall was the Saturn V rocket?", ANSWER]


def test_a_failed_turn_is_not_remembered() -> None:
    """A turn whose answer failed is raised and leaves the memory as it was."""
    with LoopbackOpenAI(lambda request: Fault.status(401)) as server:
        chat = engine(server)
        with pytest.raises(SynthesisError):
            chat.chat("How tall was the Saturn V rocket?")
        with pytest.raises(SynthesisError):
            list(chat.stream_chat("How tall was the Saturn V rocket?").response_gen)
    assert chat.chat_history == []


def test_it_takes_what_llama_index_s_chat_engines_take(server: LoopbackOpenAI) -> None:
    """System prompt, prefix messages, history, template, postprocessors and skipped condensing do what they say."""
    kb = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))], llm=server.llm())
    history = [ChatMessage(role=MessageRole.USER, content="Which rocket?"), ChatMessage(role="assistant", content="V.")]
    chat = kb.as_chat_engine(system_prompt="Speak like a pirate.", chat_history=history, skip_condense=True)
    assert isinstance(chat, AgenticChatEngine)
    assert str(chat.chat(QueryBundle("How tall was the Saturn V rocket?"))) == ANSWER
    (written,) = [request.text for request in server.chats]  # nothing was planned
    assert "Speak like a pirate." in written
    assert "Which rocket?" in written
    assert [message.content for message in chat.chat_history[:2]] == ["Which rocket?", "V."]
    prefix = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="I like rockets.")]
    template = "Context for you: {context_str}\nThat was it."
    chat = kb.as_chat_engine(
        prefix_messages=prefix,
        context_prompt=template,
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.6)],
    )
    assert len(chat.chat("How tall was the Saturn V rocket?").source_nodes) == 1
    last = server.chats[-1].text
    assert "Be brief." in last
    assert "I like rockets." in last
    assert "Context for you: [data " in last
    with pytest.raises(ConfigurationError, match="system_prompt, prefix_messages: pass one of them"):
        kb.as_chat_engine(system_prompt="a", prefix_messages=prefix)
    assert isinstance(kb.as_chat_engine(tools=None), AgenticChatEngine)
    with pytest.raises(ConfigurationError, match="unknown argument: token_limit"):
        kb.as_chat_engine(token_limit=100)


async def test_without_a_model_a_chat_is_readable() -> None:
    """Titles, texts and markers in place of a JSON array, whole and streamed; what was remembered is the same."""
    chat = engine(None)
    text = str(chat.chat("How tall was the Saturn V rocket?"))
    assert "The Saturn V rocket was 110.6 m tall." in text
    assert text.count("[ref_id:") == 2
    assert not text.startswith("[")
    assert "".join(chat.stream_chat("How tall was the Saturn V rocket?").response_gen) == text
    assert {message.content for message in chat.chat_history if message.role is MessageRole.ASSISTANT} == {text}
    assert str(await chat.achat("zzz")) == "Nothing was found."


ALICE, BOB = Principal(user="alice"), Principal(user="bob")


def speaking(principal: Principal | None, memory: BaseMemory, server: LoopbackOpenAI) -> AgenticChatEngine:
    """A chat engine of one principal, over a memory."""
    source = KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))
    kb = KnowledgeBase([source], llm=server.llm(), effort="minimal", principal=principal)
    chat = kb.as_chat_engine(memory=memory)
    assert isinstance(chat, AgenticChatEngine)
    return chat


class Keeping(ChatMemoryBuffer):
    """Has blocks that outlive a reset, as LlamaIndex's ``Memory`` has."""

    memory_blocks: tuple[str, ...] = ("what was said",)


def test_a_conversation_is_its_memorys(server: LoopbackOpenAI) -> None:
    """Whichever engine or retriever speaks in it, another principal is denied, resetting too; its owner may."""
    memory = ChatMemoryBuffer.from_defaults()
    speaking(ALICE, memory, server).chat("How tall was the Saturn V rocket?")
    for other in (BOB, None):
        theirs = speaking(other, memory, server)
        for attempt in (lambda: theirs.chat("And?"), lambda: theirs.stream_chat("And?"), theirs.reset):  # noqa: B023
            with pytest.raises(DeniedError):
                attempt()
        retriever = AgenticRetriever(
            list(theirs.query_engine.retriever.sources.values()), memory=memory, principal=other
        )
        with pytest.raises(DeniedError):
            retriever.retrieve("And?")
    assert len(memory.get_all()) == 2
    speaking(ALICE, memory, server).reset()
    speaking(BOB, memory, server).chat("How tall was the Saturn V rocket?")
    assert len(memory.get_all()) == 2


def test_what_a_memory_keeps_stays_its_owners(server: LoopbackOpenAI) -> None:
    """Long-term blocks outlive a reset, and so does whose they are."""
    memory = Keeping.from_defaults()
    alice = speaking(ALICE, memory, server)
    alice.chat("How tall was the Saturn V rocket?")
    alice.reset()
    with pytest.raises(DeniedError):
        speaking(BOB, memory, server).chat("What was said?")
    alice.chat("And Apollo 11?")


async def test_a_late_stream_is_not_the_next_owners(server: LoopbackOpenAI) -> None:
    """One that is read after the reset is remembered by nobody."""
    memory = ChatMemoryBuffer.from_defaults()
    alice = speaking(ALICE, memory, server)
    late, alate = alice.stream_chat("How tall was the Saturn V?"), await alice.astream_chat("And Apollo 11?")
    alice.reset()
    speaking(BOB, memory, server).chat("Which rocket?")
    assert "".join(late.response_gen) == ANSWER
    assert "".join([delta async for delta in alate.async_response_gen()]) == ANSWER
    assert [message.content for message in memory.get_all()] == ["Which rocket?", ANSWER]
