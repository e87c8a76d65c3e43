"""Makes labelled claims from passages: supported ones that are reworded, and ones changed by kind.

A supported claim is a sentence of a passage (or two) in other words: synonyms, active for passive and back,
nominalisation, other formats of dates and numbers, clauses dropped, order changed, pronouns resolved. An unsupported
one is such a claim with one thing changed; where it can be, to something that the same passage says elsewhere, so that
no search for the changed word in the passage tells it. All by rule and by a seeded generator: the same passages give
the same claims. None of the scorer's word lists are used here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.grounding_changes import CHANGES, merge_facts
from tests.benchmarks.grounding_passages import Document
from tests.benchmarks.grounding_rewording import reworded_sentences

__all__ = ["KINDS", "LabelledClaim", "make_claims"]

KINDS: Final = ("numbers", "dates", "names", "negation", "units", "swapped entities", "merged facts")


@dataclass(frozen=True, slots=True)
class LabelledClaim:
    """A claim with its label.

    Args:
        text: The claim.
        kind: "supported", or what was changed.
        passages: Ids of the passages that it was made from.
        held_out: Whether it is of the part that is only reported on.
    """

    text: str
    kind: str
    passages: tuple[str, ...]
    held_out: bool


def make_claims(documents: Sequence[Document], *, most: int = 120, seed: int = 5) -> list[LabelledClaim]:
    """Make claims: at most so many supported ones, and of each kind as many as there can be up to that.

    Args:
        documents: Passages; with a title they are of what it names.
        most: Claims of a kind.
        seed: Of the generator.
    """
    chance = random.Random(seed)
    order = sorted(documents, key=lambda document: hashlib.sha256(f"{seed}{document.id}".encode()).hexdigest())
    found: dict[str, list[LabelledClaim]] = {kind: [] for kind in ("supported", *KINDS)}
    previous: tuple[Document, list[str]] | None = None
    for document in order:
        if all(len(claims) >= most for claims in found.values()):
            break
        claims = list(reworded_sentences(document, chance))
        if not claims:
            continue
        held_out = int(hashlib.sha256(document.id.encode()).hexdigest(), 16) % 2 == 1
        text = chance.choice(claims)
        _add(found, "supported", text, (document.id,), held_out, most)
        for kind, change in CHANGES.items():
            able = [changed for one in claims if (changed := change(one, document, chance)) is not None]
            if able:
                _add(found, kind, chance.choice(able), (document.id,), held_out, most)
        if previous is not None:
            merged = merge_facts(document, claims, previous, chance)
            if merged is not None:
                text, both = merged
                ids = (document.id, previous[0].id) if both else (document.id,)
                _add(found, "merged facts", text, ids, held_out, most)
        if document.title:
            previous = (document, claims)
    return [claim for claims in found.values() for claim in claims]


def _add(
    found: dict[str, list[LabelledClaim]], kind: str, text: str, ids: tuple[str, ...], held_out: bool, most: int
) -> None:
    if len(found[kind]) < most:
        found[kind].append(LabelledClaim(text, kind, ids, held_out))
