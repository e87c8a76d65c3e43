"""References and steps of an answer, results of the caller, the answer as data, and the pieces of a stream."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, date, datetime
from itertools import pairwise
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as google_v1
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    BaseNode,
    Document,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from llama_index_agentic_kb import AgenticRetriever, Fields, RetrieverOptions
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.answering.results import (
    Pieces,
    answer_references,
    answer_steps,
    completed,
    supplied_request,
    supplied_retriever,
    unanswered_parts,
)
from llama_index_agentic_kb.grounding.citations import MarkerFilter, Markers, strip_markers
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.query_engine import AgenticQueryEngine
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Outcome, Principal
from llama_index_agentic_kb.schema import answer as a
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification
from llama_index_agentic_kb.schema.grounding import GroundingLedger
from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM
from llama_index_agentic_kb.wire.google import encode_answer
from tests.answering.retrieving import APOLLO, SATURN, planner, retrieved, source
from tests.rerankers import OverlapReranker
from tests.wire.strategies import REFERENCES, stream_answer

HEIGHT = "How tall was the Saturn V rocket?"
SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])


def chunk(text: Any = SATURN, document: Any = "saturn.pdf", **metadata: Any) -> TextNode:
    related = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
    return TextNode(id_=f"chunk-{text[:6]}", text=text, metadata=metadata, relationships=related)


def only(node: BaseNode, **kwargs: Any) -> Any:
    retrieval = retrieved([source([node], **kwargs)], HEIGHT)
    (reference,) = answer_references(retrieval).values()
    return reference


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        pytest.param(chunk(), a.ChunkReference, id="a node with a source document"),
        pytest.param(chunk(document=""), a.DocumentReference, id="a node that is nobody's"),
        pytest.param(Document(id_="d", text=SATURN, metadata={"doc": "k"}), a.DocumentReference, id="a Document"),
        pytest.param(chunk('{"rocket": "Saturn V", "height": 110.6}'), a.StructuredReference, id="a JSON object"),
        pytest.param(chunk('{"rocket": '), a.ChunkReference, id="broken JSON"),
        pytest.param(chunk('{"rocket": ' + "[" * 40 + "]" * 40 + "}"), a.ChunkReference, id="JSON too deep to be read"),
        pytest.param(chunk('["rocket"]'), a.ChunkReference, id="a JSON list"),
        pytest.param(chunk(struct_data={"height": 110.6}), a.StructuredReference, id="struct_data"),
        pytest.param(chunk(struct_data={}), a.ChunkReference, id="empty struct_data"),
    ],
)
def test_each_node_is_a_reference_of_its_kind(node: BaseNode, kind: type) -> None:
    """A chunk, a whole document and a record are told apart by relation, class and content."""
    assert type(only(node)) is kind


def test_a_chunk_tells_its_document() -> None:
    """Name, text, page, title and address come under the source's own field names; metadata as they are."""
    node = chunk(name="Saturn V", link="https://nasa.example/v", page_label="12", year=1967)
    found = only(node, fields=Fields(title="name", url="link"))
    assert found == a.ChunkReference(
        chunk="chunk-The Sa",
        content=SATURN,
        document="saturn.pdf",
        uri="https://nasa.example/v",
        title="Saturn V",
        page_identifier="12",
        metadata={"name": "Saturn V", "link": "https://nasa.example/v", "page_label": "12", "year": 1967},
    )


def test_relevance_is_a_calibrated_rerankers_or_none() -> None:
    """A score of 0 to 4 becomes one of 0 to 1; a similarity of the source never does."""
    nodes = [chunk(SATURN), chunk(APOLLO)]
    plain = retrieved([source(nodes)], HEIGHT)
    assert all(node.score for node in plain.nodes)
    told = answer_references(plain)
    assert [one.relevance_score for one in told.values() if isinstance(one, a.ChunkReference)] == [None, None]
    reranker = Reranker(OverlapReranker(), calibration=SHARE, threshold=0.0)
    judged = retrieved([source(nodes)], HEIGHT, reranker=reranker)
    scores = [one.relevance_score for one in answer_references(judged).values()]  # type: ignore[union-attr]
    assert scores == [pytest.approx((node.score or 0) / 4) for node in judged.nodes]
    assert 0 < scores[1] < scores[0] <= 1


def test_what_the_response_hides_is_hidden() -> None:
    """A source without references leaves a gap in the ids, one without source data has no content; in steps too."""
    sources = [
        source([chunk("A rocket, hidden.")], "hidden"),
        source([chunk("A rocket, named.", page_label="1")], "named"),
        source([chunk('{"rocket": "record"}')], "record"),
        source([chunk("A rocket, told.")], "told"),
    ]
    params = [
        {"knowledgeSourceName": "hidden", "includeReferences": False},
        {"knowledgeSourceName": "named", "includeReferenceSourceData": False},
        {"knowledgeSourceName": "record", "includeReferenceSourceData": False},
    ]
    retrieval = retrieved(sources, "Which rocket?", params)
    told = answer_references(retrieval)
    assert list(told) == [one.id for one in retrieval.references]
    assert len(told) == 3 < len(retrieval.nodes)
    said = json.dumps([one.to_dict() for one in (*told.values(), *steps(retrieval))])
    assert "A rocket, told." in said
    ((found,),) = [[action.results or [] for action in step.actions] for step in steps(retrieval)]
    assert [bool(one.snippets) for one in found] == [False, False, True]
    for secret in ("hidden", "A rocket, named.", 'pageIdentifier": "1', '\\"record\\"'):
        assert secret not in said
    by_id = {one.id: one.knowledge_source_name for one in retrieval.references}
    kinds = {by_id[name]: type(one) for name, one in told.items()}
    assert kinds == {"named": a.ChunkReference, "record": a.StructuredReference, "told": a.ChunkReference}


def test_whom_a_document_is_shared_with_is_not_told() -> None:
    """The fields of permissions are in no reference, of a record neither."""
    nodes: list[BaseNode] = [
        chunk(acl_public=True, acl_group_board=True, year=1967),
        chunk("rocket", struct_data={"height": 110.6}, acl_public=True),
    ]
    docs = source(nodes, permissions=Permissions(groups="acl_group_", public="acl_public"))
    retrieval = retrieved([docs], HEIGHT, principal=Principal(user="alice"))
    told = answer_references(retrieval)
    assert len(told) == 2
    said = json.dumps([one.to_dict() for one in told.values()])
    assert "1967" in said
    assert "acl_" not in said


def test_any_metadata_can_be_written() -> None:
    """Dates, bytes, numbers that JSON lacks and lone surrogates are mended; what is huge is left out."""
    node = chunk(
        day=date(1967, 11, 9),
        moment=datetime(1967, 11, 9, 12, tzinfo=UTC),
        nan=float("nan"),
        raw=b"\xff\x00",
        odd="\ud800",
        window="x" * 10_001,
        small=[1, {"deep": (1, 2)}],
        **{f"field{number}": "y" * 9_000 for number in range(9)},
    )
    reference = only(node)
    assert reference.metadata["day"] == "1967-11-09"
    assert reference.metadata["nan"] is None
    assert reference.metadata["small"] == [1, {"deep": [1, 2]}]
    assert "window" not in reference.metadata
    assert 1 <= sum(key.startswith("field") for key in reference.metadata) <= 5
    told = json.dumps(encode_answer(a.Answer(references=[reference])), allow_nan=False)
    json_format.Parse(told, google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)
    record = only(chunk('{"height": NaN, "large": 1e999, "long": "' + "x" * 20_000 + '", "name": "rocket \\ud800"}'))
    assert set(record.data) == {"height", "large", "name"}
    told = json.dumps(encode_answer(a.Answer(references=[record])), allow_nan=False)
    json_format.Parse(told, google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)


ROCKET = "How tall was the rocket that launched Apollo 11?"
HOPS: list[dict[str, Any]] = [
    {"id": "q1", "query": "rocket that launched Apollo 11", "finds": "the rocket that launched Apollo 11"},
    {"id": "q2", "query": "height of #q1", "depends_on": ["q1"]},
]
FOUND: list[dict[str, Any]] = [
    {"step": "q1", "answers": [{"value": "Saturn V rocket", "ref": 1, "confidence": "stated"}]}
]


def steps(retrieval: Retrieval, mode: a.ResultMode | None = None) -> list[a.AnswerStep]:
    return answer_steps(retrieval, mode)


def lacking(retrieval: Retrieval) -> list[tuple[str | None, Outcome, str]]:
    parts = unanswered_parts(retrieval)
    assert all(part.what == "sub-question" for part in parts)
    return [(part.sub_query_id, part.outcome, part.reason) for part in parts]


def failing(*words: str) -> Any:
    """A source's fault: queries that hold one of these words fail."""
    return lambda bundle: OSError("gone") if any(word in bundle.query_str for word in words) else None


def test_a_question_that_is_searched_as_it_is_has_one_step() -> None:
    """Without a plan there is one step with one action: the question, and the evidence with short snippets."""
    long = "The rocket. " + "Nothing of note. " * 60 + "On it a rocket so tall launched Apollo."
    (step,) = steps(retrieved([source([long])], ROCKET))
    assert (step.state, step.description, step.thought) == (a.AnswerState.SUCCEEDED, "Search the query.", "")
    (action,) = step.actions
    assert action.query == ROCKET
    assert action.results is not None
    (snippet,) = action.results[0].snippets
    assert "a rocket so tall launched Apollo." in snippet.snippet
    assert len(snippet.snippet) <= 240
    assert "\n" not in snippet.snippet
    assert snippet.status == "SUCCESS"


def test_each_wave_is_a_step_that_tells_what_it_builds_on() -> None:
    """The first wave is rephrased, the second searches with what the first found, and says so."""
    retrieval = retrieved([source([APOLLO, SATURN])], ROCKET, llm=planner(HOPS, FOUND), effort="medium")
    first, second = steps(retrieval)
    assert (first.description, second.description) == ("Rephrase the query and search.", "Search with what was found.")
    assert [one.query for one in first.actions] == [ROCKET, "rocket that launched Apollo 11"]
    assert [one.query for one in second.actions] == ["height of Saturn V rocket"]
    assert second.thought.startswith("the rocket that launched Apollo 11: Saturn V rocket")
    assert "sufficient" in second.thought
    told = [[one.query, one.results is not None] for step in (first, second) for one in step.actions]
    assert [query for query, _ in told] == [one.query for one in retrieval.outcome.plan.sub_queries]
    assert all(observed for _, observed in told)
    assert lacking(retrieval) == []


def test_passages_of_one_document_are_observed_together() -> None:
    """A document that a search found in several passages is one result; in chunk mode it has chunks, with scores."""
    nodes = [
        TextNode(id_=name, text=text, relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")})
        for name, text in (("a", APOLLO), ("b", SATURN))
    ]
    reranker = Reranker(OverlapReranker(), calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)]), threshold=0.0)
    retrieval = retrieved([source(nodes)], ROCKET, reranker=reranker)
    ((result,),) = [action.results or [] for action in steps(retrieval)[0].actions]
    assert (result.document, len(result.snippets), result.chunks) == ("doc", 2, [])
    ((result,),) = [action.results or [] for action in steps(retrieval, a.ResultMode.CHUNKS)[0].actions]
    assert (result.document, result.snippets) == ("doc", [])
    told = {one.chunk: (one.content, one.relevance_score) for one in result.chunks}
    assert told == {
        one.chunk: (one.content, one.relevance_score)
        for one in answer_references(retrieval).values()
        if isinstance(one, a.ChunkReference)
    }
    assert all(one.relevance_score for one in result.chunks)


def test_lost_searches_are_no_empty_ones() -> None:
    """A failed search observed nothing; a step whose every search failed has failed; both are counted in words."""
    sources = [source([APOLLO, SATURN], memory={"fault": failing("height")})]
    retrieval = retrieved(sources, ROCKET, llm=planner(HOPS, FOUND), effort="medium")
    first, second = steps(retrieval)
    assert first.state is a.AnswerState.SUCCEEDED
    assert second.state is a.AnswerState.FAILED
    assert second.description == "Search with what was found. The search gave no answer."
    assert [one.results for one in second.actions] == [None]
    assert lacking(retrieval) == [("q2", Outcome.ERROR, "height of Saturn V rocket: its searches failed")]


QUESTION = "How tall was the rocket that launched Apollo 11?"
TEXT = "A Saturn V rocket launched Apollo 11. [ref_id:0] It was 110.6 m tall [ref_id:1]. I hope this helps!"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# Few in CI; the long run has 1000.
EXAMPLES = int(os.environ.get("WIRE_EXAMPLES", "60"))
WORDS = ["Apollo", "rocket", "110.6 m", "Saturn V", "東京の", "Größe", "😀", "was", "tall", "launched", "é"]


def query(**fields: Any) -> a.AnswerQuery:
    return a.AnswerQuery.model_validate({"request": {"messages": [{"role": "user", "content": QUESTION}]}, **fields})


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


def styled(retrieval: Retrieval, text: str, style: Markers) -> tuple[str, GroundingLedger]:
    """A text with its markers in a style, and its ledger."""
    markers = MarkerFilter({0, 1}, Markers.RENUMBER if style is Markers.RENUMBER else Markers.KEEP)
    shown = markers.feed(text) + markers.close()
    ledger = checked(retrieval, shown)
    return strip_markers(shown, ledger) if style is Markers.STRIP else (shown, ledger)


def made(retrieval: Retrieval, asked: a.AnswerQuery = ALL, text: str = TEXT, **kwargs: Any) -> a.Answer:
    given: dict[str, Any] = {
        "references": answer_references(retrieval),
        "steps": answer_steps(retrieval),
        "ledger": checked(retrieval, TEXT),
        "related_questions": ["How heavy was it?", "How heavy was it?"],
        "classifications": [QueryClassification(type=one, positive=False) for one in QueryClass],
        "safety_ratings": [a.SafetyRating(category=a.HarmCategory.HARASSMENT, probability_score=0.1)],
        **kwargs,
    }
    parts = {name: given.pop(name) for name in ("references", "ledger", "classifications")}
    return completed(a.Answer(text=text, **given), asked, **parts)


def strictly_read(answer: a.Answer) -> dict[str, Any]:
    """What Google's parser makes of it; it is checked by our own rules on its way."""
    written = encode_answer(answer, name="n")
    read = json_format.Parse(json.dumps(written), google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)
    again: dict[str, Any] = json_format.MessageToDict(read)
    return again


@pytest.mark.parametrize("style", list(Markers))
def test_citations_fit_the_text_in_every_form(retrieval: Retrieval, style: Markers) -> None:
    """Whether its markers are kept, renumbered or stripped, a citation spans its claim."""
    text, ledger = styled(retrieval, TEXT, style)
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
    text, ledger = styled(retrieval, text, data.draw(st.sampled_from(list(Markers))))
    flags = {name: data.draw(st.booleans()) for name in ("include_citations", "grounding_supports", "safety")}
    asked = query(**flags, classify=data.draw(st.lists(st.sampled_from(QueryClass), max_size=2)))
    answer = made(
        retrieval,
        asked,
        text,
        ledger=data.draw(st.sampled_from([None, ledger])),
        created_at=data.draw(st.none() | st.just(NOW)),
        skipped_reasons=data.draw(st.lists(st.sampled_from(SkippedReason), max_size=2)),
        state=data.draw(st.sampled_from([a.AnswerState.SUCCEEDED, a.AnswerState.FAILED])),
    )
    assert strictly_read(answer) == encode_answer(answer, name="n")
    for element in json.loads(b"".join(stream_answer(answer))):
        response = google_v1.AnswerQueryResponse.pb(google_v1.AnswerQueryResponse())
        json_format.Parse(json.dumps(element), response, ignore_unknown_fields=False)
    assert a.Answer.parse(answer.to_dict()) == answer


ANSWER = (
    "```\nx = 1. y = 2.\n\nz = 3.\n```\n\n# Launch\n"
    "Apollo 11 was launched in 1969 [ref_id:1][ref_id:0]. Here are its facts:\n"
    "- It was 110.6 m tall [ref_id:0].\n\n- 它很高。[ref_id:1]\nDr. Brown built it. [ref_id:1] 🚀 Nobody else did."
)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def read_out(deltas: list[str]) -> tuple[str, list[tuple[str, list[int]]]]:
    """The text, and the citations by their claims' words; each claim is read_out before it is cited."""
    pieces = Pieces(["0", "1"], cite=True)
    text, cited = "", []
    for piece in [one for delta in deltas for one in pieces.feed(delta)] + pieces.close():
        if isinstance(piece, a.TextPiece):
            text += piece.text
        else:
            assert isinstance(piece, a.CitationPiece)
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
    text = "".join(piece.text for piece in made if isinstance(piece, a.TextPiece))
    assert text == "It is tall. So it is."
    assert [piece.citation.sources for piece in made if isinstance(piece, a.CitationPiece)] == [[0]] * len(ids)


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


GIVEN: list[a.AnswerReference] = [
    a.ChunkReference(chunk="c1", content="Cheese is old.", document="d1", uri="https://x.example/1", title="Cheese"),
    a.DocumentReference(
        document="d2",
        title="Rockets",
        chunks=[a.ChunkContent(content="It was tall.", page_identifier="3"), a.ChunkContent(content="110.6 m tall.")],
    ),
    a.StructuredReference(document="d3", title="Record", data={"height": 110.6}),
    a.ChunkReference(chunk="c1", content="Same name, other text."),
    a.ChunkReference(content="No name."),
    a.ChunkReference(),
    a.ChunkReference(),
    *[a.ChunkReference(chunk=f"n{number}", content=f"Nothing of note {number}.") for number in range(20)],
]


def supplied(results: list[a.AnswerReference] | None = GIVEN) -> a.AnswerQuery:
    messages = [{"role": "user", "content": "How tall was the rocket?"}]
    return a.AnswerQuery.model_validate({"request": {"messages": messages}, "search_results": results})


def never(_: list[ChatMessage]) -> str:
    raise AssertionError("no model is asked")


def retriever(**kwargs: Any) -> tuple[AgenticRetriever, MemoryRetriever]:
    searched = MemoryRetriever(["The rocket was 110.6 m tall."])
    docs = source([])
    docs._retriever = searched
    return AgenticRetriever([docs], **{"llm": ScriptedLLM(never), "effort": "medium", **kwargs}), searched


def found(asked: a.AnswerQuery, like: AgenticRetriever) -> Retrieval:
    assert asked.search_results is not None
    request = supplied_request(asked.request, asked.search_results)
    retrieval = run(supplied_retriever(asked.search_results, like).retrieval(request))
    retrieval.arrange(retrieval.nodes)
    return retrieval


def test_all_are_given_in_their_order_and_nothing_is_searched() -> None:
    """27 results of all kinds, without words of the query, with equal names and without text: each is a reference."""
    like, searched = retriever(filters=None)
    retrieval = found(supplied(), like)
    assert list(answer_references(retrieval).values()) == GIVEN
    assert searched.queries == []
    assert [node.node.get_content() for node in retrieval.nodes[:3]] == [
        "Cheese is old.",
        "It was tall.\n\n110.6 m tall.",
        '{"height": 110.6}',
    ]
    (step,) = answer_steps(retrieval)
    assert step.description == "Read the results that were given."
    assert [one.title for one in step.actions[0].results or ()][:3] == ["Cheese", "Rockets", "Record"]


class Redacting(BaseNodePostprocessor):
    """A postprocessor that takes a word out of every text."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for one in nodes:
            one.node.set_content(one.node.get_content().replace("Cheese", "XXX"))
        return nodes


def test_what_a_postprocessor_took_out_is_not_told() -> None:
    """Where a node's text was changed on the way, its reference is of the text as it is now."""
    like, _ = retriever()
    engine = AgenticQueryEngine(
        supplied_retriever(GIVEN, like), response_mode="extractiveData", node_postprocessors=[Redacting()]
    )
    retrieval = run(engine.answer(supplied_request(supplied().request, GIVEN))).retrieval
    first, second, *_ = answer_references(retrieval).values()
    assert isinstance(first, a.ChunkReference)
    assert (first.content, first.chunk, first.document, first.title) == ("XXX is old.", "c1", "d1", "Cheese")
    assert second == GIVEN[1]


def test_no_results_are_empty_evidence_and_who_asks_stays_who_asks() -> None:
    """Nothing is searched instead; the retriever keeps the other's principal and limits, and none of its memory."""
    like, searched = retriever(principal=Principal(user="alice"), options=RetrieverOptions(require_principal=True))
    retrieval = found(supplied([]), like)
    assert (retrieval.nodes, searched.queries) == ([], [])
    over = supplied_retriever(GIVEN, like)
    assert (over.principal, over.options.require_principal, over.memory) == (Principal(user="alice"), True, None)
    assert over.limits == like.limits


@settings(max_examples=30)
@given(results=st.lists(REFERENCES, max_size=4))
def test_any_results_come_back_as_they_were(results: list[a.AnswerReference]) -> None:
    """Whatever they hold, nodes are made with ids of their own, and references are the results."""
    like, _ = retriever()
    retrieval = found(supplied(results), like)
    told = answer_references(retrieval)
    assert [repr(one) for one in told.values()] == [repr(one) for one in results]
