from __future__ import annotations

from pathlib import Path

import pytest

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation import read_dataset
from tests.evaluation.tiny_set import lines, write_set


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_folder_is_read(folder: Path, encoding: str) -> None:
    """Documents, queries with judgments above 0, and what was left out; a byte order mark is no text."""
    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"):
        (folder / name).write_text((folder / name).read_text(encoding="utf-8"), encoding=encoding)
    read = read_dataset(folder)
    assert (read.name, len(read.documents), [query.id for query in read.queries]) == ("tiny", 8, ["b1", "p1"])
    assert read.relevant == {"b1": {"d1": 1.0, "d3": 1.0}, "p1": {"d6": 2.0}}
    assert read.documents[0].metadata["title"] == "Silent Harbour"
    assert read.warnings == ("1 queries have no judgment above 0; they were left out",)


@pytest.mark.parametrize(
    "qrels", ["b1\td1\t1\n", "b1 0 d1 1\n", "query-id\tcorpus-id\tscore\nb1\td1\t1\n", "b1\tQ0\td1\t1\n"]
)
def test_judgments_have_three_columns_or_four(tmp_path: Path, qrels: str) -> None:
    """BEIR's with or without a header, and TREC's."""
    assert read_dataset(write_set(tmp_path / "s", qrels=qrels)).relevant == {"b1": {"d1": 1.0}}


def test_a_split_is_read_from_qrels(folder: Path) -> None:
    """Without qrels.tsv, qrels/<split>.tsv is read."""
    (folder / "qrels").mkdir()
    (folder / "qrels.tsv").rename(folder / "qrels" / "dev.tsv")
    assert len(read_dataset(folder, split="dev").queries) == 2
    with pytest.raises(InvalidRequestError, match=r"neither qrels\.tsv nor qrels/test\.tsv"):
        read_dataset(folder)


def test_history_and_lists_of_types_are_read(tmp_path: Path) -> None:
    """Turns before a question come along; several types are several kinds."""
    turns = [{"role": "user", "content": "hello"}]
    row = {"_id": "b1", "text": "and then?", "history": turns, "type": ["Factoid", "Short"]}
    (query,) = read_dataset(write_set(tmp_path / "s", queries=lines(row))).queries
    assert (query.history, query.kinds) == ((("user", "hello"),), ("Factoid", "Short"))


def test_a_draw_is_the_same_for_a_seed(folder: Path) -> None:
    """The limit is the number of questions; one above theirs takes all."""
    one, two, every = (read_dataset(folder, limit=limit, seed=3).queries for limit in (1, 1, 99))
    assert (one, len(one), len(every)) == (two, 1, 2)


def test_judgments_of_unknown_documents_are_reported(tmp_path: Path) -> None:
    """They stay relevant, so that they count as not found."""
    read = read_dataset(write_set(tmp_path / "s", qrels="b1\td1\t1\nb1\tnowhere\t1\n"))
    assert set(read.relevant["b1"]) == {"d1", "nowhere"}
    assert "1 judgments name documents that are not in corpus.jsonl" in read.warnings[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "{not json"}, r"corpus\.jsonl, line 1: no JSON"),
        ({"corpus": '{"text": "x"}'}, r"corpus\.jsonl, line 1: each line is a JSON object with an _id"),
        ({"corpus": '{"_id": null, "text": "x"}'}, r"line 1: each line is a JSON object with an _id"),
        ({"corpus": '{"_id": "a"}'}, r"corpus\.jsonl, line 1: text is missing"),
        ({"corpus": '{"_id": "a", "text": "x"}\n\n{"_id": "a", "text": "y"}'}, "'a' is there twice"),
        ({"queries": '{"_id": "b1", "text": "x", "history": "no"}'}, "history is a list"),
        ({"qrels": "b1\td1\t1\nb1\td1\n"}, r"qrels\.tsv, line 2: expected query-id, corpus-id and score"),
        ({"qrels": "b1\td1\t1\nb1\td1\tmuch\n"}, r"line 2: the score 'much' is no number"),
        ({"qrels": "b1\td1\t1\nb1\td1\tnan\n"}, r"line 2: the score 'nan' is no finite number"),
        ({"qrels": "b1\td1\t0\n"}, "no query of queries.jsonl has a judgment above 0"),
    ],
)
def test_malformed_files_are_refused_by_file_and_line(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """The message names the place and the remedy."""
    with pytest.raises(InvalidRequestError, match=message):
        read_dataset(write_set(tmp_path / "s", **changes))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """What a BEIR-form folder holds is named."""
    with pytest.raises(InvalidRequestError, match=r"corpus\.jsonl is missing: a BEIR-form folder"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("file", ["corpus.jsonl", "qrels.tsv"])
def test_other_encodings_are_refused(folder: Path, file: str) -> None:
    """The file and what it should be are named."""
    (folder / file).write_bytes("b1\td1\t1\n\xe9".encode("utf-16"))
    with pytest.raises(InvalidRequestError, match=rf"{file} can't be read as UTF-8"):
        read_dataset(folder)


def test_a_part_of_a_set_counts_what_was_left_out(folder: Path) -> None:
    """The reason stands among the warnings; nothing left is an error."""
    part = read_dataset(folder).only({"p1", "elsewhere"}, "no plan")
    assert [query.id for query in part.queries] == ["p1"]
    assert part.warnings[-1] == "1 queries were left out: no plan"
    with pytest.raises(InvalidRequestError, match="no query is left: no plan"):
        part.only(set(), "no plan")
