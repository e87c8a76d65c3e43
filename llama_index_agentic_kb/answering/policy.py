"""The application's own rules on what is answered: hooks on the question and the answer, labels, safety ratings."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index_agentic_kb._aio import Call, WorkerPool
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema.answer import HarmLevel, SafetyRating
from llama_index_agentic_kb.schema.answer_query import AnswerQuery, HarmBlockThreshold

__all__ = ["AnswerPolicy", "Safety", "check", "rate"]

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


@dataclass(frozen=True, slots=True)
class Safety:
    """The result of the safety hook.

    Args:
        ratings: With ``blocked`` set.
        failed: Whether it could not be asked.
        warning: What the caller should know of it.
    """

    ratings: list[SafetyRating] = field(default_factory=list)
    failed: bool = False
    warning: str | None = None

    @property
    def blocks(self) -> bool:
        """Whether the answer is withheld."""
        return self.failed or any(rating.blocked for rating in self.ratings)


async def rate(hook: SafetyRater | None, query: AnswerQuery, answer: str, deadline: float | None) -> Safety:
    """Ask the safety hook, where the query wants ratings.

    A rating blocks where the hook says so, or where its probability reaches the query's threshold of its category: low
    in every category, or what ``safety_settings`` say of those that they name.
    """
    if not query.safety:
        return Safety()
    if hook is None:
        return Safety(warning="safety: no hook is set (AnswerPolicy.safety), so that nothing was rated")
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
        return Safety(failed=True, warning=f"the safety hook failed: {error_message(error)}")
    return Safety(ratings)


async def _called(hook: Callable[..., Any], arguments: tuple[str, ...], what: str, deadline: float | None) -> Any:
    """Call a hook: a coroutine function in the loop, anything else on a thread; what it returns may be awaitable."""
    work = partial(hook, *arguments)
    is_async = inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004 (an object whose call is a coroutine)
    if is_async:
        return await Call(native=work, deadline=deadline, what=what)
    returned = await Call(sync=work, deadline=deadline, pool=_HOOKS, what=what)
    if inspect.isawaitable(returned):
        return await Call(native=partial(_awaited, returned), deadline=deadline, what=what)
    return returned


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned
