"""BM25 search with tantivy: a thread-safe index in memory or in a directory, with updates, deletes and filters.

Scores are BM25 (Robertson and Zaragoza 2009) with tantivy's defaults, k1 = 1.2 and b = 0.75. Statistics cover all
documents of the index, including those that a filter excludes, one document with the commit's version mark and, for a
while, deleted documents. Equal scores are ordered by node id. Query text contains no operators.

Filters match exactly as in ``schema.matches``. Each metadata value is indexed as a term of key and value. An equality
becomes a query for its terms; for any other condition all indexed values of its key are tested, up to 10,000. These
terms may select too many documents, but never too few: each hit's metadata is checked, and more hits are fetched until
enough have passed or none remain.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import tantivy
from tantivy import Occur, Query

from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.schema import Condition, FilterGroup, FilterLogic, FilterNode, FilterOperator, matcher
from llama_index_agentic_kb.schema.filters import conditions, flat
from llama_index_agentic_kb.search.tokenizing import ANALYSIS, LANGUAGES, document_terms, query_terms

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode, NodeWithScore

_FORMAT: Final = f"1 analysis={ANALYSIS} language=None"  # of fields and terms; an index of another must be rebuilt
_HEAP: Final = 64_000_000  # bytes of the writer's memory; when it is full, a segment is written
_MAX_TIES: Final = 1_000  # maximum number of hits of one score that are ordered by their ids
_MAX_VALUES: Final = 10_000  # maximum number of values of a metadata key that are tested against a condition
_MAX_TERM: Final = 400  # maximum number of characters of a metadata term; longer terms are replaced by a hash
_KEY_PART: Final = 100  # number of characters of the key that precede the hash
_EQUALITIES: Final = frozenset({FilterOperator.EQ, FilterOperator.IN, FilterOperator.ANY})

Hits: TypeAlias = "list[tuple[float, tantivy.DocAddress]]"
Superset: TypeAlias = tuple[str, ...] | Query | None
"""A query for a superset of a filter's matches: terms (any of them) or a query; None for all documents."""


class LexicalSearch(Protocol):
    """A lexical search that complements a source's own search."""

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Return at most ``top_k`` nodes for a query, best first, all matching the filter; on several threads at once.

        The nodes are equal to those that the source's own search returns.
        """
        ...


class NotIndexedError(Exception):
    """There is deliberately no lexical index; the message names the reason. Searches never propagate it."""


class LexicalDocument(NamedTuple):
    """The indexed parts of a node."""

    node_id: str
    text: str
    metadata: Mapping[str, object]


class LexicalHit(NamedTuple):
    """A found document."""

    node_id: str
    score: float


def lexical_document(node: BaseNode) -> LexicalDocument:
    """Return the document to index for a node: the text sent to embedding models, preceded by its title if missing.

    Questions often name documents by their title or file name.
    """
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415 (this module itself needs no LlamaIndex)

    text = node.get_content(metadata_mode=MetadataMode.EMBED)
    title = str(node.metadata.get("title") or node.metadata.get("file_name") or "")
    return LexicalDocument(node.node_id, text if title in text else f"{title}\n{text}", node.metadata)


class LexicalIndex:
    """A BM25 index in a directory, which is created if missing, or in memory.

    ``RetrievalError`` is raised for a directory with other files, a damaged index, or one of another format version.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._name = "the lexical index" + ("" if directory is None else f" in {str(directory)!r}")
        with self._errors("opened"):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            builder = tantivy.SchemaBuilder()
            builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
            builder.add_text_field("mark", tokenizer_name="raw", index_option="basic")
            builder.add_text_field("language", tokenizer_name="raw", index_option="basic")
            builder.add_text_field("terms", tokenizer_name="terms", index_option="freq")
            builder.add_text_field("facts", tokenizer_name="raw", index_option="basic")
            builder.add_bytes_field("metadata", stored=True)
            self._schema = builder.build()
            self._index = tantivy.Index(self._schema, path=None if directory is None else str(directory))
            whitespace = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()
            self._index.register_tokenizer("terms", whitespace)
            self._view = self._look()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._view)

    @property
    def mark(self) -> str | None:
        """The version of the indexed data, as ``mark`` of the last ``update`` had it; None before the first."""
        return self._view.mark

    def node_ids(self) -> set[str]:
        """Return the ids of all documents."""
        with self._errors("read"):
            found = self._view.searcher.terms_with_prefix("id", "", Query.all_query())
        return {node_id for node_id, _ in found}

    def update(
        self, put: Iterable[LexicalDocument] = (), *, delete: Iterable[str] = (), mark: str = "", clear: bool = False
    ) -> None:
        """Delete documents, all with ``clear``, and add or replace others (each id once) in one atomic commit.

        ``mark`` is stored with the commit, such as the version of the indexed data. ``RetrievalError`` is raised if the
        index can't be written, as another writer is active or the disk is full.
        """
        with self._lock:
            with self._errors("written"):
                writer = self._index.writer(heap_size=_HEAP, num_threads=1)
            try:
                with self._errors("written"):  # a killed writer's files: the same update would name its own like them
                    writer.garbage_collect_files()
                if clear:
                    writer.delete_all_documents()
                for node_id in delete:
                    writer.delete_documents_by_term("id", node_id)
                has_documents = len(self) > 0
                for document in put:  # errors of the caller's iterable are not index errors
                    with self._errors("written"):
                        if has_documents:
                            writer.delete_documents_by_term("id", document.node_id)
                        writer.add_document(_indexed(document))
                with self._errors("written"):
                    writer.delete_documents_by_term("mark", _FORMAT)
                    note = tantivy.Document(mark=_FORMAT)
                    note.add_bytes("metadata", mark.encode())
                    writer.add_document(note)
                    writer.commit()
            except BaseException:
                writer.rollback()
                raise
            finally:
                writer.wait_merging_threads()  # releases the directory's lock
            self.refresh()

    def refresh(self) -> None:
        """Load the commits that other writers have made in the directory."""
        with self._errors("read"):
            self._view = self._look()

    def _look(self) -> _View:
        self._index.reload()
        searcher = self._index.searcher()
        marks = searcher.search(Query.term_query(self._schema, "mark", _FORMAT, "basic"), limit=1).hits
        if not marks and searcher.num_docs:
            raise ValueError("another release made it, or it is damaged")
        mark = _stored(searcher.doc(marks[0][1])).decode() if marks else None
        languages = tuple(name for name in LANGUAGES if searcher.doc_freq("language", name))
        return _View(self._schema, searcher, languages, mark)

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[LexicalHit]:
        """Return at most ``top_k`` documents, best first; the module docstring describes scores, ties and filters."""
        view = self._view
        words = query_terms(query, view.languages)
        if top_k < 1 or not words or not len(view):
            return []
        with self._errors("read"):
            return view.search(words, top_k, filters)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Convert exceptions and panics of tantivy to ``RetrievalError``."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, ValueError | OSError) and type(error).__name__ != "PanicException":
                raise
            raise RetrievalError(f"{self._name} can't be {what}: {error}") from error


@dataclass(slots=True)
class _View:
    """A snapshot of the index at one commit, safe to search from several threads."""

    schema: tantivy.Schema
    searcher: tantivy.Searcher
    languages: tuple[str, ...]
    mark: str | None
    values: dict[str, list[tuple[str, object]] | None] = field(default_factory=dict)
    """The values of each key for which they were read, with their terms; None if they can't be enumerated."""

    def __len__(self) -> int:
        """Return the number of documents, without the internal one that marks a commit."""
        return int(self.searcher.num_docs) - (self.mark is not None)

    def search(self, words: Sequence[tuple[str, ...]], top_k: int, filters: FilterNode | None) -> list[LexicalHit]:
        """Return the best documents; ``words`` contains the terms of each word."""
        query, documents = self._query(words, filters), self.searcher.num_docs
        passes = None if filters is None else matcher(filters)
        limit = min(top_k + 1, documents)  # tantivy allocates for as many, and aborts the process beyond its memory
        while True:
            hits: Hits = self.searcher.search(query, limit=limit, count=False).hits
            found = self._passing(hits, passes)
            is_whole = len(hits) < limit or limit == documents
            is_tied = len(found) >= top_k and found[top_k - 1].score == hits[-1][0]  # the order of ids may need more
            is_endless = len(hits) > _MAX_TIES and hits[-_MAX_TIES][0] == hits[-1][0]
            if is_whole or (len(found) >= top_k and (is_endless or not is_tied)):
                return sorted(found, key=lambda hit: (-hit.score, hit.node_id))[:top_k]
            # Estimate the limit from the share of hits that passed, doubled, and at least quadruple it.
            limit = min(documents, max(4 * limit, 2 * limit * top_k // max(1, len(found))))

    def _passing(self, hits: Hits, passes: Callable[[Mapping[str, object]], bool] | None) -> list[LexicalHit]:
        found = []
        for score, address in hits:
            document = self.searcher.doc(address)
            if passes is None or passes(json.loads(_stored(document))):
                found.append(LexicalHit(str(document.get_first("id")), score))
        return found

    def _query(self, words: Sequence[tuple[str, ...]], filters: FilterNode | None) -> Query:
        query = _any_of(list(map(self._word, words)))
        superset = None if filters is None else self._superset(flat(filters))
        if superset is None:
            return query
        return _all_of([query, Query.const_score_query(self._as_query(superset), 0.0)])

    def _word(self, forms: Sequence[str]) -> Query:
        """Return the query for a word by its stems in several languages, of which the highest score counts.

        All have the document frequency of the stems together, as with synonyms; otherwise a word would weigh most in
        the language with the fewest documents.
        """
        queries = {form: Query.term_query(self.schema, "terms", form, "freq") for form in forms}
        if len(forms) == 1:
            return queries[forms[0]]
        held = {form: count for form in forms if (count := self.searcher.doc_freq("terms", form))}
        rarity = self._rarity(sum(held.values()))
        return Query.disjunction_max_query(
            [Query.boost_query(queries[form], rarity / self._rarity(count)) for form, count in held.items()]
        )

    def _rarity(self, held: int) -> float:
        """Return BM25's inverse document frequency, computed as in tantivy."""
        documents = max(held, self.searcher.num_docs)
        return math.log1p((documents - held + 0.5) / (held + 0.5))

    # -- filters as metadata terms -----------------------------------------------------------------------------------

    def _superset(self, tree: FilterNode) -> Superset:
        """Return the superset of a filter without negations that have an opposite (``flat``)."""
        if isinstance(tree, Condition) or tree.logic is FilterLogic.NOT:
            return self._condition_terms(tree)
        parts = list(map(self._superset, tree.filters))
        known = [part for part in parts if part is not None]
        if tree.logic is FilterLogic.AND:
            return _all_of(list(map(self._as_query, known))) if known else None
        return None if len(known) < len(parts) else self._either(known)

    def _either(self, parts: Sequence[tuple[str, ...] | Query]) -> tuple[str, ...] | Query:
        # One set query is fast; a thousand queries of one term each (for a principal's groups) are slow.
        terms = tuple(term for part in parts if isinstance(part, tuple) for term in part)
        queries = [part for part in parts if isinstance(part, Query)]
        return _any_of([self._as_query(terms), *queries]) if queries else terms

    def _as_query(self, part: tuple[str, ...] | Query) -> Query:
        if not isinstance(part, tuple):
            return part
        return Query.term_set_query(self.schema, "facts", part) if part else _any_of([])

    def _condition_terms(self, tree: FilterNode) -> tuple[str, ...] | None:
        """Return the terms of all values that match a condition, or its negation; None if they can't be enumerated."""
        (condition,), negated = conditions(tree), isinstance(tree, FilterGroup)
        key = condition.key
        if condition.operator is FilterOperator.IS_EMPTY and not negated:
            return None  # documents without the key have no term of it
        if condition.operator in _EQUALITIES and not negated:
            return tuple(_metadata_term(key, value) for value in condition.values)
        if (known := self._values_of(key)) is None:
            return None
        passes = matcher(tree)
        # The value may be a single value or an item of a list.
        return tuple(term for term, value in known if passes({key: value}) or passes({key: [value]}))

    def _values_of(self, key: str) -> list[tuple[str, object]] | None:
        if key not in self.values:
            quoted = json.dumps(key)
            found = self.searcher.terms_with_prefix("facts", f"{quoted}:", None, _MAX_VALUES + 1)
            hashed = self.searcher.terms_with_prefix("facts", f"{quoted[:_KEY_PART]}#", None, 1)
            values = [(term, json.loads(term[len(quoted) + 1 :])) for term, _ in found]
            self.values[key] = None if hashed or len(found) > _MAX_VALUES else values
        return self.values[key]


def _metadata_term(key: str, value: object) -> str:
    """Return the term of a key and value, a hash if it is long; equal values have the same term."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    quoted = json.dumps(key)
    term = f"{quoted}:{json.dumps(value)}"
    if len(term) <= _MAX_TERM:
        return term
    digest = hashlib.blake2b(term.encode(), digest_size=16).hexdigest()
    return f"{quoted[:_KEY_PART]}#{digest}"


def _indexed(document: LexicalDocument) -> tantivy.Document:
    """Return a document of the index. Its metadata have equal results of ``matches``; other than JSON's become {}."""
    language, terms = document_terms(document.text)
    made = tantivy.Document(id=document.node_id, language=language, terms=terms)
    kept: dict[str, object] = {}
    for key, value in document.metadata.items():
        listed = list(value) if isinstance(value, list | tuple | set | frozenset) else None
        items = list(map(_plain, [value] if listed is None else listed))
        kept[key] = items[0] if listed is None else items
        for term in {_metadata_term(key, item) for item in items or [[]] if item is not None}:  # also "it is empty"
            made.add_text("facts", term)
    made.add_bytes("metadata", json.dumps(kept).encode())
    return made


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float) else {}


def _stored(document: tantivy.Document) -> bytes:
    return bytes(document.get_first("metadata") or b"")


def _any_of(queries: Sequence[Query]) -> Query:
    return Query.boolean_query([(Occur.Should, query) for query in queries])


def _all_of(queries: Sequence[Query]) -> Query:
    return Query.boolean_query([(Occur.Must, query) for query in queries])
