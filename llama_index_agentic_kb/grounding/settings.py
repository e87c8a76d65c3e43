"""Settings for checking answers against their evidence, and the text in place of a withheld answer."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.grounding.citations import Markers
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, FilteringLevel
from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language

if TYPE_CHECKING:  # the scorers load when an answer is checked
    from llama_index_agentic_kb.grounding.scorers import ScorerLike

_EMPTY: Final = {SkippedReason.NO_RELEVANT_CONTENT, SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED}
_SCRIPTS: Final = {
    "japanese": re.compile("[\u3041-\u30ff]"),
    "korean": re.compile("[\u1100-\u11ff\uac00-\ud7ff]"),
    "chinese": re.compile("[\u3400-\u9fff]"),
}


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


@cache
def _texts() -> dict[str, list[str]]:
    """Return the texts by the language's name, and by its code."""
    texts = {}
    for line in Path(__file__).with_name("notices.txt").read_text(encoding="utf-8").splitlines()[1:]:
        names, *own = map(str.strip, line.split("|"))
        texts.update(dict.fromkeys(names.split(), own))
    return texts


def withheld_text(reasons: Collection[SkippedReason], question: str, language: str | None = None) -> str:
    """Return the text in place of a withheld answer; it says no more than its reasons do.

    Args:
        reasons: The reasons why the answer is withheld.
        question: The question, whose language the text has if it is one of twelve; else it is English.
        language: The language tag that was asked for, such as "de"; it takes precedence.
    """
    if language is None:
        script = next((name for name, characters in _SCRIPTS.items() if characters.search(question)), None)
        name = script or detect_language(re.findall(r"[^\W\d_]+", question.casefold()))
    else:
        name = language[:2].lower()
    nothing, support, other = _texts().get(name, _texts()[DEFAULT_LANGUAGE])
    given = set(reasons)
    if given and given <= _EMPTY:
        return nothing
    return support if given == {SkippedReason.LOW_GROUNDED_ANSWER} else other
