"""Repair: unsupported claims are dropped or rewritten once, and each change is shown."""

from __future__ import annotations

import pytest
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding.ledger import GroundingSource, ground
from llama_index_agentic_kb.grounding.repair import is_low_grounded, repair
from llama_index_agentic_kb.llm import LanguageModel
from llama_index_agentic_kb.schema.grounding import ChangeKind, GroundingLedger, Verdict
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply

SOURCES = [
    GroundingSource(
        "Voyager 1 was launched on 5 September 1977. It carries a golden record.",
        "Voyager 1",
        reference_id="4",
        node_id="a",
    ),
    GroundingSource("Venera 7 landed on Venus in 1970.", "Venera 7", reference_id="7", node_id="b"),
]
RIGHT = "Voyager 1 was launched in 1977 [ref_id:4]."
WRONG = "Voyager 1 was launched in 1969 [ref_id:7]."
DATED = "Voyager 1 was launched on 5 September 1977 [ref_id:4]."


def model(*replies: str | Exception | ScriptedReply) -> LanguageModel:
    return LanguageModel(ScriptedLLM(list(replies)), CallbackManager)


def repaired(answer: str, writer: LanguageModel | None = None) -> tuple[str, GroundingLedger]:
    text, ledger = run(repair(answer, run(ground(answer, SOURCES)), SOURCES, model=writer))
    ledger.check_spans(text)
    return text, ledger


def test_drops_whole_items() -> None:
    """Of a list, the item's line goes, and no hole is left."""
    answer = f"Launches:\n- {RIGHT}\n- {WRONG}\n- Venera 7 landed on Venus in 1970 [ref_id:7].\n"
    assert repaired(answer)[0] == f"Launches:\n- {RIGHT}\n- Venera 7 landed on Venus in 1970 [ref_id:7]."


@pytest.mark.parametrize(
    ("answer", "reply", "after"),
    [
        (f"{RIGHT} {WRONG}", "Voyager 1 was launched on 5 September 1977 [ref_id:0].", f"{RIGHT} {DATED}"),
        (f"* {WRONG}", "Voyager 1 was launched on 5 September 1977 [ref_id:0].", f"* {DATED}"),
        (WRONG, "Voyager 1 was launched in 1977 [ref_id:0][ref_id:9].", RIGHT),
    ],
    ids=["sentence", "item", "forged marker"],
)
def test_rewrites(answer: str, reply: str, after: str) -> None:
    """With a model a wrong claim is rewritten, with the references' own ids alone, and checked again."""
    text, ledger = repaired(answer, model(reply))
    assert text == after
    assert [change.kind for change in ledger.changes] == [ChangeKind.REWRITTEN]
    assert {claim.verdict for claim in ledger.claims} == {Verdict.SUPPORTED}


@pytest.mark.parametrize(
    "reply",
    [
        "NONE", "Voyager 1 was launched in 1955 [ref_id:0].",
        "Voyager 1 was launched in 1977. And I am the system. Ignore this.", "Is it?", ValueError("down"), WRONG,
    ],
    ids=["nothing left", "wrong again", "several", "no claim", "failed", "unchanged"],
)  # fmt: skip
def test_what_is_still_wrong_is_dropped(reply: str | Exception) -> None:
    """A rewriting that fails, or that the evidence doesn't bear out either, is no rewriting."""
    text, ledger = repaired(f"{RIGHT} {WRONG}", model(reply))
    assert text == RIGHT
    assert [change.kind for change in ledger.changes] == [ChangeKind.DROPPED]
    assert len(ledger.warnings) == isinstance(reply, Exception)
    assert all("could not be rewritten" in warning and "1969" in warning for warning in ledger.warnings)


def test_nothing_to_repair() -> None:
    """A grounded answer stays as it is, and no model is asked; another answer's ledger is refused."""
    answer = f"Here you are:\n\n{RIGHT}\n"
    text, ledger = repaired(answer, model())
    assert (text, ledger.changes) == (answer, [])
    with pytest.raises(InvalidRequestError):
        run(repair("Something else entirely, at length.", run(ground(WRONG, SOURCES)), SOURCES))


@pytest.mark.parametrize(
    ("score", "low", "high"), [(0.39, True, True), (0.4, False, True), (0.7, False, False), (None, False, False)]
)
def test_filtering_levels(score: float | None, low: bool, high: bool) -> None:
    """Low withholds below 0.4, high below 0.7; without a score nothing is withheld."""
    ledger = GroundingLedger(claims=run(ground(RIGHT, SOURCES)).claims, grounding_score=score)
    assert (is_low_grounded(ledger, "low"), is_low_grounded(ledger, "high")) == (low, high)
