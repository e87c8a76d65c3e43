"""From the searches of a plan to candidates, and to one ranked list of them for each sub-query.

Nodes that sources gave are never changed: evidence is made of copies, with the searches that found them in their
metadata under ``PROVENANCE_KEY``. That key is shown to neither language model nor embedding model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import outside_loop
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.schema import SubQuery
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, merge_by_score, relative_score_fusion
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, NodeList

LEXICAL: Final = "lexical"

Fusion: TypeAlias = Callable[[Sequence[Ranked[NodeKey]]], list[Fused[NodeKey]]]
"""Fuses ranked lists: ``interleave``, ``reciprocal_rank_fusion``, or your own."""

CORPUS_FUSION: Final[Fusion] = relative_score_fusion
"""Fuses the ways of searching one corpus (dense and lexical); see ``search.fusion`` for the measurement."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Why a passage belongs before all others: a step's finding was read in it, or a verdict rests on it."""

    node_id: str
    step: str
    """The step's id, or "verdict"."""
    finding: str | None = None


@dataclass(slots=True)
class Candidate:
    """Everything that is known of one node."""

    node: NodeWithScore
    """As a source gave it."""
    search: SourceSearch
    """The search that found it first."""
    score: float | None = None
    """The best score that a source gave it; None where none compares with others."""
    searches: list[dict[str, Any]] = field(default_factory=list)
    """Every search that found it."""
    best_for: list[str] = field(default_factory=list)
    """Sub-queries whose best evidence it is."""
    proof: list[dict[str, Any]] = field(default_factory=list)
    """What it proves: step, finding, and its rank in the chain."""
    reranked: float | None = None
    """What stands for its score where it was reranked: the score of 0 to 4, else the reranker's own."""
    reranker_score: float | None = None
    """The score of 0 to 4, where the reranker is calibrated."""
    unjudged: bool = False
    """Whether others were judged by a reranker that failed over this one."""

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
        if self.proof:
            mark["proof"] = self.proof
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
    """Candidates of one sub-query, or of one of its searches, best first, by their keys."""

    sub_query: SubQuery
    searches: tuple[SourceSearch, ...]
    ranked: Ranked[NodeKey]
    processed: bool = True
    """Whether they are reranked; False where their source's results are left as they are."""
    judged: bool = False
    """Whether a reranker has put them in order."""


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


def best_of(searches: Sequence[SourceSearch], fusion: Fusion) -> list[Candidate]:
    """Return what one sub-query found at all its sources, best first; ``fusion`` fuses lists of different corpora."""
    candidates = collect(searches)
    return [candidates[key] for one in lists_by_sub_query(searches, fusion) for key in one.ranked.keys]


def lists_by_sub_query(searches: Sequence[SourceSearch], fusion: Fusion) -> list[CandidateList]:
    """Return one list a sub-query, in the plan's order.

    Searches whose dense scores can be compared (one embedding model and kind of store) make one group. In a group,
    dense lists are merged by score times their source's weight. Lexical lists of several sources take turns by
    weight: a BM25 score counts words by how rare they are in its own index, so those of two indexes don't compare.
    Then the group's dense and lexical lists, which rank one corpus for one query, are fused by ``CORPUS_FUSION``.
    Groups hold different documents, scored differently, and are fused by ``fusion``.
    """
    by_sub_query: dict[str, dict[Hashable, list[SourceSearch]]] = {}
    for search in searches:
        group: Hashable = ("search", search.record.id)
        for ranked in search.lists:
            if _scores(ranked) is not None and ranked.scale is not None:
                group = ("scale", ranked.scale)
                break
        by_sub_query.setdefault(search.sub_query.id, {}).setdefault(group, []).append(search)
    made = []
    for groups in by_sub_query.values():
        lists, members = [], list[SourceSearch]()
        for group_searches in groups.values():
            lists.append(_corpus_list(group_searches))
            members += group_searches
        with outside_loop():  # the user's may start a loop of its own
            fused = Ranked(lists[0].keys, scores=lists[0].scores) if len(lists) == 1 else _as_ranked(fusion(lists))
        made.append(CandidateList(members[0].sub_query, tuple(members), fused))
    return made


def lists_by_search(searches: Sequence[SourceSearch], processed: Callable[[str], bool]) -> list[CandidateList]:
    """Return one list a search, for results that are to be left as they are, in the order in which they take turns.

    ``processed`` returns by a source's name whether its results are processed all the same.
    """
    return [
        CandidateList(search.sub_query, (search,), Ranked(_corpus_list([search]).keys), processed(search.source.name))
        for search in searches
    ]


def _corpus_list(searches: Sequence[SourceSearch]) -> Ranked[NodeKey]:
    """Fuse the ways of searching one corpus; the result weighs as much as its heaviest source that found anything."""
    kinds: dict[Hashable, list[tuple[NodeList, float]]] = {}
    weight = None
    for search in searches:
        for position, found in enumerate(search.lists):
            shared = found.kind == LEXICAL or (found.scale is not None and _scores(found) is not None)
            kinds.setdefault(found.kind if shared else (search.record.id, position), []).append(
                (found, search.source.weight)
            )
            if found.nodes:
                weight = max(search.source.weight, weight or 0.0)
    lists = []
    for group in kinds.values():
        found = group[0][0]
        lists.append(Ranked(found.keys, scores=_scores(found)) if len(group) == 1 else _one_kind(group))
    fused = lists[0] if len(lists) == 1 else _as_ranked(CORPUS_FUSION(lists))
    return Ranked(fused.keys, 1.0 if weight is None else weight, fused.scores)


def _one_kind(group: Sequence[tuple[NodeList, float]]) -> Ranked[NodeKey]:
    """Join lists of one kind from several sources: by score where their scores compare, else by turns."""
    scored, best = [], dict[NodeKey, float]()
    for found, _ in group:
        scores = _scores(found)
        if found.scale is None or scores is None:
            turns = interleave([Ranked(one.keys, of_source, _scores(one)) for one, of_source in group])
            return Ranked([fused.key for fused in turns])
        scored.append([*zip(found.keys, scores, strict=True)])
        for key, score in scored[-1]:
            best[key] = max(score, best.get(key, score))
    keys = merge_by_score(scored, [of_source for _, of_source in group])
    return Ranked(keys, scores=[best[key] for key in keys])


def _scores(found: NodeList) -> list[float] | None:
    """Return the scores of a list; None where a node has none."""
    scores = [node.score for node in found.nodes if node.score is not None]
    return scores if len(scores) == len(found.nodes) else None


def _as_ranked(fused: Sequence[Fused[NodeKey]]) -> Ranked[NodeKey]:
    return Ranked([item.key for item in fused], scores=[item.score for item in fused])
