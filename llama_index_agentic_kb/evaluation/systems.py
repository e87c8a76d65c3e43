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
from llama_index_agentic_kb.evaluation.meter import Cost
from llama_index_agentic_kb.replay import Recording
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import Message, RetrievalRequest, SourceActivity
from llama_index_agentic_kb.search.embedding import EmbeddingCache
from llama_index_agentic_kb.search.fusion import Ranked, interleave, reciprocal_rank_fusion

__all__ = ["PLANNING", "SYSTEMS", "Found", "System", "check_systems", "make_systems"]

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
        activity: The account, as data; our systems alone have one.
        warnings: What our systems warned of: a plan that failed, a search that was lost.
    """

    documents: list[str]
    cost: Cost = field(default_factory=Cost)
    plan: list[str] = field(default_factory=list)
    activity: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Ask = Callable[[EvaluationQuery], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class System:
    """Something that finds documents: its name in reports, and how it is asked."""

    name: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class _Setting:
    """What every system is made of."""

    corpus: CorpusIndex
    documents: int
    llm: LLM | None
    record: Path | None


def make_systems(
    names: Sequence[str],
    corpus: CorpusIndex,
    llm: LLM | Mapping[str, LLM] | None,
    *,
    documents: int,
    record: Path | None = None,
) -> list[System]:
    """Make systems by name.

    Args:
        names: Out of ``SYSTEMS``.
        corpus: What is searched.
        llm: Plans; or one by system's name; None where no system plans.
        documents: Documents of each ranking.
        record: A folder in which our systems keep the replies of each question (``Recording``).

    Raises:
        ConfigurationError: A name is unknown, or a system needs a language model.
    """
    check_systems(names, llm)
    return [
        System(name, SYSTEMS[name](name, _Setting(corpus, documents, _model_of(name, llm), record))) for name in names
    ]


def check_systems(names: Sequence[str], llm: LLM | Mapping[str, LLM] | None) -> None:
    """Check what ``make_systems`` checks, before anything is embedded.

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


def _similar(corpus: CorpusIndex, top_k: int = DEPTH) -> list[BaseRetriever]:
    return [index.as_retriever(similarity_top_k=top_k) for index in corpus.indexes.values()]


def _dense(_: str, setting: _Setting) -> Ask:
    return partial(_ask_plain, setting, _similar(setting.corpus))


def _bm25(_: str, setting: _Setting) -> Ask:
    return partial(_ask_plain, setting, list(setting.corpus.lexical.values()))


async def _ask_plain(setting: _Setting, retrievers: Sequence[BaseRetriever], query: EvaluationQuery) -> Found:
    with setting.corpus.meter.question() as reading:
        found = _by_score(await _lists(retrievers, query.text))
    return Found(found[: setting.documents], reading.cost, [query.text])


def _hybrid(_: str, setting: _Setting) -> Ask:
    """Reciprocal rank fusion (k = 60) of the dense and the BM25 list, each 100 deep."""
    dense, lexical = _similar(setting.corpus), list(setting.corpus.lexical.values())

    async def ask(query: EvaluationQuery) -> Found:
        with setting.corpus.meter.question() as reading:
            similar = _by_score(await _lists(dense, query.text))
            worded = await _lists(lexical, query.text)
        in_turns = [fused.key for fused in interleave([Ranked(_ids(nodes)) for nodes in worded])]
        fused = reciprocal_rank_fusion([Ranked(similar[:DEPTH]), Ranked(in_turns[:DEPTH])])
        return Found([item.key for item in fused][: setting.documents], reading.cost, [query.text])

    return ask


def _query_fusion(_: str, setting: _Setting) -> Ask:
    """LlamaIndex's QueryFusionRetriever over the dense retrievers; with a model it generates 3 further queries."""
    llm = copy.copy(setting.llm or MockLLM())  # it sets its model's callback manager; with one query it asks none
    fusion = QueryFusionRetriever(
        _similar(setting.corpus, setting.documents),
        llm=llm,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=setting.documents,
        num_queries=1 if setting.llm is None else 4,
        use_async=False,
    )
    llm.callback_manager = setting.corpus.manager

    async def ask(query: EvaluationQuery) -> Found:
        with setting.corpus.meter.question() as reading:
            nodes = await asyncio.to_thread(fusion.retrieve, query.text)
        return Found(_ids(nodes)[: setting.documents], reading.cost)

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
    retriever = AgenticRetriever(
        setting.corpus.sources(),
        llm=llm,
        effort=effort,
        similarity_top_k=setting.documents,
        options=RetrieverOptions(embedding_cache=EmbeddingCache()),
    )

    async def ask(query: EvaluationQuery) -> Found:
        turns = [*query.history, ("user", query.text)]
        messages = [Message.model_validate({"role": role, "content": text}) for role, text in turns]
        with setting.corpus.meter.question() as reading:
            retrieval = await arun(retriever.retrieval(RetrievalRequest(messages=messages)))
        if setting.record is not None:
            model = "none" if llm is None else str(llm.metadata.model_name)
            kept = Recording(question=query.text, model=model, effort=effort, replies=reading.replies)
            kept.save(setting.record / effort / f"{quote(query.id, '')}.json")
        searches = [record for record in retrieval.log.records if isinstance(record, SourceActivity)]
        # Counted as the baselines': dense and BM25 of one source are two.
        reading.cost.searches = sum(max(1, len(record.lanes or ())) for record in searches)
        return Found(
            _ids(retrieval.nodes),
            reading.cost,
            [sub_query.query for sub_query in retrieval.plan.sub_queries],
            [record.to_dict() for record in retrieval.log.records],
            [*retrieval.plan.warnings, *(f"{part.what}: {part.reason}" for part in retrieval.missing)],
        )

    return ask


SYSTEMS: Final[Mapping[str, Callable[[str, _Setting], Ask]]] = {
    "dense": _dense,
    "bm25": _bm25,
    "hybrid": _hybrid,
    "query_fusion": _query_fusion,
    **dict.fromkeys(EFFORTS, _ours),
}
"""What can be compared, by name; the efforts are our own."""
