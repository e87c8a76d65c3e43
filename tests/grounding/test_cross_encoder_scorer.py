"""A local classifier as scorer: labels, windows, threads; with a real, tiny cross-encoder built on the spot."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_index_agentic_kb._aio import arun, gather, run
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.grounding.claims import split_claims
from llama_index_agentic_kb.grounding.scorers import CrossEncoderScorer, Premise
from llama_index_agentic_kb.schema.grounding import Verdict

PREMISES = [Premise("Mars is red. It has two moons.", "Mars"), Premise("Venus is hot and has no moon.", "Venus")]
CLAIMS = split_claims("Mars has two moons. Saturn has rings.")


class Overlap:
    """Gives the share of the claim's words that the premise has, as logits of two labels or as one number."""

    def __init__(self, *, labels: int = 1, answer: Any = None, seconds: float = 0.0) -> None:
        self.labels, self.answer, self.seconds = labels, answer, seconds
        self.asked: list[tuple[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def predict(self, sentences: list[tuple[str, str]], **kwargs: Any) -> Any:
        with self._lock:
            self.asked += sentences
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        if self.answer is not None:
            return self.answer
        shares = [share(claim, premise) for premise, claim in sentences]
        if self.labels == 1:
            return np.array(shares)
        return np.array([[-9 * value + 4.5, 9 * value - 4.5] for value in shares])


def share(claim: str, premise: str) -> float:
    words = set(claim.lower().strip(".").split())
    return len(words & set(premise.lower().replace(".", " ").split())) / len(words)


@pytest.mark.parametrize("labels", [1, 2])
def test_scores(labels: int) -> None:
    """One number or several labels: the best passage supports the claim, and its sentence is shown."""
    scorer = CrossEncoderScorer(
        Overlap(labels=labels),
        entailment=None if labels == 1 else 1,
        contradiction=None if labels == 1 else 0,
    )
    supported, unsupported = run(scorer.score(CLAIMS, PREMISES))
    assert supported.verdict is Verdict.SUPPORTED
    assert supported.evidence[0].premise == 0
    assert "It has two moons." in {span.of(PREMISES[0].text) for span in supported.evidence[0].spans}
    assert unsupported.verdict in (Verdict.UNSUPPORTED, Verdict.CONTRADICTED)


async def test_long_passages_are_cut_and_headed() -> None:
    """A long passage is given in windows of whole sentences under its title; the best one counts."""
    model = Overlap()
    text = " ".join(f"Fact {number} is of no use here." for number in range(60)) + " Mars has two moons."
    [found, _] = await arun(CrossEncoderScorer(model, window=200).score(CLAIMS, [Premise(text, "Mars")]))
    windows = [premise for premise, claim in model.asked if claim == CLAIMS[0].plain]
    assert len(windows) > 5
    assert all(window.startswith("Mars\n") and window.endswith(".") and len(window) < 260 for window in windows)
    assert found.verdict is Verdict.SUPPORTED


def test_only_the_nearest_passages_are_asked() -> None:
    """Each claim is held against the passages with most of its words."""
    model = Overlap()
    many = [*PREMISES, *(Premise(f"Filler number {number} about pumps.") for number in range(30))]
    run(CrossEncoderScorer(model, passages=2).score(CLAIMS[:1], many))
    assert len(model.asked) <= 2


def test_one_at_a_time() -> None:
    """A tokenizer fails when two threads use it: the model is only used by one at a time."""
    model = Overlap(seconds=0.05)
    scorer = CrossEncoderScorer(model)
    jobs = run(gather([scorer.score(CLAIMS, PREMISES) for _ in range(3)]))
    assert all(job.error is None for job in jobs)
    assert model.most_at_once == 1


def test_deadline() -> None:
    """A slow model is given up in time."""
    scorer = CrossEncoderScorer(Overlap(seconds=3))
    with pytest.raises(DeadlineExceededError):
        run(scorer.score(CLAIMS, PREMISES, deadline=time.monotonic() + 0.1))


@pytest.mark.parametrize("answer", [[0.5], [float("nan")] * 4, np.zeros((4, 0)), []])
def test_unusable_answers(answer: Any) -> None:
    """Another number of scores than was asked for, or no numbers, are an error."""
    with pytest.raises(RetrievalError, match="expected 4 finite scores"):
        run(CrossEncoderScorer(Overlap(answer=answer)).score(CLAIMS, PREMISES))


def test_several_labels_need_a_choice() -> None:
    """Which label entails differs between models and must be said, rightly."""
    with pytest.raises(ConfigurationError, match="entailment"):
        run(CrossEncoderScorer(Overlap(labels=2)).score(CLAIMS, PREMISES))
    with pytest.raises(ConfigurationError, match="only 2 labels"):
        run(CrossEncoderScorer(Overlap(labels=2), entailment=2).score(CLAIMS, PREMISES))


@pytest.mark.parametrize(
    "given", [{"model": object()}, {"passages": 0}, {"window": 0}, {"batch_size": 0}, {"contradiction": 0}]
)
def test_wrong_configuration(given: dict[str, Any]) -> None:
    """Arguments that can't work are named."""
    with pytest.raises(ConfigurationError):
        CrossEncoderScorer(**{"model": Overlap(), **given})


@pytest.mark.slow
def test_real_cross_encoder(tmp_path: Path) -> None:
    """sentence-transformers' own ``CrossEncoder``, with a tiny model of three labels, is used as it is."""
    import transformers  # noqa: PLC0415
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 (loads torch)

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "mars", "is", "red", "has", "two", "moons", "venus", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    parts: Any = transformers  # its names are made when they are asked for
    parts.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = parts.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=3,
    )  # fmt: skip
    parts.BertForSequenceClassification(config).save_pretrained(tmp_path)
    scorer = CrossEncoderScorer(CrossEncoder(str(tmp_path)), entailment=1, contradiction=0)
    found = run(scorer.score(CLAIMS, PREMISES))
    assert all(one.score is not None and 0 < one.score < 1 for one in found)
    assert scorer.name.startswith("cross-encoder")
