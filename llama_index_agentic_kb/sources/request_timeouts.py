"""Gives requests to a Chroma server an end, where the client that the user made gives them none.

Chroma's HTTP client waits for ever (httpx with ``timeout=None``): a server that is stopped keeps each thread that asks
it. The user's client is left as it is. Our searches go through a twin of its store that sends the same requests on the
same connections, each with the time that its call has left.
"""

from __future__ import annotations

import copy
import time
from typing import Any, Final, TypeVar

from llama_index_agentic_kb.guard.bulkhead import call_deadline

__all__ = ["with_request_timeouts"]

WITHOUT_DEADLINE: Final = 60.0
"""Seconds of a request in a call that has no deadline."""

MARGIN: Final = 0.25
"""Seconds after its call's deadline at which a request ends: whoever waits is told of the deadline, not of this."""

Store = TypeVar("Store")


def with_request_timeouts(store: Store) -> Store:
    """Give a twin of a vector store over Chroma's HTTP client; any other store, and one with a timeout, as it is.

    Args:
        store: Any vector store.
    """
    collection = getattr(store, "_collection", None)
    server = getattr(collection, "_client", None)
    session = getattr(server, "_session", None)
    timeout = getattr(session, "timeout", None)
    if timeout is None or getattr(timeout, "read", 0) is not None or not hasattr(store, "model_copy"):
        return store
    timed_server = copy.copy(server)
    timed_server._session = _TimedSession(session)  # type: ignore[union-attr]  # noqa: SLF001 (of Chroma's client; a copy)
    timed_collection = copy.copy(collection)
    timed_collection._client = timed_server  # type: ignore[union-attr]  # noqa: SLF001 (a copy)
    twin: Any = store.model_copy()
    twin._collection = timed_collection  # noqa: SLF001 (a copy)
    return twin  # type: ignore[no-any-return]


class _TimedSession:
    """An ``httpx.Client`` whose requests have a timeout.

    Args:
        session: Sends them.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request; see ``httpx.Client.request``."""
        return self._session.request(*args, **{"timeout": _seconds_left(), **kwargs})


def _seconds_left() -> float:
    deadline = call_deadline()
    return WITHOUT_DEADLINE if deadline is None else max(0.0, deadline - time.monotonic()) + MARGIN
