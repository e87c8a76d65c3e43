from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_agentic_kb import RetrievalRequest
from llama_index_agentic_kb.planning import Scope


def request(*messages: tuple[str, str]) -> RetrievalRequest:
    return RetrievalRequest.parse({"messages": [{"role": role, "content": text} for role, text in messages]})


def test_the_last_user_message_is_the_question() -> None:
    """What came before it is the history, oldest first, without empty messages; system messages are instructions."""
    scope = Scope.of(request(("system", "Be brief."), ("user", "Hi"), ("assistant", " "), ("user", " Who? ")))
    assert scope.question == "Who?"
    assert scope.history == (("user", "Hi"),)
    assert scope.answer_instructions == scope.retrieval_instructions == "Be brief."
    assert scope.intents == ()


def test_intents_need_no_planning() -> None:
    """Intents are kept in order."""
    scope = Scope.of(RetrievalRequest.parse({"intents": [{"search": "b"}, {"search": "a"}]}))
    assert scope.intents == ("b", "a")


def test_memory_is_the_history_of_a_request_without_one() -> None:
    """User and assistant turns of the memory are read; system prompts, tool calls and empty turns are not."""
    memory = [
        ChatMessage(role=MessageRole.SYSTEM, content="You are kind."),
        ChatMessage(role=MessageRole.USER, content="Who built it?"),
        ChatMessage(role=MessageRole.ASSISTANT, content=None),
        ChatMessage(role=MessageRole.TOOL, content="42"),
        ChatMessage(role=MessageRole.ASSISTANT, content="Eiffel."),
    ]
    assert Scope.of(request(("user", "When?")), memory).history == (("user", "Who built it?"), ("assistant", "Eiffel."))
    asked = request(("user", "a"), ("user", "When?"))
    assert Scope.of(asked, memory).history == (("user", "a"),)


def test_the_question_is_no_history_of_itself() -> None:
    """A chat engine may have stored the message before it asks; spaces around it change nothing."""
    memory = [ChatMessage(role="user", content="Hi"), ChatMessage(role="user", content="  When?\n")]
    assert Scope.of(request(("user", "When? ")), memory).history == (("user", "Hi"),)
