"""An answer holds what was asked for, in a form that Google's own parser and our validation accept."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as google_v1
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.answering.results import Pieces, answer_references, answer_steps, make_answer
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, strip_markers
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification
from llama_index_agentic_kb.schema.answer import Answer, AnswerState, HarmCategory, SafetyRating
from llama_index_agentic_kb.schema.answer_query import AnswerQuery, CitationPiece, TextPiece
from llama_index_agentic_kb.schema.grounding import GroundingLedger
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


ANSWER = (
    "```\nx = 1. y = 2.\n\nz = 3.\n```\n\n# Launch\n"
    "Apollo 11 was launched in 1969 [ref_id:1][ref_id:0]. Here are its facts:\n"
    "- It was 110.6 m tall [ref_id:0].\n\n- 它很高。[ref_id:1]\nDr. Brown built it. [ref_id:1] 🚀 Nobody else did."
)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def read_out(deltas: list[str], *, cite: bool = True) -> tuple[str, list[tuple[str, list[int]]]]:
    """The text, and the citations by their claims' words; each claim is read_out before it is cited."""
    pieces = Pieces(["0", "1"], cite=cite)
    text, cited = "", []
    for piece in [one for delta in deltas for one in pieces.feed(delta)] + pieces.close():
        if isinstance(piece, TextPiece):
            text += piece.text
        else:
            assert isinstance(piece, CitationPiece)
            assert piece.citation.end <= len(text)
            cited.append((piece.citation.of(text), piece.citation.sources))
    return text, cited


CITED = [
    ("Apollo 11 was launched in 1969.", [1, 0]), ("- It was 110.6 m tall.", [0]), ("- 它很高。", [1]),
    ("Dr. Brown built it.", [1]),
]  # fmt: skip


@given(st.lists(st.integers(0, 300), max_size=30))
def test_the_same_comes_of_any_deltas(places: list[int]) -> None:
    """Markers are split anywhere; text is the answer without them, and each claim has its own."""
    text, cited = read_out(cut(ANSWER, places))
    markers = MarkerFilter({0, 1}, Markers.STRIP)
    assert text == markers.feed(ANSWER) + markers.close()
    assert cited == CITED


@pytest.mark.parametrize("ids", [[], ["0"]], ids=["none", "one"])
def test_a_reference_that_is_not_shown_is_not_cited(ids: list[str]) -> None:
    """Its marker is taken out all the same."""
    pieces = Pieces(ids, cite=True)
    made = [*pieces.feed("It is tall [ref_id:1]. So it is [ref_id:0]."), *pieces.close()]
    text = "".join(piece.text for piece in made if isinstance(piece, TextPiece))
    assert text == "It is tall. So it is."
    assert [piece.citation.sources for piece in made if isinstance(piece, CitationPiece)] == [[0]] * len(ids)


def test_a_marker_that_a_claim_begins_with_leaves_its_span_exact() -> None:
    """The space behind it belongs to no claim."""
    text, cited = read_out([*"[ref_id:0] It is tall. [ref_id:1]"])
    assert cited == [("It is tall.", [0, 1])]
    assert text == " It is tall."


def test_a_long_answer_is_not_read_again_and_again() -> None:
    """Each paragraph a bounded number of times: a quadratic reader would need minutes."""
    began = time.thread_time()
    pieces = Pieces(["0"], cite=True)
    for _ in range(20_000):
        pieces.feed(". ")
    pieces.close()
    text, cited = read_out(["It is tall [ref_id:0].\n\n"] * 400)
    assert len(cited) == 400
    assert len(text) == 400 * len("It is tall.\n\n")
    assert time.thread_time() - began < 20
