from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, InvalidRequestError, RetrievalError
from llama_index_agentic_kb.schema.grounding import MAX_RECORDS, RankRecord
from llama_index_agentic_kb.search.rerank import (
    CALIBRATIONS,
    DEFAULT_THRESHOLD,
    Calibration,
    Reranked,
    Reranker,
    arank,
    calibration_for,
    rank,
)
from llama_index_agentic_kb.testing import HashEmbedding, ScriptedLLM
from tests.rerankers import OverlapReranker

SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])
QUERY = "tall rocket of apollo"
TEXTS = ["a small probe", "the tall rocket", "tall rocket of apollo", "apollo"]


def nodes(texts: list[str] = TEXTS) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=f"n{n}", text=text), score=0.1) for n, text in enumerate(texts)]


def ranks(reranker: Reranker, seconds: float = 10) -> list[Reranked]:
    return run(reranker.rank(QUERY, nodes(), deadline=time.monotonic() + seconds))


class Answers(BaseNodePostprocessor):
    """Returns its ``answer``."""

    answer: Any = None

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self.answer  # type: ignore[no-any-return]


async def test_scores_are_put_on_the_scale_best_first() -> None:
    """Raw scores stay beside the calibrated ones; sync and async agree."""
    reranker = Reranker(OverlapReranker(), calibration=SHARE)
    found = ranks(reranker)
    assert found == [Reranked(2, 1.0, 4.0), Reranked(1, 0.5, 2.0), Reranked(3, 0.25, 1.0), Reranked(0, 0.0, 0.0)]
    assert await arun(reranker.rank(QUERY, nodes(), deadline=None)) == found
    assert run(reranker.rank(QUERY, [], deadline=None)) == []


def test_without_calibration_the_order_counts() -> None:
    """Raw scores are kept, none is put on the scale, and there is no threshold."""
    reranker = Reranker(OverlapReranker())
    assert (reranker.calibrated, reranker.threshold) == (False, None)
    assert [(one.position, one.raw, one.score) for one in ranks(reranker)][:2] == [(2, 1.0, None), (1, 0.5, None)]
    unscored = ranks(Reranker(OverlapReranker(fault="none")))
    assert unscored == [Reranked(position, None, None) for position in range(4)]


def test_thresholds_by_default_and_by_word() -> None:
    """2.5 where calibrated, none where not; 0 drops nothing; what is off the scale is refused."""
    assert Reranker(OverlapReranker(), calibration="probability").threshold == 2.5
    assert Reranker(OverlapReranker(), calibration=SHARE, threshold=0).threshold == 0
    for threshold in (-0.1, 4.1):
        with pytest.raises(ConfigurationError, match="threshold must be from 0 to 4"):
            Reranker(OverlapReranker(), calibration=SHARE, threshold=threshold)
    with pytest.raises(ConfigurationError, match="OverlapReranker is not calibrated; give a calibration"):
        Reranker(OverlapReranker(), threshold=2.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calibration": "nope"}, "'nope' is unknown; known are logit, probability, cohere, llm-1-10"),
        ({"calibration": 3}, "give a Calibration or the name of one, got int"),
        ({"top_n": 0}, "top_n must be above 0"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"max_concurrency": 0}, "max_concurrency must be above 0"),
    ],
)
def test_arguments_at_fault_are_refused(fields: dict[str, Any], message: str) -> None:
    """The error names the argument."""
    with pytest.raises(ConfigurationError, match=message):
        Reranker(OverlapReranker(), **fields)


@pytest.mark.parametrize(
    ("postprocessor", "message"),
    [
        (OverlapReranker(fault="empty"), "returned none of its 4 candidates"),
        (OverlapReranker(fault="nan"), "returned no scores"),
        (OverlapReranker(fault="none"), "returned no scores"),
        (Answers(answer=None), "returned no list of NodeWithScore: NoneType"),
        (Answers(answer="text"), "returned no list of NodeWithScore: str"),
    ],
)
def test_answers_that_cannot_be_used(postprocessor: BaseNodePostprocessor, message: str) -> None:
    """No node, no score and no list are errors of the reranker, which the caller tells of."""
    with pytest.raises(RetrievalError, match=message):
        ranks(Reranker(postprocessor, calibration=SHARE))


def test_failures_and_hangs_are_raised_to_the_caller() -> None:
    """Its own error as it is; one that is late, by its timeout or by the deadline, as late."""
    with pytest.raises(ZeroDivisionError):
        ranks(Reranker(OverlapReranker(fault=ZeroDivisionError("no"))))
    for timeout, seconds in ((0.05, 10.0), (20.0, 0.05)):
        with pytest.raises(DeadlineExceededError, match="reranker OverlapReranker"):
            ranks(Reranker(OverlapReranker(latency=1.0), timeout=timeout), seconds=seconds)


@pytest.mark.parametrize("allowed", [1, 3])
def test_a_model_in_this_process_is_asked_one_at_a_time(allowed: int) -> None:
    """By default calls wait their turn; ``max_concurrency`` lets them run side by side."""
    running, most = threading.Semaphore(3), []

    class Counting(OverlapReranker):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            with running:
                time.sleep(0.02)
                most.append(3 - running._value)
            return super()._postprocess_nodes(nodes, query_bundle)

    reranker = Reranker(Counting(), max_concurrency=allowed)
    run(gather([reranker.rank(QUERY, nodes(), deadline=None) for _ in range(3)]))
    assert max(most) == allowed


CHOICES = "Doc: 3, Relevance: 10\nDoc: 2, Relevance: 5\nDoc: 1, Relevance: 1"


async def test_a_language_model_reranks() -> None:
    """LlamaIndex's ``LLMRerank`` is known: 1 to 10 is 0 to 4, what it does not name is left out; async is awaited."""
    for call in (run, None):
        llm = ScriptedLLM(CHOICES)
        reranker = Reranker(LLMRerank(llm=llm, top_n=1))
        flow = reranker.rank(QUERY, nodes(), deadline=None)
        found = run(flow) if call else await arun(flow)
        assert [(one.position, one.score) for one in found] == [(2, 4.0), (1, 16 / 9), (0, 0.0)]
        assert reranker.threshold == 2.5
        assert len(llm.calls) == 1


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", CALIBRATIONS)
@settings(max_examples=60, deadline=None)
@given(FINITE, FINITE)
def test_every_calibration_is_monotone_and_on_the_scale(name: str, one: float, two: float) -> None:
    """A better raw score never gives a worse score, and all are from 0 to 4."""
    calibration = CALIBRATIONS[name]
    low, high = sorted((one, two))
    assert 0 <= calibration(low) <= calibration(high) <= 4


def test_what_a_model_is_undecided_about_is_the_threshold() -> None:
    """Probability 0.5, as logit or as itself, is 2.5; the ends are where the convention says."""
    assert CALIBRATIONS["logit"](0.0) == pytest.approx(DEFAULT_THRESHOLD)
    assert CALIBRATIONS["probability"](0.5) == CALIBRATIONS["cohere"](0.5) == DEFAULT_THRESHOLD
    assert [round(CALIBRATIONS["logit"](raw), 2) for raw in (-11, -5, 5, 11)] == [0.0, 0.04, 3.98, 4.0]
    assert [CALIBRATIONS["llm-1-10"](raw) for raw in (0, 1, 5.5, 10, 11)] == [0, 0, 2, 4, 4]


def test_anchors_are_joined_by_straight_lines() -> None:
    """Between anchors straight, beyond them flat; anchors themselves are hit."""
    own = Calibration.piecewise([(-1, 1.0), (1, 2.0), (2, 2.0), (3, 4.0)])
    assert [own(raw) for raw in (-9, -1, 0, 1, 1.5, 2, 2.5, 3, 99)] == [1, 1, 1.5, 2, 2, 2, 3, 4, 4]


@pytest.mark.parametrize(
    "anchors",
    [[], [(0, 0)], [(1, 0), (0, 4)], [(0, 0), (0, 4)], [(0, 3), (1, 2)], [(0, 0), (1, 5)], [(0, -1), (1, 4)],
     [(0, 0), (math.nan, 4)], [(0, 0), (math.inf, 4)]],
)  # fmt: skip
def test_anchors_that_make_no_monotone_map_are_refused(anchors: list[tuple[float, float]]) -> None:
    """The error shows them, and says what is wanted."""
    with pytest.raises(ConfigurationError, match=r"calibration: give at least two \(raw, score\) anchors"):
        Calibration.piecewise(anchors)


@pytest.mark.parametrize(
    ("class_name", "model", "known"),
    [
        ("SentenceTransformerRerank", "cross-encoder/ms-marco-MiniLM-L-6-v2", "logit"),
        ("SentenceTransformerRerank", "BAAI/bge-reranker-base", "probability"),
        ("FlagEmbeddingReranker", "BAAI/bge-reranker-base", "logit"),
        ("CohereRerank", "rerank-v3.5", "cohere"),
        ("LLMRerank", None, "llm-1-10"),
        ("SentenceTransformerRerank", "my/ms-marco-MiniLM-L-6-v2-tuned", None),
        ("RankGPTRerank", None, None),
    ],
)
def test_known_models_are_known_by_their_exact_names(class_name: str, model: str | None, known: str | None) -> None:
    """One and the same model gives other scores through another class; a tuned one is another model."""
    assert calibration_for(class_name, model) is (known and CALIBRATIONS[known])


# -- ranking records --------------------------------------------------------------------------------------------------

RECORDS = [
    RankRecord(id="cat", content="A small cat sleeps all day."),
    RankRecord(id="moon", title="Saturn V", content="The tall rocket flew to the Moon."),
    RankRecord(id="rocket", content="A rocket."),
]
GERMAN = ["Die Rakete ist nicht sehr groß und auch alt.", "Der Hund ist in dem Haus und schläft."]


@pytest.mark.parametrize(
    "ranker",
    [None, HashEmbedding(), OverlapReranker(), Reranker(OverlapReranker(), calibration=SHARE)],
    ids=["words", "vectors", "postprocessor", "calibrated"],
)
async def test_best_first(ranker: Any) -> None:
    """However it is ranked, the best record comes first, with scores from 0 to 1; sync and async agree."""
    found = rank("the tall rocket", RECORDS, ranker=ranker)
    assert found[0].id == "moon"
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(0 <= one.score <= 1 for one in found)
    assert await arank("the tall rocket", RECORDS, ranker=ranker) == found


def test_forms_order_and_languages() -> None:
    """Texts, models and mappings are taken; titles count; equal ones stay in order; each is stemmed in its language."""
    assert [one.id for one in rank("rocket", RECORDS, top_n=1)] == ["rocket"]
    assert [(one.id, one.score) for one in rank("nothing of this", RECORDS)] == [("cat", 0), ("moon", 0), ("rocket", 0)]
    assert rank("saturn", ["plain text", {"id": "m", "title": "Saturn V"}, RECORDS[0]])[0].id == "m"
    assert rank("saturn", []) == []
    assert rank("Raketen", GERMAN)[0].score > rank("Raketen", GERMAN)[1].score == 0
    shares = [one.score for one in rank("rocket", RECORDS, ranker=OverlapReranker(fault="none"))]
    assert shares == pytest.approx([1, 2 / 3, 1 / 3])  # a reranker that gives an order alone


@pytest.mark.parametrize(
    ("query", "records", "top_n", "message"),
    [
        (" ", RECORDS, None, "query"),
        ("x", ["y"] * (MAX_RECORDS + 1), None, "records: 201"),
        ("x", [{"id": "only"}], None, "needs a title or a content"),
        ("x", ["  "], None, "needs a title or a content"),
        ("x", RECORDS, 0, "top_n"),
    ],
)
def test_limits_ranking(query: str, records: list[Any], top_n: int | None, message: str) -> None:
    """What can't be ranked is refused, by name."""
    with pytest.raises(InvalidRequestError, match=message):
        rank(query, records, top_n=top_n)


@pytest.mark.filterwarnings("error")
def test_cosines_of_any_length() -> None:
    """Very long, very short and zero vectors, and such that hold no numbers."""

    class Lengths(HashEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            return [3.0, 4.0]

        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return [[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-3.0, -4.0]]

    found = rank("x", list("abcdef"), ranker=Lengths())
    assert [one.score for one in found] == pytest.approx([1, 1, 0, 0, 0, 0])


def test_failing_rankers() -> None:
    """A reranker that fails is an error; one that hangs is given up in time."""
    with pytest.raises(RetrievalError, match="none of its 3"):
        rank("rocket", RECORDS, ranker=OverlapReranker(fault="empty"))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        rank("rocket", RECORDS, ranker=OverlapReranker(latency=20), timeout=0.1)
    assert time.monotonic() - begun < 10
