"""From a reranker's own scores to one scale, 0 to 4, as Azure AI Search's semantic ranker has it.

On that scale 4 means that a passage answers the query completely, 3 that it is relevant but lacks detail, 2 that it
answers in part, 1 that it is about the subject, and 0 that it has nothing to do with it. No model but Azure's own gives
such scores; a ``Calibration`` says which raw score stands for which. Those of ``CALIBRATIONS`` are conventions, not
measured truths: the point where a model itself is undecided (probability 0.5) is set to 2.5, the default threshold, so
that by default what a model holds to be irrelevant is dropped. Fit your own to a few dozen judged pairs of your data.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["CALIBRATIONS", "DEFAULT_THRESHOLD", "HIGHEST", "Calibration", "calibration_for"]

HIGHEST: Final = 4.0
"""The top of the scale."""

DEFAULT_THRESHOLD: Final = 2.5
"""Below this a calibrated score means that the passage is left out; Azure's default."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone map from a reranker's raw scores to the scale of 0 to 4.

        Calibration.piecewise([(0.0, 0.0), (0.3, 2.5), (1.0, 4.0)], name="ours", origin="60 judged pairs, May")

    Args:
        convert: Takes a finite raw score. What it gives outside 0 to 4 is cut. It must never fall as scores rise.
        name: What the calibration is called.
        origin: Where its numbers come from.
    """

    convert: Callable[[float], float]
    name: str = "own"
    origin: str = ""

    def __call__(self, raw: float) -> float:
        """Give the score, 0 to 4, of a finite raw score."""
        return min(HIGHEST, max(0.0, self.convert(raw)))

    @classmethod
    def piecewise(cls, anchors: Sequence[tuple[float, float]], *, name: str = "own", origin: str = "") -> Calibration:
        """Make one that is straight between anchors, and flat beyond the first and the last.

        Args:
            anchors: (raw score, score) pairs, at least two, raw scores rising, scores from 0 to 4 and never falling.
            name: What the calibration is called.
            origin: Where the anchors come from.

        Raises:
            ConfigurationError: The anchors make no monotone map.
        """
        raws, scores = [float(raw) for raw, _ in anchors], [float(score) for _, score in anchors]
        rising = all(one < two for one, two in pairwise(raws))
        in_range = all(0 <= score <= HIGHEST for score in scores) and scores == sorted(scores)
        if len(anchors) < 2 or not rising or not in_range or not all(map(math.isfinite, raws)):  # noqa: PLR2004
            raise ConfigurationError(
                "calibration: give at least two (raw, score) anchors, raw scores rising, scores from 0 to 4 and never "
                f"falling; got {list(anchors)!r}"
            )

        def convert(raw: float) -> float:
            at = min(max(bisect.bisect_right(raws, raw), 1), len(raws) - 1)
            share = (min(max(raw, raws[0]), raws[-1]) - raws[at - 1]) / (raws[at] - raws[at - 1])
            return scores[at - 1] + share * (scores[at] - scores[at - 1])

        return cls(convert, name, origin)

    @classmethod
    def logistic(cls, middle: float, slope: float = 1.0, *, name: str = "own", origin: str = "") -> Calibration:
        """Make one for logits: 4 / (1 + exp(-slope (raw - middle))); ``middle`` gets a 2.

        Raises:
            ConfigurationError: The slope is not above 0, or one of them is no finite number.
        """
        if not (math.isfinite(middle) and math.isfinite(slope) and slope > 0):
            raise ConfigurationError(f"calibration: slope must be above 0 and middle finite, got {slope} and {middle}")

        def convert(raw: float) -> float:
            return HIGHEST / (1 + math.exp(-min(700.0, max(-700.0, slope * (raw - middle)))))

        return cls(convert, name, origin)


_UNDECIDED: Final = -math.log(DEFAULT_THRESHOLD / (HIGHEST - DEFAULT_THRESHOLD))
_OWN_BOUNDARY: Final = "a convention: probability 0.5, where the model is undecided, is the default threshold, 2.5"

CALIBRATIONS: Final[Mapping[str, Calibration]] = MappingProxyType(
    {
        made.name: made
        for made in (
            Calibration.logistic(
                _UNDECIDED, name="logit", origin=f"logit 0 is 2.5, -5 about 0, 5 about 4: {_OWN_BOUNDARY}"
            ),
            Calibration.piecewise(
                [(0.0, 0.0), (0.5, 2.5), (1.0, 4.0)],
                name="probability",
                origin=f"0, 0.5, 1 are 0, 2.5, 4: {_OWN_BOUNDARY}",
            ),
            Calibration.piecewise(
                [(0.0, 0.0), (0.5, 2.5), (1.0, 4.0)],
                name="cohere",
                origin="a convention: Cohere's relevance is from 0 to 1 and not linear; its middle is the default "
                "threshold. Cohere advises to find one's own threshold on 30 to 50 typical queries",
            ),
            Calibration.piecewise(
                [(1.0, 0.0), (10.0, 4.0)],
                name="llm-1-10",
                origin="a convention: the ends of the scale from 1 to 10 that LlamaIndex's prompt asks for are 0 and "
                "4, straight between; the default threshold is 6.6 of 10",
            ),
        )
    }
)
"""Named calibrations.

    logit         raw logits of a model trained to tell relevant from not: cross-encoder/ms-marco-MiniLM-L-6-v2
    probability   the same behind a sigmoid, 0 to 1: BAAI/bge-reranker through sentence-transformers
    cohere        Cohere's relevance scores, 0 to 1
    llm-1-10      LlamaIndex's LLMRerank with its default prompt, 1 to 10
"""

_MS_MARCO: Final = ("MiniLM-L-2-v2", "MiniLM-L-4-v2", "MiniLM-L-6-v2", "MiniLM-L-12-v2", "TinyBERT-L-2-v2")
_BGE: Final = ("base", "large", "v2-m3")
_KNOWN: Final[Mapping[tuple[str, str | None], str]] = MappingProxyType(
    {
        # sentence-transformers gives these models' logits as they are (Identity in their configuration) ...
        **{("SentenceTransformerRerank", f"cross-encoder/ms-marco-{name}"): "logit" for name in _MS_MARCO},
        **{
            ("SentenceTransformerRerank", f"cross-encoder/ms-marco-{name}".replace("-L-", "-L")): "logit"
            for name in _MS_MARCO
        },
        # ... and puts a sigmoid behind those with one label that say nothing. FlagEmbedding does not.
        **{("SentenceTransformerRerank", f"BAAI/bge-reranker-{name}"): "probability" for name in _BGE},
        **{("FlagEmbeddingReranker", f"BAAI/bge-reranker-{name}"): "logit" for name in _BGE},
        ("CohereRerank", None): "cohere",
        ("LLMRerank", None): "llm-1-10",
    }
)


def calibration_for(class_name: str, model: str | None) -> Calibration | None:
    """Give the calibration that is known for a postprocessor's class and model, by exact names; None for none."""
    name = _KNOWN.get((class_name, model)) or _KNOWN.get((class_name, None))
    return None if name is None else CALIBRATIONS[name]
