"""The query engine: one question from retrieval over synthesis and grounding to a LlamaIndex response; tools."""

from __future__ import annotations

import contextvars
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self, TypeAlias

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.query import QueryEndEvent, QueryStartEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.query_engine.retriever_query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.tools import RetrieverTool, ToolOutput
from llama_index_instrumentation import get_dispatcher

from llama_index_agentic_kb._aio import aiterate, arun, emit, emitting, iterate, run
from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.account import GuardedCallbacks, is_heard, open_events, resumed_trace, set_budget
from llama_index_agentic_kb.errors import DeadlineExceededError, SynthesisError
from llama_index_agentic_kb.evidence.gathering import postprocess
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, cited_ids, clean_markers
from llama_index_agentic_kb.grounding.settings import Grounding, as_grounding
from llama_index_agentic_kb.guard.spotlighting import Spotlight
from llama_index_agentic_kb.llm import billed
from llama_index_agentic_kb.planning import ClassificationSpec
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    MissingPart,
    Outcome,
    OutputMode,
    Reference,
    RetrievalRequest,
)
from llama_index_agentic_kb.synthesis import (
    AgenticAsyncStreamingResponse,
    AgenticResponse,
    AgenticStreamingResponse,
    Answered,
    checked,
    failed_answer,
    makes_objects,
    readable,
    replacement,
    synthesize,
)
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer, Synthesis, get_response_synthesizer

dispatcher = get_dispatcher(__name__)

Observer: TypeAlias = Callable[[ActivityRecord], None] | None
Through: TypeAlias = tuple[Callable[[str], object], Callable[[], object]] | None
"""Functions that change each piece of an answer before it is emitted, and return the rest after the last piece."""


class AgenticQueryEngine(GuardedCallbacks, RetrieverQueryEngine):
    """Answers a question over knowledge sources: plan, parallel retrieval, fusion, synthesis, grounding check.

    ``query`` and ``aquery`` return LlamaIndex responses whose ``source_nodes[N]`` is ``[ref_id:N]`` and whose
    ``metadata["agentic_kb"]`` is the JSON form of ``RetrievalResponse``; ``cited_nodes`` are the nodes that the answer
    cites. The metadata of a streamed response is complete only after the last token.

    Args:
        retriever: An ``AgenticRetriever``; any other retriever is searched as a single source, without planning.
        response_synthesizer: A synthesizer of this library or of LlamaIndex. Defaults to that of ``response_mode``.
        llm: The language model that answers. Defaults to the retriever's.
        response_mode: See ``get_response_synthesizer``. Defaults to ``answerSynthesis`` with a language model, else
            to ``extractiveData``.
        node_postprocessors: Applied to the retriever's nodes, after its own.
        streaming: Whether to stream token deltas.
        grounding: Settings for checking answers against their evidence. None (default) and True mean ``Grounding()``;
            False disables the check. Answers of LlamaIndex's own synthesizers are checked only if this is set.
        callback_manager: Defaults to the retriever's.
        instructions: The default of requests: instructions for the model that answers, on persona, tone, form or
            language. They come after the prompt's own rules, which they can't change. LlamaIndex's own synthesizers
            take none.
        synthesizer: Further arguments of ``get_response_synthesizer`` (templates, ``output_cls``, ...).
    """

    _retriever: AgenticRetriever

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: BaseSynthesizer | None = None,
        *,
        llm: LLM | None = None,
        response_mode: str | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = (),
        streaming: bool = False,
        grounding: Grounding | bool | None = None,
        callback_manager: CallbackManager | None = None,
        instructions: str = "",
        **synthesizer: Any,
    ) -> None:
        retriever = _agentic(retriever)
        manager, options = callback_manager or retriever.callback_manager, retriever.options
        self.synthesizer = response_synthesizer or get_response_synthesizer(
            llm or retriever.llm,
            response_mode=response_mode or default_mode(retriever),
            streaming=streaming,
            callback_manager=manager,
            **{"retries": options.retries, "spotlighting": options.spotlighting, **synthesizer},
        )
        self.grounding = as_grounding(grounding)
        is_checked = bool(grounding)  # answers of LlamaIndex's synthesizers have no citation markers
        if isinstance(self.synthesizer, AgenticSynthesizer):
            is_checked = self.synthesizer.needs_llm and self.synthesizer.needs_nodes  # a model writes from evidence
        self._is_checked = is_checked and not makes_objects(self.synthesizer)
        self.instructions = instructions
        super().__init__(retriever, self.synthesizer, list(node_postprocessors or ()), manager)

    @classmethod
    def from_args(  # type: ignore[override]  # the only LlamaIndex arguments that are passed by position
        cls,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        response_synthesizer: BaseSynthesizer | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create an engine with LlamaIndex's arguments; see the class."""
        return cls(retriever, response_synthesizer, llm=llm, **kwargs)

    def with_retriever(self, retriever: BaseRetriever) -> Self:
        """Return a copy of this engine that uses another retriever."""
        twin = copy(self)
        twin._retriever = _agentic(retriever)  # noqa: SLF001 (of the same class)
        return twin

    @property
    def checks(self) -> Grounding | None:
        """The settings for checking answers against their evidence; None if answers are not checked."""
        return self.grounding if self._is_checked else None

    @property
    def retriever(self) -> AgenticRetriever:
        """The retriever of this engine."""
        return self._retriever

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self.retriever, "response_synthesizer": self.synthesizer}

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        if getattr(self.synthesizer, "_streaming", False):  # core's name; we use it too
            return self.stream(request, query_bundle)
        return run(self.answer(request, query_bundle)).llama_response()

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        if getattr(self.synthesizer, "_streaming", False):
            return await self.astream(request, query_bundle)
        return (await arun(self.answer(request, query_bundle))).llama_response()

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes that a query would be answered from."""
        return run(self.retrieved(self.retriever.request_for(query_bundle), query_bundle)).nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes that a query would be answered from."""
        return (await arun(self.retrieved(self.retriever.request_for(query_bundle), query_bundle))).nodes

    def stream(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None, observer: Observer = None
    ) -> AgenticStreamingResponse:
        """Retrieve, and return a LlamaIndex response whose tokens are generated while it is read; see ``answer``."""
        begun = run(self.begin(request, bundle, observer))
        return AgenticStreamingResponse(iterate(begun.work(), contextvars.copy_context()), begun.nodes, begun.metadata)

    async def astream(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> AgenticAsyncStreamingResponse:
        """Retrieve, and return a LlamaIndex response whose tokens are generated while it is read."""
        begun = await arun(self.begin(request, bundle))
        deltas = aiterate(begun.work(), contextvars.copy_context())
        return AgenticAsyncStreamingResponse(deltas, begun.nodes, begun.metadata)

    async def answer(
        self,
        request: RetrievalRequest,
        bundle: QueryBundle | None = None,
        observer: Observer = None,
        *,
        announced: bool = False,
        streaming: bool = False,
    ) -> Answered:
        """Retrieve, synthesize, and check the answer against its evidence.

        If ``streaming``, the text of the answer is emitted as it is written, unless the checks may change it. For the
        other arguments see ``AgenticRetriever.retrieval`` and ``asked``.

        Raises:
            SynthesisError: The language model failed with an error other than an unavailable server.
            DeadlineExceededError: An object (``output_cls``) was not complete by the deadline.
        """
        with asked(self.callback_manager, request.question, announced=announced) as tell:
            retrieval = await self.retrieved(request, bundle, observer)
            answered = await self._streamed(retrieval) if streaming else await self.written(retrieval, self.checks)
            tell(answered.llama_response)
        return answered

    async def retrieved(
        self,
        request: RetrievalRequest,
        bundle: QueryBundle | None = None,
        observer: Observer = None,
        classification: ClassificationSpec | None = None,
    ) -> Retrieval:
        """Retrieve and postprocess the evidence for an answer; see ``AgenticRetriever.retrieval``."""
        if request.answer_instructions is None and self.instructions:
            request = request.model_copy(update={"answer_instructions": self.instructions})
        share = 0.4 if getattr(self.synthesizer, "needs_llm", True) else 0.1
        query = bundle or QueryBundle(request.question)
        dispatcher.event(RetrievalStartEvent(str_or_query_bundle=query))
        payload = {EventPayload.QUERY_STR.value: query.query_str}
        with self.callback_manager.event(CBEventType.RETRIEVE, payload=payload) as event:
            retrieval = await self._retriever.retrieval(
                request, bundle=bundle, answer_share=share, observer=observer, classification=classification
            )
            reasoning = retrieval.log.last(AgenticReasoningActivity)
            if self._node_postprocessors:
                await self._postprocess(retrieval, query, reasoning)
            retrieval.arrange(retrieval.nodes)
            event.on_end(payload={EventPayload.NODES.value: retrieval.nodes})
        dispatcher.event(RetrievalEndEvent(str_or_query_bundle=query, nodes=retrieval.nodes))
        if not retrieval.nodes and not retrieval.reply:
            candidates = reasoning.candidates if reasoning is not None else 0
            reason = f"none of {candidates} candidates was kept" if candidates else "no source returned anything"
            retrieval.missing.append(MissingPart(what="evidence", outcome=Outcome.EMPTY, reason=reason))
        return retrieval

    async def _postprocess(
        self, retrieval: Retrieval, query: QueryBundle, reasoning: AgenticReasoningActivity | None
    ) -> None:
        deadline, selected = retrieval.budget.evidence_deadline, retrieval.selected
        with billed() as bill:
            left = await postprocess(retrieval.nodes, self._node_postprocessors, query, deadline, selected)
        retrieval.nodes = left.nodes
        retrieval.missing += [] if left.missing is None else [left.missing]
        if reasoning is not None:
            retrieval.log.amend(
                reasoning,
                kept=len(left.nodes),
                reasoning_tokens=(reasoning.reasoning_tokens or 0) + (bill.tokens or 0),
                dropped_by_postprocessors=(reasoning.dropped_by_postprocessors or 0) + left.dropped,
                added_by_postprocessors=(reasoning.added_by_postprocessors or 0) + left.added,
            )

    async def begin(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None, observer: Observer = None
    ) -> BegunAnswer:
        """Retrieve, and return what is needed to stream the answer."""
        with asked(self.callback_manager, request.question) as tell:
            events = open_events()
            retrieval = await self.retrieved(request, bundle, observer)
            begun = Answered(retrieval, Synthesis(text=""))
            nodes, metadata = list(retrieval.nodes), begun.metadata()
            tell(begun.llama_response)
        left = retrieval.budget.left  # the time until the stream is first read does not count

        async def work() -> None:
            since = time.monotonic() - retrieval.budget.started
            retrieval.budget = replace(retrieval.budget, seconds=None if left is None else since + left)
            set_budget(retrieval.budget)
            answered = begun
            try:
                with resumed_trace(self.callback_manager, events):
                    answered = await self._streamed(retrieval, raises=True)
            except (DeadlineExceededError, SynthesisError) as error:
                retrieval.missing.append(failed_answer(error, "the text so far is all of it"))
                answered.synthesis = Synthesis(error.partial)
                raise
            finally:
                nodes[:] = answered.retrieval.nodes
                metadata.update(answered.metadata())

        return BegunAnswer(work, nodes, metadata, retrieval)

    async def _streamed(self, retrieval: Retrieval, *, raises: bool = False) -> Answered:
        """Write the answer and emit its text, at the end if the checks may change it; see ``written``."""
        checks, through, shown = self.checks, None, list[object]()
        if checks is not None and checks.markers != Markers.KEEP:
            markers = MarkerFilter(range(len(retrieval.nodes)), Markers(checks.markers))
            through = markers.feed, markers.close
        try:
            answered = await self.written(retrieval, checks, shown, through, raises=raises)
        except (DeadlineExceededError, SynthesisError) as error:
            error.partial = "".join(map(str, shown))
            raise
        if not shown and answered.text:
            await emit(answered.text)
        return answered

    async def written(
        self,
        retrieval: Retrieval,
        checks: Grounding | None,
        shown: list[object] | None = None,
        through: Through = None,
        *,
        raises: bool = False,
        aside: Callable[[Spotlight], str] | None = None,
    ) -> Answered:
        """Synthesize the answer and check it against the evidence; a failed one is replaced.

        With a list ``shown`` the text is emitted ``through`` functions as it is written, unless the checks may change
        it, and appended to the list. If ``raises``, the error of an answer of which a part was emitted is raised.
        """
        body = synthesize(self.synthesizer, retrieval, streaming=shown is not None, aside=aside)
        if shown is not None:
            if checks is not None and checks.may_change:
                body = emitting(body, lambda _: "")
            elif through is not None:
                body = emitting(body, *through)

            def show(piece: object) -> object:
                shown.append(piece)
                return piece

            body = emitting(body, show)
        try:
            synthesis = await body
        except (DeadlineExceededError, SynthesisError) as error:
            if shown and raises:
                raise
            if shown and through is not None and (last := through[1]()):  # the body had no end that emits it
                shown.append(last)
                await emit(last)
            if through is not None:  # they emit no part of a marker
                error.partial, _ = clean_markers(error.partial, range(len(retrieval.nodes)))
            synthesis = await replacement(self.synthesizer, retrieval, error)
        return await checked(retrieval, synthesis, checks, self.synthesizer)


def _agentic(retriever: BaseRetriever) -> AgenticRetriever:
    if isinstance(retriever, AgenticRetriever):
        return retriever
    return AgenticRetriever.from_defaults(retriever, effort="minimal")


def default_mode(retriever: AgenticRetriever) -> str:
    """Return the default response mode: extracted data if the retriever has no language model, else an answer."""
    return (OutputMode.EXTRACTIVE_DATA if retriever.llm is None else OutputMode.ANSWER_SYNTHESIS).value


@contextmanager
def asked(
    manager: CallbackManager, question: str, *, announced: bool = False
) -> Iterator[Callable[[Callable[[], RESPONSE_TYPE]], None]]:
    """Open a query event for callback handlers, as LlamaIndex's query engines do.

    If ``announced``, instrumentation events are sent too; LlamaIndex's own ``query`` already sends them. Yields a
    function to call with a factory of the response, which is called only if there are listeners.
    """
    if announced:
        dispatcher.event(QueryStartEvent(query=question))
    payload = {EventPayload.QUERY_STR.value: question}
    with manager.as_trace("query"), manager.event(CBEventType.QUERY, payload=payload) as event:

        def tell(response: Callable[[], RESPONSE_TYPE]) -> None:
            if manager.handlers:
                event.on_end(payload={EventPayload.RESPONSE.value: response()})
            if announced and is_heard():
                dispatcher.event(QueryEndEvent(query=question, response=response()))

        yield tell


class BegunAnswer(NamedTuple):
    """An answer whose evidence is there, and whose text ``work`` streams; at its end it updates nodes and metadata."""

    work: Callable[[], Work[None]]
    nodes: list[NodeWithScore]
    metadata: JsonObject
    retrieval: Retrieval


# -- tools of agents: their citations keep their meaning in whatever the agent writes ----------------------------------

# A query engine's markers, [ref_id:N], number the passages of an answer. An agent joins several answers: a tool's
# markers name the tool and the passage itself, [space:1f0c9a3e], and its text ends with the list of sources.

_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")
_PASSAGE: Final = re.compile(r"\[[^\[\]\s]{1,80}:([0-9a-f]{8})\]")
_UNSAFE: Final = re.compile(r"[^\w.-]+")


class ToolQueryEngine(AgenticQueryEngine):
    """The query engine of a tool; its responses' text has markers of the tool, and a list of the cited sources.

    ``account`` and ``source_nodes`` of a response are those of any query engine. Streamed responses are not changed.
    """

    tool_name = "knowledge_base"

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self._marked(super()._query(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self._marked(await super()._aquery(query_bundle))

    def _marked(self, response: RESPONSE_TYPE) -> RESPONSE_TYPE:
        if isinstance(response, AgenticResponse):
            nodes, text = response.source_nodes, readable(response.response or "")
            named = [number for number in cited_ids(text) if number < len(nodes)]
            markers = {number: _marker(self.tool_name, nodes[number]) for number in named}
            text = _MARKER.sub(lambda found: markers.get(int(found[1]), ""), text)
            references = response.account.references
            lines = [f"{marker} {_source(references[number])}" for number, marker in markers.items()]
            response.response = "\n".join([text, "", "Sources:", *lines]) if lines else text
        return response


class PassageTool(RetrieverTool):
    """LlamaIndex's ``RetrieverTool``, with a marker before each passage by which an agent can cite it."""

    def call(self, *args: object, **kwargs: object) -> ToolOutput:
        """Search for the arguments' text, and return the passages."""
        asked = ", ".join(map(str, (*args, *kwargs.values())))  # core's own tool would search for "input is ..."
        return self._output(asked, self.retriever.retrieve(asked))

    async def acall(self, *args: object, **kwargs: object) -> ToolOutput:
        """Search for the arguments' text, and return the passages."""
        asked = ", ".join(map(str, (*args, *kwargs.values())))
        return self._output(asked, await self.retriever.aretrieve(asked))

    def _output(self, asked: str, nodes: list[NodeWithScore]) -> ToolOutput:
        name = self.metadata.get_name()
        passages = [f"{_marker(name, node)}\n{node.node.get_content(MetadataMode.LLM)}" for node in nodes]
        content = "\n\n".join(passages) or "Nothing was found."
        return ToolOutput(content=content, tool_name=name, raw_input={"input": asked}, raw_output=nodes)


def cited_nodes(text: str, outputs: Iterable[object]) -> list[NodeWithScore]:
    """Return the passages that an agent's text cites by the markers of tools, in order of first citation.

    ``outputs`` are what the tools returned (``ToolOutput``, ``ToolCallResult``, ``Response`` or nodes of LlamaIndex),
    for example ``tool_calls`` of an agent's result.
    """
    known = {}
    for output in outputs:
        tool_output = getattr(output, "tool_output", output)
        made = getattr(tool_output, "raw_output", tool_output)
        nodes = made if isinstance(made, list) else getattr(made, "source_nodes", ())
        known.update({_digest(node): node for node in nodes if isinstance(node, NodeWithScore)})
    return [known[digest] for digest in dict.fromkeys(_PASSAGE.findall(text)) if digest in known]


def _marker(name: str, node: NodeWithScore) -> str:
    return f"[{_UNSAFE.sub('_', name)}:{_digest(node)}]"


def _digest(node: NodeWithScore) -> str:
    return hashlib.sha256(node.node.node_id.encode()).hexdigest()[:8]


def _source(reference: Reference) -> str:
    where = reference.url or reference.citation_url or reference.knowledge_source_name
    return f"{printable(one_line(reference.title, 200))} ({printable(one_line(where, 300))})"
