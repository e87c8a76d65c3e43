"""A store in one PostgreSQL database with the extension ``vector``: documents, chunks, vectors and words.

Many processes may write at the same time: each document is a transaction of its own, which begins by locking the
document's row, and storing a document twice changes nothing. The tables are in the schema ``agentic_kb``; sessions may
be in the same database.

Vectors are compared exactly, except in a source with an HNSW index: there an unfiltered search uses the index, and a
filter that matches many rows takes those of the index's nearest rows that match, or compares all that do.

Words are those of ``search.tokenizing``, as in the lexical index of a local store. A chunk's score is the sum of
PostgreSQL's ``ts_rank`` for each word of the query, weighted by how rare the word is: ``ts_rank`` alone weighs "the"
like any other word.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import NodeWithScore
from llama_index.core.vector_stores.types import VectorStoreQueryResult

from llama_index_agentic_kb._aio import call_deadline
from llama_index_agentic_kb._text import redacted
from llama_index_agentic_kb.errors import (
    ConfigurationError,
    DeadlineExceededError,
    SessionStoreError,
    StoreDamagedError,
)
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.dialects import PostgresStoreSql, SqlCondition, all_hold
from llama_index_agentic_kb.search.prototypes import ScopeIndex
from llama_index_agentic_kb.search.tokenizing import document_terms, query_terms
from llama_index_agentic_kb.store.database import Floats, Piece, Row, Statements, plain_name
from llama_index_agentic_kb.store.sql import Revisions, SqlDatabase, parsed_url, remedy_of
from llama_index_agentic_kb.store.store import KnowledgeStore, RepairProgress
from llama_index_agentic_kb.store.vectors import Ranked, StoreVectorStore, Taken

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DOCUMENTS: Final = Revisions("documents", "0001", "agentic_kb_documents_version", schema="agentic_kb")
INDEXED_ROWS = 20_000
"""The number of chunks from which a source gets an HNSW index. An exact search of 50,000 took 127 ms on busy cores."""
MAX_INDEXED_DIMENSIONS: Final = 2_000  # the maximum number of dimensions that pgvector indexes
EXACT_ROWS: Final = 20_000
"""The maximum number of rows under a filter that are compared exactly in a source with an HNSW index."""
MAX_CANDIDATES: Final = 1_000  # the maximum number of rows that pgvector's HNSW index returns
MIN_CANDIDATES: Final = 400
"""The number of candidates that the index keeps during a search; as in a local store's graph."""
STATISTICS_SECONDS: Final = 60.0  # the age after which the frequencies of words are read again
COUNTED: Final = 1_000  # the number of chunks up to which a word without statistics is counted
COMMON: Final = 0.1
"""The share of chunks from which a word only weighs, and finds nothing by itself, beside rarer words."""
_REMEDIES: Final = {
    "42501": "This user needs the right to create a schema (GRANT CREATE ON DATABASE ...), and the extension vector: "
    "a superuser runs CREATE EXTENSION vector once.",
    "0A000|58P01": "Install pgvector on the server (https://github.com/pgvector/pgvector), then run this again.",
}
"""What to do if the store can't be opened or upgraded, by PostgreSQL's error code."""


class PostgresStore(KnowledgeStore):
    """A store in PostgreSQL; see the module, and `KnowledgeStore` for the methods.

    ``ConfigurationError`` names the remedy if it can't be opened. Where the URL says nothing, libpq's environment
    variables and password file hold.
    """

    shared = True
    dialect = PostgresStoreSql

    def __init__(self, path: str | Path, *, create: bool, timeout: float = 30.0) -> None:
        url = str(path)
        parsed = parsed_url(url)
        if parsed is None or parsed.get_backend_name() != "postgresql":
            raise ConfigurationError("The store's address is not a directory, nor postgresql://user@host/database.")
        location = redacted(parsed.set(query={}).render_as_string(hide_password=True))
        try:
            database = SqlDatabase(url, DOCUMENTS, timeout=timeout, create=create)
        except (SessionStoreError, DeadlineExceededError) as error:
            remedy = remedy_of(error.__cause__, _REMEDIES)
            if not remedy and not remedy_of(error.__cause__):  # the error has it
                remedy = "Check the address, the database's name, the user, its password and its rights."
            raise ConfigurationError(f"The store {location!r} can't be opened: {error}. {remedy}".rstrip()) from error
        super().__init__(database, location, timeout)

    def _put_contents(self, connection: Statements, source: str, pieces: Sequence[Piece]) -> None:
        """Store the texts, words and vectors of chunks that are stored already."""
        languages, rows = set(), []
        for chunk, vector in pieces:
            language, terms = document_terms(f"{chunk.metadata.get('title', '')}\n{chunk.text}")
            languages.add(language)
            places: dict[str, list[str]] = {}
            for at, term in enumerate(terms.split(), start=1):
                places.setdefault(term, []).append(str(min(at, 16_383)))
            # As a tsvector; PostgreSQL counts at most 255 places of a term.
            words = " ".join(f"{_lexeme(term)}:{','.join(dict.fromkeys(at[:255]))}" for term, at in places.items())
            rows.append((source, chunk.text, _vector_text(vector), words, chunk.node_id))
        connection.executemany(
            "INSERT INTO contents SELECT id, ?, ?, CAST(? AS vector), CAST(? AS tsvector)"
            " FROM chunks WHERE node_id = ?",
            rows,
        )
        known = [(source, language) for language in sorted(languages)]
        connection.executemany("INSERT INTO languages VALUES (?, ?) ON CONFLICT DO NOTHING", known)

    def _unpacked(self, vectors: Sequence[str]) -> Floats:
        """Return the numbers of all the given stored vectors, one vector after the other."""
        return np.fromstring(",".join(vector[1:-1] for vector in vectors), dtype=np.float32, sep=",")

    def _check(self) -> None:
        """Check that each chunk has its text; raise ``StoreDamagedError`` if not."""
        if self._rows("SELECT id FROM chunks LEFT JOIN contents USING (id) WHERE contents.text IS NULL LIMIT 1"):
            raise StoreDamagedError(f"{self.location!r} has chunks without text: restore it from a backup.")

    def writing(self, wait: float = 0.0) -> AbstractContextManager[None]:  # noqa: ARG002 (of the other kind of store)
        """Return a block for writing, which excludes nobody: each document has a lock of its own."""
        return nullcontext()

    def update_indexes(self, source: str) -> None:
        """Update the statistics of words and metadata, and build the HNSW index of a source with many chunks."""

        def work(connection: Statements) -> None:
            for name in ("contents_by_words", "chunks_by_metadata"):  # else searches read the latest entries one by one
                connection.execute("SELECT gin_clean_pending_list(CAST(? AS regclass))", (name,))
            connection.execute("ANALYZE chunks, contents")

        self._write(work)
        self.update_graph(source)

    def update_graph(self, source: str, *, anew: bool = False) -> None:
        """Build the HNSW index of a source with many chunks, if it has none, or anew."""
        count = self._rows("SELECT count(*) FROM contents WHERE of_source = ?", (source,))[0][0]
        if count >= INDEXED_ROWS and self.fingerprint.dimension <= MAX_INDEXED_DIMENSIONS:
            with self._errors("written"):
                build = partial(self._build_index, source, anew=anew)
                self._database.retry(build, time.monotonic() + self.timeout)

    def mend(self, *, rebuild_all: bool, progress: RepairProgress) -> str:
        """Build missing HNSW indexes, or all; see `KnowledgeStore.mend`."""
        for info in self.sources():
            self.update_graph(info.name, anew=rebuild_all)
            progress(info.chunks, info.chunks, info.name)
        return ""

    def size(self) -> int:
        """Return the size of all tables and indexes in bytes."""
        statement = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = to_regnamespace(?)"
        return int(self._rows(f"{statement} AND relkind = 'r'", (DOCUMENTS.schema,))[0][0] or 0)

    def load_scope(self, source: str) -> ScopeIndex | None:
        """Return a source's scope index; None if there is none that can be read."""
        rows = self._rows("SELECT data FROM scopes WHERE source = ?", (source,))
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
        statement = "INSERT INTO scopes VALUES (?, ?) ON CONFLICT (source) DO UPDATE SET data = excluded.data"
        self._write(lambda connection: connection.execute(statement, (source, data)))

    def vectors(self, source: str) -> PostgresVectors:
        """Return the dense search of a source."""
        return self._once(PostgresVectors.over, source)

    def lexical(self, source: str) -> PostgresWords:
        """Return the lexical search of a source."""
        self._existing_state(source)
        return self._once(PostgresWords, source)

    def _build_index(self, source: str, *, anew: bool) -> None:
        """Build a source's HNSW index if it has none, or anew, while others read and write."""
        dimension = self.fingerprint.dimension
        name, quoted = _index_name(source), source.replace("'", "''").replace("%", "%%")
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


class PostgresVectors(StoreVectorStore):
    """Dense search in one source of a store in PostgreSQL."""

    filter_dialect = PostgresStoreSql
    _store: PostgresStore = PrivateAttr()

    def _found(
        self, vector: Floats | None, where: SqlCondition | None, top_k: int, taken: Taken, deadline: float | None
    ) -> tuple[VectorStoreQueryResult, str]:
        store = self._store

        def work(connection: Statements) -> tuple[VectorStoreQueryResult, str] | None:
            fetch = partial(store._nodes_of, "id", connection=connection)
            statement = (
                "SELECT (SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(?)) FROM sources WHERE name = ?"
            )
            found = connection.execute(statement, (_index_name(self._source), self._source)).fetchall()
            if not found:
                return None
            if vector is None:
                return taken(((row, 0.0) for row in self._matching(connection, where)), fetch), "listed"
            nearest, note = self._by_index(connection, vector, where, top_k) if found[0][0] else ([], "")
            if len(nearest) >= top_k:
                return taken(nearest, fetch), f"{note}taken from the nearest of all" if note else "searched"
            return taken(self._exact(connection, vector, where, top_k), fetch), f"{note}searched exactly"

        answer = store._read(work, deadline)
        if answer is None:  # now that the connection is free: the error takes one
            raise store._no_source(self._source)
        return answer

    def _by_index(
        self, connection: Statements, vector: Floats, condition: SqlCondition | None, top_k: int
    ) -> tuple[list[Ranked], str]:
        """Return the nearest rows by the HNSW index, none where an exact search is better, and a note on the filter."""
        if condition is None:
            found = self._nearest(connection, vector, top_k) if top_k <= MAX_CANDIDATES else []
            if 0 < len(found) < top_k:  # among the candidates are rows that were replaced since the last vacuum
                found = self._nearest(connection, vector, MAX_CANDIDATES)
            return found, ""
        count = len(self._matching(connection, condition, EXACT_ROWS + 1))
        if count <= EXACT_ROWS:
            return [], f"filter matches {count:,}: "
        candidates = self._nearest(connection, vector, MAX_CANDIDATES)
        listed = self.filter_dialect.any_value("id", [row for row, _ in candidates])
        matching = set(self._matching(connection, all_hold(condition, listed)))
        return [item for item in candidates if item[0] in matching], f"filter matches more than {EXACT_ROWS:,}: "

    def _matching(self, connection: Statements, condition: SqlCondition | None, limit: int | None = None) -> list[int]:
        """Return the ids of the chunks that match a filter, in ascending order if there is no limit."""
        sql, parameters = condition or ("TRUE", [])
        end = "ORDER BY id" if limit is None else f"LIMIT {limit}"
        statement = f"SELECT id FROM chunks WHERE source = ? AND {sql} {end}"  # noqa: S608 (made by the dialect)
        return [row[0] for row in connection.execute(statement, (self._source, *parameters))]

    def _exact(
        self, connection: Statements, vector: Floats, condition: SqlCondition | None, count: int
    ) -> list[Ranked]:
        far = f"0 + ({self._far()})"  # an expression that no index has
        if condition is None:
            statement = f"SELECT id, {far} FROM contents WHERE of_source = ?"  # noqa: S608 (made here)
            parameters: list[object] = [self._source]
        else:
            statement = f"SELECT id, {far} FROM chunks JOIN contents USING (id) WHERE source = ? AND {condition[0]}"  # noqa: S608
            parameters = [self._source, *condition[1]]
        rows = connection.execute(f"{statement} ORDER BY 2, 1 LIMIT ?", (_vector_text(vector), *parameters, count))
        return list(map(_ranked, rows))

    def _nearest(self, connection: Statements, vector: Floats, count: int) -> list[Ranked]:
        connection.execute(
            f"SET LOCAL hnsw.ef_search = {min(MAX_CANDIDATES, max(MIN_CANDIDATES, count))};"
            " SET LOCAL plan_cache_mode = force_custom_plan"  # a plan for any source could not use a source's index
        )
        rows = connection.execute(
            f"SELECT id, {self._far()} FROM contents WHERE of_source = ? ORDER BY {self._far()} LIMIT ?",  # noqa: S608
            (_vector_text(vector), self._source, _vector_text(vector), count),
        )
        return sorted(map(_ranked, rows), key=lambda item: (item[1], item[0]))

    def _far(self) -> str:
        dimension = self._store.fingerprint.dimension
        return f"CAST(vector AS vector({dimension})) <=> CAST(? AS vector({dimension}))"


class PostgresWords:
    """Lexical search in one source; thread-safe."""

    def __init__(self, store: PostgresStore, source: str) -> None:
        self._store = store
        self._source = source
        self._statistics: tuple[float, int, dict[str, float]] = (-math.inf, 0, {})

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``StoredLexicalSearch.search``."""
        if top_k < 1:
            return []
        store = self._store
        found = store._read(lambda connection: self._find(connection, query, top_k, filters), call_deadline())
        if found is None:  # now that the connection is free: the error takes one
            raise store._no_source(self._source)
        return found

    def _find(
        self, connection: Statements, query: str, top_k: int, filters: FilterNode | None
    ) -> list[NodeWithScore] | None:
        """Return what `search` finds; None if the source does not exist."""
        connection.execute("SET LOCAL enable_seqscan = off")  # else rare words are looked for in all chunks
        statement = "SELECT language FROM sources LEFT JOIN languages ON source = name WHERE name = ?"
        languages = connection.execute(statement, (self._source,)).fetchall()
        if not languages:
            return None
        words = query_terms(query, [language for (language,) in languages if language])
        counts, total = self._counted(connection, words)
        rarities = {
            forms: math.log1p((max(0.0, total - count) + 0.5) / (count + 0.5)) for forms, count in counts.items()
        }
        rare = [forms for forms, count in counts.items() if count < COMMON * total]
        rows = self._ranked(connection, rare, rarities, top_k, filters)
        if len(rows) < top_k and len(rare) < len(counts):
            rows = self._ranked(connection, list(counts), rarities, top_k, filters)
        nodes = self._store._nodes_of("id", [row for row, _ in rows], connection)
        return [NodeWithScore(node=nodes[row], score=float(score)) for row, score in rows if row in nodes]

    def _ranked(
        self,
        connection: Statements,
        words: Sequence[tuple[str, ...]],
        rarities: Mapping[tuple[str, ...], float],
        top_k: int,
        filters: FilterNode | None,
    ) -> list[Row]:
        """Return the best chunks with any of the words, and their scores by all words."""
        if not words:
            return []
        ranks = ["ts_rank(held, CAST(? AS tsquery))"] * max(map(len, rarities))
        score = " + ".join(f"? * greatest({', '.join(ranks[: len(forms)])})" for forms in rarities)
        weights = [part for forms, rarity in rarities.items() for part in (rarity, *map(_lexeme, forms))]
        any_word = " | ".join(_lexeme(form) for forms in words for form in forms)
        sql, parameters = ("TRUE", []) if filters is None else self._store.dialect.filter(filters)
        # An expression in a subquery of its own: otherwise each ts_rank would read and unpack the words again.
        matching = (
            "SELECT id, node_id, words || '' AS held FROM chunks JOIN contents USING (id)"  # noqa: S608 (made here)
            f" WHERE of_source = ? AND words @@ CAST(? AS tsquery) AND {sql} OFFSET 0"
        )
        statement = f"SELECT id, {score} FROM ({matching}) AS matching ORDER BY 2 DESC, node_id LIMIT ?"  # noqa: S608 (same)
        found = connection.execute(statement, (*weights, self._source, any_word, *parameters, min(top_k, 1 << 62)))
        return [tuple(row) for row in found]

    def _counted(
        self, connection: Statements, words: Sequence[tuple[str, ...]]
    ) -> tuple[dict[tuple[str, ...], float], int]:
        """Return in how many chunks each word is, about, without those that are in none; and the number of chunks."""
        shares, total = self._frequencies(connection)
        terms = list(dict.fromkeys(chain.from_iterable(words)))
        held = {term: shares[term] * total for term in terms if term in shares}
        rest = [term for term in terms if term not in shares]
        if rest:
            some = f"SELECT 1 FROM contents WHERE of_source = ? AND words @@ CAST(? AS tsquery) LIMIT {COUNTED}"  # noqa: S608
            one = f"(SELECT count(*) FROM ({some}) AS found)"  # noqa: S608 (constants)
            parameters = [part for term in rest for part in (self._source, _lexeme(term))]
            counts = connection.execute(f"SELECT {', '.join([one] * len(rest))}", parameters).fetchall()[0]
            held |= dict(zip(rest, counts, strict=True))
        return {forms: count for forms in words if (count := sum(held[form] for form in forms))}, total

    def _frequencies(self, connection: Statements) -> tuple[dict[str, float], int]:
        """Return the share of chunks in which each frequent term is, and the number of chunks."""
        read_at, total, shares = self._statistics
        if time.monotonic() - read_at > STATISTICS_SECONDS:
            count = "SELECT count(*) FROM contents WHERE of_source = ?"
            total = connection.execute(count, (self._source,)).fetchall()[0][0]
            statistics = connection.execute(
                "SELECT CAST(CAST(most_common_elems AS text) AS text[]), most_common_elem_freqs FROM pg_stats"
                " WHERE schemaname = 'agentic_kb' AND tablename = 'contents' AND attname = 'words'"
            ).fetchall()
            elements, found = statistics[0] if statistics else ((), ())
            shares = dict(zip(elements or (), found or (), strict=False))  # the last two are the extremes
            self._statistics = (time.monotonic(), total, shares)
        return shares, total


def _ranked(row: Row) -> Ranked:
    # The distance of a vector of zeros is not a number; a local store takes it as 1.
    return row[0], 1.0 if math.isnan(row[1]) else row[1]


def _index_name(source: str) -> str:
    return f"contents_hnsw_{plain_name(source)}"


def _vector_text(vector: Sequence[float] | Floats) -> str:
    """Return a vector as pgvector reads it."""
    return f"[{','.join(map(repr, np.asarray(vector, dtype=np.float32).tolist()))}]"


def _lexeme(term: str) -> str:
    """Return a term, quoted for a ``tsvector`` or ``tsquery``."""
    escaped = term[:500].replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"
