"""Converts nodes to passages, and fits passages into a context window by truncating, sharing or packing.

The reference id of a passage is the position of its node; it never changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.evidence.candidates import provenance, shown_metadata
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.guard.text import without_hidden
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage, format_passage
from llama_index_agentic_kb.sources.base import KnowledgeSource

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


def passages(
    nodes: Sequence[NodeWithScore], sources: Mapping[str, KnowledgeSource] | None = None, spotlight: Spotlight = PLAIN
) -> list[Passage]:
    """Convert nodes to passages: node N gets reference id N; sources, by name, define its title and content."""
    made = []
    for position, node in enumerate(nodes):
        mark = provenance(node)
        source = (sources or {}).get(mark.get("source", "")) if mark else None
        if source is not None:
            data = source.source_data(node)
            name, title, text, own_terms, url = source.name, data.title, data.content, data.terms or "", data.url
            about = shown_metadata(node, source.permissions, (title, text, url, own_terms))
        else:
            metadata = node.node.metadata
            name, own_terms, about, url = "", "", "", metadata.get("url")
            title = str(metadata.get("title") or metadata.get("file_name") or node.node.node_id)
            text = node.node.get_content(metadata_mode=MetadataMode.LLM)
        (title, a), (text, b), (terms, c) = without_hidden(title), without_hidden(text), without_hidden(own_terms)
        (about, d), url = without_hidden(about), url if isinstance(url, str) else None
        made.append(Passage(position, title, text, name, terms or None, url, a + b + c + d, spotlight, about))
    return made


def cost(passage: Passage, content: str | None = None) -> int:
    """Return the tokens of a passage in a prompt, optionally with other content."""
    shown = passage if content is None else replace(passage, content=content)
    return count_tokens(format_passage(shown)) + 1  # and a line feed


def shortened(content: str, room: int, measure: Callable[[str], int]) -> str:
    """Return a prefix that fits into ``room`` by ``measure``, cut at a sentence end; empty if too little would fit."""
    if measure("") + MIN_CONTENT > room:
        return ""
    end = room * 6
    for _ in range(8):  # measuring long texts is slow, so start from a slightly too long prefix
        if end >= len(content):
            break
        counted = count_tokens(content[:end])
        if room < counted <= 2 * room:
            return cut_to_fit(content[:end], room, measure)
        end = end * 2 if counted <= room else int(end * 1.2 * room / counted)
    return cut_to_fit(content, room, measure)


def _cut(passage: Passage, room: int) -> Passage | None:
    content = shortened(passage.content, room, lambda text: cost(passage, text))
    return replace(passage, content=content) if content else None


def fit(candidates: Sequence[Passage], room: int, _: float = 0.0) -> Packed:
    """Pack passages into one prompt of ``room`` tokens, in order; one that does not fit is truncated or dropped."""
    packed, group = Packed(), list[Passage]()
    for passage in candidates:
        whole = cost(passage)
        kept = passage if whole <= room else _cut(passage, room)
        if kept is None:
            packed.dropped += 1
            continue
        packed.cut += kept is not passage
        group.append(kept)
        room -= whole if kept is passage else cost(kept)
    packed.groups = [group] if group else []
    return packed


def share(candidates: Sequence[Passage], room: int, _: float = 0.0) -> Packed:
    """Put all passages into one prompt, truncated to equal shares; space left by short passages goes to the others."""
    costs = [cost(passage) for passage in candidates]
    packed, kept = Packed(), dict[int, Passage]()
    for done, position in enumerate(sorted(range(len(candidates)), key=costs.__getitem__)):
        part = room // (len(candidates) - done)
        passage = candidates[position] if costs[position] <= part else _cut(candidates[position], part)
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
    groups: list[list[Passage]] = []
    used = room
    for (passage,) in packed.groups:
        needed = cost(passage)
        if groups and used + needed <= room:
            groups[-1].append(passage)
            used += needed
        else:
            groups.append([passage])
            used = needed
    packed.groups = groups
    return packed


def _split(passage: Passage, room: int, overlap: float) -> tuple[list[Passage], bool]:
    """Split a passage into parts that fit; return them (none if too little fits) and whether the end was cut off."""
    if room < cost(passage, "") + MIN_CONTENT:
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
        counted = cost(passage, text[:guess])
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
