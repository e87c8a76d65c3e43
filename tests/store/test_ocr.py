"""Text in images and on scanned pages; the extra is not among what CI installs (200 MB)."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store import reading
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.store.ingestion import ingest
from llama_index_agentic_kb.store.reading import FileReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A photo with text, and a scan of two pages."""
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
