from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.search.rerank import CALIBRATIONS, DEFAULT_THRESHOLD, Calibration, calibration_for

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", CALIBRATIONS)
@settings(max_examples=60, deadline=None)
@given(FINITE, FINITE)
def test_every_calibration_is_monotone_and_on_the_scale(name: str, one: float, two: float) -> None:
    """A better raw score never gives a worse score, and all are from 0 to 4."""
    calibration = CALIBRATIONS[name]
    low, high = sorted((one, two))
    assert 0 <= calibration(low) <= calibration(high) <= 4
    assert calibration.name == name
    assert "convention" in calibration.origin


def test_what_a_model_is_undecided_about_is_the_threshold() -> None:
    """Probability 0.5, as logit or as itself, is 2.5; the ends are where the convention says."""
    assert CALIBRATIONS["logit"](0.0) == pytest.approx(DEFAULT_THRESHOLD)
    assert CALIBRATIONS["probability"](0.5) == CALIBRATIONS["cohere"](0.5) == DEFAULT_THRESHOLD
    assert [round(CALIBRATIONS["logit"](raw), 2) for raw in (-11, -5, 5, 11)] == [0.0, 0.04, 3.98, 4.0]
    assert [CALIBRATIONS["llm-1-10"](raw) for raw in (0, 1, 5.5, 10, 11)] == [0, 0, 2, 4, 4]


def test_anchors_are_joined_by_straight_lines() -> None:
    """Between anchors straight, beyond them flat; anchors themselves are hit."""
    own = Calibration.piecewise([(-1, 1.0), (1, 2.0), (2, 2.0), (3, 4.0)], name="ours", origin="40 pairs")
    assert [own(raw) for raw in (-9, -1, 0, 1, 1.5, 2, 2.5, 3, 99)] == [1, 1, 1.5, 2, 2, 2, 3, 4, 4]
    assert (own.name, own.origin) == ("ours", "40 pairs")


def test_own_functions_are_cut_to_the_scale() -> None:
    """A function of one's own may give more than the scale has."""
    own = Calibration(lambda raw: raw * 10)
    assert [own(raw) for raw in (-1, 0.2, 7)] == [0, 2, 4]
    assert [Calibration.logistic(2.0)(2.0), Calibration.logistic(0, 1e9)(-5.0)] == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize(
    "anchors",
    [[], [(0, 0)], [(1, 0), (0, 4)], [(0, 0), (0, 4)], [(0, 3), (1, 2)], [(0, 0), (1, 5)], [(0, -1), (1, 4)],
     [(0, 0), (math.nan, 4)], [(0, 0), (math.inf, 4)]],
)  # fmt: skip
def test_anchors_that_make_no_monotone_map_are_refused(anchors: list[tuple[float, float]]) -> None:
    """The error shows them, and says what is wanted."""
    with pytest.raises(ConfigurationError, match=r"calibration: give at least two \(raw, score\) anchors"):
        Calibration.piecewise(anchors)


def test_slopes_that_fall_are_refused() -> None:
    """A logistic map rises."""
    for middle, slope in ((0, 0), (0, -1), (math.nan, 1), (0, math.inf)):
        with pytest.raises(ConfigurationError, match="slope must be above 0 and middle finite"):
            Calibration.logistic(middle, slope)


@pytest.mark.parametrize(
    ("class_name", "model", "known"),
    [
        ("SentenceTransformerRerank", "cross-encoder/ms-marco-MiniLM-L-6-v2", "logit"),
        ("SentenceTransformerRerank", "cross-encoder/ms-marco-MiniLM-L6-v2", "logit"),
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
    found = calibration_for(class_name, model)
    assert (found and found.name) == known
