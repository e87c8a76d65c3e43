"""The passages that a model reads while it searches: the best of each sub-query, numbered, cut around what is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._text import excerpt, normalize
from llama_index_agentic_kb.evidence.candidates import Candidate, collect, lists_by_sub_query
from llama_index_agentic_kb.evidence.options import EvidenceOptions
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.prompts import Passage, format_passages
from llama_index_agentic_kb.sources.base import KnowledgeSource, NodeKey, node_key
from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["Reading", "SeenPassage", "best_of", "numbered"]

MOST_PASSAGES: Final = 30
"""Passages of one prompt, whatever the number of sub-queries."""


@dataclass(frozen=True, slots=True)
class SeenPassage:
    """A passage as the model sees it."""

    ref: int
    node: NodeWithScore
    source: KnowledgeSource
    title: str
    content: str

    def says(self, value: str) -> bool:
        """Whether the value stands in the passage or its title; what only tells it from others of its name need not."""
        here = normalize(f"{self.title}\n{self.content}\n{self.source.source_data(self.node).content}")
        told = normalize(value)
        return _holds(here, told) or all(_holds(here, part) for part in _core(told).split())


def _holds(text: str, part: str) -> bool:
    """Whether a text holds another as words of its own: "ed" is not in "directed"; other scripts have no such ends."""
    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) is not None


def _core(value: str) -> str:
    """Give an answer without what tells it from others of its name: "columbia" of "columbia, south carolina"."""
    return value.split("(", maxsplit=1)[0].split(",", maxsplit=1)[0].strip() or value


@dataclass(slots=True)
class Reading:
    """Passages for one prompt, each once.

    Args:
        per_query: How many of each sub-query.
        words: Words of each passage.
    """

    per_query: int
    words: int
    passages: dict[int, SeenPassage] = field(default_factory=dict)
    _seen: set[NodeKey] = field(default_factory=set)

    def add(self, query: str, found: Sequence[Candidate]) -> None:
        """Add the best passages that a query found.

        Args:
            query: Each passage is cut around its words.
            found: Best first.
        """
        for one in found[: self.per_query]:
            node, source = one.node, one.lane.source
            key = node_key(node.node)
            if key in self._seen or len(self.passages) >= MOST_PASSAGES:
                continue
            self._seen.add(key)
            ref, data = len(self.passages) + 1, source.source_data(node)
            self.passages[ref] = SeenPassage(ref, node, source, data.title, excerpt(data.content, query, self.words))

    def as_prompt(self, spotlight: Spotlight = PLAIN) -> str:
        """Give the passages as they stand in a prompt.

        Args:
            spotlight: How they are marked as data.
        """
        return format_passages(
            Passage(passage.ref, passage.title, passage.content, passage.source.name, spotlight=spotlight)
            for passage in self.passages.values()
        )


def best_of(lanes: Sequence[SourceSearch], options: EvidenceOptions) -> list[Candidate]:
    """Give what one sub-query found at all its sources, best first.

    Args:
        lanes: Its searches.
        options: How ranked lists are fused.
    """
    candidates = collect(lanes)
    lists = lists_by_sub_query(lanes, options.fusion, options.lane_fusion, options.lane_weights)
    return [candidates[key] for one in lists for key in one.ranked.keys]


def numbered(steps: Mapping[str, str] | Sequence[tuple[str, str]]) -> str:
    """Give steps one a line, as ``q1: ...``."""
    pairs = steps.items() if isinstance(steps, Mapping) else steps
    return "\n".join(f"{name}: {' '.join(text.split())}" for name, text in pairs)
