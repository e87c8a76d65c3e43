from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from llama_index.core import StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult

from llama_index_agentic_kb import Fields, KnowledgeSource, Resilience, RetrievalRequest
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeniedError,
    InvalidRequestError,
    RetrievalError,
)
from llama_index_agentic_kb.schema import Condition, FilterOperator, all_of
from llama_index_agentic_kb.sources.base import SelectedSource, by_name, select
from llama_index_agentic_kb.sources.search import clean_nodes
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import Found, MakeIndex, search, searching

ACME = Condition(key="tenant", value="acme")


def nodes() -> list[TextNode]:
    """Half of them acme's; years as numbers; one has no tenant at all."""
    metadata = [{"tenant": "acme" if n % 2 else "umbrella", "year": 2000 + n} for n in range(6)]
    made = [TextNode(id_=f"n{n}", text=f"rain report number {n}", metadata=own) for n, own in enumerate(metadata)]
    return [*made, TextNode(id_="bare", text="rain report without metadata")]


def simple_index(given: Sequence[Any] | None = None) -> VectorStoreIndex:
    return VectorStoreIndex(list(given or nodes()), embed_model=HashEmbedding())


def ids(result: Found) -> list[str]:
    return [node.node_id for node in result.nodes]


def test_a_factory_is_given_the_effective_filter() -> None:
    """It is called with mandatory AND caller as LlamaIndex has them, or None; its errors are raised."""
    seen: list[MetadataFilters | None] = []
    index = simple_index()

    def make(filters: MetadataFilters | None) -> BaseRetriever:
        seen.append(filters)
        return index.as_retriever(filters=filters, similarity_top_k=10)

    assert len(ids(search(KnowledgeSource("open", retriever_factory=make)))) == 7
    closed = KnowledgeSource("closed", retriever_factory=make, filters=ACME)
    assert ids(search(closed, filters=Condition(key="year", value=2003))) == ["n3"]
    both = [MetadataFilter(key="tenant", value="acme"), MetadataFilter(key="year", value=2003)]
    assert [one and one.filters for one in seen] == [None, both]
    no_retriever: Any = lambda _: None  # noqa: E731 (one line)
    for filters in (None, ACME):
        with pytest.raises(RetrievalError, match="its retriever_factory returned no retriever"):
            search(KnowledgeSource("bad", retriever_factory=no_retriever, filters=filters))


def test_a_source_is_over_exactly_one_thing() -> None:
    """None, and two, are refused."""
    retriever = MemoryRetriever([])
    with pytest.raises(ConfigurationError, match="source 'x': give exactly one of index, retriever"):
        KnowledgeSource("x")
    with pytest.raises(ConfigurationError, match="exactly one"):
        KnowledgeSource("x", retriever=retriever, index=SummaryIndex([]))
    assert repr(KnowledgeSource("x", retriever=retriever)) == "KnowledgeSource('x', MemoryRetriever)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 0}, "weight must be above 0, got 0"),
        ({"weight": math.nan}, "weight must be above 0"),
        ({"weight": math.inf}, "weight must be above 0"),
        ({"similarity_top_k": -1}, "similarity_top_k must be above 0"),
        ({"similarity_top_k": 0}, "similarity_top_k must be above 0, got 0"),
        ({"similarity_top_k": "5"}, "similarity_top_k: expected a whole number, got str"),
        ({"retriever_kwargs": {"similarity_top_k": "5"}}, "similarity_top_k: expected a whole number, got str"),
        ({"weight": "2"}, "weight: expected a number, got str"),
        ({"name": "  "}, "name must not be empty"),
        ({"name": None}, "name must not be empty, got None"),
        ({"retriever": None, "retriever_factory": 3}, "retriever_factory: expected a function, got int"),
        ({"retriever_kwargs": ["a"]}, "retriever_kwargs: expected a mapping, got list"),
        ({"fields": {"title": "t"}}, "fields: expected Fields, got dict"),
        ({"resilience": {}}, "resilience: expected Resilience, got dict"),
        ({"filterable": ["year"]}, "filterable: expected a mapping from names to FilterField, got list"),
        ({"params": {}}, "params: expected SourceParams, got dict"),
        ({"retriever": "docs"}, "retriever: expected BaseRetriever, got str"),
        ({"retriever": None, "index": ["text"]}, "index: expected BaseIndex, got list"),
    ],
)
def test_unusable_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each error names the field."""
    with pytest.raises(ConfigurationError, match=message):
        KnowledgeSource(**{"name": "x", "retriever": MemoryRetriever([]), **fields})


def test_a_description_and_fields_may_be_none() -> None:
    """They are then those of a source that has none."""
    given: Any = {"description": None, "fields": None}
    source = KnowledgeSource("x", retriever=MemoryRetriever([]), **given)
    assert (source.description, source.fields) == ("", Fields())


def test_a_store_that_ignores_filters_is_not_searched(deaf_index: MakeIndex) -> None:
    """It is found out by a question that nothing answers; a lexical index of our own is searched none the less."""
    index = deaf_index(nodes(), HashEmbedding())
    result = search(KnowledgeSource("deaf", index=index, filters=ACME))
    assert sorted(ids(result)) == ["n1", "n3", "n5"]
    assert [(ranked.kind, ranked.candidates) for ranked in result.lists] == [("dense", 0), ("lexical", 3)]
    with pytest.raises(DeniedError, match="DeafStore was not searched: it ignores filters by 'eq'"):
        search(KnowledgeSource("deaf", index=index, filters=ACME, hybrid=False))


def test_an_empty_store_is_not_trusted_for_good(deaf_index: MakeIndex) -> None:
    """It passes every probe; once it holds nodes it is asked again, and found out."""
    index = deaf_index([], HashEmbedding())
    source = KnowledgeSource("deaf", index=index, filters=ACME, hybrid=False)
    assert ids(search(source)) == []
    index.insert_nodes(nodes())
    with pytest.raises(DeniedError, match="it ignores filters by 'eq'"):
        search(source)


class Obedient(SimpleVectorStore):
    """A store that is not known, and applies filters."""

    asked: ClassVar[list[MetadataFilters | None]] = []

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        self.asked.append(query.filters)
        return super().query(query, **kwargs)


def test_an_unknown_store_is_asked_once_for_each_operator() -> None:
    """What it then returns is what it let through; the question is not repeated."""
    Obedient.asked.clear()
    context = StorageContext.from_defaults(vector_store=Obedient())
    index = VectorStoreIndex(nodes(), storage_context=context, embed_model=HashEmbedding())
    for _ in range(2):
        result = search(KnowledgeSource("other", index=index, filters=ACME, hybrid=False))
        assert (sorted(ids(result)), result.total("dropped_by_filter")) == (["n1", "n3", "n5"], 0)
    assert len(Obedient.asked) == 3
    with pytest.raises(DeniedError, match="opposite of 'any'"):
        search(KnowledgeSource("other", index=index, filters="not (tags/any(t: t eq 'a'))", hybrid=False))


@pytest.mark.parametrize("given", ["filters", "retriever_kwargs"])
def test_a_developers_filter_is_mandatory_wherever_it_is_given(given: str) -> None:
    """A filter among the retriever's arguments holds beside a caller's; it is not replaced by it."""
    acme = MetadataFilters(filters=[MetadataFilter(key="tenant", value="acme")])
    further: dict[str, Any] = {"filters": acme} if given == "filters" else {"retriever_kwargs": {"filters": acme}}
    source = KnowledgeSource("docs", index=simple_index(), **further)
    everyone = Condition(key="year", operator=FilterOperator.GT, value=0)
    assert sorted(ids(search(source, filters=everyone))) == ["n1", "n3", "n5"]


def test_enough_is_left_of_what_is_checked_here() -> None:
    """Where a filter is applied after the store, the documents that pass are found however far down they rank."""
    far = [TextNode(id_=f"d{n}", text="rain " * n, metadata={"year": n}) for n in range(1, 60)]
    source = KnowledgeSource("docs", index=simple_index(far), similarity_top_k=3)
    assert len(ids(search(source, "rain", Condition(key="year", operator=FilterOperator.LT, value=4)))) == 3


def test_what_takes_no_filters_is_denied_under_one() -> None:
    """A plain retriever, and an index that ignores filters, are not searched at all under a filter."""
    retriever = MemoryRetriever(nodes())
    for source in (
        KnowledgeSource("plain", retriever=retriever, filters=ACME),
        KnowledgeSource("summary", index=SummaryIndex(nodes()), filters=ACME),
    ):
        with pytest.raises(DeniedError, match="was not searched: its filter can't be applied"):
            search(source)
    with pytest.raises(DeniedError):
        search(KnowledgeSource("plain", retriever=retriever), filters=ACME)
    assert retriever.queries == []


def test_a_source_has_its_own_number_of_documents() -> None:
    """Its ``similarity_top_k``, also among the retriever's arguments, goes before the effort's."""
    index = simple_index()

    def lengths(source: KnowledgeSource) -> list[int]:
        return [len(ranked.nodes) for ranked in search(source, top_k=4).lists]

    assert lengths(KnowledgeSource("a", index=index)) == [4, 4]
    assert lengths(KnowledgeSource("b", index=index, similarity_top_k=2)) == [2, 2]
    assert lengths(KnowledgeSource("c", index=index, retriever_kwargs={"similarity_top_k": 5})) == [5, 5]


def test_the_health_of_a_source_is_public() -> None:
    """Who is at work, waits and was given up; how its circuit stands; how long an answer takes."""
    with MemoryRetriever(nodes(), fault="hang") as retriever:
        source = KnowledgeSource("slow", retriever=retriever, resilience=Resilience(max_concurrency=3))
        assert (source.health.places, source.health.circuit, source.health.median_seconds) == (3, "closed", None)
        with pytest.raises(DeadlineExceededError):
            run(searching(source, "rain", top_k=3, seconds=0.2))
        assert (source.health.at_work, source.health.waiting, source.health.abandoned) == (0, 0, 1)
    words = KnowledgeSource("words", index=simple_index(), resilience=Resilience(breaker=None))
    run(words.warm_up())
    assert words.health.circuit is None
    assert words.usual_seconds is not None


def test_a_store_that_was_replaced_is_searched() -> None:
    """The source's index may be rebuilt, or its store replaced, between two searches."""
    old, new = simple_index(), simple_index([TextNode(id_="new", text="rain")])
    source = KnowledgeSource("docs", index=old, hybrid=False)
    assert len(ids(search(source))) == 7
    source.index = new
    assert ids(search(source)) == ["new"]
    source.index = old
    old._vector_store, old._index_struct, old._docstore = new._vector_store, new._index_struct, new._docstore
    assert ids(search(source)) == ["new"]
    source.index = SummaryIndex(nodes())
    with pytest.raises(DeniedError, match="SummaryIndex ignores filters"):
        search(source, filters=ACME)


def test_a_chroma_collection_that_was_replaced_is_searched(
    chroma_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store is copied, since its server could hold a thread."""
    model = HashEmbedding()
    index, other = chroma_index(nodes(), model), chroma_index([TextNode(id_="new", text="rain")], model)
    store: Any = index.vector_store
    over_http = SimpleNamespace(timeout=SimpleNamespace(read=None))
    monkeypatch.setattr(store._collection._client, "_session", over_http, raising=False)
    source = KnowledgeSource("docs", index=index, hybrid=False)
    assert len(ids(search(source))) == 7
    store._collection = other.vector_store.client
    assert ids(search(source)) == ["new"]


async def test_a_fused_retriever_that_was_replaced_does_not_block_the_loop() -> None:
    """Whether a retriever awaits is that of its parts, when it is searched."""

    class Native(MemoryRetriever):
        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return self._retrieve(query_bundle)

    fused = QueryFusionRetriever([Native(["rain"])], llm=MockLLM(), num_queries=1)
    source = KnowledgeSource("fused", retriever=fused)
    assert source.prepared(None, 3).traits.native_async
    fused._retrievers = [MemoryRetriever(["rain"])]
    assert not source.prepared(None, 3).traits.native_async


def test_warming_up_searches_once_where_it_can() -> None:
    """An index is searched under its own filter; what can't be warmed up is left alone."""
    for filters in (None, ACME):
        model = HashEmbedding()
        run(KnowledgeSource("s", index=VectorStoreIndex(nodes(), embed_model=model), filters=filters).warm_up())
        assert ("query", ["warm up"]) in model.calls
    retriever = MemoryRetriever(nodes())
    run(KnowledgeSource("s", retriever=retriever).warm_up())
    run(KnowledgeSource("s", index=SummaryIndex(nodes()), filters=ACME).warm_up())
    assert retriever.queries == []


def test_every_source_gives_the_same_keys() -> None:
    """Whatever a source calls them, a document has key, title, content, url, terms and metadata."""
    names = Fields(title="headline", content="body", url="link", key="isbn", terms="tags")
    metadata = {"headline": "H", "body": "B", "link": "u", "isbn": 0, "tags": ["t", "u"]}
    node = TextNode(id_="n", text="Text.", metadata=metadata)
    found = []
    for fields in (names, Fields()):
        source = KnowledgeSource("x", retriever=MemoryRetriever([]), fields=fields)
        found.append(dict(source.source_data(NodeWithScore(node=node))))
    keys = ("doc_key", "title", "content", "url", "terms", "metadata")
    values = [("0", "H", "B", "u", "t, u", metadata), ("n", "n", "Text.", None, None, metadata)]
    assert found == [dict(zip(keys, one, strict=True)) for one in values]


def scored(text: str = "rain", **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(text=text, **fields), score=0.5)


def test_what_is_well_is_left_as_it_is() -> None:
    """The nodes are the source's own, the wrappers are ours; looking twice changes nothing."""
    given = [scored("one", metadata={"a": [1, "b"], "c": {"d": None}}), scored("two")]
    made = clean_nodes(given)
    assert [one.node for one in made] == [one.node for one in given]
    assert all(ours.node is theirs.node and ours is not theirs for ours, theirs in zip(made, given, strict=True))
    assert (made.returned, made.unusable, made.why) == (2, 0, None)
    assert clean_nodes(made) is made


def test_mended_nodes_are_copies() -> None:
    """The source's node keeps what it had."""
    flawed = scored("a\ud800b", id_="n\udfff", metadata={"title": "\ud83d\ude00 \ud83d"})
    (mended,) = clean_nodes([flawed])
    assert mended.node.get_content() == "a\ufffdb"
    assert mended.node.node_id == "n\ufffd"
    assert mended.node.metadata == {"title": "\U0001f600 \ufffd"}
    assert flawed.node.get_content() == "a\ud800b"
    assert flawed.node.metadata["title"] == "\ud83d\ude00 \ud83d"


A, B, C = (Condition(key=key, value=1) for key in "abc")


def plain(name: str, **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([]), **fields)


def selected(*params: dict[str, Any], filters: Condition | None = None) -> dict[str, SelectedSource]:
    request = RetrievalRequest.parse({"messages": [{"content": "q"}], "knowledgeSourceParams": list(params)})
    wiki = plain("wiki")
    wiki.kind = "web"
    return select(by_name([plain("docs", filters=A), wiki]), request, filters)


def test_all_sources_are_searched_unless_ruled_out() -> None:
    """Parameters configure sources; only ``neverQuerySource`` takes one out."""
    assert list(selected()) == ["docs", "wiki"]
    assert list(selected({"knowledgeSourceName": "wiki"})) == ["docs", "wiki"]
    assert list(selected({"knowledgeSourceName": "wiki", "neverQuerySource": True})) == ["docs"]


def test_odata_narrows_with_the_rest() -> None:
    """``filterAddOn`` joins the caller's filter and the request's; what is wrong with it is told by its field."""
    params = {"knowledgeSourceName": "docs", "filters": C.to_dict(), "filterAddOn": "d eq 1"}
    chosen = selected(params, filters=B)
    d = Condition(key="d", value=1)
    assert chosen["docs"].caller == all_of(B, C, d)
    assert chosen["docs"].filters == all_of(A, all_of(B, C, d))
    assert chosen["wiki"].filters == B
    assert selected()["wiki"].filters is None
    where = (
        r"^knowledgeSourceParams\[docs\]\.filterAddOn: OData filter, character 5: the filter ends, expected: a value"
    )
    for never in (False, True):
        with pytest.raises(InvalidRequestError, match=where):
            selected({"knowledgeSourceName": "docs", "filterAddOn": "d eq", "neverQuerySource": never})
