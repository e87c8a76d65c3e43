"""A LlamaIndex memory over the session store: chat engines, a server and a notebook share one session.

store = SessionStore("sessions.db")
memory = SessionMemory(store, owner="alice")
chat = AgenticChatEngine(engine, memory=memory)       # each turn is stored with its answer
kb.as_retriever(memory=memory)                        # reads the same conversation
store.get("alice", memory.session_id)                 # so does everybody else
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Self

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory

from llama_index_agentic_kb._aio import Call, arun, run
from llama_index_agentic_kb.answering.conversation import as_messages, completed_turns, fitting_turns
from llama_index_agentic_kb.answering.turns import session_owner
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.guard.conversations import ConversationOwner
from llama_index_agentic_kb.guard.permissions import current_principal
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION

if TYPE_CHECKING:  # it loads SQLAlchemy
    from llama_index_agentic_kb.store.sessions import SessionStore

__all__ = ["SessionMemory"]

TOKEN_LIMIT: Final = 8_000
WINDOW_SHARE: Final = 0.75
"""Of a model's window, as in LlamaIndex's own memories."""
RECENT: Final = 50
"""Turns that are read first: hardly any conversation has more that fit the limit."""


class SessionMemory(BaseMemory):
    """One session of one owner as the memory of a conversation.

    A turn is stored whole, in one transaction, when its answer is put: a question that got no answer is held here, for
    the engines that put a question before they answer it, and never stored; a later question takes its place. Messages
    that are neither questions nor answers (system, tools, calls of tools) are not kept: they are no part of a session.
    Engines that put question and answer together (``AgenticChatEngine``) may share one memory; of those that put them
    one by one, each needs a memory of its own, over the same session.

    Args:
        store: Where sessions are kept.
        owner: Whose session it is: a ``Principal``, or an opaque key of one person. A principal's memory is denied to
            whoever acts for another (see ``guard.permissions``).
        session_id: A session that is there; ``-`` makes a new one with its first turn. ``session_id`` tells its id.
        token_limit: Tokens that ``get`` gives at most, the newest turns; it gives the last turn in any case.

    Raises:
        ConfigurationError: The token limit is below 1.
    """

    owner: str
    token_limit: int = Field(default=TOKEN_LIMIT, ge=1)

    _store: SessionStore = PrivateAttr()
    _session_id: str = PrivateAttr()
    _is_new: bool = PrivateAttr()
    _question: str | None = PrivateAttr(default=None)
    _lock: Lock = PrivateAttr(default_factory=Lock)
    _speaker: ConversationOwner = PrivateAttr(default_factory=ConversationOwner)

    def __init__(
        self,
        store: SessionStore,
        *,
        owner: str | Principal,
        session_id: str = NEW_SESSION,
        token_limit: int = TOKEN_LIMIT,
    ) -> None:
        if token_limit < 1:
            raise ConfigurationError(f"token_limit: must be at least 1, got {token_limit}")
        super().__init__(owner=owner if isinstance(owner, str) else session_owner(owner), token_limit=token_limit)
        self._store = store
        if isinstance(owner, Principal):
            self._speaker.claim(owner)
        self._is_new = session_id == NEW_SESSION
        self._session_id = _new_id() if self._is_new else session_id

    @classmethod
    def class_name(cls) -> str:
        """Name the class in serialized forms."""
        return "SessionMemory"

    @classmethod
    def from_defaults(  # type: ignore[override]  # named arguments, as LlamaIndex's own memories have
        cls,
        chat_history: list[ChatMessage] | None = None,
        llm: LLM | None = None,
        *,
        store: SessionStore | None = None,
        owner: str | Principal = "",
        session_id: str = NEW_SESSION,
        token_limit: int | None = None,
    ) -> Self:
        """Make one as LlamaIndex's memories are made.

        Args:
            chat_history: A conversation to begin with; see ``set``.
            llm: Three quarters of its window are the limit, where none is given.
            store: See the class; needed.
            owner: See the class; needed.
            session_id: See the class.
            token_limit: See the class.

        Raises:
            ConfigurationError: There is no store, or no owner.
        """
        if store is None or not owner:
            raise ConfigurationError("SessionMemory: store and owner are needed")
        window = TOKEN_LIMIT if llm is None else int(llm.metadata.context_window * WINDOW_SHARE)
        memory = cls(store, owner=owner, session_id=session_id, token_limit=token_limit or window)
        if chat_history:
            memory.set(chat_history)
        return memory

    @property
    def session_id(self) -> str:
        """The session's id; of a new one also before its first turn makes it."""
        return self._session_id

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, input: str | None = None, initial_token_count: int = 0, **kwargs: Any) -> list[ChatMessage]:  # noqa: A002 (LlamaIndex's name)
        """Give the newest turns that fit the limit, oldest first, and the question that waits for its answer.

        Args:
            input: Not looked at.
            initial_token_count: Tokens that something else takes of the limit.
            kwargs: Not looked at.

        Raises:
            InvalidRequestError: ``initial_token_count`` is above the limit.
            NotFoundError: The owner has no such session.
            DeniedError: It is read on behalf of another principal.
        """
        del input, kwargs
        return run(self._get(initial_token_count))

    async def aget(self, input: str | None = None, initial_token_count: int = 0, **kwargs: Any) -> list[ChatMessage]:  # noqa: A002 (same)
        """Give the newest turns that fit the limit; see ``get``."""
        del input, kwargs
        return await arun(self._get(initial_token_count))

    def get_all(self) -> list[ChatMessage]:
        """Give the whole session, oldest first, and the question that waits for its answer."""
        return run(self._get_all())

    async def aget_all(self) -> list[ChatMessage]:
        """Give the whole session; see ``get_all``."""
        return await arun(self._get_all())

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, message: ChatMessage) -> None:
        """Take a message: a question is held, an answer stores the turn that it completes.

        Raises:
            InvalidRequestError: It is an answer, and no question waits for one.
            DeniedError: It is put on behalf of another principal.
        """
        run(self._put([message]))

    async def aput(self, message: ChatMessage) -> None:
        """Take a message; see ``put``."""
        await arun(self._put([message]))

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """Take messages in their order; see ``put``."""
        run(self._put(messages))

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        """Take messages in their order; see ``put``."""
        await arun(self._put(messages))

    def set(self, messages: list[ChatMessage]) -> None:
        """Go on with another conversation: a new session that begins with these turns.

        Nothing is stored, and the session stays, where it holds just these turns. The old session is kept as it is.

        Raises:
            InvalidRequestError: An answer has no question before it.
        """
        run(self._set(messages))

    async def aset(self, messages: list[ChatMessage]) -> None:
        """Go on with another conversation; see ``set``."""
        await arun(self._set(messages))

    def reset(self) -> None:
        """Begin a new session. The old one is kept: ``SessionStore.delete`` deletes sessions."""
        self._go_on_in(_new_id(), is_new=True, question=None)

    async def areset(self) -> None:
        """Begin a new session; see ``reset``."""
        self.reset()

    # -- one body for both -----------------------------------------------------------------------------------------

    async def _get(self, used: int) -> list[ChatMessage]:
        if used > self.token_limit:
            raise InvalidRequestError(f"initial_token_count: {used} is above the limit of {self.token_limit}")
        said = await self._read(RECENT)
        fitting = fitting_turns(said, self.token_limit - used)
        if len(said) == 2 * RECENT and len(fitting) == len(said):
            fitting = fitting_turns((await self._read(None)), self.token_limit - used)
        return [*fitting, *self._waiting()]

    async def _get_all(self) -> list[ChatMessage]:
        return [*(await self._read(None)), *self._waiting()]

    async def _read(self, last: int | None) -> list[ChatMessage]:
        """Give the stored turns; a session that nobody has spoken in is not there yet."""
        self._speaker.check(current_principal())
        args = partial(self._store.session_messages, self.owner, self._session_id, last=last)
        native = partial(self._store.asession_messages, self.owner, self._session_id, last=last)
        try:
            found = await Call(sync=args, native=native, what="session")
        except NotFoundError:
            if not self._is_new:
                raise
            return []
        return [ChatMessage(role=MessageRole(message.role), content=message.text) for message in found]

    def _waiting(self) -> list[ChatMessage]:
        question = self._question
        return [] if question is None else [ChatMessage(role=MessageRole.USER, content=question)]

    async def _put(self, messages: Sequence[ChatMessage]) -> None:
        self._speaker.check(current_principal())
        with self._lock:
            turns, self._question = completed_turns(messages, self._question)
            session_id, is_new = self._session_id, self._is_new
        if turns:
            await self._store_turns(session_id, turns, is_new=is_new)
            self._is_there(session_id)

    async def _set(self, messages: Sequence[ChatMessage]) -> None:
        turns, question = completed_turns(messages, None)
        stored = await self._read(None)
        if [(one.role, one.content) for one in stored] == list(as_messages(turns)):
            self._go_on_in(self._session_id, is_new=self._is_new, question=question)
            return
        session_id = _new_id()
        await self._store_turns(session_id, turns, is_new=True)
        self._go_on_in(session_id, is_new=not turns, question=question)

    async def _store_turns(self, session_id: str, turns: Iterable[tuple[str, str]], *, is_new: bool) -> None:
        for question, answer in turns:
            # Named here: a call that is made again stores the turn once.
            whole = Answer(id=uuid.uuid4().hex, text=answer)
            given = (self.owner, session_id, question, whole)
            await Call(
                sync=partial(self._store.add_turn, *given, may_make=is_new),
                native=partial(self._store.aadd_turn, *given, may_make=is_new),
                what="session",
            )

    def _is_there(self, session_id: str) -> None:
        """Remember that a session is made: one that is deleted from then on is not made again."""
        with self._lock:
            self._is_new = self._is_new and session_id != self._session_id

    def _go_on_in(self, session_id: str, *, is_new: bool, question: str | None) -> None:
        with self._lock:
            self._session_id, self._is_new, self._question = session_id, is_new, question


def _new_id() -> str:
    return uuid.uuid4().hex
