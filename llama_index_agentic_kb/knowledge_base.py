"""The front door: several knowledge sources behind one question."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index_instrumentation import get_dispatcher
from pydantic import ValidationError

from llama_index_agentic_kb._aio import aiterate, arun, gather, iterate, run
from llama_index_agentic_kb.account.pickling import NotPickled
from llama_index_agentic_kb.chat_engine import conversation_request
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, by_value
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.index import RetrieverArguments, as_chat_engine, split_kwargs
from llama_index_agentic_kb.llm import warm_up_llm
from llama_index_agentic_kb.query_engine import AgenticQueryEngine, default_mode
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    FilterNode,
    Message,
    OutputMode,
    Principal,
    ReasoningEffort,
    RetrievalRequest,
    RetrievalResponse,
    parse_odata,
)
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.search.rerank import Reranker
from llama_index_agentic_kb.sources import KnowledgeSource
from llama_index_agentic_kb.sources.filters import FilterLike
from llama_index_agentic_kb.sources.metadata import MetadataQueries

if TYPE_CHECKING:  # they load what checks answers, and SQLAlchemy
    from llama_index_agentic_kb.answering.engine import AnswerEngine
    from llama_index_agentic_kb.answering.policy import AnswerPolicy
    from llama_index_agentic_kb.schema.answer_query import AnswerPiece, AnswerQuery, AnswerResponse
    from llama_index_agentic_kb.store.sessions import SessionStore

__all__ = ["KnowledgeBase", "Question"]

dispatcher = get_dispatcher(__name__)

Question: TypeAlias = str | Sequence[ChatMessage | Message | Mapping[str, Any]] | RetrievalRequest | Mapping[str, Any]
"""What can be asked: a question, a conversation whose last message is the question, or a request (typed or wire)."""

Observer: TypeAlias = Callable[[ActivityRecord], None]


class KnowledgeBase(NotPickled, MetadataQueries):
    """Knowledge sources, a language model, and defaults: everything that answers questions is made of it.

        kb = KnowledgeBase([KnowledgeSource("docs", "product manuals", index=index)], llm=llm)
        response = kb.retrieve("How do I reset the pump, and who may do it?")

    Args:
        sources: What to search; names must differ.
        llm: Plans and answers. None is ``Settings.llm`` where one is set or an OpenAI key is there, else none: the
            question is then searched as it is and responses are extracted data.
        name: How tools and logs call it.
        description: What it knows, for agents that choose among tools.
        effort: Default effort of requests. Default low.
        output_mode: Default output of ``retrieve``; None is an answer with a language model, else extracted data.
        max_runtime_in_seconds: Default deadline of requests. Default 90.
        max_output_size_in_tokens: Default budget of extracted data or of an answer, in tokens. None is the mode's own.
        grounding: How answers are held against their evidence: ``Grounding(...)``; None (default) and True are its
            defaults, False does not.
        policy: What ``answer`` does not answer, by the application's own rules.
        sessions: Keeps the turns of ``answer``; queries name the session. None keeps none.
        similarity_top_k: Nodes that a retrieval returns, and that each search returns at least; None is the effort's.
        filters: Narrows every source's search, beside the source's own mandatory filter.
        reranker: Reranks the candidates of each sub-query; see ``AgenticRetriever``.
        node_postprocessors: Applied to the fused nodes of every retrieval.
        principal: Who asks, in every request; none can bring another.
        callback_manager: None is ``Settings.callback_manager``.
        retries: How failed calls of the language model are tried again; None is that of ``options``.
        options: Further options of retrieval: limits of effort, spotlighting, ...

    Raises:
        ConfigurationError: There is no source, two have one name, or answers need a language model and there is none.
    """

    def __init__(
        self,
        sources: Sequence[KnowledgeSource],
        *,
        llm: LLM | None = None,
        name: str = "knowledge_base",
        description: str = "Answers questions from knowledge sources, with references.",
        effort: ReasoningEffort | str = ReasoningEffort.LOW,
        output_mode: OutputMode | str | None = None,
        max_runtime_in_seconds: float | None = 90.0,
        max_output_size_in_tokens: int | None = None,
        grounding: Grounding | bool | None = None,
        policy: AnswerPolicy | None = None,
        sessions: SessionStore | None = None,
        similarity_top_k: int | None = None,
        filters: FilterLike = None,
        reranker: Reranker | BaseNodePostprocessor | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = (),
        principal: Principal | None = None,
        callback_manager: CallbackManager | None = None,
        retries: RetryPolicy | None = None,
        options: RetrieverOptions | None = None,
    ) -> None:
        if retries is not None:
            options = replace(options or RetrieverOptions(), retries=retries)
        self.name = name
        self.grounding = grounding
        self.policy = policy
        self.sessions = sessions
        self.description = description
        self.max_output_size_in_tokens = max_output_size_in_tokens
        self._retriever_arguments: RetrieverArguments = {
            "llm": llm,
            "effort": effort,
            "max_runtime_in_seconds": max_runtime_in_seconds,
            "similarity_top_k": similarity_top_k,
            "filters": filters,
            "reranker": reranker,
            "node_postprocessors": node_postprocessors,
            "principal": principal,
            "callback_manager": callback_manager,
            "options": options,
        }
        self._sources = list(sources)
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
        embed_model: Any = None,
        hybrid: bool | None = None,
        repair: Literal["never", "auto"] = "never",
        permissions: Permissions | Mapping[str, Permissions | None] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Open what ``agentic-kb ingest`` made: each of the store's sources becomes a source.

        Args:
            path: The store's directory.
            embed_model: The embedding model; None is the default one. It must be the one that made the store.
            hybrid: Whether words are searched beside vectors (BM25), in the store's own indexes. False is vectors
                alone; None, the default, is both.
            repair: What to do where a process that was killed has left the store's vectors damaged. "never" raises an
                error that names ``agentic-kb repair``; "auto" makes them again, about a second for each thousand
                chunks.
            permissions: The metadata fields that say who may see a document: of all sources, or of each by its name
                (None for one that is everybody's).
            kwargs: See the class.

        Raises:
            StoreMismatchError: The store was made with another embedding model.
            StoreDamagedError: It is damaged; the message names the remedy.
            ConfigurationError: There is no store, it holds no source, ``permissions`` name others than there are, or
                fields that the documents may have set themselves.
        """
        from llama_index_agentic_kb.store import KnowledgeStore  # noqa: PLC0415 (loads chromadb)

        store = KnowledgeStore.open(path, embed_model=embed_model, repair=repair)
        allowed = _by_source(permissions, [info.name for info in store.sources()])
        for name, declared in allowed.items():
            if declared is not None:
                store.check_permissions(name, declared)
        return cls(
            [
                KnowledgeSource(
                    info.name,
                    info.description,
                    index=store.index(info.name),
                    metadata_reader=partial(store.metadata, info.name),
                    hybrid=hybrid is not False and store.lexical(info.name),
                    permissions=allowed[info.name],
                )
                for info in store.sources()
            ],
            **kwargs,
        )

    @property
    def llm(self) -> LLM | None:
        """The language model, if there is one."""
        return self.retriever.llm

    @property
    def sources(self) -> Mapping[str, KnowledgeSource]:
        """The sources by name."""
        return self.retriever.sources

    def _resolve_principal(self, given: Principal | None) -> Principal | None:
        return self.retriever.resolve_principal(given)

    def _standing(self) -> tuple[FilterNode | None, float | None]:
        return self.retriever.filters, self.retriever.max_runtime_in_seconds

    # -- asking ----------------------------------------------------------------------------------------------------

    @dispatcher.span
    def retrieve(self, question: Question, *, on_activity: Observer | None = None, **fields: Any) -> RetrievalResponse:
        """Answer a question, or return its evidence, with references and activity.

        Args:
            question: A string, a conversation (the last message is the question), or a request, typed or wire.
            on_activity: Called with each activity record when it is opened and again when it is closed.
            fields: Fields of ``RetrievalRequest`` (``output_mode=``, ``knowledge_source_params=``, ...); those of a
                request are replaced. ``principal=`` says who asks, where sources have permissions; only Python code
                can give one.

        Raises:
            InvalidRequestError: The request can't be carried out as asked.
            DeniedError: There is no principal where one is needed, or the one may search no source.
            RetrievalError: No selected source could answer.
            SynthesisError: The language model failed while answering.
        """
        return run(self._respond(question, fields, on_activity))

    @dispatcher.span
    async def aretrieve(
        self, question: Question, *, on_activity: Observer | None = None, **fields: Any
    ) -> RetrievalResponse:
        """Answer a question, or return its evidence; see ``retrieve``."""
        return await arun(self._respond(question, fields, on_activity))

    async def _respond(
        self, question: Question, fields: dict[str, Any], on_activity: Observer | None
    ) -> RetrievalResponse:
        request = self.request(question, **fields)
        engine = self._engine(request.output_mode or self.output_mode)
        answered = await engine.answer(request, observer=on_activity, announced=True)
        return answered.response(include_activity=request.include_activity)

    def request(self, question: Question, **fields: Any) -> RetrievalRequest:
        """Return the request for a question, with this knowledge base's defaults.

        Raises:
            InvalidRequestError: A field doesn't fit; the message names it.
        """
        if isinstance(question, RetrievalRequest):
            request = question
        elif isinstance(question, Mapping):
            request = RetrievalRequest.parse(question)
        else:
            request = RetrievalRequest.parse({"messages": _messages(question)})
        if self.max_output_size_in_tokens is not None and request.max_output_size_in_tokens is None:
            fields.setdefault("max_output_size_in_tokens", self.max_output_size_in_tokens)
        if not fields:
            return request
        own = request.model_dump(exclude_unset=True, by_alias=False)
        return RetrievalRequest.parse({**own, "principal": request.principal, **fields})

    def _engine(self, mode: OutputMode) -> AgenticQueryEngine:
        """Return the engine of an output mode, made once."""
        if mode not in self._engines:
            if mode is OutputMode.ANSWER_SYNTHESIS and self.llm is None:
                raise InvalidRequestError(
                    "outputMode: answerSynthesis needs a language model; pass llm= or set OPENAI_API_KEY, "
                    "or ask for extractiveData"
                )
            self._engines[mode] = AgenticQueryEngine(self.retriever, response_mode=mode.value, grounding=self.grounding)
        return self._engines[mode]

    # -- answers as resources --------------------------------------------------------------------------------------

    @dispatcher.span
    def answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AnswerResponse:
        """Answer a question with an ``Answer``: citations and grounding as data, steps, references, and why not.

            response = kb.answer("How tall was the Saturn V?", related_questions=True)
            for support in response.answer.grounding_supports:
                print(response.text[support.start : support.end], support.score, support.sources)

        Whether there is an answer is never said by its text alone: ``answer.skipped_reasons`` say why there is none. Of
        a conversation that is sent with a session, the last question alone becomes a turn.

        Args:
            question: What ``retrieve`` takes, or an ``AnswerQuery``.
            on_activity: Called with each activity record when it is opened and again when it is closed.
            fields: Fields of ``AnswerQuery`` (``session=``, ``preamble=``, ``filtering_level=``, ...), or of
                ``RetrievalRequest``. Unless ``question`` is an ``AnswerQuery``, citations and grounding supports are
                on.

        Raises:
            InvalidRequestError: The query can't be carried out as asked.
            DeniedError: There is no principal where one is needed, or the one may search no source.
            NotFoundError: The session is not there, or is another's.
            RetrievalError: No selected source could answer.
            SynthesisError: The language model failed while answering.
        """
        return run(self._answers().answer(self.query(question, **fields), observer=on_activity))

    @dispatcher.span
    async def aanswer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AnswerResponse:
        """Answer a question with an ``Answer``; see ``answer``."""
        return await arun(self._answers().answer(self.query(question, **fields), observer=on_activity))

    @dispatcher.span
    def stream_answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> Iterator[AnswerPiece]:
        """Answer a question piece by piece: steps, references, text and citations in turns, at last the response.

        The text of an answer that may yet be withheld or repaired (``filtering_level``, safety, a policy on answers,
        ``repair``) comes in one piece, once it stands. See ``answer``.
        """
        query = self.query(question, **fields)  # refused here and not where it is read
        work = self._answers().answer(query, observer=on_activity, streaming=True)
        return _one_by_one(iterate(work, contextvars.copy_context()))

    @dispatcher.span
    def astream_answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AsyncIterator[AnswerPiece]:
        """Answer a question piece by piece; see ``stream_answer``."""
        query = self.query(question, **fields)
        work = self._answers().answer(query, observer=on_activity, streaming=True)
        return _a_one_by_one(aiterate(work, contextvars.copy_context()))

    def query(self, question: Question | AnswerQuery, **fields: Any) -> AnswerQuery:
        """Return the query for a question, with this knowledge base's defaults.

        Raises:
            InvalidRequestError: A field doesn't fit; the message names it.
        """
        from llama_index_agentic_kb.schema.answer_query import AnswerQuery  # noqa: PLC0415 (its models take 20 ms)

        own = {name: fields.pop(name) for name in [*fields] if name in AnswerQuery.model_fields and name != "request"}
        if isinstance(question, AnswerQuery):
            defaults = {name: getattr(question, name) for name in question.model_fields_set}
            request = self.request(question.request, **fields)
        else:
            defaults = {"include_citations": True, "grounding_supports": True}
            request = self.request(question, **fields)
        try:
            return AnswerQuery.model_validate({**defaults, **own, "request": request})
        except ValidationError as error:
            raise InvalidRequestError(describe(error)) from error

    def _answers(self) -> AnswerEngine:
        from llama_index_agentic_kb.answering.engine import AnswerEngine  # noqa: PLC0415 (loads what checks answers)

        return AnswerEngine(self._engine(OutputMode.ANSWER_SYNTHESIS), self.policy, self.sessions)

    # -- as parts of a LlamaIndex app --------------------------------------------------------------------------------

    def as_retriever(self, **kwargs: Unpack[RetrieverArguments]) -> AgenticRetriever:
        """Return a LlamaIndex retriever over all sources.

        Args:
            kwargs: Arguments of ``AgenticRetriever``, in place of this knowledge base's own.
        """
        own = self._retriever_arguments.copy()
        own.update(kwargs)
        return AgenticRetriever(self._sources, **own)

    def as_query_engine(
        self, response_mode: str | None = None, *, streaming: bool = False, **kwargs: Any
    ) -> AgenticQueryEngine:
        """Return a LlamaIndex query engine.

        Args:
            response_mode: See ``get_response_synthesizer``; None is this knowledge base's output mode.
            streaming: Whether to stream token deltas.
            kwargs: Arguments of ``AgenticRetriever`` and ``AgenticQueryEngine``.
        """
        own, rest = split_kwargs(kwargs)
        mode = response_mode or self.output_mode.value
        return AgenticQueryEngine(
            self.as_retriever(**own), response_mode=mode, streaming=streaming, **{**self._engine_defaults(rest), **rest}
        )

    def _engine_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return this knowledge base's own arguments of engines."""
        own: dict[str, Any] = {"grounding": self.grounding}
        if self.max_output_size_in_tokens is not None and "response_synthesizer" not in given:
            own["max_output_tokens"] = self.max_output_size_in_tokens
        return own

    def as_chat_engine(
        self, chat_mode: ChatMode = ChatMode.BEST, *, memory: BaseMemory | None = None, **kwargs: Any
    ) -> BaseChatEngine:
        """Return a LlamaIndex chat engine: ours by default, its own over our retriever for its other modes.

        Args:
            chat_mode: ``BEST`` (default) is ``AgenticChatEngine``.
            memory: The conversation; None makes one.
            kwargs: Those of ``as_query_engine``, and those of LlamaIndex's chat engine of that mode
                (``system_prompt``, ``chat_history``, ...).
        """
        chat_mode = ChatMode(chat_mode)
        own, rest = split_kwargs(kwargs)
        if chat_mode is ChatMode.BEST:
            mode = rest.pop("response_mode", None) or self.output_mode.value
            rest = {**self._engine_defaults(rest), "response_mode": mode, **rest}
            return as_chat_engine(self.as_retriever(**own), chat_mode, memory, **rest)
        own["memory"] = memory
        return as_chat_engine(self.as_retriever(**own), chat_mode, memory, **rest)

    def as_tool(self, name: str | None = None, description: str | None = None, **kwargs: Any) -> QueryEngineTool:
        """Return a tool for agents and routers; its answers keep their markers.

        Args:
            name: None is this knowledge base's.
            description: None is this knowledge base's.
            kwargs: Those of ``as_query_engine``.
        """
        engine = self.as_query_engine(**kwargs)
        return QueryEngineTool.from_defaults(
            engine, name=name or self.name, description=description or self.description
        )

    def as_retriever_tool(
        self, name: str | None = None, description: str | None = None, **kwargs: Unpack[RetrieverArguments]
    ) -> RetrieverTool:
        """Return a tool that returns passages; see ``as_tool``."""
        return RetrieverTool.from_defaults(
            self.as_retriever(**kwargs), name=name or self.name, description=description or self.description
        )

    # -- before the first question -----------------------------------------------------------------------------------

    def warm_up(self) -> Self:
        """Do what the first question would have to do: imports, client, model and store loads. No model is called.

        After it the event loop is not held up by this library while a question is answered. What is loaded by then is
        left out of garbage collections (``gc.freeze``): looking through it would stop every request for 0.2 s at times.
        """
        if self.llm is not None:
            warm_up_llm(self.llm)
            import_module("llama_index_agentic_kb.grounding.repair")  # what checks answers
        parse_odata("loaded eq true")
        run(gather([source.warm_up() for source in self.sources.values()]))
        gc.collect()
        gc.freeze()
        return self

    async def awarm_up(self) -> Self:
        """Do what the first question would have to do, off the event loop; see ``warm_up``."""
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


def _by_source(
    permissions: Permissions | Mapping[str, Permissions | None] | None, names: Sequence[str]
) -> Mapping[str, Permissions | None]:
    """Return the permissions of each source. Each must be named: a source without any is everybody's."""
    if not isinstance(permissions, Mapping):
        return dict.fromkeys(names, permissions)
    if set(permissions) != set(names):
        raise ConfigurationError(
            f"permissions: they are given for {', '.join(sorted(permissions))}, and the store's sources are "
            f"{', '.join(names)}; give None for one that is everybody's"
        )
    return permissions


def _messages(question: str | Sequence[ChatMessage | Message | Mapping[str, Any]]) -> list[Message]:
    if isinstance(question, str):
        if not question.strip():
            raise InvalidRequestError("question: the question is empty")
        return [Message.model_validate({"role": "user", "content": question})]
    if not isinstance(question, Sequence):
        raise InvalidRequestError(f"question: expected a string, messages or a request, got {type(question).__name__}")
    own = [message for message in question if isinstance(message, Message)]
    if len(own) == len(question):
        return own
    if question and all(isinstance(message, Mapping) for message in question):
        return [Message.parse(message) for message in question]
    if not all(isinstance(message, ChatMessage) for message in question):
        raise InvalidRequestError("question: messages must all be ChatMessage, all Message, or all mappings")
    return conversation_request([message for message in question if isinstance(message, ChatMessage)]).messages or []
