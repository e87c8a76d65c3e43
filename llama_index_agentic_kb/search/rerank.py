"""Reranking with any LlamaIndex node postprocessor, with scores on a common scale.

A cross-encoder (``SentenceTransformerRerank``), a service (``CohereRerank``) or a language model (``LLMRerank``) reads
query and passage together. It receives copies of the nodes, in one call per sub-query; only its scores and its order
are used. ``rank`` ranks records that were not searched for, offline by default.

The scale is that of Azure AI Search's semantic ranker, 0 to 4: 4 means that a passage answers the query completely, 3
that it is relevant but lacks detail, 2 that it answers in part, 1 that it is about the subject, and 0 that it is
irrelevant. Other models have other scores; a ``Calibration`` maps them to this scale. Those in ``CALIBRATIONS`` are
conventions, not measurements: probability 0.5 is mapped to 2.5, the default threshold, so that by default passages
that the model rates as irrelevant are dropped. Fit your own to a few dozen judged pairs of your data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import Call, WorkerPool, arun, deadline_after, earliest, run
from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.llm import metered
from llama_index_agentic_kb.schema.grounding import MAX_RECORDS, RankRecord
from llama_index_agentic_kb.search.tokenizing import document_terms, query_terms

MAX_SCORE: Final = 4.0  # the highest score of the scale
DEFAULT_THRESHOLD: Final = 2.5  # Azure's default minimum of a calibrated score; passages below it are dropped


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone map from a reranker's raw scores to the scale of 0 to 4.

        Calibration.piecewise([(0.0, 0.0), (0.3, 2.5), (1.0, 4.0)])

    Args:
        convert: A non-decreasing function from a finite raw score to a score; results are clipped to 0 to 4.
    """

    convert: Callable[[float], float]

    def __call__(self, raw: float) -> float:
        """Convert a finite raw score to a score from 0 to 4."""
        return min(MAX_SCORE, max(0.0, self.convert(raw)))

    @classmethod
    def piecewise(cls, anchors: Sequence[tuple[float, float]]) -> Calibration:
        """Return a calibration that interpolates linearly between anchors, and is constant outside them.

        Args:
            anchors: At least two (raw score, score) pairs: raw scores increasing, scores 0 to 4 and non-decreasing.

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
        return cls(lambda raw: float(np.interp(raw, raws, scores)))


_UNDECIDED: Final = -math.log(DEFAULT_THRESHOLD / (MAX_SCORE - DEFAULT_THRESHOLD))  # the logit that is mapped to 2
_HALVES: Final = ((0.0, 0.0), (0.5, 2.5), (1.0, 4.0))

CALIBRATIONS: Final[Mapping[str, Calibration]] = MappingProxyType(
    {
        "logit": Calibration(lambda raw: MAX_SCORE / (1 + math.exp(-min(700, max(-700, raw - _UNDECIDED))))),
        "probability": Calibration.piecewise(_HALVES),
        "cohere": Calibration.piecewise(_HALVES),
        "llm-1-10": Calibration.piecewise([(1.0, 0.0), (10.0, 4.0)]),
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
    return CALIBRATIONS.get(_KNOWN.get((class_name, model)) or _KNOWN.get((class_name, None)) or "")


@dataclass(frozen=True, slots=True)
class Reranked:
    """The result of a reranker for one node, by its 0-based position in the input."""

    position: int
    raw: float | None  # the reranker's own score; None if it returned none, or one that is not finite
    score: float | None  # the raw score converted to 0 to 4; None without a calibration or without a raw score


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
        self.postprocessor, self.name = postprocessor, type(postprocessor).__name__
        self.calibration = _calibration(calibration, postprocessor)
        self.top_n, self.timeout = top_n, timeout
        if threshold is None:
            threshold = None if self.calibration is None else DEFAULT_THRESHOLD
        elif self.calibration is None:
            raise ConfigurationError(
                f"reranker: threshold is on the scale of 0 to 4, but {self.name} is not calibrated; give a calibration"
            )
        elif not 0 <= threshold <= MAX_SCORE:
            raise ConfigurationError(f"reranker: threshold must be from 0 to 4, got {threshold}")
        self.threshold = threshold
        self._pool = WorkerPool(f"reranker-{self.name}", max_workers=max_concurrency)

    @property
    def calibrated(self) -> bool:
        """Whether the reranker has a calibration to the scale of 0 to 4."""
        return self.calibration is not None

    async def rank(self, query: str, nodes: Sequence[NodeWithScore], *, deadline: float | None) -> list[Reranked]:
        """Rank nodes for a query; the postprocessor gets copies of them.

        The nodes that it returned are sorted by score if the reranker is calibrated, else in its order.

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
        positions: dict[int | str, int] = {}  # by object, and by id
        for position, copy in reversed(list(enumerate(copies))):
            positions |= {id(copy.node): position, copy.node.node_id: position}
        read: dict[int, Reranked] = {}
        for node in returned:
            found = positions.get(id(node.node), positions.get(node.node.node_id))
            if found is not None:
                judged = self._judged(found, node.score)
                read[found] = max(read.get(found, judged), judged, key=_by_raw)
        if not read:
            raise RetrievalError(f"reranker {self.name} returned none of its {len(copies)} candidates")
        if self.calibration is None:
            return list(read.values())
        ranked = sorted(read.values(), key=_by_raw, reverse=True)
        if ranked[0].raw is None:
            raise RetrievalError(f"reranker {self.name} returned no scores")
        return ranked

    def _judged(self, position: int, score: float | None) -> Reranked:
        if score is None or not math.isfinite(score):
            return Reranked(position, None, None)
        return Reranked(position, float(score), None if self.calibration is None else self.calibration(float(score)))


def _by_raw(judged: Reranked) -> float:
    return -math.inf if judged.raw is None else judged.raw


def as_reranker(reranker: Reranker | BaseNodePostprocessor | None) -> Reranker | None:
    """Wrap a postprocessor in a ``Reranker`` with defaults; return a reranker or None unchanged."""
    return reranker if reranker is None or isinstance(reranker, Reranker) else Reranker(reranker)


def _calibration(calibration: object, postprocessor: BaseNodePostprocessor) -> Calibration | None:
    if calibration is None:
        return calibration_for(type(postprocessor).__name__, str(getattr(postprocessor, "model", None)))
    if isinstance(calibration, str):
        if calibration not in CALIBRATIONS:
            raise ConfigurationError(f"calibration: {calibration!r} is unknown; known are {', '.join(CALIBRATIONS)}")
        return CALIBRATIONS[calibration]
    if not isinstance(calibration, Calibration):
        kind = type(calibration).__name__
        raise ConfigurationError(f"calibration: give a Calibration or the name of one, got {kind}")
    return calibration


# -- ranking records without a search, like Google's rankingConfigs:rank ----------------------------------------------

_K1: Final = 1.2
_B: Final = 0.75  # BM25's usual parameters (Robertson and Zaragoza 2009)

RecordLike = str | RankRecord | Mapping[str, object]
Ranks = Reranker | BaseNodePostprocessor | BaseEmbedding


def rank(
    query: str,
    records: Sequence[RecordLike],
    *,
    top_n: int | None = None,
    ranker: Ranks | None = None,
    timeout: float | None = 30.0,
) -> list[RankRecord]:
    """Rank records for a query.

        rank("tall rocket", ["Saturn V was a tall rocket.", "A small cat."])

    Args:
        query: The question that the records should answer.
        records: At most 200 records: texts, ``RankRecord``s, or mappings with the fields of ``RankRecord``.
        top_n: Maximum number of records returned. Defaults to all.
        ranker: A reranker, any LlamaIndex node postprocessor that reranks, or an embedding model. A reranker's scores
            are calibrated if a calibration is known, else put through the logistic function unless they are from 0 to
            1. An embedding model gives the cosine similarity, at least 0. Defaults to BM25 over the records, divided
            by the highest possible score for the query; it works offline.
        timeout: Seconds after which the ranking is aborted. None if unlimited. Defaults to 30.

    Returns:
        The records with scores from 0 to 1, best first; ties keep the given order.

    Raises:
        InvalidRequestError: The query or a record is empty, there are too many records, or ``top_n`` is below 1.
        RetrievalError: The ranker returned unusable results.
        DeadlineExceededError: The ranking exceeded its timeout.
    """
    return run(_ranked(query, records, top_n, ranker, deadline_after(timeout)))


async def arank(
    query: str,
    records: Sequence[RecordLike],
    *,
    top_n: int | None = None,
    ranker: Ranks | None = None,
    timeout: float | None = 30.0,  # noqa: ASYNC109 (a deadline of the whole ranking, as everywhere here)
) -> list[RankRecord]:
    """Rank records for a query; see ``rank``."""
    return await arun(_ranked(query, records, top_n, ranker, deadline_after(timeout)))


async def _ranked(
    query: str, records: Sequence[RecordLike], top_n: int | None, ranker: Ranks | None, deadline: float | None
) -> list[RankRecord]:
    if not query.strip():
        raise InvalidRequestError("query: is empty")
    if len(records) > MAX_RECORDS:
        raise InvalidRequestError(f"records: {len(records)} given, at most {MAX_RECORDS} are ranked; leave some out")
    if top_n is not None and top_n < 1:
        raise InvalidRequestError(f"top_n: must be at least 1, got {top_n}")
    given = list(map(_record, records))
    texts = [record.text for record in given]
    scores = await _scores(query, texts, ranker, deadline) if texts else {}
    ranked = sorted(scores, key=lambda position: (-scores[position], position))
    return [given[position].model_copy(update={"score": scores[position]}) for position in ranked[:top_n]]


def _record(given: RecordLike) -> RankRecord:
    record = RankRecord.parse({"content": given} if isinstance(given, str) else given)
    if not record.text:
        raise InvalidRequestError("records: a record needs a title or a content")
    return record


async def _scores(query: str, texts: list[str], ranker: Ranks | None, deadline: float | None) -> dict[int, float]:
    """Return scores from 0 to 1 by position."""
    if ranker is None:
        return await Call(sync=partial(_by_words, query, texts), deadline=deadline, what="ranking")
    if isinstance(ranker, BaseEmbedding):
        return await _by_vectors(query, texts, ranker, deadline)
    return await _by_reranker(query, texts, ranker, deadline)


def _by_words(query: str, texts: Sequence[str]) -> dict[int, float]:
    """Score texts by BM25, divided by the highest possible score for the query."""
    languages, terms = zip(*map(document_terms, texts), strict=True)
    documents = [Counter(text.split()) for text in terms]
    wanted = query_terms(query, dict.fromkeys(languages))
    mean = sum(document.total() for document in documents) / len(documents) or 1.0
    counts = [[max(document[form] for form in forms) for forms in wanted] for document in documents]
    weights = []
    for column in zip(*counts, strict=True):
        holders = sum(often > 0 for often in column)
        weights.append(math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5)))
    highest = sum(weights) * (_K1 + 1) or 1.0
    scores = {}
    for position, (document, row) in enumerate(zip(documents, counts, strict=True)):
        length = _K1 * (1 - _B + _B * document.total() / mean)
        total = sum(weight * often * (_K1 + 1) / (often + length) for weight, often in zip(weights, row, strict=True))
        scores[position] = min(1.0, total / highest)
    return scores


async def _by_vectors(query: str, texts: list[str], model: BaseEmbedding, deadline: float | None) -> dict[int, float]:
    what = "embedding model"
    one, every = model.get_query_embedding, model.get_text_embedding_batch
    native, all_native = model.aget_query_embedding, model.aget_text_embedding_batch
    asked = await Call(sync=partial(one, query), native=partial(native, query), deadline=deadline, what=what)
    vectors = await Call(sync=partial(every, texts), native=partial(all_native, texts), deadline=deadline, what=what)
    with np.errstate(all="ignore"):
        rows = np.asarray([asked, *vectors], np.float64)
        rows /= np.abs(rows).max(axis=1, keepdims=True)  # no square overflows
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        cosines = np.nan_to_num(rows[1:] @ rows[0])
    return dict(enumerate(np.clip(cosines, 0, 1).tolist()))


async def _by_reranker(
    query: str, texts: Sequence[str], ranker: Reranker | BaseNodePostprocessor, deadline: float | None
) -> dict[int, float]:
    reranker = ranker if isinstance(ranker, Reranker) else Reranker(ranker)
    nodes = [NodeWithScore(node=TextNode(text=text, id_=f"record {place}")) for place, text in enumerate(texts)]
    ranked = await reranker.rank(query, nodes, deadline=deadline)
    scores = {}
    for place, one in enumerate(ranked):
        if one.score is not None:
            share = one.score / MAX_SCORE
        elif one.raw is None:
            share = 1.0 - place / len(ranked)
        else:
            share = one.raw if 0 <= one.raw <= 1 else 1 / (1 + math.exp(-max(-60.0, min(60.0, one.raw))))
        scores[one.position] = min(1.0, max(0.0, share))
    return scores
