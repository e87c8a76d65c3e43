"""A collection that is kept in parts (shards of one index, or several stores) and searched as one source.

``sources.fan_out`` searches the shards side by side: each has its own timeout, bulkhead and circuit breaker, and the
rule for stragglers applies to shards as to sources. Their lists are merged here. A shard that fails costs its own
documents only; the activity log and ``missing`` name it.

The merge is exact if each shard returns as many nodes as the whole list shall have, and its own search is exact: the
best k of a collection are among the best k of its shards. With fewer nodes a shard (``similarity_top_k`` of the
shards) it errs where more of the best are in one shard; ``docs/scale.md`` has the measured error. BM25 scores depend
on the word frequencies of their own shard; with documents spread at random they differ little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final, Never

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import gather
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, DeniedError, RetrievalError
from llama_index_agentic_kb.search.fusion import Ranked, interleave, merge_by_score
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.search import NodeList, distinct_nodes
from llama_index_agentic_kb.sources.vectors import embed_model_of, model_name_of

_COUNTS: Final = ("candidates", "dropped_by_filter", "dropped_as_unusable")
_ALIKE: Final = ("permissions", "mandatory", "trust", "fields", "filterable")
"""The settings that all shards must share: the collection is filtered, protected and cited by them."""


class ShardedSource(KnowledgeSource):
    """A collection in several shards, each with documents of its own, that plans and answers know as one source.

        ShardedSource("docs", [KnowledgeSource(f"docs-{n}", index=index) for n, index in enumerate(indexes)])

    A request that must have the whole collection sets ``failOnError``: a shard that fails then fails the request, and
    slow shards get their whole timeout.

    Args:
        name: The collection's name.
        shards: Its parts. Their permissions, filters, trust, ``fields`` and ``filterable`` must be equal. Shards with
            one embedding model and one kind of store are merged by their scores, others by turns.
        description: What the collection holds, by which the planner chooses sources. Defaults to the first shard's.
        weight: The weight of its results in rank fusion. Above 0. Default 1.
        similarity_top_k: The number of documents per search. Defaults to the number set by the effort. Shards without
            a number of their own return as many each.

    Raises:
        ConfigurationError: There are fewer than two shards, names are repeated, a shard is no plain knowledge source
            or has params or a weight, or shards differ in a setting that they must share.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[KnowledgeSource],
        description: str = "",
        *,
        weight: float = 1.0,
        similarity_top_k: int | None = None,
    ) -> None:
        self.shards = tuple(shards)
        _check(name, self.shards)
        first = self.shards[0]
        super().__init__(
            name,
            description or first.description,
            retriever_factory=partial(_never, name),
            filters=first.mandatory,
            permissions=first.permissions,
            trust=first.trust,
            filterable=first.filterable,
            fields=first.fields,
            weight=weight,
            similarity_top_k=similarity_top_k,
            hybrid=False,
        )
        models = [embed_model_of(shard) for shard in self.shards]
        names = {"" if model is None else model_name_of(model) for model in models}
        stores = {type(getattr(shard.index, "vector_store", None)) for shard in self.shards}
        self._comparable = len(names) == len(stores) == 1 and "" not in names
        """Whether scores are: they depend on the embedding model and the class of the store."""

    def __repr__(self) -> str:
        """Return the collection's name and the number of its shards."""
        return f"ShardedSource({self.name!r}, {len(self.shards)} shards)"

    @property
    def usual_seconds(self) -> float | None:
        """The usual duration of an answer of the median shard in seconds; None before the first answer."""
        usual = sorted(seconds for shard in self.shards if (seconds := shard.usual_seconds) is not None)
        return usual[(len(usual) - 1) // 2] if usual else None

    async def warm_up(self) -> None:
        """Load the embedding model and the store of each shard."""
        await gather([shard.warm_up() for shard in self.shards])

    def merged(self, lists: Mapping[str, Sequence[NodeList] | Exception], limit: int) -> tuple[NodeList, ...]:
        """Return one list for each search method, merged of those of the shards; raise if all failed."""
        failed = {name: found for name, found in lists.items() if isinstance(found, Exception)}
        if len(failed) == len(lists):
            raise _total_failure(failed)
        by_kind: dict[str, list[NodeList]] = {}
        for name, found in lists.items():
            for ranked in () if isinstance(found, Exception) else found:
                by_kind.setdefault(ranked.kind, []).append(replace(ranked, shard=name))
        first = next(iter(by_kind))
        by_kind[first] += [NodeList(first, [], [], error=error, shard=name) for name, error in failed.items()]
        return tuple(self._one_list(kind, parts, limit) for kind, parts in by_kind.items())

    def _one_list(self, kind: str, parts: list[NodeList], limit: int) -> NodeList:
        nodes, scored = distinct_nodes(parts), _scored(parts)
        if self._comparable and scored is not None:
            order = merge_by_score(scored, [1.0] * len(scored))
        else:
            order = [fused.key for fused in interleave([Ranked(part.keys) for part in parts])]
            nodes = {key: NodeWithScore(node=node.node) for key, node in nodes.items()}  # no scores: they don't compare
        return NodeList(
            kind,
            [nodes[key] for key in order[:limit]],
            order[:limit],
            parts[0].scale if self._comparable else None,
            **{name: sum(map(attrgetter(name), parts)) for name in _COUNTS},
            elapsed_ms=max((part.elapsed_ms for part in parts if part.elapsed_ms is not None), default=None),
            parts=tuple(parts),
        )


def _scored(parts: Sequence[NodeList]) -> list[list[tuple[tuple[str, str], float]]] | None:
    """Return the keys with their scores, by shard; None if a node has no score."""
    rows = [zip(part.keys, part.nodes, strict=True) for part in parts]
    scored = [[(key, node.score) for key, node in row if node.score is not None] for row in rows]
    return scored if sum(map(len, scored)) == sum(len(part.nodes) for part in parts) else None


def _total_failure(failed: Mapping[str, Exception]) -> Exception:
    """Return the error of a search whose shards all failed: of their kind if all were late, or all denied."""
    reason = "every shard failed: " + "; ".join(map(str, failed.values()))
    for alike in (DeadlineExceededError, DeniedError):
        if all(isinstance(error, alike) for error in failed.values()):
            return alike(reason)
    return RetrievalError(reason, dict(failed))


def _check(name: str, shards: Sequence[KnowledgeSource]) -> None:
    if len({shard.name for shard in shards}) < max(2, len(shards)):
        raise ConfigurationError(f"source {name!r}: give at least two shards with different names")
    for shard in shards:
        if isinstance(shard, ShardedSource) or shard.kind != KnowledgeSource.kind:
            raise ConfigurationError(f"source {name!r}: {shard.name!r} can't be a shard; give indexes or retrievers")
        if (shard.params, shard.weight) != (None, 1):
            raise ConfigurationError(f"source {name!r}: {shard.name!r}: shards take no params and no weight")
        for setting in _ALIKE:
            if getattr(shard, setting) != getattr(shards[0], setting):
                word = "filters" if setting == "mandatory" else setting
                raise ConfigurationError(f"source {name!r}: its shards differ in {word}; they must be the same")


def _never(name: str, _: object) -> Never:
    raise RetrievalError(f"source {name!r} is searched shard by shard")
