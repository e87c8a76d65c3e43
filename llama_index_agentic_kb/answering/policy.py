"""Reasons to withhold an answer: the application's own rules, the question's classes, and irrelevant evidence.

The relevance of evidence is judged only by a calibrated reranker's scores, since word overlap misjudges questions that
are worded differently from their answers. Without such scores, only empty evidence is a reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evidence.candidates import provenance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import SkippedReason
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import AnswerQuery, HarmBlockThreshold, HarmLevel, SafetyRating

Objection: TypeAlias = str | bool | None
"""The reason why a text violates a policy, or whether it does; None, False and "" mean no violation."""

TextCheck: TypeAlias = Callable[[str], Objection | Awaitable[Objection]]
SafetyRater: TypeAlias = Callable[[str, str], Sequence[SafetyRating] | Awaitable[Sequence[SafetyRating]]]

_HOOKS: Final = WorkerPool("policies", 16)  # a separate thread pool, so that hooks that hang don't block other calls

_LEVELS: Final = tuple(HarmLevel)  # in rising order
_MIN_LEVEL: Final = dict(zip(HarmBlockThreshold, (1, 2, 3, len(_LEVELS), len(_LEVELS)), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPolicy:
    """The application's rules for refusing questions and withholding answers.

    Hooks may be plain functions (called on a thread) or coroutine functions. If a hook fails or times out, the answer
    is withheld.

    Args:
        question: Called with the question before any search; returns the reason not to answer it
            (CUSTOMER_POLICY_VIOLATION).
        answer: Called with the answer before it is shown; returns the reason to withhold it. A streamed answer is then
            sent as one piece.
        safety: Called with question and answer if a query requests safety ratings; returns the ratings. Without it
            there are no ratings.
        labels: Application-specific question classes: names with descriptions. Questions of these classes are not
            answered (USER_DEFINED_CLASSIFICATION_QUERY_IGNORED), nor are questions that could not be classified, as
            at minimal effort.
        seconds: The time limit of each hook in seconds, within the request's own. Default 5.

    Raises:
        ConfigurationError: A hook is not callable, or ``seconds`` is not above 0.
    """

    question: TextCheck | None = None
    answer: TextCheck | None = None
    safety: SafetyRater | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 5.0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("question", "answer", "safety"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ConfigurationError(f"AnswerPolicy.{name}: expected a function, got {type(hook).__name__}")
        if self.seconds <= 0:
            raise ConfigurationError(f"AnswerPolicy.seconds must be above 0: {self.seconds}")


async def check(hook: TextCheck | None, text: str, what: str, deadline: float | None) -> str | None:
    """Return the hook's objection to a text, or a message that the hook failed; None if there is no objection."""
    if hook is None:
        return None
    try:
        found = await _called(hook, (text,), what, deadline)
        reason = one_line(found, 200) if isinstance(found, str) else "it is against the policy" if found else ""
    except Exception as error:  # noqa: BLE001 (any error of a user's hook withholds the answer)
        return f"the {what} failed: {error_message(error)}"
    return reason or None


async def rate(
    hook: SafetyRater | None, query: AnswerQuery, answer: str, deadline: float | None
) -> tuple[list[SafetyRating], str | None]:
    """Return the safety hook's ratings, if the query requests them, and a message if the hook failed.

    Without ``safety_settings`` the threshold is "low" for all categories; with them, only listed ones have one.
    """
    if not query.safety or hook is None:
        return [], None
    settings = {setting.category: setting.threshold for setting in query.safety_settings}
    default = HarmBlockThreshold.OFF if settings else HarmBlockThreshold.BLOCK_LOW_AND_ABOVE
    ratings = []
    try:
        for returned in await _called(hook, (query.question, answer), "safety hook", deadline) or ():
            rating = SafetyRating.model_validate(returned)
            least, level = _MIN_LEVEL[settings.get(rating.category, default)], rating.probability
            blocked = rating.blocked or (level is not None and _LEVELS.index(level) >= least)
            ratings.append(rating.model_copy(update={"blocked": blocked}))
    except Exception as error:  # noqa: BLE001 (as above)
        return [], f"the safety hook failed: {error_message(error)}"
    return ratings, None


async def _called(hook: Callable[..., object], arguments: tuple[str, ...], what: str, deadline: float | None) -> Any:
    """Call a hook: coroutine functions on the event loop, others on a thread; an awaitable result is awaited."""
    work: Any = partial(hook, *arguments)
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None)):  # noqa: B004 (an object whose call is a coroutine)
        return await Call(native=work, deadline=deadline, what=what)
    made: Any = await Call(sync=work, deadline=deadline, pool=_HOOKS, what=what)
    return await Call(native=lambda: made, deadline=deadline, what=what) if inspect.isawaitable(made) else made


# -- the question's classes, and the evidence -------------------------------------------------------------------------

# Scores of a calibrated reranker (0 to 4) below which the best passage is unrelated, or barely relevant.
UNRELATED: Final = 1.0
BARELY_RELATED: Final = 2.0

UNJUDGED: Final = "ignoreLowRelevantContent: relevance was not judged: no calibrated reranker is set"

_NO_ANSWER: Final = "ignore_non_answer_seeking_query"
_IGNORED: Final = {
    QueryClass.ADVERSARIAL_QUERY: ("ignore_adversarial_query", SkippedReason.ADVERSARIAL_QUERY_IGNORED),
    QueryClass.JAIL_BREAKING_QUERY: ("ignore_jail_breaking_query", SkippedReason.JAIL_BREAKING_QUERY_IGNORED),
    QueryClass.NON_ANSWER_SEEKING_QUERY: (_NO_ANSWER, SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED),
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: (_NO_ANSWER, SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED_V2),
}
"""The query's switch that withholds answers to a class of questions, and the skip reason, by class."""


def classes_to_judge(query: AnswerQuery) -> tuple[QueryClass, ...]:
    """Return the classes to sort a question into: those to report, and those that withhold the answer."""
    return (*query.classify, *(kind for kind, (switch, _) in _IGNORED.items() if getattr(query, switch)))


def skip_reasons(
    query: AnswerQuery, policy: AnswerPolicy, retrieval: Retrieval
) -> tuple[list[SkippedReason], list[str]]:
    """Return the reasons not to answer the question (may be empty), and warnings of criteria that were not judged."""
    plan = retrieval.outcome.plan
    verdicts = {judged.type: judged.positive for judged in plan.classifications or ()}
    reasons = [reason for kind, (switch, reason) in _IGNORED.items() if verdicts.get(kind) and getattr(query, switch)]
    fits = plan.labels or verdicts.get(QueryClass.USER_DEFINED_CLASSIFICATION_QUERY, True)
    if policy.labels and fits:  # or the question could not be classified
        reasons.append(SkippedReason.USER_DEFINED_CLASSIFICATION_QUERY_IGNORED)
    gate = query.ignore_low_relevant_content
    irrelevant, judged = judge_relevance(retrieval.nodes, gate=gate)
    reasons += filter(None, [irrelevant])
    return reasons, [UNJUDGED] if gate and not judged else []


def judge_relevance(nodes: Sequence[NodeWithScore], *, gate: bool | None) -> tuple[SkippedReason | None, bool]:
    """Return the reason why the evidence can't support an answer, or None, and whether relevance could be judged."""
    if not any(node.node.get_content(MetadataMode.NONE).strip() for node in nodes):
        return SkippedReason.NO_RELEVANT_CONTENT, True
    marks = (provenance(node) or {} for node in nodes)
    scores = [mark["reranker_score"] for mark in marks if mark.get("reranker_score") is not None]
    if not scores or gate is False:
        return None, bool(scores)
    if max(scores) < UNRELATED:
        return SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED, True
    return SkippedReason.NO_RELEVANT_CONTENT if gate and max(scores) < BARELY_RELATED else None, True
