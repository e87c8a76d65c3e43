"""Reranking with any LlamaIndex node postprocessor, with scores on a common scale.

A cross-encoder (``SentenceTransformerRerank``), a service (``CohereRerank``) or a language model (``LLMRerank``) reads
query and passage together. It receives copies of the nodes, in one call per sub-query; only its scores and its order
are used.

The scale is that of Azure AI Search's semantic ranker, 0 to 4: 4 means that a passage answers the query completely, 3
that it is relevant but lacks detail, 2 that it answers in part, 1 that it is about the subject, and 0 that it is
irrelevant. Other models have other scores; a ``Calibration`` maps them to this scale. Those in ``CALIBRATIONS`` are
conventions, not measurements: probability 0.5 is mapped to 2.5, the default threshold, so that by default passages
that the model rates as irrelevant are dropped. Fit your own to a few dozen judged pairs of your data.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, WorkerPool, deadline_after, earliest
from llama_index_agentic_kb.errors import ConfigurationError, RetrievalError
from llama_index_agentic_kb.llm import metered

MAX_SCORE: Final = 4.0
"""The highest score of the scale."""
DEFAULT_THRESHOLD: Final = 2.5
"""The default minimum of a calibrated score; passages below it are dropped. Azure's default."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone map from a reranker's raw scores to the scale of 0 to 4.

        Calibration.piecewise([(0.0, 0.0), (0.3, 2.5), (1.0, 4.0)], name="ours")

    Args:
        convert: A non-decreasing function from a finite raw score to a score; results are clipped to 0 to 4.
        name: The name of the calibration.
    """

    convert: Callable[[float], float]
    name: str = "own"

    def __call__(self, raw: float) -> float:
        """Convert a finite raw score to a score from 0 to 4."""
        return min(MAX_SCORE, max(0.0, self.convert(raw)))

    @classmethod
    def piecewise(cls, anchors: Sequence[tuple[float, float]], *, name: str = "own") -> Calibration:
        """Return a calibration that interpolates linearly between anchors, and is constant outside them.

        Args:
            anchors: At least two (raw score, score) pairs: raw scores increasing, scores 0 to 4 and non-decreasing.
            name: The name of the calibration.

        Raises:
            ConfigurationError: The anchors are fewer than two, out of range or not monotone.
        """
        raws, scores = [float(raw) for raw, _ in anchors], [float(score) for _, score in anchors]
        rising = all(first < second for first, second in pairwise(raws)) and scores == sorted(scores)
        in_range = all(map(math.isfinite, raws)) and all(0 <= score <= MAX_SCORE for score in scores)
        if len(anchors) < 2 or not rising or not in_range:  # noqa: PLR2004
            raise ConfigurationError(
                "calibration: give at least two (raw, score) anchors, raw scores rising, scores from 0 to 4 and never "
                f"falling; got {list(anchors)!r}"
            )

        def convert(raw: float) -> float:
            at = min(max(bisect.bisect_right(raws, raw), 1), len(raws) - 1)
            share = (min(max(raw, raws[0]), raws[-1]) - raws[at - 1]) / (raws[at] - raws[at - 1])
            return scores[at - 1] + share * (scores[at] - scores[at - 1])

        return cls(convert, name)

    @classmethod
    def logistic(cls, middle: float, slope: float = 1.0, *, name: str = "own") -> Calibration:
        """Return a calibration for logits: 4 / (1 + exp(-slope (raw - middle))); ``middle`` is mapped to 2.

        Raises:
            ConfigurationError: The slope is not above 0, or a number is not finite.
        """
        if not (math.isfinite(middle) and math.isfinite(slope) and slope > 0):
            raise ConfigurationError(f"calibration: slope must be above 0 and middle finite, got {slope} and {middle}")

        def convert(raw: float) -> float:
            return MAX_SCORE / (1 + math.exp(-min(700.0, max(-700.0, slope * (raw - middle)))))

        return cls(convert, name)


_UNDECIDED: Final = -math.log(DEFAULT_THRESHOLD / (MAX_SCORE - DEFAULT_THRESHOLD))
_HALVES: Final = ((0.0, 0.0), (0.5, 2.5), (1.0, 4.0))

CALIBRATIONS: Final[Mapping[str, Calibration]] = MappingProxyType(
    {
        "logit": Calibration.logistic(_UNDECIDED, name="logit"),
        "probability": Calibration.piecewise(_HALVES, name="probability"),
        "cohere": Calibration.piecewise(_HALVES, name="cohere"),
        "llm-1-10": Calibration.piecewise([(1.0, 0.0), (10.0, 4.0)], name="llm-1-10"),
    }
)
"""Named calibrations.

    logit         raw logits of a model trained to tell relevant from not: cross-encoder/ms-marco-MiniLM-L-6-v2
    probability   such logits after a sigmoid, 0 to 1: BAAI/bge-reranker through sentence-transformers
    cohere        Cohere's relevance scores, 0 to 1; not linear, so that a threshold of your own on 30 to 50 typical
                  queries is better
    llm-1-10      LlamaIndex's LLMRerank with its default prompt, 1 to 10
"""

_MS_MARCO: Final = ("MiniLM-L{}2-v2", "MiniLM-L{}4-v2", "MiniLM-L{}6-v2", "MiniLM-L{}12-v2", "TinyBERT-L{}2-v2")
_BGE: Final = [f"BAAI/bge-reranker-{name}" for name in ("base", "large", "v2-m3")]
_KNOWN: Final[Mapping[tuple[str, str | None], str]] = {
    # sentence-transformers returns these models' raw logits (Identity in their configuration) ...
    **{
        ("SentenceTransformerRerank", f"cross-encoder/ms-marco-{name.format(dash)}"): "logit"
        for name in _MS_MARCO
        for dash in ("-", "")
    },
    # ... and by default applies a sigmoid to models with one label. FlagEmbedding does not.
    **{("SentenceTransformerRerank", name): "probability" for name in _BGE},
    **{("FlagEmbeddingReranker", name): "logit" for name in _BGE},
    ("CohereRerank", None): "cohere",
    ("LLMRerank", None): "llm-1-10",
}


def calibration_for(class_name: str, model: str | None) -> Calibration | None:
    """Return the known calibration for a postprocessor's class and model, by exact names; None if there is none."""
    name = _KNOWN.get((class_name, model)) or _KNOWN.get((class_name, None))
    return None if name is None else CALIBRATIONS[name]


@dataclass(frozen=True, slots=True)
class Reranked:
    """The result of a reranker for one node.

    Args:
        position: The 0-based position of the node in the reranker's input.
        raw: The reranker's own score; None if it returned none, or one that is not finite.
        score: The raw score converted to 0 to 4; None without a calibration or without a raw score.
    """

    position: int
    raw: float | None
    score: float | None


class Reranker:
    """A LlamaIndex node postprocessor for reranking, with the calibration of its scores.

        Reranker(SentenceTransformerRerank(model="cross-encoder/ms-marco-MiniLM-L-6-v2"))
        Reranker(my_postprocessor, calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)]), threshold=2.0)

    Args:
        postprocessor: The postprocessor, which reorders nodes and may score them. If its own ``top_n`` is smaller than
            the number of candidates, a copy with a larger one is used: many default to 2, which would drop evidence
            unintentionally.
        calibration: The map from raw scores to 0 to 4: a ``Calibration``, the name of one in ``CALIBRATIONS``, or None
            for the one known for this class and model. If none is known the reranker is *uncalibrated*: only its order
            is used, scores are not compared between queries, and no threshold applies.
        top_n: The maximum number of nodes kept per sub-query. None (default) keeps all.
        threshold: The score, 0 to 4, below which a node is dropped; a request's ``rerankerThreshold`` overrides it.
            Defaults to 2.5 if the reranker is calibrated, and else to no threshold. 0 drops nothing.
        timeout: The maximum seconds for one sub-query's call, including the wait for a thread; after that the fused
            order is used. Default 20.
        max_concurrency: The maximum number of concurrent calls on threads, over all requests. Default 1: a local model
            shares its cores and its tokenizer, which fails if two threads use it. Increase it for services. Native
            async postprocessors use no thread in async requests, and are not limited there.

    Raises:
        ConfigurationError: An argument has a wrong type or is out of range, or a threshold lacks a calibration.
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
        for field, value in (("top_n", top_n), ("timeout", timeout), ("max_concurrency", max_concurrency)):
            if value is not None and value <= 0:
                raise ConfigurationError(f"reranker: {field} must be above 0, got {value}")
        self.postprocessor = postprocessor
        self.name = type(postprocessor).__name__
        self.calibration = _calibration(calibration, postprocessor)
        self.top_n, self.timeout = top_n, timeout
        if threshold is not None and self.calibration is None:
            raise ConfigurationError(
                f"reranker: threshold is on the scale of 0 to 4, but {self.name} is not calibrated; give a calibration"
            )
        if threshold is not None and not 0 <= threshold <= MAX_SCORE:
            raise ConfigurationError(f"reranker: threshold must be from 0 to 4, got {threshold}")
        self.threshold = DEFAULT_THRESHOLD if threshold is None and self.calibration is not None else threshold
        self._pool = WorkerPool(f"reranker-{self.name}", max_workers=max_concurrency)

    @property
    def calibrated(self) -> bool:
        """Whether the reranker has a calibration to the scale of 0 to 4."""
        return self.calibration is not None

    async def rank(self, query: str, nodes: Sequence[NodeWithScore], *, deadline: float | None) -> list[Reranked]:
        """Rank nodes for a query; the postprocessor gets copies of them.

        Returns:
            One result per node that the reranker returned, best first: sorted by score if the reranker is calibrated,
            else in its order.

        Raises:
            RetrievalError: The reranker returned no list of nodes, none of the candidates or, if calibrated, no
                scores.
            DeadlineExceededError: The call did not finish by the deadline (``time.monotonic()``) or within the timeout.
        """
        if not nodes:
            return []
        copies = []
        for item in nodes:  # not deep copies, which would copy the objects of index nodes
            own = {"metadata": dict(item.node.metadata), "relationships": dict(item.node.relationships)}
            copies.append(NodeWithScore(node=item.node.model_copy(update=own), score=item.score))
        whole, bundle = self.postprocessor, QueryBundle(query)
        own_top_n = getattr(whole, "top_n", None)
        if isinstance(own_top_n, int) and own_top_n < len(copies):
            whole = whole.model_copy(update={"top_n": len(copies)})
        # Core's default async method runs the sync one on a thread that no bulkhead limits.
        is_async = type(whole)._apostprocess_nodes is not BaseNodePostprocessor._apostprocess_nodes  # noqa: SLF001
        with metered(whole) as postprocessor:
            native = partial(postprocessor.apostprocess_nodes, list(copies), query_bundle=bundle)
            returned = await Call(
                sync=partial(postprocessor.postprocess_nodes, list(copies), query_bundle=bundle),
                native=native if is_async else None,
                deadline=earliest(deadline, deadline_after(self.timeout)),
                pool=self._pool,
                what=f"reranker {self.name}",
            )
        return self._read(returned, copies)[: self.top_n]

    def _read(self, returned: object, copies: Sequence[NodeWithScore]) -> list[Reranked]:
        if not isinstance(returned, Sequence) or not all(isinstance(node, NodeWithScore) for node in returned):
            raise RetrievalError(f"reranker {self.name} returned no list of NodeWithScore: {type(returned).__name__}")
        by_id = {copy.node.node_id: position for position, copy in reversed(list(enumerate(copies)))}
        by_object = {id(copy.node): position for position, copy in enumerate(copies)}
        read: dict[int, Reranked] = {}
        for node in returned:
            position = by_object.get(id(node.node), by_id.get(node.node.node_id))
            if position is not None:
                raw = None if node.score is None or not math.isfinite(node.score) else float(node.score)
                score = None if raw is None or self.calibration is None else self.calibration(raw)
                judged = Reranked(position, raw, score)
                read[position] = max(read.get(position, judged), judged, key=_by_raw)
        if not read:
            raise RetrievalError(f"reranker {self.name} returned none of its {len(copies)} candidates")
        if self.calibration is None:
            return list(read.values())
        if all(judged.raw is None for judged in read.values()):
            raise RetrievalError(f"reranker {self.name} returned no scores")
        return sorted(read.values(), key=_by_raw, reverse=True)


def as_reranker(reranker: Reranker | BaseNodePostprocessor | None) -> Reranker | None:
    """Wrap a postprocessor in a ``Reranker`` with defaults; return a reranker or None unchanged."""
    return reranker if reranker is None or isinstance(reranker, Reranker) else Reranker(reranker)


def _by_raw(judged: Reranked) -> float:
    return -math.inf if judged.raw is None else judged.raw


def _calibration(calibration: object, postprocessor: BaseNodePostprocessor) -> Calibration | None:
    if isinstance(calibration, str):
        if calibration not in CALIBRATIONS:
            raise ConfigurationError(f"calibration: {calibration!r} is unknown; known are {', '.join(CALIBRATIONS)}")
        return CALIBRATIONS[calibration]
    if calibration is not None and not isinstance(calibration, Calibration):
        kind = type(calibration).__name__
        raise ConfigurationError(f"calibration: give a Calibration or the name of one, got {kind}")
    model = getattr(postprocessor, "model", None)
    return calibration or calibration_for(type(postprocessor).__name__, model if isinstance(model, str) else None)
