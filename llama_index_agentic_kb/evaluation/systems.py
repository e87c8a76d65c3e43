"""The systems that are compared, each over the same index: a question in, document ids out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._flow import arun
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import EvaluationQuery
from llama_index_agentic_kb.evaluation.recordings import ExchangeRecorder, RecordedRetrieval
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    Message,
    ModelQueryPlanningActivity,
    RetrievalRequest,
    SourceActivity,
)
from llama_index_agentic_kb.search.fusion import Ranked, interleave, reciprocal_rank_fusion

__all__ = ["SYSTEMS", "Cost", "Found", "System", "make_systems"]

DEPTH: Final = 100
"""Documents of each ranked list of the baselines."""

EFFORTS: Final = ("minimal", "low", "medium", "auto")


@dataclass(slots=True)
class Cost:
    """What one question cost."""

    llm_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    searches: int = 0
    queries: int = 1
    """Distinct queries, each embedded once."""


@dataclass(slots=True)
class Found:
    """What one question found.

    Args:
        documents: Ids, best first, each once.
        cost: What it cost.
        plan: The queries that were searched.
        activity: The account, as data; ours alone have one.
    """

    documents: list[str]
    cost: Cost = field(default_factory=Cost)
    plan: list[str] = field(default_factory=list)
    activity: list[dict[str, Any]] = field(default_factory=list)


Ask = Callable[[EvaluationQuery], Any]
"""Gives an awaitable of ``Found``."""


@dataclass(frozen=True, slots=True)
class System:
    """Something that finds documents.

    Args:
        name: Names it in reports.
        ask: Asks it a question.
    """

    name: str
    ask: Ask


def make_systems(
    names: Sequence[str],
    corpus: CorpusIndex,
    llm: LLM | None,
    *,
    documents: int,
    options: Mapping[str, Any] | None = None,
    record: Path | None = None,
) -> list[System]:
    """Make systems by name.

    Args:
        names: Out of ``SYSTEMS``.
        corpus: What is searched.
        llm: Plans; None where no system plans.
        documents: Documents of each ranking.
        options: Further arguments of ``AgenticRetriever``, for our own.
        record: A folder in which our own keep each retrieval (``RecordedRetrieval``); ask one question at a time then.

    Raises:
        ConfigurationError: A name is unknown, or a system needs a language model.
    """
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise ConfigurationError(f"systems: {', '.join(unknown)} is unknown; known are {', '.join(SYSTEMS)}")
    needing = [name for name in names if name in ("low", "medium", "auto")]
    if needing and llm is None:
        raise ConfigurationError(f"systems: {', '.join(needing)} plan; say where plans come from")
    return [
        System(name, SYSTEMS[name](name, corpus, llm, documents, {**(options or {}), "record": record}))
        for name in names
    ]


def _ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return list(dict.fromkeys(node.node.ref_doc_id or node.node.node_id for node in nodes))


def _dense(_: str, corpus: CorpusIndex, _llm: LLM | None, documents: int, _options: dict[str, Any]) -> Ask:
    retrievers = [index.as_retriever(similarity_top_k=DEPTH) for index in corpus.indexes.values()]
    return partial(_ask_plain, retrievers, documents)


def _bm25(_: str, corpus: CorpusIndex, _llm: LLM | None, documents: int, _options: dict[str, Any]) -> Ask:
    return partial(_ask_plain, list(corpus.lexical.values()), documents)


async def _ask_plain(retrievers: Sequence[BaseRetriever], documents: int, query: EvaluationQuery) -> Found:
    return Found(_by_score(await _lists(retrievers, query.text))[:documents], Cost(searches=len(retrievers)))


def _hybrid(_: str, corpus: CorpusIndex, _llm: LLM | None, documents: int, _options: dict[str, Any]) -> Ask:
    """Reciprocal rank fusion (k = 60) of the dense and the BM25 list, each 100 deep."""
    dense = [index.as_retriever(similarity_top_k=DEPTH) for index in corpus.indexes.values()]
    lexical = list(corpus.lexical.values())

    async def ask(query: EvaluationQuery) -> Found:
        similar = _by_score(await _lists(dense, query.text))
        worded = await _lists(lexical, query.text)
        in_turns = [fused.key for fused in interleave([Ranked(_ids(nodes)) for nodes in worded])]
        fused = reciprocal_rank_fusion([Ranked(similar[:DEPTH]), Ranked(in_turns[:DEPTH])])
        return Found([one.key for one in fused][:documents], Cost(searches=len(dense) + len(lexical)))

    return ask


def _query_fusion(_: str, corpus: CorpusIndex, llm: LLM | None, documents: int, _options: dict[str, Any]) -> Ask:
    """LlamaIndex's QueryFusionRetriever over the dense retrievers; with a model it generates 3 further queries."""
    retrievers: list[BaseRetriever] = [
        index.as_retriever(similarity_top_k=documents) for index in corpus.indexes.values()
    ]
    fusion = QueryFusionRetriever(
        retrievers,
        llm=llm,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=documents,
        num_queries=1 if llm is None else 4,
        use_async=False,
    )

    async def ask(query: EvaluationQuery) -> Found:
        import asyncio  # noqa: PLC0415

        nodes = await asyncio.to_thread(fusion.retrieve, query.text)
        return Found(_ids(nodes)[:documents], Cost(llm_calls=0 if llm is None else 1, searches=len(retrievers)))

    return ask


def _ours(effort: str, corpus: CorpusIndex, llm: LLM | None, documents: int, options: dict[str, Any]) -> Ask:
    given = None if effort == "minimal" else llm
    folder: Path | None = options.pop("record", None)
    retriever = AgenticRetriever(
        corpus.sources(), llm=given, effort=effort, **{"similarity_top_k": documents, **options}
    )
    return partial(_ask_ours, retriever, None if folder is None else folder / effort)


async def _ask_ours(retriever: AgenticRetriever, folder: Path | None, query: EvaluationQuery) -> Found:
    turns = [*query.history, ("user", query.text)]
    messages = [Message.model_validate({"role": role, "content": text}) for role, text in turns]
    request = RetrievalRequest(messages=messages)
    if folder is None:
        retrieval = await arun(retriever.retrieval(request))
    else:
        retrieval = await _recorded(retriever, request, folder / f"{quote(query.id, safe='')}.json")
    return Found(
        _ids(retrieval.nodes),
        _cost(retrieval),
        [sub_query.query for sub_query in retrieval.plan.sub_queries],
        [record.to_dict() for record in retrieval.log.records],
    )


async def _recorded(retriever: AgenticRetriever, request: RetrievalRequest, file: Path) -> Retrieval:
    recorder = ExchangeRecorder()
    retriever.callback_manager.add_handler(recorder)
    try:
        retrieval = await arun(retriever.retrieval(request))
    finally:
        retriever.callback_manager.remove_handler(recorder)
    file.parent.mkdir(parents=True, exist_ok=True)
    RecordedRetrieval.of(retriever, request, retrieval, recorder).save(file)
    return retrieval


def _cost(retrieval: Retrieval) -> Cost:
    calls = [record for record in retrieval.log.records if isinstance(record, ModelQueryPlanningActivity)]
    searches = [record for record in retrieval.log.records if isinstance(record, SourceActivity)]
    return Cost(
        llm_calls=len(calls),
        input_tokens=sum(record.input_tokens or 0 for record in calls),
        output_tokens=sum(record.output_tokens or 0 for record in calls),
        searches=len(searches),
        queries=len({record.arguments.search for record in searches if record.arguments is not None}),
    )


async def _lists(retrievers: Sequence[BaseRetriever], text: str) -> list[list[NodeWithScore]]:
    import asyncio  # noqa: PLC0415

    return [await asyncio.to_thread(retriever.retrieve, text) for retriever in retrievers]


def _by_score(lists: Sequence[Sequence[NodeWithScore]]) -> list[str]:
    nodes = [node for found in lists for node in found]
    return _ids(sorted(nodes, key=lambda node: -(node.score or 0.0)))


SYSTEMS: Final[Mapping[str, Callable[[str, CorpusIndex, LLM | None, int, dict[str, Any]], Ask]]] = {
    "dense": _dense,
    "bm25": _bm25,
    "hybrid": _hybrid,
    "query_fusion": _query_fusion,
    **dict.fromkeys(EFFORTS, _ours),
}
"""What can be compared, by name; the efforts are our own."""
