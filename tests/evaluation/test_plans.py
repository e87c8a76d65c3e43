from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_index_agentic_kb import AgenticRetriever
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import InvalidRequestError, LLMError
from llama_index_agentic_kb.evaluation import (
    CorpusIndex,
    Dataset,
    EvaluationQuery,
    PlannedLLM,
    gold_steps,
    read_dataset,
)
from llama_index_agentic_kb.prompts import Passage, format_passages
from tests.evaluation.tiny_set import lines, write_set


def question(dataset: Dataset) -> str:
    return dataset.queries[0].text


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_given_plans_go_the_way_of_every_plan(dataset: Dataset, corpus: CorpusIndex, effort: str) -> None:
    """At low the second step is searched in the question's words, at medium with the gold answer."""
    retriever = AgenticRetriever(corpus.sources(), llm=PlannedLLM("gold", gold_steps, dataset.queries), effort=effort)
    retrieval = run(retriever.retrieval(retriever.request_for(question(dataset))))
    queries = [sub_query.query for sub_query in retrieval.outcome.plan.sub_queries]
    last = "When did Marta Lindqvist die?" if effort == "medium" else "When did Who directed Silent Harbour die?"
    assert queries == [question(dataset), "Who directed Silent Harbour?", last]


def findings_prompt(query: EvaluationQuery, steps: str, *passages: Passage) -> str:
    evidence = f"<evidence>\n{format_passages(passages)}\n</evidence>\n\n"
    return f"{evidence}Question: {query.text}\n\n<steps>\n{steps}\n</steps>\n<found>\n</found>\nFindings:"


def findings_of(planned: PlannedLLM, prompt: str) -> dict[str, list[tuple[str, int | None]]]:
    rows = [json.loads(line) for line in planned.reply_to(prompt).splitlines()]
    return {row["step"]: [(answer["value"], answer["ref"]) for answer in row["answers"]] for row in rows}


COMPARED = EvaluationQuery(
    "c1",
    "Which film has the director died first,\nRed Orchard or Silent Harbour?",
    fields={
        "decomposition": [
            {"id": 1, "text": "Who directed Red Orchard?", "depends_on": [], "answer": "Jonas Weber"},
            {"id": 2, "text": "Who directed Silent Harbour?", "depends_on": [], "answer": "Marta Lindqvist"},
            {"id": 3, "text": "When did #1 die?", "depends_on": [1], "answer": "7 June 1971"},
            {"id": 4, "text": "When did #2 die?", "depends_on": [2], "answer": None},
        ]
    },
)


def test_steps_of_one_form_are_told_by_their_answers() -> None:
    """Both steps ask when somebody died: the name in the query tells; an answer that nobody recorded is none."""
    planned = PlannedLLM("gold", gold_steps, [COMPARED])
    found = findings_of(
        planned, findings_prompt(COMPARED, "b7: When did Marta Lindqvist die?\nb8: When did Weber die?")
    )
    assert found["b7"] == []
    swapped = findings_of(planned, findings_prompt(COMPARED, "q4: When did she die?\nq3: When did Jonas Weber die?"))
    assert swapped == {"q4": [], "q3": [("7 June 1971", None)]}
    assert findings_of(planned, findings_prompt(COMPARED, "q1: Something else?")) == {"q1": []}


def test_an_answer_names_the_passage_that_holds_it() -> None:
    """Out of several the one that has most of the question's words, titles counted; none where no passage does."""
    planned = PlannedLLM("gold", gold_steps, [COMPARED])
    passages = (
        Passage(1, "A letter", "Jonas Weber wrote it."),
        Passage(2, "Red Orchard", "A film of 1940 directed by Jonas Weber."),
        Passage(3, "Marta Lindqvister", "Another one."),
    )
    prompt = findings_prompt(COMPARED, "q1: Who directed Red Orchard?\nq2: Who directed Silent Harbour?", *passages)
    assert findings_of(planned, prompt) == {"q1": [("Jonas Weber", 2)], "q2": [("Marta Lindqvist", None)]}


def test_questions_of_the_same_words_are_told_by_their_conversations() -> None:
    """What "And then?" means came before it."""
    asked = [
        EvaluationQuery(str(at), "And then?", history=(("user", before),), fields={"rewrite": f"What after {before}?"})
        for at, before in enumerate(("Apollo 11", "Gemini 4"))
    ]
    planned = PlannedLLM("gold", gold_steps, asked)
    for query, before in zip(asked, ("Apollo 11", "Gemini 4"), strict=True):
        prompt = f"<conversation>\nuser: {before}\nuser: And then?\n</conversation>\n\nQuestion: {query.text}\nPlan:"
        assert f"What after {before}?" in planned.reply_to(prompt)


def test_other_prompts_are_refused(dataset: Dataset) -> None:
    """It is no model: what is not asked of a plan has no answer."""
    planned = PlannedLLM("gold", gold_steps, dataset.queries)
    with pytest.raises(LLMError, match="no question of the evaluation set"):
        planned.reply_to("Question: What else?\nPlan:")
    with pytest.raises(LLMError, match="no others"):
        planned.reply_to(f"Question: {question(dataset)}\nAnswer:")


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
    """BEIR's with or without a header, and TREC's; without qrels.tsv they are those of a split."""
    folder = write_set(tmp_path / "s", qrels=qrels)
    assert read_dataset(folder).relevant == {"b1": {"d1": 1.0}}
    (folder / "qrels").mkdir()
    (folder / "qrels.tsv").rename(folder / "qrels" / "dev.tsv")
    assert read_dataset(folder, split="dev").relevant == {"b1": {"d1": 1.0}}
    with pytest.raises(InvalidRequestError, match=r"neither qrels\.tsv nor qrels/test\.tsv"):
        read_dataset(folder)


def test_what_stands_beside_a_question_is_read(tmp_path: Path) -> None:
    """Turns before it, several types; judgments of unknown documents count as not found, and are reported."""
    turns = [{"role": "user", "content": "hello"}]
    row = {"_id": "b1", "text": "and then?", "history": turns, "type": ["Factoid", "Short"]}
    read = read_dataset(write_set(tmp_path / "s", queries=lines(row), qrels="b1\td1\t1\nb1\tnowhere\t1\n"))
    (query,) = read.queries
    assert (query.history, query.kinds) == ((("user", "hello"),), ("Factoid", "Short"))
    assert set(read.relevant["b1"]) == {"d1", "nowhere"}
    assert "1 judgments name documents that are not in corpus.jsonl" in read.warnings[0]


def test_a_draw_is_the_same_for_a_seed(folder: Path) -> None:
    """The limit is the number of questions; one above theirs takes all."""
    one, two, every = (read_dataset(folder, limit=limit, seed=3).queries for limit in (1, 1, 99))
    assert (one, len(one), len(every)) == (two, 1, 2)


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


def test_a_part_of_a_set_counts_what_was_left_out(folder: Path) -> None:
    """The reason stands among the warnings; nothing left is an error."""
    part = read_dataset(folder).only({"p1", "elsewhere"}, "no plan")
    assert [query.id for query in part.queries] == ["p1"]
    assert part.warnings[-1] == "1 queries were left out: no plan"
    with pytest.raises(InvalidRequestError, match="no query is left: no plan"):
        part.only(set(), "no plan")


def test_what_is_no_set_is_refused(folder: Path) -> None:
    """Another encoding is named with its file, a missing file with what the folder should hold."""
    (folder / "corpus.jsonl").write_bytes("b1\td1\t1\n\xe9".encode("utf-16"))
    with pytest.raises(InvalidRequestError, match=r"corpus\.jsonl can't be read as UTF-8"):
        read_dataset(folder)
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(InvalidRequestError, match=r"corpus\.jsonl is missing: a BEIR-form folder"):
        read_dataset(folder)
