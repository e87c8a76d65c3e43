"""The budget and the activity log of a request, with the callbacks, events and loggers that report it."""

from llama_index_agentic_kb.account.activity_log import (
    ACTIVITY_KEY,
    ActivityCallbackHandler,
    ActivityEndEvent,
    ActivityLog,
    ActivityStartEvent,
    GuardedCallbacks,
    guarded,
)
from llama_index_agentic_kb.account.budget import Budget

__all__ = [
    "ACTIVITY_KEY",
    "ActivityCallbackHandler",
    "ActivityEndEvent",
    "ActivityLog",
    "ActivityStartEvent",
    "Budget",
    "GuardedCallbacks",
    "guarded",
]
