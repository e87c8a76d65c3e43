"""The agentic query engine: one question, the whole way."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE, PydanticResponse, Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import aiterate, arun, deadline_after, emit, emitting, iterate, run
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.account.retry_budget import share_retries
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.grounding import MarkerFilter, Markers
from llama_index_agentic_kb.grounding.helpfulness import unhelpful
from llama_index_agentic_kb.grounding.settings import Grounding, as_grounding
from llama_index_agentic_kb.query_engine.responses import (
    AgenticAsyncStreamingResponse,
    AgenticStreamingResponse,
    Answered,
    llama_response,
    metadata_of,
)
from llama_index_agentic_kb.query_engine.stages import answer_missing, arrived, checked, is_checked, synthesized
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    MissingPart,
    Outcome,
    OutputMode,
    RetrievalRequest,
)
from llama_index_agentic_kb.schema.answer import SkippedReason
from llama_index_agentic_kb.synthesizers import Synthesis, get_response_synthesizer

__all__ = ["AgenticQueryEngine", "default_mode"]

Observer: TypeAlias = Callable[[ActivityRecord], None] | None


class AgenticQueryEngine(GuardedCallbacks, BaseQueryEngine):
    """Answers a question over knowledge sources: plan, parallel retrieval, fusion, synthesis, grounding, account.

    ``query`` and ``aquery`` give LlamaIndex responses whose ``source_nodes[N]`` is ``[ref_id:N]`` and whose
    ``metadata["agentic_kb"]`` is the wire form of ``RetrievalResponse``; ``cited_nodes`` are those that the answer
    cites. While a response streams, its account still grows: read it after the last token.

    Args:
        retriever: An ``AgenticRetriever``; any other retriever is searched as a single source.
        response_synthesizer: One of ours, or of LlamaIndex's; None makes one of ``response_mode``.
        response_mode: See ``get_response_synthesizer``; None is ``answerSynthesis`` with a language model, else
            ``extractiveData``.
        node_postprocessors: Applied to the retriever's nodes, after its own.
        streaming: Whether to stream token deltas.
        grounding: How answers are held against their evidence: ``Grounding(...)``; None (default) and True are its
            defaults, False does not. Answers of LlamaIndex's own synthesizers are checked only where this is given.
        callback_manager: None is the retriever's.
        synthesizer_kwargs: Further arguments of ``get_response_synthesizer`` (templates, ``output_cls``, ...).
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: BaseSynthesizer | None = None,
        *,
        response_mode: str | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        streaming: bool = False,
        grounding: Grounding | bool | None = None,
        callback_manager: CallbackManager | None = None,
        **synthesizer_kwargs: Any,
    ) -> None:
        if not isinstance(retriever, AgenticRetriever):
            retriever = AgenticRetriever.from_defaults(retriever, effort="minimal")
        self.retriever = retriever
        self.node_postprocessors = list(node_postprocessors)
        manager = callback_manager or retriever.callback_manager
        self.synthesizer = response_synthesizer or get_response_synthesizer(
            **{
                "llm": retriever.llm,
                "retries": retriever.retries,
                "spotlighting": retriever.spotlighting,
                **synthesizer_kwargs,
            },
            response_mode=response_mode or default_mode(retriever),
            streaming=streaming,
            callback_manager=manager,
        )
        self.grounding = as_grounding(grounding)
        self._grounding_asked = bool(grounding)
        super().__init__(callback_manager=manager)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self.retriever, "response_synthesizer": self.synthesizer}

    # -- LlamaIndex ------------------------------------------------------------------------------------------------

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        return self.stream(request, query_bundle) if self._streams else self.respond(request, query_bundle)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        if self._streams:
            return await self.astream(request, query_bundle)
        return await self.arespond(request, query_bundle)

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Give the nodes that an answer would rest on."""
        return run(self.retrieved(self.retriever.request_for(query_bundle), query_bundle)).nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Give the nodes that an answer would rest on."""
        return (await arun(self.retrieved(self.retriever.request_for(query_bundle), query_bundle))).nodes

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from given nodes."""
        return self.synthesizer.synthesize(query_bundle, nodes, additional_source_nodes)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from given nodes."""
        return await self.synthesizer.asynthesize(query_bundle, nodes, additional_source_nodes)

    # -- the way of a query ----------------------------------------------------------------------------------------

    def respond(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> Response | PydanticResponse:
        """Go the whole way of a request and give a LlamaIndex response."""
        return llama_response(run(self.answer(request, bundle)))

    async def arespond(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> Response | PydanticResponse:
        """Go the whole way of a request and give a LlamaIndex response."""
        return llama_response(await arun(self.answer(request, bundle)))

    async def answer(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None, observer: Observer = None
    ) -> Answered:
        """Go the whole way of a request: retrieve, synthesize, and hold the answer against its evidence.

        Where the answer is not there by its deadline, what arrived is given: the answer so far (the steps of refine,
        the partial answers of a tree), or else the evidence as extracted data. ``missing`` names the answer then.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the question's lane.
            observer: Called with each activity record when it is opened and when it is closed.

        Raises:
            SynthesisError: The language model failed while answering, and time was not the reason.
            DeadlineExceededError: An object (``output_cls``) was not there in time.
        """
        retrieval = await self.retrieved(request, bundle, observer)
        try:
            synthesis = await synthesized(self.synthesizer, retrieval)
        except DeadlineExceededError as error:
            synthesis = await arrived(self.synthesizer, retrieval, error)
            if not error.partial:  # extracts say what the evidence says
                return Answered(retrieval, synthesis)
        return await self.grounded(retrieval, synthesis, self.checks)

    @property
    def checks(self) -> Grounding | None:
        """How answers are held against their evidence; None where they are not."""
        grounding = self.grounding
        return grounding if is_checked(self.synthesizer, grounding, asked=self._grounding_asked) else None

    async def grounded(self, retrieval: Retrieval, synthesis: Synthesis, grounding: Grounding | None) -> Answered:
        """Go the last part of the way: hold the answer against the evidence, and tell why it is none, or is withheld.

        Args:
            retrieval: The evidence.
            synthesis: The answer.
            grounding: How; None does not check it.
        """
        answered = Answered(retrieval, synthesis)
        if not retrieval.nodes:
            answered.skipped = [SkippedReason.NO_RELEVANT_CONTENT]
        elif grounding is not None and synthesis.output is None:
            answered.grounded = await checked(self.synthesizer, retrieval, synthesis, grounding)
            answered.skipped = [*answered.grounded.skipped]
            if not answered.skipped and unhelpful(answered.grounded.text, question=retrieval.scope.question):
                answered.skipped.append(SkippedReason.UNHELPFUL_ANSWER)
        return answered

    async def retrieved(
        self,
        request: RetrievalRequest,
        bundle: QueryBundle | None = None,
        observer: Observer = None,
        **further: Any,
    ) -> Retrieval:
        """Go the first half of the way: give the evidence that an answer rests on; see ``AgenticRetriever.retrieval``.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the question's lane.
            observer: Called with each activity record when it is opened and when it is closed.
            further: Further arguments of the retriever's.
        """
        share = 0.4 if getattr(self.synthesizer, "needs_llm", True) else 0.1
        retrieval = await self.retriever.retrieval(
            request, bundle=bundle, answer_share=share, observer=observer, **further
        )
        query = bundle or QueryBundle(retrieval.scope.question)
        left = await postprocess(
            retrieval.nodes, self.node_postprocessors, query, retrieval.budget.evidence_deadline, retrieval.selected
        )
        retrieval.nodes = left.nodes
        retrieval.missing += [part for part in (left.missing,) if part is not None]
        reasoning = retrieval.log.last(AgenticReasoningActivity)
        if self.node_postprocessors and reasoning is not None:
            retrieval.log.amend(
                reasoning,
                kept=len(left.nodes),
                dropped_by_postprocessors=(reasoning.dropped_by_postprocessors or 0) + left.dropped,
                added_by_postprocessors=(reasoning.added_by_postprocessors or 0) + left.added,
            )
        if not retrieval.nodes:
            candidates = reasoning.candidates if reasoning is not None else 0
            reason = f"none of {candidates} candidates was kept" if candidates else "no source returned anything"
            retrieval.missing.append(MissingPart(what="evidence", outcome=Outcome.EMPTY, reason=reason))
        return retrieval

    # -- streaming -------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        return bool(getattr(self.synthesizer, "_streaming", False))  # core's name; ours has it too

    def stream(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> AgenticStreamingResponse:
        """Retrieve, and give a LlamaIndex response whose tokens come as they are read."""
        retrieval = run(self.retrieved(request, bundle))
        metadata = metadata_of(Answered(retrieval, Synthesis(text="")))
        flow, context = self._streamed(retrieval, metadata), contextvars.copy_context()

        def tokens() -> Generator[str, None, None]:
            yield from iterate(flow, context)

        return AgenticStreamingResponse(tokens(), source_nodes=retrieval.nodes, metadata=metadata)

    async def astream(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> AgenticAsyncStreamingResponse:
        """Retrieve, and give a LlamaIndex response whose tokens come as they are read."""
        retrieval = await arun(self.retrieved(request, bundle))
        metadata = metadata_of(Answered(retrieval, Synthesis(text="")))
        flow, context = self._streamed(retrieval, metadata), contextvars.copy_context()

        async def tokens() -> AsyncGenerator[str, None]:
            async for token in aiterate(flow, context):
                yield token

        return AgenticAsyncStreamingResponse(tokens(), source_nodes=retrieval.nodes, metadata=metadata)

    def _streamed(self, retrieval: Retrieval, metadata: dict[str, Any]) -> Coroutine[Any, Any, None]:
        """Give the flow that synthesizes, then completes the metadata that the response already holds.

        It begins when somebody reads: the time until then is the reader's, and not taken off the budget.
        """
        left = retrieval.budget.left

        async def flow() -> None:
            retrieval.budget = replace(retrieval.budget, deadline=deadline_after(left))
            answered = Answered(retrieval, Synthesis(text=""))
            try:
                share_retries(retrieval.budget.retries)
                synthesis = await self._told(retrieval)
                answered = Answered(retrieval, synthesis)
                answered = await self.grounded(retrieval, synthesis, self.checks)
                if self._holds_back:
                    await emit(answered.text)
            except DeadlineExceededError:
                told = "it was not done by its deadline: what was told of it by then is all"
                retrieval.missing.append(answer_missing(Outcome.TIMEOUT, told))
                raise
            finally:
                metadata.update(metadata_of(answered))

        return flow()

    @property
    def _holds_back(self) -> bool:
        """Whether the answer may yet change when it is checked."""
        return self.checks is not None and self.checks.may_change

    def _told(self, retrieval: Retrieval) -> Coroutine[Any, Any, Synthesis]:
        """Synthesize, and emit the text with its markers as asked for, unless it may yet change."""
        body = synthesized(self.synthesizer, retrieval, streaming=True)
        style = Markers.KEEP if self.checks is None else Markers(self.checks.markers)
        if self._holds_back:
            return emitting(body, lambda _: "")
        if style is Markers.KEEP:
            return body
        markers = MarkerFilter(range(len(retrieval.nodes)), style)
        return emitting(body, markers.feed, markers.close)


def default_mode(retriever: AgenticRetriever) -> str:
    """Give the mode that a retriever's language model, or the lack of one, makes sensible."""
    return (OutputMode.EXTRACTIVE_DATA if retriever.llm is None else OutputMode.ANSWER_SYNTHESIS).value
