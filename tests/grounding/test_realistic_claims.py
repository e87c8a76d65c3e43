"""Claims as language models write them, labelled by hand: several facts, rounding, other formats, pronouns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, LexicalScorer, Premise
from tests.benchmarks.grounding import auroc

PAIRS: Final = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "realistic_pairs.jsonl").read_text(encoding="utf-8").splitlines()
]
OTHERS: Final = [
    Premise("The harbour of Lisbon was rebuilt in 1755 after an earthquake destroyed most of the city.", "Lisbon"),
    Premise("Photosynthesis turns light into chemical energy in plants; it takes place in chloroplasts.", "Plants"),
]
BEYOND: Final = {
    "gender": "whose wife it was is not read",
    "de": "German has no synonyms",
    "ordinal": "a pronoun's name and a country's are taken for exchanged",
    "century": "'dates back to' is no synonym of founding",
    "unable": "'A not, but B' in another order is taken for exchanged",
}
"""What the scorer gets wrong, and why."""


def score(pair: dict[str, Any]) -> float:
    found = LexicalScorer().judge([pair["claim"]], [Premise(pair["passage"], pair["title"]), *OTHERS])[0].score
    return 0.0 if found is None else found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["name"])
def test_realistic(pair: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """What a passage says in other words is supported, what it doesn't say is not."""
    if pair["name"] in BEYOND:
        request.applymarker(pytest.mark.xfail(reason=BEYOND[pair["name"]], strict=True))
    assert (score(pair) >= CITATION_THRESHOLD) == pair["supported"]


def test_told_apart() -> None:
    """Over all of them, those that it gets wrong included, the supported ones score higher."""
    scores = {kind: [score(pair) for pair in PAIRS if pair["supported"] is kind] for kind in (True, False)}
    assert auroc(scores[True], scores[False]) > 0.9
