"""Chooses the evidence: neighbours join, and long documents leave room for others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from llama_index.core.schema import BaseNode, NodeWithScore

from llama_index_agentic_kb.evidence.neighbours import follows, join, joinable
from llama_index_agentic_kb.evidence.provenance import provenance

__all__ = ["MOST_CHARACTERS", "Arranged", "arrange", "pieces_per_document"]

MOST_CHARACTERS: Final = 6_000
"""Characters of a joined node: about 1,500 tokens, under a third of the default budget of extracted data."""

_Document: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class Arranged:
    """The evidence.

    Args:
        nodes: Best first.
        used: How many of the given nodes are in it; more than there are nodes where neighbours were joined.
    """

    nodes: list[NodeWithScore] = field(default_factory=list)
    used: int = 0


@dataclass(slots=True, eq=False)
class _Piece:
    """What will be one reference: chunks in the document's order, each with its place in the given order."""

    document: _Document
    parts: list[tuple[int, NodeWithScore]]

    @property
    def first(self) -> BaseNode:
        return self.parts[0][1].node

    @property
    def last(self) -> BaseNode:
        return self.parts[-1][1].node

    @property
    def length(self) -> int:
        return sum(len(node.node.get_content()) for _, node in self.parts)


def pieces_per_document(wanted: int) -> int:
    """Give how many pieces one document may have before others get a place: a third of all, and at least 3."""
    return max(3, math.ceil(wanted / 3))


def arrange(
    nodes: Sequence[NodeWithScore],
    wanted: int,
    *,
    joining: bool = True,
    max_per_document: int | None = None,
    most_characters: int = MOST_CHARACTERS,
) -> Arranged:
    """Choose the evidence: at most ``wanted`` pieces, each a node or several neighbours joined.

    Nodes are taken in order. One that is adjacent to a piece joins it and takes no place of its own; one whose
    document has ``max_per_document`` pieces already waits behind all others, unless it is a sub-query's best evidence.
    The first one for which there is no place ends it.

    Args:
        nodes: Best first.
        wanted: How many places there are.
        joining: Whether neighbours are joined.
        max_per_document: Pieces of one document before others get a place; None sets no number.
        most_characters: The longest that a joined node may be.
    """
    limit = most_characters if joining else 0
    pieces: list[_Piece] = []
    waiting: list[tuple[int, NodeWithScore]] = []
    for place, node in enumerate(nodes):
        if _joins(pieces, place, node, limit):
            continue
        if _has_enough(pieces, node, max_per_document):
            waiting.append((place, node))
        elif len(pieces) < wanted:
            pieces.append(_Piece(_document(node), [(place, node)]))
        else:
            break
    for place, node in waiting:
        if len(pieces) >= wanted:
            break
        if not _joins(pieces, place, node, limit):
            pieces.append(_Piece(_document(node), [(place, node)]))
    return Arranged([join(piece.parts) for piece in pieces], sum(len(piece.parts) for piece in pieces))


def _has_enough(pieces: Sequence[_Piece], node: NodeWithScore, most: int | None) -> bool:
    if most is None or (provenance(node) or {}).get("best_for"):
        return False
    document = _document(node)
    return sum(piece.document == document for piece in pieces) >= most


def _joins(pieces: list[_Piece], place: int, node: NodeWithScore, limit: int) -> bool:
    """Put a node into the pieces that it is adjacent to, if it may be; two that it bridges become one."""
    length = len(node.node.get_content())
    if not limit or length > limit or not joinable(node.node):
        return False
    after = next((piece for piece in pieces if follows(piece.last, node.node)), None)
    before = next((piece for piece in pieces if piece is not after and follows(node.node, piece.first)), None)
    around = [piece for piece in pieces if piece in (after, before)]  # better first
    if after and before and after.length + length + before.length <= limit:
        better, worse = around
        better.parts = [*after.parts, (place, node), *before.parts]
        pieces.remove(worse)
        return True
    for piece in around:
        if piece.length + length <= limit:
            piece.parts = [*piece.parts, (place, node)] if piece is after else [(place, node), *piece.parts]
            return True
    return False


def _document(node: NodeWithScore) -> _Document:
    """Tell documents apart; a node that names no document is one of its own."""
    return (provenance(node) or {}).get("source", ""), node.node.ref_doc_id or f"node {node.node.node_id}"
