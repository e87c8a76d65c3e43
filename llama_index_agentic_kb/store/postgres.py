"""A store in one PostgreSQL database with the extension ``vector``: documents, chunks, vectors and words.

Many processes may write at the same time: each document is a transaction of its own, which begins by locking the
document's row, and storing a document twice changes nothing. The tables are in the schema ``agentic_kb``; sessions may
be in the same database. ``store.postgres_search`` searches.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from llama_index_agentic_kb._text import know_secrets, redacted
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    IngestionError,
    SessionStoreError,
    StoreDamagedError,
)
from llama_index_agentic_kb.search.dialects import PostgresStoreSql
from llama_index_agentic_kb.search.prototypes import ScopeIndex
from llama_index_agentic_kb.search.tokenizing import Analyzer
from llama_index_agentic_kb.store.database import DocumentDatabase, Floats, Piece, Statements
from llama_index_agentic_kb.store.sql import Revisions, SqlDatabase
from llama_index_agentic_kb.store.store import KnowledgeStore, RepairProgress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from llama_index_agentic_kb.store.postgres_search import PostgresVectors, PostgresWords

DOCUMENTS: Final = Revisions("documents", "0001", "agentic_kb_documents_version", schema="agentic_kb")
INDEXED_ROWS = 20_000
"""The number of chunks from which a source gets an HNSW index. An exact search of 50,000 took 127 ms on busy cores."""
MAX_INDEXED_DIMENSIONS: Final = 2_000
"""The maximum number of dimensions that pgvector indexes."""
_REMEDIES: Final = {
    "42501": "This user needs the right to create a schema (GRANT CREATE ON DATABASE ...), and the extension vector: "
    "a superuser runs CREATE EXTENSION vector once.",
    "0A000": "Install pgvector on the server (https://github.com/pgvector/pgvector), then run this again.",
    "58P01": "Install pgvector on the server (https://github.com/pgvector/pgvector), then run this again.",
    "53100": "Make room on the server's disk, then run this again: what was stored before stays.",
}


class PostgresDatabase(DocumentDatabase):
    """Documents, chunks and vectors in PostgreSQL.

    Where the URL says nothing, libpq's environment variables and password file hold. If the database can't be reached
    or used, or has no store and none is to be created, ``ConfigurationError`` names the remedy.
    """

    dialect = PostgresStoreSql

    def __init__(self, url: str, *, timeout: float = 30.0, create: bool = True) -> None:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            parsed = None
        if parsed is None or parsed.get_backend_name() != "postgresql":
            raise ConfigurationError("The store's address is not a directory, nor postgresql://user@host/database.")
        know_secrets(filter(None, [parsed.password and str(parsed.password)]))
        location = redacted(parsed.set(query={}).render_as_string(hide_password=True))
        try:
            database = SqlDatabase(url, DOCUMENTS, timeout=timeout, create=create)
        except (SessionStoreError, DeadlineExceededError) as error:
            code = str(getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) or "")
            remedy = _REMEDIES.get(code, "Check the address, the database's name, the user and its password.")
            raise ConfigurationError(f"The store {location!r} can't be opened: {error}. {remedy}") from error
        super().__init__(database, location, timeout)
        self._analyzer = Analyzer()

    def put_contents(self, connection: Statements, source: str, pieces: Sequence[Piece]) -> None:
        """Store the texts, words and vectors of chunks that are stored already."""
        languages, rows = set(), []
        for chunk, vector in pieces:
            language, terms = self._analyzer.document(f"{chunk.metadata.get('title', '')}\n{chunk.text}")
            languages.add(language)
            rows.append((source, chunk.text, vector_text(vector), _positions(terms.split()), chunk.node_id))
        connection.executemany(
            "INSERT INTO contents SELECT id, ?, ?, CAST(? AS vector), CAST(? AS tsvector)"
            " FROM chunks WHERE node_id = ?",
            rows,
        )
        known = [(source, language) for language in sorted(languages)]
        connection.executemany("INSERT INTO languages VALUES (?, ?) ON CONFLICT DO NOTHING", known)

    def unpacked(self, vectors: Sequence[Any]) -> Floats:
        """Return the numbers of all the given stored vectors, one vector after the other."""
        return np.fromstring(",".join(vector[1:-1] for vector in vectors), dtype=np.float32, sep=",")

    def check(self) -> None:
        """Check that each chunk has its text; raise ``StoreDamagedError`` if not."""
        if self.rows("SELECT id FROM chunks LEFT JOIN contents USING (id) WHERE contents.text IS NULL LIMIT 1"):
            raise StoreDamagedError(f"{self.location!r} has chunks without text: restore it from a backup.")

    def index_rows(self, source: str, dimension: int, *, anew: bool) -> None:
        """Build a source's HNSW index if it has none, or anew, while others read and write."""
        with self._errors(IngestionError, "written"):
            build = partial(self._build_index, source, dimension, anew=anew)
            self._database.retry(build, time.monotonic() + self.timeout)

    def _build_index(self, source: str, dimension: int, *, anew: bool) -> None:
        name, quoted = index_name(source), source.replace("'", "''").replace("%", "%%")
        with self._database.autocommit() as connection:
            run = connection.exec_driver_sql
            if not run("SELECT pg_try_advisory_lock(hashtext(%s))", (name,)).scalar():
                return  # another process builds it
            try:
                run(
                    f"SELECT set_config('search_path', '{DOCUMENTS.schema}, ' || current_setting('search_path'), false)"
                )
                run("SET maintenance_work_mem = '512MB'")  # the default 64 builds a graph of 50,000 chunks on disk
                valid = run("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", (name,)).scalar()
                if valid is False or (anew and valid):  # a process that was killed while building leaves it invalid
                    run(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
                if anew or not valid:
                    run(
                        f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON contents USING hnsw"
                        f" ((CAST(vector AS vector({dimension}))) vector_cosine_ops) WHERE of_source = '{quoted}'"
                    )
            finally:
                if not connection.invalidated:  # the server has ended
                    run("RESET ALL")
                    run("SELECT pg_advisory_unlock_all()")

    def analyze(self) -> None:
        """Update the statistics of words and metadata, by which searches weigh words and choose indexes."""

        def work(connection: Statements) -> None:
            for name in ("contents_by_words", "chunks_by_metadata"):  # else searches read the latest entries one by one
                connection.execute("SELECT gin_clean_pending_list(CAST(? AS regclass))", (name,))
            connection.execute("ANALYZE chunks, contents")

        self.write(work)


class PostgresStore(KnowledgeStore):
    """A store in PostgreSQL; see the module, and `KnowledgeStore` for the methods."""

    shared = True
    _documents: PostgresDatabase

    @classmethod
    def open_documents(cls, path: str | Path, *, create: bool) -> PostgresDatabase:
        """Connect to the database."""
        return PostgresDatabase(str(path), create=create)

    def writing(self, wait: float = 0.0) -> AbstractContextManager[None]:  # noqa: ARG002 (of the other kind of store)
        """Return a block for writing, which excludes nobody: each document has a lock of its own."""
        return nullcontext()

    def update_indexes(self, source: str) -> None:
        """Update the statistics, and build the HNSW index of a source with many chunks."""
        self._documents.analyze()
        self.update_graph(source)

    def update_graph(self, source: str) -> None:
        """Build the HNSW index of a source with many chunks, if it has none."""
        self._index_rows(source, anew=False)

    def _remove(self, source: str) -> None:
        self._documents.delete_source(source)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress | None) -> str:
        """Build missing HNSW indexes, or all; see `KnowledgeStore.mend`."""
        for info in self.sources():
            self._index_rows(info.name, anew=rebuild_all)
            if progress is not None:
                progress(info.chunks, info.chunks, info.name)
        return ""

    def _index_rows(self, source: str, *, anew: bool) -> None:
        count = self._documents.rows("SELECT count(*) FROM contents WHERE of_source = ?", (source,))[0][0]
        if count >= INDEXED_ROWS and self.fingerprint.dimension <= MAX_INDEXED_DIMENSIONS:
            self._documents.index_rows(source, self.fingerprint.dimension, anew=anew)

    def size(self) -> int:
        """Return the size of all tables and indexes in bytes."""
        statement = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = to_regnamespace(?)"
        return int(self._documents.rows(f"{statement} AND relkind = 'r'", (DOCUMENTS.schema,))[0][0] or 0)

    def load_scope(self, source: str) -> ScopeIndex | None:
        """Return a source's scope index; None if there is none that can be read."""
        rows = self._documents.rows("SELECT data FROM scopes WHERE source = ?", (source,))
        if not rows:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "scope.npz")
            path.write_bytes(rows[0][0])
            return ScopeIndex.load(path)

    def save_scope(self, source: str, index: ScopeIndex) -> None:
        """Store a source's scope index."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "scope.npz")
            index.save(path)
            data = path.read_bytes()
        with self._documents.transaction() as connection:
            connection.execute(
                "INSERT INTO scopes VALUES (?, ?) ON CONFLICT (source) DO UPDATE SET data = excluded.data",
                (source, data),
            )

    def vectors(self, source: str) -> PostgresVectors:
        """Return the dense search of a source."""
        from llama_index_agentic_kb.store.postgres_search import PostgresVectors  # noqa: PLC0415 (loads LlamaIndex)

        made = partial(PostgresVectors, self._documents, source, self.fingerprint.dimension)
        return self._once(PostgresVectors, source, made)

    def lexical(self, source: str) -> PostgresWords:
        """Return the lexical search of a source."""
        from llama_index_agentic_kb.store.postgres_search import PostgresWords  # noqa: PLC0415 (loads LlamaIndex)

        self._check_source(source)
        return self._once(PostgresWords, source, partial(PostgresWords, self._documents, source))


def index_name(source: str) -> str:
    """Return the name of a source's HNSW index."""
    return f"contents_hnsw_{hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def vector_text(vector: Sequence[float] | Floats) -> str:
    """Return a vector as pgvector reads it."""
    return f"[{','.join(map(repr, np.asarray(vector, dtype=np.float32).tolist()))}]"


def lexeme(term: str) -> str:
    """Return a term, quoted for a ``tsvector`` or ``tsquery``."""
    escaped = term[:500].replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def _positions(terms: Sequence[str]) -> str:
    """Return terms as a ``tsvector``; PostgreSQL counts at most 255 places of a term."""
    places: dict[str, list[str]] = {}
    for at, term in enumerate(terms, start=1):
        places.setdefault(term, []).append(str(min(at, 16_383)))
    return " ".join(f"{lexeme(term)}:{','.join(dict.fromkeys(at[:255]))}" for term, at in places.items())
