"""Ranks given records for a query, like Google's ``rankingConfigs:rank``; offline by default."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb._aio import Call, arun, deadline_after, run
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.grounding import MAX_RECORDS, RankRecord
from llama_index_agentic_kb.search.rerank import MAX_SCORE, Reranked, Reranker, as_reranker
from llama_index_agentic_kb.search.tokenizing import Analyzer

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
    given = [
        one if isinstance(one, RankRecord) else RankRecord.parse({"content": one} if isinstance(one, str) else one)
        for one in records
    ]
    if not all(record.text for record in given):
        raise InvalidRequestError("records: a record needs a title or a content")
    texts = [record.text for record in given]
    if not given:
        return []
    if isinstance(ranker, BaseEmbedding):
        scores = await _by_vectors(query, texts, ranker, deadline)
    elif ranker is not None:
        scores = await _by_reranker(query, texts, ranker, deadline)
    else:
        scores = await Call(sync=partial(_by_words, query, texts), deadline=deadline, what="ranking")
    ranked = sorted(scores, key=lambda position: (-scores[position], position))
    return [given[position].model_copy(update={"score": scores[position]}) for position in ranked[:top_n]]


def _by_words(query: str, texts: Sequence[str]) -> dict[int, float]:
    """Score texts by BM25, divided by the highest possible score for the query."""
    analyzer = Analyzer()
    analyzed = [analyzer.document(text) for text in texts]
    documents = [Counter(terms.split()) for _, terms in analyzed]
    wanted = analyzer.query(query, dict.fromkeys(language for language, _ in analyzed))
    mean = sum(document.total() for document in documents) / len(documents) or 1.0
    weights = []
    for terms in wanted:
        holders = sum(any(term in document for term in terms) for document in documents)
        weights.append(math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5)))
    highest = sum(weights) * (_K1 + 1)
    if not highest:
        return dict.fromkeys(range(len(texts)), 0.0)
    scores = {}
    for position, document in enumerate(documents):
        length = _K1 * (1 - _B + _B * document.total() / mean)
        total = 0.0
        for terms, weight in zip(wanted, weights, strict=True):
            often = max((document[term] for term in terms), default=0)
            total += weight * often * (_K1 + 1) / (often + length) if often else 0.0
        scores[position] = min(1.0, total / highest)
    return scores


async def _by_vectors(query: str, texts: list[str], model: BaseEmbedding, deadline: float | None) -> dict[int, float]:
    asked = await Call(
        sync=partial(model.get_query_embedding, query),
        native=partial(model.aget_query_embedding, query),
        deadline=deadline,
        what="embedding model",
    )
    vectors = await Call(
        sync=partial(model.get_text_embedding_batch, texts),
        native=partial(model.aget_text_embedding_batch, texts),
        deadline=deadline,
        what="embedding model",
    )
    scores = {}
    for position, vector in enumerate(vectors):
        length = math.hypot(*asked) * math.hypot(*vector)
        cosine = sum(map(operator.mul, asked, vector)) / length if length else 0.0
        scores[position] = min(1.0, max(0.0, cosine)) if math.isfinite(cosine) else 0.0
    return scores


async def _by_reranker(
    query: str, texts: Sequence[str], ranker: Reranker | BaseNodePostprocessor, deadline: float | None
) -> dict[int, float]:
    reranker = as_reranker(ranker)
    assert reranker is not None
    nodes = [NodeWithScore(node=TextNode(text=text, id_=f"record {place}")) for place, text in enumerate(texts)]
    ranked: list[Reranked] = await reranker.rank(query, nodes, deadline=deadline)
    return {one.position: _share(one, place, len(ranked)) for place, one in enumerate(ranked)}


def _share(one: Reranked, place: int, count: int) -> float:
    if one.score is not None:
        return min(1.0, max(0.0, one.score / MAX_SCORE))
    if one.raw is None:
        return 1.0 - place / count
    return one.raw if 0 <= one.raw <= 1 else 1 / (1 + math.exp(-max(-60.0, min(60.0, one.raw))))
