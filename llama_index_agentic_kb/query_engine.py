"""The query engine: one question, the whole way.

    retrieval ─▶ synthesis ─▶ grounding ─▶ response

``AgenticQueryEngine`` joins the stages; ``Answered`` is the result; the ``Agentic*Response`` classes are LlamaIndex's
responses with the whole account.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

from llama_index_agentic_kb._aio import (
    END,
    Call,
    aiterate,
    arun,
    deadline_after,
    earliest,
    emit,
    emitting,
    iterate,
    open_stream,
    run,
)
from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.account.budget import set_budget
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.grounding import MarkerFilter, Markers, cited_ids
from llama_index_agentic_kb.grounding.grounded import GroundedText, ground_text
from llama_index_agentic_kb.grounding.settings import Grounding, as_grounding
from llama_index_agentic_kb.guard.spotlighting import Spotlight
from llama_index_agentic_kb.llm import CUT_SHORT, Usage, billed
from llama_index_agentic_kb.planning import ClassificationSpec
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
    SkippedReason,
)
from llama_index_agentic_kb.schema.grounding import ClaimFlag, GroundingLedger, Verdict
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer, Synthesis, get_response_synthesizer
from llama_index_agentic_kb.synthesizers.extractive import partial_answer

__all__ = [
    "AgenticAsyncStreamingResponse",
    "AgenticQueryEngine",
    "AgenticResponse",
    "AgenticStreamingResponse",
    "Answered",
    "default_mode",
]

Observer: TypeAlias = Callable[[ActivityRecord], None] | None


class AgenticQueryEngine(GuardedCallbacks, BaseQueryEngine):
    """Answers a question over knowledge sources: plan, parallel retrieval, fusion, synthesis, grounding, account.

    ``query`` and ``aquery`` give LlamaIndex responses whose ``source_nodes[N]`` is ``[ref_id:N]`` and whose
    ``metadata["agentic_kb"]`` is the wire form of ``RetrievalResponse``; ``cited_nodes`` are those that the answer
    cites. While a response streams, its account still grows: read it after the last token.

    Args:
        retriever: An ``AgenticRetriever``; any other retriever is searched as a single source.
        response_synthesizer: Ours or LlamaIndex's; None makes one of ``response_mode``.
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
                "retries": retriever.options.retries,
                "spotlighting": retriever.options.spotlighting,
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

    # -- LlamaIndex's doors ----------------------------------------------------------------------------------------

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        return self.stream(request, query_bundle) if self._streams else self.respond(request, query_bundle)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        request = self.retriever.request_for(query_bundle)
        if self._streams:
            return await self.astream(request, query_bundle)
        return await self.arespond(request, query_bundle)

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes that an answer would rest on."""
        return run(self.retrieved(self.retriever.request_for(query_bundle), query_bundle)).nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the nodes that an answer would rest on."""
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

    def respond(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> Response | PydanticResponse:
        """Answer a request with a LlamaIndex response."""
        return _llama_response(run(self.answer(request, bundle)))

    async def arespond(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> Response | PydanticResponse:
        """Answer a request with a LlamaIndex response."""
        return _llama_response(await arun(self.answer(request, bundle)))

    # -- the way of a query ----------------------------------------------------------------------------------------

    async def answer(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None, observer: Observer = None
    ) -> Answered:
        """Retrieve, synthesize, and check the answer against its evidence.

        An answer that is late is replaced by its part so far (the steps of refine, the partial answers of a tree), or
        else by the evidence as extracted data. ``missing`` names the answer then.

        Args:
            request: What is asked.
            bundle: The caller's query; its vector serves the search of the question itself.
            observer: Called with each activity record when it is opened and when it is closed.

        Raises:
            SynthesisError: The language model failed while answering, and time was not the reason.
            DeadlineExceededError: An object (``output_cls``) was not there in time.
        """
        retrieval = await self.retrieved(request, bundle, observer)
        try:
            synthesis = await synthesized(self.synthesizer, retrieval)
        except DeadlineExceededError as error:
            synthesis = await partial_of(self.synthesizer, retrieval, error)
            if not error.partial:  # extracts say what the evidence says
                return Answered(retrieval, synthesis)
        return await self.grounded(retrieval, synthesis, self.checks)

    async def retrieved(
        self,
        request: RetrievalRequest,
        bundle: QueryBundle | None = None,
        observer: Observer = None,
        classification: ClassificationSpec | None = None,
    ) -> Retrieval:
        """Retrieve the evidence that an answer rests on; see ``AgenticRetriever.retrieval``."""
        share = 0.4 if getattr(self.synthesizer, "needs_llm", True) else 0.1
        retrieval = await self.retriever.retrieval(
            request, bundle=bundle, answer_share=share, observer=observer, classification=classification
        )
        query = bundle or QueryBundle(retrieval.scope.question)
        left = await postprocess(
            retrieval.nodes, self.node_postprocessors, query, retrieval.budget.evidence_deadline, retrieval.selected
        )
        retrieval.nodes = left.nodes
        retrieval.missing += [] if left.missing is None else [left.missing]
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

    @property
    def checks(self) -> Grounding | None:
        """How answers are checked against their evidence; None where they are not.

        Answers of this library that a model writes from evidence are checked. Those of LlamaIndex's synthesizers, which
        have no markers, are where the user asked for it.
        """
        synthesizer = self.synthesizer
        if getattr(synthesizer, "_output_cls", None) is not None:  # core's name; ours has it too
            return None
        if isinstance(synthesizer, AgenticSynthesizer):
            checked = synthesizer.needs_llm and synthesizer.needs_nodes
        else:
            checked = self._grounding_asked
        return self.grounding if checked else None

    async def grounded(self, retrieval: Retrieval, synthesis: Synthesis, grounding: Grounding | None) -> Answered:
        """Check the answer against the evidence, and record why there is no answer, or why it is withheld.

        Args:
            retrieval: The evidence. Where markers are renumbered, the result's nodes are in the order of the answer.
            synthesis: The answer.
            grounding: How; None does not check it.
        """
        answered = Answered(retrieval, synthesis)
        if not retrieval.nodes:
            answered.skipped = [SkippedReason.NO_RELEVANT_CONTENT]
            return answered
        if grounding is not None and synthesis.output is None:
            text = synthesis.text
            if grounding.markers == Markers.RENUMBER:
                text, answered.retrieval = _renumbered(text, retrieval)
            with billed() as bill:
                answered.grounded = await ground_text(
                    text,
                    answered.retrieval.nodes,
                    answered.retrieval.references,
                    grounding,
                    model=getattr(self.synthesizer, "model", None),
                    spotlighting=getattr(self.synthesizer, "spotlighting", None),
                    deadline=earliest(retrieval.budget.check_deadline, deadline_after(grounding.seconds)),
                )
            _record_check(retrieval, answered.grounded.ledger, grounding, bill)
            answered.skipped = [*answered.grounded.skipped]
        if not answered.skipped and not synthesis.answerable:
            answered.skipped.append(SkippedReason.UNHELPFUL_ANSWER)
        return answered

    # -- streaming -------------------------------------------------------------------------------------------------

    @property
    def _streams(self) -> bool:
        return bool(getattr(self.synthesizer, "_streaming", False))  # core's name; ours has it too

    def stream(self, request: RetrievalRequest, bundle: QueryBundle | None = None) -> AgenticStreamingResponse:
        """Retrieve, and return a LlamaIndex response whose tokens come as they are read."""
        retrieval = run(self.retrieved(request, bundle))
        nodes, metadata = list(retrieval.nodes), _metadata(Answered(retrieval, Synthesis(text="")))
        work, context = self._streamed(retrieval, nodes, metadata), contextvars.copy_context()

        def tokens() -> Generator[str, None, None]:
            yield from iterate(work, context)

        return AgenticStreamingResponse(tokens(), source_nodes=nodes, metadata=metadata)

    async def astream(
        self, request: RetrievalRequest, bundle: QueryBundle | None = None
    ) -> AgenticAsyncStreamingResponse:
        """Retrieve, and return a LlamaIndex response whose tokens come as they are read."""
        retrieval = await arun(self.retrieved(request, bundle))
        nodes, metadata = list(retrieval.nodes), _metadata(Answered(retrieval, Synthesis(text="")))
        work, context = self._streamed(retrieval, nodes, metadata), contextvars.copy_context()

        async def tokens() -> AsyncGenerator[str, None]:
            async for token in aiterate(work, context):
                yield token

        return AgenticAsyncStreamingResponse(tokens(), source_nodes=nodes, metadata=metadata)

    def _streamed(
        self, retrieval: Retrieval, nodes: list[NodeWithScore], metadata: dict[str, Any]
    ) -> Coroutine[Any, Any, None]:
        """Return a coroutine that answers, then completes the nodes and the metadata that the response holds already.

        It starts when somebody reads: the time until then is not taken off the budget.
        """
        left, checks = retrieval.budget.left, self.checks
        may_change = checks is not None and checks.may_change

        async def work() -> None:
            retrieval.budget = replace(retrieval.budget, deadline=deadline_after(left))
            answered = Answered(retrieval, Synthesis(text=""))
            try:
                set_budget(retrieval.budget)
                synthesis = await _emitted(self.synthesizer, retrieval, checks)
                answered = Answered(retrieval, synthesis)
                answered = await self.grounded(retrieval, synthesis, checks)
                if may_change:
                    await emit(answered.text)
            except DeadlineExceededError:
                reason = "it was not done by its deadline: the text so far is all of it"
                retrieval.missing.append(_answer_missing(Outcome.TIMEOUT, reason))
                raise
            finally:
                nodes[:] = answered.retrieval.nodes
                metadata.update(_metadata(answered))

        return work()


def default_mode(retriever: AgenticRetriever) -> str:
    """Return the mode that a retriever's language model, or the lack of one, makes sensible."""
    return (OutputMode.EXTRACTIVE_DATA if retriever.llm is None else OutputMode.ANSWER_SYNTHESIS).value


# -- synthesis ---------------------------------------------------------------------------------------------------------


def _emitted(
    synthesizer: BaseSynthesizer, retrieval: Retrieval, checks: Grounding | None
) -> Coroutine[Any, Any, Synthesis]:
    """Synthesize, and emit the text with its markers as asked for, unless it may yet change."""
    body = synthesized(synthesizer, retrieval, streaming=True)
    if checks is None:
        return body
    if checks.may_change:
        return emitting(body, lambda _: "")
    if checks.markers == Markers.KEEP:
        return body
    markers = MarkerFilter(range(len(retrieval.nodes)), Markers(checks.markers))
    return emitting(body, markers.feed, markers.close)


async def synthesized(
    synthesizer: BaseSynthesizer,
    retrieval: Retrieval,
    *,
    streaming: bool = False,
    instructions: str = "",
    aside: Callable[[Spotlight], str] | None = None,
) -> Synthesis:
    """Make the answer, with its record; what needs no model adds to the agent's record instead.

    Args:
        synthesizer: Ours or LlamaIndex's; the latter keeps no account, and takes no instructions.
        retrieval: The evidence.
        streaming: Whether deltas of the text are emitted.
        instructions: See ``AgenticSynthesizer.synthesis``.
        aside: See ``AgenticSynthesizer.synthesis``.
    """
    if not isinstance(synthesizer, AgenticSynthesizer):
        return await _foreign(synthesizer, retrieval)
    body = synthesizer.synthesis(
        QueryBundle(format_question(retrieval.scope.question, retrieval.scope.history)),
        retrieval.nodes,
        # What needs no model takes milliseconds: it is made also where a source took all the time.
        deadline=retrieval.budget.answer_deadline if synthesizer.needs_llm else None,
        max_output_tokens=retrieval.budget.output_tokens,
        sources={name: chosen.source for name, chosen in retrieval.selected.items()},
        streaming=streaming,
        instructions=instructions,
        aside=aside,
    )
    if synthesizer.needs_llm:
        return await _written(body, synthesizer, retrieval)
    synthesis = await body
    reasoning = retrieval.log.last(AgenticReasoningActivity)
    if reasoning is not None and (synthesis.dropped or synthesis.warnings):
        warnings = [*filter(None, [reasoning.warning]), *synthesis.warnings]
        dropped = (reasoning.dropped_by_budget or 0) + synthesis.dropped
        retrieval.log.amend(reasoning, dropped_by_budget=dropped or None, warning="; ".join(warnings) or None)
    if synthesis.dropped:
        reason = f"{synthesis.dropped} passages did not fit into the output's budget"
        retrieval.missing.append(MissingPart(what="extracts", outcome=Outcome.SKIPPED, reason=reason))
    return synthesis


async def _written(
    body: Coroutine[Any, Any, Synthesis], synthesizer: AgenticSynthesizer, retrieval: Retrieval
) -> Synthesis:
    """Await the answer that a model writes, with its record in the account."""
    name, log = synthesizer.model.name, retrieval.log
    with log.record(
        ModelAnswerSynthesisActivity,
        CBEventType.SYNTHESIZE,
        {EventPayload.QUERY_STR: retrieval.scope.question},
        model=None if name is None else ModelInfo(model_name=name),
        response_mode=synthesizer.mode,
    ) as record:
        try:
            synthesis = await body
        except Exception as error:
            outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
            log.fail(record, error, name, outcome=outcome)
            raise
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
    if synthesis.cut:
        retrieval.missing.append(_answer_missing(Outcome.ERROR, f"{CUT_SHORT}: the answer may end too early"))
    return synthesis


async def _foreign(synthesizer: BaseSynthesizer, retrieval: Retrieval) -> Synthesis:
    """Answer by one of LlamaIndex's synthesizers; the tokens of its streams are emitted."""
    query = QueryBundle(retrieval.scope.question)
    response = await Call(
        sync=partial(synthesizer.synthesize, query, retrieval.nodes),
        native=partial(synthesizer.asynthesize, query, retrieval.nodes),
        deadline=retrieval.budget.answer_deadline,
        what=f"synthesizer {type(synthesizer).__name__}",
    )
    if isinstance(response, StreamingResponse):
        stream = open_stream(sync=partial(iter, response.response_gen), what="synthesizer's stream")
    elif isinstance(response, AsyncStreamingResponse):
        tokens = response

        async def read() -> AsyncGenerator[str, None]:
            return tokens.async_response_gen()

        stream = open_stream(native=read, what="synthesizer's stream")
    else:
        await emit(str(response))
        return Synthesis(str(response), response.response if isinstance(response, PydanticResponse) else None)
    text = ""
    while (token := (await stream.next(deadline=retrieval.budget.deadline))) is not END:
        text += str(token)
        await emit(token)
    return Synthesis(text)


async def partial_of(synthesizer: BaseSynthesizer, retrieval: Retrieval, error: DeadlineExceededError) -> Synthesis:
    """Return what there is of a late answer. Raise where an object was asked for: it has no parts."""
    if getattr(synthesizer, "_output_cls", None) is not None:  # core's name; ours has it too
        raise error
    synthesis = await partial_answer(
        error,
        retrieval.scope.question,
        retrieval.nodes,
        max_output_tokens=retrieval.budget.output_tokens,
        sources={name: chosen.source for name, chosen in retrieval.selected.items()},
    )
    retrieval.missing.append(_answer_missing(Outcome.TIMEOUT, synthesis.warnings[0]))
    return synthesis


def _answer_missing(outcome: Outcome, reason: str) -> MissingPart:
    return MissingPart(what="answer", outcome=outcome, reason=reason)


# -- grounding -----------------------------------------------------------------------------------------------------


def _renumbered(text: str, retrieval: Retrieval) -> tuple[str, Retrieval]:
    """Return an answer with its markers numbered in order of appearance, and a retrieval of nodes in that order."""
    nodes = retrieval.nodes
    markers = MarkerFilter(range(len(nodes)), Markers.RENUMBER)
    shown = markers.feed(text) + markers.close()
    rest = sorted(set(range(len(nodes))) - set(markers.cited))
    return shown, replace(retrieval, nodes=[nodes[number] for number in (*markers.cited, *rest)])


def _record_check(retrieval: Retrieval, ledger: GroundingLedger, grounding: Grounding, bill: Usage) -> None:
    """Note what a check found and cost in the record of the synthesis, and one that could not be made as missing."""
    record = retrieval.log.last(ModelAnswerSynthesisActivity)
    if record is not None:
        scored = [claim for claim in ledger.claims if claim.score is not None]
        warnings = [*filter(None, [record.warning]), *(one_line(warning) for warning in ledger.warnings)]
        bill.add(Usage(record.input_tokens, record.output_tokens, record.calls or 0))
        retrieval.log.amend(
            record,
            input_tokens=bill.input_tokens,
            output_tokens=bill.output_tokens,
            calls=bill.calls or record.calls,
            grounding_score=ledger.grounding_score,
            claims=len(scored),
            supported_claims=sum(claim.verdict is Verdict.SUPPORTED for claim in scored),
            warning="; ".join(warnings) or None,
        )
    if grounding.may_change and any(ClaimFlag.NOT_SCORED in claim.flags for claim in ledger.claims):
        reason = "; ".join(ledger.warnings) or "some claims were not checked"
        retrieval.missing.append(MissingPart(what="grounding", outcome=Outcome.ERROR, reason=reason))


# -- results -----------------------------------------------------------------------------------------------------------

WITHHELD = "No answer is given: what was found does not bear one out. The sources are listed."
"""The text in place of a withheld answer; ``skipped_reasons`` say why, as data."""


@dataclass(slots=True)
class Answered:
    """The result of a question: the evidence, the answer, and what the answer rests on.

    Args:
        retrieval: The evidence and the account.
        synthesis: The answer as the synthesizer wrote it.
        grounded: The answer as it was checked; None where there is nothing to check.
        skipped: Why there is no answer, or why it is withheld; empty where there is one.
    """

    retrieval: Retrieval
    synthesis: Synthesis
    grounded: GroundedText | None = None
    skipped: list[SkippedReason] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer, repaired where that was asked for, or the text in its place."""
        if self.grounded is None:
            return self.synthesis.text
        return WITHHELD if self.grounded.skipped else self.grounded.text

    def response(self, *, include_activity: bool = True) -> RetrievalResponse:
        """Return the response object."""
        retrieval, text = self.retrieval, self.text
        return RetrievalResponse(
            status_code=206 if any(part.outcome.failed for part in retrieval.missing) else 200,
            response=[Message.model_validate({"role": "assistant", "content": text})] if text else [],
            activity=list(retrieval.log.records) if include_activity else None,
            references=retrieval.references,
            missing=retrieval.missing,
            plan=retrieval.plan,
            grounding=None if self.grounded is None else self.grounded.ledger,
            skipped_reasons=self.skipped,
        )


class _Accounted:
    """What our LlamaIndex responses tell beside their text."""

    source_nodes: list[NodeWithScore]
    metadata: dict[str, Any] | None

    @property
    def account(self) -> RetrievalResponse:
        """Answer, references, grounding, activity, plan and what is missing; of a stream, once it was read."""
        return RetrievalResponse.parse((self.metadata or {}).get(PROVENANCE_KEY, {}))

    @property
    def cited_nodes(self) -> list[NodeWithScore]:
        """Those of ``source_nodes`` that the answer cites, in order of first mention; of a stream, once it was read."""
        return _cited(self.account, self.source_nodes)

    def _repr_html_(self) -> str:
        return self.account._repr_html_()


class AgenticResponse(_Accounted, Response):
    """A LlamaIndex ``Response`` that carries the whole account and shows itself in a notebook."""


class AgenticStreamingResponse(_Accounted, StreamingResponse):
    """A LlamaIndex ``StreamingResponse`` that carries the whole account."""


class AgenticAsyncStreamingResponse(_Accounted, AsyncStreamingResponse):
    """A LlamaIndex ``AsyncStreamingResponse`` that carries the whole account."""


def _cited(account: RetrievalResponse, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return the nodes that an answer that is given cites, its headings and lead-ins too."""
    if SkippedReason.LOW_GROUNDED_ANSWER in account.skipped_reasons:
        return []
    claimed = [] if account.grounding is None else [int(number) for number in account.grounding.cited]
    numbers = dict.fromkeys([*cited_ids(account.text), *claimed])
    return [nodes[number] for number in numbers if number < len(nodes)]


def _metadata(answered: Answered) -> dict[str, Any]:
    """Return the metadata of a LlamaIndex response: each node's, as core has it, and the account."""
    nodes: Mapping[str, Any] = {node.node.node_id: node.node.metadata for node in answered.retrieval.nodes}
    return {**nodes, PROVENANCE_KEY: answered.response().to_dict()}


def _llama_response(answered: Answered) -> Response | PydanticResponse:
    """Return a LlamaIndex response: its text, its nodes, and the account in its metadata."""
    nodes, metadata = answered.retrieval.nodes, _metadata(answered)
    if answered.synthesis.output is not None:
        return PydanticResponse(answered.synthesis.output, source_nodes=nodes, metadata=metadata)
    return AgenticResponse(answered.text, source_nodes=nodes, metadata=metadata)
