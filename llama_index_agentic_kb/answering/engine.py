"""The stages of answering an ``AnswerQuery``.

    policy ─▶ retrieval, classification ─▶ gate ─▶ synthesis ─▶ grounding ─▶ policy ─▶ related questions ─▶ session

If a stage withholds the answer, steps and references so far are kept, the state is SUCCEEDED, and ``skipped_reasons``
lists the reasons.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, deadline_after, earliest, emit
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.answering.policy import AnswerPolicy, check, classes_to_judge, rate, skip_reasons
from llama_index_agentic_kb.answering.results import (
    Pieces,
    answer_references,
    answer_steps,
    completed,
    supplied_request,
    supplied_retriever,
    unanswered_parts,
)
from llama_index_agentic_kb.answering.sessions import read_session, session_owner, states_of
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.grounding.citations import Markers, strip_markers
from llama_index_agentic_kb.grounding.claims import split_claims
from llama_index_agentic_kb.grounding.settings import Grounding, withheld_text
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, Spotlighting, draw
from llama_index_agentic_kb.guard.text import plain_value
from llama_index_agentic_kb.llm import LanguageModel, read_json, recorded_calls
from llama_index_agentic_kb.planning import ClassificationSpec
from llama_index_agentic_kb.prompts import RELATED_TEMPLATE, Passage, as_data, end_user_part, format_passages
from llama_index_agentic_kb.query_engine import AgenticQueryEngine, Observer, asked
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    Message,
    MissingPart,
    Outcome,
    QueryPlan,
    ReasoningEffort,
    RetrievalRequest,
    SubQueryOrigin,
    all_of,
)
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerQuery,
    AnswerReference,
    AnswerResponse,
    AnswerState,
    Citation,
    CitationPiece,
    DataStoreQuery,
    ReferencesPiece,
    StepsPiece,
    TextPiece,
)
from llama_index_agentic_kb.schema.grounding import GroundedClaim, GroundingLedger
from llama_index_agentic_kb.schema.request import SourceParams
from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.search.tokenizing import split_words
from llama_index_agentic_kb.synthesis import Answered
from llama_index_agentic_kb.synthesizers import Synthesis
from llama_index_agentic_kb.synthesizers.base import passages
from llama_index_agentic_kb.synthesizers.passages import fit

if TYPE_CHECKING:  # imports SQLAlchemy
    from llama_index_agentic_kb.store.sessions import SessionStore

MIN_SECONDS: Final = 0.01  # so that a request without time left is reported as late, not as invalid
RELATED_SECONDS: Final = 10.0  # maximum seconds for related questions, within the request's time limit
MAX_SUPPLIED: Final = 32_000  # total characters of the end user's own text chunks; Google allows 8,000 per chunk

_LANGUAGE_TAG: Final = re.compile(r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8}){0,5}")
"""The form of a BCP 47 language tag, so that no other text gets into a prompt."""

_AGAINST_POLICY: Final = {SkippedReason.CUSTOMER_POLICY_VIOLATION, SkippedReason.POTENTIAL_POLICY_VIOLATION}


async def answer_query(
    query: AnswerQuery,
    engine: AgenticQueryEngine,
    policy: AnswerPolicy,
    sessions: SessionStore | None,
    *,
    observer: Observer = None,
    streaming: bool = False,
) -> AnswerResponse:
    """Answer a query by an engine whose synthesizer needs a model; if streaming, emit lists of pieces."""
    retriever, request, instructions = engine.retriever, query.request, _instructions(query, engine.instructions)
    owner = session_owner(retriever.resolve_principal(request.principal))
    deadline = deadline_after(request.max_runtime_in_seconds or retriever.max_runtime_in_seconds)
    history, states = await read_session(sessions, query, owner, deadline)
    request = request.model_copy(update={"answer_instructions": instructions, **states})
    query = query.model_copy(update={"request": request})
    answering = _Answering(engine, policy, query, deadline, streaming=streaming)
    with asked(engine.callback_manager, query.question, announced=True) as tell:
        await answering.go(history, observer)
        if answering.answered is not None and (shown := answering.shown()) is not None:
            tell(shown.llama_response)
    response = answering.response()
    answer = response.answer
    if sessions is not None and query.session is not None and answer.state is not AnswerState.FAILED:
        try:  # without the request's deadline: what was answered is stored even if its time is used up
            turn = await sessions.aadd_turn(
                owner,
                query.session,
                query.question,
                answer,
                query_id=query.query_id,
                user_pseudo_id=query.user_pseudo_id,
                query_config=query.user_labels,
            )
            states = states_of(answering.retrieval)
            if states and not answer.is_kept_from_prompts:
                stored = {name: state.to_dict() for name, state in states.items()}
                await sessions.aset_states(owner, turn.session_id, stored)
            session = await sessions.aget(owner, turn.session_id)
            answer.id, response.session = turn.answer_id, session.model_copy(update={"turns": []})
        except Exception as error:  # noqa: BLE001 (an answer is returned even if it can't be stored)
            reason = f"the turn was not stored: {error_message(error)}"
            response.warnings.append(reason)
            response.missing.append(MissingPart(what="session", outcome=Outcome.ERROR, reason=reason))
    if streaming:
        await emit([*_further_citations(answering.streamed, answer.citations), response])
    return response


def _further_citations(streamed: Sequence[object], citations: Sequence[Citation]) -> list[CitationPiece]:
    """Return pieces for what the streamed ones lack of an answer's citations, such as references that checks found."""
    pieces = chain.from_iterable(listed for listed in streamed if isinstance(listed, list))
    sent = [piece.citation for piece in pieces if isinstance(piece, CitationPiece)]
    known = {(one.start, one.end, source) for one in sent for source in one.sources}
    made = []
    for one in citations:
        if lacking := [source for source in one.sources if (one.start, one.end, source) not in known]:
            made.append(CitationPiece(citation=Citation(start=one.start, end=one.end, sources=lacking)))
    return made


@dataclass(slots=True)
class _Answering:
    """The state of one running query, with its results so far."""

    engine: AgenticQueryEngine
    policy: AnswerPolicy
    query: AnswerQuery
    deadline: float | None
    streaming: bool
    made: AnswerResponse = field(default_factory=lambda: AnswerResponse(answer=Answer(created_at=datetime.now(UTC))))
    streamed: list[object] = field(default_factory=list)  # the pieces of text that were streamed
    retrieval: Retrieval | None = None
    answered: Answered | None = None
    unchecked: GroundingLedger | None = None  # the model's own citations, if the answer is not checked
    references: dict[str, AnswerReference] = field(default_factory=dict)

    def skip(self, *reasons: SkippedReason, warning: str = "") -> None:
        self.made.answer.skipped_reasons += reasons
        self.made.answer.text = self.notice
        self.made.warnings += filter(None, [warning])

    @property
    def skipped(self) -> list[SkippedReason]:
        """The reasons why there is no answer; empty if there is one."""
        return self.made.answer.skipped_reasons

    @property
    def notice(self) -> str:
        """The text in place of an answer that is withheld or failed."""
        return withheld_text(self.skipped, self.query.question, self.query.language)

    async def go(self, history: Sequence[Message], observer: Observer) -> None:
        """Run the stages until one withholds the answer; fill this object's fields and emit the pieces."""
        await self._check_question(self.query.question)
        if not self.skipped:
            retrieval = await self._search(history, observer)
            if history and self.policy.question is not None:
                # The plan may repeat an earlier question ("Answer my last one.").
                planned = (
                    one for one in retrieval.outcome.plan.sub_queries if one.origin is not SubQueryOrigin.QUESTION
                )
                for question in sorted({one.query for one in planned}):
                    if not self.skipped:
                        await self._check_question(question)
            if self.streaming:
                references = list(self.references.values())
                await emit([StepsPiece(steps=self.made.answer.steps), ReferencesPiece(references=references)])
            if not self.skipped:
                await self._write(retrieval)
        if self.streaming and not self.streamed:
            await emit([TextPiece(text=self.made.answer.text or self.notice)])

    async def _check_question(self, question: str) -> None:
        """Withhold the answer if the policy does not allow a question."""
        objection = await check(self.policy.question, question, "question check", self._hook_deadline())
        if objection is not None:
            self.skip(SkippedReason.CUSTOMER_POLICY_VIOLATION, warning=f"the question is not answered: {objection}")

    async def _search(self, history: Sequence[Message], observer: Observer) -> Retrieval:
        query, engine = self.query, self.engine
        request = _request_of(query, history, engine.retriever)
        self.made.warnings += [f"{name}: not supported; it was left out" for name in query.unsupported]
        if query.search_results is not None:
            supplied = supplied_retriever(query.search_results, engine.retriever)
            engine = AgenticQueryEngine(supplied, engine.synthesizer, callback_manager=engine.callback_manager)
            request = supplied_request(request, query.search_results)
        if self.deadline is not None:  # subtract the time already used
            left = max(self.deadline - time.monotonic(), MIN_SECONDS)
            request = request.model_copy(update={"max_runtime_in_seconds": left})
        types, labels = classes_to_judge(query), self.policy.labels
        spec = ClassificationSpec(types, labels) if types or labels else None
        retrieval = await engine.retrieved(request, observer=observer, classification=spec)
        self.retrieval = retrieval
        self.references = answer_references(retrieval)
        self.made.answer.steps = answer_steps(retrieval, query.result_mode)
        self.made.missing += unanswered_parts(retrieval)
        self.made.warnings += [] if spec is None else _unclassified(spec, retrieval.outcome.plan)
        if not retrieval.reply:
            reasons, warnings = skip_reasons(query, self.policy, retrieval)
            self.made.warnings += warnings
            self.skip(*reasons)
        return retrieval

    async def _write(self, retrieval: Retrieval) -> None:
        if retrieval.reply:  # a question of a tool, or what became of its call
            self.made.answer.text = retrieval.reply
            self.answered = Answered(retrieval, Synthesis(retrieval.reply))
            return
        query, grounding = self.query, self._grounding()
        held = (grounding is not None and grounding.may_change) or self.policy.answer is not None or query.safety
        pieces, chunks = Pieces(list(self.references), cite=query.include_citations), query.end_user_chunks
        shown = self.streamed if self.streaming and not held else None
        self.answered = await self.engine.written(
            retrieval,
            grounding,
            shown,
            (pieces.feed, pieces.close),
            aside=partial(end_user_part, chunks) if chunks else None,
        )
        synthesis = self.answered.synthesis
        if synthesis.lacking:
            self.made.answer.state = AnswerState.FAILED  # the text alone does not show it
            synthesis.text = synthesis.text if shown else synthesis.text.rstrip()
        if synthesis.is_extract:  # extracted data is not an answer
            self.made.warnings.append(f"there is no answer: {synthesis.lacking}")
            return
        if grounding is None:
            synthesis.text, self.unchecked = strip_markers(synthesis.text, _own_citations(synthesis.text))
        await self._judge(self.answered)
        if not self.skipped and query.related_questions:
            await self._relate(retrieval)

    def _grounding(self) -> Grounding | None:
        """Return the settings of the check, which removes markers, as citations are data; None if there is no check."""
        own, level = self.engine.grounding, self.query.filtering_level
        if own is None and level is None:
            return None
        own = own or Grounding()
        return replace(own, markers=Markers.STRIP, filtering=level or own.filtering)

    async def _relate(self, retrieval: Retrieval) -> None:
        """Set the related questions, if the synthesizer has a model."""
        query, model = self.query, getattr(self.engine.synthesizer, "model", None)
        if model is not None:
            with recorded_calls(retrieval.log, "relatedQuestions"):
                self.made.answer.related_questions, warnings = await related_questions(
                    model,
                    query.question,
                    [node for number, node in enumerate(retrieval.nodes) if str(number) in self.references],
                    answer=self.made.answer.text,
                    spotlighting=self.engine.retriever.options.spotlighting,
                    deadline=earliest(retrieval.budget.check_deadline, deadline_after(RELATED_SECONDS)),
                )
            self.made.warnings += warnings

    async def _judge(self, answered: Answered) -> None:
        """Set the text to the answer, or withhold it if it is poorly grounded or violates a policy."""
        answer, text = self.made.answer, answered.synthesis.text
        answer.skipped_reasons += answered.skipped
        answer.text = self.notice if SkippedReason.LOW_GROUNDED_ANSWER in answered.skipped else text
        self.made.warnings += [] if answered.ledger is None else answered.ledger.warnings
        objection = await check(self.policy.answer, text, "answer check", self._hook_deadline())
        if objection is not None:
            self.skip(SkippedReason.CUSTOMER_POLICY_VIOLATION, warning=f"the answer is withheld: {objection}")
        if self.query.safety and self.policy.safety is None:
            self.made.warnings.append("safety: no hook is set (AnswerPolicy.safety), so that nothing was rated")
        answer.safety_ratings, failure = await rate(self.policy.safety, self.query, text, self._hook_deadline())
        if failure is not None or any(rating.blocked for rating in answer.safety_ratings):
            self.skip(SkippedReason.POTENTIAL_POLICY_VIOLATION, warning=failure or "")

    def _hook_deadline(self) -> float | None:
        return earliest(self.deadline, deadline_after(self.policy.seconds))

    def shown(self) -> Answered | None:
        """Return the ``Answered`` for the response, without an answer that violates a policy."""
        if self.retrieval is None:
            return None
        shown = None if _AGAINST_POLICY.intersection(self.skipped) else self.answered
        shown = shown or Answered(self.retrieval, Synthesis(text=""))
        shown.skipped = self.skipped
        return shown

    def response(self) -> AnswerResponse:
        made, query, retrieval, shown = self.made, self.query, self.retrieval, self.shown()
        ledger = None if self.answered is None else self.answered.ledger
        made.answer.text = made.answer.text or self.notice
        made.answer.completed_at = datetime.now(UTC)
        made.answer = completed(
            made.answer,
            query if self.unchecked is None else query.model_copy(update={"grounding_supports": False}),
            references=self.references,
            ledger=ledger or self.unchecked,
            classifications=None if retrieval is None else retrieval.outcome.plan.classifications,
        )
        if retrieval is not None and shown is not None:
            made.account = shown.response(include_activity=query.request.include_activity)
            made.missing += retrieval.missing
        return made


def _own_citations(text: str) -> GroundingLedger:
    """Return a ledger of a text's claims with the model's own citations, unchecked."""
    claims = [
        GroundedClaim(text=one.text, span=one.span, check_required=one.check_required, cited=[*map(str, one.cited)])
        for one in split_claims(text)
    ]
    return GroundingLedger(claims=claims)


# -- the settings of each stage ----------------------------------------------------------------------------------------


def _request_of(query: AnswerQuery, history: Sequence[Message], retriever: AgenticRetriever) -> RetrievalRequest:
    """Return the retrieval request of a query, at medium effort if the query allows several rephrasing steps."""
    request = query.request
    changes: dict[str, object] = {}
    if history and request.messages:
        changes["messages"] = [*history, *request.messages]
    if request.retrieval_reasoning_effort is None and query.max_rephrase_steps > 1:
        changes["retrieval_reasoning_effort"] = ReasoningEffort.MEDIUM
    if query.filters is not None or query.data_stores:
        changes["knowledge_source_params"] = _source_params(query, retriever)
    return request.model_copy(update=changes)


def _source_params(query: AnswerQuery, retriever: AgenticRetriever) -> list[SourceParams]:
    stores = {store.data_store.rstrip("/").rpartition("/")[2]: store for store in query.data_stores}
    if unknown := sorted(set(stores) - set(retriever.sources)):
        known = ", ".join(retriever.sources)
        raise InvalidRequestError(f"dataStoreSpecs: {', '.join(unknown)}: there is no such source; there are {known}")
    params = []
    for name in retriever.sources:
        requested, store = query.request.params_for(name), stores.get(name) or DataStoreQuery(data_store=name)
        changes: dict[str, object] = {"filters": all_of(requested.filters, query.filters, store.filters)}
        if stores and name not in stores:
            changes = {"never_query_source": True, "always_query_source": False}
        elif store.max_results is not None:
            changes["max_output_documents"] = store.max_results
        params.append(requested.model_copy(update=changes))
    return params


def _unclassified(spec: ClassificationSpec, plan: QueryPlan) -> list[str]:
    """Return a warning that lists the requested classes without a result."""
    judged = {classification.type for classification in plan.classifications or ()}
    lacking = [kind.value for kind in dict.fromkeys(spec.types) if kind not in judged]
    if QueryClass.USER_DEFINED_CLASSIFICATION_QUERY not in judged:
        lacking += [f"label {name!r}" for name in spec.labels]
    return [f"the question was not classified as to: {', '.join(lacking)}"] if lacking else []


def _instructions(query: AnswerQuery, default: str) -> str:
    """Return the instructions of the query's request, or the default ones, with the preamble and the language."""
    size = sum(len(chunk.content) for chunk in query.end_user_chunks)
    if size > MAX_SUPPLIED:  # it would leave no room for evidence
        raise InvalidRequestError(f"endUserSpec: {size:,} characters are too many; at most {MAX_SUPPLIED:,} together")
    own = query.request.answer_instructions
    lines = [default if own is None else own, query.preamble.strip()]
    if query.language:
        if not _LANGUAGE_TAG.fullmatch(query.language):
            raise InvalidRequestError(f"answerLanguageCode: {query.language!r} is no language tag, such as de or zh-CN")
        lines.append(
            f'Write the answer in the language with the BCP 47 tag "{query.language}", whatever the question\'s.'
        )
    return "\n".join(filter(None, lines))


# -- related questions: follow-up questions that the evidence can answer ----------------------------------------------

# A language model proposes them in one call, each with a passage and a quote that answers it. Each proposal is then
# checked without a model: the quote must occur in that passage.

MAX_RELATED: Final = 3
SPARE: Final = 2  # additional questions to request, as replacements for rejected ones
MAX_REPLY: Final = 20_000  # maximum characters of a reply to parse
MAX_QUESTION: Final = 200
MAX_PASSAGES: Final = 30
MAX_TOKENS: Final = 6_000  # maximum tokens of all passages in the prompt; the lowest-ranked passages are omitted
MIN_QUOTE_WORDS: Final = 3  # minimum words of a quote; pairs of characters in scripts without spaces
SAME_QUESTION: Final = 0.8  # word overlap (Jaccard index) from which two questions count as duplicates


async def related_questions(
    model: LanguageModel,
    question: str,
    nodes: Sequence[NodeWithScore],
    *,
    answer: str = "",
    spotlighting: Spotlighting | None = "delimit",
    deadline: float | None = None,
) -> tuple[list[str], list[str]]:
    """Return related questions, best first, and warnings, which failures become; without nodes no model is called."""
    if not nodes:
        return [], []
    try:
        limit = min(MAX_TOKENS, model.context_window // 2)
        pack = partial(fit, passages(nodes[:MAX_PASSAGES], None, draw(spotlighting)), limit)
        packed = await Call(sync=pack, deadline=deadline, what="passages for related questions")
        shown = [passage for group in packed.groups for passage in group]
        turns = [f"user: {one_line(question, 2_000)}", f"assistant: {one_line(answer, 4_000)}"]
        messages = RELATED_TEMPLATE.format_messages(
            llm=model.llm,
            max_questions=str(MAX_RELATED + SPARE),
            context_str=format_passages(shown),
            conversation=as_data("\n".join(turns[: 2 if answer.strip() else 1])),
        )
        reply = await model.chat(messages, deadline=deadline)
        choose = partial(_chosen, reply.text[:MAX_REPLY], shown, question)
        chosen: tuple[list[str], list[str]] = await Call(sync=choose, deadline=deadline, what="related questions")
    except Exception as error:  # noqa: BLE001 (the answer is valid without related questions)
        return [], [f"no related questions: {one_line(error_message(error), 200)}"]
    return chosen


def _chosen(text: str, shown: Sequence[Passage], question: str) -> tuple[list[str], list[str]]:
    """Return the accepted questions of a reply, and a warning that counts the rejected ones."""
    by_ref = {passage.ref_id: passage for passage in shown}
    asked, chosen = [frozenset(split_words(question))], []
    proposals = list(_proposals(text, shown[0].spotlight if shown else PLAIN))
    for proposal, ref_id, quote in proposals:
        words, passage = frozenset(split_words(proposal)), by_ref.get(ref_id)
        if passage is None or not 0 < len(proposal) <= MAX_QUESTION or not _holds(passage, quote):
            continue
        if all(len(words & other) < SAME_QUESTION * len(words | other) for other in asked):
            asked.append(words)
            chosen.append(proposal)
    left_out = len(proposals) - len(chosen)
    why = "no passage was shown to answer them, or they were asked already"
    warnings = [f"{left_out} of {len(proposals)} related questions were left out: {why}"] if left_out else []
    return chosen[:MAX_RELATED], warnings


def _proposals(text: str, spotlight: Spotlight) -> Iterator[tuple[str, int, str]]:
    """Yield question, reference id and quote of each proposal; raise ``LLMError`` if the reply has no list of them."""
    value = read_json(text, "{[")
    if isinstance(value, dict):
        value = value.get("questions", value.get("related_questions"))
    if not isinstance(value, list):
        raise LLMError(f"the model's reply holds no questions: {one_line(text[:400], 80)!r}")
    for item in value:
        if not isinstance(item, dict):
            continue
        question, quote = item.get("question"), item.get("quote")
        digits = re.search(r"\d{1,6}", str(item.get("ref", item.get("ref_id")))[:40])
        if isinstance(question, str) and isinstance(quote, str) and digits is not None:
            yield plain_value(spotlight.unmarked(question)), int(digits.group()), spotlight.unmarked(quote)


def _holds(passage: Passage, quote: str) -> bool:
    """Return whether a passage has the words of a quote, at least ``MIN_QUOTE_WORDS``, in their order."""
    words, text = split_words(quote), " ".join(split_words(passage.content))
    return len(words) >= MIN_QUOTE_WORDS and f" {' '.join(words)} " in f" {text} "
