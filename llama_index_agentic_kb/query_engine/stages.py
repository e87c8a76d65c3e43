"""The stages of a query's way after its retrieval: synthesis, what there is of it where it is late, grounding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, StreamingResponse
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle

from llama_index_agentic_kb._aio import END, Call, deadline_after, earliest, emit, open_stream
from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding import MarkerFilter, Markers
from llama_index_agentic_kb.grounding.grounded import GroundedText, ground_text
from llama_index_agentic_kb.grounding.settings import Grounding
from llama_index_agentic_kb.llm import CUT_SHORT
from llama_index_agentic_kb.prompts import format_question
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import (
    AgenticReasoningActivity,
    MissingPart,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    Outcome,
)
from llama_index_agentic_kb.schema.grounding import ClaimFlag, Verdict
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer, Synthesis
from llama_index_agentic_kb.synthesizers.late import what_arrived

__all__ = ["answer_missing", "arrived", "checked", "is_checked", "synthesized"]


def answer_missing(outcome: Outcome, reason: str) -> MissingPart:
    """Tell that the answer is not there, or not all of it."""
    return MissingPart(what="answer", outcome=outcome, reason=reason)


# -- synthesis -----------------------------------------------------------------------------------------------------


async def synthesized(
    synthesizer: BaseSynthesizer, retrieval: Retrieval, *, streaming: bool = False, **further: Any
) -> Synthesis:
    """Make the answer, with its record; what needs no model adds to the agent's record instead.

    Args:
        synthesizer: What answers.
        retrieval: The evidence.
        streaming: Whether deltas of the text are emitted.
        further: ``instructions`` and ``aside``, for a synthesizer of ours.
    """
    if not isinstance(synthesizer, AgenticSynthesizer):
        return await _foreign(synthesizer, retrieval)
    body = synthesizer.synthesis(
        QueryBundle(format_question(retrieval.scope.question, retrieval.scope.history)),
        retrieval.nodes,
        # What needs no model takes milliseconds: it is given also where a source took all the time.
        deadline=retrieval.budget.answer_deadline if synthesizer.needs_llm else None,
        max_output_tokens=retrieval.budget.output_tokens,
        sources={name: chosen.source for name, chosen in retrieval.selected.items()},
        streaming=streaming,
        **further,
    )
    if not synthesizer.needs_llm:
        return await _extracted(body, retrieval)
    return await _written(body, synthesizer, retrieval)


async def _extracted(body: Coroutine[Any, Any, Synthesis], retrieval: Retrieval) -> Synthesis:
    synthesis = await body
    reasoning = retrieval.log.last(AgenticReasoningActivity)
    if synthesis.dropped and reasoning is not None:
        retrieval.log.amend(reasoning, dropped_by_budget=(reasoning.dropped_by_budget or 0) + synthesis.dropped)
    if synthesis.warnings and reasoning is not None:
        warnings = [*filter(None, [reasoning.warning]), *synthesis.warnings]
        retrieval.log.amend(reasoning, warning="; ".join(warnings))
    if synthesis.dropped:
        told = f"{synthesis.dropped} passages did not fit into the output's budget"
        retrieval.missing.append(MissingPart(what="extracts", outcome=Outcome.SKIPPED, reason=told))
    return synthesis


async def _written(
    body: Coroutine[Any, Any, Synthesis], synthesizer: AgenticSynthesizer, retrieval: Retrieval
) -> Synthesis:
    name, log = synthesizer.model.name, retrieval.log
    record = log.open(
        ModelAnswerSynthesisActivity,
        CBEventType.SYNTHESIZE,
        {EventPayload.QUERY_STR: retrieval.scope.question},
        model=None if name is None else ModelInfo(model_name=name),
        response_mode=synthesizer.mode,
    )
    try:
        synthesis = await body
    except asyncio.CancelledError:
        log.cancel(record)
        raise
    except Exception as error:
        outcome = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
        log.fail(record, error, name, outcome=outcome)
        raise
    if synthesis.cut:
        retrieval.missing.append(answer_missing(Outcome.ERROR, f"{CUT_SHORT}: the answer may end too early"))
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


async def _foreign(synthesizer: BaseSynthesizer, retrieval: Retrieval) -> Synthesis:
    """Let a synthesizer of LlamaIndex's answer; it keeps no account."""
    query = QueryBundle(retrieval.scope.question)
    response = await Call(
        sync=partial(synthesizer.synthesize, query, retrieval.nodes),
        native=partial(synthesizer.asynthesize, query, retrieval.nodes),
        deadline=retrieval.budget.answer_deadline,
        what=f"synthesizer {type(synthesizer).__name__}",
    )
    if isinstance(response, (StreamingResponse, AsyncStreamingResponse)):
        return Synthesis(text=(await _tokens(response, retrieval.budget.deadline)))
    output = response.response if isinstance(response, PydanticResponse) else None
    text = str(response)
    await emit(text)
    return Synthesis(text=text, output=output)


async def _tokens(response: StreamingResponse | AsyncStreamingResponse, deadline: float | None) -> str:
    """Pass a stream of LlamaIndex's on, token by token, and give its text."""
    if isinstance(response, StreamingResponse):
        stream = open_stream(sync=partial(iter, response.response_gen), what="synthesizer's stream")
    else:
        tokens = response

        async def read() -> AsyncGenerator[str, None]:
            return tokens.async_response_gen()

        stream = open_stream(native=read, what="synthesizer's stream")
    text = ""
    while (token := (await stream.next(deadline=deadline))) is not END:
        text += token
        await emit(token)
    return text


async def arrived(synthesizer: BaseSynthesizer, retrieval: Retrieval, error: DeadlineExceededError) -> Synthesis:
    """Give what there is of an answer that did not come in time; a part of an object is none."""
    if getattr(synthesizer, "_output_cls", None) is not None:  # core's name; ours has it too
        raise error
    synthesis = await what_arrived(
        error,
        retrieval.scope.question,
        retrieval.nodes,
        max_output_tokens=retrieval.budget.output_tokens,
        sources={name: chosen.source for name, chosen in retrieval.selected.items()},
    )
    retrieval.missing.append(answer_missing(Outcome.TIMEOUT, synthesis.warnings[0]))
    return synthesis


# -- grounding -----------------------------------------------------------------------------------------------------


def is_checked(synthesizer: BaseSynthesizer, grounding: Grounding | None, *, asked: bool) -> bool:
    """Tell whether a synthesizer's answers are held against the evidence.

    Those of ours that a model writes from evidence are; those of LlamaIndex's, which bear no markers, where that was
    asked for.

    Args:
        synthesizer: What answers.
        grounding: How; None never.
        asked: Whether it is the user's wish, and not the default.
    """
    if grounding is None or getattr(synthesizer, "_output_cls", None) is not None:
        return False
    if isinstance(synthesizer, AgenticSynthesizer):
        return synthesizer.needs_llm and synthesizer.needs_nodes
    return asked


async def checked(
    synthesizer: BaseSynthesizer, retrieval: Retrieval, synthesis: Synthesis, grounding: Grounding
) -> GroundedText:
    """Hold an answer against the evidence, and tell in the synthesis' record what came of it.

    Where markers are renumbered, the retrieval's nodes are put into the order of the answer, in place.
    """
    text = synthesis.text
    if grounding.markers == Markers.RENUMBER:
        text = _renumbered(text, retrieval)
    budget = retrieval.budget
    grounded = await ground_text(
        text,
        retrieval.nodes,
        retrieval.references,
        grounding,
        model=getattr(synthesizer, "model", None),
        spotlighting=getattr(synthesizer, "spotlighting", None),
        deadline=earliest(budget.check_deadline, deadline_after(grounding.seconds)),
    )
    _tell(retrieval, grounded)
    if grounding.may_change and any(ClaimFlag.NOT_SCORED in claim.flags for claim in grounded.ledger.claims):
        told = "; ".join(grounded.ledger.warnings) or "some claims were not checked"
        retrieval.missing.append(MissingPart(what="grounding", outcome=Outcome.ERROR, reason=told))
    return grounded


def _renumbered(text: str, retrieval: Retrieval) -> str:
    """Number an answer's markers in order of appearance; the nodes are put into the same order, in place."""
    nodes = retrieval.nodes
    markers = MarkerFilter(range(len(nodes)), Markers.RENUMBER)
    shown = markers.feed(text) + markers.close()
    rest = sorted(set(range(len(nodes))) - set(markers.cited))
    nodes[:] = [nodes[number] for number in (*markers.cited, *rest)]
    return shown


def _tell(retrieval: Retrieval, grounded: GroundedText) -> None:
    record = retrieval.log.last(ModelAnswerSynthesisActivity)
    if record is None:
        return
    ledger = grounded.ledger
    checked_claims = [claim for claim in ledger.claims if claim.score is not None]
    warnings = [*filter(None, [record.warning]), *(one_line(warning) for warning in ledger.warnings)]
    retrieval.log.amend(
        record,
        grounding_score=ledger.grounding_score,
        claims=len(checked_claims),
        supported_claims=sum(claim.verdict is Verdict.SUPPORTED for claim in checked_claims),
        warning="; ".join(warnings) or None,
    )
