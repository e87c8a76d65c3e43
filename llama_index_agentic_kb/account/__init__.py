"""What carries a query: one budget, one account, and the ways in which it is reported."""

from llama_index_agentic_kb.account.activity_log import ActivityLog
from llama_index_agentic_kb.account.budget import Budget
from llama_index_agentic_kb.account.callbacks import (
    ACTIVITY_KEY,
    ActivityCallbackHandler,
    ActivityEndEvent,
    ActivityStartEvent,
    GuardedCallbacks,
    guarded,
)

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
