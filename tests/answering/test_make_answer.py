"""An answer holds what was asked for, in a form that Google's own parser and our validation accept."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as google_v1
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.answering.results import answer_references, answer_steps, make_answer
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, strip_markers
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification
from llama_index_agentic_kb.schema.answer import Answer, AnswerState, HarmCategory, SafetyRating
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.grounding import FilteringLevel, GroundingLedger
from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.wire.google_answer import encode_answer
from tests.answering.retrieving import APOLLO, SATURN, retrieved, source
from tests.wire.streams import stream_answer

QUESTION = "How tall was the rocket that launched Apollo 11?"
TEXT = "A Saturn V rocket launched Apollo 11. [ref_id:0] It was 110.6 m tall [ref_id:1]. I hope this helps!"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# Few in CI; the long run has 1000.
EXAMPLES = int(os.environ.get("WIRE_EXAMPLES", "60"))
WORDS = ["Apollo", "rocket", "110.6 m", "Saturn V", "東京の", "Größe", "😀", "was", "tall", "launched", "é"]


def query(**fields: Any) -> AnswerQuery:
    return AnswerQuery.model_validate({"request": {"messages": [{"role": "user", "content": QUESTION}]}, **fields})


ALL = query(
    include_citations=True, grounding_supports=True, related_questions=True, safety=True, classify=list(QueryClass)
)


@pytest.fixture(scope="module")
def retrieval() -> Retrieval:
    """What was found."""
    return retrieved([source([APOLLO, SATURN])], QUESTION)


def checked(retrieval: Retrieval, text: str) -> GroundingLedger:
    """The claims of a text, really checked against what was found."""
    sources = [
        GroundingSource(node.node.get_content(), reference_id=str(position), node_id=node.node.node_id)
        for position, node in enumerate(retrieval.nodes)
    ]
    return run(ground(text, sources))


def told(retrieval: Retrieval, text: str, style: Markers) -> tuple[str, GroundingLedger]:
    """A text with its markers in a style, and its ledger."""
    markers = MarkerFilter({0, 1}, Markers.RENUMBER if style is Markers.RENUMBER else Markers.KEEP)
    shown = markers.feed(text) + markers.close()
    ledger = checked(retrieval, shown)
    return strip_markers(shown, ledger) if style is Markers.STRIP else (shown, ledger)


def made(retrieval: Retrieval, asked: AnswerQuery = ALL, text: str = TEXT, **kwargs: Any) -> Answer:
    given: dict[str, Any] = {
        "references": answer_references(retrieval),
        "steps": answer_steps(retrieval),
        "ledger": checked(retrieval, TEXT),
        "related_questions": ["How heavy was it?", "How heavy was it?"],
        "classifications": [QueryClassification(type=one, positive=False) for one in QueryClass],
        "safety_ratings": [SafetyRating(category=HarmCategory.HARASSMENT, probability_score=0.1)],
        **kwargs,
    }
    return make_answer(asked, text, **given)


def strictly_read(answer: Answer) -> dict[str, Any]:
    """What Google's parser makes of it; it is checked by our own rules on its way."""
    told = encode_answer(answer, name="n")
    read = json_format.Parse(json.dumps(told), google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)
    again: dict[str, Any] = json_format.MessageToDict(read)
    return again


@pytest.mark.parametrize(
    ("asked", "scored", "supports"),
    [
        ({"grounding_supports": True}, True, True),
        ({"filtering_level": FilteringLevel.LOW}, True, False),
        ({"include_citations": True}, False, False),
    ],
    ids=["supports", "filtering", "citations alone"],
)
def test_a_grounding_score_is_told_where_it_matters(
    retrieval: Retrieval, asked: dict[str, Any], scored: bool, supports: bool
) -> None:
    """The score is told with supports, and where answers are filtered by it."""
    answer = made(retrieval, query(**asked))
    assert (answer.grounding_score is not None) == scored
    assert bool(answer.grounding_supports) == supports


@pytest.mark.parametrize("style", list(Markers))
def test_citations_fit_the_text_in_every_form(retrieval: Retrieval, style: Markers) -> None:
    """Whether its markers are kept, renumbered or stripped, a citation spans its claim."""
    text, ledger = told(retrieval, TEXT, style)
    answer = made(retrieval, text=text, ledger=ledger)
    assert [text[one.start : one.end].split()[0] for one in answer.citations] == ["A", "It"]
    assert answer.citations[1].end == text.index(" I hope")


def test_references_that_are_not_shown_are_no_sources() -> None:
    """A claim that rests on a hidden reference alone is not cited; others are cited by their place in the list."""
    sources = [source([APOLLO], "hidden"), source([SATURN], "shown")]
    params = [{"knowledgeSourceName": "hidden", "includeReferences": False}]
    retrieval = retrieved(sources, "Apollo 11 rocket", params)
    answer = made(retrieval, ledger=checked(retrieval, TEXT))
    assert [one.title for one in answer.references] == [one.title for one in retrieval.references]
    assert [(answer.text[one.start : one.end], one.sources) for one in answer.citations] == [
        ("It was 110.6 m tall [ref_id:1].", [0])
    ]


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_generated_answers_are_read_strictly(retrieval: Retrieval, data: st.DataObject) -> None:
    """Whatever the text, its form, its ledger and the query: the answer is valid, whole and streamed."""
    sentence = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
    marker = st.sampled_from(["", " [ref_id:0]", "[ref_id:1][ref_id:0]"])
    end = st.sampled_from([". ", "。", "!\n\n* ", ":\n\n", "\n"])
    text = "".join(
        f"{one}{marked}{ending}"
        for one, marked, ending in data.draw(st.lists(st.tuples(sentence, marker, end), max_size=4))
    )
    text, ledger = told(retrieval, text, data.draw(st.sampled_from(list(Markers))))
    flags = {name: data.draw(st.booleans()) for name in ("include_citations", "grounding_supports", "safety")}
    asked = query(**flags, classify=data.draw(st.lists(st.sampled_from(QueryClass), max_size=2)))
    answer = made(
        retrieval,
        asked,
        text,
        ledger=data.draw(st.sampled_from([None, ledger])),
        created_at=data.draw(st.none() | st.just(NOW)),
        skipped_reasons=data.draw(st.lists(st.sampled_from(SkippedReason), max_size=2)),
        state=data.draw(st.sampled_from([AnswerState.SUCCEEDED, AnswerState.FAILED])),
    )
    assert strictly_read(answer) == encode_answer(answer, name="n")
    for element in json.loads(b"".join(stream_answer(answer))):
        response = google_v1.AnswerQueryResponse.pb(google_v1.AnswerQueryResponse())
        json_format.Parse(json.dumps(element), response, ignore_unknown_fields=False)
    assert Answer.parse(answer.to_dict()) == answer
