"""Turns the results of a plan's searches into one ranked list of evidence.

    collect ─▶ a list for each sub-query ─▶ rerank ─▶ fuse, each sub-query's best covered ─▶ postprocess ─▶ arrange

``EvidenceCounts`` counts every candidate, whether it is kept or dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Final, Literal, NamedTuple, TypeVar

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, Job, WorkerPool, gather, outside_loop
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.evidence.candidates import (
    PROVENANCE_KEY,
    Candidate,
    CandidateList,
    Fusion,
    Proof,
    arrange,
    collect,
    lists_by_search,
    lists_by_sub_query,
    provenance,
)
from llama_index_agentic_kb.llm import metered
from llama_index_agentic_kb.schema import (
    MissingPart,
    Outcome,
    ResultsProcessing,
    SourceActivity,
    SubQueryOrigin,
    matcher,
)
from llama_index_agentic_kb.search.follow_up import leans
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, with_coverage
from llama_index_agentic_kb.search.rerank import Reranked, Reranker
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, node_key

T = TypeVar("T")

REVISION_BEST: Final = 2
"""Top documents of each revision query that are ranked before the plan's, as they were missing evidence."""

DUPLICATES_DEPTH: Final = 100  # number of top fused documents that are checked for near-duplicates

NEW_SHARE: Final = 0.1
"""A passage is a near-duplicate if at most this share of its words is new compared to one with the same title."""

FOLLOWING_WEIGHT: Final = 0.5
LEANING_WEIGHT: Final = 0.2
"""The weight of a question's own results beside planned ones in a conversation; and if its words say little alone."""

MANY: Final = 200  # maximum number of candidates fused on the event loop (about 5 ms); more are fused on a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions:
    """Options for combining ranked lists into one list of evidence; ``RetrieverOptions`` explains them.

    Raises:
        ConfigurationError: ``max_per_document`` is invalid.
    """

    fusion: Fusion = interleave
    postprocessors: Sequence[BaseNodePostprocessor] = ()
    reranker: Reranker | None = None
    join_neighbours: bool = True
    max_per_document: int | Literal["auto"] | None = "auto"
    results_processing: ResultsProcessing = ResultsProcessing.RERANK
    calibrated: bool = field(init=False)
    """Whether a reranker is set whose scores are on the scale of 0 to 4."""

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for an invalid option."""
        object.__setattr__(self, "calibrated", self.reranker is not None and self.reranker.calibrated)
        limit = self.max_per_document
        if limit not in (None, "auto") and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigurationError(f"max_per_document must be at least 1, 'auto' or None, got {limit!r}")


class EvidenceCounts(NamedTuple):
    """The number of candidates that were merged, joined, kept or dropped.

    ``candidates + added_by_postprocessors == merged + joined + kept + dropped_by_threshold +
    dropped_by_postprocessors + dropped_by_cap + dropped_by_budget``. ``schema.AgenticReasoningActivity`` has the same
    fields.
    """

    candidates: int = 0  # found nodes, counted once per list that contains them
    merged: int = 0
    joined: int = 0
    kept: int = 0
    dropped_by_threshold: int = 0
    dropped_by_postprocessors: int = 0
    dropped_by_cap: int = 0
    dropped_by_budget: int = 0
    added_by_postprocessors: int = 0
    reranked: int = 0

    def cuts(self, *, limited: bool) -> list[str]:
        """Return what thresholds and limits of the request left out, in words; ``limited``: it limits the documents."""
        parts = [
            (self.dropped_by_threshold, "rerankerThreshold"),
            (self.dropped_by_cap, "their source's maxOutputDocuments"),
            (self.dropped_by_budget if limited else 0, "maxOutputDocuments"),
        ]
        return [f"{count} documents were left out by {limit}" for count, limit in parts if count]


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """The evidence, best first, with its counts and warnings."""

    nodes: list[NodeWithScore]
    counts: EvidenceCounts = field(default_factory=EvidenceCounts)
    warning: str | None = None  # message of a reranker failure that did not end the request; None if there was none
    cut_searches: list[tuple[SourceActivity, dict[str, int]]] = field(default_factory=list)
    """Activity records of reranked searches, each with the fields to update after thresholding."""
    missing: MissingPart | None = None  # the reason why evidence was withheld; None if none was


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
    outside: Collection[NodeKey] = (),
    follows: bool = False,
) -> GatheredEvidence:
    """Rerank, fuse and postprocess the results of a plan's searches, join neighbours and select the evidence.

    If any source has ``resultsProcessing: none``, lists are only interleaved. At most ``ranked`` candidates per
    sub-query go to the reranker (until ``rerank_deadline``), and as many fused nodes to the postprocessors. Passages
    of ``proof`` come first; candidates ``outside`` are left out. Of a question that ``follows`` a conversation, what
    was planned counts more than its own words.
    """
    found, untouched = 0, set[str]()
    for search in searches:
        found += sum(map(len, map(attrgetter("nodes"), search.lists)))
        chosen = selected.get(search.source.name)
        asked = None if chosen is None else chosen.params.results_processing
        if (asked or options.results_processing) is ResultsProcessing.NONE:
            untouched.add(search.source.name)

    def lists() -> tuple[dict[NodeKey, Candidate], Reranking]:
        made = lists_by_search(searches, untouched) if untouched else lists_by_sub_query(searches, options.fusion)
        made = _weighed(made, outside, follows=follows) if follows or outside else made
        return collect(searches), Reranking(made)

    candidates, reranking = await _off_loop(lists, found)
    if options.reranker is not None:
        ends = deadline if rerank_deadline is None else rerank_deadline
        reranking = await rerank(reranking.lists, candidates, options.reranker, selected, limit=ranked, deadline=ends)
    first = None if untouched else proof
    order = await _off_loop(partial(_order, reranking, candidates, options, limit, first), len(candidates))
    seen, left = list(map(candidates.__getitem__, order[:ranked])), PostprocessedNodes([])
    found_by = list(map(attrgetter("search.source.name"), seen))
    nodes: Iterable[NodeWithScore] = map(Candidate.evidence, seen)  # only those that are looked at are copied
    if options.postprocessors:
        left = await postprocess(list(nodes), options.postprocessors, bundle, deadline, selected)
        nodes, found_by = left.nodes, [(provenance(node) or {}).get("source", "") for node in left.nodes]
    allowed = _within_caps(found_by, selected)
    auto = max(3, math.ceil(limit / 3))  # a third of all, before other documents take precedence
    most = auto if options.max_per_document == "auto" else options.max_per_document
    joining, most = options.join_neighbours and not untouched, None if untouched else most
    arranging = partial(arrange, compress(nodes, allowed), limit, joining=joining, max_per_document=most)
    arranged = await _off_loop(arranging, len(allowed))
    below, left_out = len(reranking.below), len(reranking.left_out)
    counts = EvidenceCounts(
        candidates=found,
        merged=found - len(candidates),
        joined=arranged.used - len(arranged.nodes),
        kept=len(arranged.nodes),
        dropped_by_threshold=below,
        dropped_by_postprocessors=left.dropped + left_out,
        dropped_by_cap=len(allowed) - sum(allowed),
        dropped_by_budget=len(candidates) - below - left_out - len(seen) + sum(allowed) - arranged.used,
        added_by_postprocessors=left.added,
        reranked=reranking.read,
    )
    cut = _cut_searches(searches, reranking) if options.calibrated else []
    return GatheredEvidence(arranged.nodes, counts, reranking.warning, cut, left.missing)


def _within_caps(names: Sequence[str], selected: Mapping[str, SelectedSource]) -> list[bool]:
    """Return which of the documents of these sources are within their source's ``maxOutputDocuments``."""
    taken, allowed = Counter[str](), list[bool]()
    for name in names:
        cap = selected[name].params.max_output_documents if name in selected else None
        taken[name] += 1
        allowed.append(cap is None or taken[name] <= cap)
    return allowed


def _weighed(lists: Sequence[CandidateList], outside: Collection[NodeKey], *, follows: bool) -> list[CandidateList]:
    """Return the lists without some candidates; if some were planned in a conversation, its own words weigh less."""
    is_planned = follows and any(one.sub_query.origin is SubQueryOrigin.PLANNER for one in lists)
    made = []
    for one in lists:
        keys, weight, scores = one.ranked.keys, one.ranked.weight, one.ranked.scores
        if is_planned and one.sub_query.origin is SubQueryOrigin.QUESTION:
            weight *= LEANING_WEIGHT if leans(one.sub_query.query) else FOLLOWING_WEIGHT
        kept = [key not in outside for key in keys]
        scores = scores and list(compress(scores, kept))
        made.append(replace(one, ranked=Ranked(list(compress(keys, kept)), weight, scores)))
    return made


async def _off_loop(work: Callable[[], T], over: int) -> T:
    """Run work over ``over`` candidates, on a thread if there are more than ``MANY``: it would block the event loop."""
    return work() if over <= MANY else await Call(sync=work, what="fusing evidence")


def _order(
    reranking: Reranking,
    candidates: Mapping[NodeKey, Candidate],
    options: EvidenceOptions,
    limit: int,
    proof: Sequence[Proof] | None,
) -> list[NodeKey]:
    """Return the fused keys (by reranker scores if all lists have them), and note whose ``best_for`` candidates are.

    With ``proof``, supporting passages come first, then the best of each revision and of each step without an answer,
    then the rest, then near-duplicates. If it is None, the lists are only interleaved, for unprocessed results.
    """
    lists: list[Ranked[NodeKey]] = list(map(attrgetter("ranked"), reranking.lists))
    for one in reranking.lists:
        if one.ranked.keys and one.sub_query.id not in (served := candidates[one.ranked.keys[0]].best_for):
            served.append(one.sub_query.id)
    if not proof and len(lists) == 1 and options.fusion is interleave and not reranking.read:
        return list(dict.fromkeys(lists[0].keys))  # their order stays
    if proof is None:
        return list(map(attrgetter("key"), interleave(lists)))
    with outside_loop():  # the user's may start a loop of its own
        fused = options.fusion(lists)
    if reranking.read and reranking.is_comparable:
        fused = [replace(item, score=candidates[item.key].reranker_score or 0.0) for item in fused]
        fused.sort(key=lambda item: -item.score)
    if proof:
        places = _first_places(fused, reranking, candidates, proof)
        fused.sort(key=lambda item: places.get(item.key, len(places)))
        again = _near_duplicates([item.key for item in fused[:DUPLICATES_DEPTH]], candidates)
        fused.sort(key=lambda item: item.key in again)
    return list(map(attrgetter("key"), with_coverage(fused, lists, places=limit)))


def _first_places(
    fused: Sequence[Fused[NodeKey]],
    reranking: Reranking,
    candidates: Mapping[NodeKey, Candidate],
    proof: Sequence[Proof],
) -> dict[NodeKey, int]:
    """Return the places of ``proof``, then of the best of revisions and open steps; note proof in the candidates."""
    first = _note_proof(fused, candidates, proof)
    proven = {one.step for one in proof}
    steps = [one for one in reranking.lists if one.sub_query.origin is not SubQueryOrigin.QUESTION]
    unanswered = [one for one in steps if (one.sub_query.part_of or one.sub_query.id) not in proven]
    revised = [one for one in steps if one.sub_query.origin is SubQueryOrigin.REVISION]
    first += [key for place in range(REVISION_BEST) for one in revised for key in one.ranked.keys[place : place + 1]]
    first += [key for one in unanswered for key in one.ranked.keys[:1]]
    return {key: place for place, key in enumerate(dict.fromkeys(first))}


def _note_proof(
    fused: Sequence[Fused[NodeKey]], candidates: Mapping[NodeKey, Candidate], proof: Sequence[Proof]
) -> list[NodeKey]:
    first = []
    by_id = {candidates[item.key].node.node.node_id: item.key for item in reversed(fused)}
    for rank, one in enumerate(proof):
        key = by_id.get(one.node_id)
        if key is not None:
            finding = {} if one.finding is None else {"finding": one.finding}
            candidates[key].proof.append({"step": one.step, **finding, "rank": rank})
            first.append(key)
    return first


def _near_duplicates(keys: Sequence[NodeKey], candidates: Mapping[NodeKey, Candidate]) -> set[NodeKey]:
    """Return the keys of passages with hardly any new words compared to an earlier passage with the same title."""
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


def _cut_searches(
    searches: Sequence[SourceSearch], reranking: Reranking
) -> list[tuple[SourceActivity, dict[str, int]]]:
    """Return the records of reranked searches, each with its updated counts after thresholding."""
    judged = {search.number for one in reranking.lists if one.judged for search in one.searches}
    changed = []
    for search in searches:
        if search.record is not None and search.number in judged:
            keys = [node_key(node.node) for node in search.nodes]
            dropped = sum(key in reranking.below for key in keys)
            changed.append((search.record, {"dropped_by_threshold": dropped, "count": len(keys) - dropped}))
    return changed


# -- reranking -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reranking:
    """The result of reranking."""

    lists: list[CandidateList]
    """All lists; reranked ones are in the reranker's order without dropped candidates, the others are unchanged."""
    below: set[NodeKey] = field(default_factory=set)  # candidates that a threshold removed from all lists
    left_out: set[NodeKey] = field(default_factory=set)
    """Candidates that were removed from all lists because the reranker did not return them."""
    read: int = 0  # number of (sub-query, candidate) pairs that were passed to the reranker
    warning: str | None = None

    @property
    def is_comparable(self) -> bool:
        """Whether all lists that may be reranked, and have candidates, have scores on the scale of 0 to 4."""
        rated = [one for one in self.lists if one.ranked.keys and one.processed]
        return bool(rated) and all(one.judged and one.ranked.scores is not None for one in rated)


async def rerank(
    lists: Sequence[CandidateList],
    candidates: Mapping[NodeKey, Candidate],
    reranker: Reranker,
    selected: Mapping[str, SelectedSource],
    *,
    limit: int,
    deadline: float | None,
) -> Reranking:
    """Rerank the lists whose ``processed`` is true, in one reranker call per sub-query for candidates of all sources.

    A candidate has its best score, and is dropped if all are below its source's threshold. If a call fails or is
    late, the sub-query's fused order is kept, and the result's ``warning`` is set.
    """
    asked = [one for one in lists if one.processed and one.ranked.keys]
    read: dict[str, list[NodeKey]] = {}
    calls = []
    for one in asked:
        name = one.sub_query.id
        if name not in read:
            turns = interleave([other.ranked for other in asked if other.sub_query.id == name])
            read[name] = [fused.key for fused in turns][:limit]  # a single list keeps its order
            nodes = [NodeWithScore(node=candidates[key].node.node, score=candidates[key].score) for key in read[name]]
            calls.append(reranker.rank(one.searches[0].words, nodes, deadline=deadline))
    verdicts, warning = _verdicts(read, await gather(calls, deadline=deadline))
    made = Reranking([], read=sum(map(len, read.values())), warning=warning)
    for one in lists:
        said = verdicts.get(one.sub_query.id) if one.processed else None
        made.lists.append(one if said is None else _judged(one, said, candidates, reranker, selected))
        if said is not None:
            shown = {*one.ranked.keys}.intersection(read.get(one.sub_query.id, ()))
            made.below |= shown & said.keys()
            made.left_out |= shown - said.keys()
    _settle(made, candidates)
    return made


def _verdicts(
    read: Mapping[str, Sequence[NodeKey]], jobs: Sequence[Job[list[Reranked]]]
) -> tuple[dict[str, dict[NodeKey, Reranked]], str | None]:
    """Return a reranker's verdicts by sub-query, and a warning of the calls that failed."""
    verdicts: dict[str, dict[NodeKey, Reranked]] = {}
    failed: dict[str, list[str]] = {}
    for (name, keys), job in zip(read.items(), jobs, strict=True):
        try:
            verdicts[name] = {keys[verdict.position]: verdict for verdict in job.result()}
        except Exception as error:  # noqa: BLE001 (a reranker only improves what is there; its failure is reported)
            failed.setdefault(one_line(error_message(error)), []).append(name)
    reasons = (
        f"reranking failed for {', '.join(names)}, whose fused order stays: {why}" for why, names in failed.items()
    )
    return verdicts, "; ".join(reasons) or None


def _settle(made: Reranking, candidates: Mapping[NodeKey, Candidate]) -> None:
    """Take what is in a list from what was dropped, and note the candidates that the reranker did not score."""
    alive = {key for one in made.lists for key in one.ranked.keys}
    made.below -= alive  # further ones exceeded the limit
    made.left_out -= alive | made.below
    if any(candidate.reranked is not None for candidate in candidates.values()):
        for key in {key for one in made.lists if one.processed for key in one.ranked.keys}:
            candidates[key].unjudged = candidates[key].reranked is None


def _judged(
    one: CandidateList,
    verdicts: Mapping[NodeKey, Reranked],
    candidates: Mapping[NodeKey, Candidate],
    reranker: Reranker,
    selected: Mapping[str, SelectedSource],
) -> CandidateList:
    """Return a list in the reranker's order, without candidates below their source's threshold; store the scores."""
    own, kept, scores = set(one.ranked.keys), [], []
    for key, verdict in verdicts.items():
        known, raw_or_score = candidates[key], verdict.raw if verdict.score is None else verdict.score
        if raw_or_score is not None and (known.reranked is None or raw_or_score > known.reranked):
            known.reranked, known.reranker_score = raw_or_score, verdict.score
        chosen = selected.get(known.search.source.name)
        asked = None if chosen is None else chosen.params.reranker_threshold
        least = reranker.threshold if asked is None else asked
        if key in own and (verdict.score is None or least is None or verdict.score >= least):
            kept.append(key)
            scores += [] if verdict.score is None else [verdict.score]
    ranked = Ranked(kept, one.ranked.weight, scores if len(scores) == len(kept) else None)
    return replace(one, ranked=ranked, judged=True)


# -- postprocessing ----------------------------------------------------------------------------------------------------
# A postprocessor may be an access filter: nodes of one that is late are withheld, never shown as they were.

_POOL: Final = WorkerPool("postprocessors")
"""Separate thread pool, so that postprocessors that hang block no other work."""


@dataclass(frozen=True, slots=True)
class PostprocessedNodes:
    """The nodes after postprocessing, with the numbers of removed and added ones; ``missing`` is what was withheld."""

    nodes: list[NodeWithScore]
    dropped: int = 0
    added: int = 0
    missing: MissingPart | None = None


async def postprocess(
    nodes: list[NodeWithScore],
    postprocessors: Sequence[BaseNodePostprocessor],
    bundle: QueryBundle,
    deadline: float | None,
    selected: Mapping[str, SelectedSource],
) -> PostprocessedNodes:
    """Apply postprocessors in order; nodes that they create must pass the filters of the ``selected`` sources."""
    dropped = added = 0
    shown = _showing(nodes, selected)
    for postprocessor in postprocessors:
        before, name = len(nodes), type(postprocessor).__name__
        try:
            with metered(postprocessor, only_core=True) as counted:
                work = partial(counted.postprocess_nodes, nodes, query_bundle=bundle)
                made = await Call(sync=work, deadline=deadline, pool=_POOL, what=f"node postprocessor {name}")
        except DeadlineExceededError as late:
            reason = f"{late}; its nodes are withheld"
            missing = MissingPart(what=f"node postprocessor {name}", outcome=Outcome.TIMEOUT, reason=reason)
            return PostprocessedNodes([], dropped + before, added, missing)
        nodes = [allowed for node in made if (allowed := shown(node)) is not None]
        if len(nodes) < len(made):
            logger.warning("%d nodes that %s brought do not pass the sources' filters", len(made) - len(nodes), name)
        dropped += max(0, before - len(nodes))
        added += max(0, len(nodes) - before)
    return PostprocessedNodes(nodes, dropped, added)


def _showing(
    found: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]
) -> Callable[[NodeWithScore], NodeWithScore | None]:
    """Return a function that returns a postprocessor's node if it may be shown, with its true provenance.

    - A node of ``found`` may be shown.
    - Another node with the id of one of them must pass the effective filter of that one's source, by its metadata.
    - A node that no search found must pass the effective filter of one source at least: if some have permissions, of
      one of these. The same applies to a node with permission fields of a source without permissions.
    """
    known = {node_key(node.node) for node in found}
    marks = {node.node.node_id: mark for node in found if (mark := provenance(node)) is not None}
    declared = {name: kept for name, chosen in selected.items() if (kept := chosen.source.permissions) is not None}
    checks: dict[str, Callable[[JsonMapping], bool]] = {
        name: (lambda _: True) if chosen.filters is None else matcher(chosen.filters)
        for name, chosen in selected.items()
        if chosen.denied is None
    }
    others = [check for name, check in checks.items() if not declared or name in declared]

    def shown(node: NodeWithScore) -> NodeWithScore | None:
        if node_key(node.node) in known:
            return node
        metadata, mark = node.node.metadata, marks.get(node.node.node_id)
        source = "" if mark is None else str(mark["source"])
        own = checks.get(source)
        theirs = source not in declared and any(kept.declares(key) for kept in declared.values() for key in metadata)
        asked = others if own is None or theirs else [own]
        if selected and not any(check(metadata) for check in asked):
            return None
        if provenance(node) == mark:
            return node
        metadata = {key: value for key, value in metadata.items() if key != PROVENANCE_KEY}
        metadata |= {} if mark is None else {PROVENANCE_KEY: mark}
        return NodeWithScore(node=node.node.model_copy(update={"metadata": metadata}), score=node.score)

    return shown
