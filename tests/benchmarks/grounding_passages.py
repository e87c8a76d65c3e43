"""Passages, and the figures in them."""

# ruff: noqa: RUF001 (dashes of ranges)
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MONTH", "MONTHS", "NUMBER", "WORDS", "Document", "has_month", "read_corpus"]

MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
MONTH: Final = "|".join(MONTHS)
NUMBER: Final = re.compile(r"(?<![\d,.\w–-])(\d{1,3}(?:,\d{3})+|\d{1,3})(?![\d,.:]*\d|\s?(?:st|nd|rd|th)\b|–|-|\w)")
WORDS: Final = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten",
                 11: "eleven", 12: "twelve", 13: "thirteen", 15: "fifteen", 20: "twenty", 30: "thirty"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """A passage."""

    id: str
    title: str
    text: str


def read_corpus(path: Path) -> list[Document]:
    """Read the passages of a set."""
    lines = (path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document(one["_id"], one["title"], one["text"]) for one in map(json.loads, lines)]


def has_month(found: re.Match[str]) -> bool:
    around = found.string[max(0, found.start() - 12) : found.end() + 12]
    return re.search(MONTH, around) is not None or re.search(r"\b[A-Z]\w+ $", found.string[: found.start()]) is not None
