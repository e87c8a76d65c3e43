"""The systems that are compared, each over the same index: a question in, document ids out."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import arun
from llama_index_agentic_kb.account.callbacks import with_handlers
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation.corpus import CorpusIndex
from llama_index_agentic_kb.evaluation.dataset import EvaluationQuery
from llama_index_agentic_kb.evaluation.metering import Cost, Meter
from llama_index_agentic_kb.evaluation.recordings import RecordedRetrieval, request_of
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import SourceActivity
from llama_index_agentic_kb.search.embedding_cache import EmbeddingCache
from llama_index_agentic_kb.search.fusion import Ranked, interleave, reciprocal_rank_fusion

__all__ = ["EFFORTS", "PLANNING", "SYSTEMS", "Found", "System", "check_systems", "make_systems"]

DEPTH: Final = 100
"""Documents of each ranked list of the baselines."""

EFFORTS: Final = ("minimal", "low", "medium", "auto")
PLANNING: Final = EFFORTS[1:]
"""Systems that ask a language model for plans."""


@dataclass(slots=True)
class Found:
    """What one question found.

    Args:
        documents: Ids, best first, each once.
        cost: What it cost.
        plan: The queries that were searched.
        activity: The account, as data; ours alone have one.
        warnings: What ours told of: a plan that failed, a search that was lost.
    """

    documents: list[str]
    cost: Cost = field(default_factory=Cost)
    plan: list[str] = field(default_factory=list)
    activity: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class System:
    """Something that finds documents.

    Args:
        name: Names it in reports.
        ask: Asks it a question.
    """

    name: str
    ask: Callable[[EvaluationQuery], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class _Setting:
    """What every system is made of."""

    corpus: CorpusIndex
    documents: int
    llm: LLM | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    record: Path | None = None

    @property
    def meter(self) -> Meter:
        return self.corpus.meter


Ask = Callable[[EvaluationQuery], Awaitable[Found]]


def make_systems(
    names: Sequence[str],
    corpus: CorpusIndex,
    llm: LLM | Mapping[str, LLM] | None,
    *,
    documents: int,
    options: Mapping[str, Any] | None = None,
    record: Path | None = None,
) -> list[System]:
    """Make systems by name.

    Args:
        names: Out of ``SYSTEMS``.
        corpus: What is searched.
        llm: Plans; or one by system's name; None where no system plans.
        documents: Documents of each ranking.
        options: Further arguments of ``AgenticRetriever``, for our own; without any they have their defaults.
        record: A folder in which our own keep each retrieval (``RecordedRetrieval``).

    Raises:
        ConfigurationError: A name is unknown, or a system needs a language model.
    """
    check_systems(names, llm)
    models = {name: _model_of(name, llm) for name in names}
    return [
        System(name, SYSTEMS[name](name, _Setting(corpus, documents, models[name], options or {}, record)))
        for name in names
    ]


def check_systems(names: Sequence[str], llm: LLM | Mapping[str, LLM] | None) -> None:
    """Refuse what ``make_systems`` would refuse, before anything is embedded.

    Raises:
        ConfigurationError: A name is unknown, or a system needs a language model.
    """
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ConfigurationError(f"systems: {', '.join(unknown) or 'none'} is unknown; known are {', '.join(SYSTEMS)}")
    needing = [name for name in names if name in PLANNING and _model_of(name, llm) is None]
    if needing:
        raise ConfigurationError(f"systems: {', '.join(needing)} plan; say where plans come from")


def _model_of(name: str, llm: LLM | Mapping[str, LLM] | None) -> LLM | None:
    return llm.get(name) if isinstance(llm, Mapping) else llm


def _ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return list(dict.fromkeys(node.node.ref_doc_id or node.node.node_id for node in nodes))


# -- the systems that ours are compared with -----------------------------------------------------------------------


def _dense(_: str, setting: _Setting) -> Ask:
    retrievers = [index.as_retriever(similarity_top_k=DEPTH) for index in setting.corpus.indexes.values()]
    return partial(_ask_plain, setting, retrievers)


def _bm25(_: str, setting: _Setting) -> Ask:
    return partial(_ask_plain, setting, list(setting.corpus.lexical.values()))


async def _ask_plain(setting: _Setting, retrievers: Sequence[BaseRetriever], query: EvaluationQuery) -> Found:
    with setting.meter.question() as metered:
        found = _by_score(await _lists(retrievers, query.text))
    return Found(found[: setting.documents], metered.cost, [query.text])


def _hybrid(_: str, setting: _Setting) -> Ask:
    """Reciprocal rank fusion (k = 60) of the dense and the BM25 list, each 100 deep."""
    dense = [index.as_retriever(similarity_top_k=DEPTH) for index in setting.corpus.indexes.values()]
    lexical = list(setting.corpus.lexical.values())

    async def ask(query: EvaluationQuery) -> Found:
        with setting.meter.question() as metered:
            similar = _by_score(await _lists(dense, query.text))
            worded = await _lists(lexical, query.text)
        in_turns = [fused.key for fused in interleave([Ranked(_ids(nodes)) for nodes in worded])]
        fused = reciprocal_rank_fusion([Ranked(similar[:DEPTH]), Ranked(in_turns[:DEPTH])])
        return Found([one.key for one in fused][: setting.documents], metered.cost, [query.text])

    return ask


def _query_fusion(_: str, setting: _Setting) -> Ask:
    """LlamaIndex's QueryFusionRetriever over the dense retrievers; with a model it generates 3 further queries."""
    retrievers: list[BaseRetriever] = [
        index.as_retriever(similarity_top_k=setting.documents) for index in setting.corpus.indexes.values()
    ]
    llm = copy.copy(setting.llm or MockLLM())  # it sets its model's callback manager; with one query it asks none
    fusion = QueryFusionRetriever(
        retrievers,
        llm=llm,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=setting.documents,
        num_queries=1 if setting.llm is None else 4,
        use_async=False,
    )
    llm.callback_manager = setting.corpus.manager

    async def ask(query: EvaluationQuery) -> Found:
        with setting.meter.question() as metered:
            nodes = await asyncio.to_thread(fusion.retrieve, query.text)
        return Found(_ids(nodes)[: setting.documents], metered.cost)

    return ask


async def _lists(retrievers: Sequence[BaseRetriever], text: str) -> list[list[NodeWithScore]]:
    return list(await asyncio.gather(*(asyncio.to_thread(retriever.retrieve, text) for retriever in retrievers)))


def _by_score(lists: Sequence[Sequence[NodeWithScore]]) -> list[str]:
    nodes = [node for found in lists for node in found]
    return _ids(sorted(nodes, key=lambda node: -(node.score or 0.0)))


# -- ours ----------------------------------------------------------------------------------------------------------


def _ours(effort: str, setting: _Setting) -> Ask:
    """``AgenticRetriever`` with its defaults; its cache of vectors is its own, so that no system warms another's."""
    llm = None if effort == "minimal" or setting.llm is None else with_handlers(setting.llm, setting.corpus.manager)
    given = {"similarity_top_k": setting.documents, "embedding_cache": EmbeddingCache(), **setting.options}
    retriever = AgenticRetriever(setting.corpus.sources(), llm=llm, effort=effort, **given)
    return partial(_ask_ours, setting, retriever, None if setting.record is None else setting.record / effort)


async def _ask_ours(
    setting: _Setting, retriever: AgenticRetriever, folder: Path | None, query: EvaluationQuery
) -> Found:
    request = request_of(query)
    with setting.meter.question() as metered:
        retrieval = await arun(retriever.retrieval(request))
    if folder is not None:
        kept = RecordedRetrieval.of(retriever, request, retrieval, metered.replies)
        await asyncio.to_thread(kept.save, folder / f"{quote(query.id, '')}.json")
    metered.cost.searches = _searches(retrieval)
    return Found(
        _ids(retrieval.nodes),
        metered.cost,
        [sub_query.query for sub_query in retrieval.plan.sub_queries],
        [record.to_dict() for record in retrieval.log.records],
        [*retrieval.plan.warnings, *(f"{part.what}: {part.reason}" for part in retrieval.missing)],
    )


def _searches(retrieval: Retrieval) -> int:
    """Count searches as those of the baselines are: dense and BM25 of one source are two."""
    searches = [record for record in retrieval.log.records if isinstance(record, SourceActivity)]
    return sum(max(1, len(record.lanes or ())) for record in searches)


SYSTEMS: Final[Mapping[str, Callable[[str, _Setting], Ask]]] = {
    "dense": _dense,
    "bm25": _bm25,
    "hybrid": _hybrid,
    "query_fusion": _query_fusion,
    **dict.fromkeys(EFFORTS, _ours),
}
"""What can be compared, by name; the efforts are our own."""
