from __future__ import annotations

import pytest

from tests.faults.registry import Fault, faults, survive


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in faults()])
def test_a_fault_is_survived(fault: Fault) -> None:
    """Each fault of ``make faults`` is caused for real, and its promise holds."""
    survival = survive(fault)
    if survival.error is not None:
        raise survival.error
    assert (survival.waited is None) == (fault.deadline is None)


def test_a_promise_that_is_not_kept_is_told() -> None:
    """The table could fail."""

    def inject() -> None:
        raise AssertionError("not kept")

    assert str(survive(Fault("source", "x", "y", inject)).error) == "not kept"


def test_the_table_is_whole() -> None:
    """None of the faults that were ever caused is left out."""
    assert len({fault.name for fault in faults()}) >= 178
