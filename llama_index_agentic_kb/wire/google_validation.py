"""What must hold of every answer that goes out: Google's protos check no range, no offset and no reference.

Scores lie from 0 to 1, spans are not empty and lie on boundaries of characters (of UTF-8) inside the text, references
exist, what needs no check has no score, numbers are finite, and text is what UTF-8 can write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llama_index_agentic_kb.errors import InvalidAnswerError
from llama_index_agentic_kb.wire.google_values import LONE_SURROGATE, on_boundary

__all__ = ["validate_answer"]

_FIELDS: Final = frozenset(
    {
        "name",
        "state",
        "answerText",
        "groundingScore",
        "citations",
        "groundingSupports",
        "references",
        "relatedQuestions",
        "steps",
        "queryUnderstandingInfo",
        "answerSkippedReasons",
        "createTime",
        "completeTime",
        "safetyRatings",
    }
)
_SCORES: Final = frozenset({"groundingScore", "relevanceScore", "probabilityScore", "severityScore"})
_REFERENCES: Final = ("unstructuredDocumentInfo", "chunkInfo", "structuredDocumentInfo")


def validate_answer(answer: Mapping[str, Any], *, text: str | None = None, references: int | None = None) -> None:
    """Check an answer's JSON before it goes out.

    Args:
        answer: The ``Answer`` message, as data.
        text: What spans are offsets into; None is the message's own ``answerText``. A streamed piece holds only its
            delta, and its citations count from the answer's start.
        references: How many references there are; None is as many as the message holds.

    Raises:
        InvalidAnswerError: A rule is broken; the message begins with the field's path, ``citations[0].endIndex``.
    """
    unknown = sorted(set(answer) - _FIELDS)
    if unknown:
        raise InvalidAnswerError(f"{unknown[0]}: v1 has no such field")
    for path, key, value in _leaves("", "", answer):
        _check_leaf(path, key, value)
    whole = str(answer.get("answerText", "")) if text is None else text
    count = len(answer.get("references", ())) if references is None else references
    data = whole.encode()
    for field in ("citations", "groundingSupports"):
        for position, claim in enumerate(answer.get(field, ())):
            _check_claim(f"{field}[{position}]", claim, data, count)
    for position, reference in enumerate(answer.get("references", ())):
        if sum(kind in reference for kind in _REFERENCES) != 1 or len(reference) != 1:
            raise InvalidAnswerError(f"references[{position}]: it is one of {', '.join(_REFERENCES)}")


def _leaves(path: str, key: str, value: Any, *, own: bool = False) -> Iterator[tuple[str, str, Any]]:
    """Give path, key and value of everything that holds nothing further; the keys of objects, too.

    Inside of a ``structData`` (``own``) keys are a document's own, and mean nothing here.
    """
    if isinstance(value, Mapping):
        for name, one in value.items():
            at = f"{path}.{name}" if path else str(name)
            yield at, "", name
            yield from _leaves(at, "" if own else str(name), one, own=own or name == "structData")
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from _leaves(f"{path}[{position}]", key, one, own=own)
    else:
        yield path, key, value


def _check_leaf(path: str, key: str, value: Any) -> None:
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise InvalidAnswerError(f"{path}: the text holds a lone surrogate, which UTF-8 can't write")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidAnswerError(f"{path}: a number must be finite, found {value}")
    if key in _SCORES and not (isinstance(value, (int, float)) and 0 <= value <= 1):
        raise InvalidAnswerError(f"{path}: a score lies from 0 to 1, found {value!r}")


def _check_claim(path: str, claim: Mapping[str, Any], data: bytes, references: int) -> None:
    start, end = (_offset(path, claim, name, data) for name in ("startIndex", "endIndex"))
    if start >= end:
        raise InvalidAnswerError(f"{path}.endIndex: {end} must be greater than startIndex, {start}")
    unchecked = claim.get("groundingCheckRequired") is False
    for field in ("groundingScore", "sources"):
        if unchecked and claim.get(field) not in (None, []):
            raise InvalidAnswerError(f"{path}.{field}: a claim that needs no check has none")
    for position, source in enumerate(claim.get("sources", ())):
        named = source.get("referenceId", "")
        if not (isinstance(named, str) and named.isascii() and named.isdigit() and int(named) < references):
            raise InvalidAnswerError(
                f"{path}.sources[{position}].referenceId: there is no reference {named!r}; there are {references}"
            )


def _offset(path: str, claim: Mapping[str, Any], name: str, data: bytes) -> int:
    value = claim.get(name, "0")
    if not (isinstance(value, str) and value.isascii() and value.isdigit()):
        raise InvalidAnswerError(f"{path}.{name}: int64 is written as decimal text, found {value!r}")
    offset = int(value)
    if not on_boundary(data, offset):
        reason = f"is beyond the text's {len(data)} bytes" if offset > len(data) else "lies inside a character"
        raise InvalidAnswerError(f"{path}.{name}: {offset} {reason}")
    return offset
