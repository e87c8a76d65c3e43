"""The session of a query: what was said in it before, and the turn that is added to it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import Message, Principal
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.sessions import Session

if TYPE_CHECKING:  # it loads SQLAlchemy
    from llama_index_agentic_kb.store.sessions import SessionStore

__all__ = ["Turns", "session_owner"]

LAST: Final = 20
"""Turns of a session that a question is read with; the planner and the writer take fewer."""


def session_owner(principal: Principal | None) -> str:
    """Give the owner under whom a principal's sessions are kept; for ``SessionStore`` and ``SessionMemory``.

    A person whose groups change stays the same person; one who is known by groups alone is another where these differ.

    Args:
        principal: Who asks; None is everybody who asks without one.
    """
    if principal is None:
        return "anyone"
    tenant = quote(principal.tenant or "", safe="")
    if principal.user is not None:
        return f"user:{tenant}/{quote(principal.user, safe='')}"
    groups = "&".join(sorted(quote(group, safe="") for group in principal.groups))
    return f"groups:{tenant}/{groups}"


class Turns:
    """The session of one query.

    Args:
        store: Where sessions are kept; None keeps none.
        query: It names a session, a new one ("-"), or none.
        owner: Whose session it is.

    Raises:
        InvalidRequestError: A session is named, and there is no store.
    """

    def __init__(self, store: SessionStore | None, query: AnswerQuery, owner: str) -> None:
        if query.session is not None and store is None:
            raise InvalidRequestError("session: sessions are not kept here; pass sessions=SessionStore(...)")
        self._store = store
        self._query = query
        self._owner = owner

    async def history(self, deadline: float | None = None) -> list[Message]:
        """Give what was said in the session so far.

        Args:
            deadline: ``time.monotonic()`` at which reading it is given up; None is the store's own time.

        Raises:
            NotFoundError: The owner has no such session.
        """
        store, session = self._store, self._query.session
        if store is None or session is None or self._query.makes_session:
            return []
        said: list[Message] = await Call(
            sync=partial(store.session_messages, self._owner, session, last=LAST, deadline=deadline),
            native=partial(store.asession_messages, self._owner, session, last=LAST, deadline=deadline),
            deadline=deadline,
            what="session",
        )
        return said

    async def keep(self, answer: Answer) -> tuple[Answer, Session | None]:
        """Store the turn; give the answer with its name, and the session without its turns.

        It has the store's own time: a turn is not lost because its answer took all of the request's.

        Raises:
            SessionStoreError: It could not be stored.
        """
        store, query = self._store, self._query
        if store is None or query.session is None:
            return answer, None
        given = (self._owner, query.session, query.question, answer)
        about: dict[str, Any] = {
            "query_id": query.query_id,
            "user_pseudo_id": query.user_pseudo_id,
            "query_config": query.user_labels,
        }
        turn = await Call(
            sync=partial(store.add_turn, *given, **about), native=partial(store.aadd_turn, *given, **about), what="turn"
        )
        session = await Call(
            sync=partial(store.get, self._owner, turn.session_id),
            native=partial(store.aget, self._owner, turn.session_id),
            what="session",
        )
        return answer.model_copy(update={"id": turn.answer_id}), session.model_copy(update={"turns": []})

    @staticmethod
    def failure(error: Exception) -> str:
        """Tell that a turn was not stored."""
        return f"the turn was not stored: {error_message(error)}"
