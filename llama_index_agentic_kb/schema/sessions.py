"""Sessions: stored conversations, with a turn for each question and its whole answer."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import AwareDatetime, Field

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import Answer
from llama_index_agentic_kb.schema.filters import FilterNode

__all__ = ["Session", "SessionChanges", "SessionOrder", "SessionPage", "SessionQuery", "SessionState", "Turn"]


class SessionState(StrEnum):
    """How far a session is. Google's has no other state, ended or not."""

    IN_PROGRESS = "inProgress"


class Turn(Model):
    """One question and its answer."""

    session_id: str
    number: int = Field(ge=1)
    """Its place in the session; 1, 2, ... without a gap."""
    query: str
    query_id: str = ""
    answer_id: str
    answer: Answer | None = None
    """The whole answer; None where only its name was asked for."""
    query_config: dict[str, str] = Field(default_factory=dict)
    created_at: AwareDatetime
    """When the question was asked, as far as the answer says; else when the turn was stored."""
    completed_at: AwareDatetime
    """When the turn was stored."""


class Session(Model):
    """A conversation of one owner."""

    id: str
    display_name: str = ""
    """At first the first question."""
    state: SessionState = SessionState.IN_PROGRESS
    user_pseudo_id: str = ""
    turns: list[Turn] = Field(default_factory=list)
    labels: list[str] = Field(default_factory=list)
    is_pinned: bool = False
    started_at: AwareDatetime
    updated_at: AwareDatetime
    """When its last turn was stored, or it was last changed."""
    ended_at: AwareDatetime | None = None
    """When its last answer was complete; None before the first. Further turns may follow."""


class SessionPage(Model):
    """Some of an owner's sessions; their turns are not listed."""

    sessions: list[Session] = Field(default_factory=list)
    next_page_token: str | None = None
    """Asks for the next page; None on the last one."""


class SessionChanges(Model):
    """Changes of a session; None leaves a field as it is."""

    display_name: str | None = None
    labels: list[str] | None = None
    is_pinned: bool | None = None
    user_pseudo_id: str | None = None


class SessionOrder(Model):
    """The order of sessions."""

    key: Literal["updated_at", "started_at", "id", "is_pinned"]
    descending: bool = False


class SessionQuery(Model):
    """Which of an owner's sessions are listed, and in which order."""

    page_size: int = Field(default=50, ge=1, le=1000)
    page_token: str | None = None
    filters: FilterNode | None = None
    """Of ``id``, ``display_name``, ``user_pseudo_id``, ``state``, ``is_pinned``, ``labels`` (``any``), ``started_at``
    and ``updated_at`` (RFC 3339)."""
    order_by: list[SessionOrder] = Field(default_factory=lambda: [SessionOrder(key="updated_at", descending=True)])
