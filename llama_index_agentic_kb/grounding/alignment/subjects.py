"""Whether the source has another name where a claim's first word stands: "Google bought", "Microsoft acquired"."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, Item
from llama_index_agentic_kb.grounding.alignment.matching import Match
from llama_index_agentic_kb.grounding.alignment.slots import Slot

__all__ = ["other_subject"]

_BESIDE: Final = 2
"""Words of no content between a name and its verb ("has also won")."""
_UNSURE: Final = 0.3
"""Score where the source's own word is its sentence's first, and so may be no name either."""
_ENDINGS: Final = ("s", "ing", "ed", "ly")
"""Of words at a sentence's start that are seldom names."""


def other_subject(
    claim: Analysis, source: Analysis, matches: Sequence[Match], sentences: Collection[int]
) -> Slot | None:
    """Give the slot of a claim's first word, where it may be a name, is not told of, and another does the same there.

    The first word has a capital anyway; so it counts as a name only where a name stands right before the same verb.

    Args:
        claim: The claim.
        source: The source.
        matches: Where the claim's content words stand in the source.
        sentences: The source's sentences that bear the claim.
    """
    first = claim.tokens[0] if claim.tokens else None
    if first is None or not first.content or first.name or first.word.endswith(_ENDINGS) or len(matches) < 2:  # noqa: PLR2004
        return None
    subject, verb = matches[0], matches[1]
    if subject.at != 0 or subject.places or subject.opposite or verb.at > 1 + _BESIDE or claim.tokens[verb.at].name:
        return None
    claimed = {token.stem for token in claim.tokens}
    for place in verb.places:
        if source.sentence_of[place] not in sentences:
            continue
        rival = _name_before(place, source)
        if rival is not None and not any(
            source.tokens[at].stem in claimed for at in range(rival.first, rival.last + 1)
        ):
            score = 0.0 if source.tokens[rival.last].name else _UNSURE
            return Slot(Item("name", 0, 0, (first.word,)), score, None, rival, source.sentence_of[place])
    return None


def _name_before(verb: int, source: Analysis) -> Item | None:
    """Give the name that a verb follows, with nothing but words of no content between them."""
    at = verb - 1
    while at >= 0 and verb - at <= _BESIDE and not source.tokens[at].content:
        at -= 1
    if at < 0 or source.sentence_of[at] != source.sentence_of[verb]:
        return None
    between = source.text[source.tokens[at].end : source.tokens[at + 1].start]
    name = next((item for item in source.items if item.kind == "name" and item.last == at), None)
    if name is None and _may_be_name(source, at):
        name = Item("name", at, at, (source.tokens[at].word,))
    return name if between.isspace() else None


def _may_be_name(source: Analysis, at: int) -> bool:
    """Whether a sentence's first word may be a name: by its capital, and by its ending."""
    token = source.tokens[at]
    opens = at == source.firsts[token.sentence]
    return opens and source.text[token.start].isupper() and not token.word.endswith(_ENDINGS)
