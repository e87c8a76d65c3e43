"""References and steps of an answer: what each node is, what was really searched, and nothing that may not be shown."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as google_v1
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from llama_index.core.schema import (
    BaseNode,
    Document,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)

from llama_index_agentic_kb import Fields
from llama_index_agentic_kb.answering.results import answer_references, answer_steps, unanswered_parts
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Outcome, Principal
from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerState,
    AnswerStep,
    ChunkReference,
    DocumentReference,
    StructuredReference,
)
from llama_index_agentic_kb.schema.answer_query import ResultMode
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from llama_index_agentic_kb.wire.google_answer import encode_answer
from tests.answering.retrieving import APOLLO, SATURN, planner, retrieved, source
from tests.rerankers import OverlapReranker

QUESTION = "How tall was the Saturn V rocket?"
SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])


def chunk(text: Any = SATURN, document: Any = "saturn.pdf", **metadata: Any) -> TextNode:
    related = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
    return TextNode(id_=f"chunk-{text[:6]}", text=text, metadata=metadata, relationships=related)


def only(node: BaseNode, **kwargs: Any) -> Any:
    retrieval = retrieved([source([node], **kwargs)], QUESTION)
    (reference,) = answer_references(retrieval).values()
    return reference


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        pytest.param(chunk(), ChunkReference, id="a node with a source document"),
        pytest.param(chunk(document=""), DocumentReference, id="a node that is nobody's"),
        pytest.param(Document(id_="d", text=SATURN, metadata={"doc": "k"}), DocumentReference, id="a Document"),
        pytest.param(chunk('{"rocket": "Saturn V", "height": 110.6}'), StructuredReference, id="a JSON object"),
        pytest.param(chunk('{"rocket": '), ChunkReference, id="broken JSON"),
        pytest.param(chunk('{"rocket": ' + "[" * 40 + "]" * 40 + "}"), ChunkReference, id="JSON too deep to be read"),
        pytest.param(chunk('["rocket"]'), ChunkReference, id="a JSON list"),
        pytest.param(chunk(struct_data={"height": 110.6}), StructuredReference, id="struct_data"),
        pytest.param(chunk(struct_data={}), ChunkReference, id="empty struct_data"),
    ],
)
def test_each_node_is_a_reference_of_its_kind(node: BaseNode, kind: type) -> None:
    """A chunk, a whole document and a record are told apart by relation, class and content."""
    assert type(only(node)) is kind


def test_a_chunk_tells_its_document() -> None:
    """Name, text, page, title and address come under the source's own field names; metadata as they are."""
    node = chunk(name="Saturn V", link="https://nasa.example/v", page_label="12", year=1967)
    found = only(node, fields=Fields(title="name", url="link"))
    assert found == ChunkReference(
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
    plain = retrieved([source(nodes)], QUESTION)
    assert all(node.score for node in plain.nodes)
    told = answer_references(plain)
    assert [one.relevance_score for one in told.values() if isinstance(one, ChunkReference)] == [None, None]
    reranker = Reranker(OverlapReranker(), calibration=SHARE, threshold=0.0)
    judged = retrieved([source(nodes)], QUESTION, reranker=reranker)
    scores = [one.relevance_score for one in answer_references(judged).values()]  # type: ignore[union-attr]
    assert scores == [pytest.approx((node.score or 0) / 4) for node in judged.nodes]
    assert 0 < scores[1] < scores[0] <= 1


def test_what_the_response_hides_is_hidden() -> None:
    """A source without references leaves a gap in the ids; one without source data tells names, not content."""
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
    said = json.dumps([one.to_dict() for one in told.values()])
    assert "A rocket, told." in said
    for secret in ("hidden", "A rocket, named.", 'pageIdentifier": "1', '\\"record\\"'):
        assert secret not in said
    by_id = {one.id: one.knowledge_source_name for one in retrieval.references}
    kinds = {by_id[name]: type(one) for name, one in told.items()}
    assert kinds == {"named": ChunkReference, "record": StructuredReference, "told": ChunkReference}


def test_whom_a_document_is_shared_with_is_not_told() -> None:
    """The fields of permissions are in no reference, of a record neither."""
    nodes: list[BaseNode] = [
        chunk(acl_public=True, acl_group_board=True, year=1967),
        chunk("rocket", struct_data={"height": 110.6}, acl_public=True),
    ]
    docs = source(nodes, permissions=Permissions(groups="acl_group_", public="acl_public"))
    retrieval = retrieved([docs], QUESTION, principal=Principal(user="alice"))
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
    told = json.dumps(encode_answer(Answer(references=[reference])), allow_nan=False)
    json_format.Parse(told, google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)
    record = only(chunk('{"height": NaN, "large": 1e999, "long": "' + "x" * 20_000 + '", "name": "rocket \\ud800"}'))
    assert set(record.data) == {"height", "large", "name"}
    told = json.dumps(encode_answer(Answer(references=[record])), allow_nan=False)
    json_format.Parse(told, google_v1.Answer.pb(google_v1.Answer()), ignore_unknown_fields=False)


ROCKET = "How tall was the rocket that launched Apollo 11?"
HOPS: list[dict[str, Any]] = [
    {"id": "q1", "query": "rocket that launched Apollo 11", "finds": "the rocket that launched Apollo 11"},
    {"id": "q2", "query": "height of #q1", "depends_on": ["q1"]},
]
FOUND: list[dict[str, Any]] = [
    {"step": "q1", "answers": [{"value": "Saturn V rocket", "ref": 1, "confidence": "stated"}]}
]


def steps(retrieval: Retrieval, mode: ResultMode | None = None) -> list[AnswerStep]:
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
    assert (step.state, step.description, step.thought) == (AnswerState.SUCCEEDED, "Search the query.", "")
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
    assert [query for query, _ in told] == [one.query for one in retrieval.plan.sub_queries]
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
    ((result,),) = [action.results or [] for action in steps(retrieval, ResultMode.CHUNKS)[0].actions]
    assert (result.document, result.snippets) == ("doc", [])
    told = {one.chunk: (one.content, one.relevance_score) for one in result.chunks}
    assert told == {
        one.chunk: (one.content, one.relevance_score)
        for one in answer_references(retrieval).values()
        if isinstance(one, ChunkReference)
    }
    assert all(one.relevance_score for one in result.chunks)


def test_lost_searches_are_no_empty_ones() -> None:
    """A failed search observed nothing; a step whose every search failed has failed; both are counted in words."""
    sources = [source([APOLLO, SATURN], memory={"fault": failing("height")})]
    retrieval = retrieved(sources, ROCKET, llm=planner(HOPS, FOUND), effort="medium")
    first, second = steps(retrieval)
    assert first.state is AnswerState.SUCCEEDED
    assert second.state is AnswerState.FAILED
    assert second.description == "Search with what was found. The search gave no answer."
    assert [one.results for one in second.actions] == [None]
    assert lacking(retrieval) == [("q2", Outcome.ERROR, "height of Saturn V rocket: its searches failed")]


def test_sources_that_show_no_references_are_not_observed() -> None:
    """What is no reference is in no observation either; its search is told as one that kept nothing."""
    params = [{"knowledgeSourceName": "docs", "includeReferences": False}]
    retrieval = retrieved([source([SATURN])], ROCKET, params)
    assert retrieval.nodes
    ((action,),) = [step.actions for step in steps(retrieval)]
    assert action.results == []
    params = [{"knowledgeSourceName": "docs", "includeReferenceSourceData": False}]
    ((action,),) = [step.actions for step in steps(retrieved([source([SATURN])], ROCKET, params))]
    assert [one.snippets for one in action.results or ()] == [[]]
