"""Conversations belong to somebody: what was said in one was made of what that one may see."""

from __future__ import annotations

from threading import Lock
from typing import Any

from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema.principal import Principal

__all__ = ["ConversationOwner"]


class ConversationOwner:
    """Whose a conversation is: its answers were made of what one principal may see. Thread-safe.

    The first who speaks in it owns it. A person whose groups change stays the same person; one who is known by groups
    alone is another where these differ.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: tuple[Any, ...] | None = None

    def claim(self, principal: Principal | None) -> None:
        """Take the conversation, or go on in one's own.

        Raises:
            DeniedError: It is another's.
        """
        with self._lock:
            self._owner = self._owner or _who(principal)
            if self._owner != _who(principal):
                raise DeniedError("the conversation is another principal's: make a chat engine, and a memory, for each")

    def check(self, principal: Principal | None) -> None:
        """Make sure that a principal may read the conversation; who asks for nobody (None) may.

        Raises:
            DeniedError: It is another's.
        """
        if principal is not None and self._owner not in (None, _who(principal)):
            raise DeniedError("the conversation is another principal's")

    def release(self) -> None:
        """Let the next who speaks own it: nothing of it is left."""
        with self._lock:
            self._owner = None


def _who(principal: Principal | None) -> tuple[Any, ...]:
    if principal is None:
        return ("nobody",)
    if principal.user is not None:
        return ("user", principal.tenant, principal.user)
    return ("groups", principal.tenant, principal.groups)
