"""What all calls of the planning model share: a record in the account, a bill, and the limits of a request."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.account import ActivityLog, Budget
from llama_index_agentic_kb.account.activity_log import describe_error
from llama_index_agentic_kb.errors import LLMError, PlanningError
from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.llm import LanguageModel, Usage
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.schema import ModelInfo, ModelQueryPlanningActivity, Outcome

__all__ = ["Allowance", "ModelCall", "PassageReader", "model_record"]


@dataclass(slots=True)
class ModelCall:
    """What came of one call: its bill, and the error where it failed. A failed call is reported, never raised."""

    usage: Usage = field(default_factory=Usage, kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)

    def fail(self, error: Exception) -> None:
        """Keep an error, and what the failed call billed."""
        self.error = error
        if isinstance(error, LLMError) and error.usage is not None:
            self.usage = error.usage

    def close(self, log: ActivityLog, record: ModelQueryPlanningActivity, **fields: Any) -> None:
        """Close the call's record with its bill and outcome, and further fields."""
        name = None if record.model is None else record.model.model_name
        log.close(
            record,
            outcome=Outcome.OK if self.error is None else Outcome.ERROR,
            error=None if self.error is None else describe_error(self.error, name),
            input_tokens=self.usage.input_tokens,
            output_tokens=self.usage.output_tokens,
            **fields,
        )


def model_record(
    log: ActivityLog, model: LanguageModel, purpose: Literal["plan", "findings", "revision"]
) -> AbstractContextManager[ModelQueryPlanningActivity]:
    """Return the record of one call, to be opened by ``with``."""
    info = None if model.name is None else ModelInfo(model_name=model.name)
    return log.record(ModelQueryPlanningActivity, CBEventType.AGENT_STEP, model=info, purpose=purpose)


class PassageReader:
    """Asks a language model about passages.

    Args:
        model: The language model.
        template: The prompt; None is the class's ``default_template``.
        spotlighting: How passages are marked as data; see ``guard.spotlighting``.
    """

    default_template: ClassVar[BasePromptTemplate]

    def __init__(
        self,
        model: LanguageModel,
        template: BasePromptTemplate | None = None,
        *,
        spotlighting: Spotlighting | None = "delimit",
    ) -> None:
        self.model = model
        self.template = template or self.default_template
        self.spotlighting = spotlighting


class Allowance:
    """What the calls of a request's planning model may still cost.

    Args:
        limits: The effort's.
        budget: The request's.
        usage: What the calls have cost; added to here.
    """

    def __init__(self, limits: EffortLimits, budget: Budget, usage: Usage) -> None:
        self.model_lost = False
        """Whether the model did not answer at all. It is not asked again: each call would cost its whole time."""
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

    def add(self, call: ModelCall) -> None:
        """Add a call's bill, and note whether the model answered."""
        self._usage.add(call.usage)
        self.model_lost = self.model_lost or not (call.error is None or _has_replied(call.error))


def _has_replied(error: Exception) -> bool:
    """Return whether it is the reply that can't be used; what a client raised is the cause of an ``LLMError``."""
    return isinstance(error, PlanningError) or (isinstance(error, LLMError) and error.__cause__ is None)
