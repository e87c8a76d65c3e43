"""Adjacent chunks of one document become one node.

Only nodes that were found, and passed every filter and postprocessor, are ever joined: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, NodeRelationship, NodeWithScore, TextNode

from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance

__all__ = ["follows", "join", "joinable"]

CHUNK_INDEX: Final = "chunk_index"
"""Metadata key of a chunk's number in its document."""

LEAST_OVERLAP: Final = 20
"""Characters that two texts must share to be held for overlapping where their positions don't tell: text that comes
twice does no harm, text that is lost does."""

WIDEST_GAP: Final = 2
"""Characters between two chunks' positions that a splitter may have stripped: a paragraph's end at most."""


def follows(first: BaseNode, second: BaseNode) -> bool:
    """Tell whether one chunk comes right after another in their document.

    They must be plain text of one source with the same metadata: a joined node has one set of it, so that what differs
    (a page, an audience, a sentence window) would be lost for all parts but one. The chunk's number and the provenance
    may differ. Then LlamaIndex's own links (``NodeRelationship.NEXT`` and ``PREVIOUS``) tell; or, within one source
    document, consecutive ``chunk_index`` in the metadata; or, where neither is there, character positions that touch.
    """
    if not (joinable(first) and joinable(second)) or first.node_id == second.node_id:
        return False
    return _adjacent(first, second) and _alike(first.metadata, second.metadata)


def _adjacent(first: BaseNode, second: BaseNode) -> bool:
    linked = _linked(first, second)
    if linked:
        return True
    if first.ref_doc_id is None or first.ref_doc_id != second.ref_doc_id:
        return False
    one, two = first.metadata.get(CHUNK_INDEX), second.metadata.get(CHUNK_INDEX)
    if isinstance(one, int) and isinstance(two, int):
        return two == one + 1
    return linked is None and _touch(first, second)


def joinable(node: BaseNode) -> bool:
    """Tell whether a node is plain text, which is all that can be joined."""
    return isinstance(node, TextNode) and not isinstance(node, IndexNode | ImageNode)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    apart = (PROVENANCE_KEY, CHUNK_INDEX)
    sources = [mark.get("source") for mark in (one.get(PROVENANCE_KEY) or {}, other.get(PROVENANCE_KEY) or {})]
    return sources[0] == sources[1] and _without(one, apart) == _without(other, apart)


def _without(metadata: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in keys}


def _linked(first: BaseNode, second: BaseNode) -> bool | None:
    """Tell by the nodes' links; None where neither has one on that side."""
    following, previous = first.next_node, second.prev_node
    if following is None and previous is None:
        return None
    named = following is not None and following.node_id == second.node_id
    return named or (previous is not None and previous.node_id == first.node_id)


def _span(node: BaseNode) -> tuple[int, int] | None:
    if not isinstance(node, TextNode) or node.start_char_idx is None or node.end_char_idx is None:
        return None
    return node.start_char_idx, node.end_char_idx


def _touch(first: BaseNode, second: BaseNode) -> bool:
    one, two = _span(first), _span(second)
    if one is None or two is None:
        return False
    return one[0] < two[0] <= one[1] + WIDEST_GAP and one[1] < two[1]


# -- joining -------------------------------------------------------------------------------------------------------


def join(parts: Sequence[tuple[int, NodeWithScore]]) -> NodeWithScore:
    """Make one node of neighbours.

    It has the id, the metadata and the source of the best part, the best score of all, the text of all with what
    overlaps once, and tells its parts in its provenance. It has no embedding: none was made of that text.

    Args:
        parts: (place, node) pairs in the document's order; the lowest place is the best part.
    """
    best = min(parts, key=lambda part: part[0])[1]
    if len(parts) == 1:
        return best
    nodes = [node for _, node in parts]
    text, spans = _joined_text([node.node for node in nodes])
    scores = [node.score for node in nodes if node.score is not None]
    start, end = _whole_span([node.node for node in nodes])
    copy = best.node.model_copy(
        update={
            "text": text,
            "embedding": None,
            "metadata": {**best.node.metadata, PROVENANCE_KEY: _joined_provenance(best, nodes, spans)},
            "relationships": _joined_links(best.node, nodes[0].node, nodes[-1].node),
            "start_char_idx": start,
            "end_char_idx": end,
        }
    )
    return NodeWithScore(node=copy, score=max(scores, default=None))


def _joined_text(nodes: Sequence[BaseNode]) -> tuple[str, list[tuple[int, int]]]:
    """Give the text of neighbours, and where in it each one's own text stands."""
    text = _text(nodes[0])
    spans = [(0, len(text))]
    for before, node in pairwise(nodes):
        own = _text(node)
        shared = _overlap(before, node)
        if not shared:
            text += _between(before, node)
        start = len(text) - shared
        text += own[shared:]
        spans.append((start, len(text)))
    return text, spans


def _overlap(first: BaseNode, second: BaseNode) -> int:
    """Count the characters at the end of one text that are the start of the next."""
    one, two, gap = _text(first), _text(second), _gap(first, second)
    if gap is not None and gap >= 0:
        return 0
    if gap is not None and -gap < len(two) and one.endswith(two[:-gap]):
        return -gap
    longest = min(len(one), len(two) - 1)
    return next((size for size in range(longest, LEAST_OVERLAP - 1, -1) if one.endswith(two[:size])), 0)


def _between(first: BaseNode, second: BaseNode) -> str:
    """Give what stands between two texts that don't overlap: nothing, a space or a line break."""
    gap = _gap(first, second)
    return "\n" if gap is None else {0: "", 1: " "}.get(gap, "\n")


def _gap(first: BaseNode, second: BaseNode) -> int | None:
    """Count the characters between two chunks by their positions, below 0 where they overlap; None where not known."""
    one, two = _span(first), _span(second)
    return None if one is None or two is None else two[0] - one[1]


def _joined_provenance(
    best: NodeWithScore, nodes: Sequence[NodeWithScore], spans: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    marks = [provenance(node) or {} for node in nodes]
    made = dict(provenance(best) or {})
    made["searches"] = [search for mark in marks for search in mark.get("searches", [])]
    for key, pick in (("reranker_score", max), ("source_score", max)):
        values = [mark[key] for mark in marks if mark.get(key) is not None]
        if values:
            made[key] = pick(values)
    served = list(dict.fromkeys(name for mark in marks for name in mark.get("best_for", [])))
    if served:
        made["best_for"] = served
    made["parts"] = [
        {"node_id": node.node.node_id, "start": start, "end": end, "score": node.score}
        for node, (start, end) in zip(nodes, spans, strict=True)
    ]
    return made


def _joined_links(best: BaseNode, first: BaseNode, last: BaseNode) -> dict[NodeRelationship, Any]:
    links: dict[Any, Any] = {
        key: value
        for key, value in best.relationships.items()
        if key not in (NodeRelationship.PREVIOUS, NodeRelationship.NEXT)
    }
    for key, node in ((NodeRelationship.PREVIOUS, first), (NodeRelationship.NEXT, last)):
        if key in node.relationships:
            links[key] = node.relationships[key]
    return links


def _whole_span(nodes: Sequence[BaseNode]) -> tuple[int | None, int | None]:
    """Give the characters from the first part's start to the last one's end, where positions go on part by part."""
    spans = [_span(node) for node in nodes]
    known = [span for span in spans if span is not None]
    if len(known) < len(nodes) or any(one[0] >= two[0] for one, two in pairwise(known)):
        return None, None
    return known[0][0], known[-1][1]


def _text(node: BaseNode) -> str:
    return node.text if isinstance(node, TextNode) else ""
