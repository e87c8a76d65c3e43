from __future__ import annotations

import pytest

from tests.faults.registry import Fault, faults

EVERY = [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else []) for one in faults()]


@pytest.mark.parametrize("one", EVERY)
def test_a_fault_is_survived(one: Fault) -> None:
    """Each fault of ``make faults`` is caused for real, and its promise holds."""
    waited = one.inject()
    assert (waited is None) == (one.deadline is None)


def test_there_are_many() -> None:
    """The table is as long as the README says: at least sixty distinct faults."""
    assert len({one.name for one in faults()}) >= 60
