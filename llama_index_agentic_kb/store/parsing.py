"""Parsers of file formats; they run in the parser process of ``reading``.

LlamaIndex's readers are used where they preserve the text (checked with llama-index-readers-file 0.7): DocxReader, and
PptxReader, slide by slide. Not used are PDFReader (tries a file three times and hides what is wrong with it), CSVReader
(one encoding, one delimiter, a header in the first chunk only), PandasExcelReader (drops the sheets' names, writes 1969
as 1969.0), HTMLTagReader (joins neighbouring paragraphs, keeps scripts), EpubReader (its library is under the AGPL) and
IPYNBReader (needs nbconvert).
"""

from __future__ import annotations

import csv
import email
import email.policy
import io
import json
import logging
import os
import posixpath
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, time
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import unquote

from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.store.reading import (
    IMAGES,
    UnreadableError,
    check_size,
    first_heading,
    readable,
    refuse_binary,
    text_encoding,
)

if TYPE_CHECKING:
    from pypdf import PageObject

_MEMORY: Final = 4 << 30
"""The address space limit of the parser process in bytes; loading the parsers takes a large part of 1 GB."""
_NO_TEXT: Final = ("script", "style", "template", "noscript", "svg", "head", "title")
_BLOCK_TAGS: Final = (
    *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "ul"),
)
_DC_TITLE: Final = ".//{http://purl.org/dc/elements/1.1/}title"
_NUMBER: Final = re.compile(r"[-+]?[\d.,]+%?")
_ADDED_BY_PROGRAMS: Final = re.compile(
    r"\AMicrosoft \w+ - |\.(?:docx?|pptx?|xlsx?|indd|qxd|tex|dvi|pdf|rtf)\Z", re.IGNORECASE
)


class Parsed(TypedDict, total=False):
    """A reply of the parser process: the title and sections with their metadata, or an error message."""

    title: str
    sections: list[tuple[str, dict[str, str]]]
    error: str


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
            path, max_bytes, ocr = json.loads(line)
            replies.write(json.dumps(parse(Path(path), max_bytes, ocr=ocr)) + "\n")
            replies.flush()


def parse(path: Path, max_bytes: int, *, ocr: bool = False) -> Parsed:
    """Return the title and sections of a file, or an error message without its path.

    With ``ocr`` text is recognized in images, and on those pages of a PDF that have no text of their own.
    """
    kind = path.suffix.lower()
    try:
        with readable(f" as {kind}"):  # parsers raise anything
            if kind in _ZIPPED:
                with zipfile.ZipFile(path) as archive:
                    size = sum(entry.file_size for entry in archive.infolist())
                check_size(size, max_bytes, " when unpacked")
            if kind == ".pdf":
                parsed = _pdf(path, ocr=ocr)
            else:
                parsed = _plain(_recognized(path.read_bytes())) if kind in IMAGES else PARSERS[kind](path)
            check_size(sum(len(text) for text, _ in parsed["sections"]), max_bytes)
    except UnreadableError as error:
        return {"error": one_line(str(error).replace(str(path), path.name))}
    parsed["title"] = _ADDED_BY_PROGRAMS.sub("", " ".join(parsed["title"].split()))
    return parsed


def _plain(text: str, title: str = "") -> Parsed:
    return {"title": title, "sections": [(text, {})]}


# -- documents --------------------------------------------------------------------------------------------------------


def _pdf(path: Path, *, ocr: bool = False) -> Parsed:
    from pypdf import PdfReader  # noqa: PLC0415 (comes with the readers)

    pdf, title, sections = PdfReader(path), "", []
    for page, label in zip(pdf.pages, pdf.page_labels, strict=True):
        text = page.extract_text()
        if ocr and not text.strip():
            text = "\n".join(_recognized_on(page))
        sections.append((text, {"page_label": label}))
    with suppress(Exception):  # the pages were read
        title = str((pdf.metadata and pdf.metadata.title) or "")
    return {"title": title, "sections": sections}


def _recognized_on(page: PageObject) -> Iterator[str]:
    with suppress(Exception):  # an image that can't be decoded (JBIG2 needs a program) costs its page, not the file
        for image in page.images:
            yield _recognized(image.data)


def _recognized(image: bytes) -> str:
    from PIL import Image  # noqa: PLC0415 (with the extra)

    picture: Image.Image = Image.open(io.BytesIO(image))
    if picture.mode not in ("1", "L", "LA", "RGB", "RGBA"):  # RapidOCR reads a palette's indices as grey
        picture = picture.convert("RGBA" if "transparency" in picture.info else "RGB")
    lines, _ = _recognizer()(picture)
    return "\n".join(text for _, text, _ in lines or ())


@cache
def _recognizer() -> Any:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else onnxruntime asks for a host of Microsoft's
    from rapidocr_onnxruntime import RapidOCR  # noqa: PLC0415 (the extra)

    return RapidOCR()  # loads its models


def _docx(path: Path) -> Parsed:
    from llama_index.readers.file import DocxReader  # noqa: PLC0415 (loads pandas)

    sections = [(document.text, dict[str, str]()) for document in DocxReader().load_data(path)]
    return {"title": _office_title(path), "sections": sections}


def _pptx(path: Path) -> Parsed:
    from llama_index.readers.file import PptxReader  # noqa: PLC0415 (loads pandas)

    slides = PptxReader(num_workers=0, raise_on_error=True).load_data(path)
    first = next((str(slide.metadata["title"]) for slide in slides if slide.metadata.get("title")), "")
    # The reader repeats each slide's title before its text.
    texts = (re.sub(r"\ATitle: .*\n-----\n", "", slide.text) for slide in slides)
    labels = ({"page_label": str(slide.metadata["page_label"])} for slide in slides)
    return {"title": _office_title(path) or first, "sections": list(zip(texts, labels, strict=True))}


def _epub(path: Path) -> Parsed:
    from defusedxml.ElementTree import fromstring  # noqa: PLC0415 (comes with LlamaIndex's file readers)

    with zipfile.ZipFile(path) as archive:
        rootfile = fromstring(archive.read("META-INF/container.xml")).find(".//{*}rootfile")
        package = rootfile.get("full-path")
        root = fromstring(archive.read(package))
        hrefs = {item.get("id"): item.get("href") for item in root.iterfind(".//{*}manifest/{*}item")}
        chapters = [hrefs.get(item.get("idref")) for item in root.iterfind(".//{*}spine/{*}itemref")]
        names = [posixpath.join(posixpath.dirname(package), unquote(chapter)) for chapter in chapters if chapter]
        texts = [_page(archive.read(name))[1] for name in names]
    return {"title": root.findtext(_DC_TITLE) or "", "sections": [(text, {}) for text in texts]}


def _eml(path: Path) -> Parsed:
    """Return an e-mail's subject, its main headers, its text and the names of its attachments."""
    with path.open("rb") as file:
        message = email.message_from_binary_file(file, policy=email.policy.default)
    headers = [f"{name}: {message[name]}" for name in ("From", "To", "Cc", "Date", "Subject") if message[name]]
    body = message.get_body(("plain", "html"))
    text = "" if body is None else str(body.get_content())
    if body is not None and body.get_content_subtype() == "html":
        text = _page(text)[1]
    attached = [name for part in message.iter_attachments() if (name := part.get_filename())]
    parts = ["\n".join(headers), text.strip(), f"Attachments: {', '.join(attached)}" if attached else ""]
    return _plain("\n\n".join(filter(None, parts)), str(message["Subject"] or ""))


def _ipynb(path: Path) -> Parsed:
    cells = json.loads(_text(path))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    shown = [f"```\n{text}\n```" if kind == "code" else text for kind, text in texts if text.strip()]
    title = next(filter(None, (first_heading(text) for kind, text in texts if kind == "markdown")), "")
    return _plain("\n\n".join(shown), title)


def _html(path: Path) -> Parsed:
    data = path.read_bytes()
    refuse_binary(data[:8192])
    title, text = _page(data)
    return _plain(text, title)


def _page(data: bytes | str) -> tuple[str, str]:
    """Return an HTML page's title (the first ``<h1>``, else ``<title>``) and its text without scripts and styles.

    Blocks are separated by blank lines; list items and table rows are on separate lines.
    """
    from bs4 import BeautifulSoup  # noqa: PLC0415 (comes with LlamaIndex's file readers)

    if isinstance(data, bytes):  # html.parser warns about an XML declaration, which it ignores
        data = re.sub(rb"\A\s*<\?xml[^>]*\?>", b"", data)
    soup = BeautifulSoup(data, "html.parser")
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
    return title, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _office_title(path: Path) -> str:
    from defusedxml.ElementTree import fromstring  # noqa: PLC0415 (comes with LlamaIndex's file readers)

    with zipfile.ZipFile(path) as archive, suppress(Exception):  # the text was read
        return fromstring(archive.read("docProps/core.xml")).findtext(_DC_TITLE) or ""
    return ""


# -- data -------------------------------------------------------------------------------------------------------------


def _csv(path: Path) -> Parsed:
    csv.field_size_limit(1 << 30)  # a file's size has a limit of its own
    with path.open(encoding=text_encoding(path), errors="replace", newline="") as file:
        first = file.readline(1 << 16)
        file.seek(0)
        return _plain(_table(csv.reader(file, delimiter=max(",;\t|", key=first.count))))


def _xlsx(path: Path) -> Parsed:
    from openpyxl import load_workbook  # noqa: PLC0415 (only for this kind)

    book = load_workbook(path, read_only=True, data_only=True)
    sections = []
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # some programs record wrong ones
        sections.append((_table(sheet.iter_rows(values_only=True)), {"sheet": str(sheet.title)}))
    return {"title": str(book.properties.title or ""), "sections": sections}


def _json(path: Path) -> Parsed:
    text = _text(path)
    lines = path.suffix.lower() == ".jsonl"
    data = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else json.loads(text)
    return _plain("\n".join(_facts(data)).strip())


def _text(path: Path) -> str:
    return path.read_text(text_encoding(path), "replace")


def _table(rows: Iterable[Iterable[object]]) -> str:
    """Return a table as text: a paragraph for each row, each value after the name of its column."""
    filled = filter(any, (list(map(_cell, row)) for row in rows))
    header = next(filled, [])
    is_header = sum(map(bool, header)) > 1 and not any(map(_NUMBER.fullmatch, header))
    paragraphs = [", ".join(filter(None, header))]
    for row in filled:
        named = zip_longest(header if is_header else (), row, fillvalue="")
        paragraphs.append(", ".join(f"{name}: {value}" if name else value for name, value in named if value))
    return "\n\n".join(paragraphs)


def _cell(value: object) -> str:
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else " ".join(str(value).split())


def _facts(value: object, name: str = "") -> Iterator[str]:
    """Yield a line for each value in JSON data, ``a.b: value``, and an empty one between the records of a list."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _facts(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        for part in value:
            yield ""
            yield from _facts(part, name)
    elif value not in (None, "", []):
        shown = ", ".join(map(_scalar, value)) if isinstance(value, list) else _scalar(value)
        yield f"{name}: {shown}" if name else shown


def _scalar(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_ZIPPED: Final = frozenset({".docx", ".pptx", ".xlsx", ".epub"})
PARSERS: Final[Mapping[str, Callable[[Path], Parsed]]] = {
    ".csv": _csv,
    ".docx": _docx,
    ".eml": _eml,
    ".epub": _epub,
    ".htm": _html,
    ".html": _html,
    ".ipynb": _ipynb,
    ".json": _json,
    ".jsonl": _json,
    ".pdf": _pdf,
    ".pptx": _pptx,
    ".tsv": _csv,
    ".xlsx": _xlsx,
}
"""The parsers by lower-case suffix."""
