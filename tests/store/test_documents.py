from __future__ import annotations

from contextlib import closing
from pathlib import Path

from llama_index_agentic_kb.store.documents import DocumentDatabase


def test_chunks_are_read_by_their_ids(tmp_path: Path) -> None:
    """However many ids are asked for, SQLite looks each one up; it never reads all chunks of the source."""
    statements: list[str] = []
    with closing(DocumentDatabase(tmp_path / "documents.db")) as database:
        database.put_source("docs")
        database._connection.set_trace_callback(statements.append)
        for count in (1, 30, 400):
            assert list(database.chunks_by_id("docs", [f"n{at}" for at in range(count)])) == []
        database._connection.set_trace_callback(None)
        for statement in statements:
            plan = database._rows(f"EXPLAIN QUERY PLAN {statement}")
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
