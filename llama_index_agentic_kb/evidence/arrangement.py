"""Chooses the evidence: adjacent chunks of one document become one node, and long documents leave room for others.

Only nodes that were found, and passed every filter and postprocessor, are ever joined: nothing is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeAlias

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeRelationship, NodeWithScore, TextNode

from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance

__all__ = ["Arrangement", "arrange", "follows", "join", "pieces_per_document"]

MAX_CHARACTERS: Final = 6_000
"""Characters of a joined node: about 1,500 tokens, under a third of the default budget of extracted data."""

CHUNK_INDEX: Final = "chunk_index"
"""Metadata key of a chunk's number in its document."""

MIN_OVERLAP: Final = 20
"""Characters that two texts must share to count as overlapping where their positions are not known: text that comes
twice does no harm, text that is lost does."""

MAX_GAP: Final = 2
"""Characters between two chunks' positions that a splitter may have stripped: a paragraph's end at most."""

_Part: TypeAlias = tuple[int, NodeWithScore]
"""A node with its place in the ranking."""


@dataclass(slots=True)
class Arrangement:
    """The evidence.

    Args:
        nodes: Best first.
        used: How many of the ranked nodes are in it; more than ``nodes`` where neighbours were joined.
    """

    nodes: list[NodeWithScore] = field(default_factory=list)
    used: int = 0


@dataclass(slots=True, eq=False)
class _Piece:
    """What will be one reference: chunks in the document's order."""

    document: tuple[str, str]
    parts: list[_Part]

    @property
    def first(self) -> BaseNode:
        return self.parts[0][1].node

    @property
    def last(self) -> BaseNode:
        return self.parts[-1][1].node

    @property
    def length(self) -> int:
        return sum(len(node.node.get_content()) for _, node in self.parts)


def pieces_per_document(limit: int) -> int:
    """Return how many pieces one document may have before others get a place: a third of all, and at least 3."""
    return max(3, math.ceil(limit / 3))


def arrange(
    nodes: Sequence[NodeWithScore], limit: int, *, joining: bool = True, max_per_document: int | None = None
) -> Arrangement:
    """Choose the evidence: at most ``limit`` pieces, each a node or several neighbours joined.

    Nodes are taken in order. One that is adjacent to a piece joins it and takes no place of its own; one whose
    document has ``max_per_document`` pieces already waits behind all others, unless it is a sub-query's best evidence.
    The first one for which there is no place ends it.

    Args:
        nodes: Best first.
        limit: How many places there are.
        joining: Whether neighbours are joined.
        max_per_document: Pieces of one document before others get a place; None sets no number.
    """
    pieces: list[_Piece] = []
    waiting: list[_Part] = []
    for part in enumerate(nodes):
        if joining and _joins(pieces, part):
            continue
        if _has_enough(pieces, part[1], max_per_document):
            waiting.append(part)
        elif len(pieces) < limit:
            pieces.append(_Piece(_document(part[1]), [part]))
        else:
            break
    for part in waiting:
        if len(pieces) >= limit:
            break
        if not (joining and _joins(pieces, part)):
            pieces.append(_Piece(_document(part[1]), [part]))
    return Arrangement([join(piece.parts) for piece in pieces], sum(len(piece.parts) for piece in pieces))


def _has_enough(pieces: Sequence[_Piece], node: NodeWithScore, limit: int | None) -> bool:
    if limit is None or (provenance(node) or {}).get("best_for"):
        return False
    document = _document(node)
    return sum(piece.document == document for piece in pieces) >= limit


def _document(node: NodeWithScore) -> tuple[str, str]:
    """Return what identifies a node's document; a node that names no document is one of its own."""
    return (provenance(node) or {}).get("source", ""), node.node.ref_doc_id or f"node {node.node.node_id}"


def _joins(pieces: list[_Piece], part: _Part) -> bool:
    """Put a node into the pieces that it is adjacent to, if it fits; two that it bridges become one."""
    node = part[1].node
    if not _joinable(node) or (length := len(node.get_content())) > MAX_CHARACTERS:
        return False
    after = next((piece for piece in pieces if follows(piece.last, node)), None)
    before = next((piece for piece in pieces if piece is not after and follows(node, piece.first)), None)
    around = [piece for piece in pieces if piece in (after, before)]  # better first
    if after and before and after.length + length + before.length <= MAX_CHARACTERS:
        better, worse = around
        better.parts = [*after.parts, part, *before.parts]
        pieces.remove(worse)
        return True
    for piece in around:
        if piece.length + length <= MAX_CHARACTERS:
            piece.parts = [*piece.parts, part] if piece is after else [part, *piece.parts]
            return True
    return False


# -- what is adjacent ----------------------------------------------------------------------------------------------


def follows(first: BaseNode, second: BaseNode) -> bool:
    """Return whether one chunk comes right after another in their document.

    They must be plain text of one source with the same metadata: a joined node has one set of it, so that what differs
    (a page, an audience, a sentence window) would be lost for all parts but one. The chunk's number and the provenance
    may differ. Then LlamaIndex's own links (``NodeRelationship.NEXT`` and ``PREVIOUS``) decide; or, within one source
    document, consecutive ``chunk_index`` in the metadata; or, where neither is there, character positions that touch.
    """
    if not (_joinable(first) and _joinable(second)) or first.node_id == second.node_id:
        return False
    return _adjacent(first, second) and _alike(first.metadata, second.metadata)


def _adjacent(first: BaseNode, second: BaseNode) -> bool:
    following, previous = first.next_node, second.prev_node
    if following is not None and following.node_id == second.node_id:
        return True
    if previous is not None and previous.node_id == first.node_id:
        return True
    if first.ref_doc_id is None or first.ref_doc_id != second.ref_doc_id:
        return False
    one, two = first.metadata.get(CHUNK_INDEX), second.metadata.get(CHUNK_INDEX)
    if isinstance(one, int) and isinstance(two, int):
        return two == one + 1
    start, end = _span(first), _span(second)
    if following is not None or previous is not None or start is None or end is None:  # linked to others, or unknown
        return False
    return start[0] < end[0] <= start[1] + MAX_GAP and start[1] < end[1]


def _joinable(node: BaseNode) -> bool:
    return isinstance(node, TextNode) and not isinstance(node, IndexNode | ImageNode)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    sources = [(metadata.get(PROVENANCE_KEY) or {}).get("source") for metadata in (one, other)]
    plain = [
        {key: value for key, value in metadata.items() if key not in (PROVENANCE_KEY, CHUNK_INDEX)}
        for metadata in (one, other)
    ]
    return sources[0] == sources[1] and plain[0] == plain[1]


def _span(node: BaseNode) -> tuple[int, int] | None:
    if not isinstance(node, TextNode) or node.start_char_idx is None or node.end_char_idx is None:
        return None
    return node.start_char_idx, node.end_char_idx


# -- joining -------------------------------------------------------------------------------------------------------


def join(parts: Sequence[_Part]) -> NodeWithScore:
    """Return one node made of neighbours.

    It has the id, the metadata and the source of the best part, the best score of all, the text of all with what
    overlaps once, and its parts in its provenance. It has no embedding: none was made of that text.

    Args:
        parts: In the document's order; the lowest place is the best part.
    """
    best = min(parts, key=lambda part: part[0])[1]
    if len(parts) == 1:
        return best
    nodes = [node for _, node in parts]
    chunks = [node.node for node in nodes]
    text, spans = _joined_text(chunks)
    start, end = _whole_span(chunks)
    copy = best.node.model_copy(
        update={
            "text": text,
            "embedding": None,
            "metadata": {**best.node.metadata, PROVENANCE_KEY: _joined_provenance(best, nodes, spans)},
            "relationships": _joined_links(best.node, chunks[0], chunks[-1]),
            "start_char_idx": start,
            "end_char_idx": end,
        }
    )
    return NodeWithScore(node=copy, score=max((node.score for node in nodes if node.score is not None), default=None))


def _joined_text(nodes: Sequence[BaseNode]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of neighbours, and where in it each one's own text stands."""
    text = _text(nodes[0])
    spans = [(0, len(text))]
    for before, node in pairwise(nodes):
        own, gap = _text(node), _gap(before, node)
        shared = _overlap(_text(before), own, gap)
        if not shared:
            text += {0: "", 1: " "}.get(gap, "\n") if gap is not None else "\n"
        start = len(text) - shared
        text += own[shared:]
        spans.append((start, len(text)))
    return text, spans


def _overlap(one: str, two: str, gap: int | None) -> int:
    """Return how many characters at the end of one text are the start of the next."""
    if gap is not None and gap >= 0:
        return 0
    if gap is not None and -gap < len(two) and one.endswith(two[:-gap]):
        return -gap
    longest = min(len(one), len(two) - 1)
    return next((size for size in range(longest, MIN_OVERLAP - 1, -1) if one.endswith(two[:size])), 0)


def _gap(first: BaseNode, second: BaseNode) -> int | None:
    """Return the characters between two chunks by their positions, below 0 where they overlap; None if not known."""
    one, two = _span(first), _span(second)
    return None if one is None or two is None else two[0] - one[1]


def _joined_provenance(
    best: NodeWithScore, nodes: Sequence[NodeWithScore], spans: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    marks = [provenance(node) or {} for node in nodes]
    made = dict(provenance(best) or {})
    made["searches"] = [search for mark in marks for search in mark.get("searches", [])]
    for key in ("reranker_score", "source_score"):
        values = [mark[key] for mark in marks if mark.get(key) is not None]
        if values:
            made[key] = max(values)
    served = list(dict.fromkeys(name for mark in marks for name in mark.get("best_for", [])))
    if served:
        made["best_for"] = served
    made["parts"] = [
        {"node_id": node.node.node_id, "start": start, "end": end, "score": node.score}
        for node, (start, end) in zip(nodes, spans, strict=True)
    ]
    return made


def _joined_links(best: BaseNode, first: BaseNode, last: BaseNode) -> dict[NodeRelationship, Any]:
    ends = {NodeRelationship.PREVIOUS: first, NodeRelationship.NEXT: last}
    links: dict[NodeRelationship, Any] = {key: value for key, value in best.relationships.items() if key not in ends}
    return links | {key: node.relationships[key] for key, node in ends.items() if key in node.relationships}


def _whole_span(nodes: Sequence[BaseNode]) -> tuple[int | None, int | None]:
    """Return the characters from the first part's start to the last one's end, where positions go on part by part."""
    spans = [span for node in nodes if (span := _span(node)) is not None]
    if len(spans) < len(nodes) or any(one[0] >= two[0] for one, two in pairwise(spans)):
        return None, None
    return spans[0][0], spans[-1][1]


def _text(node: BaseNode) -> str:
    return node.text if isinstance(node, TextNode) else ""
