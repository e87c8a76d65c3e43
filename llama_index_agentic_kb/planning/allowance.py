"""What the calls between waves may still cost: tokens, time, and a model that answers."""

from __future__ import annotations

import time

from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.planning.effort import EffortLimits

__all__ = ["Allowance"]


class Allowance:
    """Says whether a request may call its planning model once more.

    Args:
        limits: The effort's.
        budget: The request's.
        usage: What the calls have cost; added to here.
    """

    def __init__(self, limits: EffortLimits, budget: Budget, usage: Usage) -> None:
        self.model_lost = False
        """Whether the model did not answer at all: it is not asked again, for each time would cost as much."""
        self._limits = limits
        self._budget = budget
        self._usage = usage

    @property
    def call_deadline(self) -> float | None:
        """``time.monotonic()`` at which a call that is made now is given up."""
        return self._budget.retrieval_stage(self._limits.planning_seconds)

    @property
    def lacking(self) -> str | None:
        """What is spent, in words; None where tokens and time are left."""
        spent = (self._usage.input_tokens or 0) + (self._usage.output_tokens or 0)
        if spent >= self._limits.tokens:
            return f"{spent} tokens were spent before the search was done (EffortLimits.tokens)"
        deadline = self._budget.retrieval_deadline
        if deadline is not None and time.monotonic() >= deadline:
            return "the time for searching was over before the plan was done (EffortLimits.seconds, or the request's)"
        return None

    def account(self, usage: Usage, error: Exception | None) -> None:
        """Add a call's bill, and what it says of the model."""
        self._usage.add(usage)
        self.model_lost = self.model_lost or not (error is None or _has_replied(error))


def _has_replied(error: Exception) -> bool:
    """Whether it is the reply that can't be used; what a client raised is the cause of an ``LLMError``."""
    return isinstance(error, PlanningError) or (isinstance(error, LLMError) and error.__cause__ is None)
