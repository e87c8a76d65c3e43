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
"""Why a text is against a policy, or whether it is; None, False and "" say that it is not."""

TextCheck: TypeAlias = Callable[[str], Objection | Awaitable[Objection]]
SafetyRater: TypeAlias = Callable[[str, str], Sequence[SafetyRating] | Awaitable[Sequence[SafetyRating]]]

_HOOKS: Final = WorkerPool("policies", 16)
"""Of their own: those that hang take no thread from anything else."""

_ORDER: Final = (HarmLevel.NEGLIGIBLE, HarmLevel.LOW, HarmLevel.MEDIUM, HarmLevel.HIGH)
_FROM: Final = {
    HarmBlockThreshold.BLOCK_LOW_AND_ABOVE: 1,
    HarmBlockThreshold.BLOCK_MEDIUM_AND_ABOVE: 2,
    HarmBlockThreshold.BLOCK_ONLY_HIGH: 3,
    HarmBlockThreshold.BLOCK_NONE: len(_ORDER),
    HarmBlockThreshold.OFF: len(_ORDER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPolicy:
    """What an application does not want answered. Hooks may be plain functions (called on a thread) or coroutines.

    A hook that fails or is late withholds the answer: what could not be checked is not told.

    Args:
        question: Told the question before anything is searched; what it gives back says why it is not answered
            (CUSTOMER_POLICY_VIOLATION).
        answer: The same for the answer, before it is told. A streamed answer is then told in one piece.
        safety: Given question and answer where a query asks for safety ratings; gives the ratings. Without it there
            are none: this library invents none.
        labels: Classes of the application's own: a name and a description of the questions that it fits. A question of
            one is not answered (USER_DEFINED_CLASSIFICATION_QUERY_IGNORED), nor is one that could not be judged, as at
            minimal effort.
        low_relevance: The relevance gate where a query says nothing: True withholds an answer where little of what was
            asked is in the evidence, None (default) where nothing was found or a calibrated reranker says that it is
            about something else, False only where nothing was found.
        seconds: Time that each hook may take, within the request's own. Default 5.

    Raises:
        ConfigurationError: A value doesn't fit.
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
    """Ask a hook about a text.

    Returns:
        Why it is against the policy; None where it is not. A hook that fails says that it failed.
    """
    if hook is None:
        return None
    try:
        found = await _asked(hook, (text,), what, deadline)
        told = one_line(found, 200) if isinstance(found, str) else "it is against the policy" if found else ""
    except Exception as error:  # noqa: BLE001 (whatever a user's hook raises: what is not checked is not told)
        return f"the {what} failed: {error_message(error)}"
    return told or None


async def rate(hook: SafetyRater | None, query: AnswerQuery, answer: str, deadline: float | None) -> Safety:
    """Ask the safety hook, where the query wants ratings.

    A rating blocks where the hook says so, or where its probability reaches the query's threshold of its category: low
    in every category, or what ``safety_settings`` say of those that they name.
    """
    if not query.safety:
        return Safety()
    if hook is None:
        return Safety(warning="safety: no hook is set (AnswerPolicy.safety), so that nothing was rated")
    try:
        given = await _asked(hook, (query.question, answer), "safety hook", deadline)
        ratings = [_judged(SafetyRating.model_validate(one), query) for one in given or ()]
    except Exception as error:  # noqa: BLE001 (as above)
        return Safety(failed=True, warning=f"the safety hook failed: {error_message(error)}")
    return Safety(ratings)


@dataclass(frozen=True, slots=True)
class Safety:
    """What the safety hook said.

    Args:
        ratings: With ``blocked`` set.
        failed: Whether it could not be asked.
        warning: What is to be told of it.
    """

    ratings: list[SafetyRating] = field(default_factory=list)
    failed: bool = False
    warning: str | None = None

    @property
    def blocks(self) -> bool:
        """Whether the answer is withheld."""
        return self.failed or any(rating.blocked for rating in self.ratings)


def _judged(rating: SafetyRating, query: AnswerQuery) -> SafetyRating:
    settings = {one.category: one.threshold for one in query.safety_settings}
    default = HarmBlockThreshold.OFF if settings else HarmBlockThreshold.BLOCK_LOW_AND_ABOVE
    least = _FROM[settings.get(rating.category, default)]
    reached = rating.probability is not None and _ORDER.index(rating.probability) >= least
    return rating.model_copy(update={"blocked": rating.blocked or reached})


async def _asked(hook: Callable[..., Any], arguments: tuple[str, ...], what: str, deadline: float | None) -> Any:
    """Call a hook: a coroutine function in the loop, anything else on a thread; what it gives may be an awaitable."""
    work = partial(hook, *arguments)
    is_async = inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004 (an object whose call is a coroutine)
    if is_async:
        return await Call(native=work, deadline=deadline, what=what)
    given = await Call(sync=work, deadline=deadline, pool=_HOOKS, what=what)
    if inspect.isawaitable(given):
        return await Call(native=partial(_awaited, given), deadline=deadline, what=what)
    return given


async def _awaited(given: Awaitable[Any]) -> Any:
    return await given
