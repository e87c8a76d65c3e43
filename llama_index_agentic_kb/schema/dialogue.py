"""The state of a conversation that uses tools: what the user wants, what is known, and what waits for confirmation.

A program passes the state of the last response into the next request, and keeps it in between with the conversation. It
is created from the user's messages and the tools' schemas only, never from retrieved text.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field, JsonValue

from llama_index_agentic_kb.schema._model import Model


class DialogueStage(StrEnum):
    """What the conversation is waiting for."""

    OPEN = "open"
    """Nothing: no tool was asked for, or the user changed their mind."""
    ASKING = "asking"
    """The missing arguments of a tool; the response asks for them."""
    CONFIRMING = "confirming"
    """The user's confirmation of a call that changes something."""
    DONE = "done"
    """Nothing: the tool was called in this turn, or its confirmation was declined."""


class _Frozen(Model):
    model_config = ConfigDict(frozen=True)


class PendingWrite(_Frozen):
    """A call that changes something, waiting for confirmation.

    The user confirms with "yes", declines with "no", or names the token: ``confirm TOKEN``, ``cancel TOKEN``.
    """

    token: str  # random text, also the call's idempotency key: a token is executed at most once
    tool: str
    arguments: dict[str, JsonValue]
    asked_of: str  # a digest of the principal who was asked; nobody else can confirm


class TopicShift(_Frozen):
    """A change of the user's mind."""

    from_tool: str
    to_tool: str | None = None
    cleared: tuple[str, ...] = ()  # names of the arguments that were forgotten
    kept: tuple[str, ...] = ()  # names of the arguments that were kept, because another tool takes them too


class DialogueState(_Frozen):
    """The state of a conversation after a turn; an immutable value with a JSON form (``to_dict``, ``parse``)."""

    turn: int = Field(default=0, ge=0)
    stage: DialogueStage = DialogueStage.OPEN
    tool: str | None = None
    """The name of the tool source that the user asked for (the intent)."""
    slots: dict[str, JsonValue] = Field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """The names of the required arguments that are still missing."""
    question: str | None = None
    """The question that the response asks; None if it asks none."""
    pending: PendingWrite | None = None
    shift: TopicShift | None = None
    topic: str = ""
    """The message with which the present topic began: earlier messages are not read for arguments."""
