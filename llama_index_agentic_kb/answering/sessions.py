"""Sessions: the turns of a query, and a LlamaIndex memory over the session store."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory

from llama_index_agentic_kb._aio import bridged
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, NotFoundError
from llama_index_agentic_kb.grounding.citations import strip_markers
from llama_index_agentic_kb.guard.permissions import ConversationOwner, current_principal
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.schema import DialogueState, Message, Principal, ScopeState
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import NEW_SESSION, Answer, AnswerQuery
from llama_index_agentic_kb.schema.grounding import GroundingLedger

if TYPE_CHECKING:  # imports SQLAlchemy
    from llama_index_agentic_kb.store.sessions import SessionStore

MAX_TURNS: Final = 20  # maximum turns of a session to load for a question; the prompts include fewer

STATES: Final[Mapping[str, type[Model]]] = {"dialogue": DialogueState, "scope_state": ScopeState}
"""The parts of a conversation's state, by the field of requests, retrievals and responses."""

TOKEN_LIMIT: Final = 8_000
WINDOW_SHARE: Final = 0.75  # fraction of the model's context window for the memory, as in LlamaIndex's own memories
RECENT: Final = 50  # number of turns to load first; all turns are loaded only if these fit the token limit


def session_owner(principal: Principal | None) -> str:
    """Return the owner key of a principal's sessions: its user, else its groups; all without a principal share one."""
    if principal is None:
        return "anyone"
    tenant = quote(principal.tenant or "", safe="")
    if principal.user is not None:
        return f"user:{tenant}/{quote(principal.user, safe='')}"
    groups = "&".join(sorted(quote(group, safe="") for group in principal.groups))
    return f"groups:{tenant}/{groups}"


def parsed_states(stored: JsonMapping) -> dict[str, Model]:
    """Return the stored state of a conversation, by field of requests; a part that can't be read is left out."""
    states: dict[str, Model] = {"scope_state": ScopeState()}
    for name in STATES.keys() & stored.keys():
        with suppress(InvalidRequestError):
            states[name] = STATES[name].parse(stored[name])
    return states


def states_of(retrieval: object) -> dict[str, Model]:
    """Return the states in a turn's ``Retrieval`` that the next turn of its conversation needs, by field name."""
    return {name: state for name in STATES if (state := getattr(retrieval, name, None)) is not None}


async def read_session(
    store: SessionStore | None, query: AnswerQuery, owner: str, deadline: float | None
) -> tuple[list[Message], dict[str, Model]]:
    """Return the earlier messages and the state of the query's session; a state of the request takes precedence."""
    session = query.session
    if session is None:
        return [], {}
    if store is None:
        raise InvalidRequestError("session: sessions are not kept here; pass sessions=SessionStore(...)")
    if session == NEW_SESSION:
        return [], {**parsed_states({}), **states_of(query.request)}
    messages = await store.asession_messages(owner, session, last=MAX_TURNS, deadline=deadline)
    stored = await store.aget_states(owner, session, deadline=deadline)
    return messages, {**parsed_states(stored), **states_of(query.request)}


class SessionMemory(BaseMemory):
    """A LlamaIndex memory over one session of one owner.

        memory = SessionMemory(SessionStore("sessions.db"), owner="alice")
        chat = AgenticChatEngine(engine, memory=memory)  # stores each turn with its answer

    A turn is stored in one transaction when its answer is put. A question without an answer is buffered in this object
    only; a later question replaces it. Messages that are neither questions nor answers (system messages, tool calls and
    results) are ignored. Engines that put question and answer together (``AgenticChatEngine``) may share one memory;
    engines that put them separately each need their own memory over the same session.

    Args:
        store: The session store.
        owner: The owner of the session: a ``Principal``, or an opaque key. The memory of a principal denies access on
            behalf of other principals (see ``guard.permissions``).
        session_id: The id of a session of the owner; ``-`` creates a new one with the first turn.
        token_limit: The maximum tokens that ``get`` returns, newest turns first; the last turn is always included.

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
        self._session_id = uuid.uuid4().hex if self._is_new else session_id

    @classmethod
    def class_name(cls) -> str:  # noqa: D102 (LlamaIndex's name of serialized forms)
        return "SessionMemory"

    @classmethod
    def from_defaults(cls, chat_history: list[ChatMessage] | None = None, llm: LLM | None = None, **own: Any) -> Self:
        """Create a memory with the arguments of LlamaIndex's memories and of the class (``store``, ``owner``, ...).

        The default token limit is three quarters of the model's context window.
        """
        if own.get("store") is None or not own.get("owner"):
            raise ConfigurationError("SessionMemory: store and owner are needed")
        if own.get("token_limit") is None:
            own["token_limit"] = TOKEN_LIMIT if llm is None else int(llm.metadata.context_window * WINDOW_SHARE)
        memory = cls(**own)
        if chat_history:
            memory.set(chat_history)
        return memory

    @property
    def session_id(self) -> str:
        """The session's id, which is known even before the first turn creates the session."""
        return self._session_id

    async def aget(self, input: str | None = None, initial_token_count: int = 0, **_: object) -> list[ChatMessage]:  # noqa: A002, ARG002 (LlamaIndex's signature)
        """Return the newest turns within the token limit, oldest first, and the unanswered question, if any.

        Raises:
            InvalidRequestError: ``initial_token_count``, which is subtracted from the limit, is above it.
            NotFoundError: The owner has no session of this id.
            DeniedError: The memory belongs to another principal.
        """
        limit = self.token_limit - initial_token_count
        if limit < 0:
            raise InvalidRequestError(
                f"initial_token_count: {initial_token_count} is above the limit of {self.token_limit}"
            )
        stored = await self._read(RECENT)
        fitting = _fitting(stored, limit)
        if len(stored) == 2 * RECENT and len(fitting) == len(stored):
            fitting = _fitting(await self._read(None), limit)
        return [*fitting, *self._waiting()]

    async def aget_all(self) -> list[ChatMessage]:
        """Return the whole session, oldest first, and the unanswered question, if any."""
        return [*(await self._read(None)), *self._waiting()]

    async def aput(self, message: ChatMessage) -> None:
        """Add a message: a question is buffered; an answer completes the turn, which is stored.

        Raises:
            InvalidRequestError: The message is an answer, and there is no unanswered question.
            DeniedError: The memory belongs to another principal.
        """
        await self.aput_messages([message])

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        """Add messages in order; see ``aput``."""
        self._speaker.check(current_principal())
        with self._lock:
            turns, self._question = _completed(messages, self._question)
            session_id, is_new = self._session_id, self._is_new
        if turns:
            await self._store_turns(session_id, turns, is_new=is_new)
            with self._lock:  # do not create the session again if it is deleted later
                self._is_new = self._is_new and session_id != self._session_id

    async def aset(self, messages: list[ChatMessage]) -> None:
        """Switch to a new session that starts with these messages; the old session is kept.

        If the current session already has exactly these turns, it is kept and nothing is stored.

        Raises:
            InvalidRequestError: An answer has no question before it.
        """
        turns, question = _completed(messages, None)
        stored = [message.content for message in await self._read(None)]
        session_id, is_new = self._session_id, self._is_new
        if stored != [text for turn in turns for text in turn]:
            session_id, is_new = uuid.uuid4().hex, not turns
            await self._store_turns(session_id, turns, is_new=True)
        self._go_on_in(session_id, is_new=is_new, question=question)

    async def areset(self) -> None:
        """Start a new session. The old one is kept; use ``SessionStore.delete`` to delete it.

        Raises:
            DeniedError: The memory belongs to another principal.
        """
        self._speaker.check(current_principal())
        self._go_on_in(uuid.uuid4().hex, is_new=True, question=None)

    # Functions, which pydantic takes for methods; the checker reads the base class's signatures.
    get = bridged(aget)  # type: ignore[arg-type, pydantic-field]
    get_all = bridged(aget_all)  # type: ignore[arg-type, pydantic-field]
    put = bridged(aput)  # type: ignore[arg-type, pydantic-field]
    put_messages = bridged(aput_messages)  # type: ignore[arg-type, pydantic-field]
    set = bridged(aset)  # type: ignore[arg-type, pydantic-field]
    reset = bridged(areset)  # type: ignore[arg-type, pydantic-field]

    async def aget_states(self) -> JsonObject:
        """Return the state of the session's conversation, by part; empty if there is none."""
        self._speaker.check(current_principal())
        return await self._store.aget_states(self.owner, self._session_id)

    async def aset_states(self, states: JsonMapping) -> None:
        """Store the state of the session's conversation; see ``SessionStore.aset_states``."""
        self._speaker.check(current_principal())
        await self._store.aset_states(self.owner, self._session_id, states)

    async def _read(self, last: int | None) -> list[ChatMessage]:
        """Return the messages of the newest stored turns (None for all); empty if the session is new."""
        self._speaker.check(current_principal())
        try:
            stored = await self._store.asession_messages(self.owner, self._session_id, last=last)
        except NotFoundError:
            if not self._is_new:
                raise
            return []
        return [ChatMessage(role=MessageRole(message.role), content=message.text) for message in stored]

    def _waiting(self) -> list[ChatMessage]:
        question = self._question
        return [] if question is None else [ChatMessage(role=MessageRole.USER, content=question)]

    async def _store_turns(self, session_id: str, turns: Sequence[tuple[str, str]], *, is_new: bool) -> None:
        for question, text in turns:
            answer = Answer(id=uuid.uuid4().hex, text=text)  # so that a retried call stores the turn only once
            await self._store.aadd_turn(self.owner, session_id, question, answer, may_make=is_new)

    def _go_on_in(self, session_id: str, *, is_new: bool, question: str | None) -> None:
        with self._lock:
            self._session_id, self._is_new, self._question = session_id, is_new, question


def _completed(messages: Sequence[ChatMessage], waiting: str | None) -> tuple[list[tuple[str, str]], str | None]:
    """Return the completed turns as (question, answer), and the unanswered question after them; the rest is skipped."""
    turns = []
    for message in messages:
        calls = any(block.block_type == "tool_call" for block in message.blocks)
        if message.role is MessageRole.USER:
            waiting = message.content or ""
        elif message.role is MessageRole.ASSISTANT and not (calls or message.additional_kwargs.get("tool_calls")):
            if waiting is None:
                raise InvalidRequestError(
                    "messages: an answer without a question before it; a session holds questions with their answers"
                )
            # Without markers, since a session's turns have no references.
            turns.append((waiting, strip_markers(message.content or "", GroundingLedger())[0]))
            waiting = None
    return turns, waiting


def _fitting(messages: Sequence[ChatMessage], limit: int) -> list[ChatMessage]:
    """Return the messages of the newest turns within a token limit, and always those of the last turn."""
    start = len(messages)
    while start >= 2:  # noqa: PLR2004 (question and answer)
        limit -= sum(count_tokens(message.content or "") for message in messages[start - 2 : start])
        if limit < 0 and start < len(messages):
            break
        start -= 2
    return list(messages[start:])
