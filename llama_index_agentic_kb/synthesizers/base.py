"""What all modes share: LlamaIndex's public methods, the set-up, and the frame around each mode's ``_compose``."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from llama_index_agentic_kb._aio import Call, aiterate, arun, emit, iterate, run
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, as_spotlighting, draw
from llama_index_agentic_kb.llm import LanguageModel, Usage, count_tokens, tokens_of
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.draft import Draft, Window
from llama_index_agentic_kb.synthesizers.passages import passages
from llama_index_agentic_kb.synthesizers.structured import ObjectAsker

__all__ = ["AgenticSynthesizer", "Synthesis"]

logger = logging.getLogger("llama_index_agentic_kb")
dispatcher = get_dispatcher(__name__)

RESERVED: Final = 1_024
"""Tokens of the window that are kept for an answer of a model that doesn't say how long its answers get."""


LONG: Final = 200_000
"""Characters of all nodes together up to which they are read on the event loop: about 5 ms."""


@dataclass(slots=True)
class Synthesis:
    """The result of a synthesis.

    Args:
        text: The answer, with its ``[ref_id:N]`` markers, or the extracted data as JSON.
        output: The validated object, where one was asked for; ``text`` is its JSON.
        usage: What all calls billed together.
        dropped: How many passages fitted neither budget nor model.
        warnings: What the reader of the answer should know of how it was made.
        cut: Whether the model stopped before it was done, in any of its calls: the text may end too early.
        links_removed: Links that led to no reference, and were taken out of the model's replies.
        answerable: False where the model says that the evidence does not answer the question; the text is then what
            is missing.
    """

    text: str
    output: BaseModel | None = None
    usage: Usage = field(default_factory=Usage)
    dropped: int = 0
    warnings: list[str] = field(default_factory=list)
    cut: bool = False
    links_removed: int = 0
    answerable: bool = True


class AgenticSynthesizer(GuardedCallbacks, BaseSynthesizer):
    """Makes a response of a question and its evidence: LlamaIndex's ``BaseSynthesizer``, with references kept.

    Node N is ``[ref_id:N]`` in prompts and answers, and ``source_nodes[N]`` of the response. The given LLM is never
    changed. A language model's failure is raised as ``SynthesisError``.

    Args:
        llm: None is ``Settings.llm``, in modes that need one. A ``StructuredLLM`` sets ``output_cls``.
        callback_manager: None is ``Settings.callback_manager``. Handlers that raise are logged, no more.
        prompt_helper: Its window, output size and chunk size limit are kept to; None asks the LLM's metadata.
        chat_prompt_helper: As LlamaIndex takes it; only multimodal synthesis would use it.
        streaming: Whether responses stream. An object, with ``output_cls``, then comes as JSON in one piece.
        output_cls: The pydantic class of the object that is wanted in place of text.
        empty_response: The text where there is nothing to answer from. Default "Empty Response".
        multimodal: Not supported: True is refused.
        verbose: Whether each synthesis is logged (level INFO).
        max_output_tokens: The answer's budget; None leaves it to the model.
        retries: How failed calls of the language model are tried again; None is ``RetryPolicy()``.
        spotlighting: How prompts mark what was retrieved as data: "delimit" (default), "datamark", "encode", or None
            for not at all; see ``guard.spotlighting``. A query engine's is its retriever's, unless given.
        links: "references" (default) takes links and images out of answers that don't lead to a reference's own
            address (see ``guard.links``); "all" leaves them, for readers that render none.
        templates: By their keys in ``get_prompts()``: ``text_qa_template``, ...; None is the mode's own.

    Raises:
        ConfigurationError: An argument doesn't fit the mode, or there is no LLM and the mode needs one.
    """

    mode: ClassVar[str]
    needs_llm: ClassVar[bool] = True
    needs_nodes: ClassVar[bool] = True
    """Without nodes there is nothing to say, and no model is asked."""
    makes_objects: ClassVar[bool] = True
    """Whether ``output_cls`` is possible."""
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {}

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
        chat_prompt_helper: ChatPromptHelper | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
        multimodal: bool = False,
        verbose: bool = False,
        max_output_tokens: int | None = None,
        retries: RetryPolicy | None = None,
        spotlighting: str | None = "delimit",
        links: str = "references",
        **templates: BasePromptTemplate | None,
    ) -> None:
        # Not super().__init__: it asks for Settings.llm where none is needed, writes into the caller's LLM, and asks
        # it for a window that an OpenAI of unknown name refuses to say.
        if multimodal:
            raise ConfigurationError("multimodal: not supported; images and audio in nodes are not sent to a model")
        if max_output_tokens is not None and max_output_tokens <= 0:
            raise ConfigurationError(f"max_output_tokens must be above 0, got {max_output_tokens}")
        if links not in ("references", "all"):
            raise ConfigurationError(f"links: {links!r} is unknown; known are references, all")
        self.spotlighting = as_spotlighting(spotlighting)
        self.links = links
        self._llm = self._resolve(llm)
        inner: LLM = self._llm
        if isinstance(inner, StructuredLLM):
            output_cls, inner = output_cls or inner.output_cls, inner.llm
        if output_cls is not None and not self.makes_objects:
            raise ConfigurationError(f"output_cls: mode {self.mode!r} makes text only")
        self._output_cls = output_cls
        self._streaming = streaming
        self._empty_response = empty_response or "Empty Response"
        self._multimodal = False
        self._verbose = verbose
        self.callback_manager = callback_manager
        self.model = LanguageModel(inner, lambda: self.callback_manager, retries=retries)
        self.max_output_tokens = max_output_tokens
        self.templates = self._with_defaults(templates)
        self._asker = ObjectAsker()
        sizes: dict[str, Any] = {"context_window": self.model.context_window, "num_output": _num_output(inner)}
        self._prompt_helper = prompt_helper or Settings._prompt_helper or PromptHelper(**sizes, tokenizer=_tokens)  # noqa: SLF001
        self._chat_prompt_helper = (
            chat_prompt_helper or Settings._chat_prompt_helper or ChatPromptHelper(**sizes, tokenizer=_tokens)  # noqa: SLF001
        )

    def _resolve(self, llm: LLM | None) -> LLM:
        """Return the LLM as LlamaIndex does; modes that need none never ask for ``Settings.llm``."""
        if not self.needs_llm:
            return MockLLM(is_chat_model=True)
        if llm is not None:
            return llm
        try:
            default: LLM = Settings.llm
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"mode {self.mode!r} needs a language model: pass llm=, set Settings.llm or OPENAI_API_KEY"
            ) from error
        return default

    def _with_defaults(self, templates: Mapping[str, BasePromptTemplate | None]) -> dict[str, BasePromptTemplate]:
        unknown = sorted(set(templates) - set(self.default_templates))
        if unknown:
            known = ", ".join(self.default_templates) or "none"
            raise ConfigurationError(f"mode {self.mode!r} has no {', '.join(unknown)}; its templates: {known}")
        return {
            **self.default_templates,
            **{key: template for key, template in templates.items() if template is not None},
        }

    @property
    def streaming(self) -> bool:
        """Whether responses stream. Chat engines of LlamaIndex set ``_streaming`` for a while."""
        return self._streaming

    def _get_prompts(self) -> PromptDictType:
        return dict(self.templates)

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self.templates = {key: prompts.get(key, template) for key, template in self.templates.items()}

    # -- responses -------------------------------------------------------------------------------------------------

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes.

        Args:
            query: The question.
            nodes: The evidence: node N is ``[ref_id:N]``. Without any, the response is "Empty Response".
            additional_source_nodes: Listed in the response behind the nodes, and not answered from.
            response_kwargs: Those of ``synthesis``; what is left are further variables of the templates.

        Returns:
            A ``Response``, a ``PydanticResponse`` with ``output_cls``, or a ``StreamingResponse``.

        Raises:
            SynthesisError: The language model failed; a streamed response raises it where it is read.
            DeadlineExceededError: The answer was not there in time.
        """
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes and self.needs_nodes:
            empty = self._empty_response_generator()
            response = StreamingResponse(empty) if self._streaming else Response(self._empty_response)
        else:
            sources = [*nodes, *(additional_source_nodes or [])]
            work = self._responding(_bundle(query), nodes, sources, response_kwargs)
            if self._streaming:
                tokens: Generator[str, None, None] = iterate(work, contextvars.copy_context())
                response = StreamingResponse(tokens, sources, self._metadata(sources))
            else:
                response = run(work)
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes; see ``synthesize``. A streamed response is an ``AsyncStreamingResponse``."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes and self.needs_nodes:
            empty = self._empty_response_agenerator()
            response = AsyncStreamingResponse(empty) if self._streaming else Response(self._empty_response)
        else:
            sources = [*nodes, *(additional_source_nodes or [])]
            work = self._responding(_bundle(query), nodes, sources, response_kwargs)
            if self._streaming:
                tokens: AsyncGenerator[str, None] = aiterate(work, contextvars.copy_context())
                response = AsyncStreamingResponse(tokens, sources, self._metadata(sources))
            else:
                response = await arun(work)
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    async def _responding(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        sources: list[NodeWithScore],
        response_kwargs: dict[str, Any],
    ) -> Response | PydanticResponse:
        manager, asked = self.callback_manager, {EventPayload.QUERY_STR.value: query.query_str}
        # Outside of any trace, each call of a language model would begin one of its own and have no parent.
        with manager.as_trace("synthesize"), manager.event(CBEventType.SYNTHESIZE, payload=asked) as event:
            synthesis = await self.synthesis(query, nodes, **response_kwargs)
            response = self._response(synthesis, sources)
            event.on_end(payload={EventPayload.RESPONSE.value: response})
        for warning in synthesis.warnings:  # the response has no place for them, and nothing is dropped silently
            logger.warning("%s: %s", self.mode, warning)
        return response

    def _response(self, synthesis: Synthesis, sources: list[NodeWithScore]) -> Response | PydanticResponse:
        metadata = self._metadata(sources)
        if synthesis.output is not None:
            return PydanticResponse(synthesis.output, source_nodes=sources, metadata=metadata)
        return Response(synthesis.text, source_nodes=sources, metadata=metadata)

    def _metadata(self, sources: Sequence[NodeWithScore]) -> dict[str, Any] | None:
        return self._get_metadata_for_response([node.node for node in sources])

    # -- texts -----------------------------------------------------------------------------------------------------

    @dispatcher.span
    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, for LlamaIndex code that has no nodes: text N is ``[ref_id:N]``.

        Args:
            query_str: The question.
            text_chunks: The evidence.
            response_kwargs: As in ``synthesize``.

        Returns:
            The text, the object with ``output_cls``, or a generator of tokens when streaming.

        Raises:
            SynthesisError: The language model failed.
            DeadlineExceededError: The answer was not there in time.
        """
        work = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        if self._streaming:
            return iterate(work, contextvars.copy_context())
        return _result(run(work))

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts; see ``get_response``."""
        work = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        if self._streaming:
            return aiterate(work, contextvars.copy_context())
        return _result(await arun(work))

    # -- the way to an answer --------------------------------------------------------------------------------------

    async def synthesis(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        *,
        deadline: float | None = None,
        max_output_tokens: int | None = None,
        sources: Mapping[str, KnowledgeSource] | None = None,
        streaming: bool | None = None,
        instructions: str = "",
        aside: Callable[[Spotlight], str] | None = None,
        **response_kwargs: Any,
    ) -> Synthesis:
        """Make the answer. When streaming, deltas of its text are emitted, which together are the text.

        Args:
            query: The question.
            nodes: The evidence, best first; their positions are the reference ids.
            deadline: ``time.monotonic()`` by which the answer must be there; None waits.
            max_output_tokens: In place of the synthesizer's own.
            sources: By name: they know the fields of the nodes that name them.
            streaming: In place of the synthesizer's own.
            instructions: The caller's own, on tone, form, language; they stand behind the template's, and rank below.
            aside: Returns what the model may read beside the evidence and never cites, marked as data.
            response_kwargs: Further variables of the templates.

        Raises:
            SynthesisError: The language model failed; what it had answered before is in ``partial``.
            DeadlineExceededError: The answer was not there in time; what there was of it is in ``partial``.
        """
        limit = max_output_tokens or self.max_output_tokens
        spotlight = draw(self.spotlighting) if self.needs_llm else PLAIN
        shown = await _as_passages(nodes, sources, spotlight, deadline)
        draft = Draft(
            model=self.model,
            asker=self._asker,
            window=self._window(limit),
            query=query.query_str if aside is None else f"{query.query_str}\n\n{aside(spotlight)}",
            instructions=instructions,
            passages=shown,
            spotlight=spotlight,
            addresses={one.url for one in shown if one.url} if self.links == "references" else None,
            deadline=deadline,
            max_output_tokens=limit,
            variables=response_kwargs,
            streaming=self._streaming if streaming is None else streaming,
            output_cls=self._output_cls,
            warnings=_hidden_in(shown),
        )
        if nodes or not self.needs_nodes:
            text = await self._composed(draft)
        else:
            text = self._nothing()
        if not draft.answerable and not text:
            text = self._empty_response
        if draft.streaming and (rest := text[len(draft.emitted) :]):
            await emit(rest)
        if self.needs_llm and limit is not None and (written := count_tokens(text)) > limit:
            draft.warnings.append(f"the answer has {written} tokens, over the budget of {limit}")
        if self._verbose:
            logger.info("%s: %d passages, %d calls", self.mode, len(draft.passages), draft.usage.calls)
        return Synthesis(
            text,
            draft.output,
            draft.usage,
            draft.dropped,
            draft.warnings,
            draft.cut,
            draft.links_removed,
            draft.answerable,
        )

    async def _composed(self, draft: Draft) -> str:
        try:
            return await self._compose(draft)
        except DeadlineExceededError as error:
            error.partial = draft.so_far or draft.emitted
            raise

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        """Return the answer's text; what was emitted of it by then is its start. For modes to define."""
        raise NotImplementedError

    def _nothing(self) -> str:
        """Return the text of a synthesis without nodes."""
        return self._empty_response

    def _window(self, max_output_tokens: int | None) -> Window:
        helper = self._prompt_helper
        reserved = min(max_output_tokens or helper.num_output, helper.context_window // 2)
        return Window(helper.context_window, reserved, helper.chunk_size_limit)


async def _as_passages(
    nodes: Sequence[NodeWithScore],
    sources: Mapping[str, KnowledgeSource] | None,
    spotlight: Spotlight,
    deadline: float | None,
) -> list[Passage]:
    """Return nodes as passages; where they are very long, off the event loop: each character is looked at."""
    work = partial(passages, nodes, sources, spotlight)
    if sum(len(getattr(one.node, "text", None) or "") for one in nodes) <= LONG:
        return work()
    made: list[Passage] = await Call(sync=work, deadline=deadline, what="reading passages")
    return made


def _hidden_in(shown: Sequence[Passage]) -> list[str]:
    hidden = [one.hidden for one in shown if one.hidden]
    return [f"{sum(hidden)} hidden characters were left out of {len(hidden)} passages"] if hidden else []


def _num_output(llm: LLM) -> int:
    try:
        known = llm.metadata.num_output
    except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
        return RESERVED
    return known if known > 0 else RESERVED


def _tokens(text: str) -> list[Any]:
    """Tokenize when it is needed: core's helpers load the tokenizer when they are made."""
    return tokens_of(text)


def _bundle(query: QueryType) -> QueryBundle:
    return QueryBundle(query) if isinstance(query, str) else query


def _as_nodes(texts: Sequence[str]) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"text {position}"), score=None)
        for position, text in enumerate(texts)
    ]


def _result(synthesis: Synthesis) -> str | BaseModel:
    return synthesis.text if synthesis.output is None else synthesis.output
