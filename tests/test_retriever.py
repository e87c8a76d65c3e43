from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from llama_index.core import PromptTemplate, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from pydantic import ConfigDict

from llama_index_agentic_kb import (
    AgenticQueryEngine,
    AgenticRetriever,
    EffortLimits,
    KnowledgeBase,
    KnowledgeSource,
    ReasoningEffort,
    Resilience,
    RetrievalRequest,
    RetrieverOptions,
)
from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.errors import ConfigurationError, DeniedError, InvalidRequestError
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import AgenticReasoningActivity, FilterNode, Outcome, SourceActivity
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever, ScriptedLLM, ScriptedReply
from tests.aio.conftest import until

QUESTION = "How tall was the rocket of Apollo 11?"
MISSIONS = ["Apollo 11 was launched by a Saturn V rocket.", "Voyager 1 left in 1977.", "Cassini orbited Saturn."]
ROCKETS = ["The Saturn V rocket was 110.6 m tall.", "The Ariane 5 was about 50 m tall.", "A probe is no rocket."]
PLAN = json.dumps(
    {
        "sub_queries": [
            {"id": "q1", "query": "Apollo 11 rocket", "sources": ["missions"], "depends_on": []},
            {"id": "q2", "query": "height of Saturn V", "sources": ["rockets"], "depends_on": ["q1"]},
        ]
    }
)


def index(texts: list[str], model: HashEmbedding | None = None, **metadata: Any) -> VectorStoreIndex:
    nodes = [TextNode(id_=text, text=text, metadata=metadata) for text in texts]
    return VectorStoreIndex(nodes, embed_model=model or HashEmbedding())


def sources(model: HashEmbedding | None = None, *, hybrid: bool | None = None) -> list[KnowledgeSource]:
    model = model or HashEmbedding()
    return [
        KnowledgeSource("missions", "space missions", index=index(MISSIONS, model), hybrid=hybrid),
        KnowledgeSource("rockets", "launch vehicles", index=index(ROCKETS, model), hybrid=hybrid),
    ]


def retrieval(retriever: AgenticRetriever, **request: Any) -> Retrieval:
    return run(retriever.retrieval(RetrievalRequest.parse({"messages": [{"content": QUESTION}], **request})))


def texts(nodes: Any) -> list[str]:
    return [node.text for node in nodes]


def test_without_any_model_the_question_is_searched() -> None:
    """No key, no ``Settings.llm``: nothing is planned, and nothing of LlamaIndex's default is touched."""
    retriever = AgenticRetriever(sources())
    made = retrieval(retriever)
    assert retriever.llm is None
    assert retriever.get_prompts() == {}
    assert [record.type for record in made.log.records] == ["searchIndex", "searchIndex", "agenticReasoning"]
    assert texts(made.nodes)[0] in (MISSIONS[0], ROCKETS[0])
    assert Settings._llm is None


def test_the_plan_is_searched() -> None:
    """The question goes everywhere, each sub-query to its sources; minimal effort and intents make no call."""
    llm = ScriptedLLM(PLAN)
    retriever = AgenticRetriever(sources(), llm=llm)
    made = retrieval(retriever)
    searched = [(r.sub_query_id, r.knowledge_source_name) for r in made.log.records if isinstance(r, SourceActivity)]
    assert searched == [("q0", "missions"), ("q0", "rockets"), ("q1", "missions"), ("q2", "rockets")]
    retrieval(retriever, retrievalReasoningEffort={"kind": "minimal"})
    retrieval(retriever, messages=None, intents=[{"search": "Saturn V"}])
    AgenticRetriever(sources(), llm=llm, effort="minimal").retrieve(QUESTION)
    assert len(llm.calls) == 1


async def test_the_callers_vector_is_used() -> None:
    """A bundle's embedding serves the question's lanes, spaces around the question or not; nothing is embedded."""
    for question in (QUESTION, f"  {QUESTION}\n"):
        model = HashEmbedding()
        retriever = AgenticRetriever(sources(model, hybrid=False), similarity_top_k=1)
        model._calls.clear()
        bundle = QueryBundle(question, embedding=model._vectors(["The Ariane 5 was about 50 m tall."])[0])
        before = list(bundle.embedding or [])
        assert texts(retriever.retrieve(bundle)) == texts(await retriever.aretrieve(bundle)) == [ROCKETS[1]]
        assert model.calls == []
        assert bundle.embedding == before
        assert bundle.query_str == question


def test_similarity_top_k_is_the_number_of_nodes() -> None:
    """It cuts what comes out, and each search gives at least so many; without it the effort decides."""
    many = [f"rocket number {n}" for n in range(30)]
    one = [KnowledgeSource("many", index=index(many))]
    assert len(AgenticRetriever(one, similarity_top_k=25).retrieve("rocket")) == 25
    assert len(AgenticRetriever(one, similarity_top_k=2).retrieve("rocket")) == 2
    assert len(AgenticRetriever(one).retrieve("rocket")) == 10
    limits = {ReasoningEffort.LOW: EffortLimits(documents=4)}
    assert len(AgenticRetriever(one, options=RetrieverOptions(limits=limits)).retrieve("rocket")) == 4
    assert len(retrieval(AgenticRetriever(one, similarity_top_k=5), maxOutputDocuments=3).nodes) == 3


def test_filters_narrow_every_source() -> None:
    """``MetadataFilters`` are pushed down to each source, in conjunction with the request's."""
    acme = KnowledgeSource("acme", index=index(["rocket one"], tenant="acme"))
    other = KnowledgeSource("other", index=index(["rocket two"], tenant="other"))
    filters = MetadataFilters(filters=[MetadataFilter(key="tenant", value="acme")])
    made = retrieval(AgenticRetriever([acme, other], filters=filters))
    assert texts(made.nodes) == ["rocket one"]
    assert [record.outcome for record in made.log.records[:2]] == ["ok", "empty"]
    with pytest.raises(InvalidRequestError, match="is no filter"):
        AgenticRetriever([acme], filters=MetadataFilters(filters=[]))


@pytest.mark.parametrize("question", ["", " \n "])
def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(InvalidRequestError, match="query: the question is empty"):
        AgenticRetriever(sources()).retrieve(question)


def test_from_defaults_takes_what_can_be_searched() -> None:
    """An index, a retriever, or a list of these and of sources, in one line."""
    inner = MemoryRetriever(MISSIONS)
    own = KnowledgeSource("own", retriever=inner)
    assert list(AgenticRetriever.from_defaults(index(ROCKETS)).sources) == ["source_1"]
    assert list(AgenticRetriever.from_defaults(inner, similarity_top_k=2).sources) == ["source_1"]
    mixed = AgenticRetriever.from_defaults([index(ROCKETS).as_retriever(), own, SummaryIndex([])])
    assert list(mixed.sources) == ["source_1", "own", "source_3"]
    assert texts(mixed.retrieve("Voyager"))[0] in (*ROCKETS, MISSIONS[1])
    with pytest.raises(ConfigurationError, match="can't search a str"):
        AgenticRetriever.from_defaults("text")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": []}, "give at least one"),
        ({"sources": [MemoryRetriever([])]}, "expected KnowledgeSource, got MemoryRetriever"),
        ({"similarity_top_k": 0}, "similarity_top_k must be a number above 0, got 0"),
        ({"max_runtime_in_seconds": -1}, "max_runtime_in_seconds must be a number above 0"),
        ({"effort": "huge"}, "effort: 'huge' is unknown"),
        ({"llm": "gpt-4o-mini"}, "llm: expected an LLM of LlamaIndex, .*, got str"),
        ({"reranker": "bge"}, "reranker: expected a LlamaIndex node postprocessor, got str"),
        ({"options": RetrieverOptions(results_processing="some")}, "results_processing: 'some' is unknown"),
        ({"options": RetrieverOptions(max_per_document=0)}, "max_per_document must be at least 1"),
    ],
)
def test_unusable_arguments_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each error names the argument."""
    with pytest.raises(ValueError, match=message):
        AgenticRetriever(**{"sources": sources(), **fields})
    assert issubclass(ConfigurationError, ValueError)


def test_the_planner_prompt_is_llama_indexs_kind_of_prompt() -> None:
    """``get_prompts`` of retriever and engine show it, ``update_prompts`` changes it."""
    llm = ScriptedLLM(PLAN)
    retriever = AgenticRetriever(sources(), llm=llm)
    assert "retriever:planner_prompt" in AgenticQueryEngine(retriever).get_prompts()
    retriever.update_prompts({"planner_prompt": PromptTemplate("Split: {query_str}"), "unknown": PromptTemplate("x")})
    retriever.retrieve(QUESTION)
    assert [call[0].content for call in llm.calls] == [f"Split: {QUESTION}"]


def conversation(llm: ScriptedLLM) -> str:
    prompt = str(llm.calls[-1][-1].content)
    return prompt.partition("<conversation>\n")[2].partition("\n</conversation>")[0]


async def test_a_shared_memory_is_the_conversation() -> None:
    """What a chat engine remembers reaches the planner, sync and async; a request's own messages go before it."""
    memory = ChatMemoryBuffer.from_defaults()
    llm = ScriptedLLM(PLAN)
    retriever = AgenticRetriever(sources(), llm=llm, memory=memory)
    await memory.aput(ChatMessage(role="user", content="Tell me of Apollo 11."))
    await memory.aput(ChatMessage(role="assistant", content="It landed."))
    retriever.retrieve("How tall was its rocket?")
    told = "user: Tell me of Apollo 11.\nassistant: It landed."
    assert conversation(llm) == told
    await retriever.aretrieve("How tall was its rocket?")
    assert conversation(llm) == told
    messages = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Who?"}]
    made = retrieval(retriever, messages=messages)
    assert conversation(llm) == "user: Hello"
    assert made.scope.question == "Who?"


async def test_a_memory_is_read_by_keywords() -> None:
    """As LlamaIndex's chat engines do: a memory of one's own may take nothing else."""

    class Keywords(ChatMemoryBuffer):
        def get(self, *args: Any, **kwargs: Any) -> list[ChatMessage]:
            assert not args
            return super().get(**kwargs)

        async def aget(self, *args: Any, **kwargs: Any) -> list[ChatMessage]:
            assert not args
            return super().get(**kwargs)

    retriever = AgenticRetriever(sources(), memory=Keywords.from_defaults())
    assert retrieval(retriever).missing == []
    assert (await arun(retriever.retrieval(retriever.request_for("Voyager")))).missing == []


@pytest.mark.parametrize(("hangs", "outcome"), [(True, "timeout"), (False, "error")])
def test_a_memory_that_fails_costs_the_conversation_only(hangs: bool, outcome: str) -> None:
    """The question is searched alone, and what is missing is told."""

    class Broken(ChatMemoryBuffer):
        def get(self, *args: Any, **kwargs: Any) -> list[ChatMessage]:
            if hangs:
                time.sleep(4)
            raise ConnectionError("no way to http://me:secret-1234@memory")

    began = time.monotonic()
    made = retrieval(
        AgenticRetriever(sources(), memory=Broken.from_defaults(), max_runtime_in_seconds=1.0 if hangs else None)
    )
    assert time.monotonic() - began < 3
    assert made.nodes
    assert [(part.what, part.outcome) for part in made.missing] == [("memory", outcome)]
    assert "the conversation could not be read" in made.missing[0].reason
    assert "secret" not in made.missing[0].reason


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_verbose_prints_each_search(capsys: pytest.CaptureFixture[str], way: str) -> None:
    """As LlamaIndex's retrievers do: each source with its query and what it found; nothing is printed by default."""
    for verbose in (False, True):
        retriever = AgenticRetriever(sources(), verbose=verbose)
        _ = retriever.retrieve("Voyager") if way == "sync" else await retriever.aretrieve("Voyager")
        printed = capsys.readouterr().out
        assert [word in printed for word in ("missions: Voyager: ok, 3 documents", "rockets: Voyager")] == [verbose] * 2


RAIN = ["rain in Paris", "rain in Oslo"]


class DownEmbedding(HashEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")

    async def _aget_query_embedding(self, query: str) -> list[float]:
        raise ConnectionError("embedding server down")


def source(name: str, **fields: Any) -> KnowledgeSource:
    known = {key: fields.pop(key) for key in ("fault", "latency", "mode") if key in fields}
    return KnowledgeSource(name, retriever=MemoryRetriever(RAIN, **known), **fields)


async def retrieved(way: str, sources: Sequence[KnowledgeSource], **fields: Any) -> Retrieval:
    retriever = AgenticRetriever(sources, **fields)
    flow = retriever.retrieval(retriever.request_for("rain"))
    return run(flow) if way == "sync" else await arun(flow)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("model", [DownEmbedding(), HashEmbedding(latency=8.0)], ids=["down", "slow"])
async def test_without_its_embedding_model_a_source_is_searched_by_words(way: str, model: HashEmbedding) -> None:
    """The lexical search does not wait for the query's vector, and stands when there is none; ``missing`` says why."""
    index = VectorStoreIndex([TextNode(text="rain in Oslo")], embed_model=HashEmbedding())
    index._embed_model = model
    started = time.monotonic()
    made = await retrieved(way, [KnowledgeSource("words", index=index, resilience=Resilience(timeout=2.0))])
    assert time.monotonic() - started < 7.9
    assert [node.text for node in made.nodes] == ["rain in Oslo"]
    (record,) = [record for record in made.log.records if isinstance(record, SourceActivity)]
    assert record.lanes is not None
    dense, lexical = record.lanes
    assert (dense.kind, dense.count, lexical.kind, lexical.count, lexical.error) == ("dense", 0, "lexical", 1, None)
    assert dense.error is not None
    (part,) = made.missing
    assert (part.what, part.outcome.failed, part.sub_query_id) == ("words", True, "q0")
    assert part.reason.startswith("its dense search failed: ")


async def test_a_source_that_can_not_keep_its_filter_is_denied() -> None:
    """Beside others it is left out and told; alone it is a ``DeniedError``."""
    plain = MemoryRetriever(RAIN)
    denied = KnowledgeSource("plain", retriever=plain, filters="tenant eq 'acme'")
    made = await retrieved("sync", [denied, source("well")])
    assert [one.outcome for one in made.log.records] == [Outcome.DENIED, Outcome.OK, Outcome.OK]
    assert made.missing[0].outcome is Outcome.DENIED
    with pytest.raises(DeniedError, match=r"every selected source failed: plain: .* its filter can't be applied"):
        await retrieved("async", [denied])
    with pytest.raises(DeniedError):
        await retrieved("sync", [source("a"), source("b")], filters="tenant eq 'acme'")
    assert plain.queries == []


class Refusing:
    """A lexical index that denies each search."""

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        raise DeniedError(f"{query}: {top_k} {filters}")


async def test_a_list_that_is_denied_is_missing() -> None:
    """Beside a list of the same source that is not."""
    made = await retrieved("async", [KnowledgeSource("rain", index=index(RAIN), hybrid=Refusing())])
    assert [(part.what, part.outcome) for part in made.missing] == [("rain", Outcome.DENIED)]
    assert len(made.nodes) == 2


def test_what_nobody_records_is_the_same() -> None:
    """Several searches of several sources, with and without their records."""
    plain = AgenticRetriever(sources(hybrid=True), llm=ScriptedLLM(PLAN)).retrieve(QUESTION)
    heard = AgenticRetriever(sources(hybrid=True), llm=ScriptedLLM(PLAN), observer=lambda _: None).retrieve(QUESTION)
    assert len(plain) > 3
    assert [(one.text, one.score) for one in plain] == [(one.text, one.score) for one in heard]


class Nested(BaseNodePostprocessor):
    """Asks a retriever of its own."""

    inner: AgenticRetriever
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.inner.retrieve(str(query_bundle))
        return nodes


async def test_a_retriever_within_another_has_its_own_bill() -> None:
    """Also if nobody reads its records: the tokens of its reranker are not the outer one's."""
    reranker = LLMRerank(llm=ScriptedLLM("Doc: 1, Relevance: 9"))
    inner = AgenticRetriever([source("inner")], reranker=reranker)
    spent = []
    for postprocessor in (Nested(inner=inner), reranker):
        made = await retrieved("async", [source("outer")], node_postprocessors=[postprocessor])
        [record] = [one for one in made.log.records if isinstance(one, AgenticReasoningActivity)]
        spent.append(record.reasoning_tokens or 0)
    assert spent[0] == 0 < spent[1]


class LeavingError(Exception):
    """What ends a sync caller from outside, as Ctrl-C does."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_an_interrupted_sync_call_leaves_nothing_behind() -> None:
    """As after Ctrl-C: its searches are counted as abandoned until they return, and nothing waits in a queue."""

    def leave(*_: object) -> None:
        raise LeavingError

    def hang(_: object) -> Literal["hang"]:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return "hang"

    before = signal.signal(signal.SIGALRM, leave)
    with MemoryRetriever(RAIN, fault=hang) as hung:
        hanging = KnowledgeSource("hung", retriever=hung, resilience=Resilience(max_concurrency=1))
        plan = json.dumps({"sub_queries": [{"query": "rain today", "sources": ["hung"]}]})
        try:
            with pytest.raises(LeavingError):
                AgenticRetriever([hanging], llm=ScriptedLLM(plan)).retrieve("rain")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        health = hanging.health
        assert (health.at_work, health.waiting, health.abandoned) == (0, 0, 1)
    assert until(lambda: hanging.health.abandoned == 0)


def searches_of(source: KnowledgeSource) -> list[SourceSearch]:
    """Those alive; others' may be held by tests that ran before."""
    return [one for one in gc.get_objects() if type(one) is SourceSearch and one.source is source]


def test_a_failed_search_is_freed_at_once() -> None:
    """It does not wait for the garbage collector, whose passes would hold up all requests."""

    def down(filters: object) -> MemoryRetriever:
        raise ConnectionError(f"down under {filters}")

    ill = KnowledgeSource("ill", retriever_factory=down)
    kb = KnowledgeBase([source("well"), ill], effort="minimal")
    gc.collect()
    gc.disable()
    try:
        assert kb.retrieve("rain").missing
        assert searches_of(ill) == []
    finally:
        gc.enable()


def test_an_answer_that_is_being_written_holds_its_evidence_only() -> None:
    """What else was found is freed before the model writes; and answers are checked as the engine says by then."""
    well = source("well")
    engine = KnowledgeBase([well], llm=ScriptedLLM("Rain falls."), effort="minimal").as_query_engine(streaming=True)
    engine.grounding = None
    response = engine.query("rain")
    gc.collect()
    assert searches_of(well) == []
    assert str(response) == "Rain falls."
    assert "grounding" not in (response.metadata or {})["agentic_kb"]


async def test_a_reader_that_leaves_a_stream_ends_it() -> None:
    """After one token of an answer the reader goes: no task of ours is left."""
    llm = ScriptedLLM(ScriptedReply("Rain falls in Paris, and in Oslo.", chunk_delay=0.05, chunk_size=4))
    engine = KnowledgeBase([source("well")], llm=llm, effort="minimal").as_query_engine(streaming=True)
    response = await engine.aquery("rain")
    assert isinstance(response, AsyncStreamingResponse)
    tokens = response.async_response_gen()
    assert await anext(tokens)
    await tokens.aclose()
    async with asyncio.timeout(5):
        while asyncio.all_tasks() != {asyncio.current_task()}:  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(0.01)
