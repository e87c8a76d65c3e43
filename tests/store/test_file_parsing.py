"""From files of many formats to text; see ``test_reading`` for text, Markdown, HTML, PDF and .docx."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import Document
from openpyxl import Workbook
from pptx import Presentation
from pptx.util import Inches
from pypdf import PdfReader, PdfWriter

from llama_index_agentic_kb.store.files import SUFFIXES
from llama_index_agentic_kb.store.parsing import PARSERS
from llama_index_agentic_kb.store.reading import FileReader, UnreadableError


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    """A reader whose parsers are loaded once for all tests."""
    with FileReader(max_bytes=1_000_000) as opened:
        yield opened


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


NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["# Fit\n", "a line"]},
            {"cell_type": "code", "source": "x = 1", "outputs": [{"text": "not this"}]},
            {"cell_type": "code", "source": []},
        ]
    }
).encode()
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


def test_a_pdf_has_its_own_title(
    reader: FileReader, tmp_path: Path, write_pdf: Callable[[Path, list[str]], Path]
) -> None:
    """The one in its properties."""
    writer = PdfWriter(PdfReader(write_pdf(tmp_path / "a.pdf", ["One."])))
    writer.add_metadata({"/Title": "Microsoft Word - Annual  report.docx"})
    writer.write(tmp_path / "a.pdf")
    assert reader.read(tmp_path / "a.pdf").title == "Annual report"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
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
        reader.read(tmp_path / name)


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
