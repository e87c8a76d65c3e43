from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from llama_index_agentic_kb import DEFAULT_LIMITS, EffortLimits, ReasoningEffort
from llama_index_agentic_kb.errors import ConfigurationError


def test_every_effort_has_limits() -> None:
    """No effort is without limits, and more effort never means less."""
    assert set(DEFAULT_LIMITS) == set(ReasoningEffort)
    low, medium = DEFAULT_LIMITS[ReasoningEffort.LOW], DEFAULT_LIMITS[ReasoningEffort.MEDIUM]
    assert all(getattr(medium, field.name) >= getattr(low, field.name) for field in fields(EffortLimits))


@pytest.mark.parametrize("name", [field.name for field in fields(EffortLimits)])
def test_a_limit_that_lets_nothing_through_is_refused(name: str) -> None:
    """Zero and less are refused by the field's name."""
    for value in (0, -1):
        with pytest.raises(ConfigurationError, match=rf"EffortLimits\.{name} must be above 0, got {value}"):
            EffortLimits(**{name: value})


def test_limits_do_not_change_under_way() -> None:
    """Limits are values: they, and the defaults, can't be written to."""
    with pytest.raises(FrozenInstanceError):
        EffortLimits().sub_queries = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        DEFAULT_LIMITS[ReasoningEffort.LOW] = EffortLimits()  # type: ignore[index]
