from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.postprocessor import LLMRerank, SentenceTransformerRerank, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.search.rerank import Calibration, Reranked, Reranker, as_reranker
from llama_index_agentic_kb.testing import ScriptedLLM
from tests.rerankers import OverlapReranker

if TYPE_CHECKING:
    from tests.conftest import Serve

SHARE = Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)])
QUERY = "tall rocket of apollo"
TEXTS = ["a small probe", "the tall rocket", "tall rocket of apollo", "apollo"]


def nodes(texts: list[str] = TEXTS) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=f"n{n}", text=text), score=0.1) for n, text in enumerate(texts)]


def ranks(reranker: Reranker, given: list[NodeWithScore] | None = None, seconds: float = 10) -> list[Reranked]:
    given = nodes() if given is None else given
    return run(reranker.rank(QUERY, given, deadline=time.monotonic() + seconds))


class Answers(BaseNodePostprocessor):
    """Gives back what it is told: copies of nodes by position with scores, or anything else."""

    answer: Any = None

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if not isinstance(self.answer, list):
            return self.answer  # type: ignore[no-any-return]
        made = [(nodes[position].node.model_copy(deep=True), score) for position, score in self.answer]
        return [NodeWithScore(node=node, score=score) for node, score in made]


async def test_scores_are_put_on_the_scale_best_first() -> None:
    """Raw scores stay beside the calibrated ones; sync and async agree."""
    reranker = Reranker(OverlapReranker(), calibration=SHARE)
    found = ranks(reranker)
    assert found == [Reranked(2, 1.0, 4.0), Reranked(1, 0.5, 2.0), Reranked(3, 0.25, 1.0), Reranked(0, 0.0, 0.0)]
    assert await arun(reranker.rank(QUERY, nodes(), deadline=None)) == found
    assert run(reranker.rank(QUERY, [], deadline=None)) == []


def test_the_postprocessors_own_top_n_drops_nothing() -> None:
    """It is raised on a copy, to the number of candidates; the reranker's ``top_n`` is the one that counts."""
    own = OverlapReranker(top_n=1)
    assert len(ranks(Reranker(own, calibration=SHARE))) == len(TEXTS)
    assert own.top_n == 1
    assert [one.position for one in ranks(Reranker(own, calibration=SHARE, top_n=2))] == [2, 1]
    assert len(own.calls) == 2  # a copy's record is the original's


def test_what_is_given_is_never_changed() -> None:
    """The postprocessor writes scores and metadata into copies."""
    given = nodes()
    before = [node.model_dump() for node in given]
    ranks(Reranker(OverlapReranker(), calibration=SHARE), given)
    assert [node.model_dump() for node in given] == before


def test_without_calibration_the_order_counts() -> None:
    """Raw scores are kept, none is put on the scale, and there is no threshold."""
    reranker = Reranker(OverlapReranker())
    assert (reranker.calibrated, reranker.threshold) == (False, None)
    assert [(one.position, one.raw, one.score) for one in ranks(reranker)][:2] == [(2, 1.0, None), (1, 0.5, None)]
    unscored = ranks(Reranker(OverlapReranker(fault="none")))
    assert unscored == [Reranked(position, None, None) for position in range(4)]
    assert repr(reranker) == "Reranker(OverlapReranker, uncalibrated)"


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


def test_what_can_be_a_reranker() -> None:
    """A reranker is itself, a postprocessor gets defaults, None stays None; anything else is refused."""
    reranker = Reranker(OverlapReranker())
    assert as_reranker(reranker) is reranker
    assert as_reranker(None) is None
    made = as_reranker(SimilarityPostprocessor())
    assert made is not None
    assert made.name == "SimilarityPostprocessor"
    with pytest.raises(ConfigurationError, match="expected a LlamaIndex node postprocessor, got str"):
        as_reranker("bge")  # type: ignore[arg-type]


def test_copies_doubles_and_strangers_that_come_back() -> None:
    """Nodes are known again by id where they are copies; of one that comes twice the better score counts."""
    answer = Answers(answer=[(1, 0.2), (0, 0.9), (1, 0.6), (2, None)])
    assert ranks(Reranker(answer, calibration=SHARE)) == [
        Reranked(0, 0.9, 3.6),
        Reranked(1, 0.6, 2.4),
        Reranked(2, None, None),
    ]

    class Adds(OverlapReranker):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            return [NodeWithScore(node=TextNode(id_="new", text="new"), score=9.0), *nodes]

    assert [one.position for one in ranks(Reranker(Adds()))] == [0, 1, 2, 3]


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
        begun = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="reranker OverlapReranker"):
            ranks(Reranker(OverlapReranker(latency=3.0), timeout=timeout), seconds=seconds)
        assert time.monotonic() - begun < 2.5


async def test_a_model_in_this_process_is_asked_one_at_a_time() -> None:
    """By default calls wait their turn; ``max_concurrency`` lets them run side by side."""
    running, most, lock = 0, 0, threading.Lock()

    class Counting(OverlapReranker):
        def _postprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.02)
            with lock:
                running -= 1
            return super()._postprocess_nodes(nodes, query_bundle)

    for allowed in (1, 3):
        most = 0
        reranker = Reranker(Counting(), max_concurrency=allowed)
        run(gather([reranker.rank(QUERY, nodes(), deadline=None) for _ in range(3)]))
        assert most == allowed
        most = 0
        await arun(gather([reranker.rank(QUERY, nodes(), deadline=None) for _ in range(3)]))
        assert most == allowed


# -- real ones ------------------------------------------------------------------------------------------------------

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


def test_a_language_model_that_talks_is_an_error() -> None:
    """A reply without choices gives no node: the reranker failed, and nothing is held to be irrelevant for it."""
    with pytest.raises(RetrievalError, match="LLMRerank returned none of its 4 candidates"):
        ranks(Reranker(LLMRerank(llm=ScriptedLLM("I could not decide."))))


async def test_a_language_model_behind_http(serve: Serve) -> None:
    """The real client, on the loop and off it."""
    from llama_index_agentic_kb import OpenAICompatible  # noqa: PLC0415 (loads the OpenAI client)

    server = serve(CHOICES)
    llm = OpenAICompatible(model="any", api_key="none", api_base=server.base_url)
    reranker = Reranker(LLMRerank(llm=llm))
    found = ranks(reranker)
    assert [one.position for one in found] == [2, 1, 0]
    assert await arun(reranker.rank(QUERY, nodes(), deadline=None)) == found
    assert len(server.requests) == 2


@pytest.fixture(scope="module")
def tiny_cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder of sentence-transformers with two small layers and random weights."""
    import torch  # noqa: PLC0415 (for this fixture alone)

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("cross-encoder")
    words = sorted({word for text in [*TEXTS, QUERY] for word in text.split()})
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    (path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=1, initializer_range=1.0,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_cross_encoder_reranks(tiny_cross_encoder: Path) -> None:
    """The real class with its own default of two nodes: all are scored, in threads too, and nothing is changed."""
    encoder = SentenceTransformerRerank(model=str(tiny_cross_encoder), device="cpu", keep_retrieval_score=True)
    assert encoder.top_n == 2
    reranker = Reranker(encoder, calibration="probability", threshold=0)
    given = nodes()
    before = [node.model_dump() for node in given]
    found = ranks(reranker, given)
    assert sorted(one.position for one in found) == [0, 1, 2, 3]
    raws = [one.raw for one in found if one.raw is not None]
    assert len(set(raws)) == 4
    assert raws == sorted(raws, reverse=True)
    assert all(0 < raw < 1 and isinstance(raw, float) for raw in raws)
    assert [node.model_dump() for node in given] == before
    jobs = run(gather([reranker.rank(QUERY, nodes(), deadline=None) for _ in range(4)]))
    assert all([one.position for one in job.result()] == [one.position for one in found] for job in jobs)
