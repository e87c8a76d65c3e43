"""Reranking through any LlamaIndex node postprocessor, on one scale.

A cross-encoder (``SentenceTransformerRerank``), a service (``CohereRerank``) or a language model (``LLMRerank``) reads
query and passage together. It gets copies, in one call a sub-query; only its scores and its order are taken.

The scale is that of Azure AI Search's semantic ranker, 0 to 4: 4 means that a passage answers the query completely, 3
that it is relevant but lacks detail, 2 that it answers in part, 1 that it is about the subject, and 0 that it has
nothing to do with it. No model but Azure's own has such scores; a ``Calibration`` says which raw score stands for
which. Those of ``CALIBRATIONS`` are conventions, not measured truths: the point where a model itself is undecided
(probability 0.5) is set to 2.5, the default threshold, so that by default what a model holds to be irrelevant is
dropped. Fit your own to a few dozen judged pairs of your data.
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
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, WorkerPool, deadline_after, earliest
from llama_index_agentic_kb.errors import ConfigurationError, RetrievalError

MAX_SCORE: Final = 4.0
"""The top of the scale."""
DEFAULT_THRESHOLD: Final = 2.5
"""Below this a calibrated score means that the passage is left out; Azure's default."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone map from a reranker's raw scores to the scale of 0 to 4.

        Calibration.piecewise([(0.0, 0.0), (0.3, 2.5), (1.0, 4.0)], name="ours", origin="60 judged pairs, May")

    Args:
        convert: Takes a finite raw score, returns a score; outside 0 to 4 it is cut. It must never fall as raw scores
            rise.
        name: What the calibration is called.
        origin: Where its numbers come from.
    """

    convert: Callable[[float], float]
    name: str = "own"
    origin: str = ""

    def __call__(self, raw: float) -> float:
        """Return the score, 0 to 4, of a finite raw score."""
        return min(MAX_SCORE, max(0.0, self.convert(raw)))

    @classmethod
    def piecewise(cls, anchors: Sequence[tuple[float, float]], *, name: str = "own", origin: str = "") -> Calibration:
        """Return one that is straight between anchors, and flat beyond the first and the last.

        Args:
            anchors: (raw score, score) pairs, at least two, raw scores rising, scores from 0 to 4 and never falling.
            name: What the calibration is called.
            origin: Where the anchors come from.

        Raises:
            ConfigurationError: The anchors make no monotone map.
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

        return cls(convert, name, origin)

    @classmethod
    def logistic(cls, middle: float, slope: float = 1.0, *, name: str = "own", origin: str = "") -> Calibration:
        """Return one for logits: 4 / (1 + exp(-slope (raw - middle))); ``middle`` gets a 2.

        Raises:
            ConfigurationError: The slope is not above 0, or a number is not finite.
        """
        if not (math.isfinite(middle) and math.isfinite(slope) and slope > 0):
            raise ConfigurationError(f"calibration: slope must be above 0 and middle finite, got {slope} and {middle}")

        def convert(raw: float) -> float:
            return MAX_SCORE / (1 + math.exp(-min(700.0, max(-700.0, slope * (raw - middle)))))

        return cls(convert, name, origin)


_UNDECIDED: Final = -math.log(DEFAULT_THRESHOLD / (MAX_SCORE - DEFAULT_THRESHOLD))
_CONVENTION: Final = "a convention: where the model is undecided is the default threshold, 2.5"
_HALVES: Final = ((0.0, 0.0), (0.5, 2.5), (1.0, 4.0))

CALIBRATIONS: Final[Mapping[str, Calibration]] = MappingProxyType(
    {
        "logit": Calibration.logistic(_UNDECIDED, name="logit", origin=f"{_CONVENTION}; -5 is about 0, 5 about 4"),
        "probability": Calibration.piecewise(_HALVES, name="probability", origin=_CONVENTION),
        "cohere": Calibration.piecewise(
            _HALVES,
            name="cohere",
            origin="a convention: Cohere's relevance is not linear, and its middle is taken for the default threshold. "
            "Cohere advises to find one's own threshold on 30 to 50 typical queries",
        ),
        "llm-1-10": Calibration.piecewise(
            [(1.0, 0.0), (10.0, 4.0)],
            name="llm-1-10",
            origin="a convention: the ends of the scale that LlamaIndex's prompt asks for are 0 and 4",
        ),
    }
)
"""Named calibrations.

    logit         raw logits of a model trained to tell relevant from not: cross-encoder/ms-marco-MiniLM-L-6-v2
    probability   the same behind a sigmoid, 0 to 1: BAAI/bge-reranker through sentence-transformers
    cohere        Cohere's relevance scores, 0 to 1
    llm-1-10      LlamaIndex's LLMRerank with its default prompt, 1 to 10
"""

_MS_MARCO: Final = ("MiniLM-L{}2-v2", "MiniLM-L{}4-v2", "MiniLM-L{}6-v2", "MiniLM-L{}12-v2", "TinyBERT-L{}2-v2")
_BGE: Final = [f"BAAI/bge-reranker-{name}" for name in ("base", "large", "v2-m3")]
_KNOWN: Final[Mapping[tuple[str, str | None], str]] = {
    # sentence-transformers has these models' logits as they are (Identity in their configuration) ...
    **{
        ("SentenceTransformerRerank", f"cross-encoder/ms-marco-{name.format(dash)}"): "logit"
        for name in _MS_MARCO
        for dash in ("-", "")
    },
    # ... and puts a sigmoid behind those with one label that say nothing. FlagEmbedding does not.
    **{("SentenceTransformerRerank", name): "probability" for name in _BGE},
    **{("FlagEmbeddingReranker", name): "logit" for name in _BGE},
    ("CohereRerank", None): "cohere",
    ("LLMRerank", None): "llm-1-10",
}


def calibration_for(class_name: str, model: str | None) -> Calibration | None:
    """Return the calibration that is known for a postprocessor's class and model, by exact names; None for none."""
    name = _KNOWN.get((class_name, model)) or _KNOWN.get((class_name, None))
    return None if name is None else CALIBRATIONS[name]


@dataclass(frozen=True, slots=True)
class Reranked:
    """What a reranker says of one node.

    Args:
        position: Where the node stood in what the reranker got.
        raw: The reranker's own score; None where it has none.
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
        postprocessor: Returns nodes in a better order, with scores where it has some. Its own ``top_n``, if it has
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
            nodes: Candidates; they are not changed, whatever the postprocessor does to what it gets.
            deadline: ``time.monotonic()`` at which it is given up.

        Returns:
            What the reranker returned, best first: by its scores where it is calibrated, else in its order. Nodes
            that it left out are not there.

        Raises:
            RetrievalError: It returned something that is no list of nodes, or not one of the nodes, or, if
                calibrated, no scores.
            DeadlineExceededError: It was late.
        """
        if not nodes:
            return []
        copies = [NodeWithScore(node=_copy(node.node), score=node.score) for node in nodes]
        postprocessor, bundle = self.postprocessor, QueryBundle(query)
        own_top_n = getattr(postprocessor, "top_n", None)
        if isinstance(own_top_n, int) and own_top_n < len(copies):
            postprocessor = postprocessor.model_copy(update={"top_n": len(copies)})
        # Core's default async method is the sync one on a thread that no bulkhead counts.
        is_async = type(postprocessor)._apostprocess_nodes is not BaseNodePostprocessor._apostprocess_nodes  # noqa: SLF001
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
    """Return a reranker as it is, a postprocessor in a reranker with defaults, None as None."""
    return reranker if reranker is None or isinstance(reranker, Reranker) else Reranker(reranker)


def _by_raw(judged: Reranked) -> float:
    return -math.inf if judged.raw is None else judged.raw


def _copy(node: BaseNode) -> BaseNode:
    """Return a copy into which a postprocessor may write; a deep one would copy what stands behind index nodes."""
    return node.model_copy(update={"metadata": dict(node.metadata), "relationships": dict(node.relationships)})


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
