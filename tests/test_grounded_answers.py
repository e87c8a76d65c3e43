from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

from llama_index_agentic_kb import AgenticResponse, ConfigurationError
from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.grounding.scorers import ClaimScore
from llama_index_agentic_kb.grounding.settings import Grounding, as_grounding, withheld_text
from llama_index_agentic_kb.schema import ModelAnswerSynthesisActivity
from llama_index_agentic_kb.schema.grounding import ClaimFlag, Verdict
from llama_index_agentic_kb.schema.response import SkippedReason
from tests.answering.retrieving import QUESTION, TEXTS, Model, base

if TYPE_CHECKING:
    from tests.conftest import Serve

FALSE = "It was painted green all over"
HEIGHT, LAUNCH, REST = range(3)


LAUNCHED = "Apollo 11 was launched in July 1969 [ref_id:{1}]. The Saturn V was 110.6 m tall [ref_id:{0}]."
MIXED = LAUNCHED + f" {FALSE} [ref_id:{{2}}]."


def test_each_claim_leads_to_the_words_that_support_it() -> None:
    """By default, offline: reference, node, span and quote; and a sentence without support says so."""
    kb = base(model := Model(MIXED))
    response = kb.retrieve(QUESTION)
    assert response.grounding is not None
    launch, height, green = response.grounding.claims
    assert [claim.verdict for claim in (launch, height)] == [Verdict.SUPPORTED] * 2
    for claim, number in ((launch, LAUNCH), (height, HEIGHT)):
        assert claim.span.of(response.text) == claim.text
        best = claim.supports[0]
        assert best.reference_id == str(model.order[number])
        assert best.node_id == response.references[model.order[number]].node_id
        assert best.span.of(TEXTS[number]) == best.quote
    assert green.verdict is Verdict.UNSUPPORTED
    assert green.flags == [ClaimFlag.CITED_WITHOUT_SUPPORT]
    assert not response.skipped_reasons


def test_cited_nodes_stand_beside_source_nodes() -> None:
    """In order of first mention."""
    kb = base(Model(LAUNCHED))
    response = kb.as_query_engine().query(QUESTION)
    assert isinstance(response, AgenticResponse)
    assert [node.text for node in response.cited_nodes] == [TEXTS[LAUNCH], TEXTS[HEIGHT]]
    assert len(response.source_nodes) == 3
    unchecked = kb.as_query_engine(grounding=False).query(QUESTION)
    assert isinstance(unchecked, AgenticResponse)
    assert unchecked.account.grounding is None
    assert [node.text for node in unchecked.cited_nodes] == [TEXTS[LAUNCH], TEXTS[HEIGHT]]


@pytest.mark.parametrize("verdict", ["supported", "no verdict"])
def test_a_check_is_on_the_bill(serve: Serve, verdict: str) -> None:
    """A record of its own counts what a judge read and wrote, a reply without a verdict too."""
    judge = serve("\n".join(f'{{"claim": {number}, "verdict": "{verdict}"}}' for number in range(2)))
    kb = base(Model(LAUNCHED), grounding=Grounding(scorer=judge.llm()))
    answered, checked = (kb.retrieve(QUESTION).activity or [])[-2:]
    assert isinstance(answered, ModelAnswerSynthesisActivity)
    assert isinstance(checked, ModelAnswerSynthesisActivity)
    assert (answered.purpose, answered.calls, checked.purpose, checked.calls) == ("answer", 1, "check", 1)
    assert judge.billed.calls == 1
    assert checked.input_tokens == judge.billed.prompt_tokens
    assert checked.output_tokens == judge.billed.completion_tokens


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("markers", ["renumber", "strip"])
async def test_markers_are_numbered_in_order_of_appearance_or_stripped(markers: Any, streaming: bool) -> None:
    """And the source nodes with them, so that the N-th node is still reference N; what was cited is in the ledger."""
    kb = base(Model(MIXED))
    engine = kb.as_query_engine(grounding=Grounding(markers=markers), streaming=streaming)
    response: Any = await engine.aquery(QUESTION)
    text = await told(response)
    one, two, three = (f" [ref_id:{number}]" if markers == "renumber" else "" for number in range(3))
    assert text == f"Apollo 11 was launched in July 1969{one}. The Saturn V was 110.6 m tall{two}. {FALSE}{three}."
    account = response.account
    account.grounding.check_spans(text)
    assert [node.text for node in response.cited_nodes] == [TEXTS[LAUNCH], TEXTS[HEIGHT], TEXTS[REST]]
    assert [reference.node_id for reference in account.references] == [n.node.node_id for n in response.source_nodes]
    assert account.text == text
    if markers == "renumber":
        assert [node.text for node in response.source_nodes] == [TEXTS[LAUNCH], TEXTS[HEIGHT], TEXTS[REST]]
        assert account.grounding.cited == ["0", "1", "2"] == [reference.id for reference in account.references]


async def told(response: Any) -> str:
    if isinstance(response, AsyncStreamingResponse):
        return "".join([token async for token in response.async_response_gen()])
    return "".join(response.response_gen) if isinstance(response, StreamingResponse) else str(response)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_an_unsupported_claim_is_dropped_on_request(streaming: bool) -> None:
    """The change is told; a stream tells the answer once it stands."""
    kb = base(Model(MIXED))
    response: Any = kb.as_query_engine(grounding=Grounding(repair="drop"), streaming=streaming).query(QUESTION)
    pieces = list(response.response_gen) if streaming else [str(response)]
    assert len(pieces) == 1
    assert FALSE not in pieces[0]
    assert "110.6 m" in pieces[0]
    [change] = response.account.grounding.changes
    assert FALSE in change.before
    response.account.grounding.check_spans(pieces[0])


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("answer", "withheld"), [(LAUNCHED, False), (f"{FALSE} [ref_id:{{2}}].", True)], ids=["good", "bad"]
)
def test_a_badly_grounded_answer_is_withheld_on_request(answer: str, withheld: bool, streaming: bool) -> None:
    """The reason is data, the references are kept, and nothing of the answer is told."""
    kb = base(Model(answer))
    response: Any = kb.as_query_engine(grounding=Grounding(filtering="low"), streaming=streaming).query(QUESTION)
    text = "".join(response.response_gen) if streaming else str(response)
    account = response.account
    assert (text == withheld_text([SkippedReason.LOW_GROUNDED_ANSWER], QUESTION)) == withheld
    assert account.skipped_reasons == [SkippedReason.LOW_GROUNDED_ANSWER] * withheld
    assert account.status_code == 200
    assert len(account.references) == 3


class Hangs:
    name = "hangs"

    async def score(self, *_: object, deadline: float | None = None) -> list[ClaimScore]:
        await Call(sync=lambda: time.sleep(3), deadline=deadline, what="scorer")
        return []


def test_an_answer_is_never_lost_to_its_check() -> None:
    """Its claims are told as not scored, with a warning."""
    kb = base(Model(LAUNCHED))
    response = kb.as_query_engine(grounding=Grounding(scorer=Hangs(), seconds=0.2)).query(QUESTION)
    assert isinstance(response, AgenticResponse)
    assert "110.6 m" in str(response)
    ledger = response.account.grounding
    assert ledger is not None
    assert [claim.flags for claim in ledger.claims] == [[ClaimFlag.NOT_SCORED]] * 2
    assert ledger.grounding_score is None
    assert "not checked" in ledger.warnings[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 0.0}, "Grounding.threshold must be above 0"),
        ({"seconds": 0}, "Grounding.seconds must be above 0"),
        ({"repair": "mend"}, "Grounding.repair: 'mend' is unknown; known are None, drop, rewrite"),
        ({"filtering": "none"}, "Grounding.filtering: 'none' is unknown"),
        ({"markers": "drop"}, "Grounding.markers: 'drop' is unknown; known are keep, renumber, strip"),
    ],
    ids=["threshold", "seconds", "repair", "filtering", "markers"],
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Grounding(**fields)
    with pytest.raises(ConfigurationError, match="grounding: expected Grounding"):
        as_grounding("yes")  # type: ignore[arg-type]


def test_an_answer_that_says_that_it_is_none_is_data() -> None:
    """The reason stands beside the model's own words; the word that marks them is not shown."""
    kb = base(Model("UNANSWERABLE: The passages do not say how tall it was."))
    response = kb.retrieve(QUESTION)
    assert response.skipped_reasons == [SkippedReason.UNHELPFUL_ANSWER]
    assert response.text == "The passages do not say how tall it was."
    streamed: Any = kb.as_query_engine(streaming=True).query(QUESTION)
    assert str(streamed) == response.text
    assert streamed.account.skipped_reasons == response.skipped_reasons
