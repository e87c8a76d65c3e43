"""Reranks the candidates of each sub-query, in one call each, and applies the thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Job, gather
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.evidence.candidates import Candidate, CandidateList
from llama_index_agentic_kb.search.fusion import Ranked, interleave
from llama_index_agentic_kb.search.rerank import Reranked, Reranker
from llama_index_agentic_kb.sources.base import NodeKey

__all__ = ["Reranking", "rerank"]

Thresholds = Callable[[str], float | None]
"""Gives the threshold of a source by its name; None is none."""


@dataclass(slots=True)
class Reranking:
    """What became of the lists.

    Args:
        lists: As they were given, those that the reranker judged in its order and without what it dropped.
        below: Candidates that are in no list any more, for a threshold.
        left_out: Candidates that are in no list any more, for the reranker did not give them back.
        unread: Candidates that are in no list any more, for they were beyond the number that is read.
        read: How many (sub-query, candidate) pairs the reranker read.
        warning: What failed, if anything did.
    """

    lists: list[CandidateList]
    below: set[NodeKey] = field(default_factory=set)
    left_out: set[NodeKey] = field(default_factory=set)
    unread: set[NodeKey] = field(default_factory=set)
    read: int = 0
    warning: str | None = None


async def rerank(
    lists: Sequence[CandidateList],
    candidates: Mapping[NodeKey, Candidate],
    reranker: Reranker | None,
    thresholds: Thresholds,
    *,
    most: int,
    deadline: float | None,
) -> Reranking:
    """Rerank the lists that are to be processed: one call a sub-query, over its candidates of all sources.

    A candidate that several sub-queries found keeps its best score. It is dropped where its score for every sub-query
    that found it is below its source's threshold. Where the reranker fails or is late, that sub-query's fused order
    stays, nothing of it is dropped, and the warning tells; nothing is raised.

    Args:
        lists: Of sub-queries, or of searches.
        candidates: Told their scores.
        reranker: None leaves everything as it is.
        thresholds: Asked where the reranker is calibrated.
        most: Candidates of each sub-query that are read; those beyond are dropped.
        deadline: ``time.monotonic()`` at which the reranker is given up.
    """
    if reranker is None:
        return Reranking(list(lists))
    turns: dict[str, list[CandidateList]] = {}
    for one in lists:
        if one.processed and one.ranked.keys:
            turns.setdefault(one.sub_query.id, []).append(one)
    asked = {name: _first_keys(group, most) for name, group in turns.items()}
    works = [
        reranker.rank(group[0].sub_query.query, _nodes(asked[name], candidates), deadline=deadline)
        for name, group in turns.items()
    ]
    jobs = await gather(works, deadline=deadline)
    made = Reranking([], read=sum(map(len, asked.values())))
    verdicts: dict[str, dict[NodeKey, Reranked]] = {}
    failed: dict[str, str] = {}
    for name, job in zip(turns, jobs, strict=True):
        try:
            verdicts[name] = {asked[name][verdict.position]: verdict for verdict in _result(job)}
        except Exception as error:  # noqa: BLE001 (a reranker only improves what is there; its failure is told)
            failed[name] = one_line(error_message(error))
    passing = _Passing(
        made, asked, verdicts, {key: thresholds(one.lane.source.name) for key, one in candidates.items()}
    )
    made.lists = [passing.apply(one) if one.processed else one for one in lists]
    _score(candidates, verdicts, made)
    made.warning = _told(failed)
    return made


def _result(job: Job[list[Reranked]]) -> list[Reranked]:
    return job.result()


def _first_keys(lists: Sequence[CandidateList], most: int) -> list[NodeKey]:
    """Give the candidates of a sub-query in the order of its list; its searches' lists take turns."""
    if len(lists) == 1:
        return list(lists[0].ranked.keys[:most])
    return [fused.key for fused in interleave([one.ranked for one in lists])][:most]


def _nodes(keys: Sequence[NodeKey], candidates: Mapping[NodeKey, Candidate]) -> list[NodeWithScore]:
    return [NodeWithScore(node=candidates[key].node.node, score=candidates[key].score) for key in keys]


@dataclass(slots=True)
class _Passing:
    """Which candidates of a list go on."""

    made: Reranking
    asked: Mapping[str, Sequence[NodeKey]]
    verdicts: Mapping[str, Mapping[NodeKey, Reranked]]
    thresholds: Mapping[NodeKey, float | None]

    def apply(self, one: CandidateList) -> CandidateList:
        """Give a list in the reranker's order, without what is dropped; as it is where the reranker failed."""
        verdicts = self.verdicts.get(one.sub_query.id)
        if verdicts is None:
            return one
        own = set(one.ranked.keys)
        kept = [key for key, verdict in verdicts.items() if key in own and self._passes(key, verdict)]
        read = set(self.asked[one.sub_query.id])
        self.made.below |= {key for key in own if key in verdicts} - set(kept)
        self.made.left_out |= {key for key in own if key in read and key not in verdicts}
        self.made.unread |= own - read
        scores = [verdicts[key].score for key in kept]
        complete = [score for score in scores if score is not None]
        ranked = Ranked(kept, one.ranked.weight, complete if len(complete) == len(kept) else None)
        return replace(one, ranked=ranked, judged=True)

    def _passes(self, key: NodeKey, verdict: Reranked) -> bool:
        threshold = self.thresholds[key]
        return threshold is None or verdict.score is None or verdict.score >= threshold


def _score(
    candidates: Mapping[NodeKey, Candidate], verdicts: Mapping[str, Mapping[NodeKey, Reranked]], made: Reranking
) -> None:
    """Tell candidates their best scores, and settle why each that is in no list any more is not."""
    for key, verdict in (pair for of_one in verdicts.values() for pair in of_one.items()):
        known = candidates[key]
        spoken = verdict.raw if verdict.score is None else verdict.score
        if spoken is not None and (known.reranked is None or spoken > known.reranked):
            known.reranked, known.reranker_score = spoken, verdict.score
    alive = {key for one in made.lists for key in one.ranked.keys}
    made.below -= alive
    made.left_out -= alive | made.below
    made.unread -= alive | made.below | made.left_out
    if any(one.reranked is not None for one in candidates.values()):
        for key in {key for one in made.lists if one.processed for key in one.ranked.keys}:
            candidates[key].unjudged = candidates[key].reranked is None


def _told(failed: Mapping[str, str]) -> str | None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    told = [
        f"reranking failed for {', '.join(names)}, whose fused order stays: {why}" for why, names in by_reason.items()
    ]
    return "; ".join(told) or None
