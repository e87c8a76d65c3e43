"""The store in PostgreSQL: the same as a directory, on a real server, with many writers and with filters in SQL."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from llama_index.core.vector_stores.types import VectorStoreQuery
from typer.testing import CliRunner

from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.errors import ConfigurationError, SessionStoreError, StoreMismatchError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.knowledge_base import KnowledgeBase
from llama_index_agentic_kb.schema import Principal
from llama_index_agentic_kb.store import KnowledgeStore, ingest, repair_store
from llama_index_agentic_kb.store import postgres as postgres_store
from llama_index_agentic_kb.store.database import Floats, Statements
from llama_index_agentic_kb.store.embedding_model import DEFAULT_EMBED_MODEL
from llama_index_agentic_kb.store.files import Grants
from llama_index_agentic_kb.store.postgres import MAX_CANDIDATES, PostgresVectors
from llama_index_agentic_kb.store.sessions import SessionStore
from llama_index_agentic_kb.store.vectors import Ranked
from llama_index_agentic_kb.testing import HashEmbedding
from tests.kills_sessions.postgres import PostgresServer
from tests.store.conftest import written
from tests.store.rows import FILTERS, MODEL, QUERIES, ROWS, TOP_K, asked, nearest, put, recall

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> str:
    run(postgres.url, "CREATE DATABASE kb")
    return f"postgresql://postgres:hush-hush-9@127.0.0.1:{postgres.port}/kb"


@pytest.fixture
def url(database: str) -> str:
    run(database, "DROP SCHEMA IF EXISTS agentic_kb CASCADE", "DROP EXTENSION IF EXISTS vector CASCADE")
    return database


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture(scope="module")
def rows(postgres: PostgresServer) -> Iterator[KnowledgeStore]:
    with KnowledgeStore.open(postgres.url, embed_model=MODEL, create=True) as store:
        put(store)
        yield store
        store.remove_source("rows")


def test_it_does_what_a_directory_does(url: str, tmp_path: Path) -> None:
    """Files are ingested, changed, renamed and removed, and found with the scores of a store in a directory."""
    pump = "---\nyear: 2001\n---\n# Pumps\n\nThe red pump is reset by its lever."
    rain = "# Weather\n\nIt rains in Paris in spring, and the pumps stand in the rain."
    docs = written(tmp_path / "docs", {"pump.md": pump, "rain.md": rain})
    seen = []
    for where in (url, tmp_path / "store"):
        with KnowledgeStore.open(where, embed_model=MODEL, create=True) as store:
            first = ingest(docs, store, description="Manuals")
            assert ingest(docs, store).unchanged == first.added == ("docs/pump.md", "docs/rain.md")
            (docs / "rain.md").rename(docs / "wet.md")
            second = ingest(docs, store)
            assert (second.added, second.deleted, second.chunks_embedded) == (("docs/wet.md",), ("docs/rain.md",), 0)
            (hit,) = store.lexical("docs").search("how is a pump reset?", 1, None)
            vector = MODEL.get_text_embedding("pump lever")
            query = VectorStoreQuery(query_embedding=vector, similarity_top_k=2)
            result, _ = store.vectors("docs").filtered_search(query)
            seen.append((hit.node, result.ids, [round(one, 5) for one in result.similarities or []]))
            assert store.sources()[0].chunks == 2
            (docs / "wet.md").rename(docs / "rain.md")
            base = KnowledgeBase.from_store(where, embed_model=MODEL, effort="minimal")
            assert base.count("docs", filters="year eq 2001") == 1
            store.remove_source("docs")
            assert store.sources() == []
            with pytest.raises(ConfigurationError, match="no source 'docs';"):
                store.vectors("docs").filtered_search(query)
    assert seen[0] == seen[1]


def test_a_closed_knowledge_base_has_no_connections(rows: KnowledgeStore, postgres: PostgresServer) -> None:
    """What was opened from a store's address is closed with the block."""
    with psycopg.connect(postgres.url, autocommit=True) as other:

        def connections() -> set[int]:
            mine = "SELECT pid, pg_sleep(0.05) FROM pg_stat_activity WHERE application_name LIKE 'llama-index%'"
            return {pid for pid, _ in other.execute(mine).fetchall()}

        before = connections()
        with KnowledgeBase.from_store(postgres.url, embed_model=MODEL, effort="minimal") as base:
            assert base.count("rows", per="chunk") == ROWS
            made = connections() - before
            assert made
        deadline = time.monotonic() + 60
        while made & connections():  # the server notices it a little later
            assert time.monotonic() < deadline


def test_commands(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command takes the URL, and none shows its password."""
    model = HashEmbedding(model_name=DEFAULT_EMBED_MODEL)
    monkeypatch.setattr("llama_index_agentic_kb.store.store.named_embed_model", lambda _: model)
    (tmp_path / "pump.md").write_text("# Pumps\n\nThe red pump is reset by its lever.")
    commands = [
        ["ingest", str(tmp_path), "--source", "docs"],
        ["list"],
        ["ask", "How is the pump reset?", "--effort", "minimal"],
        ["info"],
        ["repair"],
        ["remove", "docs"],
    ]
    output = ""
    for command in commands:
        done = CliRunner().invoke(app, [*command, "--store", url])
        assert done.exit_code == 0, (command, done.output, done.exception)
        output += done.output
    assert "lever" in output
    assert "docs: 1 documents, 1 chunks" in output
    assert "hush" not in output


@pytest.mark.parametrize("indexed", [False, True], ids=["exact", "hnsw"])
def test_the_nearest_rows_are_found(url: str, monkeypatch: pytest.MonkeyPatch, *, indexed: bool) -> None:
    """Exactly without an HNSW index, and with one at least 0.99 of them, under each filter; a rebuild keeps them."""
    monkeypatch.setattr(postgres_store, "INDEXED_ROWS", 100 if indexed else 1_000)
    monkeypatch.setattr(postgres_store, "EXACT_ROWS", 150)
    with KnowledgeStore.open(url, embed_model=MODEL, create=True) as store:
        put(store)
        store.update_indexes("rows")
        assert repair_store(url, rebuild_all=True).chunks == ROWS
        for tree in (None, *FILTERS):
            assert recall(store, tree) >= (0.99 if indexed else 1)
        _, note = store.vectors("rows").filtered_search(asked(QUERIES[0], top_k=3))
        assert note == ("searched" if indexed else "searched exactly")


@pytest.mark.parametrize(("alive", "how"), [(TOP_K, "searched"), (TOP_K - 1, "searched exactly")])
def test_replaced_rows_in_an_index_cost_no_results(
    url: str, monkeypatch: pytest.MonkeyPatch, alive: int, how: str
) -> None:
    """They are in an HNSW index until the next vacuum: it is asked for more, and without more all are compared."""
    asked_for, nearest_of = [], postgres_store.PostgresVectors._nearest

    def few(vectors: PostgresVectors, connection: Statements, vector: Floats, count: int) -> list[Ranked]:
        asked_for.append(count)
        return nearest_of(vectors, connection, vector, count)[: alive if count == MAX_CANDIDATES else 3]

    monkeypatch.setattr(postgres_store, "INDEXED_ROWS", 100)
    monkeypatch.setattr(postgres_store.PostgresVectors, "_nearest", few)
    with KnowledgeStore.open(url, embed_model=MODEL, create=True) as store:
        put(store)
        store.update_indexes("rows")
        result, note = store.vectors("rows").filtered_search(asked(QUERIES[0], top_k=TOP_K))
    assert (result.ids, note) == (nearest(QUERIES[0], lambda _: True), how)
    assert asked_for == [TOP_K, MAX_CANDIDATES]


def test_words_are_weighed_by_how_rare_they_are(rows: KnowledgeStore) -> None:
    """A word that one chunk has comes before one that all have; a query without known words finds nothing."""
    hits = rows.lexical("rows").search("text of a pump", 3, None)
    assert hits[0].node.node_id == "n7"
    assert (hits[0].score or 0) > 3 * (hits[1].score or 0)
    assert rows.lexical("rows").search("zebra 'quoted\\ | & <->", 3, None) == []


def test_nobody_sees_what_he_may_not(url: str, tmp_path: Path) -> None:
    """No search, count or facet shows a document to a principal without the right, whatever its file says."""
    may = {
        f"secret{at}": ("acme" if at % 2 else "apex", (["hr"], ["it", "law"], ["law"], ["hr", "it"], [])[at // 2])
        for at in range(10)
    }
    texts = {f"{one}.md": f"---\nacl_public: true\nmark: {one}\n---\n# Note\n\nThe pump {one}." for one in may}
    docs = written(tmp_path / "docs", texts)

    def stamp(path: Path) -> Grants:
        tenant, groups = may[path.stem]
        return {"tenant": tenant, "groups": groups}

    permissions = Permissions(tenant="tenant", groups="acl_group_", public="acl_public")
    with KnowledgeStore.open(url, embed_model=MODEL, create=True) as store:
        ingest(docs, store, permissions=permissions, stamp=stamp)
    with KnowledgeBase.from_store(url, embed_model=MODEL, effort="minimal", permissions=permissions) as base:
        for tenant, groups in itertools.product(["acme", "apex", "other"], [[], ["hr"], ["it", "law"]]):
            principal = Principal(user="u", tenant=tenant, groups=groups)
            allowed = {mark for mark, (owner, of) in may.items() if owner == tenant and set(of) & set(groups)}
            assert base.count("docs", principal=principal) == len(allowed)
            facets = base.facets("docs", ["mark"], principal=principal, limit=99)
            assert {one.value for one in facets["mark"]} == allowed
            response = base.retrieve("the pump secret3 secret9", principal=principal)
            shown = {one.source_data.metadata["mark"] for one in response.references if one.source_data}
            assert shown <= allowed
            assert bool(shown) == bool(allowed)


def test_many_searches_of_a_removed_source_end_at_once(url: str) -> None:
    """More of them than there are connections: none waits for a second one to name the other sources."""
    with KnowledgeStore.open(url, embed_model=MODEL, create=True) as store:
        put(store)
        vectors, words = store.vectors("rows"), store.lexical("rows")
        store.remove_source("rows")
        barrier = threading.Barrier(12)
        searches: list[Callable[[], object]] = [
            lambda: vectors.filtered_search(asked(QUERIES[0], top_k=3)),
            lambda: words.search("pump", 3, None),
        ]

        def search(call: Callable[[], object]) -> float:
            barrier.wait(60)
            started = time.monotonic()
            with pytest.raises(ConfigurationError, match="no source 'rows'; it has: none yet"):
                call()
            return time.monotonic() - started

        with ThreadPoolExecutor(12) as threads:
            for one in searches:
                assert max(threads.map(search, [one] * 12)) < 10


def test_many_writers_lose_and_double_nothing(url: str, tmp_path: Path) -> None:
    """Four writers ingest one folder and folders of their own at once."""
    texts = {
        name: {f"{at}.md": f"# {name} {at}\n\n" + f"Words of {name} {at}. " * 100 for at in range(6)}
        for name in ("shared", "a", "b")
    }
    folders = [written(tmp_path / name, own) for name, own in texts.items()]
    barrier = threading.Barrier(4)

    def write(folder: Path) -> None:
        with KnowledgeStore.open(url, embed_model=HashEmbedding(dimensions=16), create=True) as store:
            barrier.wait(60)
            ingest(folder, store, source="all" if folder.name != "shared" else "shared")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, (*folders, folders[0])))
    with KnowledgeStore.open(url, embed_model=MODEL) as store:
        counts = {info.name: (info.documents, info.chunks) for info in store.sources()}
        one = len(list(store._rows("SELECT 1 FROM chunks WHERE source = 'shared' AND path = '3.md'")))
        assert counts["shared"] == (6, 6 * one)
        paths = {row[0] for row in store._rows("SELECT origin FROM documents WHERE source = 'all'")}
        assert len(paths) == 6
        places = "SELECT path, chunk_index FROM chunks WHERE source = 'shared'"
        assert len(set(store._rows(places))) == 6 * one


@pytest.mark.parametrize("wrong", ["postgresql://kb:pass@h:54x/kb", "://", "sqlite:///x.db"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    """The message says what is expected, and repeats no password."""
    with pytest.raises(ConfigurationError, match="nor postgresql://") as failed:
        KnowledgeStore.open(wrong)
    assert "pass@" not in str(failed.value)


def test_what_is_missing_is_named(postgres: PostgresServer, url: str) -> None:
    """Another model, a right, a database, the server: each error names the remedy, and none the password."""
    with pytest.raises(ConfigurationError, match=r"no documents in this database.*agentic-kb ingest"):
        KnowledgeStore.open(url, embed_model=MODEL)
    KnowledgeStore.open(url, embed_model=MODEL, create=True).close()
    with pytest.raises(StoreMismatchError, match=r"'postgresql://\*\*\*@127.*made with the embedding model"):
        KnowledgeStore.open(url, embed_model=HashEmbedding(dimensions=8))
    run(postgres.url, "CREATE ROLE reader LOGIN PASSWORD 'hush-hush-8'", "CREATE DATABASE bare")
    bare = f"postgresql://reader:hush-hush-8@127.0.0.1:{postgres.port}/bare"
    for wrong, message in {
        bare: "permission denied.*GRANT CREATE ON DATABASE",
        url.replace("/kb", "/no-kb"): "does not exist.*Check the address, the database's name",
        url.replace(str(postgres.port), "1"): "[Cc]onnection refused",
    }.items():
        with pytest.raises(ConfigurationError, match=f"(?s){message}") as failed:
            postgres_store.PostgresStore(wrong, create=True, timeout=0.5 if ":1/" in wrong else 10)
        assert "hush" not in str(failed.value)
        assert ("GRANT" in str(failed.value)) != ("Check the address" in str(failed.value))
    with pytest.raises(SessionStoreError, match="permission denied") as refused:  # they need no extension
        SessionStore(bare)
    assert "vector" not in str(refused.value)
