"""What a store and Chroma need of each other to share a directory with other processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import ConfigurationError, StoreDamagedError

__all__ = ["Access", "LiveCollection", "Unguarded", "another_spelling", "refuse_forked"]

_FAILURES = frozenset({"InternalError", "NotFoundError", "PanicException"})
_opened_in: int | None = None  # the process that first opened a directory


class Access(Protocol):
    """Keeps processes that open a Chroma directory apart from the one that writes into it."""

    def opening(self) -> AbstractContextManager[None]:
        """Hold while a collection is opened: Chroma then applies what has been logged, and may write all of it."""
        ...

    def changing(self) -> AbstractContextManager[None]:
        """Hold while vectors are added or deleted."""
        ...


class Unguarded:
    """For a directory of one process, and for servers."""

    def opening(self) -> AbstractContextManager[None]:
        """Hold nothing."""
        return nullcontext()

    def changing(self) -> AbstractContextManager[None]:
        """Hold nothing."""
        return nullcontext()


class LiveCollection:
    """A source's collection as it is now, whichever process changed it: to be used like Chroma's own object.

    Chroma's own goes on searching the graph that it read when it was opened.

    Args:
        current: Opens the collection anew if it has changed, else gives the one that is open.
        renew: Opens everything anew after a failure, and tells whether that can have helped.
        where: Names the store in errors.
    """

    def __init__(self, current: Callable[[], Any], renew: Callable[[], bool], where: str) -> None:
        self._current = current
        self._renew = renew
        self._where = where

    def __getattr__(self, name: str) -> Any:
        """Give an attribute of the collection, or a method that is called on it as it is then."""
        value = getattr(self._current(), name)
        return partial(self._call, name) if callable(value) else value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._current(), name)(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ not in _FAILURES or not self._renew():
                self._tell(error)
                raise
        try:
            return getattr(self._current(), name)(*args, **kwargs)
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Raise Chroma's failures as ours; a Rust panic comes as what no one catches."""
        if type(error).__name__ in _FAILURES:
            raise StoreDamagedError(
                f"The vectors of the store {self._where!r} can't be read: {error_message(error)}. If this stays so, "
                f"run `agentic-kb repair --store {self._where}`: nothing is lost, its documents hold all that is "
                "needed."
            ) from error


def another_spelling(number: int) -> str:
    """Give what makes another path of the same directory, for each number another one; nothing for 0."""
    return "".join("/" * (int(digit) + 1) + "." for digit in str(number)) if number else ""


def refuse_forked() -> None:
    """Keep a forked process from opening a Chroma directory after its parent: Chroma's threads don't come along.

    Raises:
        ConfigurationError: It would wait for them for ever.
    """
    global _opened_in  # noqa: PLW0603  (of the process)
    _opened_in = _opened_in or os.getpid()
    if _opened_in != os.getpid():
        raise ConfigurationError(
            f"This process was forked from {_opened_in}, which had opened a Chroma directory, and can't open one any "
            "more. Open stores only in the children, or start them with 'spawn' (multiprocessing.set_start_method)."
        )
