"""What the store's tests share: an empty store, a PostgreSQL, and files of each kind."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding
from tests.kills_sessions.postgres import PostgresServer, why_not

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "store", embed_model=HashEmbedding(), create=True) as opened:
        yield opened


@pytest.fixture
def minilm_store(tmp_path: Path, embed_model: BaseEmbedding) -> Iterator[DirectoryStore]:
    with DirectoryStore.open(tmp_path / "minilm", embed_model=embed_model, create=True) as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    if reason := why_not():
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


def written(folder: Path, texts: Mapping[str, str]) -> Path:
    """Return a folder, made if need be, in which there are files with these texts."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_pdf(path: Path, pages: list[str]) -> Path:
    writer = PdfWriter()
    helvetica = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in helvetica.items()})
    for text in pages:
        page, shown = writer.add_blank_page(612, 792), DecodedStreamObject()
        shown.set_data(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = shown
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    writer.write(path)
    return path


def write_docx(path: Path, text: str, prolog: str = "") -> Path:
    """Write a .docx with a paragraph per line of text."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", prolog + docx_document(text))
    return path


def docx_document(text: str) -> str:
    paragraphs = "".join(f"<w:p><w:r><w:t>{line}</w:t></w:r></w:p>" for line in text.split("\n"))
    namespace = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    return f'<w:document xmlns:w="{namespace}"><w:body>{paragraphs}</w:body></w:document>'
