"""One search of one source: by vectors and by words, and through index nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from llama_index.core import StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import BaseNode, Document, IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode, VectorStoreQueryResult
from pydantic import BaseModel, ConfigDict, PrivateAttr

from llama_index_agentic_kb import KnowledgeSource, Resilience
from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.schema import Condition, FilterNode
from llama_index_agentic_kb.sources import lexical as lexical_sources
from llama_index_agentic_kb.sources.search import NodeList
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import Found, MakeIndex, search

ACME = Condition(key="tenant", value="acme")
TEXTS = ["The Saturn V rocket was 110.6 m tall.", "Snow falls in Oslo.", "Bread is made of flour."]


class Words:
    """A lexical search that gives what it was given, fails or waits."""

    def __init__(self, found: Sequence[BaseNode] = (), error: Exception | None = None, seconds: float = 0.0) -> None:
        self.found = found
        self.error = error
        self.seconds = seconds
        self.asked: list[tuple[str, int, FilterNode | None]] = []
        self.begun = threading.Event()

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        self.asked.append((query, top_k, filters))
        self.begun.set()
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return [NodeWithScore(node=node, score=float(10 - n)) for n, node in enumerate(self.found)]


class ModalStore(SimpleVectorStore):
    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        query.mode = VectorStoreQueryMode.DEFAULT
        query.query_embedding = query.query_embedding or [1.0] * 256
        return super().query(query, **kwargs)


def nodes(texts: Sequence[str] = TEXTS) -> list[TextNode]:
    return [
        TextNode(id_=f"n{n}", text=text, metadata={"tenant": "acme" if n % 2 else "umbrella"})
        for n, text in enumerate(texts)
    ]


def index_of(given: Sequence[BaseNode] | None = None, **kwargs: Any) -> VectorStoreIndex:
    return VectorStoreIndex(list(nodes() if given is None else given), embed_model=HashEmbedding(), **kwargs)


def kinds(result: Found) -> list[str]:
    return [ranked.kind for ranked in result.lists]


def words_of(result: Found) -> NodeList:
    (ranked,) = [ranked for ranked in result.lists if ranked.kind == "lexical"]
    return ranked


def ids(ranked: NodeList) -> list[str]:
    return [node.node_id for node in ranked.nodes]


@pytest.mark.parametrize("store", ["memory", "chroma"])
def test_an_index_is_searched_by_vectors_and_by_words(
    store: str, chroma_index: MakeIndex, embed_model: BaseEmbedding
) -> None:
    """Each way has a list with its own scores and times; a passage that both find is one, in real Chroma too."""
    model = embed_model if store == "chroma" else HashEmbedding()
    index = chroma_index(nodes(), model) if store == "chroma" else VectorStoreIndex(nodes(), embed_model=model)
    result = search(KnowledgeSource("docs", index=index), "How tall is the Saturn V?", top_k=2)
    dense, lexical = result.lists
    assert (dense.kind, lexical.kind) == ("dense", "lexical")
    assert ids(dense)[0] == ids(lexical)[0] == "n0"
    assert (lexical.candidates, lexical.dropped_by_filter, lexical.scale, lexical.error) == (1, 0, None, None)
    assert dense.elapsed_ms is not None
    assert lexical.elapsed_ms is not None
    assert len(result.nodes) == len(set(ids(dense)) | set(ids(lexical)))
    assert lexical.nodes[0].node == next(n.node for n in dense.nodes if n.node_id == "n0")


def test_the_lexical_side_is_asked_for_as_many_under_the_same_filter() -> None:
    """What it returns against the filter is dropped and counted."""
    lexical = Words(nodes())
    source = KnowledgeSource("docs", index=index_of(), hybrid=lexical, filters=ACME, similarity_top_k=7)
    ranked = words_of(search(source, "snow"))
    assert lexical.asked == [("snow", 7, ACME)]
    assert (ids(ranked), ranked.candidates, ranked.dropped_by_filter) == (["n1"], 3, 2)


def test_a_retriever_may_be_given_a_lexical_side() -> None:
    """Beside a factory's retriever it searches as beside an index; the caller's nodes stay as they are."""
    held = nodes()
    source = KnowledgeSource("docs", retriever_factory=lambda _: MemoryRetriever(held), hybrid=Words(held[1:]))
    result = search(source, "rocket", ACME)
    assert (kinds(result), ids(words_of(result))) == (["retriever", "lexical"], ["n1"])
    assert held == nodes()


def test_a_lexical_side_that_fails_costs_nothing() -> None:
    """Its list holds the error."""
    error = OSError("index gone")
    dense, lexical = search(KnowledgeSource("docs", index=index_of(), hybrid=Words(error=error)), "snow").lists
    assert (ids(dense)[0], ids(lexical), lexical.error) == ("n1", [], error)


def test_a_dense_search_that_fails_leaves_the_words() -> None:
    """As long as they find something: nothing found and something failed is a failure."""
    down = MemoryRetriever([], fault=ConnectionError("vector store down"))
    words = KnowledgeSource("docs", retriever=down, hybrid=Words(nodes()))
    dense, lexical = search(words, "snow").lists
    assert (str(dense.error), ids(dense), len(lexical.nodes)) == ("vector store down", [], 3)
    for useless in (Words(), Words(error=OSError("index gone"))):
        with pytest.raises(ConnectionError, match="vector store down"):
            search(KnowledgeSource("docs", retriever=down, hybrid=useless), "snow")


def test_a_lexical_side_that_hangs_takes_no_thread_from_the_dense_one() -> None:
    """It is given up at the deadline; each way has its own bulkhead."""
    source = KnowledgeSource(
        "docs", index=index_of(), hybrid=Words(seconds=1.0), resilience=Resilience(max_concurrency=1)
    )
    for _ in range(3):
        result = search(source, "snow", seconds=0.2)
        assert (ids(result.lists[0])[0], result.lists[0].error) == ("n1", None)
        assert isinstance(words_of(result).error, DeadlineExceededError)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"vector_store_query_mode": "hybrid", "alpha": 0.5}, "hybrid"),
        ({"vector_store_query_mode": VectorStoreQueryMode.SPARSE}, "lexical"),
        ({"vector_store_query_mode": "mmr"}, "dense"),
        ({"doc_ids": ["d"]}, "dense"),
        ({"vector_store_kwargs": {"mmr_threshold": 0.3}}, "dense"),
    ],
)
def test_a_retriever_with_a_way_of_its_own_is_left_to_it(kwargs: dict[str, Any], kind: str) -> None:
    """A store's own hybrid mode, and whatever narrows the retriever, are not doubled by words or got around."""
    context = StorageContext.from_defaults(vector_store=ModalStore())
    index = index_of(storage_context=context)
    source = KnowledgeSource("docs", index=index, retriever_kwargs=kwargs, hybrid=Words(nodes()))
    assert kinds(search(source, "snow")) == [kind]
    with pytest.raises(ConfigurationError, match=r"hybrid=True is impossible: .* in a way of its own"):
        KnowledgeSource("docs", index=index, retriever_kwargs=kwargs, hybrid=True)
    plain = {"vector_store_query_mode": "default", "doc_ids": None}
    assert kinds(search(KnowledgeSource("docs", index=index, retriever_kwargs=plain), "snow")) == ["dense", "lexical"]


def test_what_has_no_nodes_to_list_needs_a_lexical_side() -> None:
    """By default it is searched its own way; ``hybrid=True`` says what is missing."""
    for fields in ({"index": SummaryIndex(nodes())}, {"retriever": MemoryRetriever(nodes())}):
        assert kinds(search(KnowledgeSource("docs", **fields), "snow")) == ["retriever"]
        with pytest.raises(
            ConfigurationError, match=r"source 'docs': hybrid=True is impossible: .* give a lexical search"
        ):
            KnowledgeSource("docs", **fields, hybrid=True)


@pytest.mark.parametrize("store", ["memory", "chroma"])
def test_many_nodes_are_indexed_on_demand_only(
    store: str, chroma_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the bound the dense list says so; ``hybrid=True`` has no bound."""
    monkeypatch.setattr(lexical_sources, "MAX_NODES", 2)
    index = index_of() if store == "memory" else chroma_index(nodes(), HashEmbedding())
    (dense,) = search(KnowledgeSource("docs", index=index), "snow").lists
    assert dense.note == "no lexical search: 3 nodes are more than 2; hybrid=True makes it"
    assert dense.nodes
    assert ids(words_of(search(KnowledgeSource("docs", index=index, hybrid=True), "snow"))) == ["n1"]


@pytest.mark.parametrize("store", ["memory", "chroma"])
def test_it_follows_inserts_and_deletes(store: str, chroma_index: MakeIndex) -> None:
    """The very next search has them, whoever made them."""
    index = index_of([]) if store == "memory" else chroma_index([], HashEmbedding())
    source = KnowledgeSource("docs", index=index)
    assert search(source, "rain").nodes == []
    index.insert(Document(doc_id="d1", text="Rain in Paris"))
    index.insert(Document(doc_id="d2", text="Rain in Oslo"))
    assert len(words_of(search(source, "rain")).nodes) == 2
    index.delete_ref_doc("d1")
    assert [node.text for node in words_of(search(source, "rain")).nodes] == ["Rain in Oslo"]
    index.delete_ref_doc("d2", delete_from_docstore=True)
    assert search(source, "rain").nodes == []


def test_it_is_compared_with_its_store_once_in_a_request(chroma_index: MakeIndex) -> None:
    """The searches of a request for its sub-queries do not count the nodes each."""
    index = chroma_index(nodes(), HashEmbedding())
    collection: Any = index.vector_store.client
    collection.count = Mock(side_effect=collection.count)
    source = KnowledgeSource("docs", index=index)
    lexical = source.prepared(None, 5).lexical
    assert lexical is not None
    assert [[node.node_id for node in lexical.search(words, 5, None)] for words in ("snow", "bread")] == [
        ["n1"],
        ["n2"],
    ]
    assert collection.count.call_count == 1
    assert ids(words_of(search(source, "snow"))) == ["n1"]
    assert collection.count.call_count == 2


def test_it_follows_a_replaced_store() -> None:
    """A store, docstore and struct that are put in place of the index's own have other texts under the same IDs."""
    index, other = index_of(), index_of(nodes(["Rain in Paris"]))
    source = KnowledgeSource("docs", index=index, hybrid=True)
    assert ids(words_of(search(source, "snow"))) == ["n1"]
    index._vector_store, index._docstore, index._index_struct = other.vector_store, other.docstore, other.index_struct
    assert words_of(search(source, "snow")).nodes == []
    assert [node.text for node in words_of(search(source, "rain")).nodes] == ["Rain in Paris"]


def test_index_nodes_are_left_to_the_retriever() -> None:
    """What stands behind them is asked once a search, and found once."""
    inner = MemoryRetriever(["rain in Oslo"])
    door = IndexNode(text="rain", index_id="r", obj=inner)
    index = VectorStoreIndex([TextNode(id_="n", text="rain in Paris")], objects=[door], embed_model=HashEmbedding())
    dense, lexical = search(KnowledgeSource("docs", index=index), "rain").lists
    assert sorted(node.text for node in dense.nodes) == ["rain in Oslo", "rain in Paris"]
    assert ids(lexical) == ["n"]
    assert len(inner.queries) == 1


# -- index nodes ------------------------------------------------------------------------------------------------------


class Tree(BaseRetriever):
    """Gives index nodes that stand for further retrievers, so many a level."""

    def __init__(self, children: Sequence[Any]) -> None:
        super().__init__()
        self.children = list(children)
        self.calls = 0

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.calls += 1
        return [
            NodeWithScore(node=IndexNode(text=f"rain {n}", index_id=f"{id(self)}-{n}", obj=child), score=0.5)
            for n, child in enumerate(self.children)
        ]


class Slotted(Tree):
    """Has state in slots."""

    __slots__ = ("__hidden", "asked")

    def __init__(self) -> None:
        super().__init__(["rain"])
        self.asked = 0
        self.__hidden = "rain in Oslo"

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.asked += 1
        return [*super()._retrieve(query_bundle), NodeWithScore(node=TextNode(text=self.__hidden))]


class Validated(BaseModel, BaseRetriever):
    """A pydantic model, whose private attributes are in slots too."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    _texts: list[str] = PrivateAttr(default_factory=lambda: ["rain in Oslo"])

    def __init__(self) -> None:
        BaseModel.__init__(self)
        BaseRetriever.__init__(self)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        pointer = IndexNode(text="rain", index_id="n", obj=TextNode(text="a rainy node"))
        return [NodeWithScore(node=node) for node in (*(TextNode(text=text) for text in self._texts), pointer)]


class Numbered(int, MemoryRetriever):
    """A number, whose subclasses can't have slots."""

    def __init__(self, number: int = 0) -> None:
        MemoryRetriever.__init__(self, [f"rain {number}"])


def test_a_retriever_may_have_slots() -> None:
    """A view reads and writes the retriever's own, those of a pydantic model too; or it may be unable to have any."""
    slotted = Slotted()
    assert texts(search(KnowledgeSource("docs", retriever=slotted), "rain")) == ["rain 0", "rain in Oslo"]
    assert (slotted.asked, slotted.calls) == (1, 1)
    assert texts(search(KnowledgeSource("docs", retriever=Validated()), "rain")) == ["a rainy node", "rain in Oslo"]
    assert texts(search(KnowledgeSource("docs", retriever=Numbered(7)), "rain")) == ["rain 7"]


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str) -> str:
        return f"echo of {query_str}"


def followed(*objects: IndexNode, filters: Condition | None = None, seconds: float = 20) -> Found:
    """Search an index of index nodes alone."""
    source = KnowledgeSource("docs", index=index_of([], objects=list(objects)), filters=filters)
    return search(source, "rain", top_k=50, seconds=seconds)


def texts(result: Found) -> list[str]:
    return sorted(node.text for node in result.nodes)


def test_one_level_works_as_in_llamaindex() -> None:
    """A node stands for a retriever, a query engine or another node; plain nodes stay."""
    doors = [
        IndexNode(text="rain one", index_id="r", obj=MemoryRetriever(["rain in Oslo"])),
        IndexNode(text="rain two", index_id="q", obj=Echo()),
        IndexNode(text="rain three", index_id="n", obj=TextNode(text="a rainy node")),
    ]
    index = index_of([TextNode(text="rain in Paris")], objects=doors)
    found = texts(search(KnowledgeSource("docs", index=index), "rain", top_k=50))
    assert found == ["a rainy node", "echo of rain", "rain in Oslo", "rain in Paris"]
    assert found == sorted(node.text for node in index.as_retriever(similarity_top_k=9).retrieve("rain"))


@pytest.mark.parametrize("given", ["index", "retriever", "factory"])
def test_a_cycle_ends(given: str) -> None:
    """A retriever that stands behind its own node is followed once, a user's own too, which is left as it is."""
    loop = Tree([])
    loop.children = [loop, MemoryRetriever(["rain in Oslo"])]
    node = IndexNode(text="rain", index_id="loop", obj=loop)
    over: dict[str, Any] = {"index": {"index": index_of([], objects=[node])}, "retriever": {"retriever": loop}}
    found = search(KnowledgeSource("x", **over.get(given, {"retriever_factory": lambda _: loop})), "rain")
    assert loop.calls == 1
    assert "rain in Oslo" in texts(found)
    assert "_handle_recursive_retrieval" not in vars(loop)


class Changing(MemoryRetriever):
    """A user's class that changes the list of LlamaIndex's own method."""

    def retrieve(self, str_or_query_bundle: Any) -> list[NodeWithScore]:
        found = super().retrieve(str_or_query_bundle)
        found.reverse()
        found.insert(1, "rubbish")  # type: ignore[arg-type]
        return found


def test_what_a_retriever_does_to_its_list_is_checked() -> None:
    """Each node keeps its own key in another order, and what was added later is none if it is no node."""
    rain = Changing([TextNode(id_=place, text=f"rain in {place}") for place in ("Oslo", "Paris")])
    (ranked,) = search(KnowledgeSource("x", retriever=rain), "rain").lists
    assert ranked.keys == [(node.node_id, node.text) for node in ranked.nodes]
    assert (len(ranked.nodes), ranked.dropped_as_unusable) == (2, 1)


class Registered(BaseRetriever):
    """A user's class whose subclasses are registered by name."""

    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, name: str) -> None:
        cls.kinds.append(name)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="rain in Oslo"))]


class Registering(Registered, name="rain"):
    """One of them."""


def test_a_search_registers_no_class() -> None:
    """What a user's class does with its subclasses does not happen in a search."""
    found = search(KnowledgeSource("x", retriever=Registering()), "rain")
    assert (texts(found), Registered.kinds) == (["rain in Oslo"], ["rain"])


def test_invalid_nodes_behind_a_node_are_an_error() -> None:
    """A search is not empty without a reason."""
    door = IndexNode(text="rain", index_id="r", obj=MemoryRetriever([TextNode(text="rain", id_="x" * 20_000)]))
    with pytest.raises(RetrievalError, match="no list of NodeWithScore"):
        followed(door)


def test_an_object_that_is_no_retriever_is_not_followed() -> None:
    """Its index node stays, as in LlamaIndex's own retrievers."""
    tree = Tree([None])
    tree.object_map = {f"{id(tree)}-0": "a text"}
    assert texts(search(KnowledgeSource("x", retriever=tree), "rain")) == ["rain 0"]


def test_what_is_behind_a_node_is_checked_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few nodes are checked where they are, so that no other search delays them."""
    asked = list[str]()

    def call(*args: Any, **kwargs: Any) -> Call[object]:
        asked.append(kwargs["what"])
        return Call(*args, **kwargs)

    monkeypatch.setattr("llama_index_agentic_kb.sources.search.Call", call)
    tree = Tree([TextNode(text="rain behind")])
    assert texts(search(KnowledgeSource("x", retriever=tree), "rain")) == ["rain behind"]
    assert asked == ["source 'x'"]


def test_what_is_behind_a_node_must_pass_the_filter() -> None:
    """The effective filter is checked on what comes out, not on the node that led there."""
    inner = MemoryRetriever([TextNode(text="rain", metadata={"tenant": "umbrella"})])
    door = IndexNode(text="rain", index_id="r", obj=inner, metadata={"tenant": "acme"})
    result = followed(door, filters=ACME)
    assert texts(result) == []
    assert result.total("dropped_by_filter") == 1


def test_what_hangs_behind_a_node_is_given_up() -> None:
    """The search's deadline holds for everything that it follows."""
    with MemoryRetriever(["rain"], fault="hang") as hanging:
        door = IndexNode(text="rain", index_id="h", obj=hanging)
        with pytest.raises(DeadlineExceededError, match="retriever behind an index node"):
            followed(door, seconds=0.1)
