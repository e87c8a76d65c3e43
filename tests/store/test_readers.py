from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_index_agentic_kb.errors import IngestionError
from llama_index_agentic_kb.store import readers
from llama_index_agentic_kb.store.readers import first_heading, html_to_text, read_file, split_front_matter

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
with <b>tags</b> and [a link](https://example.org).

    indented = code()
"""


def test_front_matter_becomes_metadata() -> None:
    """Scalars become typed metadata; lists are left out; the text keeps everything else as it is."""
    fields, text = split_front_matter(MARKDOWN)
    assert fields == {
        "title": "Apollo 11: the landing",
        "url": "https://example.org/apollo#top",
        "year": 1969,
        "mass": 28.8,
        "crewed": True,
        "code": "007",
        "draft": "no",
    }
    assert text.startswith(
        "# Landing\n\nFirst paragraph,\nwith <b>tags</b> and [a link](https://example.org).\n\n    i"
    )


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
    ],
)
def test_first_heading(text: str, heading: str) -> None:
    """The first heading outside code names a document."""
    assert first_heading(text).rstrip("*") == heading


def test_titles_fall_back_in_order(tmp_path: Path) -> None:
    """Front matter's title comes first, then the heading, then the file's stem."""
    for name, text in [("a.md", MARKDOWN), ("b.md", "# Heading\ntext"), ("c.md", "text"), ("d.txt", "# text")]:
        (tmp_path / name).write_text(text)
    titles = [read_file(tmp_path / name).title for name in ("a.md", "b.md", "c.md", "d.txt")]
    assert titles == ["Apollo 11: the landing", "Heading", "c", "d"]


def test_html_keeps_blocks_apart() -> None:
    """Paragraphs don't run together, inline marks don't break words, scripts are gone, entities are text."""
    page = b"""<?xml version="1.0"?><!DOCTYPE html><html><head><title>Site | Page</title><style>p {}</style></head>
    <body><script>alert(1)</script><h1>The <i>Moon</i></h1><div><p>One
    line.</p><p>T<b>w</b>o &amp; more.</p></div><ul><li>first</li><li>second</li></ul>
    <table><tr><td>a</td><td>b</td></tr></table><pre>x = 1
y = 2</pre><!-- hidden --></body></html>"""
    title, text = html_to_text(page)
    assert title == "The Moon"
    assert text == "The Moon\n\nOne line.\n\nTwo & more.\n\nfirst\nsecond\n\na b\n\nx = 1\ny = 2"


def test_html_title_and_encoding(tmp_path: Path) -> None:
    """Without a heading the page's title is taken, and the page's own encoding is obeyed."""
    page = tmp_path / "page.htm"
    page.write_bytes('<meta charset="iso-8859-1"><title>Ein Überblick</title><p>Größe'.encode("latin-1"))
    parsed = read_file(page)
    assert (parsed.title, parsed.sections[0].text) == ("Ein Überblick", "Größe")


def test_pdf_is_read_page_by_page(tmp_path: Path, write_pdf: Callable[[Path, list[str]], Path]) -> None:
    """Each page is a section that knows its page label."""
    parsed = read_file(write_pdf(tmp_path / "Report.pdf", ["Saturn has rings.", "Titan has lakes."]))
    assert parsed.title == "Report"
    assert [(section.text.strip(), section.metadata["page_label"]) for section in parsed.sections] == [
        ("Saturn has rings.", "1"),
        ("Titan has lakes.", "2"),
    ]


def test_docx_is_read(tmp_path: Path, write_docx: Callable[[Path, str], Path]) -> None:
    """A .docx gives its paragraphs, a blank line apart."""
    parsed = read_file(write_docx(tmp_path / "memo.docx", "First.\nSecond."))
    assert (parsed.title, parsed.sections[0].text) == ("memo", "First.\n\nSecond.")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_encodings(tmp_path: Path, encoding: str) -> None:
    """UTF-8 with and without mark and UTF-16 are read alike, with line ends made one kind."""
    (tmp_path / "a.txt").write_bytes("Größe\r\nzwei".encode(encoding))
    assert read_file(tmp_path / "a.txt").sections[0].text == "Größe\nzwei"


def test_unreadable_files_tell_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of broken file is refused with its own reason."""
    with zipfile.ZipFile(tmp_path / "other.docx", "w") as archive:
        archive.writestr("nothing.xml", "")
    with zipfile.ZipFile(tmp_path / "xml.docx", "w") as archive:
        archive.writestr("word/document.xml", "<broken")
    with zipfile.ZipFile(tmp_path / "bomb.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "a" * 20_000)
    (tmp_path / "large.txt").write_text("a" * 20_000)
    monkeypatch.setattr(readers, "MAX_BYTES", 10_000)
    contents = {
        "latin.txt": "Größe".encode("latin-1"),
        "binary.md": b"\x89PNG\x00\x00",
        "binary.html": b"<p>\x00",
        "broken.pdf": b"%PDF-1.4 nothing else",
        "broken.docx": b"not a zip",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    reasons = {
        "latin.txt": "is not UTF-8 text: invalid start byte at byte 2",
        "binary.md": "is binary",
        "binary.html": "is binary",
        "broken.pdf": "can't be read as PDF",
        "broken.docx": "can't be read as .docx: File is not a zip file",
        "other.docx": "can't be read as .docx: .*document.xml",
        "xml.docx": "can't be read as .docx",
        "bomb.docx": "is too large: 20,000 bytes when unpacked",
        "large.txt": "is too large: 20,000 bytes",
    }
    for name, reason in reasons.items():
        with pytest.raises(IngestionError, match=reason):
            read_file(tmp_path / name)


def test_text_that_no_store_takes_is_cleaned(tmp_path: Path, write_docx: Callable[[Path, str], Path]) -> None:
    """NUL beyond the part that is checked for binary content is dropped."""
    (tmp_path / "a.txt").write_bytes(b"a" * 9000 + b"\x00b")
    assert read_file(tmp_path / "a.txt").sections[0].text == "a" * 9000 + "b"


def test_a_heading_that_repeats_the_title_is_not_text(tmp_path: Path) -> None:
    """Markdown's first heading is dropped where it is the title, unless nothing else is there."""
    for name, text, kept in (
        ("a.md", "# The  Moon\n\nIt is far.\n\n# The Moon\n", "It is far.\n\n# The Moon\n"),
        ("b.md", "---\ntitle: Luna\n---\n# The Moon\n\nIt is far.\n", "# The Moon\n\nIt is far.\n"),
        ("c.md", "# The Moon\n", "# The Moon\n"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_file(tmp_path / name).sections[0].text.strip() == kept.strip()


def test_front_matter_is_bounded() -> None:
    """Thousands of fields, or a very long one, would be stored with each chunk: what is beyond is left out."""
    lines = "\n".join(f"key{at}: {at}" for at in range(6_000))
    fields, text = split_front_matter(f"---\nlong: {'x' * 10_000}\n{lines}\n---\nText.")
    assert (len(fields), text) == (readers.MAX_FIELDS, "Text.")
    assert "long" not in fields
