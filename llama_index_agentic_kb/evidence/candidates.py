"""From the searches of a plan to candidates, and to one ranked list of them for each sub-query.

Nodes that sources gave are never changed: evidence is made of copies, with the searches that found them in their
metadata under ``PROVENANCE_KEY``. That key is shown to neither language model nor embedding model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.schema import SubQuery
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, merge_by_score, relative_score_fusion
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, NodeList

__all__ = ["Candidate", "CandidateList", "Fusion", "collect", "lists_by_search", "lists_by_sub_query"]

LEXICAL: Final = "lexical"

Fusion: TypeAlias = Callable[[Sequence[Ranked[NodeKey]]], list[Fused[NodeKey]]]
"""Fuses ranked lists: ``interleave``, ``reciprocal_rank_fusion``, or your own."""

CORPUS_FUSION: Final[Fusion] = relative_score_fusion
"""Fuses the ways of searching one corpus (dense and lexical); see ``search.fusion`` for the measurement."""

_Weighted: TypeAlias = tuple[NodeList, float]


@dataclass(slots=True)
class Candidate:
    """Everything that is known of one node.

    Args:
        node: As a source gave it.
        search: The search that found it first.
        score: The best score that a source gave it; None where none compares with others.
        searches: Every search that found it.
        best_for: Sub-queries whose best evidence it is.
        reranked: What stands for its score where it was reranked: the score of 0 to 4, else the reranker's own.
        reranker_score: The score of 0 to 4, where the reranker is calibrated.
        unjudged: Whether others were judged by a reranker that failed over this one.
    """

    node: NodeWithScore
    search: SourceSearch
    score: float | None = None
    searches: list[dict[str, Any]] = field(default_factory=list)
    best_for: list[str] = field(default_factory=list)
    reranked: float | None = None
    reranker_score: float | None = None
    unjudged: bool = False

    def evidence(self) -> NodeWithScore:
        """Return a copy with its provenance; the score is the reranker's where there is one, else the source's."""
        node = self.node.node
        mark: dict[str, Any] = {
            "source": self.search.source.name,
            "activity": self.search.record.id,
            "searches": self.searches,
        }
        if self.best_for:
            mark["best_for"] = self.best_for
        if self.reranker_score is not None:
            mark["reranker_score"] = self.reranker_score
        judged = self.reranked is not None or self.unjudged
        if judged:
            mark["source_score"] = self.score
        copy = node.model_copy(
            update={
                "metadata": {**node.metadata, PROVENANCE_KEY: mark},
                "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, PROVENANCE_KEY],
                "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, PROVENANCE_KEY],
            }
        )
        return NodeWithScore(node=copy, score=self.reranked if judged else self.score)


@dataclass(frozen=True, slots=True)
class CandidateList:
    """Candidates of one sub-query, or of one of its searches, best first.

    Args:
        sub_query: What they were found for.
        searches: The searches that found them.
        ranked: Their keys.
        processed: Whether they are reranked; False where their source's results are left as they are.
        judged: Whether a reranker has put them in order.
    """

    sub_query: SubQuery
    searches: tuple[SourceSearch, ...]
    ranked: Ranked[NodeKey]
    processed: bool = True
    judged: bool = False


def collect(searches: Sequence[SourceSearch]) -> dict[NodeKey, Candidate]:
    """Return every node that was found, each once (by id and text), with all searches that found it.

    Its score is the best that a source gave it, not changed by fusion. None is invented: where a source was searched
    in several ways its scores are those of the first that is not lexical, a similarity; a node that BM25 alone found
    beside a dense search has None, for a BM25 score says nothing beside similarities. (``SimilarityPostprocessor``
    drops such a node: it has no similarity.) A source that is searched in one way keeps that way's scores. All scores
    of all lists stand in ``searches``.
    """
    found: dict[NodeKey, Candidate] = {}
    for search in searches:
        mark = {
            "activity": search.record.id,
            "source": search.source.name,
            "sub_query": search.sub_query.id,
            "query": search.sub_query.query,
        }
        for ranked in search.lists:
            compares = ranked.kind != LEXICAL or len(search.lists) == 1
            for rank, (key, node) in enumerate(zip(ranked.keys, ranked.nodes, strict=True)):
                known = found.get(key)
                if known is None:
                    known = found[key] = Candidate(node, search)
                known.searches.append({**mark, "list": ranked.kind, "rank": rank, "score": node.score})
                score = node.score if compares else None
                if score is not None and (known.score is None or score > known.score):
                    known.node, known.score = node, score
    return found


def lists_by_sub_query(searches: Sequence[SourceSearch], fusion: Fusion) -> list[CandidateList]:
    """Return one list a sub-query, in the plan's order.

    Searches whose dense scores can be compared (one embedding model and kind of store) make one group. In a group,
    dense lists are merged by score times their source's weight. Lexical lists of several sources take turns by
    weight: a BM25 score counts words by how rare they are in its own index, so those of two indexes don't compare.
    Then the group's dense and lexical lists, which rank one corpus for one query, are fused by ``CORPUS_FUSION``.
    Groups hold different documents, scored differently, and are fused by ``fusion``.

    Args:
        searches: In the plan's order.
        fusion: How groups are fused.
    """
    by_sub_query: dict[str, list[SourceSearch]] = {}
    for search in searches:
        by_sub_query.setdefault(search.sub_query.id, []).append(search)
    return [
        CandidateList(group[0].sub_query, tuple(group), _fuse_sub_query(group, fusion))
        for group in by_sub_query.values()
    ]


def best_of(searches: Sequence[SourceSearch], fusion: Fusion) -> list[Candidate]:
    """Return what one sub-query found at all its sources, best first; ``fusion`` fuses lists of different corpora."""
    candidates = collect(searches)
    return [candidates[key] for one in lists_by_sub_query(searches, fusion) for key in one.ranked.keys]


def lists_by_search(searches: Sequence[SourceSearch], processed: Callable[[str], bool]) -> list[CandidateList]:
    """Return one list a search, for results that are to be left as they are.

    Args:
        searches: In the order in which they take turns.
        processed: Returns by a source's name whether its results are processed all the same.
    """
    return [
        CandidateList(search.sub_query, (search,), Ranked(_fuse_group([search]).keys), processed(search.source.name))
        for search in searches
    ]


def _fuse_sub_query(searches: Sequence[SourceSearch], fusion: Fusion) -> Ranked[NodeKey]:
    groups: dict[Hashable, list[SourceSearch]] = {}
    for search in searches:
        scale = next((one.scale for one in search.lists if _comparable(one)), None)
        groups.setdefault(("search", search.record.id) if scale is None else ("scale", scale), []).append(search)
    lists = [_fuse_group(group) for group in groups.values()]
    return Ranked(lists[0].keys, scores=lists[0].scores) if len(lists) == 1 else _as_list(fusion(lists))


def _fuse_group(searches: Sequence[SourceSearch]) -> Ranked[NodeKey]:
    """Fuse the ways of searching one corpus; the result weighs as much as its heaviest source that found anything."""
    kinds: dict[Hashable, list[_Weighted]] = {}
    for search in searches:
        for position, ranked in enumerate(search.lists):
            kind = ranked.kind if ranked.kind == LEXICAL or _comparable(ranked) else (search.record.id, position)
            kinds.setdefault(kind, []).append((ranked, search.source.weight))
    lists = [_one_kind(group) for group in kinds.values()]
    weight = max((search.source.weight for search in searches if search.nodes), default=1.0)
    fused = lists[0] if len(lists) == 1 else _as_list(CORPUS_FUSION(lists))
    return Ranked(fused.keys, weight, fused.scores)


def _one_kind(group: Sequence[_Weighted]) -> Ranked[NodeKey]:
    """Join lists of one kind: by score where their scores compare, else by turns."""
    weight = max(ranked.weight for ranked, _ in group)
    if len(group) == 1:
        return _ranked(group[0][0], weight)
    if not all(_comparable(ranked) for ranked, _ in group):
        turns = interleave([_ranked(ranked, of_source) for ranked, of_source in group])
        return Ranked([fused.key for fused in turns], weight)
    scored = [
        [(key, node.score or 0.0) for key, node in zip(ranked.keys, ranked.nodes, strict=True)] for ranked, _ in group
    ]
    best: dict[NodeKey, float] = {}
    for key, score in (pair for pairs in scored for pair in pairs):
        best[key] = max(score, best.get(key, score))
    keys = merge_by_score(scored, [of_source for _, of_source in group])
    return Ranked(keys, weight, [best[key] for key in keys])


def _ranked(found: NodeList, weight: float) -> Ranked[NodeKey]:
    scores = [node.score for node in found.nodes if node.score is not None]
    return Ranked(found.keys, weight, scores if len(scores) == len(found.nodes) else None)


def _as_list(fused: Sequence[Fused[NodeKey]]) -> Ranked[NodeKey]:
    return Ranked([item.key for item in fused], scores=[item.score for item in fused])


def _comparable(ranked: NodeList) -> bool:
    return ranked.scale is not None and all(node.score is not None for node in ranked.nodes)
