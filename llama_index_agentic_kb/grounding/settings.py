"""Settings for checking answers against their evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.grounding.citations import Markers
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, FilteringLevel

if TYPE_CHECKING:  # the scorers load when an answer is checked
    from llama_index_agentic_kb.grounding.scorers import ScorerLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounding:
    """How an answer is checked against its evidence, and how unsupported claims are handled.

    Args:
        scorer: Scorer of claims. "auto" (default): a larger model that was downloaded, else "small"; "small": the
            shipped cross-encoder, offline; "lexical": features alone; the name or folder of a fact-checking or NLI
            cross-encoder; a loaded one; a language model as judge; or a scorer. The ledger names the one used.
        threshold: Minimum score at which a reference supports a claim, above 0 and at most 1; Google's
            ``citationThreshold``. Defaults to 0.6.
        repair: How unsupported and contradicted claims are handled. "drop" removes them; "rewrite" lets the language
            model correct each once against its evidence and drops those still not supported. Defaults to no repair.
        filtering: Level at which an answer is withheld: "low" below a score of 0.4, "high" below 0.7. Defaults to no
            filtering.
        markers: How ``[ref_id:N]`` is processed: "keep" (default), "renumber" in order of appearance (and sort the
            source nodes likewise), or "strip".
        seconds: Maximum duration of the check in seconds, within the request's own limit. Defaults to 10.

    An answer that may still change (``repair``, ``filtering``) is streamed in one piece, after its check.

    Raises:
        ConfigurationError: A value is invalid.
    """

    scorer: ScorerLike = "auto"
    threshold: float = CITATION_THRESHOLD
    repair: Literal["drop", "rewrite"] | None = None
    filtering: FilteringLevel | Literal["low", "high"] | None = None
    markers: Markers | Literal["keep", "renumber", "strip"] = Markers.KEEP
    seconds: float = 10.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.threshold <= 1:
            raise ConfigurationError(f"Grounding.threshold must be above 0 and at most 1: {self.threshold}")
        if self.seconds <= 0:
            raise ConfigurationError(f"Grounding.seconds must be above 0: {self.seconds}")
        for name, known in (
            ("repair", (None, "drop", "rewrite")),
            ("filtering", (None, *FilteringLevel)),
            ("markers", tuple(Markers)),
        ):
            if getattr(self, name) not in known:
                names = ", ".join(map(str, known))
                raise ConfigurationError(f"Grounding.{name}: {getattr(self, name)!r} is unknown; known are {names}")

    @property
    def may_change(self) -> bool:
        """Whether the check may change or withhold the answer."""
        return self.repair is not None or self.filtering is not None


def as_grounding(value: Grounding | bool | None) -> Grounding | None:
    """Return the settings for a value: the defaults for None and True, None for False."""
    if isinstance(value, Grounding):
        return value
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"grounding: expected Grounding(...), True or False, got {type(value).__name__}")
    return None if value is False else Grounding()
