"""Google's enums as tables: each name, its number, and what it is here.

On the wire an enum is its name or its number: the Python client sends and asks for numbers
(``$alt=json;enum-encoding=int``), people write names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from llama_index_agentic_kb.schema.answer import (
    AnswerState,
    HarmCategory,
    HarmLevel,
    QueryClass,
    SkippedReason,
    StepState,
)
from llama_index_agentic_kb.schema.answer_query import FilteringLevel, HarmBlockThreshold, ResultMode
from llama_index_agentic_kb.schema.sessions import SessionState

__all__ = [
    "ANSWER_STATE",
    "BLOCK_THRESHOLD",
    "BOOST_ATTRIBUTE",
    "BOOST_INTERPOLATION",
    "FILTERING_LEVEL",
    "HARM_CATEGORY",
    "HARM_PROBABILITY",
    "HARM_SEVERITY",
    "QUERY_CLASS",
    "REPHRASER_MODEL",
    "RESULT_MODE",
    "SESSION_STATE",
    "SKIPPED_REASON",
    "STEP_STATE",
    "ProtoEnum",
]

T = TypeVar("T")


class ProtoEnum(Generic[T]):
    """One of Google's enums.

    Args:
        name: Its name, for errors.
        unspecified: The name of 0, which is "not set" here.
        values: Name and meaning of 1, 2, ..., in this order.
    """

    def __init__(self, name: str, unspecified: str, values: Sequence[tuple[str, T]]) -> None:
        self.name = name
        self.names: Final = (unspecified, *(wire for wire, _ in values))
        """By number."""
        self._ours: Final = (None, *(ours for _, ours in values))
        self._numbers: Final = {ours: number for number, ours in enumerate(self._ours)}

    def encode(self, value: T | None, *, as_int: bool) -> str | int:
        """Give a value's name, or its number; None is unspecified."""
        number = self._numbers[value]
        return number if as_int else self.names[number]

    def decode(self, value: Any) -> T | None:
        """Read a name or a number (``3``, ``"3"``, ``3.0``); None is unspecified.

        Raises:
            ValueError: The enum has no such value.
        """
        if isinstance(value, str) and value in self.names:
            return self._ours[self.names.index(value)]
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if isinstance(number, (int, float)) and not isinstance(number, bool) and number in range(len(self.names)):
            return self._ours[int(number)]
        raise ValueError(f"{self.name} has no value {str(value)[:60]!r}; it has {', '.join(self.names)}")


_E = TypeVar("_E", bound=Enum)


def _of(
    name: str, members: type[_E], unspecified: str, wire_name: Callable[[_E], str] = lambda one: one.name
) -> ProtoEnum[_E]:
    """Make the table of one of our enums, whose members stand in Google's order."""
    return ProtoEnum(name, unspecified, [(wire_name(member), member) for member in members])


ANSWER_STATE: Final = _of("Answer.State", AnswerState, "STATE_UNSPECIFIED")
STEP_STATE: Final = _of("Answer.Step.State", StepState, "STATE_UNSPECIFIED")
SESSION_STATE: Final = _of("Session.State", SessionState, "STATE_UNSPECIFIED")
SKIPPED_REASON: Final = _of("Answer.AnswerSkippedReason", SkippedReason, "ANSWER_SKIPPED_REASON_UNSPECIFIED")
QUERY_CLASS: Final = _of("QueryClassificationInfo.Type", QueryClass, "TYPE_UNSPECIFIED")
HARM_CATEGORY: Final = _of(
    "HarmCategory", HarmCategory, "HARM_CATEGORY_UNSPECIFIED", lambda one: f"HARM_CATEGORY_{one.name}"
)
HARM_PROBABILITY: Final = _of("SafetyRating.HarmProbability", HarmLevel, "HARM_PROBABILITY_UNSPECIFIED")
HARM_SEVERITY: Final = _of(
    "SafetyRating.HarmSeverity", HarmLevel, "HARM_SEVERITY_UNSPECIFIED", lambda one: f"HARM_SEVERITY_{one.name}"
)
BLOCK_THRESHOLD: Final = _of("HarmBlockThreshold", HarmBlockThreshold, "HARM_BLOCK_THRESHOLD_UNSPECIFIED")
FILTERING_LEVEL: Final = _of(
    "GroundingSpec.FilteringLevel",
    FilteringLevel,
    "FILTERING_LEVEL_UNSPECIFIED",
    lambda one: f"FILTERING_LEVEL_{one.name}",
)
RESULT_MODE: Final = _of("SearchResultMode", ResultMode, "SEARCH_RESULT_MODE_UNSPECIFIED")
REPHRASER_MODEL: Final = ProtoEnum(
    "ModelSpec.ModelType", "MODEL_TYPE_UNSPECIFIED", [("SMALL", "small"), ("LARGE", "large")]
)
BOOST_ATTRIBUTE: Final = ProtoEnum(
    "AttributeType", "ATTRIBUTE_TYPE_UNSPECIFIED", [("NUMERICAL", "numerical"), ("FRESHNESS", "freshness")]
)
BOOST_INTERPOLATION: Final = ProtoEnum("InterpolationType", "INTERPOLATION_TYPE_UNSPECIFIED", [("LINEAR", "linear")])
