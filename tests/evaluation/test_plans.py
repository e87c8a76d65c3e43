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
    recorded_plans,
)
from llama_index_agentic_kb.prompts import Passage, format_passages


def question(dataset: Dataset) -> str:
    return dataset.queries[0].text


def test_gold_fields_are_steps(dataset: Dataset) -> None:
    """Operations need no search; a rewrite is the one step of a set without decompositions."""
    steps = gold_steps(dataset.queries[0])
    assert [(step.id, step.depends_on, step.answers) for step in steps] == [
        ("1", (), ("Marta Lindqvist",)),
        ("2", ("1",), ("3 May 1960",)),
    ]
    assert gold_steps(dataset.queries[1]) == []
    rewritten = EvaluationQuery("x", "and then?", fields={"rewrite": "What came then?"})
    assert [step.text for step in gold_steps(rewritten)] == ["What came then?"]


def test_recorded_plans_keep_what_was_not_found(tmp_path: Path) -> None:
    """A recorded null is no answer."""
    file = tmp_path / "plans.jsonl"
    row = {"_id": "b1", "plan": [{"id": 1, "text": "x?", "depends_on": []}], "answers": {"1": None}, "final": "no"}
    file.write_text(json.dumps(row), encoding="utf-8")
    (steps,) = recorded_plans(file).values()
    assert [step.answers for step in steps] == [()]
    file.write_text('{"_id": "b1"}', encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"plans\.jsonl, line 1: no recorded plan"):
        recorded_plans(file)


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_given_plans_go_the_way_of_every_plan(dataset: Dataset, corpus: CorpusIndex, effort: str) -> None:
    """At low the second step is searched in the question's words, at medium with the gold answer."""
    retriever = AgenticRetriever(corpus.sources(), llm=PlannedLLM("gold", gold_steps, dataset.queries), effort=effort)
    retrieval = run(retriever.retrieval(retriever.request_for(question(dataset))))
    queries = [sub_query.query for sub_query in retrieval.plan.sub_queries]
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


def test_queries_of_a_fusion_retriever_are_the_steps(dataset: Dataset) -> None:
    """LlamaIndex's QueryFusionRetriever gets the gold queries, one a line, references left out."""
    prompt = f"a helpful assistant that generates multiple search queries\nQuery: {question(dataset)}\nQueries:"
    queries = PlannedLLM("gold", gold_steps, dataset.queries).complete(prompt).text.splitlines()
    assert queries == ["Who directed Silent Harbour?", "When did die?"]
