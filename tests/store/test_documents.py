from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from llama_index_agentic_kb.errors import IngestionError, RetrievalError
from llama_index_agentic_kb.store.documents import DocumentDatabase
from llama_index_agentic_kb.store.records import Chunk, StoredDocument


def test_chunks_are_read_by_their_ids(tmp_path: Path) -> None:
    """However many ids are asked for, SQLite looks each one up; it never reads all chunks of the source."""
    statements: list[str] = []
    with closing(DocumentDatabase(tmp_path / "documents.db")) as database:
        database.put_source("docs")
        database._database._connection.set_trace_callback(statements.append)
        for count in (1, 30, 400):
            assert list(database.chunks_by_id("docs", [f"n{at}" for at in range(count)])) == []
        database._database._connection.set_trace_callback(None)
        for statement in statements:
            plan = database._database.rows(f"EXPLAIN QUERY PLAN {statement}")
            assert [row[3] for row in plan] == ["SEARCH chunks USING PRIMARY KEY (node_id=?)"]
    assert len(statements) == 3


def test_a_source_tells_its_version(tmp_path: Path) -> None:
    """It grows with each change; an unknown source has none."""
    with closing(DocumentDatabase(tmp_path / "documents.db")) as database:
        assert database.version("docs") is None
        database.put_source("docs")
        before = database.version("docs")
        assert before is not None
        database.delete_document("docs", "a.txt")
        after = database.version("docs")
        assert after is not None
        assert after > before


def _document(path: str) -> StoredDocument:
    return StoredDocument("docs", path, "T", "/o", "/r", "hash", "settings", 0.0, 1)


def _chunk(name: str) -> Chunk:
    return Chunk(name, 0, "text", {"title": "T"}, "hash", f"embedding of {name}", None, None)


def test_vectors_live_as_long_as_their_chunks(tmp_path: Path) -> None:
    """Those of chunks that stay are kept when a document is stored again; the others go with theirs."""
    with closing(DocumentDatabase(tmp_path / "documents.db")) as database:
        database.put_source("docs")
        database.put_document(_document("a"), [_chunk("x"), _chunk("y")], {"x": [0.1, -2.0], "other": [1.0]})
        assert database.vectors.missing("docs") == {"y"}
        assert database.vectors.of("docs", ["x", "y"]) == {"x": [pytest.approx(0.1), -2.0]}
        database.put_document(_document("a"), [_chunk("x"), _chunk("z")], {"z": [3.0]})
        assert database.vectors.by_embedding("docs", ["embedding of x", "embedding of z", "no"]) == {
            "embedding of x": [pytest.approx(0.1), -2.0],
            "embedding of z": [3.0],
        }
        assert database.vectors.of("other", ["x"]) == {}
        database.delete_document("docs", "a")
        assert database._database.rows("SELECT count(*) FROM vectors") == [(0,)]


def test_a_stream_can_be_left_before_its_end(tmp_path: Path) -> None:
    """And what is asked of a file that is closed is an error of ours."""
    database = DocumentDatabase(tmp_path / "documents.db")
    database.put_source("docs")
    database.put_document(_document("a"), [_chunk("x"), _chunk("y")])
    assert next(database.metadata("docs")) == ("a", {"title": "T"})
    database.close()
    with pytest.raises(RetrievalError, match="can't be read"):
        database.sources()
    with pytest.raises(IngestionError, match="can't be written"):
        database.put_source("more")
