"""The base class of all modes: LlamaIndex's public methods, the setup, and the steps around each ``_compose``."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Final, TypeAlias

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
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE, BasePydanticProgram
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from llama_index_agentic_kb._aio import Call, aiterate, arun, emit, iterate, run
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, SynthesisError
from llama_index_agentic_kb.evidence.candidates import provenance, shown_metadata
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, as_spotlighting, draw
from llama_index_agentic_kb.guard.text import without_hidden
from llama_index_agentic_kb.llm import LanguageModel, count_tokens, of_any_name, tokens_of
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.draft import Draft, Synthesis

logger = logging.getLogger("llama_index_agentic_kb")
dispatcher = get_dispatcher(__name__)

RESERVED: Final = 1_024  # tokens to reserve for the answer if the model's metadata does not state its output size

ProgramFactory: TypeAlias = Callable[[BasePromptTemplate], BasePydanticProgram[BaseModel]]
"""Creates, from a prompt, a program that returns an object with ``query_satisfied`` and ``answer``."""

LONG: Final = 200_000  # characters of all nodes up to which passages are prepared on the event loop (about 5 ms)


class AgenticSynthesizer(GuardedCallbacks, BaseSynthesizer):
    """Synthesizes a response to a question from its evidence: a LlamaIndex ``BaseSynthesizer`` that cites nodes.

    Node N is ``[ref_id:N]`` in prompts and answers, and ``source_nodes[N]`` of the response. The given LLM object is
    never modified. If the language model fails, ``SynthesisError`` is raised.

    Args:
        llm: The language model. Defaults to ``Settings.llm`` in modes that need one. The output class of a
            ``StructuredLLM`` is the default of ``output_cls``.
        callback_manager: Defaults to ``Settings.callback_manager``. Exceptions of handlers are logged only.
        prompt_helper: The context window, output size, chunk size limit and overlap to use. Defaults to
            ``Settings.prompt_helper`` if set, else to the LLM's metadata.
        streaming: Whether to stream responses. With ``output_cls``, the object is streamed as one piece of JSON.
        output_cls: The pydantic class of the object to return in place of text.
        empty_response: The response text if there are no nodes. Default "Empty Response".
        multimodal: Not supported: True raises an error.
        verbose: Whether to log each synthesis (level INFO).
        max_output_tokens: The maximum length of the answer in tokens. None means the model's own limit.
        retries: The retry policy for failed calls of the language model. Defaults to ``RetryPolicy()``.
        spotlighting: How prompts mark retrieved text as data: "delimit" (default), "datamark", "encode", or None for
            not at all; see ``guard.spotlighting``. A query engine passes its retriever's setting unless one is given.
        structured_answer_filtering: For refine and compact: whether each step also reports if its passages answer the
            question. Steps that don't answer it, or whose reply can't be parsed, are skipped. If no step answers, the
            text is the empty response; if no reply could be parsed, ``SynthesisError`` is raised.
        program_factory: Creates the programs of these steps, as in LlamaIndex. Their token usage is not recorded.
        chat_prompt_helper: Ignored, like ``use_async`` (independent calls always run concurrently),
            ``response_padding_size`` and ``strict_truncation`` (prompts never exceed the context window).
        templates: Prompt templates by their keys in ``get_prompts()`` (``text_qa_template``, ...). They default to the
            mode's own. LlamaIndex's ``chat_*_template`` for multimodal synthesis are ignored.

    Raises:
        ConfigurationError: The mode does not support an argument, or needs an LLM and none is configured.
    """

    mode: ClassVar[str]
    needs_llm: ClassVar[bool] = True  # and whether the mode supports ``output_cls``
    needs_nodes: ClassVar[bool] = True  # whether there is the empty response, without a model call, if there are none
    filters_steps: ClassVar[bool] = False  # whether the mode supports ``structured_answer_filtering``
    nothing: ClassVar[str | None] = None  # the text of a synthesis without nodes. Defaults to the empty response.
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {}

    def __init__(
        self,
        llm: LLM | None = None,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
        chat_prompt_helper: ChatPromptHelper | None = None,
        *,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
        multimodal: bool = False,
        verbose: bool = False,
        max_output_tokens: int | None = None,
        retries: RetryPolicy | None = None,
        spotlighting: str | None = "delimit",
        structured_answer_filtering: bool = False,
        program_factory: ProgramFactory | None = None,
        use_async: bool = False,  # noqa: ARG002 (LlamaIndex's argument)
        response_padding_size: int = 1,  # noqa: ARG002 (same)
        strict_truncation: bool = False,  # noqa: ARG002 (same)
        **templates: BasePromptTemplate | None,
    ) -> None:
        # Not super().__init__: it reads Settings.llm and modifies the caller's LLM, and fails for unknown model names.
        if multimodal:
            raise ConfigurationError("multimodal: not supported; images and audio in nodes are not sent to a model")
        if max_output_tokens is not None and max_output_tokens <= 0:
            raise ConfigurationError(f"max_output_tokens must be above 0, got {max_output_tokens}")
        self._filtering, self._program_factory = structured_answer_filtering, program_factory
        self._check_filtering()
        self.spotlighting = as_spotlighting(spotlighting)
        self._llm = inner = self._resolve(llm) if self.needs_llm else MockLLM(is_chat_model=True)
        if isinstance(inner, StructuredLLM):
            output_cls, inner = output_cls or inner.output_cls, inner.llm
        if output_cls is not None and not self.needs_llm:
            raise ConfigurationError(f"output_cls: mode {self.mode!r} makes text only")
        self._output_cls = output_cls
        self._streaming = streaming
        self._empty_response = empty_response or "Empty Response"
        self._multimodal = False
        self._verbose = verbose
        self.callback_manager = callback_manager
        self.model = LanguageModel(inner, partial(getattr, self, "callback_manager"), retries=retries)
        self.max_output_tokens = max_output_tokens
        self.templates = {**self.default_templates, **self._known(templates)}
        self._refused: set[str] = set()  # the forms of objects that the model has rejected
        self._prompt_helper = prompt_helper or Settings._prompt_helper or self._own_helper(inner)  # noqa: SLF001
        self._chat_prompt_helper = chat_prompt_helper  # type: ignore[assignment]  # never used

    def _check_filtering(self) -> None:
        if (self._filtering or self._program_factory is not None) and not self.filters_steps:
            raise ConfigurationError(f"structured_answer_filtering: mode {self.mode!r} has no steps to filter")
        if self._program_factory is not None and not self._filtering:
            raise ConfigurationError("program_factory: not supported without structured_answer_filtering=True")

    def _own_helper(self, llm: LLM) -> PromptHelper:
        try:
            output = llm.metadata.num_output
        except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
            output = 0
        # Core's helpers would load a tokenizer in their constructors.
        return PromptHelper(self.model.context_window, output if output > 0 else RESERVED, tokenizer=tokens_of)

    def _known(self, templates: Mapping[str, BasePromptTemplate | None]) -> dict[str, BasePromptTemplate]:
        """Return the given templates; raise ``ConfigurationError`` for keys that the mode has not."""
        given = {key: value for key, value in templates.items() if value is not None and not key.startswith("chat_")}
        unknown = sorted(given.keys() - self.default_templates.keys())
        if others := [key for key in unknown if not key.endswith("_template")]:
            raise ConfigurationError(f"unknown argument: {', '.join(others)}")
        if unknown:
            known = ", ".join(self.default_templates) or "none"
            raise ConfigurationError(f"mode {self.mode!r} has no {', '.join(unknown)}; its templates: {known}")
        return given

    def _resolve(self, llm: LLM | None) -> LLM:
        try:
            llm = llm or Settings.llm
        except (ImportError, ValueError) as error:
            remedy = "pass llm=, set Settings.llm or OPENAI_API_KEY"
            raise ConfigurationError(f"mode {self.mode!r} needs a language model: {remedy}") from error
        return of_any_name(llm)

    def _get_prompts(self) -> PromptDictType:
        return dict(self.templates)

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self.templates = {key: prompts.get(key, template) for key, template in self.templates.items()}

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
            additional_source_nodes: Nodes to list in the response after the evidence; they are not used to answer.
            response_kwargs: Keyword arguments of ``synthesis``; all others are passed to the templates as variables.

        Returns:
            A ``Response``, a ``PydanticResponse`` with ``output_cls``, or a ``StreamingResponse``.

        Raises:
            SynthesisError: The language model failed; a streamed response raises it while it is being read.
            DeadlineExceededError: The answer was not complete by the deadline.
        """
        work, sources, metadata = self._begun(query, nodes, additional_source_nodes, response_kwargs)
        response: RESPONSE_TYPE = (
            StreamingResponse(iterate(work, contextvars.copy_context()), sources, metadata)
            if self._streaming
            else run(work)
        )
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
        work, sources, metadata = self._begun(query, nodes, additional_source_nodes, response_kwargs)
        response: RESPONSE_TYPE = (
            AsyncStreamingResponse(aiterate(work, contextvars.copy_context()), sources, metadata)
            if self._streaming
            else await arun(work)
        )
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def _begun(
        self, query: QueryType, nodes: list[NodeWithScore], more: Sequence[NodeWithScore] | None, kwargs: JsonObject
    ) -> tuple[Work[Response | PydanticResponse], list[NodeWithScore], JsonObject | None]:
        """Return the coroutine that answers, and the response's source nodes with their metadata."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        sources = [*nodes, *(more or [])] if nodes or not self.needs_nodes else []
        metadata = self._get_metadata_for_response([node.node for node in sources]) if sources else None
        bundle = QueryBundle(query) if isinstance(query, str) else query

        async def work() -> Response | PydanticResponse:
            if not nodes and self.needs_nodes:
                await emit(self._empty_response)
                return Response(self._empty_response)
            manager, asked = self.callback_manager, {EventPayload.QUERY_STR.value: bundle.query_str}
            # Outside a trace, each call of the language model would start its own trace without a parent.
            with manager.as_trace("synthesize"), manager.event(CBEventType.SYNTHESIZE, payload=asked) as event:
                synthesis = await self.synthesis(bundle, nodes, **kwargs)
                response: Response | PydanticResponse
                if synthesis.output is None:
                    response = Response(synthesis.text, sources, metadata)
                else:
                    response = PydanticResponse(synthesis.output, sources, metadata)
                event.on_end(payload={EventPayload.RESPONSE.value: response})
            for warning in synthesis.warnings:  # the response has no field for warnings
                logger.warning("%s: %s", self.mode, warning)
            return response

        return work(), sources, metadata

    @dispatcher.span
    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, for LlamaIndex code that has no nodes: text N is ``[ref_id:N]``; see ``synthesize``."""
        work = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        return iterate(work, contextvars.copy_context()) if self._streaming else run(work).content

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts; see ``get_response``."""
        work = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        return aiterate(work, contextvars.copy_context()) if self._streaming else (await arun(work)).content

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
        shown: Collection[int] | None = None,
        **response_kwargs: Any,
    ) -> Synthesis:
        """Synthesize the answer from evidence, best first. If streaming, emit text deltas that add up to the text.

        Args:
            query: The question.
            nodes: The evidence; their positions are the reference ids.
            deadline: The ``time.monotonic()`` value by which the answer must be complete.
            max_output_tokens: Maximum tokens of the answer. Defaults to the synthesizer's own, as does ``streaming``.
            sources: The knowledge sources by name; they define the title and text fields of their nodes.
            streaming: Whether to emit deltas.
            instructions: The caller's instructions, added after the template's own.
            aside: Returns further text for the prompt, marked as data, that the model must not cite.
            shown: Reference ids of the nodes to use. None means all.
            response_kwargs: Further variables of the templates.

        Raises:
            SynthesisError: The language model failed; ``partial`` is the text so far.
            DeadlineExceededError: The answer was not complete by the deadline; ``partial`` as above.
        """
        limit, helper = max_output_tokens or self.max_output_tokens, self._prompt_helper
        spotlight = draw(self.spotlighting) if self.needs_llm else PLAIN
        reading = partial(passages, nodes, sources, spotlight, shown)
        is_long = sum([len(getattr(node.node, "text", None) or "") for node in nodes]) > LONG
        read = await Call(sync=reading, deadline=deadline, what="reading passages") if is_long else reading()
        draft = Draft(
            model=self.model,
            refused=self._refused,
            helper=helper,
            reserved=min(limit or helper.num_output, helper.context_window // 2),
            query=query.query_str if aside is None else f"{query.query_str}\n\n{aside(spotlight)}",
            instructions=instructions,
            passages=read,
            spotlight=spotlight,
            deadline=deadline,
            max_output_tokens=limit,
            variables=response_kwargs,
            streaming=self._streaming if streaming is None else streaming,
            output_cls=self._output_cls,
        )
        if hidden := list(filter(None, map(attrgetter("hidden"), draft.passages))):
            draft.result.warnings.append(f"{sum(hidden)} hidden characters were left out of {len(hidden)} passages")
        text = await self._answered(draft)
        if draft.streaming:
            await draft.emit(text[len(draft.emitted) :])
        if self.needs_llm and limit is not None and (written := count_tokens(text)) > limit:
            draft.result.warnings.append(f"the answer has {written} tokens, over the budget of {limit}")
        if self._verbose:
            logger.info("%s: %d passages", self.mode, len(draft.passages))
        draft.result.text = text
        return draft.result

    async def _answered(self, draft: Draft) -> str:
        """Return the answer's text, or what stands for it if there are no passages or the model has no answer."""
        if not draft.passages and self.needs_nodes:
            return self._empty_response if self.nothing is None else self.nothing
        try:
            text = await self._compose(draft)
        except (DeadlineExceededError, SynthesisError) as error:
            error.partial = draft.emitted or error.partial or draft.so_far
            if not draft.emitted and self._output_cls is None:
                await draft.emit(error.partial)
            raise
        return text or ("" if draft.result.answerable else self._empty_response)

    async def _compose(self, draft: Draft) -> str:
        """Return the answer's text, of which the emitted text is a prefix. Subclasses must implement this."""
        raise NotImplementedError


def passages(
    nodes: Sequence[NodeWithScore],
    sources: Mapping[str, KnowledgeSource] | None = None,
    spotlight: Spotlight = PLAIN,
    shown: Collection[int] | None = None,
) -> list[Passage]:
    """Convert nodes, or those ``shown``, to passages: node N has reference id N; sources, by name, define its text."""
    made = []
    for position, node in enumerate(nodes):
        if shown is not None and position not in shown:
            continue
        mark = provenance(node)
        source = (sources or {}).get(mark.get("source", "")) if mark else None
        if source is not None:
            data = source.source_data(node)
            name, title, text, own_terms, url = source.name, data.title, data.content, data.terms or "", data.url
            about = shown_metadata(node, source.permissions, (title, text, url, own_terms))
        else:
            metadata = node.node.metadata
            name, own_terms, about, url = "", "", "", metadata.get("url")
            title = str(metadata.get("title") or metadata.get("file_name") or node.node.node_id)
            text = node.node.get_content(metadata_mode=MetadataMode.LLM)
        (title, a), (text, b), (terms, c) = without_hidden(title), without_hidden(text), without_hidden(own_terms)
        (about, d), url = without_hidden(about), url if isinstance(url, str) else None
        made.append(Passage(position, title, text, name, terms or None, url, a + b + c + d, spotlight, about))
    return made


def _as_nodes(texts: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=f"text {number}")) for number, text in enumerate(texts)]
