"""Conversations through each door: LlamaIndex's chat engines, sessions that are resumed, agents that cite."""

from __future__ import annotations

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer, ChatSummaryMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from rich.console import Console

from llama_index_agentic_kb import (
    AgenticChatEngine,
    AgenticRetriever,
    ConfigurationError,
    DeniedError,
    KnowledgeBase,
    KnowledgeSource,
    NotFoundError,
    Principal,
    SessionStore,
    SynthesisError,
    cited_nodes,
)
from llama_index_agentic_kb._terminal import show_response
from llama_index_agentic_kb.schema import ScopeState
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply, ScriptedLLM
from tests.faulty_server import Fault
from tests.shop import Shop
from tests.space import ANSWER, reply
from tests.test_tool_dialogue import read

ROCKETS = ["The Saturn V rocket was 110.6 m tall.", "The Ariane 5 was about 50 m tall."]
BRACES = "Put {context_str}, {query_str}, {said_0}, {existing_answer} and {x} there."


def base(server: LoopbackOpenAI, **fields: Any) -> KnowledgeBase:
    source = KnowledgeSource("rockets", "launch vehicles", retriever=MemoryRetriever(ROCKETS))
    return KnowledgeBase([source], llm=server.llm(), **fields)


def chat_engine(kb: KnowledgeBase, **fields: Any) -> AgenticChatEngine:
    chat = kb.as_chat_engine(**fields)
    assert isinstance(chat, AgenticChatEngine)
    return chat


async def test_every_turn_has_sources_and_an_account(server: LoopbackOpenAI) -> None:
    """Whole and streamed, sync and async; a stream's is complete, and remembered, once it was read."""
    chat = chat_engine(base(server))
    streamed, astreamed = chat.stream_chat("How tall was it?"), await chat.astream_chat("How tall was it?")
    assert (streamed.account.text, chat.chat_history) == ("", [])
    deltas = list(streamed.response_gen)
    assert ("".join(deltas), len(deltas) > 2) == (ANSWER, True)
    assert [message.content for message in chat.chat_history] == ["How tall was it?", ANSWER]
    assert "".join([delta async for delta in astreamed.async_response_gen()]) == ANSWER
    for response in (chat.chat("How tall?"), await chat.achat("How tall?"), streamed, astreamed):
        assert response.account.text == ANSWER
        assert response.account.activity
        assert [node.node.get_content() for node in response.cited_nodes] == [ROCKETS[0]]
        assert response.sources[0].raw_output is response.source_nodes
        assert "akb-answer" in response._repr_html_()


@pytest.mark.parametrize("mode", ["best", "context", "condense_plus_context", "condense_question"])
@pytest.mark.parametrize("effort", ["minimal", "low"])
def test_what_was_said_stays_text(server: LoopbackOpenAI, mode: Any, effort: str) -> None:
    """Braces and names of prompt variables, in earlier messages and in the last one."""
    history = [ChatMessage(role=role, content=f"{role}: {BRACES}") for role in ("user", "assistant")]
    chat = base(server, effort=effort).as_chat_engine(mode, chat_history=history)
    assert str(chat.chat(f"How tall was the rocket? {BRACES}")) == ANSWER
    assert "".join(chat.stream_chat("And the Ariane?").response_gen) == ANSWER
    written = next(
        request.text for request in server.chats if "You plan" not in request.text and ROCKETS[0] in request.text
    )
    assert written.count("{context_str}") >= 2
    assert written.count(ROCKETS[0]) == 1


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("context", ContextChatEngine),
        ("condense_plus_context", CondensePlusContextChatEngine),
        ("condense_question", CondenseQuestionChatEngine),
    ],
)
async def test_llama_index_s_engines_condense_nothing(server: LoopbackOpenAI, mode: Any, kind: type) -> None:
    """A later turn is one plan, made of the conversation, and one answer; memory and planner are one conversation."""
    memory = ChatMemoryBuffer.from_defaults()
    chat = base(server).as_chat_engine(mode, memory=memory)
    assert isinstance(chat, kind)
    chat.chat("Which rocket launched Apollo 11?")
    before = len(server.chats)
    assert str(await chat.achat("And how tall was it?")) == ANSWER
    plan, answer = server.chats[before:]
    assert "user: Which rocket launched Apollo 11?" in plan.text
    assert "changes the subject" in plan.text
    assert "changes the subject" not in server.chats[0].text
    assert plan.text.count("And how tall was it?") == 1
    assert "Which rocket launched Apollo 11?" in answer.text
    assert len(memory.get_all()) == 4
    before = len(server.chats)
    chat.chat("How wide is it?", chat_history=[ChatMessage(role="user", content="Tell me of Titan.")])
    assert ("Titan" in server.chats[before].text, "Apollo" in server.chats[before].text) == (True, False)


async def test_a_condensing_engine_keeps_the_memory_s_messages() -> None:
    """A memory may summarize at each reading: no reading is stored. A given history replaces them, in each form."""
    told = [ChatMessage(role=role, content=f"message {n} is long") for n in range(12) for role in ("user", "assistant")]
    given = [ChatMessage(role="user", content="Tell me of Titan.")]
    summaries = ScriptedLLM(lambda _: "A summary.")

    def engine() -> CondenseQuestionChatEngine:
        memory = ChatSummaryMemoryBuffer.from_defaults(told.copy(), llm=summaries, token_limit=60)
        source = KnowledgeSource("rockets", "launch vehicles", retriever=MemoryRetriever(ROCKETS))
        kb = KnowledgeBase([source], llm=ScriptedLLM(lambda _: "Yes [ref_id:0]."), effort="low")
        made = kb.as_chat_engine(ChatMode.CONDENSE_QUESTION, memory=memory)
        assert isinstance(made, CondenseQuestionChatEngine)
        return made

    for history in (None, [], given):
        one, other, streamed, native = (engine() for _ in range(4))
        one.chat("How tall?", history and [*history])
        await other.achat("How tall?", history and [*history])
        list(streamed.stream_chat("How tall?", history and [*history]).response_gen)
        [_ async for _ in (await native.astream_chat("How tall?", history and [*history])).async_response_gen()]
        for chat in (one, other, streamed, native):
            kept = chat._memory.get_all()
            assert kept[-2].content == "How tall?"
            assert kept[:-2] == history if history else kept[-8:-2] == told[-6:]


ALICE = Principal(user="alice", groups=["staff"])


def test_a_session_is_resumed_by_its_id(shop: Shop, sessions: SessionStore) -> None:
    """Turns and state: what a tool asked for and what waits for confirmation go on in another engine; once."""
    kb = KnowledgeBase(shop.sources(), sessions=sessions, principal=ALICE)
    memory: Any = chat_engine(kb, session="-").memory
    said = [
        ("Where is my order?", "please tell: the order number"),
        ("It is A-4711.", "delivered"),
        ("I want to return it, it is damaged.", "confirm"),
        ("yes", "R-1"),
    ]
    first = chat_engine(kb, memory=memory)
    for number, (message, expected) in enumerate(said):
        chat = first if number == 0 else chat_engine(kb, session=memory.session_id)
        response = chat.chat(message) if number % 2 else chat.stream_chat(message)
        text = str(response) if number % 2 else "".join(response.response_gen)
        assert expected in text, text
        assert response.account.dialogue == chat.states["dialogue"]
        assert response.account.scope_state == chat.states["scope_state"]
        assert chat.states["scope_state"].to_dict()["turn"] == number + 1
        assert len(chat.chat_history) == 2 * number + 2
    assert len(shop.returns) == 1
    assert "A-4711" in str(first.chat("When do I get my refund?"))  # which the other engines were told
    first.reset()
    assert first.states == {"scope_state": ScopeState()}
    with pytest.raises(NotFoundError):
        chat_engine(kb, session="nothing").chat("Hello?")
    with pytest.raises(ConfigurationError, match="pass sessions="):
        KnowledgeBase(shop.sources()).as_chat_engine(session="-")


def test_answers_of_a_session_go_on_in_its_state(shop: Shop, sessions: SessionStore) -> None:
    """``answer`` reads the state of its session and stores it, for chat engines too."""
    kb = KnowledgeBase(shop.sources(), sessions=sessions, principal=ALICE, llm=ScriptedLLM(read))
    first = kb.answer("Where is my order?", session="-")
    assert first.text == "For order status, please tell: the order number."
    assert first.session is not None
    second = kb.answer("It is A-4711.", session=first.session.id)
    assert second.account is not None
    assert second.account.dialogue is not None
    assert (second.account.dialogue.tool, second.account.dialogue.slots) == ("order_status", {"order": "A-4711"})
    chat = chat_engine(kb, session=first.session.id)
    assert "A-4711" in chat.chat("I want to return it, it is damaged.").account.text
    assert chat.states["dialogue"].to_dict()["turn"] == 3


def test_the_state_is_shown(shop: Shop) -> None:
    """In notebooks and on the terminal: what is asked for, what is known and missing, what waits, a change of mind."""
    chat = chat_engine(KnowledgeBase(shop.sources(), principal=ALICE))
    shown = chat.chat("Where is my order?")._repr_html_()
    assert "tool:</span> order_status (asking)" in shown
    assert "missing:</span> order" in shown
    assert "known:</span> order = A-4711" in chat.chat("It is A-4711.")._repr_html_()
    response = chat.chat("I want to return it, it is damaged.")
    assert "to be confirmed:</span> submit_return: order = A-4711" in response._repr_html_()
    token = response.account.to_dict()["dialogue"]["pending"]["token"]
    assert token not in response._repr_html_().partition("Conversation")[2]
    console = Console(width=120, file=io.StringIO())
    show_response(console, response.account)
    assert "tool: submit_return (confirming)" in console.file.getvalue()  # type: ignore[attr-defined]
    plain = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(ROCKETS))]).retrieve("Saturn V?")
    assert "Conversation" not in plain._repr_html_()


def test_interleaved_sessions_keep_their_states_apart(shop: Shop) -> None:
    """100 conversations on 16 threads, turn by turn: each has its own order, and its own answer."""
    kb, sessions = KnowledgeBase(shop.sources(), principal=ALICE), 100
    chats = [chat_engine(kb) for _ in range(sessions)]

    def turn(number: int, message: str) -> str:
        return str(chats[number].chat(message.format(f"A-{number:04}")))

    with ThreadPoolExecutor(16) as threads:
        for message, expected in (
            ("Where is my order?", "order number"),
            ("It is {}.", "{}"),
            ("And the refund of it?", "{}"),
        ):
            texts = list(threads.map(turn, range(sessions), [message] * sessions))
            for number, text in enumerate(texts):
                assert expected.format(f"A-{number:04}") in text
                assert set(re.findall(r"A-\d{4}", text)) <= {f"A-{number:04}"}


def agent_model(request: ChatRequest) -> str | Reply:
    """An agent that asks each of its tools, and joins what they say; it plans and answers for the bases too."""
    if "You plan searches" in request.text or "<evidence>" in request.text:
        return reply(request)
    results = [str(message["content"]) for message in request.messages if message.get("role") == "tool"]
    if not results:
        return Reply(tool_calls=[(name, {"input": "How tall was it?"}) for name in ("rockets", "planes")])
    return "So it is: " + " ".join(text.partition("\n")[0] for text in results)


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # LlamaIndex's workflows
@pytest.mark.parametrize("workflow", [False, True])
async def test_citations_survive_an_agent(workflow: bool) -> None:
    """Two tools' markers never collide; each leads to the passage that its tool read."""
    texts = {"rockets": ROCKETS, "planes": ["The A380 is 24.1 m tall.", "The B747 is 19.4 m tall."]}
    with LoopbackOpenAI(agent_model) as server:
        llm = server.llm(is_function_calling_model=True)
        bases = {
            name: KnowledgeBase([KnowledgeSource(name, retriever=MemoryRetriever(own))], llm=llm)
            for name, own in texts.items()
        }
        tools = [kb.as_tool(name, f"Knows {name}.") for name, kb in bases.items()]
        agent = FunctionAgent(tools=tools, llm=llm)
        result: Any = await (AgentWorkflow(agents=[agent]) if workflow else agent).run("How tall were they?")
    markers = re.findall(r"\[(\w+):([0-9a-f]{8})\]", str(result))
    assert {name for name, _ in markers} == texts.keys()  # in the order in which the calls were done
    assert "[ref_id" not in str(result)
    cited = cited_nodes(str(result), result.tool_calls)
    for (name, _), node in zip(markers, cited, strict=True):
        assert node.node.get_content() in texts[name]
    contents = [call.tool_output.content for call in result.tool_calls]
    assert all(re.search(r"\nSources:\n\[\w+:[0-9a-f]{8}\] text-\w+ \(\w+\)$", content) for content in contents)
    assert cited_nodes("Nothing [rockets:00000000].", result.tool_calls) == []


def test_a_tool_s_answers_are_told_apart_by_other_engines(server: LoopbackOpenAI) -> None:
    """LlamaIndex's sub-question engine reads the tool's markers; without a model a tool gives readable passages."""
    tool = base(server).as_tool("rockets", "launch vehicles")
    asked = json.dumps([{"sub_question": "How tall was the Saturn V?", "tool_name": "rockets"}])
    engine = SubQuestionQueryEngine.from_defaults(
        [tool],
        llm=ScriptedLLM(asked),
        question_gen=LLMQuestionGenerator.from_defaults(llm=ScriptedLLM(asked)),
        response_synthesizer=get_response_synthesizer(llm=ScriptedLLM(lambda messages: str(messages[-1].content))),
        use_async=False,
        verbose=False,
    )
    response = tool.query_engine.query("How tall was the Saturn V?")
    assert str(response) in str(engine.query("How tall?"))
    assert re.match(r"It was 110.6 m tall \[rockets:[0-9a-f]{8}\]\.\n\nSources:\n", str(response))
    assert [node.node.get_content() for node in cited_nodes(str(response), [response])] == [ROCKETS[0]]
    plain = KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(ROCKETS))]).as_tool("my docs!")
    text = plain.call("Saturn V rocket").content
    assert re.search(r"\[my_docs_:[0-9a-f]{8}\]\nThe Saturn V rocket was 110.6 m tall\.", text)
    assert MessageRole.USER.value not in text


def test_a_failed_turn_is_not_remembered() -> None:
    with LoopbackOpenAI(lambda request: Fault.status(401)) as server:
        chat = chat_engine(base(server))
        with pytest.raises(SynthesisError):
            chat.chat("How tall was the Saturn V rocket?")
        with pytest.raises(SynthesisError):
            list(chat.stream_chat("How tall was the Saturn V rocket?").response_gen)
    assert chat.chat_history == []


def test_it_takes_what_llama_index_s_chat_engines_take(server: LoopbackOpenAI) -> None:
    """System prompt, prefix messages, history, template, postprocessors and skipped condensing do what they say."""
    kb = base(server)
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
    chat = chat_engine(KnowledgeBase([KnowledgeSource("docs", retriever=MemoryRetriever(ROCKETS))]))
    text = str(chat.chat("How tall was the Saturn V rocket?"))
    assert "The Saturn V rocket was 110.6 m tall." in text
    assert text.count("[ref_id:") == 2
    assert not text.startswith("[")
    assert "".join(chat.stream_chat("How tall was the Saturn V rocket?").response_gen) == text
    assert {message.content for message in chat.chat_history if message.role is MessageRole.ASSISTANT} == {text}
    assert str(await chat.achat("zzz")) == "Nothing was found."


BOB = Principal(user="bob")


def speaking(principal: Principal | None, memory: BaseMemory, server: LoopbackOpenAI) -> AgenticChatEngine:
    return chat_engine(base(server, effort="minimal", principal=principal), memory=memory)


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
    late, alate = alice.stream_chat("How tall was the Saturn V?"), await alice.astream_chat("And the Ariane?")
    alice.reset()
    speaking(BOB, memory, server).chat("Which rocket?")
    assert "".join(late.response_gen) == ANSWER
    assert "".join([delta async for delta in alate.async_response_gen()]) == ANSWER
    assert [message.content for message in memory.get_all()] == ["Which rocket?", ANSWER]
