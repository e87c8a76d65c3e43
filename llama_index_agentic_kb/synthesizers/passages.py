"""From nodes to passages, and passages into a language model's window: cut, shared out, or packed.

The position of a node is its reference id, and stays so whatever becomes of its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.evidence.provenance import provenance, shown_metadata
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.guard.text import without_hidden
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage, format_passage
from llama_index_agentic_kb.sources.base import KnowledgeSource

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


Packer: TypeAlias = Callable[[Sequence[Passage], int, float], Packed]
"""Arranges passages, best first, in so many tokens; parts of one passage overlap by a share of their length."""


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
    """Count the tokens that a passage, or one with another content, takes up in a prompt."""
    shown = passage if content is None else replace(passage, content=content)
    return count_tokens(format_passage(shown)) + 1  # and a line feed


def shortened(content: str, room: int, measure: Callable[[str], int]) -> str:
    """Return the start of a text that measures at most ``room``, cut at a sentence end; empty where little would fit.

    Args:
        content: The text.
        room: Tokens, for the text and what stands around it.
        measure: Counts a text with what stands around it.
    """
    if measure("") + MIN_CONTENT > room:
        return ""
    end = room * 6
    for _ in range(8):  # measuring a long text is slow: a start of it that is too long, but not many times, will do
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
    """Keep what fits into one prompt: passages in order, the one that overflows cut at a sentence end."""
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
    """Keep every passage in one prompt, each cut to an equal share; what short ones leave over goes to the others."""
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
    """Put each passage into a prompt of its own; one too big for a prompt is split at sentence ends.

    All parts keep the passage's reference id; there are at most ``MAX_PARTS``.
    """
    packed = Packed()
    for passage in candidates:
        parts, is_cut = _split(passage, room, overlap)
        packed.dropped += not parts
        packed.cut += is_cut
        packed.groups += [[part] for part in parts]
    return packed


def pack(candidates: Sequence[Passage], room: int, overlap: float = 0.0) -> Packed:
    """Put passages, in order and whole, into as few prompts as they fit; one too big for a prompt is split."""
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
    """Return a passage in parts that fit, in order, and whether it was cut; no parts where hardly a word fits."""
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
    """Return where the first part of a text ends: at a sentence end if there is one near, else between words.

    A part goes on in the next one, so a full stop that ends no sentence does no harm: a pattern will do, which is
    a hundred times faster than the segmenter. The longest part is found by interpolation, to nine tenths.
    """
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
