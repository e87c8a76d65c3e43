"""LlamaIndex documents, from any reader, as documents of a source."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb.store.database import MetadataValue
from llama_index_agentic_kb.store.files import FoundFile, printable
from llama_index_agentic_kb.store.reading import (
    MAX_FIELD_CHARACTERS,
    MAX_FIELDS,
    FileReader,
    ParsedFile,
    blocks,
    check_size,
    clean,
    first_heading,
)

if TYPE_CHECKING:
    from llama_index.core.schema import Document

_KEY: Final = re.compile(r"[A-Za-z][\w .-]{0,99}")


@dataclass(frozen=True)
class GivenDocument(FoundFile):
    """A document passed to ``ingest(documents=)``: one LlamaIndex document, or all those of one file (its pages)."""

    documents: Sequence[Document] = ()

    @property
    def origin(self) -> str:
        """Always empty: no file has to exist."""
        return ""

    def digest(self, max_bytes: int) -> str:
        """Return a hash of the documents' texts and metadata."""
        content = [[text_of(document), _fields(document.metadata)] for document in self.documents]
        check_size(sum(len(text) for text, _ in content), max_bytes)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def size(self) -> int:
        """Return the number of characters of all texts."""
        return sum(len(text_of(document)) for document in self.documents)

    def parsed(self, _: FileReader) -> ParsedFile:
        """Return the documents as sections of one file."""
        return parsed_documents(self.documents, self.path.stem)


def given_documents(documents: Iterable[Document]) -> list[GivenDocument]:
    """Return documents grouped by the file that a reader took them from, else each under its own id."""
    groups: dict[str, list[Document]] = {}
    for document in documents:
        path = document.metadata.get("file_path")
        name = printable(str(path)).lstrip("/") if path else document.node_id
        groups.setdefault(name, []).append(document)
    return [GivenDocument(Path(name), name, "", tuple(group)) for name, group in groups.items()]


def parsed_documents(documents: Sequence[Document], name: str) -> ParsedFile:
    """Return LlamaIndex documents as one parsed file; each of them is chunked separately, with its own metadata."""
    titles = (str(document.metadata.get("title") or "") for document in documents[:1])
    headings = (first_heading(text_of(document)) for document in documents[:1])
    title = next(filter(None, titles), "") or next(filter(None, headings), "") or name
    sections = (
        section for document in documents for section in blocks([text_of(document)], _fields(document.metadata))
    )
    return ParsedFile(title, sections)


def text_of(document: Document) -> str:
    """Return a document's text in a form that can be stored."""
    return clean(document.text or "")


def _fields(metadata: Mapping[str, object]) -> dict[str, MetadataValue]:
    """Return the scalar metadata that the store can keep with each chunk."""
    fields: dict[str, MetadataValue] = {}
    for key, value in metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            continue
        kept = clean(value) if isinstance(value, str) else value
        if isinstance(kept, str | int | float) and len(str(kept)) <= MAX_FIELD_CHARACTERS and _KEY.fullmatch(str(key)):
            fields[str(key)] = kept
    return dict(list(fields.items())[:MAX_FIELDS])
