"""The agentic query engine: one question, the whole way."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._flow import (
    END,
    Call,
    Emit,
    Flow,
    Next,
    Open,
    aiterate,
    arun,
    deadline_after,
    iterate,
    run,
)
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.account.retry_budget import share_retries
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.evidence.gathering import PROVENANCE_KEY
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.llm import CUT_SHORT
from llama_index_agentic_kb.prompts import format_question
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    Message,
    MissingPart,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    Outcome,
    OutputMode,
    RetrievalRequest,
    RetrievalResponse,
)
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer, Synthesis, get_response_synthesizer
from llama_index_agentic_kb.synthesizers.late import what_arrived

__all__ = ["AgenticQueryEngine", "AgenticResponse"]

Observer: TypeAlias = Callable[[ActivityRecord], None] | None


class AgenticResponse(Response):
    """A LlamaIndex ``Response`` that carries the whole account and shows itself in a notebook."""

    @property
    def account(self) -> RetrievalResponse:
        """Answer, references, activity, plan and what is missing, as the knowledge base gives them."""
        return RetrievalResponse.parse((self.metadata or {}).get(PROVENANCE_KEY, {}))

    def _repr_html_(self) -> str:
        return self.account._repr_html_()


@dataclass(slots=True)
class Answered:
    """A whole way: what was found, and what was made of it."""

    retrieval: Retrieval
    synthesis: Synthesis

    def response(self, *, include_activity: bool = True) -> RetrievalResponse:
        """Give the response object."""
        retrieval, text = self.retrieval, self.synthesis.text
        return RetrievalResponse(
            status_code=206 if any(part.outcome.failed for part in retrieval.missing) else 200,
            response=[Message.model_validate({"role": "assistant", "content": text})] if text else [],
            activity=list(retrieval.log.records) if include_activity else None,
            references=retrieval.references,
            missing=retrieval.missing,
            plan=retrieval.plan,
        )


class AgenticQueryEngine(GuardedCallbacks, BaseQueryEngine):
    """Answers a question over knowledge sources: plan, parallel retrieval, fusion, synthesis, account.

    ``query`` and ``aquery`` give LlamaIndex responses whose ``source_nodes[N]`` is ``[ref_id:N]`` and whose
    ``metadata["agentic_kb"]`` is the wire form of ``RetrievalResponse``. While a response streams, its activity still
    grows: read it after the last token.

    Args:
        retriever: An ``AgenticRetriever``; any other retriever is searched as a single source.
        response_synthesizer: One of ours, or of LlamaIndex's; None makes one of ``response_mode``.
        response_mode: See ``get_response_synthesizer``; None is ``answerSynthesis`` with a language model, else
            ``extractiveData``.
        node_postprocessors: Applied to the retriever's nodes, after its own.
        streaming: Whether to stream token deltas.
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
        return run(self._retrieval(self.retriever.request_for(query_bundle), query_bundle)).nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Give the nodes that an answer would rest on."""
        return (await arun(self._retrieval(self.retriever.request_for(query_bundle), query_bundle))).nodes

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
        return _llama_response(run(self.answer(request, bundle)))

    async def arespond(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> Response | PydanticResponse:
        """Go the whole way of a request and give a LlamaIndex response."""
        return _llama_response(await arun(self.answer(request, bundle)))

    def answer(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None, observer: Observer = None
    ) -> Flow[Answered]:
        """Go the whole way of a request: retrieve, then synthesize.

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
        retrieval = yield from self._retrieval(request, bundle, observer)
        try:
            synthesis = yield from self._synthesis(retrieval)
        except DeadlineExceededError as error:
            synthesis = yield from self._arrived(retrieval, error)
        return Answered(retrieval, synthesis)

    def _retrieval(
        self, request: RetrievalRequest, bundle: QueryBundle | None, observer: Observer = None
    ) -> Flow[Retrieval]:
        share = 0.4 if getattr(self.synthesizer, "needs_llm", True) else 0.1
        retrieval = yield from self.retriever.retrieval(request, bundle=bundle, answer_share=share, observer=observer)
        query = bundle or QueryBundle(retrieval.scope.question)
        left = yield from postprocess(
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

    def _synthesis(self, retrieval: Retrieval, *, streaming: bool = False) -> Flow[Synthesis]:
        """Make the answer, with its record; what needs no model adds to the agent's record instead."""
        synthesizer = self.synthesizer
        if not isinstance(synthesizer, AgenticSynthesizer):
            return (yield from self._foreign(synthesizer, retrieval))
        query = QueryBundle(format_question(retrieval.scope.question, retrieval.scope.history))
        budget, log = retrieval.budget, retrieval.log
        body = synthesizer.synthesis(
            query,
            retrieval.nodes,
            # What needs no model takes milliseconds: it is given also where a source took all the time.
            deadline=budget.answer_deadline if synthesizer.needs_llm else None,
            max_output_tokens=budget.output_tokens,
            sources={name: chosen.source for name, chosen in retrieval.selected.items()},
            streaming=streaming,
        )
        if not synthesizer.needs_llm:
            synthesis = yield from body
            reasoning = log.last(AgenticReasoningActivity)
            if synthesis.dropped and reasoning is not None:
                log.amend(reasoning, dropped_by_budget=(reasoning.dropped_by_budget or 0) + synthesis.dropped)
            if synthesis.warnings and reasoning is not None:
                warnings = [*filter(None, [reasoning.warning]), *synthesis.warnings]
                log.amend(reasoning, warning="; ".join(warnings))
            if synthesis.dropped:
                told = f"{synthesis.dropped} passages did not fit into the output's budget"
                retrieval.missing.append(MissingPart(what="extracts", outcome=Outcome.SKIPPED, reason=told))
            return synthesis
        name = synthesizer.model.name
        record = log.open(
            ModelAnswerSynthesisActivity,
            CBEventType.SYNTHESIZE,
            {EventPayload.QUERY_STR: retrieval.scope.question},
            model=None if name is None else ModelInfo(model_name=name),
            response_mode=synthesizer.mode,
        )
        try:
            synthesis = yield from body
        except GeneratorExit:
            log.cancel(record)
            raise
        except Exception as error:
            outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
            log.fail(record, error, name, outcome=outcome)
            raise
        if synthesis.cut:
            retrieval.missing.append(_answer_missing(Outcome.ERROR, f"{CUT_SHORT}: the answer may end too early"))
        log.close(
            record,
            {EventPayload.RESPONSE: synthesis.text},
            outcome=Outcome.OK if retrieval.nodes else Outcome.EMPTY,
            input_tokens=synthesis.usage.input_tokens,
            output_tokens=synthesis.usage.output_tokens,
            calls=synthesis.usage.calls,
            dropped_by_budget=synthesis.dropped,
            links_removed=synthesis.links_removed,
            warning="; ".join(synthesis.warnings) or None,
        )
        return synthesis

    def _arrived(self, retrieval: Retrieval, error: DeadlineExceededError) -> Flow[Synthesis]:
        """Give what there is of an answer that did not come in time; a part of an object is none."""
        if getattr(self.synthesizer, "_output_cls", None) is not None:  # core's name; ours has it too
            raise error
        synthesis = yield from what_arrived(
            error,
            retrieval.scope.question,
            retrieval.nodes,
            max_output_tokens=retrieval.budget.output_tokens,
            sources={name: chosen.source for name, chosen in retrieval.selected.items()},
        )
        retrieval.missing.append(_answer_missing(Outcome.TIMEOUT, synthesis.warnings[0]))
        return synthesis

    def _foreign(self, synthesizer: BaseSynthesizer, retrieval: Retrieval) -> Flow[Synthesis]:
        """Let a synthesizer of LlamaIndex's answer; it keeps no account."""
        query = QueryBundle(retrieval.scope.question)
        response = yield Call(
            sync=partial(synthesizer.synthesize, query, retrieval.nodes),
            native=partial(synthesizer.asynthesize, query, retrieval.nodes),
            deadline=retrieval.budget.answer_deadline,
            what=f"synthesizer {type(synthesizer).__name__}",
        )
        if isinstance(response, (StreamingResponse, AsyncStreamingResponse)):
            return Synthesis(text=(yield from _tokens(response, retrieval.budget.deadline)))
        output = response.response if isinstance(response, PydanticResponse) else None
        text = str(response)
        yield Emit(text)
        return Synthesis(text=text, output=output)

    # -- streaming -------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        return bool(getattr(self.synthesizer, "_streaming", False))  # core's name; ours has it too

    def stream(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> StreamingResponse:
        """Retrieve, and give a LlamaIndex response whose tokens come as they are read."""
        retrieval = run(self._retrieval(request, bundle))
        metadata = _metadata(Answered(retrieval, Synthesis(text="")))
        flow, context = self._streamed(retrieval, metadata), contextvars.copy_context()

        def tokens() -> Generator[str, None, None]:
            yield from iterate(flow, context)

        return StreamingResponse(tokens(), source_nodes=retrieval.nodes, metadata=metadata)

    async def astream(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> AsyncStreamingResponse:
        """Retrieve, and give a LlamaIndex response whose tokens come as they are read."""
        retrieval = await arun(self._retrieval(request, bundle))
        metadata = _metadata(Answered(retrieval, Synthesis(text="")))
        flow, context = self._streamed(retrieval, metadata), contextvars.copy_context()

        async def tokens() -> AsyncGenerator[str, None]:
            async for token in aiterate(flow, context):
                yield token

        return AsyncStreamingResponse(tokens(), source_nodes=retrieval.nodes, metadata=metadata)

    def _streamed(self, retrieval: Retrieval, metadata: dict[str, Any]) -> Flow[None]:
        """Give the flow that synthesizes, then completes the metadata that the response already holds.

        It begins when somebody reads: the time until then is the reader's, and not taken off the budget.
        """
        left = retrieval.budget.left

        def flow() -> Flow[None]:
            retrieval.budget = replace(retrieval.budget, deadline=deadline_after(left))
            synthesis = Synthesis(text="")
            try:
                share_retries(retrieval.budget.retries)
                synthesis = yield from self._synthesis(retrieval, streaming=True)
            except DeadlineExceededError:
                told = "it was not done by its deadline: what was told of it by then is all"
                retrieval.missing.append(_answer_missing(Outcome.TIMEOUT, told))
                raise
            finally:
                metadata.update(_metadata(Answered(retrieval, synthesis)))

        return flow()


def _answer_missing(outcome: Outcome, reason: str) -> MissingPart:
    return MissingPart(what="answer", outcome=outcome, reason=reason)


def _tokens(response: StreamingResponse | AsyncStreamingResponse, deadline: float | None) -> Flow[str]:
    """Pass a stream of LlamaIndex's on, token by token, and give its text."""
    if isinstance(response, StreamingResponse):
        opened = Open(sync=partial(iter, response.response_gen), what="synthesizer's stream")
    else:
        tokens = response

        async def read() -> AsyncGenerator[str, None]:
            return tokens.async_response_gen()

        opened = Open(native=read, what="synthesizer's stream")
    stream, text = (yield opened), ""
    while (token := (yield Next(stream, deadline=deadline))) is not END:
        text += token
        yield Emit(token)
    return text


def default_mode(retriever: AgenticRetriever) -> str:
    """Give the mode that a retriever's language model, or the lack of one, makes sensible."""
    return (OutputMode.EXTRACTIVE_DATA if retriever.llm is None else OutputMode.ANSWER_SYNTHESIS).value


def _metadata(answered: Answered) -> dict[str, Any]:
    """Give the metadata of a LlamaIndex response: each node's, as core has it, and the account."""
    nodes = {node.node.node_id: node.node.metadata for node in answered.retrieval.nodes}
    return {**nodes, PROVENANCE_KEY: answered.response().to_dict()}


def _llama_response(answered: Answered) -> Response | PydanticResponse:
    nodes, metadata = answered.retrieval.nodes, _metadata(answered)
    if answered.synthesis.output is not None:
        return PydanticResponse(answered.synthesis.output, source_nodes=nodes, metadata=metadata)
    return AgenticResponse(answered.synthesis.text, source_nodes=nodes, metadata=metadata)
