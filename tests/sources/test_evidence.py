from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb import KnowledgeSource, RetrievalRequest, interleave
from llama_index_agentic_kb._flow import run
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.schema import SourceActivity, SubQuery
from llama_index_agentic_kb.sources.base import NodeList
from llama_index_agentic_kb.sources.evidence import (
    PROVENANCE_KEY,
    Counts,
    cap_per_source,
    fuse_lanes,
    gather_evidence,
    provenance,
    references,
)
from llama_index_agentic_kb.sources.fan_out import Lane
from llama_index_agentic_kb.sources.selection import SelectedSource, select
from llama_index_agentic_kb.testing import MemoryRetriever

Found = Sequence[tuple[str, float | None]]


def source(name: str = "docs", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([]), **fields)


def node(name: str, score: float | None, text: str | None = None) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=name, text=text or f"text of {name}", metadata={"title": name}), score=score)


def lane(
    number: int, found: Found, *, over: KnowledgeSource | None = None, query: str = "q0", scale: Any = None
) -> Lane:
    over = over or source()
    record = SourceActivity(id=number, knowledge_source_name=over.name, sub_query_id=query)
    sub_query = SubQuery(id=query, query=f"query {query}", sources=[over.name])
    nodes = [node(name, score) for name, score in found]
    return Lane(sub_query, over, record, (NodeList("dense", nodes, scale),))


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [one.node_id for one in nodes]


def selected(*sources: KnowledgeSource, params: Sequence[dict[str, Any]] = ()) -> dict[str, SelectedSource]:
    request = RetrievalRequest.parse({"messages": [{"content": "q"}], "knowledgeSourceParams": list(params)})
    return select({one.name: one for one in sources}, request, None)


class Change(BaseNodePostprocessor):
    """Does to the nodes what it is told."""

    adds: int = 0
    latency: float = 0.0

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        time.sleep(self.latency)
        for one in nodes:
            one.score = 9.0
            one.node.metadata["changed"] = query_bundle.query_str if query_bundle else None
            one.node.set_content("changed")
        return [*nodes, *(node(f"added {n}", None) for n in range(self.adds))]


def gathered(
    lanes: Sequence[Lane],
    *postprocessors: BaseNodePostprocessor,
    chosen: dict[str, SelectedSource] | None = None,
    ranked: int = 10,
    wanted: int = 10,
    seconds: float = 10,
) -> tuple[list[NodeWithScore], Counts]:
    return run(
        gather_evidence(
            lanes,
            chosen or {},
            fusion=interleave,
            postprocessors=postprocessors,
            bundle=QueryBundle("the question"),
            ranked=ranked,
            wanted=wanted,
            deadline=time.monotonic() + seconds,
        )
    )


def test_sub_queries_are_interleaved_the_question_first() -> None:
    """Each sub-query's best comes before any one's second."""
    lanes = [lane(0, [("a", 0.9), ("b", 0.8)]), lane(1, [("x", 0.2), ("y", 0.1)], query="q1")]
    assert ids(fuse_lanes(lanes, interleave)) == ["a", "x", "b", "y"]


def test_scores_of_one_scale_are_compared() -> None:
    """Lanes that share a scale are merged by score times weight; others take turns."""
    one, two = source("one"), source("two")
    same = [lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1), lane(1, [("x", 0.85)], over=two, scale=1)]
    assert ids(fuse_lanes(same, interleave)) == ["a", "x", "b"]
    apart = [lane(0, [("a", 0.2), ("b", 0.1)], over=one), lane(1, [("x", 0.9), ("y", 0.8)], over=two)]
    assert ids(fuse_lanes(apart, interleave)) == ["a", "x", "b", "y"]
    unscored = [lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1), lane(1, [("x", None)], over=two, scale=1)]
    assert ids(fuse_lanes(unscored, interleave)) == ["a", "x", "b"]


@pytest.mark.parametrize("scale", [1, None])
def test_weights_lift_a_source(scale: int | None) -> None:
    """A heavier source's documents come before a lighter one's of equal standing, whatever the order of sources."""
    light, heavy = source("light"), source("heavy", weight=2.0)
    for lanes in (
        [lane(0, [("a", 0.5), ("b", 0.5)], over=light, scale=scale), lane(1, [("x", 0.5)], over=heavy, scale=scale)],
        [lane(0, [("x", 0.5)], over=heavy, scale=scale), lane(1, [("a", 0.5), ("b", 0.5)], over=light, scale=scale)],
    ):
        assert ids(fuse_lanes(lanes, interleave))[0] == "x"


def test_one_node_of_several_searches_comes_once_with_its_provenance() -> None:
    """Its metadata tells every search that found it; its score is the best one."""
    lanes = [lane(4, [("a", 0.5), ("b", 0.4)]), lane(5, [("b", 0.7)], query="q1")]
    found = {one.node_id: one for one in fuse_lanes(lanes, interleave)}
    mark = provenance(found["b"])
    assert mark is not None
    assert (mark["source"], mark["activity"]) == ("docs", 4)
    assert [(s["activity"], s["sub_query"], s["rank"], s["score"]) for s in mark["searches"]] == [
        (4, "q0", 1, 0.4),
        (5, "q1", 0, 0.7),
    ]
    assert found["b"].score == 0.7
    assert provenance(node("n", 1.0)) is None


def test_provenance_is_shown_to_no_model() -> None:
    """Neither the language model's nor the embedding model's text has it; the metadata does."""
    (found,) = fuse_lanes([lane(0, [("a", 0.5)])], interleave)
    assert PROVENANCE_KEY in found.node.metadata
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert found.node.get_content(mode) == "title: a\n\ntext of a"


def test_the_same_text_under_two_ids_stays_two() -> None:
    """Two documents may say the same; one id with two texts is two passages."""
    lanes = [lane(0, [])]
    lanes[0].lists = (NodeList("dense", [node("a", 0.9, "same"), node("b", 0.8, "same"), node("a", 0.7, "other")]),)
    assert [(n.node_id, n.text) for n in fuse_lanes(lanes, interleave)] == [
        ("a", "same"),
        ("b", "same"),
        ("a", "other"),
    ]


def test_what_sources_gave_is_never_changed() -> None:
    """Postprocessors write into copies: nodes, scores and metadata of the source stay."""
    lanes = [lane(0, [("a", 0.5), ("b", 0.4)])]
    before = [one.model_dump() for one in lanes[0].nodes]
    nodes, _ = gathered(lanes, Change())
    assert [one.model_dump() for one in lanes[0].nodes] == before
    assert [(one.text, one.score, one.metadata["changed"]) for one in nodes] == [("changed", 9.0, "the question")] * 2


def test_every_candidate_is_counted() -> None:
    """Found is merged and dropped and kept together, whatever drops."""
    lanes = [
        lane(0, [("a", 0.9), ("b", 0.8), ("c", 0.3), ("d", 0.2)]),
        lane(1, [("b", 0.7), ("e", 0.6)], query="q1"),
    ]
    nodes, counts = gathered(lanes, SimilarityPostprocessor(similarity_cutoff=0.5), ranked=4, wanted=2)
    assert ids(nodes) == ["a", "b"]
    assert counts == Counts(candidates=6, merged=1, kept=2, dropped_by_postprocessors=1, dropped_by_budget=2)
    assert counts.candidates == sum(counts.as_fields().values()) - counts.candidates


def test_a_postprocessor_may_add_nodes() -> None:
    """No count falls below zero because of it."""
    nodes, counts = gathered([lane(0, [("a", 0.9)])], Change(adds=3), wanted=2)
    assert len(nodes) == 2
    assert counts == Counts(candidates=1, merged=0, kept=2, dropped_by_postprocessors=0, dropped_by_budget=2)


def test_a_postprocessor_that_hangs_is_an_error() -> None:
    """It is never skipped, for it may be what keeps a document from the answer."""
    with pytest.raises(DeadlineExceededError, match="node postprocessor Change was still running"):
        gathered([lane(0, [("a", 0.9)])], Change(latency=1.0), seconds=0.05)


def test_sources_may_be_capped() -> None:
    """``maxOutputDocuments`` of a source keeps its best; other sources and strange nodes stay."""
    docs, wiki = source("docs"), source("wiki")
    chosen = selected(docs, wiki, params=[{"knowledgeSourceName": "docs", "maxOutputDocuments": 1}])
    lanes = [lane(0, [("a", 0.9), ("b", 0.8)], over=docs), lane(1, [("x", 0.7), ("y", 0.6)], over=wiki)]
    fused = [*fuse_lanes(lanes, interleave), node("strange", 1.0)]
    assert ids(cap_per_source(fused, chosen)) == ["a", "x", "y", "strange"]


def test_references_number_the_evidence() -> None:
    """The N-th node is reference N; a source may have none, or none of its data."""
    docs, wiki, bare = source("docs", kind="web"), source("wiki"), source("bare")
    chosen = selected(
        docs,
        wiki,
        bare,
        params=[
            {"knowledgeSourceName": "wiki", "includeReferences": False},
            {"knowledgeSourceName": "bare", "includeReferenceSourceData": False},
        ],
    )
    lanes = [lane(n, [(one.name, 0.5)], over=one) for n, one in enumerate((docs, wiki, bare))]
    made = references(fuse_lanes(lanes, interleave), chosen)
    assert [(ref.id, ref.type, ref.activity_source, ref.knowledge_source_name, ref.node_id) for ref in made] == [
        ("0", "web", 0, "docs", "docs"),
        ("2", "searchIndex", 2, "bare", "bare"),
    ]
    assert made[0].source_data is not None
    assert made[0].source_data.metadata == {"title": "docs"}
    assert made[1].source_data is None
    assert references([node("strange", 1.0)], chosen) == []


def test_no_lanes_give_no_evidence() -> None:
    """Nothing found is counted as nothing."""
    assert gathered([]) == ([], Counts(0, 0, 0, 0, 0))
