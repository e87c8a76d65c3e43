"""One call of a model, made once: in its bulkhead, with its deadline, and with one kind of error."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NoReturn

from llama_index_agentic_kb._aio import Call, Stream
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.guard.resilience import Bulkhead, Permit
from llama_index_agentic_kb.llm.capabilities import has_native_async, is_openai
from llama_index_agentic_kb.llm.connection import Connection, OnceClients, connection

MODEL_PLACES: Final = 128
"""Calls of one model object that may be under way at once, abandoned ones included; further ones wait."""

__all__ = ["MODEL_PLACES", "ModelCalls", "OpenStream", "calls_of", "once", "retries_itself", "speaks_openai"]


class OpenStream:
    """A stream under way: its permit, and what ends it."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.line = Connection(deadline)
        self.permit = Permit()
        self.stream: Stream[Any] | None = None


class ModelCalls:
    """Calls a model's methods by name; one object for each model, over all that use it (see ``calls_of``).

    Args:
        model: The user's, not kept alive. What is called is a copy (see ``once``).
        what: Names it in errors.
        failure: Makes of what its client raised what is raised here.
    """

    def __init__(self, model: Any, what: str, failure: Callable[[Exception], Exception]) -> None:
        self.what = what
        self.bulkhead = Bulkhead(what, MODEL_PLACES)
        self._model = weakref.ref(model)
        self._as_failure = failure
        self._clients = OnceClients()

    async def call(self, llm: Any, method: str, *given: Any, deadline: float | None, **asked: Any) -> Any:
        """Call a method.

        Args:
            llm: The copy.
            method: The sync method's name; the async one's has an "a" before it.
            given: Positional arguments.
            deadline: ``time.monotonic()`` at which it is given up; None waits.
            asked: Further arguments.

        Raises:
            Exception: It failed; where that is another error than its client's own, the client's is the cause.
            DeadlineExceededError: It did not return in time.
        """
        line, permit = Connection(deadline), Permit()
        call = Call(
            sync=self._sync(line, llm, method, given, asked),
            native=self._native(llm, method, given, asked),
            deadline=deadline,
            what=self.what,
        )
        try:
            return await self.bulkhead.call(call, permit)
        except Exception as error:  # noqa: BLE001 (raised again, in one kind)
            self._raise(error, deadline)
        finally:
            _hang_up(line, permit)

    async def open(self, llm: Any, method: str, *given: Any, deadline: float | None, **asked: Any) -> OpenStream:
        """Open a stream, to be read by ``next`` and closed by ``close``; see ``call``."""
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was not begun: its deadline had passed")
        opened = OpenStream(deadline)
        try:
            opened.stream = await self.bulkhead.open(
                self._sync(opened.line, llm, method, given, asked),
                self._native(llm, method, given, asked),
                opened.permit,
                deadline=deadline,
                what=self.what,
            )
        except Exception as error:  # noqa: BLE001 (raised again, in one kind)
            self._raise(error, deadline)
        return opened

    async def next(self, opened: OpenStream) -> Any:
        """Give a stream's next chunk, or ``END``."""
        assert opened.stream is not None
        try:
            return await opened.stream.next(deadline=opened.deadline)
        except Exception as error:  # noqa: BLE001 (raised again, in one kind)
            self._raise(error, opened.deadline)

    def close(self, opened: OpenStream) -> None:
        """Let go of a stream that is read no further."""
        self.bulkhead.leave(opened.permit)
        _hang_up(opened.line, opened.permit)

    def _raise(self, error: Exception, deadline: float | None) -> NoReturn:
        """Raise what a failed call is: one that fails at its deadline or after it was too late, no more."""
        if isinstance(error, (DeadlineExceededError, NotImplementedError)):  # the latter: a model that can't stream
            raise error
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceededError(f"{self.what} was still running at its deadline") from error
        failure = self._as_failure(error)
        if failure is error:
            raise error
        raise failure from error

    def _sync(
        self, line: Connection, llm: Any, method: str, given: tuple[Any, ...], asked: dict[str, Any]
    ) -> Callable[[], Any]:
        def work() -> Any:
            connection.set(line)  # the context is this call's own
            if speaks_openai(llm):
                self._clients.give(self._model(), llm, is_async=False)
            return getattr(llm, method)(*given, **asked)

        return work

    def _native(
        self, llm: Any, method: str, given: tuple[Any, ...], asked: dict[str, Any]
    ) -> Callable[[], Awaitable[Any]] | None:
        """Give the async way; None where there is none."""
        name = f"a{method}"
        if not has_native_async(llm, name):
            return None
        if not speaks_openai(llm):
            return partial(getattr(llm, name), *given, **asked)

        async def work() -> Any:
            self._clients.give(self._model(), llm, is_async=True)
            return await getattr(llm, name)(*given, **asked)

        return work


_lock = threading.Lock()
_calls: Final[dict[int, ModelCalls]] = {}


def calls_of(model: Any, what: str, failure: Callable[[Exception], Exception]) -> ModelCalls:
    """Give the one ``ModelCalls`` of a model; it lives as long as the model's object. For the arguments, see there."""
    with _lock:
        known = _calls.get(id(model))
        if known is None:
            known = _calls[id(model)] = ModelCalls(model, what, failure)
            weakref.finalize(model, _calls.pop, id(model), None)
        return known


def _forget_lock() -> None:
    """In a forked child nobody holds it."""
    global _lock  # noqa: PLW0603 (one for the process)
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def speaks_openai(model: Any) -> bool:
    """Whether a model is LlamaIndex's ``OpenAI`` or ``OpenAIEmbedding``, or of a subclass: both have its client."""
    return is_openai(model) or any(kind.__name__ == "OpenAIEmbedding" for kind in type(model).__mro__)


def retries_itself(model: Any) -> bool:
    """Whether a model's client retries and can't be kept from it."""
    own = getattr(model, "max_retries", None)
    return not speaks_openai(model) and isinstance(own, int) and own > 0


def once(twin: Any, model: Any) -> Any:
    """Give a copy of a model of OpenAI's client that tries once; any other model is given back.

    Args:
        twin: The model itself, or a copy of it.
        model: The model itself: never changed.
    """
    if not speaks_openai(model):
        return twin
    made = copy.copy(model) if twin is model else twin
    made.max_retries = 0
    return made


def _hang_up(line: Connection, permit: Permit) -> None:
    """Free the thread of a call that was given up: what it reads from is closed."""
    if permit.at_work:
        line.hang_up()
