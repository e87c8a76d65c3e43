"""Reads the hand-labelled claims: texts in which each claim stands between ⟦ and ⟧."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "data"


class Labelled(NamedTuple):
    """A text and the spans of its claims."""

    name: str
    language: str
    text: str
    spans: list[tuple[int, int]]


def labelled(file: str) -> list[Labelled]:
    """Read a file of texts, each under a line ``=== language name``."""
    parts = re.split(r"^=== (.*)$", (DATA / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [_text(name, body.strip("\n")) for name, body in zip(parts[::2], parts[1::2], strict=True)]


def _text(name: str, body: str) -> Labelled:
    text, spans, start = "", [], 0
    for char in body:
        if char == "⟦":
            start = len(text)
        elif char == "⟧":
            spans.append((start, len(text)))
        else:
            text += char
    return Labelled(name, name.split(maxsplit=1)[0], text, spans)
