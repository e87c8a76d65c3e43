"""Parsing of files into text with a title and metadata.

PDF, .docx and HTML are parsed in a separate process, because a malformed file can make its parser loop forever, crash
the interpreter or run out of memory. In that case only this file fails: the process is killed, and the next file gets
a new one. Requests and replies are lines of JSON. Text and Markdown are only decoded, block by block.

LlamaIndex's readers are used where they preserve the text (checked with llama-index-readers-file 0.7): PDFReader, page
by page, and DocxReader. Not used are FlatReader (passes bytes to a str field), MarkdownReader (drops blank lines,
indentation and everything between < and >) and HTMLTagReader (joins neighbouring paragraphs, keeps scripts).
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final, Self, TypedDict

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store.database import MetadataValue

READER_VERSION: Final = 3
"""The version of the parsing code; a change causes stored files to be ingested again."""
MAX_BYTES: Final = 100_000_000
READ_SECONDS: Final = 60.0
MAX_FIELDS: Final = 100
MAX_FIELD_CHARACTERS: Final = 2_000
MAX_FRONT_MATTER: Final = 8_000
"""The maximum number of characters of all front matter keys and values, which are stored with each chunk."""
IRREGULAR: Final = "is no regular file: a pipe, a socket or a device"
"""The reason reported for irregular files, which are rejected because reading them might never end."""
BLOCK: Final = 1 << 18
"""The maximum number of characters that are chunked at once, which limits the splitter's worst-case time."""

_MEMORY: Final = 4 << 30
"""The address space limit of the parser process in bytes; loading the parsers takes a large part of 1 GB."""
_PROGRAM: Final = f"from {__name__} import serve; serve()"


class UnreadableError(IngestionError):
    """A file can't be read; the message is the reason without the path. Raised and handled only inside the store."""


@dataclass(frozen=True)
class Section:
    """A part of a file's text that is chunked separately, such as a PDF page."""

    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    """The metadata of this section, such as ``page_label``."""
    start: int = 0
    """The offset of the section's first character in the file's (or page's) text."""


@dataclass(frozen=True)
class ParsedFile:
    """A file's parsed content; the sections can be iterated only once."""

    title: str
    """The title from front matter, else the first heading, else HTML's ``<title>``, else the file's stem."""
    sections: Iterable[Section]
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    """The scalar fields of the front matter."""


class _Parsed(TypedDict, total=False):
    """A reply of the parser process: the title and sections, or an error message."""

    title: str
    sections: list[tuple[str, dict[str, str]]]
    error: str


class FileReader:
    """A parser of files, one at a time; close it, or use it as a context manager.

    Args:
        max_bytes: The maximum size of a file, and of an archive's unpacked content, in bytes.
        seconds: The time limit for parsing a file, including the start of the parser process.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, seconds: float = READ_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the parser process."""
        self.close()

    def read(self, path: Path) -> ParsedFile:
        """Parse a file by its suffix; NUL characters are removed, and lone surrogates replaced, to make it storable.

        Raises:
            UnreadableError: The file can't be parsed. Iterating over the sections may raise it too.
            OSError: The file can't be opened. Iterating over the sections may raise it too.
        """
        kind = path.suffix.lower()
        if kind in (".txt", ".md", ".markdown"):
            pieces = _decoded(path)
            return _markdown(path, pieces) if kind != ".txt" else ParsedFile(path.stem, _blocks(pieces))
        parsed = self._ask(path)
        if "error" in parsed:
            raise UnreadableError(parsed["error"])
        sections = (_blocks([_clean(text)], metadata) for text, metadata in parsed["sections"])
        return ParsedFile(parsed["title"] or path.stem, chain.from_iterable(sections))

    def close(self) -> None:
        """Kill the parser process; reading another file starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data in the pipe
                    pipe.close()

    def _ask(self, path: Path) -> _Parsed:
        if self._process is not None and self._process.poll() is not None:  # it has ended since the last file
            self.close()
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        began, line = time.monotonic(), ""
        ending = threading.Timer(self.seconds, process.kill)
        ending.start()
        try:
            with suppress(OSError):
                process.stdin.write(json.dumps([str(path), self.max_bytes]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:  # also after Ctrl-C: the interpreter would wait for it
            ending.cancel()
            ending.join()
        late = time.monotonic() - began >= self.seconds
        if late or not line.endswith("\n"):
            code = None if late else process.wait()
            self.close()
            if code is not None:
                raise UnreadableError(f"can't be read: its parser's process ended with {code}")
            raise UnreadableError(f"can't be read within {self.seconds:g} s: its parser was ended")
        reply: _Parsed = json.loads(line)
        return reply


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; pipes and devices are rejected, since reading them might never end.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    # Not blocking: opening a pipe without a writer would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    opened = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(IRREGULAR)
    return opened


def check_size(size: int, limit: int) -> None:
    """Raise ``UnreadableError`` if a file's size exceeds the limit (both in bytes)."""
    if size > limit:
        raise UnreadableError(f"is too large: {size:,} bytes, of at most {limit:,} (max_file_bytes=, --max-megabytes)")


# -- text and Markdown ------------------------------------------------------------------------------------------------

_BOMS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_FRONT_MATTER: Final = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FIELD: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)[ \t]*:(?:[ \t]+(.*))?")
# Lines allowed in a YAML mapping besides fields: empty, comment, continuation of a list or block.
_OTHER_LINE: Final = re.compile(r"\s*(?:#.*)?|[ \t].*|-(?:[ \t].*)?")
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}")
_HEADING: Final = re.compile(r" {0,3}#{1,6}[ \t]+")
_CODE_FENCE: Final = re.compile(r" {0,3}(```|~~~)")
_LINK: Final = re.compile(r"!?\[([^\[\]]*)\]\([^)]{0,2000}\)")


def _decoded(path: Path) -> Iterator[str]:
    with open_regular(path) as opened:
        head = opened.peek(8192)[:8192]
        encoding = next((name for bom, name in _BOMS if head.startswith(bom)), "utf-8")
        if encoding != "utf-16":
            _refuse_binary(head)
        try:
            with io.TextIOWrapper(opened, encoding) as decoded:
                while text := decoded.read(BLOCK):
                    yield _clean(text)
        except UnicodeDecodeError as error:
            raise UnreadableError(f"is not {encoding.upper()} text: {error.reason}") from error


def _refuse_binary(head: bytes) -> None:
    if b"\x00" in head:
        raise UnreadableError("is binary, not text")


def _clean(text: str) -> str:
    text = re.sub(r"\r\n?", "\n", text).replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")


def _blocks(pieces: Iterable[str], metadata: Mapping[str, MetadataValue] | None = None) -> Iterator[Section]:
    """Yield a text in sections of at most ``BLOCK`` characters, split at a paragraph, line or word if possible."""
    held, start = "", 0
    for piece in pieces:
        held += piece
        at = 0
        while len(held) - at > BLOCK:
            ends = (held.rfind(mark, at + BLOCK // 2, at + BLOCK) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((end for end in ends if end > at + BLOCK // 2), at + BLOCK)
            yield Section(held[at:end], metadata or {}, start + at)
            at = end
        held, start = held[at:], start + at
    yield Section(held, metadata or {}, start)


def _markdown(path: Path, pieces: Iterator[str]) -> ParsedFile:
    metadata, text = split_front_matter(next(pieces, ""))
    titles = (str(value) for key, value in metadata.items() if key.casefold() == "title")
    title = next(titles, "") or first_heading(text) or path.stem
    return ParsedFile(title, _blocks(chain([without_title(text, title)], pieces)), metadata)


def split_front_matter(text: str) -> tuple[dict[str, MetadataValue], str]:
    """Split a Markdown text into its front matter and the remaining text.

    Front matter is a block of ``key: value`` lines between two lines of ``---`` at the very start. A block with any
    other content is treated as text. Lists and nested values are ignored.

    Args:
        text: The file's text.

    Returns:
        The fields with a scalar value (text, whole number, decimal, ``true`` or ``false``), and the remaining text.
    """
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    fields: dict[str, MetadataValue] = {}
    left = MAX_FRONT_MATTER
    for line in match.group(1).split("\n"):
        found = _FIELD.fullmatch(line.rstrip())
        if found is not None:
            value = _scalar((found.group(2) or "").strip())
            size = len(found.group(1)) + len(str(value))
            if value is not None and size <= min(left, MAX_FIELD_CHARACTERS) and len(fields) < MAX_FIELDS:
                fields[found.group(1)] = value
                left -= size
        elif _OTHER_LINE.fullmatch(line) is None:
            return {}, text
    return fields, text[match.end() :].lstrip("\n")


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


def first_heading(text: str) -> str:
    """Return the first ``#`` heading of a Markdown text outside code blocks; empty if there is no heading."""
    in_code = False
    for line in text.split("\n"):
        if _CODE_FENCE.match(line):
            in_code = not in_code
        elif not in_code and (match := _HEADING.match(line)):
            heading = line[match.end() :].strip()
            bare = heading.rstrip("#")  # closing "#" follow a space: "C#" is a name
            heading = bare if bare.endswith((" ", "\t")) else heading
            return _LINK.sub(r"\1", heading).strip(" *`")
    return ""


def without_title(text: str, title: str) -> str:
    """Remove the first heading of a Markdown text if it repeats the title and more text follows."""
    head, _, rest = text.lstrip().partition("\n")
    repeats = head.startswith("# ") and " ".join(head[2:].split()).casefold() == " ".join(title.split()).casefold()
    return rest.lstrip("\n") if repeats and rest.strip() else text


# -- in the parser process --------------------------------------------------------------------------------------------

_NO_TEXT: Final = ("script", "style", "template", "noscript", "svg", "head", "title")
_BLOCK_TAGS: Final = (
    *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "ul"),
)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 (our own module)
        # -P: a module in the working directory, or in an ingested folder, must not shadow another module.
        [sys.executable, "-P", "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="ascii",
    )


def serve() -> None:
    """Read parse requests from stdin and write replies to stdout, until stdin is closed."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 (not on Windows)

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    # Output printed by parsers must not mix with the replies.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            path, max_bytes = json.loads(line)
            replies.write(json.dumps(parse(Path(path), max_bytes)) + "\n")
            replies.flush()


def parse(path: Path, max_bytes: int) -> _Parsed:
    """Return the title and sections of a PDF, .docx or HTML file, or an error message."""
    parsers = {".pdf": _pdf, ".docx": _docx}
    try:
        parsed = parsers.get(path.suffix.lower(), _html)(path, max_bytes)
        check_size(sum(len(text) for text, _ in parsed["sections"]), max_bytes)
    except UnreadableError as error:
        return {"error": str(error)}
    except OSError as error:  # its text contains the path
        return {"error": f"can't be read as {path.suffix.lower()}: {error.strerror or type(error).__name__}"}
    except Exception as error:  # noqa: BLE001 (file parsers raise anything; the error is reported)
        return {"error": f"can't be read as {path.suffix.lower()}: {type(error).__name__}: {error}"}
    return parsed


def _pdf(path: Path, _: int) -> _Parsed:
    from llama_index.readers.file import PDFReader  # noqa: PLC0415 (loads pandas)
    from tenacity import RetryError  # noqa: PLC0415 (comes with LlamaIndex)

    try:
        pages = PDFReader().load_data(path)
    except RetryError as error:  # the reader tries three times, whatever the fault, and hides it
        fault = error.last_attempt.exception()
        if isinstance(fault, OSError):
            raise fault from error
        raise UnreadableError(f"can't be read as .pdf: {fault}") from error
    return {"title": "", "sections": [(page.text, {"page_label": str(page.metadata["page_label"])}) for page in pages]}


def _docx(path: Path, max_bytes: int) -> _Parsed:
    from llama_index.readers.file import DocxReader  # noqa: PLC0415 (loads pandas)

    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > max_bytes:
        raise UnreadableError(f"is too large: {size:,} bytes when unpacked, of at most {max_bytes:,}")
    return {"title": "", "sections": [(document.text, {}) for document in DocxReader().load_data(path)]}


def _html(path: Path, _: int) -> _Parsed:
    """Return an HTML page's title (the first ``<h1>``, else ``<title>``) and its text without scripts and styles.

    Blocks are separated by blank lines; list items and table rows are on separate lines.
    """
    from bs4 import BeautifulSoup  # noqa: PLC0415 (comes with LlamaIndex's file readers)

    data = path.read_bytes()
    _refuse_binary(data[:8192])
    # html.parser warns about an XML declaration, which it ignores.
    soup = BeautifulSoup(re.sub(rb"\A\s*<\?xml[^>]*\?>", b"", data), "html.parser")
    heading = soup.find("h1") or soup.find("title")
    title = " ".join(heading.get_text(" ").split()) if heading is not None else ""
    for tag in soup(_NO_TEXT):
        tag.decompose()
    # White space in the source is one space; only the line breaks inserted below break lines.
    for string in soup.find_all(string=True):
        if string.find_parent("pre") is None:
            string.replace_with(type(string)(re.sub(r"\s+", " ", string)))
    for tag in soup(_BLOCK_TAGS):
        tag.insert_before("\n\n")
        tag.append("\n\n")
    for tag in soup(("br", "li", "tr")):
        tag.insert_before("\n")
    for tag in soup(("td", "th")):
        tag.append(" ")
    lines = [line.strip(" ") if line.strip() else "" for line in soup.get_text().split("\n")]
    return {"title": title, "sections": [(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip(), {})]}
