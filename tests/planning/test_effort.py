from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from llama_index_agentic_kb import DEFAULT_LIMITS, EffortLimits, ReasoningEffort
from llama_index_agentic_kb.account import Budget
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.planning.effort import planned_use


def test_every_effort_has_limits() -> None:
    """No effort is without limits, and more effort never means less."""
    assert set(DEFAULT_LIMITS) == set(ReasoningEffort)
    low, medium = DEFAULT_LIMITS[ReasoningEffort.LOW], DEFAULT_LIMITS[ReasoningEffort.MEDIUM]
    assert all(getattr(medium, field.name) >= getattr(low, field.name) for field in fields(EffortLimits))


@pytest.mark.parametrize("name", [f.name for f in fields(EffortLimits) if f.name != "revisions"])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    """Zero and less are refused by the field's name."""
    for value in (0, -1):
        with pytest.raises(ConfigurationError, match=rf"EffortLimits\.{name} must be above 0, got {value}"):
            EffortLimits(**{name: value})


def test_there_may_be_no_revision() -> None:
    """No look for gaps is a limit too; fewer than none is not."""
    assert EffortLimits(revisions=0).revisions == 0
    with pytest.raises(ConfigurationError, match=r"EffortLimits\.revisions"):
        EffortLimits(revisions=-1)


def test_what_may_be_spent_is_told_beforehand() -> None:
    """A plan's limits, or those of a search without one; the request's own time where it ends earlier."""
    limits = EffortLimits(sub_queries=5, rounds=3, revisions=1, tokens=700, seconds=8)
    planned = planned_use(limits, planned=True, budget=Budget(100, retrieval_seconds=8))
    assert (planned.sub_queries, planned.waves, planned.revisions, planned.tokens) == (5, 3, 1, 700)
    assert planned.seconds == 8
    plain = planned_use(limits, planned=False, budget=Budget(5, answer_share=0.4, retrieval_seconds=8))
    assert (plain.sub_queries, plain.waves, plain.revisions, plain.tokens, plain.seconds) == (0, 1, 0, 0, 3)


def test_limits_do_not_change_under_way() -> None:
    """Limits are values: they, and the defaults, can't be written to."""
    with pytest.raises(FrozenInstanceError):
        EffortLimits().sub_queries = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        DEFAULT_LIMITS[ReasoningEffort.LOW] = EffortLimits()  # type: ignore[index]
