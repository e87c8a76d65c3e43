"""Collects the nodes that a plan's searches found as candidates, and ranks them in one list per sub-query.

Nodes from sources are never changed: evidence consists of copies with their provenance in the metadata under
``PROVENANCE_KEY``. That key is hidden from language models and embedding models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import outside_loop
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY
from llama_index_agentic_kb.schema import SubQuery, SubQueryOrigin
from llama_index_agentic_kb.search.fusion import Fused, Ranked, interleave, merge_by_score, relative_score_fusion
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey, NodeList

LEXICAL: Final = "lexical"

Fusion: TypeAlias = Callable[[Sequence[Ranked[NodeKey]]], list[Fused[NodeKey]]]
"""A function that fuses ranked lists: ``interleave``, ``reciprocal_rank_fusion`` or a custom one."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A passage that supports a step's finding or a verdict on the evidence, and is therefore ranked first."""

    node_id: str
    step: str  # the id of the supported step, or "verdict"
    finding: str | None = None


@dataclass(slots=True)
class Candidate:
    """A found node with its searches and scores."""

    node: NodeWithScore  # the node as its source returned it
    search: SourceSearch  # the search that found it first
    score: float | None = None  # the highest comparable score from a source; None if there is none
    searches: list[dict[str, Any]] = field(default_factory=list)
    """All searches that found the node, with its rank and score."""
    best_for: list[str] = field(default_factory=list)  # ids of the sub-queries for which this node is the best evidence
    proof: list[dict[str, Any]] = field(default_factory=list)
    """The findings that the node supports: step, finding, and rank in the chain."""
    reranked: float | None = None
    """The reranked score: the calibrated score of 0 to 4, else the reranker's own; None if not reranked."""
    reranker_score: float | None = None  # the score of 0 to 4; None unless a calibrated reranker scored the node
    unjudged: bool = False  # whether the reranker scored other candidates but not this one

    def evidence(self) -> NodeWithScore:
        """Return a copy of the node with its provenance; its score is the reranker's, else the source's."""
        node, judged = self.node.node, self.reranked is not None or self.unjudged
        mark = {"source": self.search.source.name, "activity": self.search.record.id, "searches": self.searches}
        mark |= {name: found for name in ("best_for", "proof") if (found := getattr(self, name))}
        if self.reranker_score is not None:
            mark["reranker_score"] = self.reranker_score
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
    """The candidate keys of one sub-query, or of one of its searches, best first."""

    sub_query: SubQuery
    searches: Sequence[SourceSearch]
    ranked: Ranked[NodeKey]
    processed: bool = True  # whether the list may be reranked
    judged: bool = False  # whether the list is in a reranker's order

    def without(self, outside: Collection[NodeKey]) -> CandidateList:
        """Return the list without some candidates."""
        at = [place for place, key in enumerate(self.ranked.keys) if key not in outside]
        scores = self.ranked.scores
        kept = None if scores is None else [scores[place] for place in at]
        return replace(self, ranked=Ranked([self.ranked.keys[place] for place in at], self.ranked.weight, kept))


def collect(searches: Sequence[SourceSearch]) -> dict[NodeKey, Candidate]:
    """Return all found nodes without duplicates (by id and text), each with all searches that found it.

    A candidate's score is the highest that a source returned. Beside similarities, BM25 scores do not count, as they
    can't be compared: what only BM25 found has the score None (and ``SimilarityPostprocessor`` drops it).
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
    """Return one sub-query's candidates of all sources, best first; ``fusion`` fuses lists of different corpora."""
    candidates = collect(searches)
    return [candidates[key] for one in lists_by_sub_query(searches, fusion) for key in one.ranked.keys]


def lists_by_sub_query(searches: Sequence[SourceSearch], fusion: Fusion) -> list[CandidateList]:
    """Return one list per sub-query, in the plan's order.

    Searches with comparable dense scores are of one corpus: their dense lists are merged by score, their lexical ones
    interleaved, because BM25 scores depend on the word frequencies of their own index. Both are fused by relative
    scores (``search.fusion`` has the measurement), and the lists of several corpora by ``fusion``.
    """
    by_sub_query: dict[str, dict[Hashable, list[SourceSearch]]] = {}
    for search in searches:
        scales = (one.scale for one in search.lists if one.scale is not None and _scores(one) is not None)
        corpus = next(scales, ("search", search.record.id))
        by_sub_query.setdefault(search.sub_query.id, {}).setdefault(corpus, []).append(search)
    made = []
    for corpora in by_sub_query.values():
        lists = [_corpus_list(members) for members in corpora.values()]
        members = [search for found in corpora.values() for search in found]
        with outside_loop():  # a custom function may start its own event loop
            fused = Ranked(lists[0].keys, scores=lists[0].scores) if len(lists) == 1 else _as_ranked(fusion(lists))
        sub_query = members[0].sub_query
        is_processed = sub_query.origin is not SubQueryOrigin.TOOL  # a reranker can't judge a result by arguments
        made.append(CandidateList(sub_query, members, fused, is_processed))
    return made


def lists_by_search(searches: Sequence[SourceSearch], unprocessed: Collection[str]) -> list[CandidateList]:
    """Return one list per search, to be interleaved; ``unprocessed`` names the sources that must not be reranked."""
    return [
        CandidateList(one.sub_query, [one], Ranked(_corpus_list([one]).keys), one.source.name not in unprocessed)
        for one in searches
    ]


def _corpus_list(searches: Sequence[SourceSearch]) -> Ranked[NodeKey]:
    """Fuse the dense and lexical lists of one corpus; the weight is the highest of the sources with results."""
    kinds: dict[Hashable, list[tuple[NodeList, float]]] = {}
    weights = []
    for search in searches:
        for position, found in enumerate(search.lists):
            shared = found.kind == LEXICAL or (found.scale is not None and _scores(found) is not None)
            key = found.kind if shared else (search.record.id, position)
            kinds.setdefault(key, []).append((found, search.source.weight))
            weights += [search.source.weight] if found.nodes else []
    lists = [_one_kind(group) for group in kinds.values()]
    fused = lists[0] if len(lists) == 1 else _as_ranked(relative_score_fusion(lists))
    return Ranked(fused.keys, max(weights, default=1.0), fused.scores)


def _one_kind(group: Sequence[tuple[NodeList, float]]) -> Ranked[NodeKey]:
    """Merge result lists of one kind (e.g. lexical): by score if all have comparable scores, else by interleaving."""
    scored, best = [], dict[NodeKey, float]()
    if len(group) == 1:
        return Ranked(group[0][0].keys, scores=_scores(group[0][0]))
    for found, _ in group:
        scores = _scores(found)
        if found.scale is None or scores is None:
            turns = interleave([Ranked(one.keys, of_source) for one, of_source in group])
            return Ranked([fused.key for fused in turns])
        scored.append([*zip(found.keys, scores, strict=True)])
        for key, score in scored[-1]:
            best[key] = max(score, best.get(key, score))
    keys = merge_by_score(scored, [of_source for _, of_source in group])
    return Ranked(keys, scores=[best[key] for key in keys])


def _scores(found: NodeList) -> list[float] | None:
    """Return the scores of a list; None if any node lacks a score."""
    scores = [node.score for node in found.nodes if node.score is not None]
    return scores if len(scores) == len(found.nodes) else None


def _as_ranked(fused: Sequence[Fused[NodeKey]]) -> Ranked[NodeKey]:
    return Ranked([item.key for item in fused], scores=[item.score for item in fused])
