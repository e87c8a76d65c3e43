"""Sessions: conversations with their whole answers, kept in SQL, each by one owner.

    store = SessionStore("sessions.db")              # or postgresql://user@host/database
    turn = store.add_turn("alice", "-", "Who directed Titanic?", answer)
    store.session_messages("alice", turn.session_id) # the conversation so far, for a chat engine
    session = await store.aget("alice", turn.session_id, include_answers=True)

A turn (question, whole answer, times) is stored in one transaction: it is there whole once ``add_turn`` returns, or not
at all. Turns of a session are numbered 1, 2, ... in the order in which they were stored, whoever stores them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from sqlalchemy import Connection

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, run
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.answer import Answer, AnswerState
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION
from llama_index_agentic_kb.schema.request import Message
from llama_index_agentic_kb.schema.sessions import Session, SessionChanges, SessionPage, SessionQuery, Turn
from llama_index_agentic_kb.store import session_reads as reads
from llama_index_agentic_kb.store import session_writes as writes
from llama_index_agentic_kb.store.session_database import SessionDatabase
from llama_index_agentic_kb.store.session_keys import NewSession, NewTurn, Said, checked_owner, key_of

__all__ = ["SessionStore"]

T = TypeVar("T")

_DONE: Final = (AnswerState.SUCCEEDED, AnswerState.FAILED)


class SessionStore:
    """Sessions and answers in SQLite or PostgreSQL; safe for threads, processes and forked children.

    Every call names an owner, an opaque key (of a tenant's user, say); another owner's session is not found. Calls
    that come to nothing leave nothing behind. A call that ran into its deadline may yet be carried out: storing a turn
    again under the same ``answer.id`` stores it once.

    Args:
        url: A path (SQLite), or a URL: ``sqlite:///file``, ``postgresql://...`` (needs psycopg 3). Tables are made, and
            brought to this release's form, when it is opened.
        timeout: Seconds that a call may take where it has no earlier deadline; also waits for other writers and for a
            server that is restarted.
        connections: The most connections, and threads, at once.

    Raises:
        ConfigurationError: The URL can't be used, or the database is of a newer release.
        SessionStoreError: The database can't be opened.
    """

    def __init__(self, url: str | Path, *, timeout: float = 30.0, connections: int = 8) -> None:
        if timeout <= 0 or connections < 1:
            raise ConfigurationError("SessionStore: timeout must be positive, and connections at least 1")
        self._timeout = timeout
        self._database = SessionDatabase(url, connections=connections, timeout=timeout)
        self._pool = WorkerPool("sessions", connections)

    def __enter__(self) -> Self:
        """Give the store; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close idle connections."""
        self.close()

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
        self._database.close()

    def create(self, owner: str, changes: SessionChanges | None = None, *, deadline: float | None = None) -> Session:
        """Make a session without turns.

        Args:
            owner: Whose it is.
            changes: What is said of it; its display name, if none is given, will be the first question.
            deadline: ``time.monotonic()``; None is the store's timeout.
        """
        return run(self._create(owner, changes, deadline))

    async def acreate(
        self, owner: str, changes: SessionChanges | None = None, *, deadline: float | None = None
    ) -> Session:
        """Make a session without turns; see ``create``."""
        return await arun(self._create(owner, changes, deadline))

    def get(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Give a session with its turns, in their order.

        With ``include_answers`` each turn has its whole answer; else only the answer's id.

        Raises:
            NotFoundError: The owner has no such session.
        """
        return run(self._get(owner, session_id, include_answers, deadline))

    async def aget(
        self, owner: str, session_id: str, *, include_answers: bool = False, deadline: float | None = None
    ) -> Session:
        """Give a session with its turns; see ``get``."""
        return await arun(self._get(owner, session_id, include_answers, deadline))

    def list_sessions(
        self, owner: str, query: SessionQuery | None = None, *, deadline: float | None = None
    ) -> SessionPage:
        """List an owner's sessions, without turns; by default those changed last first, 50 a page.

        Raises:
            InvalidRequestError: The filter asks for what sessions don't have, or the page's token is none.
        """
        return run(self._list_sessions(owner, query, deadline))

    async def alist_sessions(
        self, owner: str, query: SessionQuery | None = None, *, deadline: float | None = None
    ) -> SessionPage:
        """List an owner's sessions; see ``list_sessions``."""
        return await arun(self._list_sessions(owner, query, deadline))

    def update(self, owner: str, session_id: str, changes: SessionChanges, *, deadline: float | None = None) -> Session:
        """Change a session's display name, labels, pin or user, and give it without turns.

        Raises:
            NotFoundError: The owner has no such session.
        """
        return run(self._update(owner, session_id, changes, deadline))

    async def aupdate(
        self, owner: str, session_id: str, changes: SessionChanges, *, deadline: float | None = None
    ) -> Session:
        """Change a session; see ``update``."""
        return await arun(self._update(owner, session_id, changes, deadline))

    def delete(self, owner: str, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session with all its turns and answers.

        Raises:
            NotFoundError: The owner has no such session.
        """
        run(self._delete(owner, session_id, deadline))

    async def adelete(self, owner: str, session_id: str, *, deadline: float | None = None) -> None:
        """Delete a session; see ``delete``."""
        await arun(self._delete(owner, session_id, deadline))

    def add_turn(
        self,
        owner: str,
        session_id: str,
        query: str,
        answer: Answer,
        *,
        query_id: str = "",
        query_config: Mapping[str, str] | None = None,
        user_pseudo_id: str = "",
        may_make: bool = False,
        deadline: float | None = None,
    ) -> Turn:
        """Store a question and its whole answer as the next turn of a session.

        Args:
            owner: Whose session it is.
            session_id: The session; ``-`` makes one in the same transaction.
            query: The question.
            answer: The answer, succeeded or failed. Without an id it gets one. A turn with its id that the session has
                already is given back, and nothing is stored.
            query_id: The question's id, if it has one.
            query_config: What else is kept of the question.
            user_pseudo_id: Of a session that is made: its user.
            may_make: Whether a session that is not there is made, under this id and in the same transaction.
            deadline: ``time.monotonic()``; None is the store's timeout.

        Raises:
            InvalidRequestError: The answer is not complete.
            NotFoundError: The owner has no such session.
        """
        said = Said(query, query_id, dict(query_config or {}), user_pseudo_id)
        return run(self._add_turn(owner, session_id, said, answer, deadline, may_make=may_make))

    async def aadd_turn(
        self,
        owner: str,
        session_id: str,
        query: str,
        answer: Answer,
        *,
        query_id: str = "",
        query_config: Mapping[str, str] | None = None,
        user_pseudo_id: str = "",
        may_make: bool = False,
        deadline: float | None = None,
    ) -> Turn:
        """Store a question and its whole answer; see ``add_turn``."""
        said = Said(query, query_id, dict(query_config or {}), user_pseudo_id)
        return await arun(self._add_turn(owner, session_id, said, answer, deadline, may_make=may_make))

    def get_answer(self, owner: str, session_id: str, answer_id: str, *, deadline: float | None = None) -> Answer:
        """Give an answer of a session.

        Raises:
            NotFoundError: The owner has no such session, or it has no such answer.
        """
        return run(self._get_answer(owner, session_id, answer_id, deadline))

    async def aget_answer(
        self, owner: str, session_id: str, answer_id: str, *, deadline: float | None = None
    ) -> Answer:
        """Give an answer of a session; see ``get_answer``."""
        return await arun(self._get_answer(owner, session_id, answer_id, deadline))

    def session_messages(
        self, owner: str, session_id: str, *, last: int | None = None, deadline: float | None = None
    ) -> list[Message]:
        """Give a session as a conversation, oldest first: a user's and an assistant's message for each turn.

        It is what ``RetrievalRequest.messages`` and a chat engine's history begin with. Turns that were not answered
        for what was asked, or for what the answer said, are left out: else the next question would ask again for them.

        Args:
            owner: Whose session it is.
            session_id: Its id; ``-``, a session that is yet to be made, has no messages.
            last: How many turns at most, the newest; None gives all.
            deadline: ``time.monotonic()``; None is the store's timeout.

        Raises:
            NotFoundError: The owner has no such session.
        """
        return run(self._messages(owner, session_id, last, deadline))

    async def asession_messages(
        self, owner: str, session_id: str, *, last: int | None = None, deadline: float | None = None
    ) -> list[Message]:
        """Give a session as a conversation; see ``session_messages``."""
        return await arun(self._messages(owner, session_id, last, deadline))

    # -- one body for both ---------------------------------------------------------------------------------------

    def _create(
        self, owner: str, changes: SessionChanges | None, deadline: float | None
    ) -> Coroutine[Any, Any, Session]:
        made = NewSession(checked_owner(owner), uuid.uuid4().hex, datetime.now(UTC), changes or SessionChanges())
        return self._do("creating a session", partial(writes.create, made), deadline, write=True)

    def _get(
        self, owner: str, session_id: str, include_answers: bool, deadline: float | None
    ) -> Coroutine[Any, Any, Session]:
        key = key_of(owner, session_id)
        work = partial(reads.load, key, include_answers=include_answers)
        return self._do("reading a session", work, deadline, write=False)

    def _list_sessions(
        self, owner: str, query: SessionQuery | None, deadline: float | None
    ) -> Coroutine[Any, Any, SessionPage]:
        work = partial(reads.page, checked_owner(owner), query or SessionQuery())
        return self._do("listing sessions", work, deadline, write=False)

    def _update(
        self, owner: str, session_id: str, changes: SessionChanges, deadline: float | None
    ) -> Coroutine[Any, Any, Session]:
        work = partial(writes.update, key_of(owner, session_id), changes, datetime.now(UTC))
        return self._do("changing a session", work, deadline, write=True)

    def _delete(self, owner: str, session_id: str, deadline: float | None) -> Coroutine[Any, Any, None]:
        work = writes.Deletion(key_of(owner, session_id))
        return self._do("deleting a session", work, deadline, write=True)

    def _add_turn(
        self, owner: str, session_id: str, said: Said, answer: Answer, deadline: float | None, *, may_make: bool
    ) -> Coroutine[Any, Any, Turn]:
        if answer.state not in _DONE:
            raise InvalidRequestError(
                f"answer.state: a turn holds a whole answer, succeeded or failed; this one is {answer.state.value!r}"
            )
        named = answer if answer.id else answer.model_copy(update={"id": uuid.uuid4().hex})
        if session_id == NEW_SESSION:
            # Of the answer's id: storing the same turn again finds the session that the first try made.
            may_make, session_id = True, uuid.uuid5(uuid.NAMESPACE_OID, f"{owner}\n{named.id}").hex
        now, key = datetime.now(UTC), key_of(owner, session_id)
        made = NewSession(*key, now, SessionChanges(user_pseudo_id=said.user_pseudo_id)) if may_make else None
        work = partial(writes.add_turn, NewTurn(key, said, named, now, made))
        return self._do("storing a turn", work, deadline, write=True)

    def _get_answer(
        self, owner: str, session_id: str, answer_id: str, deadline: float | None
    ) -> Coroutine[Any, Any, Answer]:
        work = partial(reads.load_answer, key_of(owner, session_id), answer_id)
        return self._do("reading an answer", work, deadline, write=False)

    async def _messages(self, owner: str, session_id: str, last: int | None, deadline: float | None) -> list[Message]:
        if last is not None and last < 1:
            raise InvalidRequestError(f"last: at least 1 turn, or None for all; got {last}")
        if session_id == NEW_SESSION:
            return []
        work = partial(reads.messages, key_of(owner, session_id), last)
        return await self._do("reading a conversation", work, deadline, write=False)

    async def _do(self, what: str, work: Callable[[Connection], T], deadline: float | None, *, write: bool) -> T:
        """Run work in a transaction, on a thread of the store's own."""
        limit = time.monotonic() + self._timeout
        until = limit if deadline is None else min(limit, deadline)
        transact = partial(self._database.transact, work, write=write, deadline=until, what=what)
        result: T = await Call(sync=transact, deadline=until, pool=self._pool, what=what)
        return result
