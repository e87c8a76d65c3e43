"""A conversation over a knowledge base: each message is answered as a query, with the messages before it."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.base.response.schema import PydanticResponse, Response
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.tools import ToolOutput

from llama_index_agentic_kb._aio import Call, arun, run
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.guard.permissions import ConversationOwner, current_principal, set_principal
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.schema import Message, RetrievalRequest

__all__ = ["AgenticChatEngine"]

MEMORY_TOKENS = 8_000
"""Tokens of conversation that the engine's own memory keeps."""


class AgenticChatEngine(GuardedCallbacks, BaseChatEngine):
    """A LlamaIndex chat engine whose every answer is planned, searched, cited and accounted for.

    Works without a language model too; an answer is then the extracted data. A turn is stored in the memory once its
    answer is complete (for a streamed one: once its stream was read to the end), question and answer together.

    A conversation belongs to its principal, if any (see ``guard.permissions``): answers repeat what its first speaker
    may see, so nobody else may read it, until ``reset``.

    Args:
        query_engine: Answers each message.
        memory: The conversation. None is a buffer of the last 8,000 tokens.
        callback_manager: None is the query engine's.
    """

    def __init__(
        self,
        query_engine: AgenticQueryEngine,
        memory: BaseMemory | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self.query_engine = query_engine
        self.memory = memory or ChatMemoryBuffer.from_defaults(token_limit=MEMORY_TOKENS)
        self.callback_manager = callback_manager or query_engine.callback_manager
        self._owner = ConversationOwner()

    @trace_method("chat")
    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer a message.

        Args:
            message: The user's message.
            chat_history: Replaces the memory's conversation from now on.
        """
        response = self.query_engine.respond(run(self._request(message, chat_history)))
        run(self._remember(message, str(response)))
        return _chat_response(message, response)

    @trace_method("chat")
    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer a message; see ``chat``."""
        response = await self.query_engine.arespond(await arun(self._request(message, chat_history)))
        await arun(self._remember(message, str(response)))
        return _chat_response(message, response)

    @trace_method("chat")
    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> StreamingAgentChatResponse:
        """Answer a message as a stream of token deltas; see ``chat``. An error is raised where it is read."""
        response = self.query_engine.stream(run(self._request(message, chat_history)))
        context = contextvars.copy_context()

        def deltas() -> Generator[ChatResponse, None, None]:
            text = ""
            for token in response.response_gen:
                text += token
                yield _delta(text, token)
            context.run(run, self._remember(message, text))

        return StreamingAgentChatResponse(
            chat_stream=deltas(), is_writing_to_memory=False, **_sources(message, response)
        )

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer a message as a stream of token deltas; see ``chat``. An error is raised where it is read."""
        response = await self.query_engine.astream(await arun(self._request(message, chat_history)))

        async def deltas() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            async for token in response.response_gen:
                text += token
                yield _delta(text, token)
            await arun(self._remember(message, text))

        return StreamingAgentChatResponse(
            achat_stream=deltas(), is_writing_to_memory=False, **_sources(message, response)
        )

    def reset(self) -> None:
        """Forget the conversation."""
        self.memory.reset()
        self._owner.release()

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation so far.

        Raises:
            DeniedError: The current principal is not the one that the conversation belongs to.
        """
        self._owner.check(current_principal())
        return list(self.memory.get_all())

    async def _request(self, message: str, chat_history: Sequence[ChatMessage] | None) -> RetrievalRequest:
        if not message.strip():
            raise InvalidRequestError("message: the message is empty")
        principal = self.query_engine.retriever.resolve_principal()
        self._owner.claim(principal)
        set_principal(principal)  # a memory may be kept for one principal
        if chat_history is not None:
            history = list(chat_history)
            await Call(sync=partial(self.memory.set, history), native=partial(self.memory.aset, history), what="memory")
        read, aread = partial(self.memory.get, input=message), partial(self.memory.aget, input=message)
        earlier = await Call(sync=read, native=aread, what="memory")
        return conversation_request([*earlier, ChatMessage(role=MessageRole.USER, content=message)])

    async def _remember(self, message: str, answer: str) -> None:
        turn = [
            ChatMessage(role=MessageRole.USER, content=message),
            ChatMessage(role=MessageRole.ASSISTANT, content=answer),
        ]
        await Call(
            sync=partial(self.memory.put_messages, turn), native=partial(self.memory.aput_messages, turn), what="memory"
        )


def conversation_request(messages: Sequence[ChatMessage], **fields: Any) -> RetrievalRequest:
    """Return the request for a LlamaIndex conversation; messages without text are left out."""
    texts = [(message.role.value, message.content or "") for message in messages]
    kept = [Message.model_validate({"role": role, "content": text}) for role, text in texts if text.strip()]
    return RetrievalRequest(messages=kept, **fields)


def _delta(text: str, token: str) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=token)


def _sources(message: str, response: Any) -> dict[str, Any]:
    """Return the evidence of a chat response, in the form of LlamaIndex's own chat engines."""
    nodes = list(response.source_nodes)
    output = ToolOutput(
        tool_name="knowledge_base", content=str(len(nodes)), raw_input={"message": message}, raw_output=nodes
    )
    return {"sources": [output], "source_nodes": nodes}


def _chat_response(message: str, response: Response | PydanticResponse) -> AgentChatResponse:
    return AgentChatResponse(response=str(response), metadata=response.metadata, **_sources(message, response))
