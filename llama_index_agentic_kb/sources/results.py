"""What a search gives: ranked lists of nodes, one for each way in which the source was searched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

__all__ = ["NodeKey", "NodeList", "SearchResult", "distinct_nodes", "node_key"]

NodeKey: TypeAlias = tuple[str, str]
"""A node's id and text."""


@dataclass(frozen=True, slots=True)
class NodeList:
    """One ranked list of a search: a source may search in several ways at once.

    Args:
        kind: "dense", "lexical", "hybrid" (the store's own), or "retriever" (its way is its own).
        nodes: Best first, every one checked against the effective filter; wrappers of our own.
        scale: Lists of one scale have scores that can be compared; None is a scale of its own.
        weight: How much it counts beside the search's other lists.
        candidates: How many the source returned.
        dropped_by_filter: How many of these broke the filter.
        dropped_as_unusable: How many of these were no nodes that can be used; ``note`` says why.
        elapsed_ms: How long it took, without the embedding of the query; None where it was not taken apart from the
            search.
        error: Why it has no nodes, where it failed; the search goes on with the others.
        note: What else should be known of it: that it was searched exactly, or again with more candidates.
    """

    kind: str
    nodes: list[NodeWithScore]
    scale: Hashable | None = None
    weight: float = 1.0
    candidates: int = 0
    dropped_by_filter: int = 0
    dropped_as_unusable: int = 0
    elapsed_ms: int | None = None
    error: Exception | None = None
    note: str | None = None
    _keys: list[NodeKey] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def keys(self) -> list[NodeKey]:
        """What tells each node apart, in order; worked out once: LlamaIndex makes a node's text anew each time."""
        if len(self._keys) != len(self.nodes):
            self._keys[:] = [node_key(node.node) for node in self.nodes]
        return self._keys


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What one search gave: its ranked lists, not fused yet."""

    lists: tuple[NodeList, ...]

    @property
    def nodes(self) -> list[NodeWithScore]:
        """The nodes of all lists, each once, in the lists' order."""
        return distinct_nodes(self.lists)

    @property
    def candidates(self) -> int:
        """How many nodes the source returned, in all lists."""
        return sum(ranked.candidates for ranked in self.lists)

    @property
    def dropped_by_filter(self) -> int:
        """How many of these broke the filter."""
        return sum(ranked.dropped_by_filter for ranked in self.lists)

    @property
    def dropped_as_unusable(self) -> int:
        """How many of these were no nodes that can be used."""
        return sum(ranked.dropped_as_unusable for ranked in self.lists)


def distinct_nodes(lists: Sequence[NodeList]) -> list[NodeWithScore]:
    """Give the nodes of several lists, each once (by id and text), where it comes first."""
    nodes: dict[NodeKey, NodeWithScore] = {}
    for ranked in lists:
        for key, node in zip(ranked.keys, ranked.nodes, strict=True):
            nodes.setdefault(key, node)
    return list(nodes.values())


def node_key(node: BaseNode) -> NodeKey:
    """Give what tells nodes apart: the same text under two ids stays two, and one id with two texts as well."""
    return node.node_id, node.get_content(metadata_mode=MetadataMode.NONE)
