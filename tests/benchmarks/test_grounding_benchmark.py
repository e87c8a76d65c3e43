"""The grounding benchmark makes what it says, the same each time, and its own measure is right."""

from __future__ import annotations

import random
import re

import pytest

from tests.benchmarks.grounding import alignment, auroc, measure, speed, substring, token_coverage
from tests.benchmarks.grounding_changes import CHANGES
from tests.benchmarks.grounding_claims import KINDS, LabelledClaim, make_claims
from tests.benchmarks.grounding_passages import Document

PEOPLE = ("Ann Berger", "Carl Dane", "Eva Frost", "Gus Hart", "Ida Jonas", "Kurt Lind", "Mia Noble", "Olaf Pretz")
CITIES = ("Oslo", "Lyon", "Graz", "Turin")
DOCUMENTS = [
    Document(
        f"d{number}",
        name,
        f"{name} (born {number + 3} March 19{number + 30}) is a director from {CITIES[number % 4]}. "
        f"{name} directed Blue River{number} in 19{number + 60} for {PEOPLE[(number + 3) % 8]}. "
        f"{name} married {PEOPLE[(number + 1) % 8]} in 19{number + 55}, and they moved to {CITIES[(number + 1) % 4]}. "
        f"The house of {name} stood in a village of {number + 40} people, 12 km from the sea, in 19{number + 70}.",
    )
    for number, name in enumerate(PEOPLE)
]


def test_made_by_rule() -> None:
    """The same passages give the same claims, of several kinds, in two parts that share no passage."""
    claims = make_claims(DOCUMENTS)
    assert claims == make_claims(DOCUMENTS)
    assert {claim.kind for claim in claims} >= {"supported", "dates", "names", "negation"}
    first = {one for claim in claims if not claim.held_out for one in claim.passages[:1]}
    assert not first & {one for claim in claims if claim.held_out for one in claim.passages[:1]}


def test_none_is_verbatim() -> None:
    """No supported claim stands in its passage."""
    texts = {document.id: document.text for document in DOCUMENTS}
    for claim in make_claims(DOCUMENTS):
        assert claim.text.rstrip(".") not in texts[claim.passages[0]]


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_changes_one_thing(kind: str) -> None:
    """Each change changes the claim."""
    claim = "In 1961, Ann Berger directed Blue River for Gus Hart in Oslo, 12 km from the 43 people."
    changed = CHANGES[kind](claim, DOCUMENTS[0], random.Random(2))
    assert changed is not None
    assert changed != claim
    assert len(re.findall(r"\w+", changed)) <= len(re.findall(r"\w+", claim)) + 2


def test_auroc() -> None:
    """The area is 1 where all is told apart, 0.5 where nothing is, and ties count half."""
    assert auroc([0.9, 0.8], [0.1, 0.2]) == 1.0
    assert auroc([0.1], [0.9]) == 0.0
    assert auroc([0.5, 0.5], [0.5]) == 0.5
    assert auroc([0.3, 0.9], [0.5, 0.1]) == 0.75


def test_measures_signals() -> None:
    """The scorer tells a changed date from a right one where the simpler signals don't."""
    claims = [
        LabelledClaim("The birth of Ann Berger was on 1930-03-03.", "supported", ("d0",), held_out=True),
        LabelledClaim("The birth of Ann Berger was in 1960.", "dates", ("d0",), held_out=True),
    ]
    signals = {"alignment": alignment, "token coverage": token_coverage, "substring": substring}
    every, dates = measure(claims, DOCUMENTS, signals)
    assert (every.kind, dates.kind, dates.count) == ("all", "dates", 1)
    assert dates.values["alignment"] == 1.0
    assert dates.values["token coverage"] == 0.0
    assert set(KINDS) >= {dates.kind}


def test_speed_is_measured() -> None:
    """What is kept of passages is not made again."""
    cold, warm = speed(DOCUMENTS, ["Ann Berger directed Blue River0."], runs=2)
    assert cold > 0
    assert warm > 0
