"""The indexed corpus of an evaluation, the compared systems that search it, and the cost of each question."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import arun
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.account import EventHandler, with_handlers
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evaluation.dataset import Dataset, EvaluationQuery
from llama_index_agentic_kb.llm import count_tokens, text_of, usage_of
from llama_index_agentic_kb.retriever import AgenticRetriever, RetrieverOptions
from llama_index_agentic_kb.schema import FilterNode, Message, RetrievalRequest, SourceActivity
from llama_index_agentic_kb.search.embedding import EmbeddingCache
from llama_index_agentic_kb.search.fusion import Ranked, interleave, reciprocal_rank_fusion
from llama_index_agentic_kb.search.lexical import LexicalIndex, lexical_document
from llama_index_agentic_kb.sources import KnowledgeSource

BATCH: Final = 256
COMPLETE: Final = "complete"  # name of the file that marks a cache as complete
DEPTH: Final = 100  # maximum length of each ranked list of the baselines
PLANNING: Final = ("low", "medium", "auto")  # systems that ask a language model for plans

SYSTEMS: Final = ("dense", "bm25", "hybrid", "query_fusion", "minimal", *PLANNING)
"""Names of the systems; the last four are this library's reasoning efforts."""


@dataclass(slots=True)
class Cost:
    """The cost of one question; tokens as reported by the model, or else as counted by LlamaIndex's tokenizer."""

    llm_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    embedding_calls: int = 0
    embedded_texts: int = 0
    searches: int = 0


@dataclass(slots=True)
class QueryResult:
    """One system's result for one question; the runner adds the last four fields."""

    documents: list[str]  # ids, best first, without duplicates
    cost: Cost = field(default_factory=Cost)
    plan: list[str] = field(default_factory=list)  # the queries that were searched
    activity: list[JsonObject] = field(default_factory=list)  # records as JSON data; empty for the baselines
    warnings: list[str] = field(default_factory=list)  # of this library's systems: a failed plan, a failed search
    error: str | None = None
    query_id: str = ""
    kinds: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # by name and k, such as ``R@5``
    milliseconds: float = 0.0  # with concurrent questions


Ask: TypeAlias = Callable[[EvaluationQuery], Awaitable[QueryResult]]
"""A system: an async function from a question to its result."""

_System: TypeAlias = Callable[[EvaluationQuery, Cost], Awaitable[QueryResult]]


class Meter(EventHandler):
    """Counts each question's calls, through the callback events of the models and retrievers that it is attached to.

    Questions may run concurrently, as each has its own context; events outside of a question's are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._question: ContextVar[Cost | None] = ContextVar("question", default=None)
        self._open: dict[str, tuple[Cost, JsonMapping]] = {}  # a stream may end in another context
        self._lock = threading.Lock()

    @contextmanager
    def question(self) -> Iterator[Cost]:
        """Yield the cost of the events in this context and in copies of it."""
        cost = Cost()
        token = self._question.set(cost)
        try:
            yield cost
        finally:
            self._question.reset(token)

    def on_event_start(
        self, event_type: CBEventType, payload: JsonObject | None = None, event_id: str = "", *_: Any, **__: Any
    ) -> str:
        """Note the question of an event."""
        cost = self._question.get()
        if cost is not None:
            with self._lock:
                cost.llm_calls += event_type is CBEventType.LLM
                self._open[event_id] = cost, payload or {}
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: JsonObject | None = None, event_id: str = "", **_: object
    ) -> None:
        """Count an event for its question; a failed call of a model has no tokens."""
        ended = payload or {}
        response = ended.get(EventPayload.RESPONSE) or ended.get(EventPayload.COMPLETION)
        with self._lock:
            cost, asked = self._open.pop(event_id, (Cost(), {}))
            if event_type is CBEventType.LLM and response is not None:
                usage = usage_of(response)
                cost.input_tokens += usage.input_tokens or count_tokens(_prompt_of(asked))
                cost.output_tokens += usage.output_tokens or count_tokens(text_of(response))
            elif event_type is CBEventType.RETRIEVE:
                cost.searches += 1
            elif event_type is CBEventType.EMBEDDING:
                cost.embedding_calls += 1
                cost.embedded_texts += len(ended.get(EventPayload.CHUNKS) or ())


def _prompt_of(asked: JsonMapping) -> str:
    if messages := asked.get(EventPayload.MESSAGES):
        return "\n".join(message.content or "" for message in messages)
    return str(asked.get(EventPayload.PROMPT) or "")


# -- the corpus --------------------------------------------------------------------------------------------------------


class LexicalRetriever(BaseRetriever):
    """BM25 search as a LlamaIndex retriever, and as the lexical part of a hybrid source."""

    def __init__(self, nodes: Sequence[TextNode], manager: CallbackManager) -> None:
        super().__init__(callback_manager=manager)
        self._nodes = {node.node_id: node for node in nodes}
        self._index = LexicalIndex()
        self._index.update(put=[lexical_document(node) for node in nodes])

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Return the best ``top_k`` nodes that match a filter."""
        hits = self._index.search(query, top_k, filters)
        return [NodeWithScore(node=self._nodes[hit.node_id], score=hit.score) for hit in hits]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.search(query_bundle.query_str, DEPTH, None)


class CorpusIndex:
    """All documents of a dataset, with one Chroma collection and one BM25 index for each source.

    Vectors are kept in ``cache``, by model and content. ``source_field`` is the metadata key that divides the corpus
    into sources; ``progress`` is called with (embedded documents, all documents) of a source.
    """

    def __init__(
        self,
        dataset: Dataset,
        embed_model: BaseEmbedding,
        cache: str | Path,
        *,
        source_field: str | None = None,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        import chromadb  # noqa: PLC0415 (takes a second)
        from chromadb.config import Settings  # noqa: PLC0415 (same)

        self.meter = Meter()
        self.manager = CallbackManager([self.meter])
        self.embed_model = with_handlers(embed_model, self.manager)  # a copy: an index sets its model's manager
        groups: dict[str, list[TextNode]] = {}
        for node in dataset.documents:
            name = str(node.metadata.get(source_field, "documents")) if source_field else "documents"
            groups.setdefault(name, []).append(node)
        folder = Path(cache) / f"{dataset.name}-{self._digest(groups)}"
        complete = (folder / COMPLETE).exists()
        if not complete:  # an interrupted run left an incomplete cache
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            _env_file=None,  # no setting from a file in the working directory
            anonymized_telemetry=False,
            chroma_api_impl="chromadb.api.rust.RustBindingsAPI",
        )
        self._database = chromadb.PersistentClient(folder / "chroma", settings)
        self.indexes: dict[str, VectorStoreIndex] = {}
        try:
            self.lexical = {name: LexicalRetriever(nodes, self.manager) for name, nodes in groups.items()}
            for name, nodes in groups.items():
                self.indexes[name] = self._indexed(name, [] if complete else nodes, progress)
        except BaseException:  # an open database would fail the next try in this process
            self.close()
            raise
        (folder / COMPLETE).touch()

    def _indexed(self, name: str, nodes: Sequence[TextNode], progress: Callable[[int, int], None]) -> VectorStoreIndex:
        """Return the index of a source, to which nodes are added first."""
        from llama_index.vector_stores.chroma import ChromaVectorStore  # noqa: PLC0415 (takes a second)

        called = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]  # Chroma restricts names
        # With Chroma's 100 candidates, equal searches found different passages in different processes.
        hnsw: Any = {"hnsw": {"space": "cosine", "ef_search": 400}}
        collection = self._database.get_or_create_collection(called, embedding_function=None, configuration=hnsw)
        store = ChromaVectorStore(chroma_collection=collection)
        for start in range(0, len(nodes), BATCH):
            batch = nodes[start : start + BATCH]
            vectors = self.embed_model.get_text_embedding_batch([one.get_content(MetadataMode.EMBED) for one in batch])
            store.add([node.model_copy(update={"embedding": v}) for node, v in zip(batch, vectors, strict=True)])
            progress(start + len(batch), len(nodes))
        return VectorStoreIndex.from_vector_store(store, self.embed_model, callback_manager=self.manager)

    def _digest(self, groups: Mapping[str, Sequence[TextNode]]) -> str:
        from llama_index_agentic_kb.store.embedding_model import embed_model_fingerprint  # noqa: PLC0415 (loads torch)

        digest = hashlib.sha256(str(embed_model_fingerprint(self.embed_model)).encode())
        for name, nodes in groups.items():
            for node in nodes:
                held = [name, node.node_id, node.get_content(MetadataMode.EMBED), node.metadata]
                digest.update(json.dumps(held, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def similar(self, top_k: int) -> list[BaseRetriever]:
        """Return one dense retriever for each source."""
        return [index.as_retriever(similarity_top_k=top_k) for index in self.indexes.values()]

    def sources(self) -> list[KnowledgeSource]:
        """Return the corpus as hybrid knowledge sources (dense and BM25)."""
        return [
            KnowledgeSource(name, f"documents of {name}", index=index, hybrid=self.lexical[name])
            for name, index in self.indexes.items()
        ]

    def close(self) -> None:
        """Close the vector database."""
        self._database.close()  # type: ignore[attr-defined]  # of the client's class


# -- the systems -------------------------------------------------------------------------------------------------------


def make_systems(names: Sequence[str], corpus: CorpusIndex, llm: LLM | None, *, documents: int) -> dict[str, Ask]:
    """Return the systems of these names, each ranking so many documents; ``llm`` plans for those that need one.

    Raises ``ConfigurationError`` if a name is unknown, or a system lacks its model.
    """
    check_systems(names, llm)
    made: dict[str, Ask] = {}
    for name in names:
        if name == "query_fusion":
            system = _query_fusion(corpus, llm, documents)
        elif name in {"dense", "bm25", "hybrid"}:
            system = partial(_single_query, name, corpus, documents)
        else:
            system = _ours(name, corpus, None if name == "minimal" else llm, documents)
        made[name] = partial(_metered, corpus.meter, system)
    return made


async def _metered(meter: Meter, system: _System, query: EvaluationQuery) -> QueryResult:
    with meter.question() as cost:
        return await system(query, cost)


def check_systems(names: Sequence[str], llm: LLM | None) -> None:
    """Raise ``ConfigurationError`` if a system is unknown or lacks its model, before anything is embedded."""
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ConfigurationError(f"systems: {', '.join(unknown) or 'none'} is unknown; known are {', '.join(SYSTEMS)}")
    needing = [name for name in names if name in PLANNING]
    if needing and llm is None:
        raise ConfigurationError(f"systems: {', '.join(needing)} plan; say where plans come from")


async def _single_query(
    name: str, corpus: CorpusIndex, documents: int, query: EvaluationQuery, cost: Cost
) -> QueryResult:
    """Search by vectors, by BM25, or by both, fused by reciprocal rank (k = 60) from lists of 100."""
    dense = [] if name == "bm25" else corpus.similar(DEPTH)
    lexical = [] if name == "dense" else corpus.lexical.values()
    similar, worded = [
        await asyncio.gather(*(asyncio.to_thread(retriever.retrieve, query.text) for retriever in retrievers))
        for retrievers in (dense, lexical)
    ]
    ids = _ids(sorted(chain.from_iterable(similar or worded), key=lambda node: -(node.score or 0.0)))
    if similar and worded:
        in_turns = [*map(attrgetter("key"), interleave([Ranked(_ids(nodes)) for nodes in worded]))]
        fused = reciprocal_rank_fusion([Ranked(ids[:DEPTH]), Ranked(in_turns[:DEPTH])])
        ids = [*map(attrgetter("key"), fused)]
    return QueryResult(ids[:documents], cost, [query.text])


def _ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return list(dict.fromkeys(node.node.ref_doc_id or node.node.node_id for node in nodes))


def _query_fusion(corpus: CorpusIndex, llm: LLM | None, documents: int) -> _System:
    """Return LlamaIndex's QueryFusionRetriever over dense retrievers; with a model, it generates 3 further queries."""
    model = copy.copy(llm or MockLLM())  # a copy, because its callback manager is set; unused with one query
    fusion = QueryFusionRetriever(
        corpus.similar(documents),
        llm=model,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        similarity_top_k=documents,
        num_queries=1 if llm is None else 4,
        use_async=False,
    )
    model.callback_manager = corpus.manager

    async def ask(query: EvaluationQuery, cost: Cost) -> QueryResult:
        nodes = await asyncio.to_thread(fusion.retrieve, query.text)
        return QueryResult(_ids(nodes)[:documents], cost)

    return ask


def _ours(effort: str, corpus: CorpusIndex, llm: LLM | None, documents: int) -> _System:
    """Return a system with a default ``AgenticRetriever``; each system has its own embedding cache."""
    retriever = AgenticRetriever(
        corpus.sources(),
        llm=None if llm is None else with_handlers(llm, corpus.manager),
        effort=effort,
        similarity_top_k=documents,
        options=RetrieverOptions(embedding_cache=EmbeddingCache()),
    )

    async def ask(query: EvaluationQuery, cost: Cost) -> QueryResult:
        turns = [*query.history, ("user", query.text)]
        messages = [Message.model_validate({"role": role, "content": text}) for role, text in turns]
        retrieval = await arun(retriever.retrieval(RetrievalRequest(messages=messages)))
        records = retrieval.log.records
        # Counted as for the baselines: dense and BM25 searches of a source are two.
        cost.searches = sum(max(1, len(one.lanes or ())) for one in records if isinstance(one, SourceActivity))
        return QueryResult(
            _ids(retrieval.nodes),
            cost,
            [sub_query.query for sub_query in retrieval.outcome.plan.sub_queries],
            [one.to_dict() for one in records],
            [*retrieval.outcome.plan.warnings, *(f"{part.what}: {part.reason}" for part in retrieval.missing)],
        )

    return ask
