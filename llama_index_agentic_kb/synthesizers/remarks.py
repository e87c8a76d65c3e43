"""Tells a refined answer from a remark that there was nothing to refine.

Asked to repeat an answer that new passages don't change, models like to say just that instead: "The original answer
remains the same." Such a remark must not take the answer's place. The remarks known here are English ones; in other
languages it is left to the template, which asks for none.
"""

from __future__ import annotations

import re
from typing import Final

from llama_index_agentic_kb.grounding.citations import cited_ids

__all__ = ["RemarkGate", "is_remark"]

LONGEST: Final = 400
"""Characters; what is longer says more than that nothing changed."""
DECIDED: Final = 160
"""Characters after which a streamed text without a sign of a remark is taken for an answer."""

_EARLIER: Final = r"(?:original|existing|previous|earlier)\s+(?:\w+\s+)?(?:answer|response)|answer\s+so\s+far"
_CHANGE: Final = r"(?:refin|chang|updat|improv|modif|revis|adjust)\w*"
_REMARKS: Final = re.compile(
    rf"""
      (?:{_EARLIER})\b.{{0,60}}\b(?:remains?|stands?|holds?|still|unchanged|same|sufficient|correct|accurate|valid|
                                    complete|adequate|stays?|kept|fine|doesn|not)\b
    | \b(?:repeat|keep|retain|maintain)\w*\b.{{0,20}}(?:{_EARLIER})
    | \bno\s+(?:need|reason|necessity)\s+(?:to|for)\b.{{0,40}}\b{_CHANGE}
    | \bno\s+(?:further\s+|additional\s+)?{_CHANGE}\b.{{0,20}}\b(?:need|necessary|required|made)
    | \b(?:context|passages?|evidence|information)\b.{{0,60}}(?:\badds?\s+nothing\b|(?:\bnot|n['\u2019]t)\s+(?:\w+\s+)?
          (?:add|change|provide|contain|offer|give|affect|help|useful|relevant|related))
    | ^\W*(?:unchanged|same\s+answer|none|n/a|nothing\s+(?:new|changed|to\s+(?:add|refine))|no\s+changes?)\W*$
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_SIGNS: Final = re.compile(
    rf"{_EARLIER}|\b(?:refin|context|passage|evidence|additional|unchanged)|\bno\s+(?:further\s+)?{_CHANGE}",
    re.IGNORECASE,
)


def is_remark(text: str) -> bool:
    """Tell whether a refined answer only says that nothing changed. A text that cites, or is long, is an answer."""
    return len(text) <= LONGEST and not cited_ids(text) and bool(_REMARKS.search(text))


class RemarkGate:
    """Holds a streamed text back until it is clear that it is more than a remark.

    What is held back to the end was never told: the caller, who has the whole text, tells it or tells something else.
    """

    def __init__(self) -> None:
        self._held = ""
        self._open = False

    def feed(self, delta: str) -> str:
        """Take a piece and give what can be told now."""
        if self._open:
            return delta
        self._held += delta
        text = self._held
        answers = bool(cited_ids(text)) or len(text) > LONGEST
        if not answers and (len(text) < DECIDED or _SIGNS.search(text)):
            return ""
        self._open, self._held = True, ""
        return text
