"""A scripted language model that runs in the same process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr

from llama_index_agentic_kb.replay import ReplyingLLM, ScriptedReply
from llama_index_agentic_kb.testing.embeddings import count_tokens

__all__ = ["Script", "ScriptExhaustedError", "ScriptedLLM", "ScriptedReply"]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Scripted = str | Exception | ScriptedReply


class ScriptExhaustedError(LookupError):
    """Raised for a call after the last reply of a list, so that a test notices unexpected calls."""


class Script(Generic[Asked, Answer]):
    """The scripted answers of a test double, thread-safe: one for all calls, a list used in order, or a callable."""

    def __init__(self, replies: Answer | Sequence[Answer] | Callable[[Asked], Answer]) -> None:
        self._replies = replies
        self._used = itertools.count(1)

    def answer(self, asked: Asked) -> Answer:
        """Return the next answer; a callable runs in the calling thread.

        Raises:
            ScriptExhaustedError: The list of replies is used up.
        """
        if callable(self._replies):
            return self._replies(asked)
        if not isinstance(self._replies, list | tuple):
            return cast("Answer", self._replies)
        used = next(self._used)
        if used > len(self._replies):
            raise ScriptExhaustedError(
                f"The script holds {len(self._replies)} replies and this is call {used}. "
                "Add a reply, or pass a callable or a single reply to answer any number of calls."
            )
        return cast("Answer", self._replies[used - 1])


class _State:
    """The script and the recorded calls, shared by a model and all its copies, even deep ones."""

    def __init__(self, replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted]) -> None:
        self.script: Script[list[ChatMessage], Scripted] = Script(replies)
        self.calls: list[list[ChatMessage]] = []

    def __deepcopy__(self, _memo: dict[int, object]) -> _State:
        return self


class ScriptedLLM(ReplyingLLM):
    """A chat model without tools that answers from a script; sync, async and streaming are native.

    Callbacks and events are sent as for any other model. ``raw`` has the usage, counted with :func:`count_tokens`.
    Copies made with ``model_copy`` share the script and the recorded calls.

        llm = ScriptedLLM(["first", ScriptedReply("second", latency=0.1), ValueError("third")])
        assert llm.complete("Hi").text == "first"
        assert llm.calls[0][0].content == "Hi"

    Args:
        replies: One answer for all calls; a list used in order, after which :class:`ScriptExhaustedError` is raised;
            or a callable that maps each call's messages to an answer, in the calling thread. An answer is a text, a
            :class:`ScriptedReply`, or an exception to raise. As with OpenAI's client, a stream raises when its first
            piece is requested.
        **kwargs: The fields below and those of ``CustomLLM``, such as ``callback_manager``.
    """

    model_name: str = Field(default="scripted", description="The name in the metadata.")
    context_window: int = Field(default=16_384, description="Tokens of prompt and answer together.")
    num_output: int = Field(default=1_024, description="Tokens of an answer; nothing is cut to it.")

    _state: _State = PrivateAttr()

    def __init__(
        self,
        replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted] = "OK.",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._state = _State(replies)

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of a chat model without function calls."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            is_chat_model=True,
            model_name=self.model_name,
        )

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of all calls so far, in order; a completion's prompt is one user message."""
        return list(self._state.calls)

    def respond(self, messages: Sequence[ChatMessage]) -> ScriptedReply:
        """Return the next reply of the script."""
        asked = [message.model_copy(deep=True) for message in messages]  # callers may change their messages later
        self._state.calls.append(asked)
        reply = self._state.script.answer(asked)
        if isinstance(reply, str):
            return ScriptedReply(reply)
        return ScriptedReply(error=reply) if isinstance(reply, Exception) else reply

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, as counted by all test doubles."""
        return count_tokens(text)
