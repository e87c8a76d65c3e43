"""The ledger: every claim with its reference, place and words; wrong markers and conflicts; and repair by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.grounding import ledger as ledgers
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.ledger import GroundingSource, _weigh, ground
from llama_index_agentic_kb.grounding.repair import is_low_grounded, repair
from llama_index_agentic_kb.grounding.scorers import ClaimScore, Evidence, Premise, Rival
from llama_index_agentic_kb.llm import LanguageModel
from llama_index_agentic_kb.schema.grounding import ChangeKind, ClaimFlag, ConflictKind, GroundingLedger, Span, Verdict
from llama_index_agentic_kb.testing import ScriptedLLM, ScriptedReply


def source(number: str, title: str, text: str, date: str | None = None) -> GroundingSource:
    return GroundingSource(text, title, reference_id=number, node_id=f"node-{number}", date=date)


APOLLO = "Apollo 11 was a mission of NASA. It landed on the Moon on 20 July 1969. It carried three astronauts."
VOYAGER = "Voyager 1 was launched on 5 September 1977. It carries a golden record."
SOURCES = [
    source("0", "Apollo 11", APOLLO, "1970-01-01"),
    source("1", "Voyager 1", VOYAGER),
    source("2", "Apollo 11", "Apollo 11 landed on the Moon on 21 July 1969.", "1999-05-05"),
]


def ledger(answer: str, sources: Sequence[GroundingSource] = SOURCES[:2]) -> GroundingLedger:
    found = run(ground(answer, sources))
    found.check_spans(answer)
    return found


LAUNCHED = "Voyager 1 was launched on 5 September 1977 [ref_id:1]"
RECORD = "Voyager 1 carries a golden record [ref_id:1]."
LANDED = "Apollo 11 landed on the Moon on 20 July 1969 [ref_id:0]."


@pytest.mark.parametrize(
    ("answer", "supported"),
    [
        (f"20 July 1969. {LANDED}", [True, True]),
        (f"20 July 1969. {RECORD} {LANDED}", [True, True, True]),
        (f"5 September 1977. {LANDED}", [False, True]),
        ("20 July 1969. Apollo 11 sank in the sea on 20 July 1969 [ref_id:0].", [False, False]),
        (f"Apollo 11 carried astronauts. {RECORD}", [True, True]),
        (f"{LAUNCHED}, and {LANDED}", [True]),
        (f"{LAUNCHED}, and Apollo 11 landed on the Moon on 20 July 1972 [ref_id:0].", [False]),
        (f"{LAUNCHED} but the passages do not mention that it exploded.", [False]),
    ],
    ids=["value", "value of a later sentence", "another value", "value of what is wrong", "short sentence", "two parts",
         "a wrong part", "no gap but a statement"],
)  # fmt: skip
def test_what_is_supported(answer: str, supported: list[bool]) -> None:
    """A bare value as far as a cited sentence that repeats it; a claim as far as its weakest part."""
    assert [claim.verdict is Verdict.SUPPORTED for claim in ledger(answer).claims] == supported


def test_after_the_deadline_claims_are_not_scored() -> None:
    """A short answer is split all the same: a claim that is not listed would count as borne out."""
    found = run(ground("Apollo 11 is tall.", SOURCES, deadline=time.monotonic() - 1))
    assert [claim.flags for claim in found.claims] == [[ClaimFlag.NOT_SCORED]]


def test_score_is_the_mean_of_what_needs_a_check() -> None:
    """Courtesy has no score and no supports; the grounding score is the mean of the others, None without any."""
    found = ledger("Here is what I found. Voyager 1 was launched in 1977. Voyager 1 was launched in 1969.")
    courtesy, right, wrong = found.claims
    assert (courtesy.verdict, courtesy.score, courtesy.supports) == (Verdict.NOT_CHECKABLE, None, [])
    assert wrong.verdict in (Verdict.CONTRADICTED, Verdict.UNSUPPORTED)
    assert found.grounding_score == ((right.score or 0) + (wrong.score or 0)) / 2
    assert ledger("Here is what I found.").grounding_score is None
    assert ledger("").claims == []
    [claim] = ledger("Mars is red [ref_id:3].", []).claims
    assert (claim.verdict, claim.score) == (Verdict.UNSUPPORTED, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "Voyager 1 was launched on 5 September 1977 [ref_id:7], and it carries a golden record [ref_id:8].",
        "According to [ref_id:1], Voyager 1 was launched on 5 September 1977, and, as [ref_id:1] says, it flies.",
    ],
)
def test_markers_that_name_nothing_or_stand_before_take_nothing_away(text: str) -> None:
    """A part is then held against all references, or the sentence is taken as a whole."""
    [claim] = ledger(text).claims
    assert claim.verdict in (Verdict.SUPPORTED, Verdict.PARTIALLY_SUPPORTED)


def test_the_parts_of_a_claim_name_their_references() -> None:
    """The supports of a claim with two markers are of both references."""
    [claim] = ledger(f"{LAUNCHED}, and {LANDED}").claims
    assert {one.reference_id for one in claim.supports} == {"0", "1"}


def test_a_higher_threshold_holds_for_parts_too() -> None:
    """Below the caller's threshold a claim with several markers is flagged."""
    [claim] = run(ground(f"{LAUNCHED}, and {LANDED}", SOURCES[:2], threshold=0.99)).claims
    assert ClaimFlag.CITED_WITHOUT_SUPPORT in claim.flags


@pytest.mark.parametrize(("verdict", "score"), [(Verdict.SUPPORTED, 0.65), (Verdict.UNSUPPORTED, 0.1)])
def test_a_claim_is_contradicted_only_with_a_part(verdict: Verdict, score: float) -> None:
    """What the whole is called does not outweigh parts that their passages support."""
    whole = ClaimScore(0.2, Verdict.CONTRADICTED)
    _weigh(whole, [ClaimScore(0.67, Verdict.SUPPORTED), ClaimScore(score, verdict)], by_parts=True)
    assert (whole.verdict is Verdict.CONTRADICTED) is (verdict is Verdict.UNSUPPORTED)


def test_a_judge_is_not_asked_again_for_what_it_has_found() -> None:
    """Its calls cost money: the parts of a claim whose references bear it are not judged."""
    asked: list[str] = []

    def judge(claim: Claim, premises: Sequence[Premise]) -> ClaimScore:
        asked.append(claim.plain)
        return ClaimScore(0.9, Verdict.SUPPORTED, [Evidence(at, 0.9, ()) for at in range(len(premises))])

    run(ground("Voyager 1 flew [ref_id:1], and Apollo 11 landed [ref_id:0].", SOURCES[:2], Judge(judge)))
    assert len(asked) == 1


def test_what_the_passages_do_not_say_is_no_part_of_a_claim() -> None:
    """A last clause on what the evidence lacks does not change a claim's score."""
    [plain] = ledger(f"{LAUNCHED}.").claims
    [longer] = ledger(f"{LAUNCHED}, but the passages do not say from where it was launched.").claims
    assert (longer.verdict, longer.score) == (plain.verdict, plain.score)


class Judge:
    """A scorer that is a function of a claim and the premises."""

    name = "judge"

    def __init__(self, judge: Callable[[Claim, Sequence[Premise]], ClaimScore]) -> None:
        self._judge = judge

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        return [self._judge(claim, premises) for claim in claims]


@pytest.mark.parametrize("count", [0, 1])
def test_claims_that_a_scorer_leaves_out_are_not_scored(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that returns fewer scores than claims has judged the first ones; the others are flagged, and counted."""
    judge = Judge(lambda claim, _: ClaimScore(0.0, Verdict.UNSUPPORTED))
    whole = judge.score

    async def score(claims: Sequence[Claim], *given: Any, **options: Any) -> list[ClaimScore]:
        return (await whole(claims, *given, **options))[:count]

    monkeypatch.setattr(judge, "score", score)
    found = run(ground("Apollo 11 is tall. Mars is red.", SOURCES, judge))
    assert [claim.flags for claim in found.claims][count:] == [[ClaimFlag.NOT_SCORED]] * (2 - count)
    assert found.warnings == [f"{2 - count} of 2 claims were not judged: the scorer left them out"]


def test_a_claim_that_was_not_judged_says_nothing_of_others() -> None:
    """A bare value takes the score of the sentence that repeats it, if that sentence has one."""

    class First(Judge):
        async def score(self, *given: Any, **options: Any) -> list[ClaimScore]:
            return (await super().score(*given, **options))[:1]

    judge = First(lambda *_: ClaimScore(0.9, Verdict.SUPPORTED, [Evidence(0, 0.9, (Span(start=0, end=5),))]))
    found = run(ground("Graz. He was born in Graz [ref_id:0].", SOURCES, judge))
    assert [claim.verdict for claim in found.claims] == [Verdict.SUPPORTED, Verdict.NOT_CHECKABLE]


@pytest.mark.parametrize(("second", "wrong"), [("0", []), ("2", ["2"])])
def test_a_marker_stands_for_what_is_before_it(second: str, wrong: list[str]) -> None:
    """In a sentence of several facts a reference need bear its own alone; one that does not is still told."""
    text = f"Voyager 1 was launched on 5 September 1977 [ref_id:1], and it landed on 20 July 1969 [ref_id:{second}]."

    def parts(claim: Claim, premises: Sequence[Premise]) -> ClaimScore:
        span = (Span(start=0, end=5),)
        if len(premises) > 1:
            return ClaimScore(0.9, Verdict.SUPPORTED, [Evidence(1, 0.9, span)])
        borne = "20 July" in premises[0].text and "20 July" in claim.plain
        return ClaimScore(0.5, Verdict.PARTIALLY_SUPPORTED if borne else Verdict.UNSUPPORTED, [Evidence(0, 0.5, span)])

    [claim] = run(ground(text, SOURCES, Judge(parts))).claims
    assert (claim.cited, claim.misattributed) == (["1", second], wrong)


def test_missing_and_empty_citations() -> None:
    """A supported claim without a marker, a marked one that nothing supports, and a wrong marker are told apart."""
    [claim] = ledger("Voyager 1 carries a golden record [ref_id:0][ref_id:1].").claims
    assert (claim.cited, claim.misattributed, claim.flags) == (["0", "1"], ["0"], [ClaimFlag.MISATTRIBUTED])
    uncited, unsupported = ledger("Voyager 1 carries a golden record. Bananas are yellow fruits [ref_id:0].").claims
    assert uncited.flags == [ClaimFlag.UNCITED]
    assert unsupported.flags == [ClaimFlag.CITED_WITHOUT_SUPPORT]
    assert unsupported.supports == []


MARS, MADE = "landed on Mars in 1980 [ref_id:1].", "and it is made of cheese [ref_id:1]."


@pytest.mark.parametrize(
    ("answer", "lacking"),
    [
        (f"Voyager 1 was launched in 1977 and {MARS}", f"and {MARS}"),
        (f"Voyager 1 was launched in 1977 [ref_id:1], {MADE}", MADE),
        ("Voyager 1 was launched in 1977 and carries a golden record.", ""),
        ("Bananas are yellow fruits and grow in warm countries.", ""),
    ],
    ids=["joint", "marker", "supported", "all of it"],
)
def test_the_part_that_lacks_support_is_named(answer: str, lacking: str) -> None:
    """Where the beginning of a claim is supported and the whole is not, the rest is shown; the verdict stays."""
    [claim] = ledger(answer).claims
    assert (claim.lacking.of(answer) if claim.lacking else "") == lacking
    assert not claim.lacking or claim.verdict is not Verdict.SUPPORTED


def dates(_: Claim, premises: Sequence[Premise]) -> ClaimScore:
    """The first source supports each claim, and the second says another date."""
    first, second = premises[0].text, premises[1].text
    own = Evidence(0, 0.9, (Span(start=first.index("It landed"), end=first.index(" It carried")),))
    rival = Rival(ConflictKind.DATE, "20 July 1969", "21 July 1969", 1, Span(start=0, end=len(second)))
    return ClaimScore(0.9, Verdict.SUPPORTED, [own], [rival])


def test_conflicting_sources_are_data() -> None:
    """Where another source says another date, both values stand in the ledger, each with its place and date."""
    sources = [SOURCES[0], SOURCES[2]]
    found = run(ground("Apollo 11 landed on the Moon on 20 July 1969 [ref_id:0].", sources, Judge(dates)))
    [conflict] = found.conflicts
    assert (conflict.claim, conflict.kind) == (0, ConflictKind.DATE)
    assert [(one.value, one.support.reference_id, one.date) for one in conflict.values] == [
        ("20 July 1969", "0", "1970-01-01"),
        ("21 July 1969", "2", "1999-05-05"),
    ]
    assert conflict.values[1].support.quote == SOURCES[2].text
    assert ClaimFlag.CONFLICTING_SOURCES in found.claims[0].flags
    assert ledger("Voyager 1 was launched in 1977 [ref_id:1].", SOURCES).conflicts == []  # they agree


@given(st.text(alphabet="Apollo 11 landed in1969.!?[ref_id:0]\n-|“”", max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_answer_has_a_valid_ledger(answer: str) -> None:
    """Whatever the answer, each quote stands in its node where the span says."""
    texts = {source.node_id: source.text for source in SOURCES}
    for claim in ledger(answer, SOURCES).claims:
        assert all(support.span.of(texts[support.node_id]) == support.quote for support in claim.supports)


@pytest.mark.parametrize("step", ["split_claims", "_ledger"])
def test_the_claims_of_a_very_long_answer_hold_up_no_loop(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for each claim is done on a thread: 20,000 took the loop a second."""
    work, threads = getattr(ledgers, step), set[int]()

    def noted(*given: object) -> object:
        threads.add(threading.get_ident())
        return work(*given)

    async def loop_and_check() -> int:
        await ground("It rains. " * 3_000, [source("1", "Rain", "It rains.")], "lexical")
        return threading.get_ident()

    monkeypatch.setattr(ledgers, step, noted)
    assert run(loop_and_check()) not in threads
    assert threads


@pytest.mark.parametrize("left", [None, -1.0], ids=["in time", "late"])
def test_a_very_long_answer_is_taken_apart_off_the_loop(left: float | None) -> None:
    """Where it is late, the ledger has no claims and says why."""
    deadline = None if left is None else time.monotonic() + left
    ledger = run(ground("It is tall. " * 3_000, [], deadline=deadline))
    assert len(ledger.claims) == (3_000 if left is None else 0)
    assert bool(ledger.warnings) == (left is not None)


# -- repair ------------------------------------------------------------------------------------------------------------

PROBES = [source("4", "Voyager 1", VOYAGER), source("7", "Venera 7", "Venera 7 landed on Venus in 1970.")]
RIGHT = "Voyager 1 was launched in 1977 [ref_id:4]."
WRONG = "Voyager 1 was launched in 1969 [ref_id:7]."
VENERA = "Venera 7 landed on Venus in 1970 [ref_id:7]."
CHEESE = "Voyager 1 tasted of cheese in 1912."
DATED = "Voyager 1 was launched on 5 September 1977 [ref_id:4]."


def model(*replies: str | Exception | ScriptedReply) -> LanguageModel:
    return LanguageModel(ScriptedLLM(list(replies)), CallbackManager)


def repaired(answer: str, writer: LanguageModel | None = None) -> tuple[str, GroundingLedger]:
    text, ledger = run(repair(answer, run(ground(answer, PROBES)), PROBES, model=writer))
    ledger.check_spans(text)
    return text, ledger


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (f"Launches:\n- {RIGHT}\n- {WRONG}\n- {VENERA}\n", f"Launches:\n- {RIGHT}\n- {VENERA}"),
        (f"Launches:\n\n- {WRONG}\n- {CHEESE}\n\n{RIGHT}", RIGHT),
        (f"{VENERA} Launches:\n\n- {WRONG}\n- {CHEESE}\n\n{RIGHT}", f"{VENERA}\n\n{RIGHT}"),
        (f"## Launches\n\n- {WRONG}\n\n{RIGHT}", f"## Launches\n\n{RIGHT}"),
    ],
    ids=["an item", "all items", "a paragraph before", "a heading over other text"],
)
def test_drops_whole_items(answer: str, left: str) -> None:
    """No hole is left, and no lead-in without its list: of a paragraph only its last sentence goes."""
    assert repaired(answer)[0] == left


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
        run(repair("Something else entirely, at length.", run(ground(WRONG, PROBES)), PROBES))


@pytest.mark.parametrize(
    ("score", "low", "high"), [(0.39, True, True), (0.4, False, True), (0.7, False, False), (None, False, False)]
)
def test_filtering_levels(score: float | None, low: bool, high: bool) -> None:
    """Low withholds below 0.4, high below 0.7; without a score nothing is withheld."""
    ledger = GroundingLedger(claims=run(ground(RIGHT, PROBES)).claims, grounding_score=score)
    assert (is_low_grounded(ledger, "low"), is_low_grounded(ledger, "high")) == (low, high)
