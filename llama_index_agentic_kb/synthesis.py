"""The stages after retrieval: an answer is written, checked against its evidence, or replaced if it failed; results."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, Response, StreamingResponse
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_instrumentation import get_dispatcher

from llama_index_agentic_kb._aio import Call, deadline_after, earliest, emit, read_ahead
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb._types import JsonMapping, JsonObject, Work
from llama_index_agentic_kb.errors import DeadlineExceededError, SynthesisError
from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY, provenance
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, cited_ids, strip_markers
from llama_index_agentic_kb.grounding.settings import Grounding, withheld_text
from llama_index_agentic_kb.guard.failures import is_transient
from llama_index_agentic_kb.guard.spotlighting import Spotlight
from llama_index_agentic_kb.llm import CUT_SHORT, billed, metered, model_name, recorded_calls
from llama_index_agentic_kb.planning.findings import chain_lines
from llama_index_agentic_kb.prompts import HISTORY_CHARACTERS, HISTORY_MESSAGES, format_question, shortened
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import (
    AgenticReasoningActivity,
    Message,
    MissingPart,
    ModelAnswerSynthesisActivity,
    ModelInfo,
    Outcome,
    RetrievalResponse,
    SkippedReason,
    SubQueryOrigin,
)
from llama_index_agentic_kb.schema._model import Shown
from llama_index_agentic_kb.schema.grounding import ClaimFlag, ConflictingValue, GroundingLedger, Support, Verdict
from llama_index_agentic_kb.synthesizers import AgenticSynthesizer, Synthesis
from llama_index_agentic_kb.synthesizers.modes import Accumulate, ExtractiveData

if TYPE_CHECKING:
    from llama_index_agentic_kb.grounding.ledger import GroundingSource

dispatcher = get_dispatcher(__name__)

EXTRACTING_SECONDS: Final = 0.3  # seconds allowed for building extracted data after the answer's own time has expired

BESIDE_PROOF: Final = 3  # passages beside the proof in the answer's prompt if the proof was found sufficient

# Metadata keys of a document's date; the first one present is used.
_DATES: Final = ("date", "published", "published_at", "publication_date", "last_modified_date", "creation_date")
_MAX_DATE: Final = 40


def _shown(retrieval: Retrieval) -> set[int] | None:
    """Return the reference ids of the proof, which was found sufficient, and of the best others; None means all.

    The best of others are those that the last steps found, then those first in the evidence.
    """
    marks = [provenance(node) or {} for node in retrieval.nodes]
    if len({one["rank"] for mark in marks for one in mark.get("proof", [])}) < len(retrieval.outcome.proof):
        return None  # a part of the proof was left out
    planned = [one for one in retrieval.outcome.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION]
    needed = {parent for one in planned for parent in one.depends_on}
    last = {one.id for one in planned if (one.part_of or one.id) not in needed}  # they ask for what the question asks

    def rank(ref: int) -> float:
        return min((one["rank"] for one in marks[ref].get("searches", []) if one["sub_query"] in last), default=inf)

    others = sorted((ref for ref, mark in enumerate(marks) if not mark.get("proof")), key=rank)
    return {*range(len(marks))} - {*others[BESIDE_PROOF:]}


async def synthesize(
    synthesizer: BaseSynthesizer,
    retrieval: Retrieval,
    *,
    streaming: bool = False,
    aside: Callable[[Spotlight], str] | None = None,
) -> Synthesis:
    """Write the answer and record it; LlamaIndex's synthesizers get no instructions."""
    if retrieval.reply:  # a question of a tool, or what became of its call
        if streaming:
            await emit(retrieval.reply)
        return Synthesis(retrieval.reply, is_extract=True)
    if not isinstance(synthesizer, AgenticSynthesizer):
        with recorded_calls(retrieval.log, "answer"), metered(synthesizer, only_core=True) as counted:
            return await _foreign(counted, retrieval)
    question, history, outcome = retrieval.scope.question, retrieval.scope.history, retrieval.outcome
    chain = chain_lines(outcome.chain, retrieval.nodes) if outcome.chain and synthesizer.needs_llm else ()
    has_proof = outcome.sufficient and bool(outcome.proof) and not isinstance(synthesizer, Accumulate)
    body = synthesizer.synthesis(
        QueryBundle(format_question(question, history, chain) if history or chain else question),
        retrieval.nodes,
        # Modes without a model take milliseconds: they run even if a source used up the time.
        deadline=retrieval.budget.answer_deadline if synthesizer.needs_llm else None,
        max_output_tokens=retrieval.budget.output_tokens,
        sources=retrieval.sources,
        streaming=streaming,
        instructions=retrieval.scope.answer_instructions,
        aside=aside,
        shown=_shown(retrieval) if has_proof and synthesizer.needs_llm else None,
    )
    dispatcher.event(SynthesizeStartEvent(query=question))
    if synthesizer.needs_llm:
        synthesis = await _recorded(body, synthesizer, retrieval)
    else:
        synthesis = await body
        _note_extracts(retrieval, synthesis)
    response = Response(synthesis.text, source_nodes=retrieval.nodes)
    dispatcher.event(SynthesizeEndEvent(query=question, response=response))
    return synthesis


async def _recorded(body: Work[Synthesis], synthesizer: AgenticSynthesizer, retrieval: Retrieval) -> Synthesis:
    """Write an answer with the model, in an activity record of its own."""
    question, history, log = retrieval.scope.question, retrieval.scope.history, retrieval.log
    name = model_name(synthesizer.model.llm)
    opened = log.record(
        ModelAnswerSynthesisActivity,
        CBEventType.SYNTHESIZE,
        {EventPayload.QUERY_STR: question},
        model=None if name is None else ModelInfo(model_name=name),
        response_mode=synthesizer.mode,
    )
    with opened as record, billed() as bill:
        try:
            synthesis = await body
        except Exception as error:
            ended = Outcome.TIMEOUT if isinstance(error, DeadlineExceededError) else Outcome.ERROR
            spent = {"input_tokens": bill.input_tokens, "output_tokens": bill.output_tokens, "calls": bill.calls}
            log.fail(record, error, name, outcome=ended, **spent)
            raise
        if history and (note := shortened(history, HISTORY_MESSAGES, HISTORY_CHARACTERS)):
            synthesis.warnings.append(f"in the answer's prompt, {note}")
        log.close(
            record,
            {EventPayload.RESPONSE: Response(synthesis.text, source_nodes=retrieval.nodes)},
            outcome=Outcome.OK if retrieval.nodes else Outcome.EMPTY,
            input_tokens=bill.input_tokens,
            output_tokens=bill.output_tokens,
            calls=bill.calls,
            dropped_by_budget=synthesis.dropped,
            links_removed=synthesis.links_removed,
            warning="; ".join(synthesis.warnings) or None,
        )
    if synthesis.cut:
        reason = f"{CUT_SHORT}: the answer may end too early"
        retrieval.missing.append(MissingPart(what="answer", outcome=Outcome.ERROR, reason=reason))
    return synthesis


def _note_extracts(retrieval: Retrieval, synthesis: Synthesis) -> None:
    """Record what extracted data left out, and its warnings."""
    reasoning = retrieval.log.last(AgenticReasoningActivity)
    if reasoning is not None and (synthesis.dropped or synthesis.warnings):
        warnings = [*filter(None, [reasoning.warning]), *synthesis.warnings]
        dropped = (reasoning.dropped_by_budget or 0) + synthesis.dropped
        retrieval.log.amend(reasoning, dropped_by_budget=dropped or None, warning="; ".join(warnings) or None)
    if synthesis.dropped:
        reason = f"{synthesis.dropped} passages did not fit into the output's budget"
        retrieval.missing.append(MissingPart(what="extracts", outcome=Outcome.SKIPPED, reason=reason))


async def _foreign(synthesizer: BaseSynthesizer, retrieval: Retrieval) -> Synthesis:
    """Answer with one of LlamaIndex's synthesizers, and emit the tokens of its stream."""
    if retrieval.scope.answer_instructions:
        reason = f"{type(synthesizer).__name__} takes no instructions; put them into its prompt"
        retrieval.missing.append(MissingPart(what="instructions", outcome=Outcome.SKIPPED, reason=reason))
    query = QueryBundle(retrieval.scope.question)
    response = await Call(
        sync=partial(synthesizer.synthesize, query, retrieval.nodes),
        native=partial(synthesizer.asynthesize, query, retrieval.nodes),
        deadline=retrieval.budget.answer_deadline,
        what=f"synthesizer {type(synthesizer).__name__}",
    )
    if isinstance(response, StreamingResponse):
        stream = partial(read_ahead, sync=partial(iter, response.response_gen))
    elif isinstance(response, AsyncStreamingResponse):
        tokens = response.async_response_gen()

        async def read() -> AsyncGenerator[str, None]:
            return tokens

        stream = partial(read_ahead, native=read)
    else:
        await emit(str(response))
        return Synthesis(str(response), response.response if isinstance(response, PydanticResponse) else None)
    text = ""
    async with aclosing(stream(deadline=retrieval.budget.deadline, what="synthesizer's stream")) as pieces:
        async for token in pieces:
            text += str(token)
            await emit(token)
    return Synthesis(text)


# -- an answer that failed ---------------------------------------------------------------------------------------------


async def replacement(
    synthesizer: BaseSynthesizer, retrieval: Retrieval, error: DeadlineExceededError | SynthesisError
) -> Synthesis:
    """Return what replaces a failed answer: its partial text, or else the evidence as extracted data.

    The error is raised again for structured output, or if neither a deadline nor an unavailable server caused it.
    """
    late = isinstance(error, DeadlineExceededError)
    if makes_objects(synthesizer) or not (late or is_transient(error)):
        raise error
    if error.partial:
        synthesis, given = Synthesis(error.partial), "what there was of it is given"
    else:
        try:
            synthesis = await ExtractiveData().synthesis(
                QueryBundle(retrieval.scope.question),
                retrieval.nodes,
                deadline=deadline_after(EXTRACTING_SECONDS) if late else retrieval.budget.check_deadline,
                max_output_tokens=retrieval.budget.output_tokens,
                sources=retrieval.sources,
            )
            given = "the evidence is given as extracted data"
        except DeadlineExceededError:  # the evidence is very long
            synthesis, given = Synthesis(""), "the references name the evidence"
        synthesis.is_extract = True
    missing = failed_answer(error, given)
    synthesis.lacking = missing.reason
    retrieval.missing.append(missing)
    return synthesis


def makes_objects(synthesizer: BaseSynthesizer) -> bool:
    """Return whether answers are objects (``output_cls``)."""
    return getattr(synthesizer, "_output_cls", None) is not None  # core's name; we use it too


def failed_answer(error: DeadlineExceededError | SynthesisError, instead: str) -> MissingPart:
    """Return the missing part to report for an answer that failed, with what there is instead."""
    late = isinstance(error, DeadlineExceededError)
    why = "it was not done by its deadline" if late else error_message(error)
    outcome = Outcome.TIMEOUT if late else Outcome.ERROR
    return MissingPart(what="answer", outcome=outcome, reason=f"{why}: {instead}")


# -- the check of an answer, and the result of a question --------------------------------------------------------------


async def checked(
    retrieval: Retrieval, synthesis: Synthesis, settings: Grounding | None, synthesizer: BaseSynthesizer
) -> Answered:
    """Check the answer against the evidence, and record why an answer is missing or withheld.

    The text of the synthesis is replaced by the checked one; extracted data is not checked. If markers are renumbered,
    the result's nodes are in order of first citation.
    """
    answered = Answered(retrieval, synthesis)
    if synthesis.is_extract:
        return answered
    if not retrieval.nodes:
        answered.skipped = [SkippedReason.NO_RELEVANT_CONTENT]
        return answered
    if settings is not None and synthesis.output is None:
        if settings.markers == Markers.RENUMBER:  # in order of appearance, and so the nodes
            nodes, answered.retrieval = retrieval.nodes, replace(retrieval)
            markers = MarkerFilter(range(len(nodes)), Markers.RENUMBER)
            synthesis.text = markers.feed(synthesis.text, final=True)
            rest = sorted(set(range(len(nodes))) - set(markers.cited))
            answered.retrieval.arrange([nodes[number] for number in (*markers.cited, *rest)])
        await _check(answered, settings, synthesizer)
    if not answered.skipped and not synthesis.answerable:
        answered.skipped.append(SkippedReason.UNHELPFUL_ANSWER)
    return answered


async def _check(answered: Answered, settings: Grounding, synthesizer: BaseSynthesizer) -> None:
    """Check an answer, repair it if so configured, and set its text, its ledger and whether it is to be withheld."""
    from llama_index_agentic_kb.grounding.ledger import ground  # noqa: PLC0415 (loads the scorers)
    from llama_index_agentic_kb.grounding.repair import is_low_grounded, repair  # noqa: PLC0415 (same)

    retrieval, text = answered.retrieval, answered.synthesis.text
    sources, scorer, threshold = _grounding_sources(retrieval), settings.scorer, settings.threshold
    deadline = earliest(retrieval.budget.check_deadline, deadline_after(settings.seconds))
    with recorded_calls(retrieval.log, "check"):
        ledger = await ground(text, sources, scorer, threshold=threshold, deadline=deadline)
    if settings.repair is not None:
        with recorded_calls(retrieval.log, "repair"):
            text, ledger = await repair(
                text,
                ledger,
                sources,
                model=getattr(synthesizer, "model", None) if settings.repair == "rewrite" else None,
                scorer=scorer,
                spotlighting=getattr(synthesizer, "spotlighting", None),
                threshold=threshold,
                deadline=deadline,
            )
    is_emptied = bool(ledger.changes) and not ledger.claims  # by the repair
    if is_emptied or (settings.filtering is not None and is_low_grounded(ledger, settings.filtering)):
        answered.skipped.append(SkippedReason.LOW_GROUNDED_ANSWER)
    if settings.markers == Markers.STRIP:
        text, ledger = strip_markers(text, ledger)
    answered.synthesis.text, answered.ledger = text, ledger
    scored = supported = unscored = 0
    for claim in ledger.claims:
        scored += claim.score is not None
        supported += claim.verdict is Verdict.SUPPORTED
        unscored += ClaimFlag.NOT_SCORED in claim.flags
    record = retrieval.log.last(ModelAnswerSynthesisActivity, purpose="answer")
    if record is not None:
        counts = {"grounding_score": ledger.grounding_score, "claims": scored, "supported_claims": supported}
        warnings = [*filter(None, [record.warning]), *map(one_line, ledger.warnings)]
        retrieval.log.amend(record, **counts, warning="; ".join(warnings) or None)
    if unscored and settings.may_change:
        reason = "; ".join(ledger.warnings) or "some claims were not checked"
        retrieval.missing.append(MissingPart(what="grounding", outcome=Outcome.ERROR, reason=reason))


def _grounding_sources(retrieval: Retrieval) -> list[GroundingSource]:
    from llama_index_agentic_kb.grounding.ledger import GroundingSource  # noqa: PLC0415 (loads the scorers)

    titles, sources = dict(map(attrgetter("id", "title"), retrieval.references)), []
    for position, one in enumerate(retrieval.nodes):
        text = getattr(one.node, "text", None) or ""
        date = next(filter(None, map(one.node.metadata.get, _DATES)), None)
        sources.append(
            GroundingSource(
                text,
                titles.get(str(position), ""),
                reference_id=str(position),
                node_id=one.node.node_id,
                date=None if date is None else one_line(str(date), _MAX_DATE),
            )
        )
    return sources


def _shown_ledger(ledger: GroundingLedger, texts: Mapping[str, bool]) -> GroundingLedger:
    """Return a ledger with the references of ``texts`` only, and the texts of those whose value is true."""

    def bare(support: Support) -> Support:
        return support if texts[support.reference_id] else support.model_copy(update={"quote": ""})

    conflicts = []
    for conflict in ledger.conflicts:
        if all(side.support.reference_id in texts for side in conflict.values):
            values = [
                side if texts[side.support.reference_id] else ConflictingValue(value="", support=bare(side.support))
                for side in conflict.values
            ]
            conflicts.append(conflict.model_copy(update={"values": values}))
    disputed = {conflict.claim for conflict in conflicts}
    claims = []
    for number, claim in enumerate(ledger.claims):
        changed = {
            "supports": [bare(one) for one in claim.supports if one.reference_id in texts],
            "cited": list(filter(texts.__contains__, claim.cited)),
            "misattributed": list(filter(texts.__contains__, claim.misattributed)),
            "flags": [one for one in claim.flags if one is not ClaimFlag.CONFLICTING_SOURCES or number in disputed],
        }
        claims.append(claim.model_copy(update=changed))
    return ledger.model_copy(update={"claims": claims, "conflicts": conflicts})


@dataclass(slots=True)
class Answered:
    """The result of a question."""

    retrieval: Retrieval
    synthesis: Synthesis  # as the check left it
    ledger: GroundingLedger | None = None  # None if the answer was not checked
    skipped: list[SkippedReason] = field(default_factory=list)  # why the answer is missing or withheld

    @property
    def text(self) -> str:
        """The answer text, repaired if so configured, or the text that replaces a withheld answer."""
        withheld = SkippedReason.LOW_GROUNDED_ANSWER
        if withheld in self.skipped:
            return withheld_text([withheld], self.retrieval.scope.question)
        return self.synthesis.text

    def response(self, *, include_activity: bool = True) -> RetrievalResponse:
        """Return the ``RetrievalResponse``."""
        retrieval, text, ledger = self.retrieval, self.text, self.ledger
        texts = {one.id: one.source_data is not None for one in retrieval.references}
        if ledger is not None and sum(texts.values()) < len(retrieval.nodes):  # the response leaves some out
            ledger = _shown_ledger(ledger, texts)
        return RetrievalResponse(
            status_code=206 if any(map(attrgetter("outcome.failed"), retrieval.missing)) else 200,
            response=[Message.model_validate({"role": "assistant", "content": text})] if text else [],
            activity=list(retrieval.log.records) if include_activity else None,
            references=retrieval.references,
            missing=retrieval.missing,
            plan=retrieval.outcome.plan,
            grounding=ledger,
            skipped_reasons=self.skipped,
            dialogue=retrieval.dialogue,
            scope_state=retrieval.scope_state,
        )

    def metadata(self) -> JsonObject:
        """Return the metadata of a LlamaIndex response: each node's by node id, and the JSON ``RetrievalResponse``."""
        nodes = {node.node.node_id: node.node.metadata for node in self.retrieval.nodes}
        return {**nodes, PROVENANCE_KEY: self.response().to_dict()}

    def llama_response(self) -> Response | PydanticResponse:
        """Return a LlamaIndex response with the text, the nodes, and ``metadata()``."""
        nodes, metadata = self.retrieval.nodes, self.metadata()
        if self.synthesis.output is not None:
            return PydanticResponse(self.synthesis.output, source_nodes=nodes, metadata=metadata)
        return AgenticResponse(self.text, source_nodes=nodes, metadata=metadata)


def readable(text: str) -> str:
    """Return extracted data as plain text with ``[ref_id:N]`` markers; any other text unchanged, none as a notice."""
    if not text:
        return "The answer was not there in time. The sources are listed."
    try:
        items = json.loads(text) if text.startswith("[") else None
        texts = [f"{item['title']} [ref_id:{item['ref_id']}]\n{item['content']}" for item in items or ()]
    except (ValueError, TypeError, KeyError):
        return text
    return text if items is None else "\n\n".join(texts) or "Nothing was found."


class Accounted(Shown):
    """Mixin of our LlamaIndex responses that reads the ``RetrievalResponse`` from their metadata."""

    source_nodes: list[NodeWithScore]
    metadata: JsonObject | None

    @property
    def account(self) -> RetrievalResponse:
        """The ``RetrievalResponse``: answer, references, grounding, activity, plan; complete once a stream was read."""
        return RetrievalResponse.parse((self.metadata or {}).get(PROVENANCE_KEY, {}))

    @property
    def cited_nodes(self) -> list[NodeWithScore]:
        """The ``source_nodes`` that the answer cites, in order of first citation; complete once a stream was read."""
        account = self.account
        if SkippedReason.LOW_GROUNDED_ANSWER in account.skipped_reasons:
            return []
        claimed = [] if account.grounding is None else map(int, account.grounding.cited)
        numbers = dict.fromkeys([*cited_ids(account.text), *claimed])  # headings and lead-ins are not claims
        return [self.source_nodes[number] for number in numbers if number < len(self.source_nodes)]

    def _shown(self) -> JsonMapping:
        return self.account.to_dict()


class AgenticResponse(Accounted, Response):
    """A LlamaIndex ``Response`` with the full ``RetrievalResponse`` (``account``) and an HTML view for notebooks."""


class AgenticStreamingResponse(Accounted, StreamingResponse):
    """A LlamaIndex ``StreamingResponse`` with the full ``RetrievalResponse`` (``account``)."""


class AgenticAsyncStreamingResponse(Accounted, AsyncStreamingResponse):
    """A LlamaIndex ``AsyncStreamingResponse``; its ``account`` is the full ``RetrievalResponse``."""
