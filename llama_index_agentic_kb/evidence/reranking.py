"""Reranks the candidates of each sub-query, in one call each, and applies the thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import gather
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.evidence.candidates import Candidate, CandidateList
from llama_index_agentic_kb.search.fusion import Ranked, interleave
from llama_index_agentic_kb.search.rerank import Reranked, Reranker
from llama_index_agentic_kb.sources.search import NodeKey

__all__ = ["Reranking", "rerank"]

Thresholds: TypeAlias = Callable[[str], float | None]
"""Returns the threshold of a source by its name."""

_Verdicts: TypeAlias = Mapping[NodeKey, Reranked]
"""What the reranker said of one sub-query's candidates, best first."""


@dataclass(slots=True)
class Reranking:
    """What became of the lists.

    Args:
        lists: Those that the reranker judged are in its order and without what it dropped; the others are unchanged.
        below: Candidates that are in no list any more because of a threshold.
        left_out: Candidates that are in no list any more because the reranker did not return them.
        read: How many (sub-query, candidate) pairs the reranker read.
        warning: What failed, if anything did.
    """

    lists: list[CandidateList]
    below: set[NodeKey] = field(default_factory=set)
    left_out: set[NodeKey] = field(default_factory=set)
    read: int = 0
    warning: str | None = None


async def rerank(
    lists: Sequence[CandidateList],
    candidates: Mapping[NodeKey, Candidate],
    reranker: Reranker | None,
    thresholds: Thresholds,
    *,
    limit: int,
    deadline: float | None,
) -> Reranking:
    """Rerank the lists that are to be processed: one call a sub-query, over its candidates of all sources.

    A candidate that several sub-queries found keeps its best score. It is dropped where its score for every sub-query
    that found it is below its source's threshold. Where the reranker fails or is late, that sub-query's fused order
    stays, nothing of it is dropped, and there is a warning; nothing is raised.

    Args:
        lists: Of sub-queries, or of searches.
        candidates: Get their scores.
        reranker: None leaves everything as it is.
        thresholds: Called where the reranker is calibrated.
        limit: Candidates of each sub-query that are read; those beyond are dropped.
        deadline: ``time.monotonic()`` at which the reranker is given up.
    """
    if reranker is None:
        return Reranking(list(lists))
    groups: dict[str, list[CandidateList]] = {}
    for one in lists:
        if one.processed and one.ranked.keys:
            groups.setdefault(one.sub_query.id, []).append(one)
    read = {name: _first_keys(group, limit) for name, group in groups.items()}
    calls = [
        reranker.rank(group[0].sub_query.query, _nodes(read[name], candidates), deadline=deadline)
        for name, group in groups.items()
    ]
    verdicts: dict[str, _Verdicts] = {}
    failed: dict[str, list[str]] = {}
    for name, job in zip(groups, await gather(calls, deadline=deadline), strict=True):
        try:
            verdicts[name] = {read[name][verdict.position]: verdict for verdict in job.result()}
        except Exception as error:  # noqa: BLE001 (a reranker only improves what is there; its failure is reported)
            failed.setdefault(one_line(error_message(error)), []).append(name)
    limits = {key: thresholds(one.search.source.name) for key, one in candidates.items()}
    judged = [
        _judged(one, verdicts[one.sub_query.id], limits) if one.processed and one.sub_query.id in verdicts else one
        for one in lists
    ]
    made = Reranking(judged, read=sum(map(len, read.values())))
    _account(made, lists, read, verdicts)
    _score(made, candidates, verdicts)
    reasons = [
        f"reranking failed for {', '.join(names)}, whose fused order stays: {why}" for why, names in failed.items()
    ]
    made.warning = "; ".join(reasons) or None
    return made


def _first_keys(lists: Sequence[CandidateList], limit: int) -> list[NodeKey]:
    """Return the candidates of a sub-query in the order of its list; its searches' lists take turns."""
    if len(lists) == 1:
        return list(lists[0].ranked.keys[:limit])
    return [fused.key for fused in interleave([one.ranked for one in lists])][:limit]


def _nodes(keys: Sequence[NodeKey], candidates: Mapping[NodeKey, Candidate]) -> list[NodeWithScore]:
    return [NodeWithScore(node=candidates[key].node.node, score=candidates[key].score) for key in keys]


def _judged(one: CandidateList, verdicts: _Verdicts, limits: Mapping[NodeKey, float | None]) -> CandidateList:
    """Return a list in the reranker's order, without what is below its threshold."""
    own = set(one.ranked.keys)
    kept = [key for key, verdict in verdicts.items() if key in own and _passes(verdict, limits[key])]
    scores = [score for key in kept if (score := verdicts[key].score) is not None]
    ranked = Ranked(kept, one.ranked.weight, scores if len(scores) == len(kept) else None)
    return replace(one, ranked=ranked, judged=True)


def _passes(verdict: Reranked, threshold: float | None) -> bool:
    return threshold is None or verdict.score is None or verdict.score >= threshold


def _account(
    made: Reranking,
    lists: Sequence[CandidateList],
    read: Mapping[str, Sequence[NodeKey]],
    verdicts: Mapping[str, _Verdicts],
) -> None:
    """Settle why each candidate that is in no list any more is not; the others were beyond what is read."""
    for one in lists:
        said = verdicts.get(one.sub_query.id)
        if one.processed and said is not None:
            asked = set(read[one.sub_query.id])
            made.below |= {key for key in one.ranked.keys if key in said}
            made.left_out |= {key for key in one.ranked.keys if key in asked and key not in said}
    alive = {key for one in made.lists for key in one.ranked.keys}
    made.below -= alive
    made.left_out -= alive | made.below


def _score(made: Reranking, candidates: Mapping[NodeKey, Candidate], verdicts: Mapping[str, _Verdicts]) -> None:
    """Keep each candidate's best score, and mark those that the reranker failed over."""
    for key, verdict in (pair for said in verdicts.values() for pair in said.items()):
        known = candidates[key]
        score = verdict.raw if verdict.score is None else verdict.score
        if score is not None and (known.reranked is None or score > known.reranked):
            known.reranked, known.reranker_score = score, verdict.score
    if any(one.reranked is not None for one in candidates.values()):
        for key in {key for one in made.lists if one.processed for key in one.ranked.keys}:
            candidates[key].unjudged = candidates[key].reranked is None
