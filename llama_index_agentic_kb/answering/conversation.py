"""Messages of a conversation, and the turns of a session that they are: each a question with its answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.stripping import strip_markers
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.schema.grounding import GroundingLedger

__all__ = ["as_messages", "completed_turns", "fitting_turns"]


def completed_turns(messages: Sequence[ChatMessage], waiting: str | None) -> tuple[list[tuple[str, str]], str | None]:
    """Give the turns that messages complete, as (question, answer), and the question that waits after them.

    Messages that are neither questions nor answers are left out, and so is a question that another one follows.

    Args:
        messages: In their order.
        waiting: A question from before, without an answer yet.

    Raises:
        InvalidRequestError: An answer has no question before it.
    """
    turns = []
    for message in messages:
        if message.role is MessageRole.USER:
            waiting = message.content or ""
        elif message.role is MessageRole.ASSISTANT and not _calls_tools(message):
            if waiting is None:
                raise InvalidRequestError(
                    "messages: an answer without a question before it; a session holds questions with their answers"
                )
            turns.append((waiting, _without_markers(message.content or "")))
            waiting = None
    return turns, waiting


def _without_markers(answer: str) -> str:
    """Leave out reference markers: beside a session's turn there is nothing that they could lead to."""
    return strip_markers(answer, GroundingLedger())[0]


def _calls_tools(message: ChatMessage) -> bool:
    calls = any(block.block_type == "tool_call" for block in message.blocks)
    return calls or bool(message.additional_kwargs.get("tool_calls"))


def as_messages(turns: Iterable[tuple[str, str]]) -> Iterable[tuple[MessageRole, str]]:
    """Give turns as messages: who speaks, and what is said."""
    for question, answer in turns:
        yield MessageRole.USER, question
        yield MessageRole.ASSISTANT, answer


def fitting_turns(messages: Sequence[ChatMessage], limit: int) -> list[ChatMessage]:
    """Give the newest turns, two messages each, that fit a limit together; the last one in any case."""
    start = len(messages)
    while start >= 2:  # noqa: PLR2004 (question and answer)
        limit -= sum(count_tokens(message.content or "") for message in messages[start - 2 : start])
        if limit < 0 and start < len(messages):
            break
        start -= 2
    return list(messages[start:])
