"""The way of an ``AnswerQuery``: asked, classified, searched, gated, written, checked, kept.

    policy ─▶ retrieval, classified ─▶ gate ─▶ synthesis ─▶ grounding ─▶ policy ─▶ related questions ─▶ session

Wherever it ends early, steps and references so far are kept, the state is SUCCEEDED, and ``skipped_reasons`` say why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from llama_index_agentic_kb._aio import deadline_after, earliest, emit, emitting
from llama_index_agentic_kb.answering.end_user import end_user_part
from llama_index_agentic_kb.answering.given_results import given_request, given_retriever
from llama_index_agentic_kb.answering.objections import objections
from llama_index_agentic_kb.answering.pieces import Pieces
from llama_index_agentic_kb.answering.policy import AnswerPolicy, Safety, check, rate
from llama_index_agentic_kb.answering.query import check_sizes, classification_of, instructions_of, request_of
from llama_index_agentic_kb.answering.references import answer_references
from llama_index_agentic_kb.answering.related import RelatedQuestions
from llama_index_agentic_kb.answering.resource import make_answer, unanswered_parts
from llama_index_agentic_kb.answering.steps import answer_steps
from llama_index_agentic_kb.answering.turns import Turns, session_owner
from llama_index_agentic_kb.errors import DeadlineExceededError, InvalidRequestError
from llama_index_agentic_kb.grounding import Markers
from llama_index_agentic_kb.grounding.settings import DEFAULT_GROUNDING, Grounding
from llama_index_agentic_kb.guard.spotlighting import Spotlight
from llama_index_agentic_kb.query_engine import WITHHELD, AgenticQueryEngine, Answered, partial_of, synthesized
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import ActivityRecord, MissingPart, Outcome, SubQueryOrigin
from llama_index_agentic_kb.schema.answer import (
    AnswerReference,
    AnswerState,
    AnswerStep,
    SafetyRating,
    SkippedReason,
)
from llama_index_agentic_kb.schema.answer_query import (
    AnswerQuery,
    ReferencesPiece,
    StepsPiece,
    TextPiece,
)
from llama_index_agentic_kb.schema.response import AnswerResponse
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.synthesizers import Synthesis

__all__ = ["AnswerEngine"]

LEAST_SECONDS: Final = 0.01
"""Time that is left at least: a request without any is told as late, and not as one that can't be read."""

RELATED_SECONDS: Final = 10.0
"""Time that related questions may take, within the request's own."""

_AGAINST_POLICY: Final = {SkippedReason.CUSTOMER_POLICY_VIOLATION, SkippedReason.POTENTIAL_POLICY_VIOLATION}

Observer = Callable[[ActivityRecord], None] | None


@dataclass(slots=True)
class _Way:
    """What one query has come to so far."""

    query: AnswerQuery
    created_at: datetime
    text: str = WITHHELD
    state: AnswerState = AnswerState.SUCCEEDED
    instructions: str = ""
    deadline: float | None = None
    told: bool = False
    """Whether text was streamed."""
    retrieval: Retrieval | None = None
    answered: Answered | None = None
    references: dict[str, AnswerReference] = field(default_factory=dict)
    steps: list[AnswerStep] = field(default_factory=list)
    skipped: list[SkippedReason] = field(default_factory=list)
    related: list[str] = field(default_factory=list)
    ratings: list[SafetyRating] = field(default_factory=list)
    missing: list[MissingPart] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def skip(self, *reasons: SkippedReason) -> None:
        """Give no answer."""
        self.skipped += reasons
        self.text = WITHHELD


class AnswerEngine:
    """Answers queries with ``Answer`` resources.

    Args:
        engine: Retrieves and answers; its synthesizer is one of ours that a model writes for.
        policy: The application's own rules; None has none.
        sessions: Keeps turns; None keeps none, and refuses queries that name a session.

    Raises:
        InvalidRequestError: ``engine`` has no language model.
    """

    def __init__(
        self, engine: AgenticQueryEngine, policy: AnswerPolicy | None = None, sessions: SessionStore | None = None
    ) -> None:
        if engine.retriever.llm is None:
            raise InvalidRequestError("answer: it needs a language model; pass llm= or set OPENAI_API_KEY")
        self.engine = engine
        self.policy = policy or AnswerPolicy()
        self.sessions = sessions

    async def answer(self, query: AnswerQuery, *, observer: Observer = None, streaming: bool = False) -> AnswerResponse:
        """Go the whole way of a query.

        Args:
            query: What is asked, and how it is answered.
            observer: Called with each activity record when it is opened and when it is closed.
            streaming: Whether pieces are emitted, in lists: steps, references, text and citations, the whole response.

        Raises:
            InvalidRequestError: The query can't be carried out as asked.
            DeniedError: There is no principal where one is needed, or the one may search no source.
            RetrievalError: No selected source could answer.
            SynthesisError: The language model failed while answering.
            NotFoundError: The session is not there, or is another's.
        """
        way = _Way(query, datetime.now(UTC))
        way.instructions = instructions_of(query)  # before anything is searched: it may be refused
        check_sizes(query)
        owner = session_owner(self.engine.retriever.resolve_principal(query.request.principal))
        turns = Turns(self.sessions, query, owner)
        way.deadline = self._deadline(query)
        history = await turns.history(way.deadline)
        objection = await check(self.policy.question, query.question, "question check", self._hook_deadline(way))
        if objection is None:
            await self._search(way, history, observer)
            await self._check_plan(way, told_before=bool(history))
            if streaming:
                await emit([StepsPiece(steps=way.steps), ReferencesPiece(references=list(way.references.values()))])
            await self._write(way, streaming=streaming)
        else:
            way.skip(SkippedReason.CUSTOMER_POLICY_VIOLATION)
            way.warnings.append(f"the question is not answered: {objection}")
        if streaming and way.skipped and not way.told:
            await emit([TextPiece(text=way.text)])
        response = await self._kept(way, turns)
        if streaming:
            await emit([response])
        return response

    # -- searching -------------------------------------------------------------------------------------------------

    async def _search(self, way: _Way, history: Sequence[Any], observer: Observer) -> None:
        query = way.query
        request, warnings = request_of(query, history, self.engine.retriever)
        way.warnings += warnings
        engine = self.engine
        if query.search_results is not None:
            given = given_retriever(query.search_results, engine.retriever)
            engine = AgenticQueryEngine(given, engine.synthesizer, callback_manager=engine.callback_manager)
            request = given_request(query.model_copy(update={"request": request}))
        if way.deadline is not None:  # what came before is taken off
            left = max(way.deadline - time.monotonic(), LEAST_SECONDS)
            request = request.model_copy(update={"max_runtime_in_seconds": left})
        spec = classification_of(query, self.policy)
        retrieval = await engine.retrieved(request, observer=observer, classification=spec)
        way.retrieval = retrieval
        way.references = answer_references(retrieval.nodes, retrieval.selected)
        way.steps = answer_steps(
            retrieval.plan,
            retrieval.log.records,
            retrieval.nodes,
            retrieval.missing,
            selected=retrieval.selected,
            mode=query.result_mode,
        )
        way.missing += unanswered_parts(retrieval.plan, retrieval.findings, retrieval.log.records)
        if spec is not None and not any("not classified" in warning for warning in retrieval.plan.warnings):
            judged = retrieval.plan.classifications is not None
            way.warnings += [] if judged else ["the question was not classified: no plan was made of it"]
        way.warnings += [warning for warning in retrieval.plan.warnings if "not classified" in warning]
        way.skip(*objections(query, self.policy, retrieval))

    async def _check_plan(self, way: _Way, *, told_before: bool) -> None:
        """Ask the policy of what was planned, too, where it may be of what was said before ("Answer my last one.")."""
        retrieval = way.retrieval
        if self.policy.question is None or retrieval is None or not told_before or way.skipped:
            return
        planned = {one.query for one in retrieval.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION}
        for query in sorted(planned):
            objection = await check(self.policy.question, query, "question check", self._hook_deadline(way))
            if objection is not None:
                way.skip(SkippedReason.CUSTOMER_POLICY_VIOLATION)
                way.warnings.append(f"the question is not answered: {objection}")
                return

    # -- writing ---------------------------------------------------------------------------------------------------

    async def _write(self, way: _Way, *, streaming: bool) -> None:
        retrieval = way.retrieval
        if retrieval is None or way.skipped:
            return
        grounding = self._grounding(way.query)
        held = grounding.may_change or self.policy.answer is not None or way.query.safety
        body = self._synthesized(way, retrieval, streaming=streaming and not held)
        try:
            synthesis = await body
            partial = True
        except DeadlineExceededError as error:
            synthesis = await partial_of(self.engine.synthesizer, retrieval, error)
            synthesis.text, partial = synthesis.text.rstrip(), bool(error.partial)
            way.state = AnswerState.FAILED  # never by its text alone
        if not partial:  # extracts are no answer
            way.answered = Answered(retrieval, synthesis)
            way.warnings.append("the answer was not there by its deadline")
            return
        way.answered = await self.engine.grounded(retrieval, synthesis, grounding)
        await self._judge(way, way.answered)
        if not way.skipped and way.query.related_questions:
            await self._relate(way, retrieval)
        if streaming and held and not way.skipped:
            way.told = True
            await emit([TextPiece(text=way.text)])

    def _synthesized(self, way: _Way, retrieval: Retrieval, *, streaming: bool) -> Coroutine[Any, Any, Synthesis]:
        query, chunks = way.query, way.query.end_user_chunks

        def aside(spotlight: Spotlight) -> str:
            return end_user_part(chunks, spotlight)

        body = synthesized(
            self.engine.synthesizer,
            retrieval,
            streaming=streaming,
            instructions=way.instructions,
            aside=aside if chunks else None,
        )
        if not streaming:
            return body
        pieces = Pieces(list(way.references), cite=query.include_citations)
        way.told = True
        return emitting(body, pieces.feed, pieces.close)

    def _grounding(self, query: AnswerQuery) -> Grounding:
        """Give how the answer is checked: markers are data here, in citations, and not in the text."""
        own = self.engine.grounding or DEFAULT_GROUNDING
        return replace(own, markers=Markers.STRIP, filtering=query.filtering_level or own.filtering)

    async def _judge(self, way: _Way, answered: Answered) -> None:
        """Take an answer, or withhold one that is grounded too badly or is against a policy."""
        way.text = answered.text
        way.skipped += answered.skipped
        text = answered.synthesis.text if answered.grounded is None else answered.grounded.text
        way.warnings += [] if answered.grounded is None else answered.grounded.ledger.warnings
        deadline = self._hook_deadline(way)
        objection = await check(self.policy.answer, text, "answer check", deadline)
        if objection is not None:
            way.skip(SkippedReason.CUSTOMER_POLICY_VIOLATION)
            way.warnings.append(f"the answer is withheld: {objection}")
        safety: Safety = await rate(self.policy.safety, way.query, text, deadline)
        way.ratings = safety.ratings
        way.warnings += [safety.warning] if safety.warning else []
        if safety.blocks:
            way.skip(SkippedReason.POTENTIAL_POLICY_VIOLATION)

    async def _relate(self, way: _Way, retrieval: Retrieval) -> None:
        model = getattr(self.engine.synthesizer, "model", None)
        if model is None:
            return
        asker = RelatedQuestions(model, spotlighting=self.engine.retriever.options.spotlighting)
        deadline = earliest(retrieval.budget.check_deadline, deadline_after(RELATED_SECONDS))
        shown = [node for number, node in enumerate(retrieval.nodes) if str(number) in way.references]
        related = await asker.ask(way.query.question, shown, answer=way.text, deadline=deadline)
        way.related = related.questions
        way.warnings += related.warnings

    def _deadline(self, query: AnswerQuery) -> float | None:
        return deadline_after(query.request.max_runtime_in_seconds or self.engine.retriever.max_runtime_in_seconds)

    def _hook_deadline(self, way: _Way) -> float | None:
        return earliest(way.deadline, deadline_after(self.policy.seconds))

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _kept(self, way: _Way, turns: Turns) -> AnswerResponse:
        """Put the answer together, and keep it as a turn where there is a session."""
        retrieval, answered = way.retrieval, way.answered
        answer = make_answer(
            way.query,
            way.text,
            references=way.references,
            steps=way.steps,
            ledger=answered.grounded.ledger if answered is not None and answered.grounded is not None else None,
            related_questions=way.related,
            classifications=None if retrieval is None else retrieval.plan.classifications,
            skipped_reasons=way.skipped,
            safety_ratings=way.ratings,
            created_at=way.created_at,
            completed_at=datetime.now(UTC),
            state=way.state,
        )
        response = AnswerResponse(answer=answer, missing=way.missing, warnings=way.warnings)
        if retrieval is not None:
            withheld = answered is None or _AGAINST_POLICY.intersection(way.skipped)  # then nobody is told
            whole = answered if answered is not None and not withheld else Answered(retrieval, Synthesis(text=""))
            whole.skipped = way.skipped
            response.account = whole.response(include_activity=way.query.request.include_activity)
            response.missing += retrieval.missing
        if way.state is AnswerState.FAILED:
            return response
        try:
            response.answer, response.session = await turns.keep(answer)
        except Exception as error:  # noqa: BLE001 (the answer is there: it is not lost to its keeping)
            told = turns.failure(error)
            response.warnings.append(told)
            response.missing.append(MissingPart(what="session", outcome=Outcome.ERROR, reason=told))
        return response
