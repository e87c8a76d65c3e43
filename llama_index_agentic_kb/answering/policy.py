"""When there is no answer: the application's own rules, the question's classes, and what was found.

Evidence is judged by a calibrated reranker's scores alone. Without them nothing says how relevant it is: counting
words misjudges a question that is worded otherwise than its answer, so that only finding nothing is a reason.
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
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import QueryPlan, SkippedReason
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.schema.answer import HarmLevel, SafetyRating
from llama_index_agentic_kb.schema.answer_query import AnswerQuery, HarmBlockThreshold

Objection: TypeAlias = str | bool | None
"""Why a text is against a policy, or whether it is; None, False and "" mean that it is not."""

TextCheck: TypeAlias = Callable[[str], Objection | Awaitable[Objection]]
SafetyRater: TypeAlias = Callable[[str, str], Sequence[SafetyRating] | Awaitable[Sequence[SafetyRating]]]

_HOOKS: Final = WorkerPool("policies", 16)
"""A pool of their own: those that hang take no thread from anything else."""

_LEVELS: Final = (HarmLevel.NEGLIGIBLE, HarmLevel.LOW, HarmLevel.MEDIUM, HarmLevel.HIGH)
_MIN_LEVEL: Final = {
    HarmBlockThreshold.BLOCK_LOW_AND_ABOVE: 1,
    HarmBlockThreshold.BLOCK_MEDIUM_AND_ABOVE: 2,
    HarmBlockThreshold.BLOCK_ONLY_HIGH: 3,
    HarmBlockThreshold.BLOCK_NONE: len(_LEVELS),
    HarmBlockThreshold.OFF: len(_LEVELS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPolicy:
    """What an application does not want answered. Hooks may be plain functions (called on a thread) or coroutines.

    A hook that fails or is late withholds the answer: what could not be checked is not shown.

    Args:
        question: Called with the question before anything is searched; what it returns is why the question is not
            answered (CUSTOMER_POLICY_VIOLATION).
        answer: The same for the answer, before it is shown. A streamed answer then comes in one piece.
        safety: Called with question and answer where a query asks for safety ratings; returns the ratings. Without it
            there are none: this library invents none.
        labels: Classes of the application's own: a name and a description of the questions that it fits. A question of
            one is not answered (USER_DEFINED_CLASSIFICATION_QUERY_IGNORED), nor is one that could not be judged, as at
            minimal effort.
        low_relevance: The relevance gate where a query does not say, by the scores of a calibrated reranker: True
            withholds an answer where the evidence is barely relevant, None (default) where it is about something else,
            False never. Where nothing was found there is no answer in any case.
        seconds: Time that each hook may take, within the request's own. Default 5.

    Raises:
        ConfigurationError: A value does not fit.
    """

    question: TextCheck | None = None
    answer: TextCheck | None = None
    safety: SafetyRater | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    low_relevance: bool | None = None
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
    """Return why a hook finds a text against the policy, or that the hook failed; None where there is no objection."""
    if hook is None:
        return None
    try:
        found = await _called(hook, (text,), what, deadline)
        reason = one_line(found, 200) if isinstance(found, str) else "it is against the policy" if found else ""
    except Exception as error:  # noqa: BLE001 (whatever a user's hook raises: what is not checked is not shown)
        return f"the {what} failed: {error_message(error)}"
    return reason or None


async def rate(
    hook: SafetyRater | None, query: AnswerQuery, answer: str, deadline: float | None
) -> tuple[list[SafetyRating], str | None]:
    """Return the safety hook's ratings, where the query wants some; and why it could not be asked, if so.

    A rating blocks where the hook says so, or where its probability reaches the query's threshold of its category: low
    in every category, or what ``safety_settings`` say of those that they name.
    """
    if not query.safety or hook is None:
        return [], None
    settings = {setting.category: setting.threshold for setting in query.safety_settings}
    default = HarmBlockThreshold.OFF if settings else HarmBlockThreshold.BLOCK_LOW_AND_ABOVE
    ratings = []
    try:
        for returned in await _called(hook, (query.question, answer), "safety hook", deadline) or ():
            rating = SafetyRating.model_validate(returned)
            minimum = _MIN_LEVEL[settings.get(rating.category, default)]
            reached = rating.probability is not None and _LEVELS.index(rating.probability) >= minimum
            ratings.append(rating.model_copy(update={"blocked": rating.blocked or reached}))
    except Exception as error:  # noqa: BLE001 (as above)
        return [], f"the safety hook failed: {error_message(error)}"
    return ratings, None


async def _called(hook: Callable[..., object], arguments: tuple[str, ...], what: str, deadline: float | None) -> Any:
    """Call a hook: a coroutine function in the loop, anything else on a thread; what it returns may be awaitable."""
    work: Any = partial(hook, *arguments)
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None)):  # noqa: B004 (an object whose call is a coroutine)
        return await Call(native=work, deadline=deadline, what=what)
    returned: Any = await Call(sync=work, deadline=deadline, pool=_HOOKS, what=what)
    return (
        await Call(native=lambda: returned, deadline=deadline, what=what) if inspect.isawaitable(returned) else returned
    )


# -- the question's classes, and what was found ------------------------------------------------------------------------

UNRELATED: Final = 1.0
"""A calibrated reranker's score, 0 to 4, below which the best passage is about something else ..."""
BARELY_RELATED: Final = 2.0
"""... and below which it holds nothing relevant."""

UNJUDGED: Final = "ignoreLowRelevantContent: relevance was not judged: no calibrated reranker is set"

_IGNORED: Final = {
    QueryClass.ADVERSARIAL_QUERY: ("ignore_adversarial_query", SkippedReason.ADVERSARIAL_QUERY_IGNORED),
    QueryClass.JAIL_BREAKING_QUERY: ("ignore_jail_breaking_query", SkippedReason.JAIL_BREAKING_QUERY_IGNORED),
    QueryClass.NON_ANSWER_SEEKING_QUERY: (
        "ignore_non_answer_seeking_query",
        SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED,
    ),
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: (
        "ignore_non_answer_seeking_query",
        SkippedReason.NON_ANSWER_SEEKING_QUERY_IGNORED_V2,
    ),
}
"""The switch that withholds the answer to a query of a class, and the reason."""


def skip_reasons(
    query: AnswerQuery, policy: AnswerPolicy, retrieval: Retrieval
) -> tuple[list[SkippedReason], list[str]]:
    """Return the reasons, empty where the question is to be answered, and warnings of what could not be judged.

    Args:
        query: Its switches say which classes are not answered, and how strict the relevance gate is.
        policy: The application's own labels, and its gate where the query does not say.
        retrieval: The plan and the evidence.
    """
    positive = {judged.type for judged in retrieval.plan.classifications or () if judged.positive}
    reasons = [reason for kind, (switch, reason) in _IGNORED.items() if kind in positive and getattr(query, switch)]
    if policy.labels and _may_have_label(retrieval.plan):
        reasons.append(SkippedReason.USER_DEFINED_CLASSIFICATION_QUERY_IGNORED)
    gate = query.ignore_low_relevant_content
    gate = policy.low_relevance if gate is None else gate
    irrelevant, judged = judge_relevance(retrieval.nodes, gate=gate)
    reasons += [] if irrelevant is None else [irrelevant]
    return reasons, [UNJUDGED] if gate and not judged else []


def judge_relevance(nodes: Sequence[NodeWithScore], *, gate: bool | None) -> tuple[SkippedReason | None, bool]:
    """Judge the evidence; return why it bears no answer, if so, and whether anything said how relevant it is.

    Args:
        nodes: The evidence.
        gate: True withholds an answer also where the evidence is barely relevant, None where it is about something
            else, False only where there is none.
    """
    if not any(node.node.get_content(MetadataMode.NONE).strip() for node in nodes):
        return SkippedReason.NO_RELEVANT_CONTENT, True
    marks = [mark for node in nodes if (mark := provenance(node)) is not None]
    scores = [mark["reranker_score"] for mark in marks if mark.get("reranker_score") is not None]
    if not scores or gate is False:
        return None, bool(scores)
    if max(scores) < UNRELATED:
        return SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED, True
    return SkippedReason.NO_RELEVANT_CONTENT if gate and max(scores) < BARELY_RELATED else None, True


def _may_have_label(plan: QueryPlan) -> bool:
    """Return whether a question has one of the application's labels, or was not judged: unchecked is not passed."""
    kind = QueryClass.USER_DEFINED_CLASSIFICATION_QUERY
    verdicts = [judged.positive for judged in plan.classifications or () if judged.type is kind]
    return bool(plan.labels) or not verdicts or any(verdicts)
