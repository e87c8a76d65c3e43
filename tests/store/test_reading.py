"""From files to text, titles and metadata."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.schema import Document
from openpyxl import Workbook
from PIL import Image, ImageDraw, ImageFont
from pptx import Presentation
from pptx.util import Inches
from pypdf import PdfReader, PdfWriter

from llama_index_agentic_kb.errors import ConfigurationError, IngestionError
from llama_index_agentic_kb.store import reading
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.files import SUFFIXES
from llama_index_agentic_kb.store.ingestion import ingest
from llama_index_agentic_kb.store.parsing import PARSERS
from llama_index_agentic_kb.store.reading import FileReader, UnreadableError, first_heading, split_front_matter
from tests.store.conftest import write_docx, write_pdf

MARKDOWN = """---
title: "Apollo 11: the landing"
url: https://example.org/apollo#top
year: 1969
mass: 28.8
crewed: true
code: 007
draft: no # a comment
tags: [moon, crew]
crew:
  - Armstrong
# nothing
---

# Landing

First paragraph,
with <b>tags</b>.
"""
Read = Callable[[str, bytes], tuple[str, str]]


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    """A reader whose parsers are loaded once for all tests."""
    with FileReader(max_bytes=1_000_000) as opened:
        yield opened


@pytest.fixture
def read(reader: FileReader, tmp_path: Path) -> Read:
    """A function that returns title and text of a file with some content."""

    def read_it(name: str, content: bytes) -> tuple[str, str]:
        (tmp_path / name).write_bytes(content)
        parsed = reader.read(tmp_path / name)
        return parsed.title, "\n".join(section.text for section in parsed.sections)

    return read_it


def test_front_matter_becomes_metadata() -> None:
    """Scalars become typed metadata; lists are left out; the text keeps everything else as it is."""
    fields, text = split_front_matter(MARKDOWN)
    own = {"title": "Apollo 11: the landing", "url": "https://example.org/apollo#top"}
    assert fields == {**own, "year": 1969, "mass": 28.8, "crewed": True, "code": "007", "draft": "no"}
    assert text.strip() == "# Landing\n\nFirst paragraph,\nwith <b>tags</b>."


@pytest.mark.parametrize("text", ["---\nJust a line between rules\n---\nText", "Text\n---\na: b\n---\n", "---\na: b\n"])
def test_rules_are_not_front_matter(text: str) -> None:
    """Thematic breaks and unfinished blocks stay text."""
    assert split_front_matter(text) == ({}, text)


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("intro\n\n## The *Moon* ##\n# Later", "The *Moon"),
        ("```\n# not this\n```\n# This", "This"),
        ("# [Linked](https://e.org) title", "Linked title"),
        ("#hashtag\nno heading", ""),
        ("# Notes on C#  ", "Notes on C#"),
        pytest.param("# a" + " " * 100_000 + "b", "a" + " " * 100_000 + "b", id="read in linear time"),
    ],
)
def test_first_heading(text: str, heading: str) -> None:
    """The first heading outside code names a document."""
    assert first_heading(text).rstrip("*") == heading


@pytest.mark.parametrize(
    ("name", "content", "title", "text"),
    [
        ("a.md", "# The  Moon\n\nIt is far.\n\n# The Moon\n", "The Moon", "It is far.\n\n# The Moon\n"),
        ("b.md", "---\ntitle: Luna\n---\n# The Moon\n\nIt is far.\n", "Luna", "# The Moon\n\nIt is far.\n"),
        ("c.md", "# The Moon\n", "The Moon", "# The Moon\n"),
        ("d.md", "text", "d", "text"),
        ("e.txt", "# text", "e", "# text"),
    ],
)
def test_titles_fall_back_in_order(read: Read, name: str, content: str, title: str, text: str) -> None:
    """Front matter's title, the heading, the file's stem; a heading that only repeats the title is no text."""
    found = read(name, content.encode())
    assert (" ".join(found[0].split()), found[1].strip()) == (title, text.strip())


def test_html_keeps_blocks_apart(read: Read) -> None:
    """Paragraphs don't run together, inline marks don't break words, scripts are gone, entities are text."""
    page = b"""<?xml version="1.0"?><!DOCTYPE html><html><head><title>Site | Page</title><style>p {}</style></head>
    <body><script>alert(1)</script><h1>The <i>Moon</i></h1><div><p>One
    line.</p><p>T<b>w</b>o &amp; more.</p></div><ul><li>first</li><li>second</li></ul>
    <table><tr><td>a</td><td>b</td></tr></table><pre>x = 1
y = 2</pre><!-- hidden --></body></html>"""
    assert read("a.html", page) == (
        "The Moon",
        "The Moon\n\nOne line.\n\nTwo & more.\n\nfirst\nsecond\n\na b\n\nx = 1\ny = 2",
    )
    latin = '<meta charset="iso-8859-1"><title>Ein Überblick</title><p>Größe'.encode("latin-1")
    assert read("b.htm", latin) == ("Ein Überblick", "Größe")


def test_pdf_and_docx_are_read(reader: FileReader, tmp_path: Path) -> None:
    """Each page of a PDF is a section that knows its label; paragraphs of a .docx are a blank line apart."""
    pdf = reader.read(write_pdf(tmp_path / "Report.pdf", ["Saturn has rings.", "Titan has lakes."]))
    assert pdf.title == "Report"
    pages = [(section.text.strip(), section.metadata["page_label"]) for section in pdf.sections]
    assert pages == [("Saturn has rings.", "1"), ("Titan has lakes.", "2")]
    with pytest.raises(IngestionError, match=r"is too large: 1[0-9,]+ bytes, of at most 1,000,000"):  # however packed
        reader.read(write_pdf(tmp_path / "long.pdf", ["Snow. " * 200_000]))
    memo = reader.read(write_docx(tmp_path / "memo.docx", "First.\nSecond."))
    assert (memo.title, [section.text for section in memo.sections]) == ("memo", ["First.\n\nSecond."])


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "Größe"),
        ("utf-8-sig", "Größe"),
        ("utf-16", "Größe"),
        ("cp1252", "L'été dernier, à la forêt où naît le chêne."),
        ("cp1252", "Größe"),
        ("cp1250", "Zażółć gęślą jaźń, książka leży na półce."),
        ("cp1251", "Снег падает зимой на поля."),
        ("koi8-r", "Снег падает зимой на поля."),
        ("cp1253", "Το χιόνι πέφτει τον χειμώνα."),  # noqa: RUF001 (Greek)
        ("shift_jis", "日本語の文章です。雪が降っています。"),
        ("gbk", "北京是中国的首都,冬天会下雪。"),
        ("euc_kr", "겨울에 눈이 옵니다."),
        ("cp874", "หิมะตกในฤดูหนาว"),
    ],
)
def test_encodings_are_guessed(read: Read, encoding: str, text: str) -> None:
    """From the text around the first byte that is no UTF-8, wherever in the file that is."""
    assert read("a.txt", f"{text}\r\nx".encode(encoding))[1] == f"{text}\nx"
    assert read("a.md", ("plain\n" * 2_000 + text).encode(encoding))[1].endswith(f"\n{text}")


def test_bytes_that_are_no_text_are_replaced_or_dropped(read: Read) -> None:
    """A log that was cut within a character is UTF-8 still; a NUL beyond the part that is looked at is dropped."""
    words = "Größe, Länge, Höhe, Fläche, Körper, Brücke, Tür, Öl, Äpfel, Übung"
    assert read("a.txt", words.encode() + b"\xc3")[1] == words + "\ufffd"
    assert read("a.txt", b"a" * 9000 + b"\x00b")[1] == "a" * 9000 + "b"


def test_an_interrupt_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ctrl-C would keep the process as long as a file may take."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    pipes = {"stdin": SimpleNamespace(write=interrupted, close=int), "stdout": SimpleNamespace(close=int)}
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(**pipes, kill=int, wait=int))
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), FileReader(seconds=3) as reader:
        reader.read(Path("a.pdf"))
    assert not any(isinstance(thread, threading.Timer) for thread in set(threading.enumerate()) - before)


def test_long_texts_come_in_blocks(reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end where a paragraph, a line or a word does, hold the whole text, and know where they begin."""
    monkeypatch.setattr(reading, "BLOCK", 40)
    text = "one two three four\n\n" * 9 + "x" * 100 + " end of it\n" * 9
    (tmp_path / "long.txt").write_text(text)
    sections = list(reader.read(tmp_path / "long.txt").sections)
    assert "".join(section.text for section in sections) == text
    assert all(text[section.start :].startswith(section.text) for section in sections)
    assert max(len(section.text) for section in sections) == 40
    assert sections[0].text.endswith("four\n\n")


def workbook() -> bytes:
    book, saved = Workbook(), io.BytesIO()
    staff: Any = book.active
    staff.title = "Staff"
    for row in (["name", "born", "since"], ["Åsa", 1969, datetime(2020, 1, 2)], [], ["Bo", None, 12.5]):  # noqa: DTZ001 (Excel has no zones)
        staff.append(row)
    book.create_sheet("Notes").append(["only a note"])
    book.save(saved)
    return saved.getvalue()


def deck() -> bytes:
    made, saved = Presentation(), io.BytesIO()
    slide = made.slides.add_slide(made.slide_layouts[1])
    slide.shapes.title.text = "Pump"
    slide.placeholders[1].text = "Press the red button."
    slide.notes_slide.notes_text_frame.text = "Say it twice."
    slide = made.slides.add_slide(made.slide_layouts[5])
    slide.shapes.title.text = "Prices"
    table = slide.shapes.add_table(2, 1, Inches(1), Inches(1), Inches(1), Inches(1)).table
    table.cell(0, 0).text, table.cell(1, 0).text = "EUR", "12.50"
    made.core_properties.title = "Microsoft PowerPoint - Pump deck.pptx"
    made.save(saved)
    return saved.getvalue()


def zipped(entries: dict[str, str]) -> bytes:
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
    return saved.getvalue()


BOOK = {
    "META-INF/container.xml": '<container xmlns="urn:c"><rootfile full-path="O/c.opf"/></container>',
    "O/c.opf": '<package xmlns="urn:p" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>Snow</dc:title>'
    '</metadata><manifest><item id="a" href="a%20b.xhtml"/><item id="b" href="b.xhtml"/></manifest>'
    '<spine><itemref idref="b"/><itemref idref="a"/></spine></package>',
    "O/a b.xhtml": '<?xml version="1.0"?><html><body><p>Rain &amp; ice</p></body></html>',
    "O/b.xhtml": "<html><body><h1>One</h1><p>Snow</p></body></html>",
}


def mail(html: str = "") -> bytes:
    made = EmailMessage()
    made["Subject"], made["From"] = "Größe des Ventils", "Ada <ada@example.org>"
    made.set_content(html or "Es ist 12 mm groß.", subtype="html" if html else "plain")
    if not html:
        made.add_alternative("<p>Es ist <b>12 mm</b> groß.</p>", subtype="html")
        made.add_attachment(b"x", maintype="application", subtype="pdf", filename="plan.pdf")
    return made.as_bytes()


CODE = {"cell_type": "code", "source": "x = 1", "outputs": [{"text": "not this"}]}
CELLS = [{"cell_type": "markdown", "source": ["# Fit\n", "a line"]}, CODE, {"cell_type": "code", "source": []}]
NOTEBOOK = json.dumps({"cells": CELLS}).encode()
RECORDS = json.dumps({"items": [{"name": "Oslo", "tags": ["cold", 7]}, {"name": "Bergen", "rain": True, "x": None}]})
HEAD = "From: Ada <ada@example.org>\nSubject: Größe des Ventils"


@pytest.mark.parametrize(
    ("name", "content", "title", "texts"),
    [
        ("a.csv", 'name;city\nÅsa;"Malmö; Süd"\nBo;\n'.encode("cp1252"), "a", ["name, city", "name: Åsa, city: Malmö; Süd", "name: Bo"]),  # noqa: E501
        ("b.tsv", b"1\t2\n3\t4\n", "b", ["1, 2", "3, 4"]),
        ("c.json", RECORDS.encode(), "c", ["items.name: Oslo\nitems.tags: cold, 7", "items.name: Bergen\nitems.rain: true"]),  # noqa: E501
        ("d.jsonl", b'{"q": "a"}\n\n{"q": "b"}\n', "d", ["q: a", "q: b"]),
        ("e.xlsx", workbook(), "e", ["name, born, since", "name: Åsa, born: 1969, since: 2020-01-02", "name: Bo, since: 12.5", "only a note"]),  # noqa: E501
        ("f.epub", zipped(BOOK), "Snow", ["One", "Snow", "Rain & ice"]),
        ("g.eml", mail(), "Größe des Ventils", [HEAD, "Es ist 12 mm groß.", "Attachments: plan.pdf"]),
        ("h.eml", mail("<p>Hello <b>you</b>"), "Größe des Ventils", [HEAD, "Hello you"]),
        ("i.ipynb", NOTEBOOK, "Fit", ["# Fit\na line", "```\nx = 1\n```"]),
        ("j.rst", b"=====\nGuide\n=====\n\nText.\n", "Guide", ["\nText.\n"]),
        ("k.rst", b"My guide\n--------\nText.\n", "My guide", ["Text.\n"]),
        ("l.rst", b"Text.\n\nPart\n====\n", "l", ["Text.", "Part\n====\n"]),
    ],
)  # fmt: skip
def test_formats(reader: FileReader, tmp_path: Path, name: str, content: bytes, title: str, texts: list[str]) -> None:
    """Each format's title and paragraphs; a table's rows carry the names of their columns."""
    (tmp_path / name).write_bytes(content)
    parsed = reader.read(tmp_path / name)
    assert (parsed.title, "\n\n".join(section.text for section in parsed.sections)) == (title, "\n\n".join(texts))


def test_slides_and_sheets_are_named(reader: FileReader, tmp_path: Path) -> None:
    """What a citation needs to be found again; a program's name is no part of a title."""
    (tmp_path / "a.pptx").write_bytes(deck())
    (tmp_path / "b.xlsx").write_bytes(workbook())
    slides, sheets = reader.read(tmp_path / "a.pptx"), reader.read(tmp_path / "b.xlsx")
    assert slides.title == "Pump deck"
    shown = [(section.metadata["page_label"], section.text) for section in slides.sections]
    assert [label for label, _ in shown] == ["1", "2"]
    assert "Press the red button." in shown[0][1]
    assert "Say it twice." in shown[0][1]
    assert "12.50" in shown[1][1]
    assert [section.metadata["sheet"] for section in sheets.sections] == ["Staff", "Notes"]


def test_a_pdf_has_its_own_title(reader: FileReader, tmp_path: Path) -> None:
    """The one in its properties."""
    writer = PdfWriter(PdfReader(write_pdf(tmp_path / "a.pdf", ["One."])))
    writer.add_metadata({"/Title": "Microsoft Word - Annual  report.docx"})
    writer.write(tmp_path / "a.pdf")
    assert reader.read(tmp_path / "a.pdf").title == "Annual report"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("binary.md", b"\x89PNG\x00\x00", "is binary"),
        ("noise.txt", bytes(range(1, 32)) * 9 + b"\xff", "is binary"),
        ("binary.html", b"<p>\x00", "is binary"),
        ("broken.pdf", b"%PDF-1.4 nothing else", "can't be read as .pdf"),
        ("broken.docx", b"not a zip", "can't be read as .docx: BadZipFile: File is not a zip file"),
        ("other.docx", zipped({"nothing.xml": ""}), "can't be read as .docx: .*document.xml"),
        ("xml.docx", zipped({"word/document.xml": "<broken"}), "can't be read as .docx"),
        ("a.json", b"{", "can't be read as .json: JSONDecodeError"),
        ("b.json", b"[" * 100_000, "can't be read as .json: RecursionError"),
        ("c.ipynb", b"{}", "can't be read as .ipynb: KeyError"),
        ("d.epub", zipped({"a": "b"}), "can't be read as .epub: KeyError"),
        ("e.xlsx", zipped({"a": "b" * 2_000_000}), "is too large: 2,000,000 bytes when unpacked"),
        ("f.pptx", b"PK", "can't be read as .pptx: BadZipFile"),
        ("f.xlsx", zipped({"a": "b"}), "can't be read as .xlsx: KeyError"),
        ("h.pptx", zipped({"a": "b"}), r"can't be read as .pptx: ValueError: Failed to extract data from h\.pptx"),
        ("g.csv", b"a\x00b", "is binary"),
    ],
)
def test_broken_files_name_the_reason(
    reader: FileReader, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    """And the next file is read."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableError, match=reason):
        list(reader.read(tmp_path / name).sections)


def test_readers_of_an_application_come_first(tmp_path: Path) -> None:
    """By suffix in any form; whatever they raise is this file's failure."""

    class Upper:
        def load_data(self, path: Path) -> list[Document]:
            if "bad" in path.name:
                raise ValueError("no")
            return [Document(text=path.read_text().upper(), metadata={"page_label": 3, "list": [1]})]

    for name in ("a.xyz", "bad.xyz"):
        (tmp_path / name).write_text("snow")
    with FileReader(extractors={"XYZ": Upper()}) as own:  # type: ignore[dict-item]  # a duck
        (section,) = own.read(tmp_path / "a.xyz").sections
        assert (section.text, section.metadata) == ("SNOW", {"page_label": 3})
        with pytest.raises(UnreadableError, match="can't be read by Upper: ValueError: no"):
            own.read(tmp_path / "bad.xyz")


def test_the_documentation_names_every_format() -> None:
    """In the guide, and in what the command line says of itself."""
    guide = (Path(__file__).parents[2] / "docs" / "documents.md").read_text(encoding="utf-8")
    assert [kind for kind in sorted(SUFFIXES) if f"`{kind}`" not in guide] == []
    assert PARSERS.keys() < SUFFIXES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pages = []
    for text in ("Hold the red button.", "The pump weighs 41 kg."):
        page = Image.new("RGB", (800, 200), "white")
        ImageDraw.Draw(page).text((40, 60), text, fill="black", font=ImageFont.load_default(size=48))
        pages.append(page)
    made = tmp_path / "scans"
    made.mkdir()
    pages[0].save(made / "photo.png")
    pages[0].save(made / "scan.pdf", save_all=True, append_images=pages[1:])
    return made


def test_images_and_scanned_pages_are_read(folder: Path) -> None:
    """In the parser's process; each page keeps its number."""
    pytest.importorskip("rapidocr_onnxruntime")
    with FileReader(ocr=True) as reader:
        photo, scan = ([*reader.read(folder / name).sections] for name in ("photo.png", "scan.pdf"))
    assert [section.text.replace(" ", "") for section in photo] == ["Holdtheredbutton."]
    assert [(section.text.replace(" ", ""), section.metadata["page_label"]) for section in scan] == [
        ("Holdtheredbutton.", "1"),
        ("Thepumpweighs41kg.", "2"),
    ]


def test_without_it_the_way_is_named(folder: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files that have no text otherwise, and of the extra that is not installed."""
    report = ingest(folder, store)
    assert [reason for _, reason in (*report.failed, *report.skipped_files)] == [
        "holds no text; text in images is read by ocr=True, --ocr",
        "is of a kind that is not read (.png); text in images is read by ocr=True, --ocr",
    ]
    monkeypatch.setattr(reading, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'llama-index-agentic-kb\[ocr\]'"):
        ingest(folder, store, ocr=True)
