"""From the lanes of a fan-out to one ranked list of nodes, and from nodes to references.

Nodes that sources gave are never changed: evidence is made of copies, whose metadata tells under ``PROVENANCE_KEY``
which searches found them. That key is shown to neither language model nor embedding model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._flow import Call, Flow
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.search.fusion import Fused, Ranked, merge_by_score
from llama_index_agentic_kb.sources.base import KnowledgeSource, NodeKey, NodeList, node_key
from llama_index_agentic_kb.sources.fan_out import Lane
from llama_index_agentic_kb.sources.selection import SelectedSource

__all__ = [
    "PROVENANCE_KEY",
    "Counts",
    "Fusion",
    "cap_per_source",
    "fuse_lanes",
    "gather_evidence",
    "provenance",
    "references",
]

PROVENANCE_KEY: Final = "agentic_kb"
"""Metadata key of a node's provenance: ``{"source": ..., "activity": ..., "searches": [...]}``."""

_WeightedList: TypeAlias = tuple[NodeList, float]

Fusion: TypeAlias = Callable[[Sequence[Ranked[NodeKey]]], list[Fused[NodeKey]]]
"""Fuses ranked lists: ``interleave``, ``reciprocal_rank_fusion``, or your own."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every candidate. A postprocessor may also add nodes; these are counted as kept only."""

    candidates: int
    merged: int
    kept: int
    dropped_by_postprocessors: int
    dropped_by_budget: int

    def as_fields(self) -> dict[str, Any]:
        """Give them as fields of an activity record."""
        return asdict(self)


@dataclass(slots=True)
class _Found:
    """Everything that is known of one node."""

    node: NodeWithScore
    lane: Lane
    searches: list[dict[str, Any]]


def gather_evidence(
    lanes: Sequence[Lane],
    selected: Mapping[str, SelectedSource],
    *,
    fusion: Fusion,
    postprocessors: Sequence[BaseNodePostprocessor],
    bundle: QueryBundle,
    ranked: int,
    wanted: int,
    deadline: float | None,
) -> Flow[tuple[list[NodeWithScore], Counts]]:
    """Fuse, postprocess and cut.

    Args:
        lanes: In the plan's order.
        selected: The sources; their parameters may cap their nodes.
        fusion: How ranked lists are fused.
        postprocessors: Applied in order to the fused nodes.
        bundle: The question, for the postprocessors.
        ranked: How many fused nodes the postprocessors see.
        wanted: How many nodes are kept.
        deadline: ``time.monotonic()`` at which a postprocessor is given up.

    Returns:
        The evidence, best first, and the counts.
    """
    fused = fuse_lanes(lanes, fusion)
    seen = nodes = fused[:ranked]
    for postprocessor in postprocessors:
        nodes = yield Call(
            sync=partial(postprocessor.postprocess_nodes, nodes, query_bundle=bundle),
            deadline=deadline,
            what=f"node postprocessor {type(postprocessor).__name__}",
        )
    kept = cap_per_source(nodes, selected)[:wanted]
    found = sum(len(ranked.nodes) for lane in lanes for ranked in lane.lists)
    return kept, Counts(
        candidates=found,
        merged=found - len(fused),
        kept=len(kept),
        dropped_by_postprocessors=max(0, len(seen) - len(nodes)),
        dropped_by_budget=len(fused) - len(seen) + len(nodes) - len(kept),
    )


def fuse_lanes(lanes: Sequence[Lane], fusion: Fusion) -> list[NodeWithScore]:
    """Fuse what the lanes found into one list, each node once, best first.

    Within a sub-query, lanes whose scores are on one scale (one embedding model) are merged by score times their
    source's weight; what is left is fused by rank. Then the sub-queries' lists are fused, the question's own first.

    Args:
        lanes: In the plan's order.
        fusion: How ranked lists are fused.

    Returns:
        Copies; ``score`` is the best that a source gave the node, not changed by fusion.
    """
    found = _collect(lanes)
    by_sub_query: dict[str, list[Lane]] = {}
    for lane in lanes:
        by_sub_query.setdefault(lane.sub_query.id, []).append(lane)
    lists = [Ranked(_fuse_sub_query(group, fusion)) for group in by_sub_query.values()]
    return [_evidence(found[fused.key]) for fused in fusion(lists)]


def _fuse_sub_query(lanes: Sequence[Lane], fusion: Fusion) -> list[NodeKey]:
    scales: dict[Any, list[_WeightedList]] = {}
    for lane in lanes:
        for ranked in lane.lists:
            comparable = ranked.scale is not None and all(node.score is not None for node in ranked.nodes)
            key = ranked.scale if comparable else (lane.record.id, ranked.kind)
            scales.setdefault(key, []).append((ranked, lane.source.weight * ranked.weight))
    lists = [_one_scale(group) for group in scales.values()]
    return list(lists[0].keys) if len(lists) == 1 else [fused.key for fused in fusion(lists)]


def _one_scale(group: Sequence[_WeightedList]) -> Ranked[NodeKey]:
    weight = max((weight for ranked, weight in group if ranked.nodes), default=1.0)
    if len(group) == 1:
        return Ranked([node_key(node.node) for node in group[0][0].nodes], weight)
    scored = [[(node_key(node.node), node.score or 0.0) for node in ranked.nodes] for ranked, _ in group]
    return Ranked(merge_by_score(scored, [weight for _, weight in group]), weight)


def _collect(lanes: Sequence[Lane]) -> dict[NodeKey, _Found]:
    found: dict[NodeKey, _Found] = {}
    for lane in lanes:
        for ranked, rank, node in ((one, *at) for one in lane.lists for at in enumerate(one.nodes)):
            search = {
                "activity": lane.record.id,
                "source": lane.source.name,
                "sub_query": lane.sub_query.id,
                "query": lane.sub_query.query,
                "list": ranked.kind,
                "rank": rank,
                "score": node.score,
            }
            known = found.setdefault(node_key(node.node), _Found(node, lane, []))
            known.searches.append(search)
            if node.score is not None and (known.node.score is None or node.score > known.node.score):
                known.node = node
    return found


def _evidence(found: _Found) -> NodeWithScore:
    node = found.node.node
    mark = {"source": found.lane.source.name, "activity": found.lane.record.id, "searches": found.searches}
    copy = node.model_copy(
        update={
            "metadata": {**node.metadata, PROVENANCE_KEY: mark},
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, PROVENANCE_KEY],
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, PROVENANCE_KEY],
        }
    )
    return NodeWithScore(node=copy, score=found.node.score)


def provenance(node: NodeWithScore) -> dict[str, Any] | None:
    """Give the provenance of a piece of evidence; None for a node that was not found by a fan-out."""
    mark = node.node.metadata.get(PROVENANCE_KEY)
    return mark if isinstance(mark, dict) else None


def cap_per_source(nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]) -> list[NodeWithScore]:
    """Keep at most ``maxOutputDocuments`` nodes of each source that has such a parameter."""
    seen: Counter[str] = Counter()
    kept = []
    for node in nodes:
        name = (provenance(node) or {}).get("source", "")
        cap = selected[name].params.max_output_documents if name in selected else None
        seen[name] += 1
        if cap is None or seen[name] <= cap:
            kept.append(node)
    return kept


def references(nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]) -> list[Reference]:
    """Give the references of the evidence: the N-th node is reference N.

    A source whose parameters say ``includeReferences: false`` has none; numbers stay as they are in the text.
    """
    made = []
    for position, node in enumerate(nodes):
        mark = provenance(node)
        chosen = selected.get(mark["source"]) if mark else None
        if mark is None or chosen is None or not chosen.params.include_references:
            continue
        made.append(_reference(position, node, mark, chosen.source, chosen.params.include_reference_source_data))
    return made


def _reference(
    position: int, node: NodeWithScore, mark: dict[str, Any], source: KnowledgeSource, with_data: bool | None
) -> Reference:
    data = source.source_data(node)
    data.metadata.pop(PROVENANCE_KEY, None)
    return Reference(
        type=source.kind,
        id=str(position),
        activity_source=mark["activity"],
        knowledge_source_name=source.name,
        doc_key=data.doc_key,
        title=data.title,
        url=data.url,
        citation_url=data.url,
        node_id=node.node.node_id,
        score=node.score,
        source_data=data if with_data is not False else None,
    )
