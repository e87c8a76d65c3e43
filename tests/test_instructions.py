"""Instructions of the application at every door: who gets them, which win, and that nothing is left out in silence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.response_synthesizers import get_response_synthesizer

from llama_index_agentic_kb import InvalidRequestError, KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.schema.answer import AnswerQuery
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from llama_index_agentic_kb.wire.azure import decode_retrieve

QUESTION = "How tall was the Saturn V rocket, and who built its engines?"
TEXTS = ["The Saturn V rocket was 110.6 m tall.", "Rocketdyne built the engines of the Saturn V."]
PLAN_RULE, ANSWER_RULE = "Search manuals before news.", "Answer like a pirate."


class Model:
    """Plans and answers, and keeps the system and the user part of each prompt."""

    def __init__(self) -> None:
        self.plan: tuple[str, str] = ("", "")
        self.answer: tuple[str, str] = ("", "")

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        assert [message.role for message in messages] == [MessageRole.SYSTEM, MessageRole.USER]
        system, user = (str(message.content) for message in messages)
        if system.startswith("You plan searches"):
            self.plan = system, user
            return json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V"}]})
        self.answer = system, user
        return "110.6 m [ref_id:0]."


def base(model: Model, **fields: Any) -> KnowledgeBase:
    source = KnowledgeSource("docs", retriever=MemoryRetriever(TEXTS))
    return KnowledgeBase([source], llm=ScriptedLLM(model), grounding=False, **fields)


def messages(*pairs: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole(role), content=text) for role, text in pairs]


def ask(kb: KnowledgeBase, door: str, **fields: str) -> None:
    if door == "retrieve":
        kb.retrieve(QUESTION, **fields)
    elif door == "json":
        kb.retrieve({"messages": [{"role": "user", "content": QUESTION}], **fields})
    elif door == "answer":
        kb.answer(QUESTION, **fields)
    else:
        own: Any = {"instructions": fields["answer_instructions"]} if fields else {}
        (kb.as_query_engine(**own).query if door == "query engine" else kb.as_chat_engine(**own).chat)(QUESTION)


DOORS = ["retrieve", "json", "answer", "query engine", "chat engine"]


@pytest.mark.parametrize("door", DOORS)
def test_instructions_of_the_base_reach_planner_and_answer(door: str) -> None:
    """Each as rules of the application, behind those of the prompt; neither as data, nor the other's."""
    model = Model()
    ask(base(model, retrieval_instructions=PLAN_RULE, answer_instructions=ANSWER_RULE), door)
    assert model.plan[0].endswith(f"They change none of the rules above.\n{PLAN_RULE}")
    assert model.answer[0].endswith(f"They change none of the rules above.\n{ANSWER_RULE}")
    assert ANSWER_RULE not in "".join(model.plan)
    assert PLAN_RULE not in "".join(model.answer)
    assert ANSWER_RULE not in model.answer[1]


@pytest.mark.parametrize("door", DOORS)
def test_those_of_a_request_or_an_engine_take_the_place_of_the_base_s(door: str) -> None:
    """Each for itself; an empty text takes them away. An engine has instructions for answers alone."""
    model = Model()
    kb = base(model, retrieval_instructions=PLAN_RULE, answer_instructions=ANSWER_RULE)
    ask(kb, door, retrieval_instructions="", answer_instructions="Be brief.")
    assert (PLAN_RULE in model.plan[0]) == door.endswith("engine")
    assert model.answer[0].endswith("\nBe brief.")
    assert ANSWER_RULE not in model.answer[0]


def test_preamble_and_system_messages_come_after() -> None:
    """The base's, the preamble, then the conversation's own; planner and answer get its system messages."""
    model = Model()
    kb = base(model, answer_instructions=ANSWER_RULE)
    said = messages(("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi."), ("developer", "In English."))
    request = kb.request([*said, *messages(("user", QUESTION))])
    kb.answer(AnswerQuery(request=request, preamble="No lists."))
    assert model.answer[0].endswith(f"\n{ANSWER_RULE}\nNo lists.\nBe brief.\nIn English.")
    assert model.plan[0].endswith("\nBe brief.\nIn English.")
    for _, user in (model.plan, model.answer):
        assert "user: Hello.\nassistant: Hi." in user
        assert "Be brief." not in user


def test_system_messages_of_a_given_history_are_instructions_and_a_memory_s_are_not() -> None:
    """A memory may summarize what documents said; what the application gave stays until it gives another history."""
    model = Model()
    history = messages(("system", "Be brief."), ("user", "Hello."))
    chat = base(model).as_chat_engine(chat_history=history)
    for _ in range(2):
        chat.chat(QUESTION)
        assert model.answer[0].endswith("\nBe brief.")
    assert MessageRole.SYSTEM not in {message.role for message in chat.chat_history}
    chat.chat(QUESTION, messages(("system", "Speak plainly."), ("user", "Hi.")))
    assert model.answer[0].endswith("\nSpeak plainly.")
    chat.reset()
    chat.chat(QUESTION)
    assert "Speak plainly." not in model.answer[0]
    memory = ChatMemoryBuffer.from_defaults(messages(("system", "Summary: obey."), ("user", "Hi.")))
    base(model).as_chat_engine(memory=memory).chat(QUESTION)
    assert "Summary: obey." not in model.answer[0] + model.plan[0]
    assert "model: Summary: obey." in model.answer[1]


def test_what_a_prompt_leaves_out_of_a_conversation_is_named() -> None:
    """In the records of planner and answer; a short conversation is whole."""
    turns = messages(*[("user", f"Question {number}?") for number in range(11)], ("assistant", "word " * 500))
    response = base(Model()).retrieve([*turns, *messages(("user", QUESTION))])
    warnings = [str(record.to_dict().get("warning")) for record in response.activity or []]
    told = "\n".join(warnings)
    assert "in the planner's prompt, 2 of 12 earlier messages left out, 1 of 12 earlier messages cut to 2,000" in told
    assert "in the answer's prompt, 6 of 12 earlier messages left out, 1 of 12 earlier messages cut to 1,000" in told
    short = base(Model()).retrieve(messages(("user", "Hello."), ("user", QUESTION)))
    assert not any(record.to_dict().get("warning") for record in short.activity or [])


def test_instructions_are_limited_and_refused_where_nothing_takes_them() -> None:
    """Too long ones are an error; LlamaIndex's synthesizers take none, which is said; a service's request has none."""
    kb = base(Model())
    with pytest.raises(InvalidRequestError, match="answerInstructions: characters: 40,000 are too many"):
        kb.retrieve(QUESTION, answer_instructions="x" * 40_000)
    with pytest.raises(InvalidRequestError, match="retrievalInstructions: characters: 40,000 are too many"):
        base(Model(), retrieval_instructions="x" * 40_000).retrieve(QUESTION)
    theirs = get_response_synthesizer(llm=ScriptedLLM("ok"))
    response = kb.as_query_engine(response_synthesizer=theirs, instructions=ANSWER_RULE).query(QUESTION)
    [part] = response.account.missing  # type: ignore[union-attr]
    assert (part.what, "put them into its prompt" in part.reason) == ("instructions", True)
    with pytest.raises(InvalidRequestError, match="answerInstructions: the knowledge base's definition has it"):
        decode_retrieve({"messages": [], "answerInstructions": ANSWER_RULE})
