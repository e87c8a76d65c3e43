"""Selects the evidence: joins adjacent chunks of a document and limits the number of nodes per document.

Only nodes that were found and passed every filter and postprocessor are joined; no further nodes are fetched.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Final, TypeAlias

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeRelationship, NodeWithScore, TextNode

from llama_index_agentic_kb.evidence.provenance import CHUNK_INDEX, PROVENANCE_KEY, provenance

MAX_CHARACTERS: Final = 6_000
"""Maximum number of characters of a joined node: about 1,500 tokens, under a third of the default budget."""

MIN_OVERLAP: Final = 20
"""Minimum number of shared characters for two texts of unknown position to count as overlapping: repeated text is
harmless, lost text is not."""

MAX_GAP: Final = 2  # maximum number of characters between two adjacent chunks: whitespace that a splitter removed

_Part: TypeAlias = tuple[int, NodeWithScore]  # a node's rank (0 is best) and the node
_Document: TypeAlias = tuple[str, str]  # the source's name and the document's id


@dataclass(slots=True)
class Arrangement:
    """The selected evidence, and the number of ranked nodes in it: more than its own if neighbours were joined."""

    nodes: list[NodeWithScore]
    used: int


@dataclass(slots=True, eq=False)
class _Piece:
    """The chunks that become one reference, in document order; none if the piece was merged into another."""

    place: int
    document: _Document
    parts: list[_Part]

    @property
    def length(self) -> int:
        return sum(len(node.node.get_content()) for _, node in self.parts)


def pieces_per_document(limit: int) -> int:
    """Return how many pieces a document may have before others take precedence: a third of ``limit``, at least 3."""
    return max(3, math.ceil(limit / 3))


def arrange(
    nodes: Sequence[NodeWithScore], limit: int, *, joining: bool = True, max_per_document: int | None = None
) -> Arrangement:
    """Select at most ``limit`` pieces of evidence from ranked nodes, each a node or several joined neighbours.

    A node whose document already has ``max_per_document`` pieces is moved to the end, unless it is proof or a
    sub-query's best evidence.
    """
    pieces = _Pieces(joining)
    waiting: list[tuple[_Document, _Part]] = []
    for part in enumerate(nodes):
        if pieces.join(part):
            continue
        node, mark = part[1].node, provenance(part[1]) or {}
        # a node without a source document counts as its own document
        document = mark.get("source", ""), node.ref_doc_id or f"node {node.node_id}"
        is_full = max_per_document is not None and pieces.per_document[document] >= max_per_document
        if is_full and not (mark.get("best_for") or mark.get("proof")):
            waiting.append((document, part))
        elif len(pieces.kept) < limit:
            pieces.add(document, part)
        else:
            break
    for document, part in waiting:
        if len(pieces.kept) >= limit:
            break
        if not pieces.join(part):
            pieces.add(document, part)
    kept = [piece.parts for piece in pieces.kept]
    return Arrangement([join(parts) for parts in kept], sum(map(len, kept)))


class _Pieces:
    """The pieces that were made so far, found by what may be adjacent to them: comparing all would be quadratic."""

    def __init__(self, joining: bool) -> None:
        self.kept: list[_Piece] = []
        self.per_document: Counter[_Document] = Counter()
        self._joining, self._places = joining, count()
        self._near: defaultdict[Hashable, list[_Piece]] = defaultdict(list)

    def add(self, document: _Document, part: _Part) -> None:
        """Add a piece of one node."""
        piece = _Piece(next(self._places), document, [])
        self.kept.append(piece)
        self.per_document[document] += 1
        self._extend(piece, [part], [part])

    def join(self, part: _Part) -> bool:
        """Join a node to adjacent pieces if the length allows (merging two pieces); return whether it was joined."""
        if not self._joining:
            return False
        node = part[1].node
        near = {piece.place: piece for key in _keys(node) for piece in self._near[key] if piece.parts}
        if not near:
            return False
        length = len(node.get_content())
        better_first = [near[place] for place in sorted(near)]
        after = next((one for one in better_first if follows(one.parts[-1][1].node, node)), None)
        before = next((one for one in better_first if one is not after and follows(node, one.parts[0][1].node)), None)
        around = [piece for piece in better_first if piece is after or piece is before]
        if after and before and after.length + length + before.length <= MAX_CHARACTERS:
            better, worse = around
            self._extend(better, [*after.parts, part, *before.parts], [part, *worse.parts])
            worse.parts = []
            self.kept.remove(worse)
            self.per_document[worse.document] -= 1
            return True
        for piece in around:
            if piece.length + length <= MAX_CHARACTERS:
                self._extend(piece, [*piece.parts, part] if piece is after else [part, *piece.parts], [part])
                return True
        return False

    def _extend(self, piece: _Piece, parts: list[_Part], new: Sequence[_Part]) -> None:
        piece.parts = parts
        for _, node in new:
            for key in _keys(node.node):
                self._near[key].append(piece)


def _keys(node: BaseNode) -> Iterator[Hashable]:
    """Yield keys of which two nodes share at least one if they are adjacent: ids of nodes, and the document."""
    yield node.node_id
    for linked in (node.next_node, node.prev_node):
        if linked is not None:
            yield linked.node_id
    if node.ref_doc_id is not None:
        yield "document", node.ref_doc_id


# -- adjacency -----------------------------------------------------------------------------------------------------


def follows(first: BaseNode, second: BaseNode) -> bool:
    """Return whether ``second`` comes directly after ``first`` in their document and can be joined to it.

    Both must be plain text of one source with equal metadata, because a joined node has only one set of metadata (a
    page, an audience). Adjacency is decided by LlamaIndex's links, else by ``chunk_index``, else by positions.
    """
    if first.node_id == second.node_id or not _adjacent(first, second):
        return False
    compared, sources = [], []
    for node in (first, second):
        if not isinstance(node, TextNode) or isinstance(node, IndexNode | ImageNode):
            return False
        compared.append({k: v for k, v in node.metadata.items() if k not in (PROVENANCE_KEY, CHUNK_INDEX)})
        sources.append((node.metadata.get(PROVENANCE_KEY) or {}).get("source"))
    return compared[0] == compared[1] and sources[0] == sources[1]


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


def _span(node: BaseNode) -> tuple[int, int] | None:
    if not isinstance(node, TextNode) or node.start_char_idx is None or node.end_char_idx is None:
        return None
    return node.start_char_idx, node.end_char_idx


# -- joining -------------------------------------------------------------------------------------------------------


def join(parts: Sequence[_Part]) -> NodeWithScore:
    """Return one node made of adjacent chunks in document order, with the id and metadata of the best of them.

    It has no embedding, as none was computed for its text.
    """
    best = min(parts, key=lambda part: part[0])[1]
    if len(parts) == 1:
        return best
    nodes = [node for _, node in parts]
    chunks = [node.node for node in nodes]
    text, spans = _joined_text(chunks)
    places = [span for chunk in chunks if (span := _span(chunk)) is not None]
    is_known = len(places) == len(chunks) and all(one[0] < two[0] for one, two in pairwise(places))
    links = dict(best.node.relationships)  # the links at both ends of the joined node
    for key, end in ((NodeRelationship.PREVIOUS, chunks[0]), (NodeRelationship.NEXT, chunks[-1])):
        links.pop(key, None)
        if key in end.relationships:
            links[key] = end.relationships[key]
    copy = best.node.model_copy(
        update={
            "text": text,
            "embedding": None,
            "metadata": {**best.node.metadata, PROVENANCE_KEY: _joined_provenance(best, nodes, spans)},
            "relationships": links,
            "start_char_idx": places[0][0] if is_known else None,
            "end_char_idx": places[-1][1] if is_known else None,
        }
    )
    return NodeWithScore(node=copy, score=max((node.score for node in nodes if node.score is not None), default=None))


def _joined_text(nodes: Sequence[BaseNode]) -> tuple[str, list[tuple[int, int]]]:
    """Return the combined text of adjacent chunks, and the (start, end) position of each chunk in it."""
    text = nodes[0].get_content()
    spans = [(0, len(text))]
    for before, node in pairwise(nodes):
        own, one, two = node.get_content(), _span(before), _span(node)
        gap = None if one is None or two is None else two[0] - one[1]  # negative if they overlap
        shared = _overlap(before.get_content(), own, gap)
        if not shared and gap != 0:
            text += " " if gap == 1 else "\n"
        start = len(text) - shared
        text += own[shared:]
        spans.append((start, len(text)))
    return text, spans


def _overlap(one: str, two: str, gap: int | None) -> int:
    """Return the length of the overlap between the end of one text and the start of the next."""
    if gap is not None and gap >= 0:
        return 0
    if gap is not None and -gap < len(two) and one.endswith(two[:-gap]):
        return -gap
    longest = min(len(one), len(two) - 1)
    return next((size for size in range(longest, MIN_OVERLAP - 1, -1) if one.endswith(two[:size])), 0)


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
    proof = [one for mark in marks for one in mark.get("proof", [])]
    made |= {key: value for key, value in (("best_for", served), ("proof", proof)) if value}
    made["parts"] = [
        {"node_id": node.node.node_id, "start": start, "end": end, "score": node.score}
        for node, (start, end) in zip(nodes, spans, strict=True)
    ]
    return made
