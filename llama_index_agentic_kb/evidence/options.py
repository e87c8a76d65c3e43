"""How evidence is made of what was found: one dataclass, yours to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_index.core.postprocessor.types import BaseNodePostprocessor

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evidence.arrangement import MOST_CHARACTERS, pieces_per_document
from llama_index_agentic_kb.evidence.candidates import Fusion
from llama_index_agentic_kb.schema import ResultsProcessing
from llama_index_agentic_kb.search.fusion import interleave, relative_score_fusion
from llama_index_agentic_kb.search.rerank import Reranker

__all__ = ["EvidenceOptions", "as_processing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions:
    """How ranked lists become one list of evidence.

    Args:
        fusion: How the sub-queries' lists are fused. Default ``interleave``.
        lane_fusion: How the ways of searching one corpus (dense and lexical) are fused. Default
            ``relative_score_fusion``.
        lane_weights: Weights of these ways by kind, ``{"lexical": 0.5}``. Above 0; one that is not named has 1.
        postprocessors: Applied in order to the fused nodes.
        reranker: Reranks the candidates of each sub-query.
        join_neighbours: Whether adjacent chunks of one document become one reference.
        max_per_document: References of one document before others get a place: a number, None for no limit, or
            "auto" (default), a third of what is wanted and at least 3. What is beyond is moved behind, not dropped.
        neighbour_characters: The longest that joined neighbours may be. Default 6,000.
        results_processing: "rerank" (default), or "none": no reranker, no merging, the searches take turns.
        coverage_depth: Each sub-query's best evidence has a place before any sub-query's tenth: the ten. At least 2.

    Raises:
        ConfigurationError: An option is unusable.
    """

    fusion: Fusion = interleave
    lane_fusion: Fusion = relative_score_fusion
    lane_weights: Mapping[str, float] = field(default_factory=dict)
    postprocessors: Sequence[BaseNodePostprocessor] = ()
    reranker: Reranker | None = None
    join_neighbours: bool = True
    max_per_document: int | Literal["auto"] | None = "auto"
    neighbour_characters: int = MOST_CHARACTERS
    results_processing: ResultsProcessing = ResultsProcessing.RERANK
    coverage_depth: int = 10

    def __post_init__(self) -> None:
        """Refuse what can't be used."""
        if self.reranker is not None and not isinstance(self.reranker, Reranker):
            raise ConfigurationError(f"reranker: expected a Reranker, got {type(self.reranker).__name__}")
        for kind, weight in self.lane_weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigurationError(f"lane_weights: the weight of {kind!r} must be above 0, got {weight}")
        most = self.max_per_document
        if most not in (None, "auto") and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ConfigurationError(f"max_per_document must be at least 1, 'auto' or None, got {most!r}")
        if self.neighbour_characters < 1:
            raise ConfigurationError(f"neighbour_characters must be above 0, got {self.neighbour_characters}")
        if self.coverage_depth < 2:  # noqa: PLR2004 (the best itself is the first)
            raise ConfigurationError(f"coverage_depth must be at least 2, got {self.coverage_depth}")

    @property
    def calibrated(self) -> bool:
        """Whether there is a reranker whose scores are on the scale of 0 to 4."""
        return self.reranker is not None and self.reranker.calibrated

    def pieces_per_document(self, wanted: int) -> int | None:
        """Give how many references of one document there may be before others get a place."""
        return pieces_per_document(wanted) if self.max_per_document == "auto" else self.max_per_document


def as_processing(given: ResultsProcessing | str) -> ResultsProcessing:
    """Give "rerank" and "none" as what they name.

    Raises:
        ConfigurationError: It is neither.
    """
    try:
        return ResultsProcessing(given)
    except ValueError:
        known = ", ".join(known.value for known in ResultsProcessing)
        raise ConfigurationError(f"results_processing: {given!r} is unknown; known are {known}") from None
