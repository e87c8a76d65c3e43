"""The features and the shipped cross-encoder: what they support, where they abstain, what they refuse to load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.grounding.features import numbers_of
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.grounding.scorers import (
    BETTER,
    CrossEncoderScorer,
    LexicalScorer,
    LLMJudge,
    Premise,
    SmallScorer,
    as_scorer,
    downloaded,
)
from llama_index_agentic_kb.grounding.scorers.lexical import WEIGHTS, Row, SmallModel, calibration
from llama_index_agentic_kb.schema.grounding import Verdict
from llama_index_agentic_kb.testing import ScriptedLLM

OTHERS = [
    Premise("The harbour of Lisbon was rebuilt in 1755 after an earthquake destroyed most of the city.", "Lisbon"),
    Premise("Photosynthesis turns light into chemical energy in plants; it takes place in chloroplasts.", "Plants"),
]
VISION = Premise(
    "Avengers: Age of Ultron is a 2015 American film. Paul Bettany plays the Vision, an android made by Ultron. "
    "Robert Downey Jr. plays Tony Stark.",
    "Avengers: Age of Ultron",
)
DAM = Premise(
    "Its construction was the result of a massive effort involving thousands of workers, and cost over 100 lives. The "
    "dam is 221.4 m high and its crest is 379 m long. The reservoir behind it, Lake Mead, is the largest in the United "
    "States by volume when full."
)
REFUNDS = Premise(
    "Customers may return any item within 30 days of delivery for a full refund, provided that it is unused and in its "
    "original packaging. Shipping costs are not refunded. Gift cards cannot be returned. For orders above $50 return "
    "shipping is free."
)
LATIN = {
    "dutch": ("De garantie dekt waterschade niet. Zij duurt 24 maanden.", "De garantie dekt waterschade."),
    "portuguese": ("A garantia não cobre danos causados pela água.", "A garantia cobre danos causados pela água."),
    "russian": ("Гарантия не покрывает ущерб от воды и огня.", "Гарантия покрывает ущерб от воды и огня."),
    "german": ("Die Garantie deckt Wasserschäden nicht ab.", "Die Garantie deckt Wasserschäden ab."),
}
OTHER = {
    "chinese": ("保修期为24个月。", "保修期为36个月。", "本产品的保修期是24个月。"),
    "japanese": ("保証期間は24か月です。", "保証期間は36か月です。", "保証は24か月続きます。"),
    "thai": ("การรับประกันมีอายุ 24 เดือน", "การรับประกันมีอายุ 36 เดือน", "รับประกันนาน 24 เดือน"),
    "korean": ("보증은 물 피해를 보장하지 않습니다.", "", "보증은 물 피해를 보장합니다."),
    "arabic": ("الضمان لا يغطي أضرار المياه.", "", "الضمان يغطي أضرار المياه."),
}


def verdict(claim: str, *premises: Premise) -> Verdict:
    return SmallScorer().judge([claim], [*premises, *OTHERS])[0].verdict


@pytest.mark.parametrize("language", LATIN)
def test_negation_in_other_languages(language: str) -> None:
    """A sentence without the passage's negation is not supported; the sentence itself is, by its own passage alone."""
    passage, claim = LATIN[language]
    assert verdict(claim, VISION) is not Verdict.SUPPORTED
    assert verdict(claim, Premise(passage)) is not Verdict.SUPPORTED
    assert verdict(passage.split(".")[0] + ".", Premise(passage)) is Verdict.SUPPORTED


@pytest.mark.parametrize("language", OTHER)
def test_unread_languages_are_not_checkable(language: str) -> None:
    """Numbers are compared, the same words are found, and all else is not checkable: never supported."""
    passage, wrong, reworded = OTHER[language]
    assert verdict(passage, Premise(passage)) is Verdict.SUPPORTED
    assert verdict(reworded, Premise(passage)) is Verdict.NOT_CHECKABLE
    assert not wrong or verdict(wrong, Premise(passage)) is Verdict.UNSUPPORTED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Here is what I found.", Verdict.NOT_CHECKABLE),
        ("The sources do not say who built it.", Verdict.NOT_CHECKABLE),
        ("The passages do not say which network broadcast The Chisholms.", Verdict.NOT_CHECKABLE),
        ("The passages do not say who made Ultron, but Bob Hope sold it in Oslo in 1931.", Verdict.UNSUPPORTED),
        ("The passages do not say who made Ultron, and it cost 5 million dollars in 1999.", Verdict.UNSUPPORTED),
        ("Let me know if you need more.", Verdict.NOT_CHECKABLE),
        ("No.", Verdict.NOT_CHECKABLE),
        ("Yes.", Verdict.NOT_CHECKABLE),
        ("Ultron.", Verdict.SUPPORTED),
        ("If you have a fever above 39 C, take ten tablets.", Verdict.UNSUPPORTED),
    ],
)
def test_what_speaks_of_the_answer_is_left_out(text: str, expected: Verdict) -> None:
    """Only once nothing supports it, and only without a number or a name, unless it is a gap of the evidence."""
    assert verdict(text, VISION) is expected


READ = [
    ("The dam is 221.4 m high.", DAM, Verdict.SUPPORTED),
    ("Lake Mead is behind it.", DAM, Verdict.SUPPORTED),
    ("Shipping costs are not refunded.", REFUNDS, Verdict.SUPPORTED),
    ("The Vision in Avengers: Age of Ultron is played by Paul Bettany.", VISION, None),
    ("You can return items within 30 days of delivery.", REFUNDS, None),
]
NOT_SUPPORTED = [
    ("The Vision in Avengers: Age of Ultron is played by Robert Downey Jr.", VISION),
    ("The set A ⊂ B is shown in the lecture.", Premise("The set A ⊃ B is shown in the lecture.")),
    ("The test of the pump has the result ✓.", Premise("The test of the pump has the result ✗.")),
    ("The symbol ∀ means that the statement holds.", Premise("The symbol ∃ means that the statement holds.")),
    ("The founder of the company is 鹏婷 of Beijing.", Premise("The founder of the company is 磊娟 of Beijing.")),
]


@pytest.mark.parametrize(("claim", "premise", "expected"), READ, ids=range(len(READ)))
def test_what_a_passage_says_is_supported_or_at_least_not_contradicted(
    claim: str, premise: Premise, expected: Verdict | None
) -> None:
    """A short claim by its own sentence, whatever stands beside it; also in another order of words."""
    found = SmallScorer().judge([claim], [premise])[0].verdict
    assert found is not Verdict.CONTRADICTED
    assert expected in (None, found)


@pytest.mark.parametrize(("claim", "premise"), NOT_SUPPORTED, ids=range(len(NOT_SUPPORTED)))
def test_what_differs_in_a_word_or_sign_is_not_supported(claim: str, premise: Premise) -> None:
    """Characters that the model has no pieces for are not all the same to it."""
    assert SmallScorer().judge([claim], [premise])[0].verdict is not Verdict.SUPPORTED


def test_two_passages_bear_a_claim_together() -> None:
    """A claim whose facts stand in two passages leads to both."""
    one = Premise("Marie Curie was born in Warsaw in 1867.", "Marie Curie")
    two = Premise("Warsaw is the capital of Poland and lies on the Vistula river.", "Warsaw")
    [score] = SmallScorer().judge(
        ["Marie Curie was born in Warsaw, which lies on the Vistula river."], [one, two, *OTHERS]
    )
    assert {evidence.premise for evidence in score.evidence[:2]} == {0, 1}


def test_scorers_by_name() -> None:
    """One word chooses the judge; what it is not is said, and nothing is looked for on a network."""
    own = LexicalScorer()
    assert as_scorer(own) is own
    assert isinstance(as_scorer("auto"), SmallScorer)
    assert type(as_scorer("lexical")) is LexicalScorer
    assert isinstance(as_scorer(ScriptedLLM([])), LLMJudge)

    class Pairs:
        def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
            return [0.5 for _ in pairs]

    assert isinstance(as_scorer(Pairs()), CrossEncoderScorer)
    with pytest.raises(ConfigurationError, match="'lexcial' is unknown; known are auto, lexical, small"):
        as_scorer("lexcial")


def test_auto_takes_what_was_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best of the larger models that lies in the cache; nothing is asked of a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert downloaded() is None
    for name in BETTER[3:1:-1]:
        snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
        assert downloaded() == name


def test_the_ledger_names_its_scorer_and_survives_a_missing_one() -> None:
    """The account says what judged; a model that is not there costs the check, not the answer."""
    sources = [GroundingSource(VISION.text, reference_id="0", node_id="a")]
    assert run(ground("Mars is red.", sources)).scorer == "small"
    assert "could not be loaded" in run(ground("Mars is red.", sources, "no-such/model")).warnings[0]


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    """A file that is not the one that was measured is not loaded."""
    for name in calibration()["digests"]:
        shutil.copy(WEIGHTS / name, tmp_path / name)
    SmallModel(tmp_path, calibration()["digests"])
    for name in calibration()["digests"]:
        with (tmp_path / name).open("ab") as file:
            file.write(b"x")
        with pytest.raises(ConfigurationError, match=f"{name}: its digest is"):
            SmallModel(tmp_path, {name: calibration()["digests"][name]})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,500 people on 3 May 1999", {"1500", "3", "1999"}),
        ("3.50 of 1.500", {"3.5", "1500"}),
        ("you may march", set()),
    ],
)
def test_numbers_have_one_form(text: str, found: set[str]) -> None:
    """Separators of thousands and zeros at the end are no part of it."""
    assert numbers_of(text) == found


def test_halves_of_surrogate_pairs_are_read() -> None:
    """A claim that holds what no encoding can hold is scored, and costs no other claim its score."""
    broken, whole = SmallScorer().judge(["The dam is \ud800 high.", "The dam is 221.4 m high."], [DAM])
    assert whole.verdict is Verdict.SUPPORTED
    assert broken.score is not None


class Reader(SmallModel):
    """A model whose logits are a function of the evidence; it counts the pairs that it reads."""

    def __init__(self, read: Callable[[str], Row]) -> None:
        self._read = read
        self.pairs: list[tuple[str, str]] = []

    def logits(self, pairs: Sequence[tuple[str, str]], *, deadline: float | None = None) -> list[Row]:
        self.pairs += pairs
        return [self._read(evidence) for evidence, _ in pairs]


def test_a_sentence_that_does_not_deny_a_claim_keeps_it_from_being_contradicted() -> None:
    """Another window may deny it, after a neutral one with the sentence that has all of its words."""
    opened = "The old stone bridge over the river Avon in Bath was opened by Mayor John Smith in 1912 for carts."
    passages = [
        f"It was the pride of the town. {opened}",
        "Bath has many rivers. No bridge there was opened by a mayor.",
    ]
    claim = "The stone bridge over the river Avon in Bath was opened by Mayor John Smith in 1912."
    reader = Reader(lambda evidence: (0.0, 1.0, -4.0) if "1912" in evidence else (4.0, 0.0, 1.0))
    [score] = SmallScorer(reader).judge([claim], [Premise(passage) for passage in passages])
    assert score.verdict is not Verdict.CONTRADICTED


def test_a_claim_without_a_shared_word_is_read() -> None:
    """At least by the first windows, however many passages there are."""
    reader = Reader(lambda _: (0.0, 0.0, 4.0))
    premises = [Premise(f"Pump {number} is made of steel in a small town of Norway.") for number in range(12)]
    [score] = SmallScorer(reader).judge(["Yes, both come from Germany."], premises)
    assert reader.pairs
    assert score.verdict is Verdict.SUPPORTED


@pytest.mark.parametrize(("margin", "readings"), [(4.0, 1), (1.0, 2)])
@pytest.mark.parametrize("count", [1, 60])
def test_a_sentence_by_itself_is_read_first(margin: float, readings: int, count: int) -> None:
    """Its window is where it does not clearly support the claim, also among many claims."""
    reader = Reader(lambda _: (0.0, 0.0, margin))
    sentences = [f"The bridge of town {number} was opened by Mayor Smith in {1800 + number}." for number in range(60)]
    claims = [sentence.replace("The", "A") for sentence in sentences[:count]]
    SmallScorer(reader).judge(claims, [Premise(" ".join(sentences))])
    assert [evidence for evidence, _ in reader.pairs[:count]] == sentences[:count]
    assert len(reader.pairs) == readings * count


def test_a_check_writes_nothing_outside(tmp_path: Path) -> None:
    """Loading the model leaves no file in the user's home: onnxruntime's telemetry is off."""
    code = "from llama_index_agentic_kb.grounding import check_grounding; check_grounding('A is B.', ['A is B.'])"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_late_checks_are_given_up() -> None:
    """The deadline is looked at between claims and between batches."""
    for scorer in (LexicalScorer(), SmallScorer()):
        with pytest.raises(DeadlineExceededError):
            scorer.judge(["Mars is red.", "It is far."], [VISION], deadline=time.monotonic() - 1)
