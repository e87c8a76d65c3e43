"""From the searches of a plan to one ranked list of evidence.

    collect ─▶ a list for each sub-query ─▶ rerank ─▶ fuse, each sub-query's best covered ─▶ postprocess ─▶ arrange

Every candidate is counted, whatever becomes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, gather, outside_loop
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb.errors import ConfigurationError, by_value
from llama_index_agentic_kb.evidence.arrangement import arrange, pieces_per_document
from llama_index_agentic_kb.evidence.candidates import (
    Candidate,
    CandidateList,
    Fusion,
    Proof,
    collect,
    lists_by_search,
    lists_by_sub_query,
)
from llama_index_agentic_kb.evidence.postprocessing import postprocess
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.schema import MissingPart, ResultsProcessing, SourceActivity, SubQueryOrigin
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, with_coverage
from llama_index_agentic_kb.search.rerank import Reranked, Reranker
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key
from llama_index_agentic_kb.sources.selection import SelectedSource

T = TypeVar("T")

REVISION_BEST: Final = 2
"""Documents of each query of a revision that come before those of the plan: it was asked for what was missing."""

DUPLICATES_DEPTH: Final = 100
"""Fused documents among which near-duplicates are looked for."""

NEW_SHARE: Final = 0.1
"""Share of a passage's words that must be new beside an earlier one of its title."""

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
    """

    candidates: int = 0
    """What the searches found, a node once for each list that holds it."""
    merged: int = 0
    """Candidates that were found more than once, counted once less than found."""
    joined: int = 0
    """Candidates that became part of a neighbour's reference."""
    kept: int = 0
    """References."""
    dropped_by_threshold: int = 0
    dropped_by_postprocessors: int = 0
    """Dropped by postprocessors, or left out by the reranker."""
    dropped_by_cap: int = 0
    """Beyond their source's ``maxOutputDocuments``."""
    dropped_by_budget: int = 0
    """Beyond what was asked for, or what is ranked."""
    added_by_postprocessors: int = 0
    reranked: int = 0
    """(sub-query, candidate) pairs that the reranker read."""

    def as_fields(self) -> dict[str, Any]:
        """Return them as fields of an activity record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """The evidence, best first, and its account."""

    nodes: list[NodeWithScore]
    counts: EvidenceCounts = field(default_factory=EvidenceCounts)
    warning: str | None = None
    """What went wrong without ending the request: a reranker that failed."""
    cut_searches: list[tuple[SourceActivity, dict[str, int]]] = field(default_factory=list)
    """The records of searches that a threshold cut, each with the fields that it changes."""
    missing: MissingPart | None = None
    """Why evidence was withheld; None where none was."""


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
    proof: Sequence[Proof] = (),
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
        proof: Passages that come before all others, in the order of the chain that they prove.
    """
    params = {name: chosen.params for name, chosen in selected.items()}
    found, untouched = 0, set[str]()
    for search in searches:
        name = search.source.name
        found += sum(len(one.nodes) for one in search.lists)
        asked = params[name].results_processing if name in params else None
        if (asked or options.results_processing) is ResultsProcessing.NONE:
            untouched.add(name)
    reranker = options.reranker

    def lists() -> tuple[dict[NodeKey, Candidate], Reranking]:
        if untouched:
            return collect(searches), Reranking(lists_by_search(searches, lambda name: name not in untouched))
        return collect(searches), Reranking(lists_by_sub_query(searches, options.fusion))

    def threshold(source: str) -> float | None:
        if reranker is None or not options.calibrated:
            return None
        asked = params[source].reranker_threshold if source in params else None
        return reranker.threshold if asked is None else asked

    candidates, reranking = await _off_loop(lists, found)
    if reranker is not None:
        ends = deadline if rerank_deadline is None else rerank_deadline
        reranking = await rerank(reranking.lists, candidates, reranker, threshold, limit=ranked, deadline=ends)
    order = await _off_loop(
        lambda: _order(reranking, candidates, options, limit, None if untouched else proof), len(candidates)
    )
    seen = [candidates[item.key].evidence() for item in order[:ranked]]
    left = await postprocess(seen, options.postprocessors, bundle, deadline, selected)
    capped = _cap_per_source(left.nodes, selected)
    most = pieces_per_document(limit) if options.max_per_document == "auto" else options.max_per_document
    arranged = arrange(
        capped,
        limit,
        joining=options.join_neighbours and not untouched,
        max_per_document=None if untouched else most,
    )
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


async def _off_loop(work: Callable[[], T], over: int) -> T:
    """Do work over so many candidates; over very many of them on a thread, since it would hold the event loop up."""
    return work() if over <= MANY else await Call(sync=work, what="fusing evidence")


def _order(
    reranking: Reranking,
    candidates: Mapping[NodeKey, Candidate],
    options: EvidenceOptions,
    limit: int,
    proof: Sequence[Proof] | None,
) -> list[Fused[NodeKey]]:
    """Fuse the lists, by the reranker's scores where all have some, and mark each list's best candidate.

    Where there is proof, it comes first, then the best of each revision, then the rest, near-duplicates last. None is
    for results that are left as they are, and take turns.
    """
    lists = [one.ranked for one in reranking.lists]
    for one in reranking.lists:
        if one.ranked.keys and one.sub_query.id not in (served := candidates[one.ranked.keys[0]].best_for):
            served.append(one.sub_query.id)
    if proof is None:
        return interleave(lists)
    with outside_loop():  # the user's may start a loop of its own
        fused = options.fusion(lists)
    if all(one.judged and one.ranked.scores is not None for one in reranking.lists if one.ranked.keys):
        fused = [replace(item, score=candidates[item.key].reranker_score or 0.0) for item in fused]
        fused.sort(key=lambda item: -item.score)
    if proof:
        first = _proving(fused, candidates, proof)
        for one in reranking.lists:
            if one.sub_query.origin is SubQueryOrigin.REVISION:
                first += one.ranked.keys[:REVISION_BEST]
        places = {key: place for place, key in reversed([*enumerate(first)])}
        fused.sort(key=lambda item: places.get(item.key, len(places)))
        again = _near_duplicates([item.key for item in fused[:DUPLICATES_DEPTH]], candidates)
        fused.sort(key=lambda item: item.key in again)
    return with_coverage(fused, lists, places=limit)


def _proving(
    fused: Sequence[Fused[NodeKey]], candidates: Mapping[NodeKey, Candidate], proof: Sequence[Proof]
) -> list[NodeKey]:
    """Return the candidates that prove something, in the chain's order, and mark what they prove."""
    by_id: dict[str, NodeKey] = {}
    for item in fused:
        by_id.setdefault(candidates[item.key].node.node.node_id, item.key)
    proving: list[NodeKey] = []
    for rank, one in enumerate(proof):
        key = by_id.get(one.node_id)
        if key is not None:
            finding = {} if one.finding is None else {"finding": one.finding}
            candidates[key].proof.append({"step": one.step, **finding, "rank": rank})
            proving.append(key)
    return proving


def _near_duplicates(keys: Sequence[NodeKey], candidates: Mapping[NodeKey, Candidate]) -> set[NodeKey]:
    """Return those that say nothing but what another of the same title, which stands before them, says."""
    seen: dict[str, list[set[str]]] = {}
    again = set()
    for key in keys:
        data = candidates[key].search.source.source_data(candidates[key].node)
        words, earlier = {*normalize(data.content).split()}, seen.setdefault(normalize(data.title), [])
        if not candidates[key].proof and any(len(words - other) <= NEW_SHARE * len(words) for other in earlier):
            again.add(key)
        else:
            earlier.append(words)
    return again


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


# -- reranking -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reranking:
    """What became of the lists."""

    lists: list[CandidateList]
    """Those that the reranker judged are in its order and without what it dropped; the others are unchanged."""
    below: set[NodeKey] = field(default_factory=set)
    """Candidates that are in no list any more because of a threshold."""
    left_out: set[NodeKey] = field(default_factory=set)
    """Candidates that are in no list any more because the reranker did not return them."""
    read: int = 0
    """How many (sub-query, candidate) pairs the reranker read."""
    warning: str | None = None


async def rerank(
    lists: Sequence[CandidateList],
    candidates: Mapping[NodeKey, Candidate],
    reranker: Reranker,
    threshold: Callable[[str], float | None],
    *,
    limit: int,
    deadline: float | None,
) -> Reranking:
    """Rerank the lists that are to be processed: one call a sub-query, over its candidates of all sources.

    A candidate that several sub-queries found keeps its best score. It is dropped where its score for every sub-query
    that found it is below its source's threshold. Where the reranker fails or is late, that sub-query's fused order
    stays, nothing of it is dropped, and there is a warning; nothing is raised.

    Args:
        lists: Of sub-queries, or of searches, which take turns.
        candidates: Get their scores.
        reranker: Asked.
        threshold: Returns a source's threshold by its name.
        limit: Candidates of each sub-query that are read; those beyond are dropped.
        deadline: ``time.monotonic()`` at which the reranker is given up.
    """
    groups: dict[str, list[CandidateList]] = {}
    for one in lists:
        if one.processed and one.ranked.keys:
            groups.setdefault(one.sub_query.id, []).append(one)
    read: dict[str, list[NodeKey]] = {}
    calls = []
    for name, group in groups.items():
        turns = [fused.key for fused in interleave([one.ranked for one in group])]  # of one list: its own order
        read[name] = turns[:limit]
        nodes = [NodeWithScore(node=candidates[key].node.node, score=candidates[key].score) for key in read[name]]
        calls.append(reranker.rank(group[0].sub_query.query, nodes, deadline=deadline))
    verdicts: dict[str, dict[NodeKey, Reranked]] = {}
    failed: dict[str, list[str]] = {}
    for name, job in zip(groups, await gather(calls, deadline=deadline), strict=True):
        try:
            verdicts[name] = {read[name][verdict.position]: verdict for verdict in job.result()}
        except Exception as error:  # noqa: BLE001 (a reranker only improves what is there; its failure is reported)
            failed.setdefault(one_line(error_message(error)), []).append(name)
    made = Reranking([], read=sum(map(len, read.values())))
    for one in lists:
        said = verdicts.get(one.sub_query.id) if one.processed else None
        made.lists.append(one if said is None else _judged(one, said, candidates, threshold))
        if said is not None:
            asked = {*read.get(one.sub_query.id, ())}
            made.below |= {key for key in one.ranked.keys if key in said}
            made.left_out |= {key for key in one.ranked.keys if key in asked and key not in said}
    alive = {key for one in made.lists for key in one.ranked.keys}
    made.below -= alive  # the others were beyond what is read
    made.left_out -= alive | made.below
    _score(made, candidates, verdicts)
    reasons = [
        f"reranking failed for {', '.join(names)}, whose fused order stays: {why}" for why, names in failed.items()
    ]
    made.warning = "; ".join(reasons) or None
    return made


def _judged(
    one: CandidateList,
    verdicts: Mapping[NodeKey, Reranked],
    candidates: Mapping[NodeKey, Candidate],
    threshold: Callable[[str], float | None],
) -> CandidateList:
    """Return a list in the reranker's order, without what is below its threshold."""
    own, kept, scores = set(one.ranked.keys), [], []
    for key, verdict in verdicts.items():
        least = threshold(candidates[key].search.source.name)
        if key not in own or (least is not None and verdict.score is not None and verdict.score < least):
            continue
        kept.append(key)
        if verdict.score is not None:
            scores.append(verdict.score)
    ranked = Ranked(kept, one.ranked.weight, scores if len(scores) == len(kept) else None)
    return replace(one, ranked=ranked, judged=True)


def _score(
    made: Reranking, candidates: Mapping[NodeKey, Candidate], verdicts: Mapping[str, Mapping[NodeKey, Reranked]]
) -> None:
    """Keep each candidate's best score, and mark those that the reranker failed over."""
    for said in verdicts.values():
        for key, verdict in said.items():
            known, score = candidates[key], verdict.raw if verdict.score is None else verdict.score
            if score is not None and (known.reranked is None or score > known.reranked):
                known.reranked, known.reranker_score = score, verdict.score
    if any(one.reranked is not None for one in candidates.values()):
        for key in {key for one in made.lists if one.processed for key in one.ranked.keys}:
            candidates[key].unjudged = candidates[key].reranked is None
