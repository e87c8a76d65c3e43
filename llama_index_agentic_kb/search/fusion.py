"""Fuses ranked lists into one, as pure functions that do not change their arguments.

    interleave                              alternately from each list; weights are quotas
    reciprocal_rank_fusion                  by summed reciprocal ranks
    relative_score_fusion                   by summed scores, each list's scaled from its lowest to its highest
    merge_by_score                          by scores on a common scale

Each returns every key once, best first, with its ranks in the lists. Ties are broken by list weight, then list order,
then rank, so that results are deterministic. ``with_coverage`` adds a guarantee to the result of any of them.

For sub-queries of one question, interleaving is the default: reciprocal rank fusion over whole lists rewards documents
with mediocre ranks in all lists. Of 500 questions of 2WikiMultiHopQA, with gold sub-queries and 50 results a list, it
has all evidence in the top ten for 43.8 %, interleaving for 95.2 %; ``with_coverage`` raises the former to 90.2 %.

For dense and lexical search of one corpus with one query, a document in both lists is more likely relevant, and
relative scores are the default: they gain 0 to 3 points over reciprocal rank fusion with 50 results a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter, truediv
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

DEPTH: Final = 10  # the rank, counted from 1, from which a key is deep (``with_coverage``)


@dataclass(slots=True)
class Ranked(Generic[K]):
    """One ranked list.

    Args:
        keys: The keys of the results, best first. Of a repeated key only the first position counts.
        weight: The weight of the list relative to others; a list of weight 0 is ignored.
        scores: One score per key, higher is better; None if the list has no scores. Used by score fusions only, which
            raise ``ValueError`` if the lengths differ. A score that is not finite counts as the list's lowest.
    """

    keys: Sequence[K]
    weight: float = 1.0
    scores: Sequence[float] | None = None


@dataclass(slots=True)
class Fused(Generic[K]):
    """One key of the fused list; ``found`` has its (list, rank) pairs, both 0-based."""

    key: K
    score: float
    found: tuple[tuple[int, int], ...]

    @property
    def best_rank(self) -> int:
        """The best of its ranks, 0-based."""
        return min(self.found, key=itemgetter(1))[1]


def interleave(lists: Sequence[Ranked[K]]) -> list[Fused[K]]:
    """Take results from the lists alternately; a list of weight 2 contributes twice as many as a list of weight 1.

    The score of a key at 0-based rank r of a list of weight w is w / (r + 1); of several, the highest counts. With
    equal weights this is round robin.
    """
    return _fuse(lists, partial(_reciprocal, k=0), best_only=True)


def reciprocal_rank_fusion(lists: Sequence[Ranked[K]], *, k: int = 60) -> list[Fused[K]]:
    """Sum weighted reciprocal ranks: w / (k + r + 1) for 0-based rank r (Cormack, Clarke and Buettcher, SIGIR 2009).

    ``k`` smooths: a larger one reduces the advantage of top ranks. The paper's value is 60.
    """
    return _fuse(lists, partial(_reciprocal, k=k))


def relative_score_fusion(lists: Sequence[Ranked[K]]) -> list[Fused[K]]:
    """Sum weighted scores, each list's scaled so that its lowest is 0 and its highest 1 (Weaviate).

    If all scores of a list are equal, each of its keys gets 1, as in Weaviate. In a list of n keys without scores, the
    key at 0-based rank r gets (n - r) / n.
    """
    return _fuse(lists, _scaled)


def merge_by_score(lists: Sequence[Sequence[tuple[K, float]]], weights: Sequence[float]) -> list[K]:
    """Merge lists of (key, score) pairs on a common scale, such as similarities of one embedding model.

    Scores are multiplied by the weight of their list, negative ones divided by it. Each key is returned once, sorted by
    its best weighted score. Ties are broken by list order, then rank.
    """
    placed: list[tuple[float, K]] = []
    for pairs, weight in zip(lists, weights, strict=True):
        for key, score in pairs:
            placed.append((score * weight if score >= 0 else score / weight, key))
    placed.sort(key=itemgetter(0), reverse=True)  # stable, also in reverse
    return list(dict.fromkeys(map(itemgetter(1), placed)))


def with_coverage(fused: Sequence[Fused[K]], lists: Sequence[Ranked[K]], *, places: int) -> list[Fused[K]]:
    """Move keys so that each list's best key precedes keys of low rank; the order is otherwise unchanged.

    The *best* keys are the first keys of all non-empty lists with a weight above 0. Any other key is *deep* if its best
    rank over all lists, counted from 1, is ``DEPTH`` or worse. In the result every best key precedes every deep key,
    and is among the first ``places`` keys; if there are more best keys than places, only best keys are. As few keys as
    possible are moved: best keys up and the last other keys down. Keys missing from ``fused`` are not added.
    """
    if len(fused) <= places and max(map(len, map(attrgetter("keys"), lists)), default=0) < DEPTH:
        return [*fused]  # none is deep
    bests = {ranked.keys[0] for ranked in lists if ranked.keys and ranked.weight > 0}
    head: list[K] = []
    for item in fused[:places]:
        if item.best_rank >= DEPTH - 1 and item.key not in bests:
            break
        head.append(item.key)
    if bests.issubset(head):
        return [*fused]
    late = [item.key for item in fused[len(head) :] if item.key in bests]
    others = [key for key in head if key not in bests]
    down = others[max(0, len(others) - max(0, len(head) + len(late) - places)) :]
    order = dict.fromkeys(head, 0) | dict.fromkeys(late, 1) | dict.fromkeys(down, 2)
    return sorted(fused, key=lambda item: order.get(item.key, 3))


def _reciprocal(ranked: Ranked[K], k: int) -> list[float]:
    return list(map(partial(truediv, ranked.weight), range(k + 1, k + 1 + len(ranked.keys))))


def _scaled(ranked: Ranked[K]) -> list[float]:
    """Return the scaled and weighted scores of a list's distinct keys, in order."""
    if ranked.scores is None:
        count = len(set(ranked.keys))
        return [ranked.weight * ((count - rank) / count) for rank in range(count)]
    first: dict[K, float] = {}
    for key, score in zip(ranked.keys, ranked.scores, strict=True):
        first.setdefault(key, score)
    finite = list(filter(math.isfinite, first.values()))
    lowest, highest = min(finite, default=0.0), max(finite, default=0.0)
    span = highest - lowest
    if span == 0 or not math.isfinite(span):
        return [ranked.weight] * len(first)
    return [ranked.weight * ((one - lowest) / span if math.isfinite(one) else 0.0) for one in first.values()]


def _fuse(
    lists: Sequence[Ranked[K]], shares_of: Callable[[Ranked[K]], Sequence[float]], *, best_only: bool = False
) -> list[Fused[K]]:
    """Score each key by its shares, summed or only the best, and sort; ties by the place of its largest share."""
    places: dict[K, list[tuple[float, float, int, int]]] = {}
    for position, ranked in enumerate(lists):
        if ranked.weight > 0:
            for rank, (key, share) in enumerate(zip(dict.fromkeys(ranked.keys), shares_of(ranked), strict=False)):
                place = -share, -ranked.weight, position, rank
                if key in places:
                    places[key].append(place)
                else:
                    places[key] = [place]
    ordered = []
    for key, found in places.items():
        if len(found) == 1:  # most keys; the same as below, without its costs
            total, weight, position, rank = found[0]
            fused = Fused(key, abs(total), ((position, rank),))
        else:
            share, weight, position, rank = min(found)
            total = share if best_only else sum(map(itemgetter(0), found))
            fused = Fused(key, abs(total), tuple(map(itemgetter(2, 3), found)))
        ordered.append((total, weight, position, rank, fused))
    ordered.sort()  # no two keys have one place
    return list(map(itemgetter(4), ordered))
