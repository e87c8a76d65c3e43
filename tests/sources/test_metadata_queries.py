"""Facets, counts, groups and lists of a knowledge base, over every kind of source that can give them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, Permissions, Principal
from llama_index_agentic_kb.errors import DeadlineExceededError, InvalidRequestError
from llama_index_agentic_kb.guard.permissions import RESERVED
from llama_index_agentic_kb.schema import parse_odata
from llama_index_agentic_kb.sources import Facet, FacetBucket, SourceDocument, metadata
from llama_index_agentic_kb.sources.metadata import MetadataRow, Per, facet_buckets, list_documents, sort_key
from llama_index_agentic_kb.sources.stores import StoreKind
from llama_index_agentic_kb.store import KnowledgeStore, ingest
from llama_index_agentic_kb.testing import HashEmbedding, MemoryRetriever
from tests.sources.conftest import MakeIndex

FILMS: list[tuple[str, dict[str, Any]]] = [
    ("alien", {"genre": "horror", "year": 1979, "tenant": "acme"}),
    ("brazil", {"genre": "comedy", "year": 1985, "tenant": "acme"}),
    ("brazil", {"genre": "comedy", "year": 1985, "tenant": "acme"}),
    ("casablanca", {"genre": "drama", "year": 1942, "tenant": "acme"}),
    ("dune", {"genre": "drama", "year": 1984, "tenant": "rival"}),
    ("eraserhead", {"genre": "horror", "year": 1977, "tenant": "acme"}),
]
MODEL = HashEmbedding(dimensions=4)
ACME = "tenant eq 'acme'"


def nodes() -> list[BaseNode]:
    made: list[BaseNode] = []
    for number, (name, held) in enumerate(FILMS):
        of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=name)}
        made.append(TextNode(id_=f"{name}-{number}", text=name, metadata=held, relationships=of))
    return made[::-1]


def source(**fields: Any) -> KnowledgeSource:
    return KnowledgeSource(
        "films", **{"index": VectorStoreIndex(nodes(), embed_model=MODEL), "hybrid": False, **fields}
    )


def read(**fields: Any) -> KnowledgeBase:
    return KnowledgeBase([KnowledgeSource("films", retriever=MemoryRetriever([]), **fields)])


def counts(buckets: list[FacetBucket]) -> dict[Any, int]:
    return {bucket.value: bucket.count for bucket in buckets}


@pytest.fixture(params=["in memory", "chroma", "reader"])
def make(request: pytest.FixtureRequest, chroma_index: MakeIndex) -> Callable[..., KnowledgeSource]:
    """A function that makes the same source over each thing that can list what it holds."""
    if request.param == "chroma":
        return lambda **fields: source(index=chroma_index(nodes(), MODEL), **fields)
    if request.param == "reader":
        return lambda **fields: KnowledgeSource(
            "films", retriever=MemoryRetriever([]), metadata_reader=lambda: iter(FILMS), **fields
        )
    return source


def test_every_source_that_keeps_its_nodes_can_be_asked(make: Callable[..., KnowledgeSource]) -> None:
    """Counts, facets, groups and pages are the same over each kind of store."""
    kb = KnowledgeBase([make()])
    assert kb.count("films") == 5
    assert kb.count("films", per="chunk") == 6
    assert kb.count("films", filters="year lt 1980") == 3
    found = kb.facets("films", ["genre", Facet("year", ranges=[1970])], limit=2)
    assert counts(found["genre"]) == {"drama": 2, "horror": 2}
    assert [(bucket.start, bucket.count) for bucket in found["year"]] == [(None, 1), (1970, 4)]
    first = kb.documents("films", order_by=[("year", "desc")], limit=2)
    assert kb.documents("films", order_by=[["year", "desc"]], limit=2) == first
    assert [(one.document_id, one.chunks) for one in first] == [("brazil", 2), ("dune", 1)]
    (group,) = kb.group_by("films", "genre", limit=1, hits=1, order_by="year")
    assert (group.value, group.count, group.documents[0].document_id) == ("drama", 2, "casablanca")


def test_what_the_mandatory_filter_hides_is_not_counted(make: Callable[..., KnowledgeSource]) -> None:
    """The source's filter and the knowledge base's own always apply; a caller's only takes away more."""
    mandatory = KnowledgeBase([make(filters=ACME)])
    own = KnowledgeBase([make()], filters=parse_odata(ACME))
    for kb in (mandatory, own):
        for attempt in (None, "tenant eq 'rival' or tenant eq 'acme'", "tenant ne null"):
            assert kb.count("films", filters=attempt) == 4
            assert counts(kb.facets("films", "tenant", filters=attempt)["tenant"]) == {"acme": 4}
            assert "dune" not in [one.document_id for one in kb.documents("films", filters=attempt)]
            groups = {one.value: one.count for one in kb.group_by("films", "genre", filters=attempt)}
            assert groups == {"horror": 2, "comedy": 1, "drama": 1}
        assert kb.count("films", filters="tenant eq 'rival'") == 0
        assert kb.facets("films", ["genre"], filters="tenant eq 'rival'") == {"genre": []}


def test_filters_that_a_store_can_not_apply_are_checked_here(chroma_index: MakeIndex) -> None:
    """Nothing is ranked here, so that what Chroma can't filter by is read and checked."""
    kb = KnowledgeBase([source(index=chroma_index(nodes(), MODEL))])
    assert kb.count("films", filters="genre ge 'd' and genre lt 'e'") == 2
    assert kb.count("films", filters="genre ne null") == 5
    many = ",".join(map(str, range(1_900, 1_980)))
    assert kb.count("films", filters=f"year in ({many}) or year in ({many})") == 3


@pytest.mark.parametrize("groups", [1, 101, 250])
def test_what_was_revoked_in_the_stores_row_alone_is_not_counted(chroma_index: MakeIndex, groups: int) -> None:
    """However many groups a principal has, and whatever the node that is kept beside the row still says."""
    index = chroma_index(nodes(), MODEL)
    access = Permissions(tenant="tenant", groups="acl_group_")
    alien = TextNode(id_="a", text="alien", metadata=access.stamp({}, tenant="acme", groups=["g0"]))
    dune = TextNode(id_="d", text="dune", metadata=access.stamp({}, tenant="acme", groups=["g0"]))
    index.insert_nodes([alien, dune])
    kb = KnowledgeBase([source(index=index, permissions=access)])
    principal = Principal(tenant="acme", groups={f"g{at}" for at in range(groups)})
    assert kb.count("films", principal=principal) == 2
    index.vector_store.client.update(ids=["d"], metadatas=[{"acl_group_g0": False}])
    assert kb.count("films", principal=principal) == 1
    assert [one.document_id for one in kb.documents("films", principal=principal)] == ["a"]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: KnowledgeSource("films", retriever=MemoryRetriever([])),
        lambda: KnowledgeSource("films", index=SummaryIndex(nodes()), hybrid=False),
        lambda: KnowledgeSource("films", retriever_factory=lambda _: MemoryRetriever([])),
    ],
)
def test_sources_that_can_not_list_say_so(bad: Callable[[], KnowledgeSource]) -> None:
    """The error names the source and what it takes; there is no wrong count."""
    with pytest.raises(InvalidRequestError, match=r"source 'films' can't list what it holds: .*metadata_reader="):
        KnowledgeBase([bad()]).count("films")


def test_reading_ends_at_the_deadline() -> None:
    """A reader without an end is left after the knowledge base's time, and stops by itself."""
    stopped = threading.Event()

    def endless() -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            number = 0
            while True:
                number += 1
                yield f"d{number}", {"n": number}
        finally:
            stopped.set()

    kb = KnowledgeBase(
        [KnowledgeSource("films", retriever=MemoryRetriever([]), metadata_reader=endless)], max_runtime_in_seconds=0.1
    )
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        kb.count("films")
    assert time.monotonic() - started < 5
    assert stopped.wait(5)


BAD_ORDERS: tuple[Any, ...] = (
    ("year", "down"),
    ("", "asc"),
    ("year",),
    "",
    ("a", "b", "c"),
    5,
    [5, "asc"],
    ["year", []],
)
BAD_RANGES: tuple[Any, ...] = ([2, 1], [1, "2"], "abc", [True], [])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda kb: kb.count("books"), "no source is named 'books'; there are: films"),
        (lambda kb: kb.count("films", filters="year ="), "OData filter, character 6"),
        (lambda kb: kb.count("films", per="page"), "per must be one of document, chunk, got 'page'"),
        (lambda kb: kb.facets("films", []), "fields: expected metadata keys or Facet"),
        (lambda kb: kb.facets("films", ["year", Facet("year")]), "a field is given twice"),
        (lambda kb: kb.facets("films", "year", limit=0), "limit must be a whole number of at least 1, got 0"),
        (lambda kb: kb.group_by("films", "year", hits=-1), "hits must be a whole number of at least 0"),
        (lambda kb: kb.documents("films", offset=1.5), "offset must be a whole number of at least 0, got 1.5"),
        *((lambda kb, by=by: kb.documents("films", order_by=[by]), "order_by: expected 'field'") for by in BAD_ORDERS),
        *((lambda _, ends=ends: Facet("year", ranges=ends), "'year': ranges must be ascending") for ends in BAD_RANGES),
    ],
)
def test_questions_that_make_no_sense(ask: Callable[[KnowledgeBase], Any], message: str) -> None:
    """The error names the argument and what it takes."""
    with pytest.raises(InvalidRequestError, match=message):
        ask(read(metadata_reader=lambda: FILMS))


@pytest.mark.slow
def test_a_store_answers_from_its_record(tmp_path: Path) -> None:
    """A store on disk is read from SQLite, while others write into it, and without its vectors."""
    folder = tmp_path / "films"
    folder.mkdir()
    for name, genre in (("alien", "horror"), ("brazil", "comedy"), ("carrie", "horror")):
        text = f"---\ngenre: {genre}\n---\n# {name}\n\n{name} is a film. " + f"It is a {genre} film. " * 60
        (folder / f"{name}.md").write_text(text)
    path = tmp_path / "store"
    with KnowledgeStore.open(path, embed_model=MODEL, create=True) as store:
        ingest(folder, store)
    kb = KnowledgeBase.from_store(path, embed_model=MODEL)
    (name,) = kb.sources
    assert counts(kb.facets(name, "genre")["genre"]) == {"horror": 2, "comedy": 1}
    assert kb.count(name, per="chunk") > kb.count(name) == 3
    listed = kb.documents(name, filters="genre eq 'horror'", order_by=["title desc"])
    assert [one.metadata["title"] for one in listed] == ["carrie", "alien"]
    assert listed[0].document_id == f"{name}/carrie.md"
    searched = {node.node.ref_doc_id for node in kb.as_retriever(llm=None).retrieve("film")}
    assert searched <= {one.document_id for one in kb.documents(name)}


class Counting(StoreKind[Any]):
    """A kind of store that counts, and keeps a node's whole content under a reserved key."""

    def counts(self, tree: Any, field: str | None, *, documents: bool) -> list[tuple[Any, int]]:
        return [(f"secret {field}", 99)]


def test_what_a_store_keeps_under_reserved_keys_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such keys hold all metadata, permissions too: rows are read for them, which have none."""
    monkeypatch.setattr(metadata, "kind_of", Counting)
    kb = KnowledgeBase([source(permissions=Permissions(tenant="tenant"))])
    ann = Principal(user="ann", tenant="acme")
    assert counts(kb.facets("films", "genre", principal=ann)["genre"]) == {"secret genre": 99}
    for key in sorted(RESERVED):
        assert kb.facets("films", key, principal=ann)[key] == []
    for key in ("doc_id", "document_id", "ref_doc_id"):
        wanted = f"{key} ge 'a'"
        assert kb.count("films", filters=wanted, principal=ann) == 0
        assert kb.facets("films", "genre", filters=wanted, principal=ann)["genre"] == []


# -- facets, orders and lists of rows ---------------------------------------------------------------------------------

ROWS = [
    MetadataRow("d1", {"genre": "drama", "year": 1969, "tags": ["war", "sea"], "page": 1}),
    MetadataRow("d1", {"genre": "drama", "year": 1969, "tags": ["war"], "page": 2}),
    MetadataRow("d2", {"genre": "comedy", "year": 1972, "page": 1, "_secret": 1}),
    MetadataRow("d3", {"genre": "drama", "year": 1985.5, "tags": [], "page": 1}),
    MetadataRow("d4", {"genre": None, "page": 1, "odd": {"x": 1}}),
]


def facet(asked: str | Facet, rows: list[MetadataRow] = ROWS, *, limit: int = 10, per: Per = "document") -> list[Any]:
    one = Facet(asked) if isinstance(asked, str) else asked
    return facet_buckets(iter(rows), facets=[one], limit=limit, per=per)[one.field]


@pytest.mark.parametrize(
    ("key", "ranges", "buckets"),
    [
        ("year", [1970, 1980], [(None, 1970, 1), (1970, 1980, 1), (1980, None, 1)]),
        ("genre", ["d"], [(None, "d", 1), ("d", None, 2)]),
        ("page", ["a"], [(None, "a", 0), ("a", None, 0)]),
    ],
)
def test_ranges(key: str, ranges: list[Any], buckets: list[tuple[Any, Any, int]]) -> None:
    """From each boundary to below the next; empty ranges too, and values of another type in none."""
    assert facet(Facet(key, ranges=ranges)) == [
        FacetBucket(count, start=start, end=end) for start, end, count in buckets
    ]


VALUES = st.one_of(st.integers(-3, 3), st.booleans(), st.sampled_from(["a", "b"]), st.none())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("wxyz"), VALUES | st.lists(VALUES, max_size=2))))
def test_counts_are_what_counting_by_hand_gives(given_rows: list[tuple[str, Any]]) -> None:
    """Values agree with a plain count over sets."""
    rows = [MetadataRow(document, {"v": value}) for document, value in sorted(given_rows, key=lambda row: row[0])]
    having = {
        (document, isinstance(item, bool), item)
        for document, value in given_rows
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    }
    assert {(isinstance(b.value, bool), b.value): b.count for b in facet("v", rows)} == Counter(
        (kind, item) for _, kind, item in having
    )


def listed(*order_by: Any, limit: int = 10, offset: int = 0, rows: list[MetadataRow] = ROWS) -> list[str]:
    found = list_documents(iter(rows), order=sort_key(order_by), limit=limit, offset=offset)
    return [document.document_id for document in found]


def test_documents_hold_what_their_chunks_agree_in() -> None:
    """What differs between chunks is none of the document's, and hidden fields stay hidden."""
    first, second, *_ = list_documents(iter(ROWS), order=sort_key(()), limit=10, offset=0)
    assert first == SourceDocument("d1", 2, {"genre": "drama", "year": 1969})
    assert second == SourceDocument("d2", 1, {"genre": "comedy", "year": 1972, "page": 1})


def test_documents_are_sorted() -> None:
    """By several fields, either way; what has no value comes last, ties are by id."""
    assert listed() == ["d1", "d2", "d3", "d4"]
    assert listed("year") == ["d1", "d2", "d3", "d4"]
    assert listed("year desc") == listed(("year", "desc")) == ["d3", "d2", "d1", "d4"]
    assert listed("genre desc", "year desc") == ["d3", "d1", "d2", "d4"]
    assert listed("genre", ("year", "asc")) == ["d2", "d1", "d3", "d4"]
    assert listed("year desc", limit=2, offset=1) == ["d2", "d1"]
    assert listed("no field") == ["d1", "d2", "d3", "d4"]
