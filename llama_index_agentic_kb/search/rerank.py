"""Reranking through any LlamaIndex node postprocessor, on one scale.

A cross-encoder (``SentenceTransformerRerank``), a service (``CohereRerank``) or a language model (``LLMRerank``) reads
query and passage together. It is given copies, in one call a sub-query; only its scores and its order are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, WorkerPool, deadline_after, earliest
from llama_index_agentic_kb.errors import ConfigurationError, RetrievalError
from llama_index_agentic_kb.search.calibration import (
    CALIBRATIONS,
    DEFAULT_THRESHOLD,
    HIGHEST,
    Calibration,
    calibration_for,
)

__all__ = ["Reranked", "Reranker", "as_reranker"]


@dataclass(frozen=True, slots=True)
class Reranked:
    """What a reranker says of one node.

    Args:
        position: Where the node stood in what the reranker was given.
        raw: The reranker's own score; None where it gave none.
        score: The same on the scale of 0 to 4; None without a calibration or without a raw score.
    """

    position: int
    raw: float | None
    score: float | None


class Reranker:
    """A LlamaIndex node postprocessor that reranks, and what its scores mean.

        Reranker(SentenceTransformerRerank(model="cross-encoder/ms-marco-MiniLM-L-6-v2"))
        Reranker(my_postprocessor, calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)]), threshold=2.0)

    Args:
        postprocessor: Gives nodes back in a better order, with scores where it has some. Its own ``top_n``, if it has
            one, is raised on a copy to the number of candidates: many default to 2, which would drop evidence that
            nobody meant to drop.
        calibration: From its scores to the scale of 0 to 4: a ``Calibration``, the name of one in ``CALIBRATIONS``, or
            None for the one known for this class and model. Where none is known the reranker is *uncalibrated*: its
            order counts, its scores are not compared between queries, and no threshold applies.
        top_n: Nodes of each sub-query that it keeps at most. None (default) keeps all.
        threshold: Score below which a node is dropped, 0 to 4, unless a request says (``rerankerThreshold``). None
            (default) is 2.5 where the reranker is calibrated, and no threshold where it is not; 0 drops nothing.
        timeout: Seconds for one sub-query's call, waiting for its turn included; then the fused order stays.
            Default 20.
        max_concurrency: Calls on threads that run at once, for all requests. Default 1: a model in this process
            shares its cores and its tokenizer, which fails when two threads use it. Raise it for services. Native
            async postprocessors hold no thread in async requests and are not counted there.

    Raises:
        ConfigurationError: An argument is unusable.
    """

    def __init__(
        self,
        postprocessor: BaseNodePostprocessor,
        *,
        calibration: Calibration | str | None = None,
        top_n: int | None = None,
        threshold: float | None = None,
        timeout: float | None = 20.0,
        max_concurrency: int = 1,
    ) -> None:
        if not isinstance(postprocessor, BaseNodePostprocessor):
            raise ConfigurationError(
                f"reranker: expected a LlamaIndex node postprocessor, got {type(postprocessor).__name__}"
            )
        self.postprocessor = postprocessor
        self.name = type(postprocessor).__name__
        self.calibration = _calibration(calibration, postprocessor)
        self.top_n = top_n
        self.timeout = timeout
        _check(top_n, timeout, max_concurrency)
        if threshold is not None and self.calibration is None:
            raise ConfigurationError(
                f"reranker: threshold is on the scale of 0 to 4, but {self.name} is not calibrated; give a calibration"
            )
        if threshold is not None and not 0 <= threshold <= HIGHEST:
            raise ConfigurationError(f"reranker: threshold must be from 0 to 4, got {threshold}")
        self.threshold = DEFAULT_THRESHOLD if threshold is None and self.calibration is not None else threshold
        self._pool = WorkerPool(f"reranker-{self.name}", max_workers=max_concurrency)

    def __repr__(self) -> str:
        """Name the postprocessor and its calibration."""
        calibration = "uncalibrated" if self.calibration is None else self.calibration.name
        return f"{type(self).__name__}({self.name}, {calibration})"

    @property
    def calibrated(self) -> bool:
        """Whether its scores can be put on the scale of 0 to 4."""
        return self.calibration is not None

    async def rank(self, query: str, nodes: Sequence[NodeWithScore], *, deadline: float | None) -> list[Reranked]:
        """Rank nodes for a query.

        Args:
            query: What they should answer.
            nodes: Candidates; they are not changed, whatever the postprocessor does to what it is given.
            deadline: ``time.monotonic()`` at which it is given up.

        Returns:
            What the reranker gave back, best first: by its scores where it is calibrated, else in its order. Nodes
            that it left out are not there.

        Raises:
            RetrievalError: It gave back something that is no list of nodes, or none of the nodes, or, if calibrated,
                no scores.
            DeadlineExceededError: It was late.
        """
        if not nodes:
            return []
        copies = [NodeWithScore(node=_copy(node.node), score=node.score) for node in nodes]
        able, bundle = self._able(len(copies)), QueryBundle(query)
        given = await Call(
            sync=partial(able.postprocess_nodes, list(copies), query_bundle=bundle),
            native=partial(able.apostprocess_nodes, list(copies), query_bundle=bundle) if _awaits(able) else None,
            deadline=earliest(deadline, deadline_after(self.timeout)),
            pool=self._pool,
            what=f"reranker {self.name}",
        )
        return self._read(given, copies)[: self.top_n]

    def _able(self, count: int) -> BaseNodePostprocessor:
        """Give the postprocessor, or a copy of it whose own ``top_n`` is no smaller than the number of candidates."""
        own = getattr(self.postprocessor, "top_n", None)
        if not isinstance(own, int) or own >= count:
            return self.postprocessor
        return self.postprocessor.model_copy(update={"top_n": count})

    def _read(self, given: Any, copies: Sequence[NodeWithScore]) -> list[Reranked]:
        if not isinstance(given, Sequence) or not all(isinstance(node, NodeWithScore) for node in given):
            raise RetrievalError(f"reranker {self.name} returned no list of NodeWithScore: {type(given).__name__}")
        read: dict[int, Reranked] = {}
        for node in given:
            position = _position(node.node, copies)
            if position is not None:
                judged = self._judged(position, node.score)
                known = read.setdefault(position, judged)
                read[position] = max(known, judged, key=_by_raw)
        if not read:
            raise RetrievalError(f"reranker {self.name} returned none of its {len(copies)} candidates")
        if self.calibration is None:
            return list(read.values())
        if all(judged.raw is None for judged in read.values()):
            raise RetrievalError(f"reranker {self.name} gave no scores")
        return sorted(read.values(), key=_by_raw, reverse=True)

    def _judged(self, position: int, given: Any) -> Reranked:
        raw = None if given is None or not math.isfinite(given) else float(given)
        return Reranked(position, raw, None if raw is None or self.calibration is None else self.calibration(raw))


def as_reranker(given: Reranker | BaseNodePostprocessor | None) -> Reranker | None:
    """Give a reranker as it is, a postprocessor in a reranker with defaults, None as None.

    Raises:
        ConfigurationError: It is none of these.
    """
    return given if given is None or isinstance(given, Reranker) else Reranker(given)


def _by_raw(judged: Reranked) -> float:
    return -math.inf if judged.raw is None else judged.raw


def _copy(node: BaseNode) -> BaseNode:
    """Give a copy into which a postprocessor may write; a deep one would copy what stands behind index nodes."""
    return node.model_copy(update={"metadata": dict(node.metadata), "relationships": dict(node.relationships)})


def _position(node: BaseNode, copies: Sequence[NodeWithScore]) -> int | None:
    """Find a node that came back: it is one of the copies, or it has the id of one."""
    for same in (lambda one: one.node is node, lambda one: one.node.node_id == node.node_id):
        found = next((position for position, one in enumerate(copies) if same(one)), None)
        if found is not None:
            return found
    return None


def _awaits(postprocessor: BaseNodePostprocessor) -> bool:
    """Whether it has an async way of its own; core's default is the sync one on a thread that no bulkhead counts."""
    return type(postprocessor)._apostprocess_nodes is not BaseNodePostprocessor._apostprocess_nodes  # noqa: SLF001


def _calibration(given: Calibration | str | None, postprocessor: BaseNodePostprocessor) -> Calibration | None:
    if isinstance(given, str):
        if given not in CALIBRATIONS:
            raise ConfigurationError(f"calibration: {given!r} is unknown; known are {', '.join(CALIBRATIONS)}")
        return CALIBRATIONS[given]
    if given is not None and not isinstance(given, Calibration):
        raise ConfigurationError(f"calibration: give a Calibration or the name of one, got {type(given).__name__}")
    model = getattr(postprocessor, "model", None)
    return given or calibration_for(type(postprocessor).__name__, model if isinstance(model, str) else None)


def _check(top_n: int | None, timeout: float | None, max_concurrency: int) -> None:
    for field, value in (("top_n", top_n), ("timeout", timeout), ("max_concurrency", max_concurrency)):
        if value is not None and value <= 0:
            raise ConfigurationError(f"reranker: {field} must be above 0, got {value}")
