"""Sessions that keep the state of a conversation from one ``retrieve`` to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from llama_index_agentic_kb.answering.sessions import parsed_states, session_owner, states_of
from llama_index_agentic_kb.errors import DeniedError
from llama_index_agentic_kb.schema import Principal, RetrievalRequest, RetrievalResponse
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION
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

    @classmethod
    async def opened(cls, store: SessionStore, principal: Principal | None, named: str) -> Self:
        """Return the state of a session that a principal has, or of a new one.

        Raises:
            DeniedError: There is no principal.
            NotFoundError: The principal has no such session.
        """
        if principal is None:
            raise DeniedError(f"{SESSION}: a session needs the token of a user")
        owner = session_owner(principal)
        session = await (store.acreate(owner) if named == NEW_SESSION else store.aget(owner, named))
        return cls(store, owner, session.id)

    async def added_to(self, request: RetrievalRequest) -> RetrievalRequest:
        """Return a request with the state."""
        return request.model_copy(update=parsed_states(await self.store.aget_states(self.owner, self.id)))

    async def keep(self, response: RetrievalResponse) -> None:
        """Store the state after a response."""
        states = {name: state.to_dict() for name, state in states_of(response).items()}
        await self.store.aset_states(self.owner, self.id, states)
