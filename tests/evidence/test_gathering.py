from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from llama_index_agentic_kb import KnowledgeSource, RetrievalRequest, interleave, reciprocal_rank_fusion
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.evidence.candidates import (
    PROVENANCE_KEY,
    collect,
    lists_by_sub_query,
    provenance,
    references,
)
from llama_index_agentic_kb.evidence.gathering import EvidenceCounts, EvidenceOptions, GatheredEvidence, gather_evidence
from llama_index_agentic_kb.schema import SubQueryOrigin
from llama_index_agentic_kb.search.rerank import Calibration, Reranker
from llama_index_agentic_kb.sources.base import SelectedSource, select
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.testing import MemoryRetriever
from tests.evidence.conftest import make_lane
from tests.rerankers import OverlapReranker

SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])


def source(name: str = "docs", **fields: Any) -> KnowledgeSource:
    return KnowledgeSource(name, retriever=MemoryRetriever([]), **fields)


def node(name: str, score: float | None = None, text: str | None = None, **metadata: Any) -> NodeWithScore:
    inner = TextNode(id_=name, text=text or f"text of {name}", metadata={"title": name, **metadata})
    return NodeWithScore(node=inner, score=score)


def ids(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [one.node_id for one in nodes]


def selected(*sources: KnowledgeSource, params: Sequence[dict[str, Any]] = ()) -> dict[str, SelectedSource]:
    request = RetrievalRequest.parse({"messages": [{"content": "q"}], "knowledgeSourceParams": list(params)})
    return select({one.name: one for one in sources}, request, None, calibrated=True)


class Change(BaseNodePostprocessor):
    adds: int = 0

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for one in nodes:
            one.score = 9.0
            one.node.metadata["changed"] = query_bundle.query_str if query_bundle else None
            one.node.set_content("changed")
        return [*nodes, *(node(f"added {n}") for n in range(self.adds))]


def gathered(
    lanes: Sequence[SourceSearch],
    *postprocessors: BaseNodePostprocessor,
    chosen: dict[str, SelectedSource] | None = None,
    ranked: int = 10,
    limit: int = 10,
    follows: bool = False,
    **options: Any,
) -> GatheredEvidence:
    return run(
        gather_evidence(
            lanes,
            chosen or {},
            EvidenceOptions(postprocessors=postprocessors, **options),
            bundle=QueryBundle("the question"),
            ranked=ranked,
            limit=limit,
            deadline=time.monotonic() + 10,
            follows=follows,
        )
    )


def balance(counts: EvidenceCounts) -> int:
    fields: dict[str, int] = counts._asdict()
    came = fields.pop("candidates") + fields.pop("added_by_postprocessors")
    fields.pop("reranked")
    return came - sum(fields.values())


def test_sub_queries_are_interleaved_the_question_first() -> None:
    """Each sub-query's best comes before any one's second, and says whose best it is."""
    lanes = [
        make_lane(0, [("a", 0.9), ("b", 0.8)]),
        make_lane(1, [("x", 0.2), ("y", 0.1)], query="q1"),
        make_lane(2, [("a", 0.2)], query="q2"),
    ]
    nodes = gathered(lanes).nodes
    assert ids(nodes) == ["a", "x", "b", "y"]
    assert [(provenance(one) or {}).get("best_for") for one in nodes] == [["q0", "q2"], ["q1"], None, None]


LONG = "How tall was the Ariane 5 rocket in metres?"


@pytest.mark.parametrize(
    ("question", "follows", "planned", "expected"),
    [
        ("Why?", False, True, "aubvwxyz"),
        (LONG, True, True, "uvawxbyz"),
        ("Why?", True, True, "uvwxyazb"),
        ("Why?", True, False, "ab"),
    ],
)
def test_in_a_conversation_what_was_planned_counts_more(
    question: str, expected: str, *, follows: bool, planned: bool
) -> None:
    """The question's own words weigh half beside a rewrite, a fifth if they say little; whole without a plan."""
    lanes = [make_lane(0, [("a", 0.9), ("b", 0.8)]), make_lane(1, [(key, 0.2) for key in "uvwxyz"], query="q1")]
    asked = {"origin": SubQueryOrigin.QUESTION, "query": question}
    lanes[0].sub_query = lanes[0].sub_query.model_copy(update=asked)
    assert ids(gathered(lanes if planned else lanes[:1], follows=follows).nodes) == list(expected)


def test_every_fusion_covers_each_sub_query() -> None:
    """What all other lists agree on does not push a sub-query's best out of what is kept."""
    shared = [(name, 0.5) for name in "abcdefghij"]
    lanes = [make_lane(n, shared, query=f"q{n}") for n in range(3)]
    lanes.append(make_lane(3, [("x", 0.1), ("y", 0.1)], query="q3"))
    nodes = gathered(lanes, fusion=reciprocal_rank_fusion, limit=5).nodes
    assert ids(nodes) == ["a", "b", "c", "d", "x"]
    assert ids(gathered(lanes, fusion=reciprocal_rank_fusion, ranked=50, limit=15).nodes) == list("abcdefghixjy")


def test_a_fusion_of_ones_own_orders_a_single_list_too() -> None:
    """One list is left in its order by the default fusion only."""
    nodes = gathered([make_lane(0, [("a", 0.9), ("b", 0.8)])], fusion=lambda given: interleave(given)[::-1]).nodes
    assert ids(nodes) == ["b", "a"]


def test_what_sources_gave_is_never_changed() -> None:
    """Postprocessors and rerankers write into copies: nodes, scores and metadata of the source stay."""
    lanes = [make_lane(0, [("a", 0.5), ("b", 0.4)])]
    before = [one.model_dump() for one in lanes[0].nodes]
    nodes = gathered(lanes, Change(), reranker=Reranker(OverlapReranker())).nodes
    assert [one.model_dump() for one in lanes[0].nodes] == before
    assert [(one.text, one.score, one.metadata["changed"]) for one in nodes] == [("changed", 9.0, "the question")] * 2
    assert "retrieval_score" not in nodes[0].metadata


NAMES = [f"{letter}{number}" for letter in "ab" for number in range(6)]


def chunk(name: str, score: float) -> NodeWithScore:
    made = node(name, score, text=f"query {name}" if int(name[1:]) % 2 else name, chunk_index=int(name[1:]))
    made.node.metadata["title"] = name[0]
    made.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=name[0])
    return made


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_counts_always_add_up(data: st.DataObject) -> None:
    """Whatever is found, reranked, capped, dropped, added, joined and cut; and per search as well."""
    docs, wiki = source("docs"), source("wiki")
    found = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 1)), max_size=8, unique_by=lambda pair: pair[0])
    lanes = []
    for number in range(data.draw(st.integers(1, 4))):
        dense, lexical = data.draw(found), data.draw(st.one_of(st.none(), found))
        lanes.append(
            make_lane(
                number,
                [chunk(*one) for one in dense],
                over=data.draw(st.sampled_from([docs, wiki])),
                query=f"q{data.draw(st.integers(0, 2))}",
                scale=data.draw(st.sampled_from([None, 1])),
                lexical=lexical and [chunk(*one) for one in lexical],
            )
        )
    for lane in lanes:
        assert lane.record is not None
        lane.record.count = len(lane.nodes)
    overlap = OverlapReranker(fault=data.draw(st.sampled_from([None, "empty", OSError()])), fails_on="q1")
    top_n, threshold = data.draw(st.sampled_from([None, 1, 3])), data.draw(st.sampled_from([None, 0.0, 2.0, 4.0]))
    calibrated = Reranker(overlap, calibration=SHARE, top_n=top_n, threshold=threshold)
    params = {"maxOutputDocuments": 2} if data.draw(st.booleans()) else {"rerankerThreshold": 1.0}
    untouched = data.draw(st.booleans()) and "rerankerThreshold" not in params
    made = gathered(
        lanes,
        *data.draw(st.sampled_from([(), (SimilarityPostprocessor(similarity_cutoff=0.5),), (Change(adds=2),)])),
        chosen=selected(
            docs,
            wiki,
            params=[{"knowledgeSourceName": "docs", **params, **({"resultsProcessing": "none"} if untouched else {})}],
        ),
        ranked=data.draw(st.integers(1, 10)),
        limit=data.draw(st.integers(1, 10)),
        fusion=data.draw(st.sampled_from([interleave, reciprocal_rank_fusion, lambda given: interleave(given)[:5]])),
        reranker=data.draw(st.sampled_from([None, Reranker(overlap), calibrated])),
    )  # fmt: skip
    counts = made.counts
    assert balance(counts) == 0
    assert all(value >= 0 for value in counts._asdict().values())
    assert counts.candidates == sum(len(one.nodes) for lane in lanes for one in lane.lists)
    assert counts.kept == len(made.nodes)
    for record, fields in made.cut_searches:
        assert fields["count"] + fields["dropped_by_threshold"] == record.count


def reranked_lanes(**fields: Any) -> list[SourceSearch]:
    """Two sub-queries whose texts are "query q0" and "query q1"; what holds more of their words is better."""
    texts = {"low": "nothing", "half": "the query of somebody", "zero": "query q0", "one": "query q1"}
    return [
        make_lane(0, [node(name, 0.5, texts[name]) for name in ("low", "half", "zero", "one")], **fields),
        make_lane(1, [node(name, 0.5, texts[name]) for name in ("half", "one")], query="q1", **fields),
    ]


def test_candidates_are_reranked_for_each_sub_query() -> None:
    """One call a sub-query; a node keeps its best score, in its score, its provenance and its reference."""
    overlap = OverlapReranker()
    docs = source()
    made = gathered(reranked_lanes(over=docs), reranker=Reranker(overlap, calibration=SHARE), chosen=selected(docs))
    assert overlap.calls == [("query q0", ["low", "half", "zero", "one"]), ("query q1", ["half", "one"])]
    assert [(one.node_id, one.score) for one in made.nodes] == [("zero", 4.0), ("one", 4.0)]
    assert made.counts == EvidenceCounts(candidates=6, merged=2, kept=2, dropped_by_threshold=2, reranked=6)
    assert [(ref.reranker_score, ref.score) for ref in references(made.nodes, selected(docs))] == [(4.0, 0.5)] * 2
    assert [(record.id, fields) for record, fields in made.cut_searches] == [
        (0, {"count": 2, "dropped_by_threshold": 2}),
        (1, {"count": 1, "dropped_by_threshold": 1}),
    ]


def test_calibrated_scores_are_compared_between_sub_queries() -> None:
    """A sub-query's second passage comes before the first of another if it is better."""
    lanes = [
        make_lane(0, [node("best", 0.5, "query q0"), node("half", 0.5, "the query of somebody")]),
        make_lane(1, [node("low", 0.9, "nothing")], query="q1"),
    ]
    reranker = Reranker(OverlapReranker(), calibration=SHARE, threshold=0)
    assert ids(gathered(lanes, reranker=reranker).nodes) == ["best", "half", "low"]


def test_an_uncalibrated_reranker_orders_and_drops_nothing() -> None:
    """Its scores are not compared between sub-queries, and none is on the scale."""
    docs = source()
    chosen = selected(docs, params=[{"knowledgeSourceName": "docs", "rerankerThreshold": 4.0}])
    made = gathered(reranked_lanes(over=docs), reranker=Reranker(OverlapReranker()), chosen=chosen)
    assert [(one.node_id, one.score) for one in made.nodes] == [
        ("zero", 1.0),
        ("one", 1.0),
        ("half", 0.5),
        ("low", 0.0),
    ]
    assert [ref.reranker_score for ref in references(made.nodes, chosen)] == [None] * 4
    assert (made.counts.dropped_by_threshold, made.cut_searches) == (0, [])
    in_order = gathered(reranked_lanes(), reranker=Reranker(OverlapReranker(fault="none")))
    assert [(one.node_id, one.score) for one in in_order.nodes] == [
        (name, 0.5) for name in ("low", "half", "one", "zero")
    ]


@pytest.mark.parametrize("latency", [0.0, 3.0])
def test_a_reranker_that_fails_leaves_the_fused_order(latency: float) -> None:
    """Whether it raises or is late: nothing is raised or dropped, and the account says so, without secrets."""
    overlap = OverlapReranker(latency=latency, fault=None if latency else OSError("no way to http://me:pw123456@host"))
    made = gathered(reranked_lanes(), reranker=Reranker(overlap, calibration=SHARE, timeout=0.1))
    assert [(one.node_id, one.score) for one in made.nodes] == [(name, 0.5) for name in ("low", "half", "one", "zero")]
    assert made.counts == EvidenceCounts(candidates=6, merged=2, kept=4, reranked=6)
    reason = "reranker OverlapReranker was" if latency else r"no way to http://***@host"
    assert made.warning is not None
    assert "reranking failed for q0" in made.warning
    assert "whose fused order stays: " in made.warning
    assert reason in made.warning


def test_one_sub_query_that_could_not_be_reranked() -> None:
    """The others are; the sub-queries take turns, and what was not judged shows no score beside those that were."""
    overlap = OverlapReranker(fault=OSError("down"), fails_on="q1")
    docs = source()
    made = gathered(reranked_lanes(over=docs), reranker=Reranker(overlap, calibration=SHARE))
    assert made.warning == "reranking failed for q1, whose fused order stays: down"
    assert [(one.node_id, one.score) for one in made.nodes] == [("zero", 4.0), ("half", 2.0), ("one", 2.0)]
    lanes = [make_lane(0, [node("a", 0.5, "query q0")]), make_lane(1, [node("b", 0.7)], query="q1")]
    made = gathered(lanes, reranker=Reranker(overlap, calibration=SHARE))
    assert [(one.node_id, one.score) for one in made.nodes] == [("a", 4.0), ("b", None)]
    assert (provenance(made.nodes[1]) or {})["source_score"] == 0.7


def test_one_source_may_be_left_as_it_is() -> None:
    """Its searches and the others' take turns; the others' are reranked, in one call a sub-query."""
    docs, wiki = source("docs"), source("wiki")
    chosen = selected(docs, wiki, params=[{"knowledgeSourceName": "wiki", "resultsProcessing": "none"}])
    lanes = [
        make_lane(0, [node("a", 0.9, "nothing"), node("b", 0.8, "query q0")], over=docs),
        make_lane(1, [node("x", 0.7, "nothing"), node("y", 0.6, "query q0")], over=wiki),
    ]
    overlap = OverlapReranker()
    reranker = Reranker(overlap, calibration=SHARE, threshold=0)
    made = gathered(lanes, chosen=chosen, reranker=reranker)
    assert overlap.calls == [("query q0", ["a", "b"])]
    assert [(one.node_id, one.score) for one in made.nodes] == [("b", 4.0), ("x", 0.7), ("a", 0.0), ("y", 0.6)]
    strict = gathered(lanes, chosen=chosen, reranker=Reranker(overlap, calibration=SHARE))
    assert ids(strict.nodes) == ["b", "x", "y"]
    assert [record.id for record, _ in strict.cut_searches] == [0]


def test_sources_may_be_capped() -> None:
    """``maxOutputDocuments`` of a source keeps its best, and counts the rest; other sources and strange nodes stay."""
    docs, wiki = source("docs"), source("wiki")
    chosen = selected(docs, wiki, params=[{"knowledgeSourceName": "docs", "maxOutputDocuments": 1}])
    lanes = [make_lane(0, [("a", 0.9), ("b", 0.8)], over=docs), make_lane(1, [("x", 0.7), ("y", 0.6)], over=wiki)]
    made = gathered(lanes, chosen=chosen)
    assert ids(made.nodes) == ["a", "x", "y"]
    assert made.counts == EvidenceCounts(candidates=4, kept=3, dropped_by_cap=1)


def lists(lanes: Sequence[SourceSearch]) -> dict[str, str]:
    made = lists_by_sub_query(lanes, interleave)
    return {one.sub_query.id: "".join(name for name, _ in one.ranked.keys) for one in made}


def scores(lanes: Sequence[SourceSearch]) -> dict[str, float | None]:
    return {name: one.score for (name, _), one in collect(lanes).items()}


def test_scores_of_one_scale_are_compared() -> None:
    """Searches that share a scale are merged by score; others take turns, and so does one without scores."""
    one, two = source("one"), source("two")
    same = [make_lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1), make_lane(1, [("x", 0.85)], over=two, scale=1)]
    assert lists(same) == {"q0": "axb"}
    apart = [make_lane(0, [("a", 0.2), ("b", 0.1)], over=one), make_lane(1, [("x", 0.9), ("y", 0.8)], over=two)]
    assert lists(apart) == {"q0": "axby"}
    unscored = [
        make_lane(0, [("a", 0.9), ("b", 0.8)], over=one, scale=1),
        make_lane(1, [("x", None)], over=two, scale=1),
    ]
    assert lists(unscored) == {"q0": "axb"}


@pytest.mark.parametrize("scale", [1, None])
def test_weights_lift_a_source(scale: int | None) -> None:
    """A heavier source's documents come before a lighter one's of equal standing, whatever the order of sources."""
    light, heavy = source("light"), source("heavy", weight=2.0)
    first = make_lane(0, [("a", 0.5), ("b", 0.5)], over=light, scale=scale)
    second = make_lane(1, [("x", 0.5)], over=heavy, scale=scale)
    for lanes in ([first, second], [second, first]):
        assert lists(lanes)["q0"][0] == "x"


def test_dense_and_lexical_lists_of_a_search_are_fused() -> None:
    """By their scores, each list's scaled from its lowest to its highest."""
    lanes = [make_lane(0, [("a", 0.9), ("b", 0.8), ("c", 0.1)], lexical=[("x", 30.0), ("b", 29.0), ("y", 1.0)])]
    assert lists(lanes) == {"q0": "baxcy"}


def test_searches_of_one_scale_are_one_corpus() -> None:
    """Their dense lists merge by score, their lexical lists take turns by weight, then both are fused."""
    one, two = source("one"), source("two", weight=2.0)
    lanes = [
        make_lane(0, [("a", 0.9)], over=one, scale=1, lexical=[("k", 900.0), ("l", 800.0)]),
        make_lane(1, [("b", 0.1)], over=two, scale=1, lexical=[("m", 3.0), ("n", 2.0), ("a", 1.0)]),
    ]
    # dense: a b; lexical: m n k a l, two turns for the heavier; a is in both.
    assert lists(lanes) == {"q0": "amnklb"}


def test_no_score_is_invented() -> None:
    """A similarity where a dense list has one; BM25's score beside similarities is none; both stand in the record."""
    lane = make_lane(0, [("a", 0.9), ("b", 0.8)], lexical=[("b", 31.0), ("x", 20.0)])
    assert scores([lane]) == {"a": 0.9, "b": 0.8, "x": None}
    found = collect([lane])["b", "text of b"].found
    assert [(kind, rank, score) for _, kind, rank, score in found] == [("dense", 1, 0.8), ("lexical", 0, 31.0)]


def test_one_node_of_several_searches_comes_once_with_its_provenance() -> None:
    """Its metadata tells every search that found it, but no model, nor the source; its score is the best one."""
    found = collect([make_lane(4, [("a", 0.5), ("b", 0.4)]), make_lane(5, [("b", 0.7)], query="q1")])
    node = found["b", "text of b"].evidence()
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert node.node.get_content(mode) == "title: b\n\ntext of b"
    assert PROVENANCE_KEY not in found["b", "text of b"].node.node.metadata
    mark = provenance(node)
    assert mark is not None
    assert (mark["source"], mark["activity"], node.score) == ("docs", 4, 0.7)
    assert [(s["activity"], s["sub_query"], s["rank"], s["score"]) for s in mark["searches"]] == [
        (4, "q0", 1, 0.4),
        (5, "q1", 0, 0.7),
    ]
