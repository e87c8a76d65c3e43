"""A ``VectorStoreIndex`` whose retriever, query engine and chat engine are agentic."""

from __future__ import annotations

from inspect import signature
from typing import Any, Final, Self

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.llms import LLM
from llama_index.core.llms.utils import LLMType
from llama_index.core.llms.utils import resolve_llm as core_resolve_llm
from llama_index.core.memory import BaseMemory

from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.chat_engine import AgenticChatEngine
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.llm import resolve_llm
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.retriever import AgenticRetriever
from llama_index_agentic_kb.sources import KnowledgeSource

__all__ = ["AgenticVectorStoreIndex", "as_chat_engine", "split_kwargs"]

_SHARED: Final = {"self", "sources", "llm", "node_postprocessors"}
RETRIEVER_ARGUMENTS: Final = frozenset(signature(AgenticRetriever.__init__).parameters) - _SHARED
"""Keyword arguments that mean the agentic retriever."""
STORE_ARGUMENTS: Final = frozenset(
    {"alpha", "doc_ids", "hybrid_top_k", "node_ids", "sparse_top_k", "vector_store_kwargs", "vector_store_query_mode"}
)
"""Keyword arguments that mean LlamaIndex's own vector retriever underneath."""
_USED: Final = STORE_ARGUMENTS | {"hybrid", "node_postprocessors"}
"""Keyword arguments that an engine does not take: its retriever has them."""


class AgenticVectorStoreIndex(NotPickled, VectorStoreIndex):
    """A ``VectorStoreIndex`` in every other respect: build it, insert into it and persist it as usual.

    ``as_retriever``, ``as_query_engine`` and ``as_chat_engine`` are agentic; without a language model they search the
    question as it is and return extracts. ``as_plain_retriever`` is LlamaIndex's own.
    """

    instead_of_pickling = "Keep it with storage_context.persist(), and load it with load_index_from_storage."

    source_name = "index"
    """The name under which plans, activity and references know the index."""

    source_description = ""
    """Its content, for the planner."""

    source_hybrid: bool | None = None
    """Whether words are searched beside vectors (BM25); see ``KnowledgeSource``."""

    source_permissions: Permissions | None = None
    """The metadata fields that say who may see a document; see ``KnowledgeSource``."""

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
        """Return an agentic index over a plain one. Both share the store: nothing is copied or embedded again.

        Args:
            index: The plain index.
            name: The name under which plans, activity and references know it.
            description: Its content, for the planner.
            hybrid: Whether words are searched beside vectors; see ``KnowledgeSource``.
            permissions: The metadata fields that say who may see a document; see ``KnowledgeSource``.
                ``as_plain_retriever`` knows nothing of them.
        """
        agentic = cls(
            index_struct=index.index_struct,
            storage_context=index.storage_context,
            embed_model=index._embed_model,  # noqa: SLF001 (no public name)
            callback_manager=index._callback_manager,  # noqa: SLF001
            transformations=index._transformations,  # noqa: SLF001
        )
        agentic._object_map = index._object_map  # noqa: SLF001
        agentic.source_name, agentic.source_description, agentic.source_hybrid = name, description, hybrid
        agentic.source_permissions = permissions
        return agentic

    def as_plain_retriever(self, **kwargs: Any) -> BaseRetriever:
        """Return LlamaIndex's own vector retriever."""
        return super().as_retriever(**kwargs)

    def as_retriever(self, *, llm: LLM | None = None, hybrid: bool | None = None, **kwargs: Any) -> AgenticRetriever:
        """Return an agentic retriever.

        Args:
            llm: Plans; None is ``Settings.llm`` where there is one.
            hybrid: Whether words are searched beside vectors; None is the index's own ``source_hybrid``.
            kwargs: Arguments of ``AgenticRetriever`` (``similarity_top_k``, ``filters``, ``node_postprocessors``,
                ``memory``, ``effort``, ...) and of LlamaIndex's vector retriever (``vector_store_query_mode``, ...).
                Others, which ``as_query_engine`` hands down as LlamaIndex does, are left alone.
        """
        source = KnowledgeSource(
            self.source_name,
            self.source_description,
            index=self,
            retriever_kwargs={name: kwargs[name] for name in STORE_ARGUMENTS & kwargs.keys()},
            hybrid=self.source_hybrid if hybrid is None else hybrid,
            permissions=self.source_permissions,
        )
        own, rest = split_kwargs(kwargs)
        own.setdefault("callback_manager", self._callback_manager)
        return AgenticRetriever([source], llm=llm, node_postprocessors=rest.get("node_postprocessors") or (), **own)

    def as_query_engine(self, llm: LLMType | None = None, **kwargs: Any) -> BaseQueryEngine:
        """Return an agentic query engine.

        Args:
            llm: Plans and answers; None is ``Settings.llm`` where there is one.
            kwargs: Those of ``as_retriever``, of ``AgenticQueryEngine`` and of ``get_response_synthesizer``
                (``response_mode``, ``streaming``, ``text_qa_template``, ...).
        """
        return AgenticQueryEngine(self.as_retriever(llm=_resolve(llm), **kwargs), **_engine_kwargs(kwargs))

    def as_chat_engine(
        self, chat_mode: ChatMode = ChatMode.BEST, llm: LLMType | None = None, **kwargs: Any
    ) -> BaseChatEngine:
        """Return a chat engine: ours by default; LlamaIndex's own over our retriever for its other modes.

        Args:
            chat_mode: ``BEST`` (default) is ``AgenticChatEngine``.
            llm: Plans and answers; None is ``Settings.llm`` where there is one.
            kwargs: Those of ``as_query_engine``; ``memory`` and, for other modes, those of LlamaIndex's engine.
        """
        memory = kwargs.pop("memory", None)
        retriever = self.as_retriever(llm=_resolve(llm), **kwargs)
        return as_chat_engine(retriever, ChatMode(chat_mode), memory, **_engine_kwargs(kwargs))


def as_chat_engine(
    retriever: AgenticRetriever, chat_mode: ChatMode, memory: BaseMemory | None = None, **kwargs: Any
) -> BaseChatEngine:
    """Return a chat engine over an agentic retriever: ours for ``BEST``, else LlamaIndex's own of the mode.

    Both share one memory.

    Raises:
        ConfigurationError: The mode needs a language model, or was removed from LlamaIndex.
    """
    if chat_mode is ChatMode.BEST:
        return AgenticChatEngine(AgenticQueryEngine(retriever, **kwargs), memory=memory)
    if retriever.llm is None:
        raise ConfigurationError(
            f"chat_mode {chat_mode.value!r} needs a language model: pass llm= or set Settings.llm; "
            "chat_mode 'best' works without one"
        )
    # loaded by those who ask for it only
    from llama_index.core import chat_engine as theirs  # noqa: PLC0415
    from llama_index.core.memory import ChatMemoryBuffer  # noqa: PLC0415

    retriever.memory = memory or retriever.memory or ChatMemoryBuffer.from_defaults(llm=retriever.llm)
    kwargs = {"llm": retriever.llm, "memory": retriever.memory, **kwargs}
    if chat_mode is ChatMode.CONTEXT:
        return theirs.ContextChatEngine.from_defaults(retriever=retriever, **kwargs)
    if chat_mode is ChatMode.CONDENSE_PLUS_CONTEXT:
        return theirs.CondensePlusContextChatEngine.from_defaults(retriever=retriever, **kwargs)
    if chat_mode is ChatMode.CONDENSE_QUESTION:
        make = theirs.CondenseQuestionChatEngine.from_defaults
        engine = {key: kwargs.pop(key) for key in kwargs.keys() - signature(make).parameters.keys()}
        return make(query_engine=AgenticQueryEngine(retriever, **engine), **kwargs)
    if chat_mode is ChatMode.SIMPLE:
        return theirs.SimpleChatEngine.from_defaults(**kwargs)
    raise ConfigurationError(
        f"chat_mode {chat_mode.value!r} was removed from LlamaIndex: use an agent with KnowledgeBase.as_tool()"
    )


def split_kwargs(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the retriever's keyword arguments and the rest: LlamaIndex hands one dict to both."""
    own = {key: value for key, value in kwargs.items() if key in RETRIEVER_ARGUMENTS}
    return own, {key: value for key, value in kwargs.items() if key not in RETRIEVER_ARGUMENTS}


def _engine_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in split_kwargs(kwargs)[1].items() if key not in _USED}


def _resolve(llm: LLMType | None) -> LLM | None:
    """Resolve as LlamaIndex does ("default", "local", a LangChain model), but None without asking for a key."""
    return resolve_llm(None) if llm is None else core_resolve_llm(llm)
