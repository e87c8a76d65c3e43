"""A ``VectorStoreIndex`` whose retriever, query engine and chat engine are agentic; LlamaIndex's chat engines over it.

LlamaIndex puts the conversation into prompt templates, where ``{context_str}`` in a message would be replaced: here it
stays text. No call is spent on condensing it: our planner reads it from the memory that it shares with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Final, Self, TypedDict

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ContentBlock, TextBlock
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, ChatMode, StreamingAgentChatResponse
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.llms import LLM
from llama_index.core.llms.utils import LLMType
from llama_index.core.llms.utils import resolve_llm as core_resolve_llm
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import CompactAndRefine

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.chat_engine import AgenticChatEngine
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.llm import resolve_llm
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import ActivityRecord, Principal, ReasoningEffort
from llama_index_agentic_kb.search.filters import FilterLike
from llama_index_agentic_kb.search.rerank import Reranker
from llama_index_agentic_kb.sources import KnowledgeSource


class RetrieverArguments(TypedDict, total=False):
    """The keyword arguments of ``AgenticRetriever`` other than its sources."""

    llm: LLM | None
    effort: ReasoningEffort | str
    similarity_top_k: int | None
    filters: FilterLike
    node_postprocessors: Sequence[BaseNodePostprocessor] | None
    reranker: Reranker | BaseNodePostprocessor | None
    memory: BaseMemory | None
    principal: Principal | None
    max_runtime_in_seconds: float | None
    observer: Callable[[ActivityRecord], None] | None
    callback_manager: CallbackManager | None
    verbose: bool
    options: RetrieverOptions | None


STORE_ARGUMENTS: Final = frozenset(
    {"alpha", "doc_ids", "hybrid_top_k", "node_ids", "sparse_top_k", "vector_store_kwargs", "vector_store_query_mode"}
)
"""Keyword arguments to pass to the underlying LlamaIndex vector retriever."""


class AgenticVectorStoreIndex(NotPickled, VectorStoreIndex):
    """A ``VectorStoreIndex`` whose ``as_retriever``, ``as_query_engine`` and ``as_chat_engine`` are agentic.

    Build, update and persist it as usual. Without a language model, the question is searched as at minimal effort, and
    responses are extracts. ``as_plain_retriever`` returns LlamaIndex's own retriever.
    """

    instead_of_pickling = "Keep it with storage_context.persist(), and load it with load_index_from_storage."

    _described: tuple[str, str, bool | None, Permissions | None] = ("index", "", None, None)

    @classmethod
    def from_index(
        cls,
        index: VectorStoreIndex,
        *,
        name: str = "index",
        description: str = "",
        hybrid: bool | None = None,
        permissions: Permissions | None = None,
    ) -> Self:
        """Return an agentic index over a plain one. Both share one store: nothing is copied or embedded again.

        Args:
            index: The plain index.
            name: The name of the index in plans, activity records and references.
            description: A description of the content, for the planner.
            hybrid: See ``KnowledgeSource``.
            permissions: See ``KnowledgeSource``. ``as_plain_retriever`` does not apply them.
        """
        agentic = cls(
            index_struct=index.index_struct,
            storage_context=index.storage_context,
            embed_model=index._embed_model,  # noqa: SLF001 (no public name)
            callback_manager=index._callback_manager,  # noqa: SLF001
            transformations=index._transformations,  # noqa: SLF001
        )
        agentic._object_map = index._object_map  # noqa: SLF001
        agentic._described = (name, description, hybrid, permissions)
        return agentic

    def as_plain_retriever(self, **kwargs: object) -> BaseRetriever:
        """Return LlamaIndex's own vector retriever."""
        return super().as_retriever(**kwargs)

    def as_retriever(self, *, hybrid: bool | None = None, **kwargs: Any) -> AgenticRetriever:
        """Return an agentic retriever.

        Args:
            hybrid: Whether to combine keyword search with vector search. Defaults to that of ``from_index``.
            kwargs: Arguments of ``AgenticRetriever`` (``llm``, ``similarity_top_k``, ``filters``, ``memory``, ...) and
                of LlamaIndex's vector retriever (``vector_store_query_mode``, ...). Others, which
                ``as_query_engine`` passes on as LlamaIndex does, are ignored.
        """
        name, description, default, permissions = self._described
        source = KnowledgeSource(
            name,
            description,
            index=self,
            retriever_kwargs={key: kwargs[key] for key in STORE_ARGUMENTS & kwargs.keys()},
            hybrid=default if hybrid is None else hybrid,
            permissions=permissions,
        )
        own, _ = split_kwargs(kwargs)
        own.setdefault("callback_manager", self._callback_manager)
        return AgenticRetriever([source], **own)

    def as_query_engine(self, llm: LLMType | None = None, **kwargs: Any) -> BaseQueryEngine:
        """Return an agentic query engine.

        Args:
            llm: The language model that plans and answers. Defaults to ``Settings.llm`` if set.
            kwargs: Arguments of ``as_retriever`` and ``AgenticQueryEngine`` (``response_mode``, ``streaming``, ...).
        """
        return AgenticQueryEngine(self.as_retriever(llm=_resolve(llm), **kwargs), **split_kwargs(kwargs)[1])

    def as_chat_engine(
        self, chat_mode: ChatMode = ChatMode.BEST, llm: LLMType | None = None, **kwargs: Any
    ) -> BaseChatEngine:
        """Return a chat engine: ``AgenticChatEngine``, or for other modes LlamaIndex's own over our retriever.

        Args:
            chat_mode: ``BEST`` (default) selects ``AgenticChatEngine``; other modes select LlamaIndex's engines.
            llm: See ``as_query_engine``.
            kwargs: Arguments of ``as_query_engine`` and of the mode's engine (``memory``, ``system_prompt``, ...).
        """
        memory = kwargs.pop("memory", None)
        retriever = self.as_retriever(llm=_resolve(llm), **kwargs)
        return as_chat_engine(retriever, ChatMode(chat_mode), memory, **split_kwargs(kwargs)[1])


def as_chat_engine(
    retriever: AgenticRetriever, chat_mode: ChatMode, memory: BaseMemory | None = None, **kwargs: Any
) -> BaseChatEngine:
    """Return a chat engine over an agentic retriever: ours for ``BEST``, else LlamaIndex's engine of the mode.

    Args:
        retriever: The retriever that the chat engine searches with.
        chat_mode: The chat mode of LlamaIndex.
        memory: The conversation memory. Defaults to a new one. LlamaIndex's engines share it with the retriever, which
            plans from it, so that they condense nothing unless the effort is minimal.
        kwargs: Arguments of ``AgenticQueryEngine`` and of the mode's engine.

    Raises:
        ConfigurationError: The mode needs a language model, or was removed from LlamaIndex.
    """
    if chat_mode is ChatMode.BEST:
        return AgenticChatEngine.from_defaults(retriever, memory=memory or retriever.memory, **kwargs)
    if retriever.llm is None:
        raise ConfigurationError(
            f"chat_mode {chat_mode.value!r} needs a language model: pass llm= or set Settings.llm; "
            "chat_mode 'best' works without one"
        )
    history = kwargs.pop("chat_history", None)
    retriever.memory = memory or retriever.memory or ChatMemoryBuffer.from_defaults(history, llm=retriever.llm)
    kwargs = {"llm": retriever.llm, "memory": retriever.memory, **kwargs}
    plans = retriever.effort is not ReasoningEffort.MINIMAL  # then the planner reads the conversation
    if chat_mode is ChatMode.CONTEXT:
        return ContextChat.from_defaults(retriever=retriever, **kwargs)
    if chat_mode is ChatMode.CONDENSE_PLUS_CONTEXT:
        kwargs.setdefault("skip_condense", plans)
        return CondensePlusContextChat.from_defaults(retriever=retriever, **kwargs)
    if chat_mode is ChatMode.CONDENSE_QUESTION:
        condensing = CondenseQuestionChat if plans else CondenseQuestionChatEngine
        make = condensing.from_defaults
        engine = {key: kwargs.pop(key) for key in kwargs.keys() - signature(make).parameters.keys()}
        return make(query_engine=AgenticQueryEngine(retriever, **engine), **kwargs)
    if chat_mode is ChatMode.SIMPLE:
        return SimpleChatEngine.from_defaults(**kwargs)
    raise ConfigurationError(
        f"chat_mode {chat_mode.value!r} was removed from LlamaIndex: use an agent with KnowledgeBase.as_tool()"
    )


class _PlainConversation:
    """Mixin for engines whose prompt templates hold the conversation: there its texts become variables."""

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> CompactAndRefine:
        values: dict[str, str] = {}

        def variable(block: ContentBlock) -> ContentBlock:
            if not isinstance(block, TextBlock):
                return block
            name = f"said_{len(values)}"
            values[name] = block.text
            return TextBlock(text=f"{{{name}}}")

        history = [one.model_copy(update={"blocks": [*map(variable, one.blocks)]}) for one in chat_history]
        synthesizer: CompactAndRefine = super()._get_response_synthesizer(history, streaming=streaming)  # type: ignore[misc]  # of the engine beside this mixin
        prompts = synthesizer.get_prompts().items()
        synthesizer.update_prompts({name: prompt.partial_format(**values) for name, prompt in prompts})
        return synthesizer


class ContextChat(_PlainConversation, ContextChatEngine):
    """LlamaIndex's ``ContextChatEngine``; braces in a conversation are text, not variables of a template."""


class CondensePlusContextChat(_PlainConversation, CondensePlusContextChatEngine):
    """LlamaIndex's ``CondensePlusContextChatEngine``; braces in a conversation are text, as above."""


class CondenseQuestionChat(CondenseQuestionChatEngine):
    """LlamaIndex's ``CondenseQuestionChatEngine`` without its condensing: the retriever plans from the conversation.

    A ``chat_history`` replaces the messages in the memory, as in the other modes; an empty one counts as none.
    """

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer a message."""
        if chat_history:
            self._memory.set(chat_history)
        response: AgentChatResponse = super().chat(message, chat_history)
        return response

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer a message; see ``chat``."""
        if chat_history:
            await self._memory.aset(chat_history)
        response: AgentChatResponse = await super().achat(message, chat_history)
        return response

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> StreamingAgentChatResponse:
        """Answer a message, as a stream; see ``chat``."""
        if chat_history:
            self._memory.set(chat_history)
        response: StreamingAgentChatResponse = super().stream_chat(message, chat_history)
        return response

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer a message, as a stream; see ``chat``."""
        if chat_history:
            await self._memory.aset(chat_history)
        response: StreamingAgentChatResponse = await super().astream_chat(message, chat_history)
        return response

    def _condense_question(self, chat_history: list[ChatMessage], last_message: str) -> str:
        del chat_history
        return last_message

    async def _acondense_question(self, chat_history: list[ChatMessage], last_message: str) -> str:
        del chat_history
        return last_message


def split_kwargs(kwargs: JsonObject) -> tuple[RetrieverArguments, JsonObject]:
    """Split keyword arguments, which LlamaIndex passes to both in one dict, into the retriever's and the engine's.

    ``llm`` and ``verbose`` go to both; postprocessors and the arguments of LlamaIndex's own retriever don't go to the
    engine.
    """
    own: Any = {key: value for key, value in kwargs.items() if key in RetrieverArguments.__annotations__}
    taken = STORE_ARGUMENTS | RetrieverArguments.__annotations__.keys() - {"llm", "verbose"} | {"hybrid"}
    return own, {key: value for key, value in kwargs.items() if key not in taken}


def _resolve(llm: LLMType | None) -> LLM | None:
    """Resolve an LLM as LlamaIndex does (such as "default"); None never requires an API key."""
    return resolve_llm(None) if llm is None else core_resolve_llm(llm)
