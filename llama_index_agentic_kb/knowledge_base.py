"""The main entry point: questions over several knowledge sources."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar, Unpack

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index_instrumentation import get_dispatcher

from llama_index_agentic_kb._aio import aiterate, arun, emit, gather, iterate, run
from llama_index_agentic_kb._types import Closing, JsonMapping, JsonObject, Work
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.answering.policy import AnswerPolicy
from llama_index_agentic_kb.answering.sessions import SessionMemory, session_owner
from llama_index_agentic_kb.chat_engine import conversation_messages
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, by_value
from llama_index_agentic_kb.grounding.settings import Grounding, as_grounding
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.index import RetrieverArguments, as_chat_engine, split_kwargs
from llama_index_agentic_kb.llm import model_name, warm_up_llm
from llama_index_agentic_kb.query_engine import AgenticQueryEngine, Observer, PassageTool, ToolQueryEngine, default_mode
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import (
    FilterNode,
    Message,
    OutputMode,
    Principal,
    RetrievalRequest,
    RetrievalResponse,
    parse_odata,
)
from llama_index_agentic_kb.schema.answer import AnswerPiece, AnswerQuery, AnswerResponse
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.base import by_name
from llama_index_agentic_kb.sources.metadata import MetadataQueries
from llama_index_agentic_kb.sources.plugins import PluginFailure, discover_sources

if TYPE_CHECKING:  # they import SQLAlchemy
    from llama_index_agentic_kb.store import KnowledgeStore
    from llama_index_agentic_kb.store.sessions import SessionStore

dispatcher = get_dispatcher(__name__)

Question: TypeAlias = str | Sequence[ChatMessage | Message | JsonMapping] | RetrievalRequest | JsonMapping
"""A question, a conversation whose last message is the question, or a request (typed or as JSON)."""

Query: TypeAlias = Question | AnswerQuery

E = TypeVar("E", bound=AgenticQueryEngine)

GC_THRESHOLD: Final = 10_000
"""The number of new objects after which the garbage collector looks, once ``warm_up`` was called; Python's is 700."""


class KnowledgeBase(Closing, NotPickled, MetadataQueries):
    """Knowledge sources, a language model and default settings; creates retrievers, query engines and chat engines.

        kb = KnowledgeBase([KnowledgeSource("docs", "product manuals", index=index)], llm=llm)
        response = kb.retrieve("How do I reset the pump, and who may do it?")

    Args:
        sources: The knowledge sources to search; their names must be unique.
        name: The name used by tools and logs.
        description: A summary of the content, for agents that choose among tools.
        output_mode: The default output of ``retrieve``. Defaults to an answer with a language model, else extracts.
        max_output_size_in_tokens: The default maximum length of the output in tokens. Defaults to the mode's own.
        grounding: Settings for checking answers against their evidence. None (default) and True mean ``Grounding()``;
            False disables the check.
        retrieval_instructions: The application's instructions for planning: which source for what, how to word
            searches. A request's own replace them. Unused at minimal effort.
        answer_instructions: The application's instructions for the answer: persona, tone, form, language. A request's
            own replace them. System messages of a conversation come after both.
        policy: The application's rules for questions that ``answer`` must refuse and answers it must withhold.
        sessions: The store for the turns of ``answer``; queries name the session. None means no sessions.
        retries: The retry policy for failed calls of the language model. Defaults to that of ``options``.
        retriever: Arguments of ``AgenticRetriever``: ``llm`` (the model that plans and answers; without one, the
            question is searched as at minimal effort, and responses are extracted data), ``effort``, ``filters``,
            ``principal``, ``reranker``, ``max_runtime_in_seconds``, ``options``, ...

    Raises:
        ConfigurationError: There are no sources, two have the same name, or ``output_mode`` needs a language model
            and none is configured.
    """

    def __init__(
        self,
        sources: Sequence[KnowledgeSource],
        *,
        name: str = "knowledge_base",
        description: str = "Answers questions from knowledge sources, with references.",
        output_mode: OutputMode | str | None = None,
        max_output_size_in_tokens: int | None = None,
        grounding: Grounding | bool | None = None,
        retrieval_instructions: str = "",
        answer_instructions: str = "",
        policy: AnswerPolicy | None = None,
        sessions: SessionStore | None = None,
        retries: RetryPolicy | None = None,
        **retriever: Unpack[RetrieverArguments],
    ) -> None:
        options = retriever.get("options") or RetrieverOptions()
        instructions = retrieval_instructions or options.retrieval_instructions
        options = replace(options, retries=retries or options.retries, retrieval_instructions=instructions)
        self._retriever_arguments: RetrieverArguments = {**retriever, "options": options}
        self.answer_instructions = answer_instructions
        self.name = name
        self.grounding = grounding
        self.policy = policy or AnswerPolicy()
        self.sessions = sessions
        self.description = description
        self.max_output_size_in_tokens = max_output_size_in_tokens
        given: object = sources
        if isinstance(given, KnowledgeSource) or not isinstance(given, Iterable):
            raise ConfigurationError(f"sources: expected a list of KnowledgeSource, got {type(given).__name__}")
        self._own_sources = self._sources = list(sources)
        self._opened: KnowledgeStore | None = None
        self.retriever = self.as_retriever()
        self.output_mode = by_value(OutputMode, output_mode or default_mode(self.retriever), "output_mode")
        self._engines: dict[OutputMode, AgenticQueryEngine] = {}
        try:
            self._engine(self.output_mode)
        except InvalidRequestError as error:
            raise ConfigurationError(str(error)) from error

    @classmethod
    def from_store(
        cls,
        path: str | Path,
        *,
        embed_model: BaseEmbedding | None = None,
        hybrid: bool | None = None,
        repair: Literal["never", "auto"] = "never",
        permissions: Permissions | Mapping[str, Permissions | None] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Open a store created by ``agentic-kb ingest``: each of its sources becomes a ``KnowledgeSource``.

        ``close``, or the end of a ``with`` block, closes the store.
        Scope indexes made by ``agentic-kb calibrate`` are used for conversations (``RetrieverOptions.scope``).

        Args:
            path: The store's directory, or the URL of a PostgreSQL database (``postgresql://user@host/database``).
            embed_model: The model that the store was created with. Defaults to the library's default model.
            hybrid: Whether to combine keyword search in the store's own index with vector search. Default True.
            repair: How to handle vectors damaged by a killed process. "never" raises an error that names
                ``agentic-kb repair``; "auto" recomputes them, in about a second per thousand chunks.
            permissions: The metadata fields that define who may see a document: for all sources, or a mapping by
                source name (None for a source that everybody may see).
            kwargs: Further arguments of the class.

        Raises:
            StoreMismatchError: The store was created with another embedding model.
            StoreDamagedError: The store is damaged; the message names the remedy.
            ConfigurationError: The store does not exist or has no sources, or ``permissions`` does not name exactly its
                sources, or names fields that the documents themselves may have set.
        """
        from llama_index_agentic_kb.store import KnowledgeStore  # noqa: PLC0415 (loads SQLite and more)

        store = KnowledgeStore.open(path, embed_model=embed_model, repair=repair)
        options = kwargs.get("options") or RetrieverOptions()
        if not options.scope and (scopes := store.scopes()):
            kwargs["options"] = replace(options, scope=scopes)
        described = {info.name: info.description for info in store.sources()}
        allowed = permissions if isinstance(permissions, Mapping) else dict.fromkeys(described, permissions)
        if allowed.keys() != described.keys():
            raise ConfigurationError(
                f"permissions: they are given for {', '.join(sorted(allowed))}, and the store's sources are "
                f"{', '.join(described)}; give None for one that is everybody's"
            )
        sources = []
        for source, description in described.items():
            declared, lexical = allowed[source], hybrid is not False and store.lexical(source)
            if declared is not None:
                store.check_permissions(source, declared)
            index = store.index(source)
            sources.append(KnowledgeSource(source, description, index=index, hybrid=lexical, permissions=declared))
        made = cls(sources, **kwargs)
        made._opened = store
        return made

    def close(self) -> None:
        """Close the store that ``from_store`` opened: its files, or its connections to PostgreSQL."""
        if self._opened is not None:
            self._opened.close()

    @property
    def llm(self) -> LLM | None:
        """The language model, or None."""
        return self.retriever.llm

    @property
    def sources(self) -> Mapping[str, KnowledgeSource]:
        """The sources by name."""
        return self.retriever.sources

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the sources and the settings."""
        from llama_index_agentic_kb import _html  # noqa: PLC0415 (for notebooks only)

        facts = {"model": self.llm and model_name(self.llm), "effort": self.retriever.effort.value}
        facts |= {"output": self.output_mode.value, "answers are checked": "off" if self.grounding is False else "on"}
        sources = [(source.name, source.description) for source in self.sources.values()]
        return _html.base_html(self.name, self.description, sources, facts)

    def _asking(self, principal: Principal | None) -> tuple[Principal | None, FilterNode | None, float | None]:
        own = self.retriever
        return own.resolve_principal(principal), own.filters, own.max_runtime_in_seconds

    # -- asking ----------------------------------------------------------------------------------------------------

    @dispatcher.span
    def retrieve(self, question: Question, *, on_activity: Observer = None, **fields: object) -> RetrievalResponse:
        """Answer a question, or return its evidence, with references and activity.

        Args:
            question: A string, a conversation (the last message is the question), or a request (typed or as JSON).
            on_activity: Called with each activity record when it is opened and again when it is closed.
            fields: Fields of ``RetrievalRequest`` (``output_mode=``, ...), which override those of a request.
                ``principal=`` is the requesting user, for sources with permissions; it can't be set in JSON.

        Raises:
            InvalidRequestError: The request is invalid.
            DeniedError: A required principal is missing, or the principal may not search any source.
            RetrievalError: No selected source could answer.
            SynthesisError: The language model failed while answering.
        """
        return run(self._response(question, on_activity, fields))

    @dispatcher.span
    async def aretrieve(
        self, question: Question, *, on_activity: Observer = None, **fields: object
    ) -> RetrievalResponse:
        """Answer a question, or return its evidence; see ``retrieve``."""
        return await arun(self._response(question, on_activity, fields))

    @dispatcher.span
    def astream_retrieve(
        self, question: Question, *, on_activity: Observer = None, **fields: object
    ) -> AsyncIterator[str | RetrievalResponse]:
        """Stream the text of the answer as it is written, and finally the response; see ``retrieve``.

        There is only the response if the text is extracted data, or if the checks may change it.
        """

        async def work() -> None:
            await emit(await self._response(question, on_activity, fields, streaming=True))

        return aiterate(work(), contextvars.copy_context())

    async def _response(
        self, question: Question, observer: Observer, fields: JsonObject, *, streaming: bool = False
    ) -> RetrievalResponse:
        request = self.request(question, **fields)
        mode = request.output_mode or self.output_mode
        engine = self._engines.get(mode) or self._engine(mode)
        streaming = streaming and mode is OutputMode.ANSWER_SYNTHESIS
        answered = await engine.answer(request, observer=observer, announced=True, streaming=streaming)
        return answered.response(include_activity=request.include_activity)

    def request(self, question: Question, **fields: object) -> RetrievalRequest:
        """Return the request for a question, with this knowledge base's defaults.

        Raises:
            InvalidRequestError: A field is invalid; the message names it.
        """
        request = RetrievalRequest.parse(question) if isinstance(question, Mapping) else question
        if self.max_output_size_in_tokens is not None and getattr(request, "max_output_size_in_tokens", None) is None:
            fields.setdefault("max_output_size_in_tokens", self.max_output_size_in_tokens)
        if not isinstance(request, RetrievalRequest):
            return RetrievalRequest.parse({"messages": _messages(request), **fields})
        if not fields:
            return request
        own = request.model_dump(exclude_unset=True, by_alias=False)
        states = {"dialogue": request.dialogue, "scope_state": request.scope_state}
        return RetrievalRequest.parse({**own, "principal": request.principal, **states, **fields})

    def _engine(self, mode: OutputMode) -> AgenticQueryEngine:
        """Return the query engine of an output mode, made at its first use; its answer sizes are those of requests."""
        if mode is OutputMode.ANSWER_SYNTHESIS and self.llm is None:
            raise InvalidRequestError(
                "outputMode: answerSynthesis needs a language model; pass llm= or set OPENAI_API_KEY, "
                "or ask for extractiveData"
            )
        self._engines[mode] = made = AgenticQueryEngine(
            self.retriever, response_mode=mode.value, grounding=self.grounding, instructions=self.answer_instructions
        )
        return made

    # -- answers as resources --------------------------------------------------------------------------------------

    @dispatcher.span
    def answer(self, question: Query, *, on_activity: Observer = None, **fields: object) -> AnswerResponse:
        """Answer a question with an ``Answer``: citations, grounding, steps, references and skip reasons as data.

            response = kb.answer("How tall was the Saturn V?", related_questions=True)
            for support in response.answer.grounding_supports:
                print(response.text[support.start : support.end], support.score, support.sources)

        To see whether there is an answer, check ``answer.skipped_reasons``, not the text. If a conversation is sent
        with a session, only its last question is stored as a turn.

        Args:
            question: Any input of ``retrieve``, or an ``AnswerQuery``.
            on_activity: See ``retrieve``.
            fields: Fields of ``AnswerQuery`` (``session=``, ``preamble=``, ``filtering_level=``, ...), or of
                ``RetrievalRequest``. Citations and grounding supports are included by default, unless ``question`` is
                an ``AnswerQuery``.

        Raises:
            NotFoundError: The session does not exist, or belongs to another principal. For others see ``retrieve``.
        """
        return run(self._answering(question, fields, on_activity))

    @dispatcher.span
    async def aanswer(self, question: Query, *, on_activity: Observer = None, **fields: object) -> AnswerResponse:
        """Answer a question with an ``Answer``; see ``answer``."""
        return await arun(self._answering(question, fields, on_activity))

    @dispatcher.span
    def stream_answer(
        self, question: Query, *, on_activity: Observer = None, **fields: object
    ) -> Iterator[AnswerPiece]:
        """Stream the answer as pieces: steps, references, text and citations, and finally the whole response.

        If the answer may be withheld or repaired (``filtering_level``, safety, an answer policy, ``repair``), its text
        is sent as one piece after the checks. See ``answer``.
        """
        work = self._answering(question, fields, on_activity, streaming=True)
        return _one_by_one(iterate(work, contextvars.copy_context()))

    @dispatcher.span
    def astream_answer(
        self, question: Query, *, on_activity: Observer = None, **fields: object
    ) -> AsyncIterator[AnswerPiece]:
        """Stream the answer as pieces; see ``stream_answer``."""
        work = self._answering(question, fields, on_activity, streaming=True)
        return _a_one_by_one(aiterate(work, contextvars.copy_context()))

    def query(self, question: Query, **fields: object) -> AnswerQuery:
        """Return the ``AnswerQuery`` for a question, with this knowledge base's defaults; see ``request``."""
        own = {name: fields.pop(name) for name in [*fields] if name in AnswerQuery.model_fields and name != "request"}
        defaults: JsonObject = {"include_citations": True, "grounding_supports": True}
        if isinstance(question, AnswerQuery):
            defaults = {name: getattr(question, name) for name in question.model_fields_set}
            question = question.request
        return AnswerQuery.parse({**defaults, **own, "request": self.request(question, **fields)})

    def _answering(
        self, question: Query, fields: JsonObject, observer: Observer, *, streaming: bool = False
    ) -> Work[AnswerResponse]:
        from llama_index_agentic_kb.answering.engine import answer_query  # noqa: PLC0415 (imports the answer checks)

        query = self.query(question, **fields)  # raises here rather than when a stream is read
        mode = OutputMode.ANSWER_SYNTHESIS
        engine = self._engines.get(mode) or self._engine(mode)
        return answer_query(query, engine, self.policy, self.sessions, observer=observer, streaming=streaming)

    # -- as parts of a LlamaIndex app --------------------------------------------------------------------------------

    def as_retriever(self, **kwargs: Unpack[RetrieverArguments]) -> AgenticRetriever:
        """Return a LlamaIndex retriever over all sources; arguments override this knowledge base's settings."""
        own: RetrieverArguments = {**self._retriever_arguments, **kwargs}
        return AgenticRetriever(self._sources, **own)

    def as_query_engine(
        self, response_mode: str | None = None, *, streaming: bool = False, **kwargs: Any
    ) -> AgenticQueryEngine:
        """Return a LlamaIndex query engine.

        Args:
            response_mode: See ``get_response_synthesizer``. Defaults to this knowledge base's output mode.
            streaming: Whether to stream token deltas.
            kwargs: Arguments of ``AgenticRetriever`` and ``AgenticQueryEngine``.
        """
        return self._query_engine(AgenticQueryEngine, response_mode, streaming=streaming, **kwargs)

    def _query_engine(self, kind: type[E], response_mode: str | None = None, **kwargs: Any) -> E:
        own, rest = split_kwargs(kwargs)
        return kind(self.as_retriever(**own), **self._engine_arguments(response_mode, rest))

    def _engine_arguments(self, mode: str | None, given: JsonMapping) -> JsonObject:
        """Return the arguments of a query engine: those given, and this knowledge base's defaults."""
        own: JsonObject = {"grounding": self.grounding, "instructions": self.answer_instructions}
        if self.max_output_size_in_tokens is not None and "response_synthesizer" not in given:
            own["max_output_tokens"] = self.max_output_size_in_tokens
        return {**own, "response_mode": mode or self.output_mode.value, **given}

    def as_chat_engine(
        self,
        chat_mode: ChatMode = ChatMode.BEST,
        *,
        memory: BaseMemory | None = None,
        session: str | None = None,
        **kwargs: Any,
    ) -> BaseChatEngine:
        """Return a chat engine: ``AgenticChatEngine``, or for other modes LlamaIndex's own over our retriever.

        Args:
            chat_mode: ``BEST`` (default) selects ``AgenticChatEngine``; other modes select LlamaIndex's engines.
            memory: The conversation memory. Defaults to a new one.
            session: The id of a session of ``sessions`` to go on in, or "-" for a new one; in place of ``memory``.
            kwargs: Arguments of ``as_query_engine`` and of the mode's engine (``system_prompt``, ...).
        """
        chat_mode = ChatMode(chat_mode)
        own, rest = split_kwargs(kwargs)
        if session is not None:
            if self.sessions is None:
                raise ConfigurationError("session: the knowledge base has no sessions; pass sessions=SessionStore(...)")
            owner = self.retriever.resolve_principal(own.get("principal")) or session_owner(None)
            memory = SessionMemory(self.sessions, owner=owner, session_id=session)
        if chat_mode in (ChatMode.BEST, ChatMode.CONDENSE_QUESTION):  # the modes that answer with our query engine
            rest = self._engine_arguments(None, rest)
        return as_chat_engine(self.as_retriever(**own), chat_mode, memory, **rest)

    def as_tool(self, name: str | None = None, description: str | None = None, **kwargs: Any) -> QueryEngineTool:
        """Return a tool for agents and routers, whose citations survive the trip through an agent.

        Name and description default to this knowledge base's; further arguments are those of ``as_query_engine``.
        """
        engine = self._query_engine(ToolQueryEngine, **kwargs)
        engine.tool_name = name or self.name
        return QueryEngineTool.from_defaults(engine, name=engine.tool_name, description=description or self.description)

    def as_retriever_tool(
        self, name: str | None = None, description: str | None = None, **kwargs: Unpack[RetrieverArguments]
    ) -> RetrieverTool:
        """Return a tool that returns passages, each with a marker to cite it by; see ``as_tool``."""
        metadata = ToolMetadata(name=name or self.name, description=description or self.description)
        return PassageTool(self.as_retriever(**kwargs), metadata)

    def load_plugins(self) -> list[PluginFailure]:
        """Search the sources of installed plugins too, and return those that could not be loaded.

        Call it again to load them anew. Requests that have begun, and retrievers and engines that were made before,
        keep their sources.
        """
        plugins, failures = discover_sources({source.name for source in self._own_sources})
        self._sources = [*self._own_sources, *plugins]
        self.retriever.sources = by_name(self._sources)
        return failures

    # -- before the first question -----------------------------------------------------------------------------------

    def warm_up(self) -> Self:
        """Load in advance what the first question needs: imports, client, models and stores. No LLM is called.

        Afterwards, this library does not block the event loop while it answers. Objects loaded so far are excluded from
        garbage collection (``gc.freeze``), since scanning them would occasionally pause all requests for 0.2 s; and it
        runs more rarely (``gc.set_threshold``), since it takes a fifth of the time of 50 requests at once.
        """
        if self.llm is not None:
            warm_up_llm(self.llm)
            import_module("llama_index_agentic_kb.answering.engine")  # the first answer imports them
            import_module("llama_index_agentic_kb.grounding.repair")
            import_module("llama_index_agentic_kb.guard.links")
            checks = as_grounding(self.grounding)
            if checks is not None and isinstance(checks.scorer, str | None):  # a judge would be called
                from llama_index_agentic_kb.grounding.check import check_grounding  # noqa: PLC0415 (loads the scorers)

                check_grounding("It was loaded first.", ["The model was loaded."], scorer=checks.scorer)
        parse_odata("loaded eq true")
        run(gather([source.warm_up() for source in self.sources.values()]))
        gc.collect()
        gc.freeze()
        first, *others = gc.get_threshold()
        if first:  # else the application has turned it off
            gc.set_threshold(max(first, GC_THRESHOLD), *others)
        return self

    async def awarm_up(self) -> Self:
        """Load in advance what the first question needs, off the event loop; see ``warm_up``."""
        await asyncio.to_thread(self.warm_up)
        return self


def _one_by_one(batches: Generator[list[AnswerPiece], None, None]) -> Iterator[AnswerPiece]:
    with closing(batches):
        for batch in batches:
            yield from batch


async def _a_one_by_one(batches: AsyncGenerator[list[AnswerPiece], None]) -> AsyncIterator[AnswerPiece]:
    async with aclosing(batches):
        async for batch in batches:
            for piece in batch:
                yield piece


def _messages(question: object) -> list[object]:
    """Return the messages of a question or a conversation, to be parsed as those of a request."""
    if isinstance(question, str):
        if not question.strip():
            raise InvalidRequestError("question: the question is empty")
        return [{"role": "user", "content": question}]
    if not isinstance(question, Sequence):
        raise InvalidRequestError(f"question: expected a string, messages or a request, got {type(question).__name__}")
    messages: list[object] = []
    for one in question:
        messages += conversation_messages([one]) if isinstance(one, ChatMessage) else [one]
    return messages
