"""Reading of files as text with a title and metadata.

Most formats are parsed in a separate process (``parsing``), because a malformed file can make its parser loop forever,
crash the interpreter or run out of memory. In that case only this file fails: the process is killed, and the next file
gets a new one. Requests and replies are lines of JSON.

Plain text, Markdown and reStructuredText are only decoded, block by block. LlamaIndex's FlatReader (passes bytes to a
str field) and MarkdownReader (drops blank lines, indentation and everything between < and >) are not used.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb._types import Closing
from llama_index_agentic_kb.errors import ConfigurationError, IngestionError
from llama_index_agentic_kb.store.database import MetadataValue

if TYPE_CHECKING:
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import Document

    from llama_index_agentic_kb.store.parsing import Parsed

TEXT_SUFFIXES: Final = frozenset({".txt", ".md", ".markdown", ".rst"})
"""The lower-case suffixes of files that are read without the parser process."""
IMAGES: Final = frozenset({".png", ".jpg", ".jpeg"})  # the lower-case suffixes of files that are read by OCR alone
_OCR: Final = IMAGES | {".pdf"}
OCR_FACTOR: Final = 10
"""How much longer a file may be read in whose pages text is recognized: a page takes a second or two."""
READER_VERSION: Final = 4  # the version of the parsing code; a change causes stored files to be ingested again
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

_PROGRAM: Final = "from llama_index_agentic_kb.store.parsing import serve; serve()"


class UnreadableError(IngestionError):
    """A file can't be read; the message is the reason without the path. Raised and handled only inside the store."""


@contextmanager
def readable(by: str = "") -> Iterator[None]:
    """Convert all exceptions of the block, in which a file is read, to ``UnreadableError``."""
    try:
        yield
    except UnreadableError:
        raise
    except OSError as error:
        raise UnreadableError(f"can't be read{by}: {error.strerror or error_message(error)}") from error
    except Exception as error:
        raise UnreadableError(f"can't be read{by}: {type(error).__name__}: {error_message(error)}") from error


@dataclass(frozen=True)
class Section:
    """A part of a file's text that is chunked separately, such as a PDF page, with its own metadata."""

    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    start: int = 0  # the offset of the section's first character in the file's (or page's) text


@dataclass(frozen=True)
class ParsedFile:
    """A file's parsed content; the sections can be iterated only once."""

    title: str  # the title from front matter, else the first heading, else HTML's ``<title>``, else the file's stem
    sections: Iterable[Section]
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)  # the scalar fields of the front matter


class FileReader(Closing):
    """A parser of files, one at a time; close it, or use it as a context manager. ``ingest`` has the arguments.

    The time limit includes the start of the parser process. ``extractors`` run in this process, without a limit.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        seconds: float = READ_SECONDS,
        extractors: Mapping[str, BaseReader] | None = None,
        *,
        ocr: bool = False,
    ) -> None:
        if ocr and find_spec("rapidocr_onnxruntime") is None:
            raise ConfigurationError("ocr=True (--ocr) needs an extra: pip install 'llama-index-agentic-kb[ocr]'")
        self.ocr = ocr
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.extractors = {f".{kind.lstrip('.').lower()}": reader for kind, reader in (extractors or {}).items()}
        self._process: subprocess.Popen[str] | None = None

    def suffixes(self) -> set[str]:
        """Return the lower-case suffixes that are read besides those of text and of ``PARSERS``."""
        return {*self.extractors, *(IMAGES if self.ocr else ())}

    def way(self, kind: str) -> str:
        """Return how files of a suffix are read; where it changes they are read again."""
        if kind in self.extractors:
            return type(self.extractors[kind]).__name__
        return f"{READER_VERSION} ocr" if self.ocr and kind in _OCR else str(READER_VERSION)

    def read(self, path: Path) -> ParsedFile:
        """Parse a file by its suffix; NUL characters are removed, and lone surrogates replaced, to make it storable.

        If that fails, ``UnreadableError`` or ``OSError`` is raised, perhaps by the iteration over the sections.
        """
        kind = path.suffix.lower()
        if kind in self.extractors:
            return self._extracted(path, self.extractors[kind])
        if kind in TEXT_SUFFIXES:
            return _text(path, kind)
        parsed = self._ask(path)
        if "error" in parsed:
            raise UnreadableError(parsed["error"])
        sections = (blocks([clean(text)], metadata) for text, metadata in parsed["sections"])
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

    def _extracted(self, path: Path, extractor: BaseReader) -> ParsedFile:
        with readable(f" by {type(extractor).__name__}"):
            documents = extractor.load_data(path)
        check_size(sum(len(document.text) for document in documents), self.max_bytes)
        return parsed_documents(documents, path.stem)

    def _ask(self, path: Path) -> Parsed:
        if self._process is not None and self._process.poll() is not None:  # it has ended since the last file
            self.close()
        process = self._process = self._process or subprocess.Popen(  # noqa: S603 (our own module)
            # -P: a module in the working directory, or in an ingested folder, must not shadow another module.
            [sys.executable, "-P", "-c", _PROGRAM],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = self.seconds * (OCR_FACTOR if self.ocr and path.suffix.lower() in _OCR else 1)
        began, line = time.monotonic(), ""
        ending = threading.Timer(seconds, process.kill)
        ending.start()
        try:
            with suppress(OSError):
                process.stdin.write(json.dumps([str(path), self.max_bytes, self.ocr]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:  # also after Ctrl-C: the interpreter would wait for it
            ending.cancel()
            ending.join()
        late = time.monotonic() - began >= seconds
        if late or not line.endswith("\n"):
            code = None if late else process.wait()
            self.close()
            if code is not None:
                raise UnreadableError(f"can't be read: its parser's process ended with {code}")
            raise UnreadableError(f"can't be read within {seconds:g} s: its parser was ended")
        reply: Parsed = json.loads(line)
        return reply


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file; raise ``OSError`` for others: reading a pipe or a device might never end."""
    # Not blocking: opening a pipe without a writer would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    opened = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(IRREGULAR)
    return opened


def check_size(size: int, limit: int, when: str = "") -> None:
    """Raise ``UnreadableError`` if a file's size exceeds the limit (both in bytes)."""
    if size > limit:
        limited = f"of at most {limit:,} (max_file_bytes=, --max-megabytes)"
        raise UnreadableError(f"is too large: {size:,} bytes{when}, {limited}")


# -- LlamaIndex documents ----------------------------------------------------------------------------------------------

_KEY: Final = re.compile(r"[A-Za-z][\w .-]{0,99}")


def parsed_documents(documents: Sequence[Document], name: str) -> ParsedFile:
    """Return LlamaIndex documents as one parsed file; each of them is chunked separately, with its own metadata."""
    title = ""
    if documents:
        title = str(documents[0].metadata.get("title") or "") or first_heading(text_of(documents[0]))
    sections = (
        section for document in documents for section in blocks([text_of(document)], scalar_fields(document.metadata))
    )
    return ParsedFile(title or name, sections)


def text_of(document: Document) -> str:
    """Return a document's text in a form that can be stored."""
    return clean(document.text or "")


def scalar_fields(metadata: Mapping[str, object]) -> dict[str, MetadataValue]:
    """Return the scalar metadata that the store can keep with each chunk."""
    fields: dict[str, MetadataValue] = {}
    for key, value in metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            continue
        kept = clean(value) if isinstance(value, str) else value
        if isinstance(kept, str | int | float) and len(str(kept)) <= MAX_FIELD_CHARACTERS and _KEY.fullmatch(str(key)):
            fields[str(key)] = kept
    return dict(list(fields.items())[:MAX_FIELDS])


# -- text and Markdown ------------------------------------------------------------------------------------------------

_BOMS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_SAMPLE: Final = 1 << 16
_CONTROLS: Final = bytes({*range(32)} - {*b"\t\n\r\f\x1b"})
_ADORNMENT: Final = r"([=\-~^\"'#*+`:.])"
_RST_TITLE: Final = re.compile(
    rf"^(?:{_ADORNMENT}\1{{2,200}}[ \t]*\n)?[ \t]*(\S.{{0,200}})\n{_ADORNMENT}\3{{2,200}}[ \t]*\n", re.MULTILINE
)
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
    encoding = text_encoding(path)
    with open_regular(path) as opened, io.TextIOWrapper(opened, encoding, "replace") as decoded:
        while text := decoded.read(BLOCK):
            yield clean(text)


def text_encoding(path: Path) -> str:
    """Return a text file's encoding, or raise ``UnreadableError`` for a binary file.

    A byte order mark comes first, then UTF-8 if the whole file or nearly all of it is valid, then a guess from the text
    around the first invalid byte.
    """
    with open_regular(path) as opened:
        head = opened.peek(8192)[:8192]
        if marked := next((name for bom, name in _BOMS if head.startswith(bom)), ""):
            return marked
        refuse_binary(head)
        decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
        while block := opened.read(1 << 20):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                start = opened.seek(max(0, position + error.start - _SAMPLE // 2))
                sample = opened.read(_SAMPLE)
                line = sample.find(b"\n", 0, _SAMPLE // 2) + 1 if start else 0  # not from within a character
                return _guessed(sample[line:])
            position += len(block)
    return "utf-8"


def _guessed(sample: bytes) -> str:
    import chardetng_py  # noqa: PLC0415 (only for old encodings)

    if 20 * (len(sample) - len(sample.translate(None, _CONTROLS))) > len(sample):
        raise UnreadableError("is binary, not text")
    text = sample.decode("utf-8", "replace")
    broken = text.count("\ufffd")
    if broken * 10 <= sum(letter > "\x7f" for letter in text) - broken:
        return "utf-8"
    guess = str(chardetng_py.detect(sample))
    return {"windows-874": "cp874"}.get(guess, guess)


def refuse_binary(head: bytes) -> None:
    """Raise ``UnreadableError`` if the beginning of a file contains a NUL byte, as no text does."""
    if b"\x00" in head:
        raise UnreadableError("is binary, not text")


def clean(text: str) -> str:
    """Return a text with line ends of one kind, without NUL characters and lone surrogates, which can't be stored."""
    text = re.sub(r"\r\n?", "\n", text).replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")


def blocks(pieces: Iterable[str], metadata: Mapping[str, MetadataValue] | None = None) -> Iterator[Section]:
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


def _text(path: Path, kind: str) -> ParsedFile:
    pieces, metadata, title = _decoded(path), dict[str, MetadataValue](), ""
    start = next(pieces, "")
    if kind == ".rst":
        if match := _RST_TITLE.match(start.lstrip()[:10_000]):
            rest, title = start.lstrip()[match.end() :], match.group(2).strip()
            start = rest if rest.strip() else start
    elif kind != ".txt":
        metadata, start = split_front_matter(start)
        title = next((str(value) for key, value in metadata.items() if key.casefold() == "title"), "")
        title = title or first_heading(start) or path.stem
        start = _without_heading(start, title)
    return ParsedFile(title or path.stem, blocks(chain([start], pieces)), metadata)


def _without_heading(text: str, title: str) -> str:
    """Return a Markdown text without a heading at its start that repeats the title, unless nothing else is in it."""
    head, _, rest = text.lstrip().partition("\n")
    repeats = head.startswith("# ") and " ".join(head[2:].split()).casefold() == " ".join(title.split()).casefold()
    return rest.lstrip("\n") if repeats and rest.strip() else text


def split_front_matter(text: str) -> tuple[dict[str, MetadataValue], str]:
    """Split a Markdown text into its front matter and the remaining text.

    Front matter is a block of ``key: value`` lines between two lines of ``---`` at the very start. A block with any
    other content is treated as text. Lists and nested values are ignored.
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
