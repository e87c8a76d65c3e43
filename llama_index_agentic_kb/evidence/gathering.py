"""From the searches of a plan to one ranked list of evidence.

    collect ─▶ a list for each sub-query ─▶ rerank ─▶ fuse, each sub-query's best covered ─▶ postprocess ─▶ arrange

Every candidate is counted, whatever becomes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import ConfigurationError, by_value
from llama_index_agentic_kb.evidence.arrangement import Arrangement, arrange, pieces_per_document
from llama_index_agentic_kb.evidence.candidates import (
    Candidate,
    CandidateList,
    Fusion,
    collect,
    lists_by_search,
    lists_by_sub_query,
)
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.evidence.reranking import Reranking, rerank
from llama_index_agentic_kb.schema import MissingPart, ResultsProcessing, SourceActivity
from llama_index_agentic_kb.search.fusion import Fused, interleave, with_coverage
from llama_index_agentic_kb.search.rerank import Reranker
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key
from llama_index_agentic_kb.sources.selection import SelectedSource

__all__ = ["EvidenceCounts", "EvidenceOptions", "GatheredEvidence", "as_processing", "gather_evidence"]

T = TypeVar("T")

MANY: Final = 200
"""Candidates that are fused on the event loop: about 5 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions:
    """How ranked lists become one list of evidence.

    Args:
        fusion: How the sub-queries' lists are fused. Default ``interleave``.
        postprocessors: Applied in order to the fused nodes.
        reranker: Reranks the candidates of each sub-query.
        join_neighbours: Whether adjacent chunks of one document become one reference.
        max_per_document: References of one document before others get a place: a number, None for no limit, or
            "auto" (default), a third of all and at least 3. What is beyond is moved behind, not dropped.
        results_processing: "rerank" (default), or "none": no reranker, no merging, the searches take turns.

    Raises:
        ConfigurationError: An option is unusable.
    """

    fusion: Fusion = interleave
    postprocessors: Sequence[BaseNodePostprocessor] = ()
    reranker: Reranker | None = None
    join_neighbours: bool = True
    max_per_document: int | Literal["auto"] | None = "auto"
    results_processing: ResultsProcessing = ResultsProcessing.RERANK

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for what can't be used."""
        if self.reranker is not None and not isinstance(self.reranker, Reranker):
            raise ConfigurationError(f"reranker: expected a Reranker, got {type(self.reranker).__name__}")
        limit = self.max_per_document
        if limit not in (None, "auto") and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigurationError(f"max_per_document must be at least 1, 'auto' or None, got {limit!r}")

    @property
    def calibrated(self) -> bool:
        """Whether there is a reranker whose scores are on the scale of 0 to 4."""
        return self.reranker is not None and self.reranker.calibrated


def as_processing(value: ResultsProcessing | str) -> ResultsProcessing:
    """Return the results processing of that name.

    Raises:
        ConfigurationError: The name is unknown.
    """
    return by_value(ResultsProcessing, value, "results_processing")


@dataclass(frozen=True, slots=True)
class EvidenceCounts:
    """What became of every candidate.

    ``candidates + added_by_postprocessors == merged + joined + kept + dropped_by_threshold +
    dropped_by_postprocessors + dropped_by_cap + dropped_by_budget``.

    Args:
        candidates: What the searches found, a node once for each list that holds it.
        merged: Candidates that were found more than once, counted once less than found.
        joined: Candidates that became part of a neighbour's reference.
        kept: References.
        dropped_by_threshold: Below the reranker's threshold.
        dropped_by_postprocessors: Dropped by postprocessors, or left out by the reranker.
        dropped_by_cap: Beyond their source's ``maxOutputDocuments``.
        dropped_by_budget: Beyond what was asked for, or what is ranked.
        added_by_postprocessors: Nodes that postprocessors added.
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
        """Return them as fields of an activity record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """The evidence and its account.

    Args:
        nodes: Best first.
        counts: What became of every candidate.
        warning: What went wrong without ending the request: a reranker that failed.
        cut_searches: The records of searches that a threshold cut, each with the fields that it changes.
        missing: Why evidence was withheld; None where none was.
    """

    nodes: list[NodeWithScore]
    counts: EvidenceCounts = field(default_factory=EvidenceCounts)
    warning: str | None = None
    cut_searches: list[tuple[SourceActivity, dict[str, int]]] = field(default_factory=list)
    missing: MissingPart | None = None


async def gather_evidence(
    searches: Sequence[SourceSearch],
    selected: Mapping[str, SelectedSource],
    options: EvidenceOptions,
    *,
    bundle: QueryBundle,
    ranked: int,
    limit: int,
    deadline: float | None,
    rerank_deadline: float | None = None,
) -> GatheredEvidence:
    """Fuse, rerank, postprocess, join neighbours and cut.

    Where a source's results are not to be processed (``resultsProcessing: none``), nothing is merged: the searches
    take turns in the plan's order, those of other sources in the reranker's order, and neither are neighbours joined
    nor documents capped.

    Args:
        searches: In the plan's order.
        selected: The sources; their parameters may set thresholds, cap their nodes, or leave them unprocessed.
        options: How it is done.
        bundle: The question, for the postprocessors.
        ranked: How many candidates of each sub-query the reranker reads, and how many fused nodes the postprocessors.
        limit: How many nodes are kept.
        deadline: ``time.monotonic()`` at which a postprocessor is given up, and its nodes are withheld: it may be what
            keeps a document from the answer.
        rerank_deadline: ``time.monotonic()`` at which the reranker is given up; None is ``deadline``.
    """
    found = sum(len(one.nodes) for search in searches for one in search.lists)
    untouched = {
        search.source.name for search in searches if _processing(search, selected, options) is ResultsProcessing.NONE
    }
    candidates, lists = await _off_loop(lambda: (collect(searches), _lists(searches, options, untouched)), found)
    reranking = await rerank(
        lists,
        candidates,
        options.reranker,
        partial(_threshold, options, selected),
        limit=ranked,
        deadline=deadline if rerank_deadline is None else rerank_deadline,
    )
    order = await _off_loop(
        lambda: _order(reranking, candidates, options, limit, in_turns=bool(untouched)), len(candidates)
    )
    seen = [candidates[item.key].evidence() for item in order[:ranked]]
    left = await postprocess(seen, options.postprocessors, bundle, deadline, selected)
    capped = _cap_per_source(left.nodes, selected)
    arranged = _arrange(capped, limit, options, as_they_are=bool(untouched))
    below, left_out = len(reranking.below), len(reranking.left_out)
    counts = EvidenceCounts(
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
    cut = _cut_searches(searches, reranking) if options.calibrated else []
    return GatheredEvidence(arranged.nodes, counts, reranking.warning, cut, left.missing)


def _processing(
    search: SourceSearch, selected: Mapping[str, SelectedSource], options: EvidenceOptions
) -> ResultsProcessing:
    """Return what becomes of a search's results: its source's parameter goes before the request's."""
    chosen = selected.get(search.source.name)
    asked = None if chosen is None else chosen.params.results_processing
    return asked or options.results_processing


async def _off_loop(work: Callable[[], T], over: int) -> T:
    """Do work over so many candidates; over very many of them on a thread, since it would hold the event loop up."""
    return work() if over <= MANY else await Call(sync=work, what="fusing evidence")


def _threshold(options: EvidenceOptions, selected: Mapping[str, SelectedSource], source: str) -> float | None:
    """Return a source's threshold: the request's, else the reranker's own; None where that is not calibrated."""
    if not options.calibrated or options.reranker is None:
        return None
    asked = selected[source].params.reranker_threshold if source in selected else None
    return options.reranker.threshold if asked is None else asked


def _lists(
    searches: Sequence[SourceSearch], options: EvidenceOptions, untouched: Collection[str]
) -> list[CandidateList]:
    if not untouched:
        return lists_by_sub_query(searches, options.fusion)
    return lists_by_search(searches, lambda name: name not in untouched)


def _order(
    reranking: Reranking,
    candidates: Mapping[NodeKey, Candidate],
    options: EvidenceOptions,
    limit: int,
    *,
    in_turns: bool,
) -> list[Fused[NodeKey]]:
    """Fuse the lists, by the reranker's scores where all have some, and mark each list's best candidate."""
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
    return with_coverage(fused, lists, places=limit)


def _cap_per_source(nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]) -> list[NodeWithScore]:
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


def _arrange(nodes: Sequence[NodeWithScore], limit: int, options: EvidenceOptions, *, as_they_are: bool) -> Arrangement:
    if as_they_are:
        return arrange(nodes, limit, joining=False)
    most = options.max_per_document
    return arrange(
        nodes,
        limit,
        joining=options.join_neighbours,
        max_per_document=pieces_per_document(limit) if most == "auto" else most,
    )


def _cut_searches(
    searches: Sequence[SourceSearch], reranking: Reranking
) -> list[tuple[SourceActivity, dict[str, int]]]:
    """Return the records of the searches whose results were reranked, with what the threshold left of them."""
    judged = {search.record.id for one in reranking.lists if one.judged for search in one.searches}
    changed = []
    for search in searches:
        if search.record.id in judged:
            keys = [node_key(node.node) for node in search.nodes]
            dropped = sum(key in reranking.below for key in keys)
            changed.append((search.record, {"dropped_by_threshold": dropped, "count": len(keys) - dropped}))
    return changed
