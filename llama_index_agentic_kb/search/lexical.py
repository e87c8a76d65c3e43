"""BM25 over tantivy: an index in memory or in a directory, with adds, deletes and filters, safe from many threads.

Scores are BM25 (Robertson and Zaragoza 2009) with tantivy's defaults, k1 = 1.2 and b = 0.75, over all documents of the
index, those that a filter leaves out included; a commit's note counts as one more, and deleted ones may count for a
while. Equal scores are in the order of the node ids. Queries are made of terms alone; nothing in their text is an
operator.

A filter holds exactly as ``schema.matches`` does. What it says of a key is asked of the index itself, as terms made of
key and value, as long as the key has no more than 10,000 values or is asked for equality; these let through all that
could match. Each hit is checked by its metadata, and more hits are fetched until enough have passed or none are left.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from llama_index_agentic_kb.errors import RetrievalError
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.facts import comparable, facts
from llama_index_agentic_kb.search.languages import LANGUAGES
from llama_index_agentic_kb.search.lexical_view import LexicalHit, LexicalView
from llama_index_agentic_kb.search.tokenizing import ANALYSIS, Analyzer

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode, NodeWithScore

__all__ = ["LexicalDocument", "LexicalHit", "LexicalIndex", "LexicalSearch", "NotIndexedError", "lexical_document"]

_FORMAT: Final = f"1 analysis={ANALYSIS}"
"""Of the terms and fields; an index of another one is made again."""
_HEAP: Final = 64_000_000
"""Bytes that a writer fills before it starts another segment."""

Metadata: TypeAlias = Mapping[str, Any]


class LexicalSearch(Protocol):
    """Something that is searched by words, beside a source's own search."""

    def search(self, query: str, top_k: int, filters: FilterNode | None) -> list[NodeWithScore]:
        """Find nodes by the words of a query. Called from many threads at once.

        Args:
            query: Any text.
            top_k: How many nodes at most. At least 1.
            filters: Every node that is returned must match it; None lets all through.

        Returns:
            Nodes, best first, equal to those that the source's own search gives.
        """
        ...


class NotIndexedError(Exception):
    """There is no lexical index, on purpose; the message says why. Never leaves a search."""


class LexicalDocument(NamedTuple):
    """What is indexed of a node."""

    node_id: str
    text: str
    metadata: Metadata


def lexical_document(node: BaseNode) -> LexicalDocument:
    """Give what is indexed of a node: the text that an embedding model sees, and its title where that lacks it.

    So both ways of searching read the same, and a key that is hidden from one is hidden from the other; only titles
    and file names, by which questions name documents, are never hidden.
    """
    from llama_index.core.schema import MetadataMode  # noqa: PLC0415 (this module itself needs no LlamaIndex)

    text = node.get_content(metadata_mode=MetadataMode.EMBED)
    title = str(node.metadata.get("title") or node.metadata.get("file_name") or "")
    return LexicalDocument(node.node_id, text if title in text else f"{title}\n{text}", node.metadata)


class LexicalIndex:
    """A BM25 index.

        index = LexicalIndex()
        index.update(put=[LexicalDocument("n1", "Rain in Paris", {"year": 2001})])
        index.search("Is it raining in Paris?", top_k=10)

    Args:
        directory: Where it is kept; made when missing. None keeps it in memory.
        language: Of all texts and queries; None finds out for each document. See ``tokenizing``.

    Raises:
        RetrievalError: The directory holds something else, a damaged index, or one of another release or
            for another language.
        ConfigurationError: There is no stemmer for the language.
    """

    def __init__(self, directory: Path | None = None, *, language: str | None = None) -> None:
        self._analyzer = Analyzer(language)
        self._format = f"{_FORMAT} language={language}"
        self._lock = threading.Lock()
        self._where = "the lexical index" + ("" if directory is None else f" in {str(directory)!r}")
        self._kept = directory is not None
        with self._told("opened"):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
            self._schema = _schema()
            self._index = _tantivy().Index(self._schema, path=None if directory is None else str(directory))
            _register_tokenizers(self._index)
            self._view = self._look()

    def __len__(self) -> int:
        """How many documents it holds."""
        return len(self._view)

    @property
    def mark(self) -> str | None:
        """What the last update noted; None before the first."""
        return self._view.mark

    def node_ids(self) -> set[str]:
        """Give the ids of all documents."""
        with self._told("read"):
            found = self._view.searcher.terms_with_prefix("id", "", _tantivy().Query.all_query())
        return {node_id for node_id, _ in found}

    def update(
        self, put: Iterable[LexicalDocument] = (), *, delete: Iterable[str] = (), mark: str = "", clear: bool = False
    ) -> None:
        """Delete and add documents in one commit: searches see all of it or nothing, also after a crash.

        Args:
            put: Documents; one whose id is there already takes its place. Each id once.
            delete: Ids of documents to delete; unknown ones are ignored.
            mark: Noted with the commit, such as the version of what was indexed.
            clear: Delete everything else.

        Raises:
            RetrievalError: It can't be written: another writer is at work, or the disk is full.
        """
        with self._lock:
            with self._told("written"):
                writer = self._index.writer(heap_size=_HEAP, num_threads=1)
            try:
                self._write(writer, put, delete, mark, clear=clear)
            except BaseException:
                writer.rollback()
                raise
            finally:
                writer.wait_merging_threads()  # gives the directory's lock back
            with self._told("read"):
                self._view = self._look()

    def _write(
        self, writer: Any, put: Iterable[LexicalDocument], delete: Iterable[str], mark: str, *, clear: bool
    ) -> None:
        if clear:
            writer.delete_all_documents()
        for node_id in delete:
            writer.delete_documents_by_term("id", node_id)
        fresh = clear or not len(self)
        for document in put:
            with self._told("written"):
                if not fresh:
                    writer.delete_documents_by_term("id", document.node_id)
                writer.add_document(self._document(document))
        with self._told("written"):
            writer.delete_documents_by_term("mark", self._format)
            writer.add_document(self._note(mark))
            writer.commit()

    def _note(self, mark: str) -> Any:
        made = _tantivy().Document()
        made.add_text("mark", self._format)
        made.add_bytes("metadata", mark.encode())
        return made

    def _document(self, document: LexicalDocument) -> Any:
        language, terms = self._analyzer.document(document.text)
        made = _tantivy().Document()
        made.add_text("id", document.node_id)
        made.add_text("language", language)
        made.add_text("terms", terms)
        for fact in facts(document.metadata):
            made.add_text("facts", fact)
        made.add_bytes("metadata", json.dumps(comparable(document.metadata)).encode())
        return made

    def refresh(self) -> None:
        """See what others have written into the directory since.

        Raises:
            RetrievalError: The index is damaged.
        """
        if self._kept:
            with self._told("read"):
                self._view = self._look()

    def _look(self) -> LexicalView:
        tantivy = _tantivy()
        self._index.reload()
        searcher = self._index.searcher()
        marks = searcher.search(tantivy.Query.term_query(self._schema, "mark", self._format, "basic"), limit=1).hits
        if not marks and searcher.num_docs:
            raise ValueError("another release made it, or it is of another language")
        mark = bytes(searcher.doc(marks[0][1]).get_first("metadata")).decode() if marks else None
        languages = tuple(name for name in LANGUAGES if searcher.doc_freq("language", name))
        return LexicalView(self._schema, searcher, languages, mark)

    def search(self, query: str, top_k: int, filters: FilterNode | None = None) -> list[LexicalHit]:
        """Find documents by the words of a query; see the module for scores, ties and filters.

        Args:
            query: Any text. One without a word finds nothing.
            top_k: How many documents at most. Below 1 there are none.
            filters: Each document's metadata must match it; None lets all through.

        Returns:
            The hits, best first.

        Raises:
            RetrievalError: The index is damaged.
        """
        view = self._view
        words = self._analyzer.query(query, view.languages)
        if top_k < 1 or not words or not len(view):
            return []
        with self._told("read"):
            return view.search(words, top_k, filters)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turn what tantivy raises, a panic of its own included, into one error of ours."""
        try:
            yield
        except (ValueError, OSError) as error:
            raise RetrievalError(f"{self._where} can't be {what}: {error}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise RetrievalError(f"{self._where} can't be {what}: {error}") from error


def _schema() -> Any:
    builder = _tantivy().SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("mark", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("language", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("terms", tokenizer_name="terms", index_option="freq")
    builder.add_text_field("facts", tokenizer_name="raw", index_option="basic")
    builder.add_bytes_field("metadata", stored=True)
    return builder.build()


def _register_tokenizers(index: Any) -> None:
    tantivy = _tantivy()
    index.register_tokenizer("terms", tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build())


def _tantivy() -> Any:
    import tantivy  # noqa: PLC0415 (who searches no words needs none)

    return tantivy
