"""Sessions that keep the state of a conversation from one ``retrieve`` to the next."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final, Self

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.answering.sessions import parsed_states, session_owner, states_of
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.schema import MissingPart, Outcome, Principal, RetrievalRequest, RetrievalResponse
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION
from llama_index_agentic_kb.server.errors import ForbiddenError
from llama_index_agentic_kb.store.sessions import SessionStore

SESSION: Final = "x-agentic-kb-session"
"""The header of a request and its response that names the session; "-" makes one."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of a conversation (``ScopeState``, ``DialogueState``), kept in a session of its principal.

    The messages are the client's, as in any request; the session has no turns.
    """

    store: SessionStore
    owner: str
    id: str
    is_new: bool
    """Whether ``keep`` makes the session: a question that is refused or fails leaves none."""

    @classmethod
    async def opened(cls, store: SessionStore, principal: Principal | None, named: str) -> Self:
        """Return the state of a session that a principal has, or of a new one.

        Raises:
            ForbiddenError: There is no user.
            NotFoundError: The principal has no such session.
        """
        if principal is None or principal.user is None:
            raise ForbiddenError(f"{SESSION}: a session needs the token of a user")
        owner, is_new = session_owner(principal), named == NEW_SESSION
        if not is_new:
            await store.aget(owner, named)
        return cls(store, owner, uuid.uuid4().hex if is_new else named, is_new)

    async def added_to(self, request: RetrievalRequest) -> RetrievalRequest:
        """Return a request with the state."""
        stored = {} if self.is_new else await self.store.aget_states(self.owner, self.id)
        return request.model_copy(update=parsed_states(stored))

    async def keep(self, response: RetrievalResponse) -> None:
        """Store the state after a response; if that fails, the response says so in ``missing``."""
        states = {name: state.to_dict() for name, state in states_of(response).items()}
        try:
            await self.store.aset_states(self.owner, self.id, states, may_make=self.is_new)
        except AgenticKBError as error:  # what was answered, and maybe written, is not lost
            reason = f"the conversation's state was not stored: {error_message(error)}"
            response.missing.append(MissingPart(what="session", outcome=Outcome.ERROR, reason=reason))
            response.status_code = 206
