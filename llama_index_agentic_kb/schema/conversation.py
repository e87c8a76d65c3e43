"""The state of a conversation: the documents that it is about, and what a user of tools wants.

A program passes the states of the last response into the next request, and keeps them in between with the conversation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Self, TypeAlias

from pydantic import ConfigDict, Field, JsonValue

from llama_index_agentic_kb.schema._model import Model

MAX_RECENT: Final = 2
MAX_DOCUMENTS: Final = 100
MAX_SHIFTS: Final = 100

Cosine: TypeAlias = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=2_000)]


class _Frozen(Model):
    model_config = ConfigDict(frozen=True)


class Topic(StrEnum):
    """How a message relates to the messages before it."""

    FIRST = "first"
    CONTINUED = "continued"
    SHIFTED = "shifted"
    UNKNOWN = "unknown"  # no embedding model has compared them


class ScopeReason(StrEnum):
    """Why a turn's search was not narrowed."""

    NO_INDEX = "noIndex"  # no searched source has a scope index of its embedding model
    NO_HISTORY = "noHistory"
    PLANNED = "planned"  # a language model wrote the searches from the conversation
    SMALL_CORPUS = "smallCorpus"
    INDEX_STALE = "indexStale"  # documents have changed since the scope index was made
    LOW_SIMILARITY = "lowSimilarity"  # no document is similar enough to the message: the corpus may not answer it
    TOO_SMALL = "scopeTooSmall"  # the scope holds too few of the passages found
    FAILED = "failed"  # it was not computed in time, or with an error


class ScopedDocument(_Frozen):
    """A document in a scope, by its source and its id (LlamaIndex's ``ref_doc_id``, else the node's id)."""

    source: _Name
    document: _Name


_Documents: TypeAlias = Annotated[tuple[ScopedDocument, ...], Field(max_length=MAX_DOCUMENTS)]


class TurnScope(_Frozen):
    """How the earlier messages changed one turn's search; part of the account."""

    turn: int = Field(ge=1)
    topic: Topic = Topic.FIRST
    drift: Cosine | None = None
    """The cosine between the message and the earlier ones: near 0 after a change of topic. None without vectors."""
    expanded: str | None = None
    """The message with the words that it refers to, as it was searched; None if it was searched as it is."""
    documents: int | None = Field(default=None, ge=0)
    """Number of documents before contraction; None if there was none, or if some may be hidden from the caller."""
    scope: int | None = Field(default=None, ge=0)
    reason: ScopeReason | None = None
    scope_miss: float | None = Field(default=None, ge=0, le=1)
    """Share of the best passages of each search of the whole corpus that are outside the scope. They are kept."""
    scope_ms: float | None = Field(default=None, ge=0)


class ScopeState(_Frozen):
    """The state of one conversation; immutable, so that each turn returns a new one.

        state = ScopeState()
        response = kb.retrieve(messages, scope_state=state)
        state = response.scope_state  # goes into the next turn; to_dict() and parse() store and restore it

    It holds ids of documents and no vectors. A document that the user may not see is never found, whatever it says.
    """

    turn: int = Field(default=0, ge=0)
    recent: Annotated[tuple[_Documents, ...], Field(max_length=MAX_RECENT)] = ()
    """The documents of the latest turns' references; they stay in the scope."""
    pinned: _Documents = ()  # documents that stay in the scope until they are unpinned
    shifts: Annotated[tuple[int, ...], Field(max_length=MAX_SHIFTS)] = ()  # numbers of the turns that changed the topic
    last: TurnScope | None = None

    def pin(self, source: str, document: str) -> Self:
        """Return a state with a document that stays in the scope; the oldest of more than 100 is unpinned."""
        kept = self.unpin(source, document).pinned
        pinned = (*kept, ScopedDocument(source=source, document=document))[-MAX_DOCUMENTS:]
        return self.model_copy(update={"pinned": pinned})

    def unpin(self, source: str, document: str) -> Self:
        """Return a state without a pinned document."""
        gone = ScopedDocument(source=source, document=document)
        return self.model_copy(update={"pinned": tuple(one for one in self.pinned if one != gone)})

    def after(self, use: TurnScope, documents: tuple[ScopedDocument, ...]) -> Self:
        """Return the state after a turn that was searched in this way and whose references are ``documents``."""
        shifts = (*self.shifts, use.turn) if use.topic is Topic.SHIFTED else self.shifts
        recent = (*self.recent, tuple(dict.fromkeys(documents))[:MAX_DOCUMENTS])[-MAX_RECENT:]
        changed = {"turn": use.turn, "last": use, "shifts": shifts[-MAX_SHIFTS:], "recent": recent}
        return self.model_copy(update=changed)


# -- the use of tools --------------------------------------------------------------------------------------------------


class DialogueStage(StrEnum):
    """What the conversation is waiting for."""

    OPEN = "open"  # nothing: no tool was asked for, or the user changed their mind
    ASKING = "asking"  # the missing arguments of a tool; the response asks for them
    CONFIRMING = "confirming"  # the user's confirmation of a call that changes something
    DONE = "done"  # nothing: the tool was called in this turn, or its confirmation was declined


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
    """The state of a conversation that uses tools; an immutable value with a JSON form (``to_dict``, ``parse``).

    It is created from the user's messages and the tools' schemas only, never from retrieved text.
    """

    turn: int = Field(default=0, ge=0)
    stage: DialogueStage = DialogueStage.OPEN
    tool: str | None = None  # name of the tool source that the user asked for (the intent)
    slots: dict[str, JsonValue] = Field(default_factory=dict)
    missing: tuple[str, ...] = ()  # names of the required arguments that are still missing
    question: str | None = None  # question that the response asks; None if it asks none
    pending: PendingWrite | None = None
    shift: TopicShift | None = None
    topic: str = ""  # message with which the present topic began: earlier messages are not read for arguments
