"""The text that stands in place of a withheld answer, in the question's language."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final

from llama_index_agentic_kb.schema.response import SkippedReason
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language

_NOTHING: Final = {SkippedReason.NO_RELEVANT_CONTENT, SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED}
_SCRIPTS: Final = {
    "japanese": re.compile("[\u3041-\u30ff]"),
    "korean": re.compile("[\u1100-\u11ff\uac00-\ud7ff]"),
    "chinese": re.compile("[\u3400-\u9fff]"),
}


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
    if given and given <= _NOTHING:
        return nothing
    return support if given == {SkippedReason.LOW_GROUNDED_ANSWER} else other
