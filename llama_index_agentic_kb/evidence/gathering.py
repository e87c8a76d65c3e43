"""From the lanes of a fan-out to one ranked list of evidence.

    collect ─▶ a list for each sub-query ─▶ rerank ─▶ fuse, each sub-query's best covered ─▶ postprocess ─▶ arrange

Every candidate is counted, whatever becomes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.evidence.arrangement import Arranged, arrange
from llama_index_agentic_kb.evidence.candidates import (
    Candidate,
    CandidateList,
    Fusion,
    collect,
    lists_by_lane,
    lists_by_sub_query,
)
from llama_index_agentic_kb.evidence.options import EvidenceOptions
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, provenance, references
from llama_index_agentic_kb.evidence.reranking import Reranking, rerank
from llama_index_agentic_kb.schema import MissingPart, ResultsProcessing, SourceActivity
from llama_index_agentic_kb.search.fusion import Fused, interleave, with_coverage
from llama_index_agentic_kb.sources.base import NodeKey, node_key
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.selection import SelectedSource

T = TypeVar("T")

MANY: Final = 200
"""Candidates that are fused on the event loop: about 5 ms."""

__all__ = [
    "PROVENANCE_KEY",
    "Counts",
    "EvidenceOptions",
    "Fusion",
    "Gathered",
    "gather_evidence",
    "provenance",
    "references",
]


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every candidate.

    What went in came out: ``candidates + added_by_postprocessors == merged + joined + kept + dropped_by_threshold +
    dropped_by_postprocessors + dropped_by_cap + dropped_by_budget``.

    Args:
        candidates: What the searches found, a node once for each list that holds it.
        merged: Candidates that were found more than once, counted once less than found.
        joined: Candidates that became part of a neighbour's reference.
        kept: References.
        dropped_by_threshold: Below the reranker's threshold.
        dropped_by_postprocessors: Dropped by postprocessors, or left out by the reranker.
        dropped_by_cap: Beyond their source's ``maxOutputDocuments``.
        dropped_by_budget: Beyond what was wanted, or what is ranked.
        added_by_postprocessors: Nodes that postprocessors brought.
        reranked: (sub-query, candidate) pairs that the reranker read.
    """

    candidates: int = 0
    merged: int = 0
    joined: int = 0
    kept: int = 0
    dropped_by_threshold: int = 0
    dropped_by_postprocessors: int = 0
    dropped_by_cap: int = 0
    dropped_by_budget: int = 0
    added_by_postprocessors: int = 0
    reranked: int = 0

    def as_fields(self) -> dict[str, Any]:
        """Give them as fields of an activity record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The evidence and its account.

    Args:
        nodes: Best first.
        counts: What became of every candidate.
        warning: What went wrong without ending the request: a reranker that failed.
        searches: The records of searches that a threshold cut, each with the fields that it changes.
        missing: Why evidence was withheld; None where none was.
    """

    nodes: list[NodeWithScore]
    counts: Counts = field(default_factory=Counts)
    warning: str | None = None
    searches: list[tuple[SourceActivity, dict[str, int]]] = field(default_factory=list)
    missing: MissingPart | None = None


async def gather_evidence(
    lanes: Sequence[SourceSearch],
    selected: Mapping[str, SelectedSource],
    options: EvidenceOptions,
    *,
    bundle: QueryBundle,
    ranked: int,
    wanted: int,
    deadline: float | None,
    rerank_deadline: float | None = None,
) -> Gathered:
    """Fuse, rerank, postprocess, join neighbours and cut.

    Where a source's results are not to be processed (``resultsProcessing: none``), nothing is merged: the searches
    take turns in the plan's order, those of other sources in the reranker's order, and neither are neighbours joined
    nor documents capped.

    Args:
        lanes: In the plan's order.
        selected: The sources; their parameters may set thresholds, cap their nodes, or leave them unprocessed.
        options: How it is done.
        bundle: The question, for the postprocessors.
        ranked: How many candidates of each sub-query the reranker reads, and how many fused nodes the postprocessors.
        wanted: How many nodes are kept.
        deadline: ``time.monotonic()`` at which a postprocessor is given up, and what it was given withheld: it may be
            what keeps a document from the answer.
        rerank_deadline: ``time.monotonic()`` at which the reranker is given up; None is ``deadline``.
    """
    found = sum(len(one.nodes) for lane in lanes for one in lane.lists)
    untouched = {lane.source.name for lane in lanes if _processing(lane, selected, options) is ResultsProcessing.NONE}
    candidates, lists = await _at_leisure(lambda: (collect(lanes), _lists(lanes, options, untouched)), found)
    reranking = await rerank(
        lists,
        candidates,
        options.reranker,
        partial(_threshold, options, selected),
        most=ranked,
        deadline=deadline if rerank_deadline is None else rerank_deadline,
    )
    order = await _at_leisure(
        lambda: _order(reranking, candidates, options, wanted, in_turns=bool(untouched)), len(candidates)
    )
    seen = [candidates[fused.key].evidence() for fused in order[:ranked]]
    left = await postprocess(seen, options.postprocessors, bundle, deadline, selected)
    capped = cap_per_source(left.nodes, selected)
    arranged = _arrange(capped, wanted, options, as_they_are=bool(untouched))
    below, left_out = len(reranking.below), len(reranking.left_out)
    counts = Counts(
        candidates=found,
        merged=found - len(candidates),
        joined=arranged.used - len(arranged.nodes),
        kept=len(arranged.nodes),
        dropped_by_threshold=below,
        dropped_by_postprocessors=left.dropped + left_out,
        dropped_by_cap=len(left.nodes) - len(capped),
        dropped_by_budget=len(candidates) - below - left_out - len(seen) + len(capped) - arranged.used,
        added_by_postprocessors=left.added,
        reranked=reranking.read,
    )
    searches = _cut_searches(lanes, reranking, options)
    return Gathered(arranged.nodes, counts, reranking.warning, searches, left.missing)


def _processing(
    lane: SourceSearch, selected: Mapping[str, SelectedSource], options: EvidenceOptions
) -> ResultsProcessing:
    """Tell what becomes of a search's results: its source's word goes before the request's, and that before ours."""
    chosen = selected.get(lane.source.name)
    asked = None if chosen is None else chosen.params.results_processing
    return asked or options.results_processing


async def _at_leisure(work: Callable[[], T], over: int) -> T:
    """Do work over so many candidates; over very many of them off the event loop, which it would hold up."""
    if over <= MANY:
        return work()
    return cast("T", (await Call(sync=work, what="fusing evidence")))


def _threshold(options: EvidenceOptions, selected: Mapping[str, SelectedSource], source: str) -> float | None:
    """Give a source's threshold: the request's, else the reranker's own; none where the reranker is not calibrated."""
    if not options.calibrated or options.reranker is None:
        return None
    asked = selected[source].params.reranker_threshold if source in selected else None
    return options.reranker.threshold if asked is None else asked


def _lists(lanes: Sequence[SourceSearch], options: EvidenceOptions, untouched: Collection[str]) -> list[CandidateList]:
    if not untouched:
        return lists_by_sub_query(lanes, options.fusion, options.lane_fusion, options.lane_weights)
    return lists_by_lane(lanes, options.lane_fusion, options.lane_weights, lambda name: name not in untouched)


def _order(
    reranking: Reranking,
    candidates: Mapping[NodeKey, Candidate],
    options: EvidenceOptions,
    wanted: int,
    *,
    in_turns: bool,
) -> list[Fused[NodeKey]]:
    """Fuse the lists, by the reranker's scores where all have some, and tell each list's best candidate that it is."""
    lists = [one.ranked for one in reranking.lists]
    for one in reranking.lists:
        if one.ranked.keys and one.sub_query.id not in (served := candidates[one.ranked.keys[0]].best_for):
            served.append(one.sub_query.id)
    if in_turns:
        return interleave(lists)
    fused = options.fusion(lists)
    if all(one.judged and one.ranked.scores is not None for one in reranking.lists if one.ranked.keys):
        fused = [replace(item, score=candidates[item.key].reranker_score or 0.0) for item in fused]
        fused.sort(key=lambda item: -item.score)
    return with_coverage(fused, lists, depth=options.coverage_depth, places=wanted)


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


def _arrange(nodes: Sequence[NodeWithScore], wanted: int, options: EvidenceOptions, *, as_they_are: bool) -> Arranged:
    return arrange(
        nodes,
        wanted,
        joining=options.join_neighbours and not as_they_are,
        max_per_document=None if as_they_are else options.pieces_per_document(wanted),
        most_characters=options.neighbour_characters,
    )


def _cut_searches(
    lanes: Sequence[SourceSearch], reranking: Reranking, options: EvidenceOptions
) -> list[tuple[SourceActivity, dict[str, int]]]:
    """Give the records of the searches whose results a reranker judged, with what the threshold left of them."""
    if not options.calibrated:
        return []
    judged = {lane.record.id for one in reranking.lists if one.judged for lane in one.lanes}
    changed = []
    for lane in lanes:
        if lane.record.id in judged:
            keys = [node_key(node.node) for node in lane.nodes]
            dropped = sum(key in reranking.below for key in keys)
            changed.append((lane.record, {"dropped_by_threshold": dropped, "count": len(keys) - dropped}))
    return changed
