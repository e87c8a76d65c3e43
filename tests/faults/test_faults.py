from __future__ import annotations

import pytest

from tests.faults.registry import Fault, faults

FAULTS = faults()


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_a_fault_is_survived(fault: Fault) -> None:
    """Each fault of ``make faults`` is caused for real, and its promise holds."""
    assert (fault.inject() is None) == (fault.deadline is None)


def test_the_table_is_whole() -> None:
    """It has so many faults: one that goes, or is new, changes the number here."""
    assert len(FAULTS) == 152
