"""Scope indexes of a store: made and calibrated by the command, updated when it is opened, used in conversations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from llama_index_agentic_kb import KnowledgeBase
from llama_index_agentic_kb.cli import app
from llama_index_agentic_kb.evaluation import calibration
from llama_index_agentic_kb.evaluation.calibration import TARGET, calibrate, calibrate_store
from llama_index_agentic_kb.schema import AgenticReasoningActivity, ScopeReason, ScopeState
from llama_index_agentic_kb.search.prototypes import ScopeIndex, ScopeSettings, unit_rows
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.database import Chunk, StoredDocument
from llama_index_agentic_kb.store.directory import DirectoryStore
from llama_index_agentic_kb.testing import HashEmbedding

MODEL = HashEmbedding()
SOURCE = "notes"
DOCUMENTS = 260


def texts_of(number: int) -> list[str]:
    """Two chunks that share their document's words and few others."""
    own = [f"w{number}x{at}" for at in range(4)]
    drawn = random.Random(number)
    return [" ".join([*own, *(f"common{drawn.randrange(40)}" for _ in range(4)), f"part{at}."]) for at in range(2)]


def put(store: DirectoryStore, numbers: Iterable[int]) -> None:
    for number in numbers:
        path = f"{number}.txt"
        meta = {"document_id": f"{SOURCE}/{path}", "title": path}
        chunks = [
            Chunk(f"n{number}.{at}", at, text, meta, f"e{number}.{at}", 0, 1)
            for at, text in enumerate(texts_of(number))
        ]
        vectors = [np.asarray(MODEL.get_text_embedding(chunk.text), np.float32) for chunk in chunks]
        document = StoredDocument(SOURCE, path, f"/{path}", "/", "hash", "settings")
        store.put_document(document, zip(chunks, vectors, strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with DirectoryStore.open(tmp_path / "store", embed_model=MODEL, create=True) as store:
        store.put_source(SOURCE)
        put(store, range(DOCUMENTS))
    return tmp_path / "store"


def reason(kb: KnowledgeBase) -> ScopeReason | None:
    messages = [
        {"role": "user", "content": "What says w7x1 about w7x2?"},
        {"role": "assistant", "content": "Much."},
        {"role": "user", "content": "And w7x3?"},
    ]
    response = kb.retrieve(messages, scope_state=ScopeState())
    turn = next(one.conversation for one in response.activity or () if isinstance(one, AgenticReasoningActivity))
    assert turn is not None
    return turn.reason


def test_a_calibrated_store_narrows_conversations(path: Path) -> None:
    """Its index lies in the store, and is brought up to date when the store is opened; a new source has none."""
    with DirectoryStore.open(path, embed_model=MODEL) as store:
        [(source, made)] = calibrate_store(store)
        assert (source, made.turns) == (SOURCE, calibration.SAMPLE)
        assert min(made.evidence) >= TARGET
        assert made.scope < 0.25
        assert made.shifts > 0.9
        assert store.scopes()[SOURCE].settings == made.index.settings
        put(store, [DOCUMENTS])
        updated = store.scopes()[SOURCE]
        assert f"{SOURCE}/{DOCUMENTS}.txt" in updated.documents
        assert ScopeIndex.load(store._scope_file(SOURCE)).version == updated.version
    kb = KnowledgeBase.from_store(path, embed_model=MODEL, effort="minimal", output_mode="extractiveData")
    assert reason(kb) in (None, ScopeReason.TOO_SMALL)
    with DirectoryStore.open(path, embed_model=MODEL) as store:
        put(store, [DOCUMENTS + 1])
        assert reason(kb) is ScopeReason.INDEX_STALE
        store._scope_file(SOURCE).write_bytes(b"damaged")
        assert store.scopes() == {}
        store.remove_source(SOURCE)
        assert not store._scope_file(SOURCE).exists()


def test_the_command_says_what_the_scope_keeps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each source."""
    opened = DirectoryStore.open
    monkeypatch.setattr(KnowledgeStore, "open", lambda store, **_: opened(store, embed_model=MODEL))
    done = CliRunner().invoke(app, ["calibrate", "--store", str(path)])
    assert done.exit_code == 0, done.output
    assert f"{SOURCE}: {DOCUMENTS} documents, {2 * DOCUMENTS} prototypes" in done.output


def test_too_few_passages_keep_the_defaults() -> None:
    """A corpus without sentences can't imitate a conversation."""
    rows = unit_rows(np.eye(3, 8, dtype=np.float32))
    index = ScopeIndex("hash", "1", ("a", "b", "c"), ("", "", ""), np.arange(3), rows)
    made = calibrate(SOURCE, index, {"a": ["Short."], "b": [""], "c": []}, MODEL)
    assert (made.turns, made.index.settings) == (0, ScopeSettings())
    assert "the defaults are kept" in str(made)
