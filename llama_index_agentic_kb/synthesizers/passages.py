"""From nodes to passages, and passages into a language model's window: cut, shared out, or packed.

The position of a node is its reference id, and stays so whatever becomes of its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.guard.text import without_hidden
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage, format_passage
from llama_index_agentic_kb.schema import SourceData
from llama_index_agentic_kb.sources.base import KnowledgeSource

__all__ = ["Packed", "cost", "fit", "pack", "passages", "share", "singly", "somewhat_longer", "source_data"]

MIN_CONTENT: Final = 16
"""Tokens of content below which a passage is left out rather than cut: a few words support nothing."""

MAX_PARTS: Final = 100
"""Parts of one passage: a hostile document must not cost thousands of calls. What is beyond counts as cut."""

_SENTENCE_END: Final = re.compile(r"[.!?][\"')\]\u2019\u201d]*\s+|[\u3002\uff01\uff1f]|\n\s*")
_SPACE: Final = re.compile(r"\s+")


@dataclass(slots=True)
class Packed:
    """Passages in groups, each of which fits.

    Args:
        groups: None of them is empty.
        dropped: How many passages fitted nowhere.
        cut: How many passages lost their end.
    """

    groups: list[list[Passage]] = field(default_factory=list)
    dropped: int = 0
    cut: int = 0

    @property
    def kept(self) -> list[Passage]:
        """All passages, in order."""
        return [passage for group in self.groups for passage in group]


def source_data(node: NodeWithScore, sources: Mapping[str, KnowledgeSource]) -> SourceData | None:
    """Return a node's document as its source describes it; None where the source is not known."""
    mark = provenance(node)
    source = sources.get(mark.get("source", "")) if mark else None
    return None if source is None else source.source_data(node)


def passages(
    nodes: Sequence[NodeWithScore],
    sources: Mapping[str, KnowledgeSource] | None = None,
    spotlight: Spotlight = PLAIN,
) -> list[Passage]:
    """Return nodes as passages: node N has reference id N. Hidden characters are left out of their texts.

    Args:
        nodes: Evidence of our retriever, or plain LlamaIndex nodes.
        sources: By name; where a node names one, its field names tell title and content. Else the title is the
            metadata's "title" or "file_name", or the node's id, and the content what LlamaIndex shows to a model.
        spotlight: How they are marked as data in prompts.
    """
    return [_shown(_passage(position, node, sources or {}), spotlight) for position, node in enumerate(nodes)]


def _passage(position: int, node: NodeWithScore, sources: Mapping[str, KnowledgeSource]) -> Passage:
    data = source_data(node, sources)
    if data is not None:
        name = str((provenance(node) or {})["source"])
        return Passage(position, data.title, data.content, name, data.terms, data.url)
    metadata = node.node.metadata
    title = metadata.get("title") or metadata.get("file_name") or node.node.node_id
    url = metadata.get("url")
    content = node.node.get_content(metadata_mode=MetadataMode.LLM)
    return Passage(position, str(title), content, url=url if isinstance(url, str) else None)


def _shown(passage: Passage, spotlight: Spotlight) -> Passage:
    (title, a), (content, b), (terms, c) = map(without_hidden, (passage.title, passage.content, passage.terms or ""))
    return replace(passage, title=title, content=content, terms=terms or None, hidden=a + b + c, spotlight=spotlight)


def cost(passage: Passage) -> int:
    """Count the tokens that a passage takes up in a prompt."""
    return count_tokens(format_passage(passage)) + 1  # and a line feed


def fit(candidates: Sequence[Passage], room: int) -> Packed:
    """Keep what fits into one prompt: passages in order, the one that overflows cut at a sentence end.

    Args:
        candidates: Most important first.
        room: Tokens.
    """
    packed = Packed([[]])
    for passage in candidates:
        whole = cost(passage)
        kept = passage if whole <= room else _cut(passage, room)
        if kept is None:
            packed.dropped += 1
            continue
        packed.cut += kept is not passage
        packed.groups[0].append(kept)
        room -= whole if kept is passage else cost(kept)
    return _without_empty(packed)


def share(candidates: Sequence[Passage], room: int) -> Packed:
    """Keep every passage in one prompt, each cut to an equal share; what short ones leave over goes to the others."""
    costs = [cost(passage) for passage in candidates]
    kept: dict[int, Passage] = {}
    packed = Packed([[]])
    for done, position in enumerate(sorted(range(len(candidates)), key=costs.__getitem__)):
        part = room // (len(candidates) - done)
        passage = candidates[position] if costs[position] <= part else _cut(candidates[position], part)
        if passage is None:
            packed.dropped += 1
            continue
        packed.cut += passage is not candidates[position]
        kept[position] = passage
        room -= min(part, costs[position])
    packed.groups[0] = [kept[position] for position in sorted(kept)]
    return _without_empty(packed)


def singly(candidates: Sequence[Passage], room: int) -> Packed:
    """Put each passage into a prompt of its own; one too big for a prompt is split at sentence ends.

    All parts keep the passage's reference id; there are at most ``MAX_PARTS``.
    """
    packed = Packed()
    for passage in candidates:
        parts, rest = _split(passage, room)
        packed.dropped += not parts
        packed.cut += bool(parts and rest)
        packed.groups.extend([part] for part in parts)
    return packed


def pack(candidates: Sequence[Passage], room: int) -> Packed:
    """Put passages, in order and whole, into as few prompts as they fit; one too big for a prompt is split."""
    packed = singly(candidates, room)
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


def _without_empty(packed: Packed) -> Packed:
    packed.groups = [group for group in packed.groups if group]
    return packed


def _cut(passage: Passage, room: int) -> Passage | None:
    """Return a passage's start that fits, or None where hardly anything would."""
    if room < cost(replace(passage, content="")) + MIN_CONTENT:
        return None

    def measure(text: str) -> int:
        return cost(replace(passage, content=text))

    content = cut_to_fit(somewhat_longer(passage.content, room), room, measure)
    return replace(passage, content=content) if content else None


def _split(passage: Passage, room: int) -> tuple[list[Passage], str]:
    """Return a passage in parts that fit, in order, and what is left; no parts where not even a few words fit."""
    if room < cost(replace(passage, content="")) + MIN_CONTENT:
        return [], passage.content
    parts: list[Passage] = []
    rest = passage.content
    while (rest or not parts) and len(parts) < MAX_PARTS:
        end = _part_end(passage, rest, room)
        parts.append(replace(passage, content=rest[:end].rstrip()))
        rest = rest[end:].lstrip()
    return parts, rest


def _part_end(passage: Passage, text: str, room: int) -> int:
    """Return where the first part of a text ends: at a sentence end if there is one near, else between words.

    A part goes on in the next one, so a full stop that ends no sentence does no harm: a pattern will do, which is
    a hundred times faster than the segmenter.
    """
    longest = _longest(passage, text, room)
    if longest == len(text):
        return longest
    for ends in (_SENTENCE_END, _SPACE):
        found = [match.end() for match in ends.finditer(text, longest // 2, longest)]
        if found:
            return found[-1]
    return longest


def _longest(passage: Passage, text: str, room: int) -> int:
    """Return about the most characters of a text's start that fit: at least nine tenths, found by interpolation."""
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
    return low


def somewhat_longer(text: str, room: int) -> str:
    """Return a start of a text that is longer than fits, but not many times: measuring a long one is slow."""
    end = room * 6
    for _ in range(8):
        if end >= len(text):
            return text
        counted = count_tokens(text[:end])
        if room < counted <= 2 * room:
            return text[:end]
        end = end * 2 if counted <= room else int(end * 1.2 * room / counted)
    return text
