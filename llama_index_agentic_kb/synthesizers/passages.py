"""Fits passages into a context window by truncating, sharing or packing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypeVar

from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage, format_passage

T = TypeVar("T")

MIN_CONTENT: Final = 16  # minimum tokens of content of a truncated passage; if fewer fit, the passage is dropped
MAX_PARTS: Final = 100  # of a split passage, so that a huge document can't cost thousands of calls; the rest is cut off

# A hundred times faster than the segmenter; errors are harmless here.
_SENTENCE_END: Final = re.compile(r"[.!?][\"')\]\u2019\u201d]*\s+|[\u3002\uff01\uff1f]|\n\s*")
_SPACE: Final = re.compile(r"\s+")


@dataclass(slots=True)
class Packed:
    """Passages in groups, each of which fits into one prompt, and the numbers of dropped and of truncated passages."""

    groups: list[list[Passage]] = field(default_factory=list)
    dropped: int = 0
    cut: int = 0


Packer: TypeAlias = Callable[[Sequence[Passage], int, float], Packed]
"""A function that packs passages (best first), given the tokens per prompt and the overlap of split passages."""
PackerAttribute: TypeAlias = "staticmethod[[Sequence[Passage], int, float], Packed]"


def cost(passage: Passage) -> int:
    """Return the tokens of a passage in a prompt."""
    return count_tokens(format_passage(passage)) + 1  # and a line feed


def _shortened(passage: Passage, room: int, cost_of: Callable[[Passage], int] = cost) -> Passage | None:
    """Return a passage with the start of its content that fits, up to a sentence end; None if too little would fit."""
    if cost_of(replace(passage, content="")) + MIN_CONTENT > room:
        return None
    end = room * 6
    while end < len(passage.content) and count_tokens(passage.content[:end]) <= room:
        end *= 2  # measuring long texts is slow
    content = cut_to_fit(passage.content[:end], room, lambda text: cost_of(replace(passage, content=text)))
    return replace(passage, content=content) if content else None


def fit(
    candidates: Sequence[Passage], room: int, _: float = 0.0, *, cost_of: Callable[[Passage], int] = cost
) -> Packed:
    """Pack passages into one prompt of ``room`` tokens, in order; one that does not fit is truncated or dropped."""
    packed, group = Packed(), list[Passage]()
    for passage in candidates:
        start = passage.content[: max(room, 1) * 32 + 32]  # few tokens have more than 32 characters
        is_long = len(start) < len(passage.content) and cost_of(replace(passage, content=start)) > room
        kept = _shortened(passage, room, cost_of) if is_long or cost_of(passage) > room else passage
        if kept is None:
            packed.dropped += 1
            continue
        packed.cut += kept is not passage
        group.append(kept)
        room -= cost_of(kept)
    packed.groups = [group] if group else []
    return packed


def share(candidates: Sequence[Passage], room: int, _: float = 0.0) -> Packed:
    """Put all passages into one prompt, truncated to equal shares; space left by short passages goes to the others."""
    costs = [cost(passage) for passage in candidates]
    packed, kept = Packed(), dict[int, Passage]()
    for done, position in enumerate(sorted(range(len(candidates)), key=costs.__getitem__)):
        part = room // (len(candidates) - done)
        passage = candidates[position] if costs[position] <= part else _shortened(candidates[position], part)
        if passage is None:
            packed.dropped += 1
            continue
        packed.cut += passage is not candidates[position]
        kept[position] = passage
        room -= min(part, costs[position])
    packed.groups = [[kept[position] for position in sorted(kept)]] if kept else []
    return packed


def singly(candidates: Sequence[Passage], room: int, overlap: float = 0.0) -> Packed:
    """Put each passage into its own prompt; one too long is split at sentence ends, into at most ``MAX_PARTS``."""
    packed = Packed()
    for passage in candidates:
        parts, is_cut = _split(passage, room, overlap)
        packed.dropped += not parts
        packed.cut += is_cut
        packed.groups += [[part] for part in parts]
    return packed


def pack(candidates: Sequence[Passage], room: int, overlap: float = 0.0) -> Packed:
    """Pack whole passages in order into as few prompts as possible; passages too long for a prompt are split."""
    packed = singly(candidates, room, overlap)
    parts = [part for group in packed.groups for part in group]
    packed.groups = grouped(parts, list(map(cost, parts)), room)
    return packed


def grouped(items: Sequence[T], costs: Sequence[int], room: int) -> list[list[T]]:
    """Return items in groups that each fit into ``room`` by their costs, in order; a too large one is alone."""
    groups: list[list[T]] = []
    used = room
    for item, needed in zip(items, costs, strict=True):
        if groups and used + needed <= room:
            groups[-1].append(item)
            used += needed
        else:
            groups.append([item])
            used = needed
    return groups


def _split(passage: Passage, room: int, overlap: float) -> tuple[list[Passage], bool]:
    """Split a passage into parts that fit; return them (none if too little fits) and whether the end was cut off."""
    if room < cost(replace(passage, content="")) + MIN_CONTENT:
        return [], False
    text, start, parts = passage.content, 0, list[Passage]()
    while len(parts) < MAX_PARTS:
        end = start + _part_end(passage, text[start:], room)
        parts.append(replace(passage, content=text[start:end].strip()))
        if not text[end:].strip():
            return parts, False
        back = max(start + 1, end - int((end - start) * overlap))
        begins = _SENTENCE_END.search(text, back, end) if back < end else None
        start = begins.end() if begins is not None else end
    return parts, True


def _part_end(passage: Passage, text: str, room: int) -> int:
    """Return the end of the first part of a text: a sentence end in its second half, else the end of a word."""
    low, high, guess = 1, len(text) + 1, min(len(text), room * 4)
    while high - low > 1:
        counted = cost(replace(passage, content=text[:guess]))
        if counted <= room:
            low = guess
            if guess == len(text) or counted >= 0.9 * room:
                break
        else:
            high = guess
        guess = min(max(int(guess * 0.97 * room / counted), low + 1), high - 1)
    if low < len(text):
        for ends in (_SENTENCE_END, _SPACE):
            if found := [match.end() for match in ends.finditer(text, low // 2, low)]:
                return found[-1]
    return min(low, len(text))
