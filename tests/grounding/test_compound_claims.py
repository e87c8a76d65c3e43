"""Claims of several facts from several passages, true and minimally falsified, labelled by hand."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

import pytest

from llama_index_agentic_kb.grounding.alignment.clauses import clauses_of
from llama_index_agentic_kb.grounding.scorers import ClaimScore, LexicalScorer, Premise
from llama_index_agentic_kb.schema.grounding import Verdict

DATA: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "compound_claims.json").read_text(encoding="utf-8")
)
BEYOND: Final = {
    (6, "true"): "'parachuted into' is no synonym of landing, and another name stands nearer to 'lander'",
    (31, "false"): "a figure that is part of a name (R32) is not compared",
}
"""What the scorer gets wrong, and why."""


def premises(name: str) -> list[Premise]:
    given = DATA["sets"][name]
    if isinstance(given, dict):
        return [Premise(text, title) for title, text in given.items()]
    corpus = resources.files("llama_index_agentic_kb") / "corpus"
    return [_document((corpus / f"{path}.md").read_text(encoding="utf-8")) for path in given]


def _document(text: str) -> Premise:
    title, body = text.split("---", 2)[2].strip().split("\n", 1)
    return Premise(body.strip(), title.strip("# "))


def judged(number: int, kind: str) -> ClaimScore:
    claim = DATA["claims"][number]
    return LexicalScorer().judge([claim[kind]], premises(claim["set"]))[0]


@pytest.mark.parametrize("number", range(len(DATA["claims"])))
@pytest.mark.parametrize("kind", ["true", "false"])
def test_compound(number: int, kind: str, request: pytest.FixtureRequest) -> None:
    """What passages say between them is supported, and its falsified twin is not."""
    if (number, kind) in BEYOND:
        request.applymarker(pytest.mark.xfail(reason=BEYOND[number, kind], strict=True))
    found = judged(number, kind)
    assert (found.verdict is Verdict.SUPPORTED) == (kind == "true"), found


def test_parts_lead_to_the_passages_that_bear_them() -> None:
    """Each part's words are found in its own passage: both asteroids' diameters, and nothing else."""
    found = judged(1, "true")
    given = premises("asteroids")
    quotes = {
        given[one.premise].title: [span.of(given[one.premise].text) for span in one.spans] for one in found.evidence
    }
    assert set(quotes) == {"Bennu", "Ryugu"}
    assert any("490 m" in quote for quote in quotes["Bennu"])
    assert any("900 m" in quote for quote in quotes["Ryugu"])


def test_a_false_part_contradicts() -> None:
    """One wrong figure contradicts the whole claim, and only it is shown."""
    found = judged(12, "false")
    assert found.verdict is Verdict.CONTRADICTED
    assert {rival.claimed for rival in found.rivals} == {"1992"}


def test_a_part_without_support() -> None:
    """Where the passages are silent about one part, the claim is supported in part."""
    claim = "Low Tide was shot in Hammerfest, High Water in Esbjerg, and Silent Fjord had a budget of 9 million kroner."
    found = LexicalScorer().judge([claim], premises("people"))[0]
    assert found.verdict is Verdict.PARTIALLY_SUPPORTED


@pytest.mark.parametrize(
    ("claim", "parts"),
    [
        ("Bennu has a mean diameter of 490 m, Ryugu of 900 m.", ["Ryugu has a mean diameter of of 900 m"]),
        ("Oslo lies on the Lysaker, which is 6 km long, and has 700,000 inhabitants.", ["Lysaker is 6 km long"]),
        (
            "The music of Dusk is by Ann Lee; that of Dawn by Bo Ek.",
            ["The music of Dawn is by by Bo Ek"],
        ),
        ("Hewitt and McMillan beat Fletcher in 1967.", []),
    ],
)
def test_taken_apart(claim: str, parts: list[str]) -> None:
    """Parts are completed with what they share with the part before; one fact stays one."""
    told = [clause.text for clause in clauses_of(claim, "english")]
    assert told[0] == claim if not parts else set(parts) <= set(told)


@pytest.mark.parametrize(("digit", "is_sound"), [("one", True), ("three", False)])
def test_conclusions_are_worked_out(digit: str, is_sound: bool) -> None:
    """A digit that a claim reads out of a figure of its own is checked by the figure, not by the passages."""
    claim = f"Zarya flew on the 411 version, where the second digit is the number of boosters, so {digit}."
    assert all(clause.sound for clause in clauses_of(claim, "english")) == is_sound
