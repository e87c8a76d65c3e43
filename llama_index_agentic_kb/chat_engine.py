"""A chat engine over a knowledge base: each message is answered as a query, with the earlier messages as context."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import ToolOutput
from llama_index_instrumentation import get_dispatcher

from llama_index_agentic_kb._aio import Call, aiterate, arun, emitting, iterate, run
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.answering.sessions import SessionMemory, parsed_states, states_of
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.guard.permissions import current_principal, owner_of, set_principal
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import Message, OutputMode, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.schema.request import INSTRUCTING
from llama_index_agentic_kb.synthesis import Accounted, readable

dispatcher = get_dispatcher(__name__)

History: TypeAlias = list[ChatMessage] | None

EXTRACTS: Final = '[{"ref_id": '  # the prefix of extracted data, which replaces an answer that failed or timed out
MEMORY_TOKENS: Final = 8_000  # token limit of the engine's default memory
_RULES: Final = frozenset(map(MessageRole, INSTRUCTING))


@dataclass(repr=False)
class AgenticChatResponse(Accounted, AgentChatResponse):
    """A LlamaIndex ``AgentChatResponse`` with the full ``RetrievalResponse`` (``account``)."""

    def __repr__(self) -> str:
        """Return the name and the text; LlamaIndex's own has all nodes, and notebooks store it."""
        return f"{type(self).__name__}({self.response!r})"


@dataclass
class AgenticStreamingChatResponse(Accounted, StreamingAgentChatResponse):
    """A LlamaIndex ``StreamingAgentChatResponse`` with the full ``RetrievalResponse`` (``account``)."""

    metadata: JsonObject | None = None


class AgenticChatEngine(GuardedCallbacks, BaseChatEngine):
    """A LlamaIndex chat engine that answers each message with planned retrieval and citations.

    Without a language model, answers are the extracted passages as readable text. A turn (question and answer) is
    stored in the memory once its answer is complete, or, if streamed, once the stream was read to the end.

    A conversation belongs to the principal of its first message, if any (see ``guard.permissions``): since answers
    repeat documents which that principal may see, other principals are denied until ``reset``.

    The conversation's state (``states``) goes from turn to turn: the documents that it is about, what a tool asked for,
    what waits for confirmation. With a ``SessionMemory`` it is stored with the session; another engine goes on in it.

    Args:
        query_engine: The query engine that answers each message.
        memory: The conversation memory. Defaults to a buffer of the last 8,000 tokens.
        callback_manager: Defaults to the query engine's.
        prefix_messages: Messages to put before every conversation; system messages are instructions for planner and
            answer, like those of a given ``chat_history``. System messages that a memory adds, such as summaries, are
            part of the conversation.
        skip_condense: Whether to search for each message unchanged, without planning; the conversation is still part
            of the answer's prompt.
    """

    def __init__(
        self,
        query_engine: AgenticQueryEngine,
        memory: BaseMemory | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        prefix_messages: Sequence[ChatMessage] = (),
        skip_condense: bool = False,
    ) -> None:
        self.query_engine = query_engine
        self.memory = memory or ChatMemoryBuffer.from_defaults(token_limit=MEMORY_TOKENS)
        self.callback_manager = callback_manager or query_engine.callback_manager
        self._prefix = list(prefix_messages)
        self._given: list[ChatMessage] = []  # system messages of the given history; they are not kept in the memory
        self.states = parsed_states({})
        """The conversation's state after its last turn, by the field of the request that takes it."""
        self._effort = ReasoningEffort.MINIMAL if skip_condense else None
        self._extracts = getattr(query_engine.synthesizer, "mode", "") == OutputMode.EXTRACTIVE_DATA.value

    @classmethod
    def from_defaults(
        cls,
        retriever: AgenticRetriever,
        *,
        memory: BaseMemory | None = None,
        chat_history: Sequence[ChatMessage] | None = None,
        system_prompt: str | None = None,
        prefix_messages: Sequence[ChatMessage] | None = None,
        context_prompt: str | PromptTemplate | None = None,
        context_template: str | PromptTemplate | None = None,
        skip_condense: bool = False,
        **engine: Any,
    ) -> Self:
        """Create a chat engine with the arguments of LlamaIndex's chat engines; for others see the class.

        Args:
            retriever: The retriever for each message.
            memory: The conversation memory.
            chat_history: The initial conversation; used only if no memory is given.
            system_prompt: Instructions for the models that plan and answer, in place of ``prefix_messages``.
            prefix_messages: Messages before every conversation.
            context_prompt: The system message of the answer prompt, with ``{context_str}``. Defaults to our own.
            context_template: The same, as some of LlamaIndex's engines call it.
            skip_condense: Whether to search for each message unchanged.
            engine: Arguments of ``AgenticQueryEngine``. LlamaIndex's prompts for condensing and refining are ignored.
        """
        if system_prompt is not None:
            if prefix_messages is not None:
                raise ConfigurationError("system_prompt, prefix_messages: pass one of them")
            prefix_messages = [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt)]
        if (template := context_prompt or context_template) is not None:
            text = template if isinstance(template, str) else template.get_template()
            prompt = ChatPromptTemplate.from_messages([("system", text), ("user", "{query_str}")])
            engine.setdefault("text_qa_template", prompt)
        for name in ("condense_prompt", "context_refine_prompt", "context_refine_template"):
            engine.pop(name, None)
        query_engine = AgenticQueryEngine(retriever, **engine)
        chat = cls(query_engine, memory, prefix_messages=prefix_messages or (), skip_condense=skip_condense)
        if memory is None:
            chat.memory.set(chat._without_rules(chat_history or ()))
        return chat

    @dispatcher.span
    @trace_method("chat")
    def chat(self, message: str | QueryBundle, chat_history: History = None) -> AgenticChatResponse:
        """Answer a message; a ``chat_history`` replaces the messages in the memory."""
        return run(self._chat(str(message), chat_history))

    @dispatcher.span
    @trace_method("chat")
    async def achat(self, message: str | QueryBundle, chat_history: History = None) -> AgenticChatResponse:
        """Answer a message; see ``chat``."""
        return await arun(self._chat(str(message), chat_history))

    @dispatcher.span
    @trace_method("chat")
    def stream_chat(self, message: str | QueryBundle, chat_history: History = None) -> AgenticStreamingChatResponse:
        """Answer a message as a stream of token deltas; see ``chat``. Errors are raised while the stream is read."""
        work, fields = run(self._begin(str(message), chat_history))
        deltas = iterate(work, contextvars.copy_context())
        return AgenticStreamingChatResponse(chat_stream=deltas, is_writing_to_memory=False, **fields)

    @dispatcher.span
    @trace_method("chat")
    async def astream_chat(
        self, message: str | QueryBundle, chat_history: History = None
    ) -> AgenticStreamingChatResponse:
        """Answer a message as a stream of token deltas; see ``chat``. Errors are raised while the stream is read."""
        work, fields = await arun(self._begin(str(message), chat_history))
        deltas = aiterate(work, contextvars.copy_context())
        return AgenticStreamingChatResponse(achat_stream=deltas, is_writing_to_memory=False, **fields)

    def reset(self) -> None:
        """Clear the conversation; an answer that is still being streamed will not be stored.

        A memory that keeps content after a reset (LlamaIndex's ``memory_blocks``) still belongs to its principal.

        Raises:
            DeniedError: The conversation belongs to another principal.
        """
        owner_of(self.memory).claim(self.query_engine.retriever.resolve_principal())
        self.memory.reset()
        self._given, self.states = [], parsed_states({})
        owner_of(self.memory).end(forgotten=not getattr(self.memory, "memory_blocks", None))

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation so far.

        Raises:
            DeniedError: The conversation belongs to another principal.
        """
        owner_of(self.memory).check(current_principal())
        return list(self.memory.get_all())

    async def _chat(self, message: str, history: Sequence[ChatMessage] | None) -> AgenticChatResponse:
        request, number = await self._request(message, history)
        answered = await self.query_engine.answer(request)
        response = answered.llama_response()
        text = readable(answered.text) if self._extracts or answered.synthesis.is_extract else str(response)
        await self._remember(message, text, number, answered.retrieval)
        return AgenticChatResponse(text, metadata=response.metadata, **_sources(message, response.source_nodes))

    async def _begin(self, message: str, history: Sequence[ChatMessage] | None) -> tuple[Work[None], JsonObject]:
        """Retrieve; return a coroutine that streams the answer and stores the turn, and the response's fields."""
        request, number = await self._request(message, history)
        begun = await self.query_engine.begin(request)
        text = ""

        def delta(token: str) -> ChatResponse:
            nonlocal text
            token = readable(token) if self._extracts or token.startswith(EXTRACTS) else token
            text += token
            return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=token)

        async def turn() -> None:
            await emitting(begun.work(), delta)
            await self._remember(message, text, number, begun.retrieval)

        return turn(), {"metadata": begun.metadata, **_sources(message, begun.nodes)}

    async def _request(self, message: str, chat_history: Sequence[ChatMessage] | None) -> tuple[RetrievalRequest, int]:
        """Return the request for a message, and the number of its conversation."""
        if not message.strip():
            raise InvalidRequestError("message: the message is empty")
        principal = self.query_engine.retriever.resolve_principal()
        number = owner_of(self.memory).claim(principal)
        set_principal(principal)  # a memory may be restricted to one principal
        if chat_history is not None:
            given = self._without_rules(chat_history)
            await Call(sync=partial(self.memory.set, given), native=partial(self.memory.aset, given), what="memory")
        read, aread = partial(self.memory.get, input=message), partial(self.memory.aget, input=message)
        earlier = await Call(sync=read, native=aread, what="memory")
        # A memory's own system messages, such as summaries, are no instructions.
        said = [one if one.role not in _RULES else ChatMessage(role="model", content=one.content) for one in earlier]
        question = ChatMessage(role="user", content=message)
        request = RetrievalRequest(messages=conversation_messages([*self._prefix, *self._given, *said, question]))
        if isinstance(self.memory, SessionMemory):  # where other engines change it too
            self.states = parsed_states(await self.memory.aget_states())
        return request.model_copy(update={"retrieval_reasoning_effort": self._effort, **self.states}), number

    def _without_rules(self, history: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Keep the system messages of a history, and return the others."""
        self._given = [message for message in history if message.role in _RULES]
        return [message for message in history if message.role not in _RULES]

    async def _remember(self, message: str, answer: str, number: int, retrieval: Retrieval) -> None:
        """Store a turn in the memory, and the conversation's state, unless the conversation was reset meanwhile."""
        if owner_of(self.memory).number != number:
            return
        turn = [ChatMessage(role="user", content=message), ChatMessage(role="assistant", content=answer)]
        put, aput = partial(self.memory.put_messages, turn), partial(self.memory.aput_messages, turn)
        await Call(sync=put, native=aput, what="memory")
        self.states |= states_of(retrieval)
        if isinstance(self.memory, SessionMemory):
            await self.memory.aset_states({name: state.to_dict() for name, state in self.states.items()})


def conversation_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages of a LlamaIndex conversation for a request, without those that have no text."""
    texts = [(message.role.value, message.content or "") for message in messages]
    return [Message.model_validate({"role": role, "content": text}) for role, text in texts if text.strip()]


def _sources(message: str, nodes: list[NodeWithScore]) -> JsonObject:
    """Return the ``sources`` and ``source_nodes`` arguments of a LlamaIndex chat response; both hold this list."""
    asked = {"message": message}
    output = ToolOutput(tool_name="knowledge_base", content=str(len(nodes)), raw_input=asked, raw_output=nodes)
    return {"sources": [output], "source_nodes": nodes}
