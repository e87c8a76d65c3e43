"""What a double answers: always the same, one after another, or whatever a function says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

__all__ = ["Script", "ScriptExhaustedError"]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class ScriptExhaustedError(LookupError):
    """A list of replies was used up and one more was asked for.

    It is raised rather than repeating the last reply, because an unexpected call is what a test should notice.
    """


class Script(Generic[Asked, Answer]):
    """Answers, given to any number of threads.

    Args:
        replies: A list or tuple is consumed in order, once; a callable is asked each time, in the calling thread;
            anything else is the answer to every call.
    """

    def __init__(self, replies: Answer | Sequence[Answer] | Callable[[Asked], Answer]) -> None:
        self._replies = replies
        self._used = 0
        self._lock = threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        """Return the next answer.

        Raises:
            ScriptExhaustedError: A list of replies is used up.
        """
        if callable(self._replies):
            return self._replies(asked)
        if isinstance(self._replies, list | tuple):
            return self._next(self._replies)
        return cast("Answer", self._replies)

    def _next(self, replies: Sequence[Answer]) -> Answer:
        with self._lock:
            self._used += 1
            if self._used > len(replies):
                raise ScriptExhaustedError(
                    f"The script holds {len(replies)} replies and this is call {self._used}. "
                    "Add a reply, or pass a callable or a single reply to answer any number of calls."
                )
            return replies[self._used - 1]
