"""Searches of a source in PostgreSQL: by vectors (pgvector) and by words (its full-text index), filters in SQL.

Vectors are compared exactly, except in a source with an HNSW index: there an unfiltered search uses the index, and a
filter that matches many rows takes those of the index's nearest rows that match, or compares all that do.

Words are those of ``search.tokenizing``, as in the lexical index of a local store. A chunk's score is the sum of
PostgreSQL's ``ts_rank`` for each word of the query, weighted by how rare the word is: ``ts_rank`` alone weighs "the"
like any other word.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from llama_index.core.schema import BaseNode, NodeWithScore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult

from llama_index_agentic_kb._aio import call_deadline
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.dialects import PostgresStoreSql, SqlCondition, all_hold
from llama_index_agentic_kb.search.tokenizing import Analyzer
from llama_index_agentic_kb.store.chunking import chunk_to_node
from llama_index_agentic_kb.store.database import Floats, Row, SourceReader, Statements
from llama_index_agentic_kb.store.postgres import PostgresDatabase, index_name, lexeme, vector_text
from llama_index_agentic_kb.store.vectors import Passes, Ranked, check_deadline, growing, query_vector, take, where

EXACT_ROWS: Final = 20_000
"""The maximum number of rows under a filter that are compared exactly in a source with an HNSW index."""
MAX_CANDIDATES: Final = 1_000
"""The maximum number of rows that pgvector's HNSW index returns."""
MIN_CANDIDATES: Final = 400
"""The number of candidates that the index keeps during a search; see ``chroma.EF_SEARCH``."""
STATISTICS_SECONDS: Final = 60.0
"""The age after which the frequencies of words are read again."""
COUNTED: Final = 1_000
"""The number of chunks up to which a word without statistics is counted."""
COMMON: Final = 0.1
"""The share of chunks from which a word only weighs, and finds nothing by itself, beside rarer words."""


class PostgresVectors:
    """Dense search in one source; thread-safe."""

    dialect = PostgresStoreSql

    def __init__(self, documents: PostgresDatabase, source: str, dimension: int) -> None:
        self._documents = documents
        self._source = source
        self._dimension = dimension
        self._far = f"CAST(vector AS vector({dimension})) <=> CAST(? AS vector({dimension}))"

    def search(
        self, query: VectorStoreQuery, passes: Passes | None = None, *, deadline: float | None = None
    ) -> tuple[VectorStoreQueryResult, str]:
        """Find the nearest chunks; see ``SourceVectors.search``."""
        check_deadline(deadline)
        vector = query_vector(query, self._dimension)
        condition = where(query, self.dialect)

        def work(connection: Statements) -> tuple[VectorStoreQueryResult, str]:
            fetch = partial(_nodes, self._documents, connection)
            taken = partial(take, fetch=fetch, top_k=query.similarity_top_k, passes=passes, deadline=deadline)
            state = (
                "SELECT (SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(?)) FROM sources WHERE name = ?"
            )
            found = connection.execute(state, (index_name(self._source), self._source)).fetchall()
            if not found:
                raise _missing(self._documents, self._source)
            if vector is None:
                return taken((row, 0.0) for row in self._matching(connection, condition)), "listed"
            top_k = query.similarity_top_k
            nearest, note = self._by_index(connection, vector, condition, top_k) if found[0][0] else ((), "")
            result = taken(nearest)
            if nearest and len(result.ids or []) == top_k:
                return result, f"{note}taken from the nearest of all" if note else "searched"
            exact = partial(self._exact, connection, vector, condition)
            return taken(growing(exact, top_k, sys.maxsize)), f"{note}searched exactly"

        return self._documents.read(work, deadline)

    def reader(self) -> SourceReader:
        """Return the reader of the source's vectors, from which its scope index is made."""
        return SourceReader(self._documents, self._source, self._dimension)

    def _by_index(
        self, connection: Statements, vector: Floats, condition: SqlCondition | None, top_k: int
    ) -> tuple[Iterable[Ranked], str]:
        """Return the nearest rows by the HNSW index, none where an exact search is better, and a note on the filter."""
        if condition is None:
            nearest = partial(self._nearest, connection, vector)
            return growing(nearest, top_k, MAX_CANDIDATES) if top_k <= MAX_CANDIDATES else (), ""
        count = len(self._matching(connection, condition, EXACT_ROWS + 1))
        if count <= EXACT_ROWS:
            return (), f"filter matches {count:,}: "
        candidates = self._nearest(connection, vector, MAX_CANDIDATES)
        listed = self._documents.dialect.any_value("id", [row for row, _ in candidates])
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
        """Return the nearest matching rows, of a comparison with all of them."""
        far = f"0 + ({self._far})"  # an expression that no index has
        if condition is None:
            statement = f"SELECT id, {far} FROM contents WHERE of_source = ?"  # noqa: S608 (made here)
            parameters: list[object] = [self._source]
        else:
            statement = f"SELECT id, {far} FROM chunks JOIN contents USING (id) WHERE source = ? AND {condition[0]}"  # noqa: S608
            parameters = [self._source, *condition[1]]
        rows = connection.execute(f"{statement} ORDER BY 2, 1 LIMIT ?", (vector_text(vector), *parameters, count))
        return list(map(_ranked, rows))

    def _nearest(self, connection: Statements, vector: Floats, count: int) -> list[Ranked]:
        """Return the nearest rows of the whole source, by its HNSW index."""
        connection.execute(
            f"SET LOCAL hnsw.ef_search = {min(MAX_CANDIDATES, max(MIN_CANDIDATES, count))};"
            " SET LOCAL plan_cache_mode = force_custom_plan"  # a plan for any source could not use a source's index
        )
        rows = connection.execute(
            f"SELECT id, {self._far} FROM contents WHERE of_source = ? ORDER BY {self._far} LIMIT ?",  # noqa: S608
            (vector_text(vector), self._source, vector_text(vector), count),
        )
        return sorted(map(_ranked, rows), key=lambda item: (item[1], item[0]))


class PostgresWords:
    """Lexical search in one source; thread-safe."""

    def __init__(self, documents: PostgresDatabase, source: str) -> None:
        self._documents = documents
        self._source = source
        self._analyzer = Analyzer()
        self._statistics: tuple[float, int, dict[str, float]] = (-math.inf, 0, {})

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[NodeWithScore]:
        """Find nodes by the words of a query; see ``StoredLexicalSearch.search``."""
        if top_k < 1:
            return []
        return self._documents.read(lambda connection: self._find(connection, query, top_k, filters), call_deadline())

    def _find(self, connection: Statements, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        connection.execute("SET LOCAL enable_seqscan = off")  # else rare words are looked for in all chunks
        statement = "SELECT language FROM sources LEFT JOIN languages ON source = name WHERE name = ?"
        languages = connection.execute(statement, (self._source,)).fetchall()
        if not languages:
            raise _missing(self._documents, self._source)
        words = self._analyzer.query(query, [language for (language,) in languages if language])
        held, total = self._frequencies(connection, [form for forms in words for form in forms])
        counts = {forms: sum(held[form] for form in forms) for forms in words}
        words = [forms for forms in words if counts[forms]]
        if not words:
            return []
        rarities = {
            forms: math.log1p((max(0.0, total - counts[forms]) + 0.5) / (counts[forms] + 0.5)) for forms in words
        }
        rare = [forms for forms in words if counts[forms] < COMMON * total]
        rows = self._ranked(connection, rare, rarities, top_k, filters) if rare else []
        if len(rows) < top_k and len(rare) < len(words):
            rows = self._ranked(connection, words, rarities, top_k, filters)
        nodes = _nodes(self._documents, connection, [row for row, _ in rows])
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
        ranks = ["ts_rank(held, CAST(? AS tsquery))"] * max(map(len, rarities))
        score = " + ".join(f"? * greatest({', '.join(ranks[: len(forms)])})" for forms in rarities)
        weights = [part for forms, rarity in rarities.items() for part in (rarity, *map(lexeme, forms))]
        any_word = " | ".join(lexeme(form) for forms in words for form in forms)
        sql, parameters = ("TRUE", []) if filters is None else self._documents.dialect.filter(filters)
        # An expression in a subquery of its own: otherwise each ts_rank would read and unpack the words again.
        matching = (
            "SELECT id, node_id, words || '' AS held FROM chunks JOIN contents USING (id)"  # noqa: S608 (made here)
            f" WHERE of_source = ? AND words @@ CAST(? AS tsquery) AND {sql} OFFSET 0"
        )
        statement = f"SELECT id, {score} FROM ({matching}) AS matching ORDER BY 2 DESC, node_id LIMIT ?"  # noqa: S608 (same)
        found = connection.execute(statement, (*weights, self._source, any_word, *parameters, min(top_k, 1 << 62)))
        return [tuple(row) for row in found]

    def _frequencies(self, connection: Statements, terms: Sequence[str]) -> tuple[dict[str, float], int]:
        """Return in how many chunks each term is, about, and the number of chunks."""
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
        held = {term: shares[term] * total for term in terms if term in shares}
        rest = [term for term in terms if term not in shares]
        if rest:
            some = f"SELECT 1 FROM contents WHERE of_source = ? AND words @@ CAST(? AS tsquery) LIMIT {COUNTED}"  # noqa: S608
            one = f"(SELECT count(*) FROM ({some}) AS found)"  # noqa: S608 (constants)
            parameters = [part for term in rest for part in (self._source, lexeme(term))]
            counts = connection.execute(f"SELECT {', '.join([one] * len(rest))}", parameters).fetchall()[0]
            held |= dict(zip(rest, counts, strict=True))
        return held, total


def _nodes(documents: PostgresDatabase, connection: Statements, rows: Sequence[int]) -> dict[int, BaseNode]:
    return {chunk.id: chunk_to_node(chunk) for chunk in documents.chunks_of("id", rows, connection)}


def _ranked(row: Row) -> Ranked:
    # The distance of a vector of zeros is not a number; a local store takes it as 1.
    return row[0], 1.0 if math.isnan(row[1]) else row[1]


def _missing(documents: PostgresDatabase, source: str) -> ConfigurationError:
    return ConfigurationError(f"The store {documents.location!r} has no source {source!r} any more.")
