"""Reads a judging model's reply: one JSON object a claim, in lines, in a list, or mended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from llama_index_agentic_kb.llm import repair_json, strip_code_fence
from llama_index_agentic_kb.schema.grounding import Verdict

__all__ = ["Judgement", "read_judgements"]

MAX_REPLY: Final = 40_000
"""Characters of a reply that are read."""

_OBJECT: Final = re.compile(r'\{\s*"claim"')
_NUMBER: Final = re.compile(r"\d{1,6}")
_MOST_QUOTE: Final = 2_000
_WORDS: Final = {
    "supported": Verdict.SUPPORTED,
    "entailed": Verdict.SUPPORTED,
    "partially_supported": Verdict.PARTIALLY_SUPPORTED,
    "partiallysupported": Verdict.PARTIALLY_SUPPORTED,
    "partially": Verdict.PARTIALLY_SUPPORTED,
    "partial": Verdict.PARTIALLY_SUPPORTED,
    "unsupported": Verdict.UNSUPPORTED,
    "not_supported": Verdict.UNSUPPORTED,
    "neutral": Verdict.UNSUPPORTED,
    "contradicted": Verdict.CONTRADICTED,
    "contradiction": Verdict.CONTRADICTED,
    "refuted": Verdict.CONTRADICTED,
    "not_checkable": Verdict.NOT_CHECKABLE,
    "notcheckable": Verdict.NOT_CHECKABLE,
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a model says of one claim.

    Args:
        claim: The claim's number, from 0.
        verdict: Its verdict.
        confidence: How sure it is, 0 to 1; None where it does not say.
        quotes: Passages by number, each with the words that it names there.
    """

    claim: int
    verdict: Verdict
    confidence: float | None
    quotes: tuple[tuple[int, str], ...]


def read_judgements(text: str) -> dict[int, Judgement]:
    """Give what a reply says of each claim; of what it says twice, the first."""
    text = text[:MAX_REPLY]
    found = dict(_judgements(_objects(text)))
    if not found:
        found = dict(_judgements(_mended(text)))
    return found


def _judgements(objects: Iterator[dict[str, Any]]) -> list[tuple[int, Judgement]]:
    read = [judgement for one in objects if (judgement := _judgement(one)) is not None]
    return [(one.claim, one) for one in reversed(read)]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Give the complete objects of a text; a broken one does not hide others."""
    decoder, position = json.JSONDecoder(), 0
    while (start := _OBJECT.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            position = start.end()
            continue
        yield value


def _mended(text: str) -> Iterator[dict[str, Any]]:
    try:
        value = repair_json(strip_code_fence(text))
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        listed = [item for item in value.values() if isinstance(item, list)]
        value = [value] if "claim" in value else listed[0] if listed else []
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _judgement(fields: dict[str, Any]) -> Judgement | None:
    number = _int(fields.get("claim", fields.get("id")))
    verdict = _WORDS.get(re.sub(r"[\s-]+", "_", str(fields.get("verdict", "")).strip().casefold()))
    if number is None or verdict is None:
        return None
    confidence = fields.get("confidence", fields.get("score"))
    sure = isinstance(confidence, (int, float)) and not isinstance(confidence, bool) and 0 <= confidence <= 1
    evidence = fields.get("evidence", fields.get("refs", fields.get("ref")))
    given = evidence if isinstance(evidence, list) else [evidence]
    quotes = tuple(quote for one in given if (quote := _quote(one)) is not None)
    return Judgement(number, verdict, float(confidence) if sure and confidence is not None else None, quotes)


def _quote(value: Any) -> tuple[int, str] | None:
    fields = value if isinstance(value, dict) else {"ref": value}
    number = _int(fields.get("ref", fields.get("ref_id")))
    quote = fields.get("quote", "")
    return None if number is None else (number, quote[:_MOST_QUOTE] if isinstance(quote, str) else "")


def _int(value: Any) -> int | None:
    digits = None if value is None or isinstance(value, bool) else _NUMBER.search(str(value))
    return int(digits[0]) if digits else None
