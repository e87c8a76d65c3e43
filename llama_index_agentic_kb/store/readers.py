"""From a file to text with a title and metadata.

LlamaIndex's readers do the reading where they keep the text whole (measured with llama-index-readers-file 0.7):

    FlatReader      not used: it hands bytes to a str field; a BOM stays in the text, anything but UTF-8 is an error.
    MarkdownReader  not used: it drops blank lines, indentation, heading marks and everything between < and >.
    HTMLTagReader   not used: it runs neighbouring paragraphs together ("OneTwo") and keeps scripts.
    PDFReader       used page by page, which keeps page numbers for citations.
    DocxReader      used.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store.database import MetadataValue
from llama_index_agentic_kb.store.markup import first_heading, html_to_text, split_front_matter, without_title

if TYPE_CHECKING:
    from llama_index.core.schema import Document

__all__ = ["MAX_BYTES", "READER_VERSION", "ParsedFile", "Section", "check_size", "read_file"]

READER_VERSION = 2
"""Grows when files are read differently, so that stored ones are ingested again."""

MAX_BYTES = 100_000_000
"""The largest file that is read, and the largest content of a packed one."""


@dataclass(frozen=True)
class Section:
    """A stretch of a file's text that chunks don't reach across.

    Args:
        text: The text.
        metadata: What holds for it alone, such as ``page_label``.
    """

    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedFile:
    """A file's content.

    Args:
        title: Its title: from front matter, else the first heading, else HTML's ``<title>``, else the file's stem.
        sections: Its text: one section, or one for each page.
        metadata: Scalars from front matter.
    """

    title: str
    sections: Sequence[Section]
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)


def read_file(path: Path, max_bytes: int | None = None) -> ParsedFile:
    """Read a file by its suffix.

    Args:
        path: A file with one of the suffixes in `files.SUFFIXES`.
        max_bytes: The largest file that is read, and the largest content of a packed one. None is `MAX_BYTES`.

    Returns:
        Its content; NUL and lone surrogates are out of the text, which no store takes.

    Raises:
        IngestionError: It can't be read; the message is the reason alone, without the path.
    """
    most = MAX_BYTES if max_bytes is None else max_bytes
    check_size(path.stat().st_size, most)
    if path.suffix.lower() == ".docx":
        return _read_docx(path, most)
    return _READERS[path.suffix.lower()](path)


def check_size(size: int, most: int) -> None:
    """Refuse a file that is too large.

    Raises:
        IngestionError: It has more than ``most`` bytes; the message is the reason alone.
    """
    if size > most:
        raise IngestionError(f"is too large: {size:,} bytes, of at most {most:,} (max_file_bytes=, --max-megabytes)")


def _read_text(path: Path) -> ParsedFile:
    return ParsedFile(title=path.stem, sections=[Section(_decode(path.read_bytes()))])


def _read_markdown(path: Path) -> ParsedFile:
    metadata, text = split_front_matter(_decode(path.read_bytes()))
    given = next((str(value) for key, value in metadata.items() if key.casefold() == "title"), "")
    title = given or first_heading(text) or path.stem
    return ParsedFile(title=title, sections=[Section(without_title(text, title))], metadata=metadata)


def _read_html(path: Path) -> ParsedFile:
    data = path.read_bytes()
    _refuse_binary(data)
    title, text = html_to_text(data)
    return ParsedFile(title=title or path.stem, sections=[Section(_clean(text))])


def _read_pdf(path: Path) -> ParsedFile:
    from llama_index.readers.file import PDFReader  # noqa: PLC0415  (loads pandas)
    from tenacity import RetryError  # noqa: PLC0415  (comes with LlamaIndex)

    try:
        with _quiet("pypdf"):
            pages = PDFReader().load_data(path)
    except RetryError as error:
        # The reader tries three times, whatever the fault, and hides it.
        cause = error.last_attempt.exception()
        raise IngestionError(f"can't be read as PDF: {cause}") from cause
    return ParsedFile(title=path.stem, sections=[_page(page) for page in pages])


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a parser's complaints out of the terminal: a file that can't be read is reported once, by us."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _page(page: Document) -> Section:
    return Section(_clean(page.text), {"page_label": str(page.metadata["page_label"])})


def _read_docx(path: Path, most: int) -> ParsedFile:
    from llama_index.readers.file import DocxReader  # noqa: PLC0415  (loads pandas)

    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > most:
            raise IngestionError(f"is too large: {size:,} bytes when unpacked, of at most {most:,}")
        documents = DocxReader().load_data(path)
    except (zipfile.BadZipFile, KeyError, SyntaxError) as error:  # SyntaxError: broken XML
        raise IngestionError(f"can't be read as .docx: {error}") from error
    return ParsedFile(title=path.stem, sections=[Section(_clean(document.text)) for document in documents])


_READERS: Mapping[str, Callable[[Path], ParsedFile]] = {
    ".txt": _read_text,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
}

_BOMS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def _decode(data: bytes) -> str:
    encoding = next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")
    if encoding != "utf-16":
        _refuse_binary(data)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise IngestionError(f"is not {encoding.upper()} text: {error.reason} at byte {error.start}") from error
    return _clean(text)


def _refuse_binary(data: bytes) -> None:
    if b"\x00" in data[:8192]:
        raise IngestionError("is binary, not text")


def _clean(text: str) -> str:
    text = re.sub(r"\r\n?", "\n", text).replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")
