"""How answers are held against their evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.grounding.citations import Markers
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, FilteringLevel

if TYPE_CHECKING:  # the scorers load when an answer is checked
    from llama_index_agentic_kb.grounding.scorers import ScorerLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounding:
    """How an answer is held against its evidence, and what becomes of what it does not bear out.

    Args:
        scorer: Judges claims. "auto" (default): a larger model that was downloaded, else "small"; "small": the shipped
            cross-encoder, offline; "lexical": features alone; the name or folder of a fact-checking or NLI
            cross-encoder; a loaded one; a language model as judge; or a scorer. The ledger names what judged.
        threshold: Score, 0 to 1, from which a reference supports a claim; Google's ``citationThreshold``. Default 0.6.
        repair: What becomes of unsupported and contradicted claims: None leaves them (the ledger tells of them),
            "drop" takes them out, "rewrite" has the language model correct each once against its evidence and drops
            what is still not supported.
        filtering: Withholds an answer that is grounded too badly: "low" below a score of 0.4, "high" below 0.7. None
            (default) withholds none.
        markers: What becomes of ``[ref_id:N]``: "keep" (default), "renumber" in order of appearance (the source nodes
            come in that order then), or "strip".
        seconds: Time that the check may take, within the request's own. Default 10.

    An answer that may yet change (``repair``, ``filtering``) is streamed in one piece, after its check.

    Raises:
        ConfigurationError: A value doesn't fit.
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
        """Whether the answer is known only after its check."""
        return self.repair is not None or self.filtering is not None


def as_grounding(value: Grounding | bool | None) -> Grounding | None:
    """Take settings, or whether to check at all; None and True are the defaults.

    Raises:
        ConfigurationError: It is something else.
    """
    if value is False:
        return None
    if value is None or value is True:
        return DEFAULT_GROUNDING
    if not isinstance(value, Grounding):
        raise ConfigurationError(f"grounding: expected Grounding(...), True or False, got {type(value).__name__}")
    return value


DEFAULT_GROUNDING: Final = Grounding()
