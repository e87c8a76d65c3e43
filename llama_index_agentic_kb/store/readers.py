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

if TYPE_CHECKING:
    from llama_index.core.schema import Document

__all__ = ["MAX_BYTES", "READER_VERSION", "ParsedFile", "Section", "check_size", "read_file"]

READER_VERSION = 2
"""Grows when files are read differently, so that stored ones are ingested again."""

MAX_BYTES = 100_000_000
"""The largest file that is read, and the largest content of a packed one."""

MAX_FIELDS = 100
MAX_FIELD_CHARACTERS = 2_000
"""Front matter beyond is left out: it would be stored with each chunk, and thousands of keys can't be indexed."""

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)[ \t]*:(?:[ \t]+(.*))?")
# Lines that a YAML mapping may hold beside fields: empty, comment, continuation of a list or block.
_OTHER_LINE = re.compile(r"\s*(?:#.*)?|[ \t].*|-(?:[ \t].*)?")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}")

_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*")
_CODE_FENCE = re.compile(r" {0,3}(```|~~~)")
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^)]{0,2000}\)")

_NO_TEXT = ("script", "style", "template", "noscript", "svg", "head", "title")
_BLOCKS = (
    *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "ul"),
)


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
    titles = (str(value) for key, value in metadata.items() if key.casefold() == "title")
    title = next(titles, "") or first_heading(text) or path.stem
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
    """Keep a parser's complaints out of the terminal: a file that can't be read is reported once, elsewhere."""
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


# -- Markdown and HTML -------------------------------------------------------------------------------------------------


def split_front_matter(text: str) -> tuple[dict[str, MetadataValue], str]:
    """Take the front matter off a Markdown text.

    Front matter is a block of ``key: value`` lines between two lines of ``---`` at the very start. Anything else
    between such lines is text, and stays.

    Args:
        text: The file's text.

    Returns:
        The fields with a scalar value (text, whole number, decimal, ``true`` or ``false``; lists and nested values
        are left out), and the text behind them.
    """
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    fields: dict[str, MetadataValue] = {}
    for line in match.group(1).split("\n"):
        found = _FIELD.fullmatch(line.rstrip())
        if found is not None:
            value = _scalar((found.group(2) or "").strip())
            short = max(len(found.group(1)), len(str(value))) <= MAX_FIELD_CHARACTERS
            if value is not None and short and len(fields) < MAX_FIELDS:
                fields[found.group(1)] = value
        elif _OTHER_LINE.fullmatch(line) is None:
            return {}, text
    return fields, text[match.end() :].lstrip("\n")


def first_heading(text: str) -> str:
    """Find the first ``#`` heading of a Markdown text outside code blocks; empty without one."""
    in_code = False
    for line in text.split("\n"):
        if _CODE_FENCE.match(line):
            in_code = not in_code
            continue
        match = None if in_code else _HEADING.fullmatch(line)
        if match is not None:
            return _LINK.sub(r"\1", match.group(1)).strip(" *`")
    return ""


def without_title(text: str, title: str) -> str:
    """Drop the heading with which a Markdown text begins, where it only repeats the title and more follows it."""
    head, _, rest = text.lstrip().partition("\n")
    repeats = head.startswith("# ") and " ".join(head[2:].split()).casefold() == " ".join(title.split()).casefold()
    return rest.lstrip("\n") if repeats and rest.strip() else text


def html_to_text(data: bytes) -> tuple[str, str]:
    """Read a page's title and text.

    Args:
        data: The page; its encoding is taken from the page itself.

    Returns:
        The first ``<h1>``, else the ``<title>``, else an empty title; and the text without scripts and styles,
        blocks apart by a blank line, list items and rows on lines of their own.
    """
    from bs4 import BeautifulSoup  # noqa: PLC0415  (comes with LlamaIndex's file readers)

    # html.parser warns about an XML declaration, which means nothing to it.
    soup = BeautifulSoup(re.sub(rb"\A\s*<\?xml[^>]*\?>", b"", data), "html.parser")
    heading = soup.find("h1") or soup.find("title")
    title = " ".join(heading.get_text(" ").split()) if heading is not None else ""
    for tag in soup(_NO_TEXT):
        tag.decompose()
    # White space in the source means one space; only the marks put in below break lines.
    for string in soup.find_all(string=True):
        if string.find_parent("pre") is None:
            string.replace_with(type(string)(re.sub(r"\s+", " ", string)))
    for tag in soup(_BLOCKS):
        tag.insert_before("\n\n")
        tag.append("\n\n")
    for tag in soup(("br", "li", "tr")):
        tag.insert_before("\n")
    for tag in soup(("td", "th")):
        tag.append(" ")
    lines = [line.strip(" ") if line.strip() else "" for line in soup.get_text().split("\n")]
    return title, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _scalar(value: str) -> MetadataValue | None:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    value = re.sub(r"(?:^|(?<!\s)\s+)#.*", "", value)
    if not value or value[0] in "[{|>&*!":
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _FLOAT.fullmatch(value) else value
