"""One policy of retries for everything that is called: which failures are worth it, how long to wait, how often.

Clients bring retries of their own, one inside the other (a failing call of LlamaIndex's ``OpenAI`` is 12 HTTP
requests); here they are ours alone, bounded by an attempt count, by the request's ``RetryBudget`` and by its deadline.
Tenacity's strategies decide; the waiting is a step of the flow, so that no thread is held.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from llama_index_agentic_kb._aio import deadline_after, earliest, pause_until
from llama_index_agentic_kb.account.retry_budget import DEFAULT_LEAST, DEFAULT_SHARE, RetryBudget
from llama_index_agentic_kb.errors import ConfigurationError

__all__ = [
    "NO_RETRIES",
    "RetryBudget",
    "RetryPolicy",
    "breaks_connection",
    "is_transient",
    "retried",
    "retry_after",
    "status_of",
]

T = TypeVar("T")

TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses worth another attempt: timeouts, conflicts (as OpenAI's client has it), limits, a server in trouble."""

PERMANENT_CODES: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached", "content_filter"})
"""Codes of error bodies that no waiting changes, whatever the status."""

TRANSIENT_KINDS: Final = frozenset(
    {
        "ConnectionError",  # Python's, requests'
        "TimeoutError",  # Python's, ours, urllib3's
        "Timeout",  # requests
        "NetworkError",  # httpx: connect, read, write, close
        "TimeoutException",  # httpx
        "RemoteProtocolError",  # httpx: the server hung up
        "APIConnectionError",  # OpenAI's, Anthropic's; their timeouts too
        "ClientConnectionError",  # aiohttp
        "ServerTimeoutError",
        "IncompleteRead",
    }
)
"""Names of exception classes of transports. Names, so that no client is imported to recognise its errors."""

MAX_CAUSES: Final = 8
"""How far a chain of causes is followed."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed call is tried again, and how long is waited before.

    Waits grow exponentially with full jitter: before retry n, a random time between 0 and ``min(longest_wait,
    first_wait * 2 ** (n - 1))`` (Brooker, "Exponential Backoff and Jitter", 2015). A server's Retry-After is honoured,
    with up to ``first_wait`` of jitter on top; where it does not fit before the deadline, nothing is waited for and
    the failure stands at once.

    Args:
        attempts: Attempts in all, the first included. 1 never retries. Default 3.
        first_wait: Seconds, the bound of the first wait. Default 0.5.
        longest_wait: Seconds, the bound of every wait that no Retry-After asks for. Default 8.
        longest_retry_after: Seconds of a Retry-After that are waited at most, where there is no deadline or a late
            one; a longer one ends the call. Default 60.
        attempt_seconds: Seconds after which one attempt is given up, so that another may be made; None gives each
            attempt all the time that is left (the client's own timeout still ends it). Default None.
        least_time: Seconds that an attempt needs at least; a retry that would have less is not begun. Default 0.05.
        share: Retries of a request per call that it makes. Default 0.2.
        least: Retries that a request may make however few calls it makes. Default 5.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    attempts: int = 3
    first_wait: float = 0.5
    longest_wait: float = 8.0
    longest_retry_after: float = 60.0
    attempt_seconds: float | None = None
    least_time: float = 0.05
    share: float = DEFAULT_SHARE
    least: int = DEFAULT_LEAST

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy.attempts must be at least 1 (which never retries): {self.attempts}")
        if self.attempt_seconds is not None and not self.attempt_seconds > 0:
            raise ConfigurationError(f"RetryPolicy.attempt_seconds must be above 0, or None: {self.attempt_seconds}")
        for name in ("first_wait", "longest_wait", "longest_retry_after", "least_time", "share", "least"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigurationError(f"RetryPolicy.{name} must be a number of 0 or more: {value}")

    def budget(self) -> RetryBudget:
        """Give the retry budget of a new request."""
        return RetryBudget(self.share, self.least)


NO_RETRIES: Final = RetryPolicy(attempts=1)
"""Never tries again."""


async def retried(
    attempt: Callable[[float | None], Coroutine[Any, Any, T]],
    *,
    policy: RetryPolicy,
    budget: RetryBudget,
    deadline: float | None = None,
    worth: Callable[[BaseException], bool] | None = None,
) -> T:
    """Make a call, and make it again while its failure is worth it.

    Args:
        attempt: Makes a new flow of one attempt, given its deadline (``time.monotonic()``, None is none).
        policy: How often, and how long is waited.
        budget: The request's; shared by all its calls.
        deadline: ``time.monotonic()`` by which the whole must have ended; a retry that can't is not begun.
        worth: Tells whether a failure is worth another attempt; None is ``is_transient``.

    Returns:
        What the first attempt that succeeds returns.

    Raises:
        Exception: The last attempt's own failure.
    """
    budget.call()
    decide = Retrying(
        retry=retry_if_exception(worth or is_transient),
        wait=_Wait(policy),
        stop=stop_after_attempt(policy.attempts) | _NoTime(policy, deadline) | _NoneLeft(budget),
        reraise=True,
    )
    decide.begin()
    state = RetryCallState(decide, None, (), {})
    while True:
        try:
            return await attempt(earliest(deadline, deadline_after(policy.attempt_seconds)))
        except Exception as error:  # noqa: BLE001 (raised again below, where it is not worth another attempt)
            state.set_exception((type(error), error, error.__traceback__))
        pause: Any = decide.iter(state)  # raises the failure itself where it is not retried
        state.prepare_for_next_attempt()
        await pause_until(time.monotonic() + pause)


class _Wait(wait_base):
    """Full jitter, or what the server asked for."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._jittered = wait_random_exponential(multiplier=policy.first_wait, max=policy.longest_wait)
        self._extra = wait_random_exponential(multiplier=policy.first_wait, max=policy.first_wait)

    def __call__(self, retry_state: RetryCallState) -> float:
        asked = retry_after(_failure(retry_state))
        return self._jittered(retry_state) if asked is None else asked + self._extra(retry_state)


class _NoTime(stop_base):
    """Stops where another attempt would begin too late, or the server asked for too long a wait."""

    def __init__(self, policy: RetryPolicy, deadline: float | None) -> None:
        self._policy = policy
        self._deadline = deadline

    def __call__(self, retry_state: RetryCallState) -> bool:
        if (retry_after(_failure(retry_state)) or 0.0) > self._policy.longest_retry_after:
            return True
        if self._deadline is None:
            return False
        return time.monotonic() + retry_state.upcoming_sleep + self._policy.least_time >= self._deadline


class _NoneLeft(stop_base):
    """Stops where the request has no retry left; else takes one. Asked last, so that none is taken in vain."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    def __call__(self, retry_state: RetryCallState) -> bool:  # noqa: ARG002 (tenacity's signature)
        return not self._budget.take()


def _failure(state: RetryCallState) -> BaseException:
    failure = state.outcome.exception() if state.outcome is not None else None
    assert failure is not None  # tenacity asks after an attempt has failed
    return failure


def is_transient(error: BaseException) -> bool:
    """Tell whether the same call may well succeed if it is made again.

    Yes for the statuses 408, 409, 425, 429, 500, 502, 503, 504 and 529, for connections that were refused, reset or
    cut, and for timeouts. No for all other statuses (400, 401, 403, 404, 422, ...), for a quota that is used up, and
    for everything that is no transport's failure. A server's ``x-should-retry`` header has the last word.

    Args:
        error: What the call raised. Its causes are looked at too, for clients wrap what their transport raised.
    """
    said = (_header(error, "x-should-retry") or "").lower()
    if said in ("true", "false"):
        return said == "true"
    if any(getattr(one, "code", None) in PERMANENT_CODES for one in _chain(error)):
        return False
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUSES
    return breaks_connection(error)


def breaks_connection(error: BaseException) -> bool:
    """Tell whether a failure or one of its causes is a transport's: no connection, a broken one, or a timeout."""
    return any(kind.__name__ in TRANSIENT_KINDS for one in _chain(error) for kind in type(one).__mro__)


def status_of(error: BaseException) -> int | None:
    """Give the HTTP status that a failure or one of its causes tells; None where none does."""
    for one in _chain(error):
        for holder in (one, getattr(one, "response", None)):
            status = getattr(holder, "status_code", None)
            if isinstance(status, int):
                return status
    return None


def retry_after(error: BaseException) -> float | None:
    """Give the seconds after which a server wants to be asked again; None where it does not say.

    Reads the headers ``retry-after-ms`` and ``Retry-After`` (seconds, or an HTTP date; RFC 9110, 10.2.3) of the
    response that the failure or one of its causes holds. A time that has passed is 0.
    """
    milliseconds = _number(_header(error, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    told = _header(error, "retry-after")
    seconds = _number(told)
    return seconds if seconds is not None or told is None else _until(told)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


def _until(text: str) -> float | None:
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


def _header(error: BaseException, name: str) -> str | None:
    for one in _chain(error):
        for holder in (getattr(one, "response", None), one):
            value = _named(getattr(holder, "headers", None), name)
            if value is not None:
                return value
    return None


def _named(headers: Any, name: str) -> str | None:
    """Look a header up, whatever its case."""
    if not isinstance(headers, Mapping) and not hasattr(headers, "items"):
        return None
    return next((str(value) for key, value in headers.items() if str(key).lower() == name), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give a failure and what caused it."""
    one: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if one is None:
            return
        yield one
        one = one.__cause__
