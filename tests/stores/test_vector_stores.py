"""What every vector store must do, on real ones: filters in the store or refused, permissions, counts, deletes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import MockEmbedding, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import VectorStoreQuery

from llama_index_agentic_kb import Facet, KnowledgeBase, KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.errors import DeniedError, NotFoundError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, matches
from llama_index_agentic_kb.server.azure import find_passage
from tests.filter_trees import trees
from tests.sources.conftest import search, searching
from tests.stores.kinds import DIMENSIONS, KINDS, Opened, index_over, read_table

Op = FilterOperator

HOSTILE = (
    "it's", "x' OR '1'='1", "x' OR TRUE; --", 'b"c', "b\\", "\\' or 1==1 or a=='", "100%", "a_b", ":name", "é", "",
)  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"word": "a", "number": 1, "ratio": 0.5, "flag": True, "rare": "x"},
    {"word": "b", "number": 2, "ratio": 1.5, "flag": False},
    {"word": "B", "number": -3, "ratio": 1.0},
    {"word": "12", "number": 12, "flag": True},
    {"number": 0},
    {"word": "1e3"},
    *({"word": text, "number": 40 + place} for place, text in enumerate(HOSTILE)),
]
LISTS: list[dict[str, Any]] = [{"tags": tags, "word": "tagged"} for tags in (["a"], ["a", "b"], [], ["c"])]


def nodes(rows: list[dict[str, Any]]) -> list[TextNode]:
    return [
        TextNode(
            id_=f"00000000-0000-0000-0000-{n:012}",  # Qdrant takes no other IDs
            text=f"row {n} item{n:03}",
            metadata=row,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"document {n // 2}")},
        )
        for n, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """The stores' servers and folders."""
    with Opened() as kinds:
        yield kinds


class Filled:
    """A store with rows, as a source."""

    def __init__(self, kinds: Opened, kind: str) -> None:
        self.kind = kind
        self.store: Any = kinds.make(kind)
        self.rows = ROWS if getattr(self.store, "flat_metadata", False) else [*ROWS, *LISTS]
        self.index = index_over(self.store)
        self.index.insert_nodes(nodes(self.rows))
        self.source = KnowledgeSource("rows", index=self.index, hybrid=False)

    def can(self, operator: str) -> str:
        """Return whether the store applies an operator, exactly where it does."""
        refused = []
        for condition in ATOMS[operator]:
            found = self.found(condition)
            assert found in (self.expected(condition), None), condition
            refused.append(found is None)
        return "refused" if all(refused) else "partly" if any(refused) else "yes"

    def expected(self, tree: FilterNode) -> set[int]:
        return {n for n, row in enumerate(self.rows) if matches(tree, row)}

    def found(self, tree: FilterNode) -> set[int] | None:
        """Return the rows that the store itself let through; None if it was not searched."""
        try:
            result = search(self.source, "row", tree, top_k=100)
        except DeniedError:
            return None
        assert result.total("dropped_by_filter") == 0, "the store returned what does not pass"
        return {int(node.node_id[-12:]) for node in result.nodes}


@pytest.fixture(scope="module", params=KINDS)
def filled(request: pytest.FixtureRequest, opened: Opened) -> Filled:
    """A store of each kind, with the rows."""
    return Filled(opened, request.param)


ATOMS: dict[str, list[Condition]] = {
    "eq": [Condition(key=key, value=row[key]) for row in ROWS for key in row] + [Condition(key="absent", value="x")],
    "ne": [
        Condition(key=key, operator=Op.NE, value=value) for key, value in (("word", "a"), ("number", 1), ("flag", True))
    ],
    "gt": [Condition(key="number", operator=order, value=1) for order in (Op.GT, Op.GE, Op.LT, Op.LE)]
    + [Condition(key="ratio", operator=Op.GT, value=0.75), Condition(key="number", operator=Op.LE, value=1.5)],
    "text order": [Condition(key="word", operator=order, value="b") for order in (Op.GT, Op.GE, Op.LT, Op.LE)],
    "in": [
        Condition(key="word", operator=Op.IN, value=["a", *HOSTILE]),
        Condition(key="number", operator=Op.IN, value=[1, 2.0, -3]),
        Condition(key="flag", operator=Op.IN, value=[True, False]),
    ],
    "nin": [
        Condition(key="word", operator=Op.NIN, value=["a", *HOSTILE]),
        Condition(key="number", operator=Op.NIN, value=[1, 2]),
    ],
    "any": [Condition(key="tags", operator=Op.ANY, value=value) for value in (["a"], ["b", "c"], ["it's"])],
    "exists": [Condition(key=key, operator=Op.EXISTS, value=True) for key in ("word", "tags", "absent")],
    "is empty": [Condition(key=key, operator=Op.IS_EMPTY, value=True) for key in ("word", "rare", "tags", "absent")],
    "contains": [Condition(key="word", operator=Op.TEXT_MATCH, value=value) for value in ("b", "' OR '", "%", "\\")],
    "contains, any case": [Condition(key="word", operator=Op.TEXT_MATCH_INSENSITIVE, value=v) for v in ("B", "oR")],
}


@pytest.mark.parametrize("operator", ATOMS)
def test_the_store_applies_each_operator_or_is_not_searched(filled: Filled, operator: str) -> None:
    """What comes back is exactly what passes, before our own check, as the documentation's table says."""
    assert dict(read_table())[operator][filled.kind] == filled.can(operator)


@pytest.mark.parametrize("operator", [*ATOMS, "other types"])
def test_opposites_are_applied_or_refused(filled: Filled, operator: str) -> None:
    """What is unknown, as a number that is asked for text, has no opposite that holds."""
    others = [
        Condition(key=key, operator=Op.TEXT_MATCH, value="1") for key in ("number", "flag", "tags", "absent", "word")
    ]
    for condition in ATOMS.get(operator, others):
        tree = FilterGroup(logic=FilterLogic.NOT, filters=[condition])
        assert filled.found(tree) in (filled.expected(tree), None), condition


def test_keys_are_no_code_either(filled: Filled) -> None:
    """A key that a store's language can't hold is refused, or is a key that no document has."""
    for key in ("word' = 'a' OR '1'='1", 'word" or 1==1 or "a', "a.b", "word) OR (1=1", ":name", "doc id"):
        for operator in (Op.EQ, Op.GT):
            assert filled.found(Condition(key=key, operator=operator, value=1)) in (set(), None)


SIMPLE = [one for name in ("eq", "ne", "gt", "in", "nin") for one in ATOMS[name]]


def test_groups_of_any_depth_are_applied(filled: Filled) -> None:
    """Any tree of equalities and orders selects in the store what it selects here; in memory of lists' items too."""
    more = [*ATOMS["any"], *ATOMS["exists"]] if filled.kind == "in memory" else []

    @settings(max_examples=50 if filled.kind in ("in memory", "Chroma") else 20, deadline=None, derandomize=True)
    @given(trees(st.sampled_from([*SIMPLE, *more])))
    def check(tree: FilterNode) -> None:
        assert filled.found(tree) == filled.expected(tree)

    check()


ACCESS = Permissions(tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public")
PEOPLE = [
    Principal(tenant="acme", user="bob", groups=frozenset({"managers"})),
    Principal(tenant="acme", user="eve' OR '1'='1", groups=frozenset({"x' OR TRUE --", "man"})),
    Principal(tenant="x' OR '1'='1", user="bob", groups=frozenset({"managers"})),
]
STAMPS: list[dict[str, Any]] = [
    {"tenant": "acme", "public": True},
    {"tenant": "acme", "owner": "bob"},
    {"tenant": "acme", "groups": ["managers"]},
    {"tenant": "acme", "users": ["eve' OR '1'='1"]},
    {"tenant": "beta", "public": True},
    {"tenant": "beta", "owner": "bob", "groups": ["managers"]},
]
SEEN = [{0, 1, 2}, {0, 3}, set()]


@pytest.fixture(scope="module")
def shared(filled: Filled, opened: Opened) -> KnowledgeSource:
    """The same kind of store, with documents that are shared with some."""
    store: Any = opened.make(filled.kind)
    made = nodes([ACCESS.stamp({"size": n}, **stamp) for n, stamp in enumerate(STAMPS)])
    every: dict[str, Any] = {
        "acl_user_bob": False,
        **{key: False for node in made for key in node.metadata if "acl" in key},
    }
    for node in made:  # LanceDB keeps the first documents' fields only
        node.metadata = {**every, "owner": "", **node.metadata}
    index = index_over(store)
    index.insert_nodes(made)
    return KnowledgeSource("shared", index=index, permissions=ACCESS, hybrid=False)


@pytest.mark.parametrize("person", range(len(PEOPLE)))
def test_permissions_are_applied_by_the_store(shared: KnowledgeSource, person: int) -> None:
    """With room for few, each finds all that it may see: nothing else took a place."""
    permitted = shared.permitted(PEOPLE[person])
    found = {int(node.node_id[-12:]) for node in search(shared, "row", permitted, top_k=len(SEEN[person]) or 1).nodes}
    assert found == SEEN[person]


def test_documents_are_counted_for_those_who_may_see_them(shared: KnowledgeSource) -> None:
    """Counts, facets and lists read the store's own rows under the principal's filter."""
    kb = KnowledgeBase([shared])
    counted = [kb.count("shared", per="chunk", principal=who) for who in PEOPLE]
    assert counted == [len(seen) for seen in SEEN]
    facets = kb.facets("shared", ["size"], principal=PEOPLE[0])
    assert {bucket.value for bucket in facets["size"]} == SEEN[0]
    assert kb.facets("shared", ["owner", "acl_public"], principal=PEOPLE[0]) == {"owner": [], "acl_public": []}


def test_a_passage_is_shown_by_its_id_to_those_who_may_see_it(shared: KnowledgeSource) -> None:
    """No ID is code: some adapters write it into a query as it is."""
    kb, ids = KnowledgeBase([shared]), [node.node_id for node in nodes([{} for _ in STAMPS])]
    others = [f'{ids[0]}") OR id IN ("{ids[4]}', f"{ids[0]}'] or id in ['{ids[4]}", f"' OR id='{ids[4]}", "\0", "", "%"]

    async def passages(who: Principal) -> set[int]:
        shown = set()
        for one in [*ids, *others]:
            with suppress(NotFoundError):
                shown.add((await find_passage(kb, "shared", one, who))["metadata"]["size"])
        return shown

    assert [asyncio.run(passages(who)) for who in PEOPLE] == SEEN


@pytest.mark.parametrize("kind", ["in memory", "Chroma"])
def test_what_a_row_alone_says_counts(opened: Opened, kind: str) -> None:
    """A grant that was removed from the store's row holds no more, though the node still has it; nor by words."""
    store: Any = opened.make(kind)
    (node,) = nodes([ACCESS.stamp({}, **STAMPS[1])])
    index = index_over(store)
    index.insert_nodes([node])
    kb = KnowledgeBase([KnowledgeSource("shared", index=index, permissions=ACCESS, hybrid=True)])
    assert asyncio.run(find_passage(kb, "shared", node.node_id, PEOPLE[0]))
    assert kb.retrieve("row item000", principal=PEOPLE[0]).references
    if kind == "Chroma":
        store.client.update(ids=[node.node_id], metadatas=[{"owner": "nobody"}])
    else:
        store.data.metadata_dict[node.node_id]["owner"] = "nobody"
    with pytest.raises(NotFoundError):
        asyncio.run(find_passage(kb, "shared", node.node_id, PEOPLE[0]))
    assert not kb.retrieve("row item000", principal=PEOPLE[0]).references


def test_a_passage_of_another_index_is_not_shown() -> None:
    """Indexes may share a document store: an open source shows its own nodes only."""
    context, embed_model = StorageContext.from_defaults(), MockEmbedding(8)
    secret, page = nodes([{}, {}])
    VectorStoreIndex([secret], storage_context=context, embed_model=embed_model)
    own = StorageContext.from_defaults(docstore=context.docstore)
    kb = KnowledgeBase([KnowledgeSource("open", index=SummaryIndex([page], storage_context=own))])
    assert asyncio.run(find_passage(kb, "open", page.node_id, None))
    with pytest.raises(NotFoundError):
        asyncio.run(find_passage(kb, "open", secret.node_id, None))


def test_an_index_of_vectors_loses_nothing_under_a_filter(opened: Opened) -> None:
    """PostgreSQL's reads the nearest rows before it filters: where too few are left, the search is repeated without."""
    plain: Any = opened.make("PostgreSQL")
    small = {"hnsw_m": 4, "hnsw_ef_construction": 16, "hnsw_ef_search": 5}
    always = {"connect_args": {"options": "-c enable_seqscan=off"}}
    where = {"connection_string": plain.connection_string, "async_connection_string": plain.async_connection_string}
    store = type(plain)(
        **where, table_name="hnsw", embed_dim=DIMENSIONS, hnsw_kwargs=small, create_engine_kwargs=always
    )
    index = index_over(store)
    index.insert_nodes(nodes([{"rare": n % 50 == 0} for n in range(300)]))
    lowered = MetadataFilters(filters=[MetadataFilter(key="rare", value="true")])
    rare, vector = Condition(key="rare", value=True), index._embed_model.get_query_embedding("item003")
    asked = VectorStoreQuery(query_embedding=vector, similarity_top_k=6, filters=lowered)
    assert len(store.query(asked).ids or ()) < 6, "the adapter alone finds fewer than there are"
    found = search(KnowledgeSource("rows", index=index, hybrid=False), "item003", rare, top_k=6).nodes
    assert {int(node.node_id[-12:]) % 50 for node in found} == {0}
    assert len(found) == 6
    asyncio.run(store.close())


HYBRID = ("PostgreSQL", "Qdrant")
FULL_TEXT = (*HYBRID, "Elasticsearch", "OpenSearch", "agentic-kb")


def test_words_are_found_by_the_stores_own_search(filled: Filled) -> None:
    """A store with a full-text search is asked by it, under the same filter, in place of an index of our own."""
    source = KnowledgeSource("rows", index=filled.index)
    tree = Condition(key="number", operator=Op.LE, value=1)
    lists = search(source, "the row of item002", tree, top_k=100).lists
    if filled.kind in FULL_TEXT:
        assert [ranked.kind for ranked in lists] == ["dense", "lexical"]
        assert {int(node.node_id[-12:]) for node in lists[1].nodes} == filled.expected(tree)
        assert (lists[1].dropped_by_filter, lists[1].error) == (0, None)
    else:
        source = KnowledgeSource("rows", index=filled.index, hybrid=True)
    (best, *_) = search(source, "item003", top_k=5).lists[-1].nodes
    assert best.get_content().endswith("item003")


@pytest.mark.filterwarnings("ignore:create_fts_index:DeprecationWarning")
def test_a_stores_hybrid_search_is_filtered_too(filled: Filled, opened: Opened) -> None:
    """Where a retriever asks for it, both its sides find what passes, and nothing else takes a place."""
    kwargs: dict[str, Any] = {"vector_store_query_mode": "hybrid"}
    index = filled.index
    if filled.kind == "LanceDB":
        kwargs = {"vector_store_kwargs": {"query_type": "hybrid"}}
    elif filled.kind == "Milvus Lite":
        index = index_over(opened.make("Milvus Lite with BM25"))
        index.insert_nodes(nodes(filled.rows))
    elif filled.kind not in HYBRID:
        pytest.skip("it has none")
    source = KnowledgeSource("rows", index=index, retriever_kwargs=kwargs)
    tree = Condition(key="number", operator=Op.LE, value=1)
    (ranked,) = search(source, "the row of item002", tree, top_k=8).lists
    assert {int(node.node_id[-12:]) for node in ranked.nodes} == filled.expected(tree)
    assert ranked.dropped_by_filter == 0


@pytest.mark.parametrize("tree", [None, Condition(key="word", value="it's")], ids=["all", "some"])
def test_an_async_door_finds_the_same_on_any_loop(filled: Filled, tree: FilterNode | None) -> None:
    """Clients that are bound to the loop of their first use, or are missing, harm nobody."""
    there = [node.node_id for node in search(filled.source, "item003", tree, top_k=1).nodes]
    for _ in range(2):
        found = asyncio.run(searching(filled.source, "item003", tree, top_k=1))
        assert [node.node_id for node in found.nodes] == there != []


@pytest.mark.parametrize("per", ["document", "chunk"])
@pytest.mark.parametrize("tree", [None, Condition(key="number", operator=Op.GT, value=1)], ids=["all", "some"])
def test_counts_and_facets_are_those_of_the_rows(
    filled: Filled, per: Literal["document", "chunk"], tree: Condition | None
) -> None:
    """Whether the store counts or its rows are read: documents count once for each value, items of lists too."""
    index = VectorStoreIndex(nodes(filled.rows), embed_model=MockEmbedding(embed_dim=2))
    fields: list[str | Facet] = ["word", "number", "flag", "tags", "absent", Facet("number", ranges=[0, 10])]
    seen = []
    for over in (filled.index, index):
        kb = KnowledgeBase([KnowledgeSource("rows", index=over, hybrid=False)])
        counts = [kb.facets("rows", one, filters=tree, per=per, limit=50) for one in fields]
        seen.append((kb.count("rows", filters=tree, per=per), counts))
    assert seen[0] == seen[1]


def test_deletes_and_updates_are_seen(filled: Filled, opened: Opened) -> None:
    """What was deleted is not found or counted from then on; what was stored again is what it then says."""
    store: Any = opened.make(filled.kind)
    index = index_over(store)
    index.insert_nodes(nodes([{"word": "old"} for _ in range(4)]))
    source = KnowledgeSource("rows", index=index, hybrid=False)
    kb = KnowledgeBase([source])
    old, new = (Condition(key="word", value=value) for value in ("old", "new"))
    assert (len(search(source, "row", old).nodes), kb.count("rows", per="chunk")) == (4, 4)
    _delete(store, index, "document 0")
    assert {node.node_id[-1] for node in search(source, "row", old).nodes} == {"2", "3"}
    _delete(store, index, "document 1")
    index.insert_nodes(nodes([{"word": "new"} for _ in range(2)]))
    assert (len(search(source, "row", old).nodes), len(search(source, "row", new).nodes)) == (0, 2)
    assert kb.count("rows", per="chunk") == 2


def _delete(store: Any, index: VectorStoreIndex, document: str) -> None:
    if type(store).__name__ == "LanceDBVectorStore":  # its adapter quotes the ID as a column's name
        store.table.delete(f"doc_id = '{document}'")
    else:
        index.delete_ref_doc(document, delete_from_docstore=True)
