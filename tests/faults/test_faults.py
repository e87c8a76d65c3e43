from __future__ import annotations

import pytest

from tests.faults.registry import Fault, Inject, faults, survive

ATTEMPTS = 3
"""Times a fault may be caused: a request of half a second has no chance on a machine that stands still for as long."""


def marks(one: Fault) -> list[pytest.MarkDecorator]:
    """Those with a short deadline run by themselves."""
    slow = [pytest.mark.slow] if one.slow else []
    return [*slow, pytest.mark.alone] if one.deadline is not None and one.deadline < 5 else slow


EVERY = [pytest.param(one, id=one.name, marks=marks(one)) for one in faults()]


def attempts(one: Fault) -> int:
    """What depends on the clock is tried again; all else must hold the first time."""
    return ATTEMPTS if one.deadline is not None else 1


@pytest.mark.parametrize("one", EVERY)
def test_a_fault_is_survived(one: Fault) -> None:
    """Each fault of ``make faults`` is caused for real, and its promise holds."""
    for _ in range(attempts(one)):
        survival = survive(one)
        if survival.error is None:
            break
    if survival.error is not None:
        raise survival.error
    assert (survival.waited is None) == (one.deadline is None)


@pytest.mark.parametrize(("deadline", "times"), [(None, 1), (0.5, ATTEMPTS)], ids=["by itself", "by the clock"])
def test_only_what_depends_on_the_clock_is_caused_again(deadline: float | None, times: int) -> None:
    """A promise that is never kept fails in the end."""
    caused: list[None] = []

    def never() -> float:
        caused.append(None)
        raise AssertionError("not kept")

    inject: Inject = never
    with pytest.raises(AssertionError, match="not kept"):
        test_a_fault_is_survived(Fault("source", "x", "y", inject, deadline))
    assert len(caused) == times


def test_there_are_many() -> None:
    """The table is as long as the README says: at least sixty distinct faults."""
    assert len({one.name for one in faults()}) >= 60
