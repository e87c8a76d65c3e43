"""Who does and to whom it is done: the sides of a verb, as if every sentence were in the active voice."""

from __future__ import annotations

from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis
from llama_index_agentic_kb.grounding.alignment.lexicon import BE_FORMS

__all__ = ["Sides"]


class Sides:
    """On which side of a verb a name stands, as if every sentence were in the active voice."""

    def __init__(self, claim: Analysis, source: Analysis) -> None:
        self._claim = claim
        self._source = source
        self._known: dict[tuple[int, int, int, int], bool] = {}
        self._sides: tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]] = ({}, {})

    def agree(self, verb: int, name: int, source_verb: int, source_name: int) -> bool:
        """Whether a name is on the same side of a verb in claim and source; of another name, it always is."""
        key = (verb, name, source_verb, source_name)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._agree(*key)
        return known

    def _agree(self, verb: int, name: int, source_verb: int, source_name: int) -> bool:
        claim, source = self._claim, self._source
        if claim.tokens[verb].name or source.tokens[source_verb].name:
            return True
        if source.sentence_of[source_verb] != source.sentence_of[source_name]:
            return True
        return self._side(0, claim, verb, name) == self._side(1, source, source_verb, source_name)

    def _side(self, which: int, text: Analysis, verb: int, name: int) -> int:
        known = self._sides[which]
        key = (verb, name)
        if key not in known:
            known[key] = _side(text, verb, name)
        return known[key]


_BY: Final = frozenset(["by", "von", "par", "durch"])
_PARTICIPLE: Final = ("ed", "en", "wn", "lt", "nt", "ught", "de", "ten", "t")
"""Endings that a participle may have, with "by" behind it."""
_REGULAR: Final = ("ed", "en", "wn")
"""Endings that it has, for one with "was" in front."""
_AGENT: Final = 8
"""Words within which "by" belongs to a verb before it."""


def _side(text: Analysis, verb: int, name: int) -> int:
    """Give -1 for a name that does what the verb says, 1 for one that it is done to."""
    tokens = text.tokens
    if name > verb:
        if any(tokens[at].word in _BY for at in range(max(verb + 1, name - 2), name)):
            return -1
        return 1
    return 1 if _is_passive(text, verb) else -1


def _is_passive(text: Analysis, verb: int) -> bool:
    """Whether a verb is in the passive voice: a form of "be" before it, or "by" soon behind it."""
    tokens = text.tokens
    word = tokens[verb].word
    if not word.endswith(_PARTICIPLE):
        return False
    sentence = tokens[verb].sentence
    behind = tokens[verb + 1 : verb + 1 + _AGENT]
    by = any(token.word in _BY and token.sentence == sentence for token in behind)
    be = any(token.word in BE_FORMS for token in tokens[max(0, verb - 3) : verb])
    return by or (be and word.endswith(_REGULAR))
