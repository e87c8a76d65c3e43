"""Google's messages in JSON: requests in each form are read, and what is written their parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as g
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given

from llama_index_agentic_kb.errors import (
    AgenticKBError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    RetrievalError,
)
from llama_index_agentic_kb.schema import Message, RetrievalRequest
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.grounding import (
    Fact,
    GroundedClaim,
    GroundingLedger,
    GroundingQuery,
    RankQuery,
    RankRecord,
    Span,
    Support,
    Verdict,
)
from llama_index_agentic_kb.wire.google_answer import decode_answer_query, encode_error
from llama_index_agentic_kb.wire.google_methods import (
    decode_check_grounding,
    decode_rank,
    encode_check_grounding,
    encode_rank,
)
from tests.wire.google_requests import CONFIGS, REQUESTS, STORE, at
from tests.wire.strategies import many


def sent(message: Any, **form: Any) -> dict[str, Any]:
    return dict(json_format.MessageToDict(type(message).pb(message), **form))


@many
@given(request=REQUESTS)
def test_what_a_client_sends_is_read(request: Any) -> None:
    """Any combination of fields is read, and alike in each form: enums by name or number, camelCase or snake_case."""
    forms = [
        sent(request, use_integers_for_enums=as_int, preserving_proto_field_name=snake)
        for as_int in (True, False)
        for snake in (False, True)
    ]
    config = forms[0].pop("servingConfig")  # the client over REST puts it into the path
    first, *others = (decode_answer_query(json.dumps(form), serving_config=config) for form in forms)
    assert all(other == first for other in others)


EXACTLY_RED = {"type": "condition", "key": "color", "operator": "in", "value": ["red"]}
STORES = {"dataStore": STORE, "filter": 'color: ANY("red")', "numResults": 3, "customSearchOperators": "x"}
READ_STORES = {"dataStore": STORE, "filters": EXACTLY_RED, "maxResults": 3}
DANGER = {"category": "HARM_CATEGORY_DANGEROUS_CONTENT", "threshold": "BLOCK_ONLY_HIGH"}
READ_DANGER = {"category": "dangerousContent", "threshold": "blockOnlyHigh"}
CHUNK = {"chunkInfo": {"content": "c", "documentMetadata": {"title": "t"}}}
UNDERSTANDING, GENERATION, PARAMS = "queryUnderstandingSpec", "answerGenerationSpec", "searchSpec.searchParams"


@pytest.mark.parametrize(
    ("path", "value", "means"),
    [
        ("servingConfig", CONFIGS[2], {}),
        ("query.queryId", "id", {"queryId": "id"}),
        ("session", f"{STORE}/sessions/a1", {"session": "a1"}),
        ("safetySpec.enable", True, {"safety": True}),
        ("safetySpec.safetySettings", [DANGER], {"safetySettings": [READ_DANGER]}),
        ("relatedQuestionsSpec.enable", True, {"relatedQuestions": True}),
        ("groundingSpec.includeGroundingSupports", True, {"groundingSupports": True}),
        ("groundingSpec.filteringLevel", "FILTERING_LEVEL_HIGH", {"filteringLevel": "high"}),
        (f"{GENERATION}.modelSpec.modelVersion", "stable", {"unsupported": ["modelVersion"]}),
        (f"{GENERATION}.promptSpec.preamble", "Be brief.", {"preamble": "Be brief."}),
        (f"{GENERATION}.includeCitations", True, {"includeCitations": True}),
        (f"{GENERATION}.answerLanguageCode", "de", {"language": "de"}),
        (f"{GENERATION}.ignoreAdversarialQuery", True, {"ignoreAdversarialQuery": True}),
        (f"{GENERATION}.ignoreNonAnswerSeekingQuery", True, {"ignoreNonAnswerSeekingQuery": True}),
        (f"{GENERATION}.ignoreLowRelevantContent", False, {"ignoreLowRelevantContent": False}),
        (f"{GENERATION}.ignoreJailBreakingQuery", True, {"ignoreJailBreakingQuery": True}),
        (f"{PARAMS}.maxReturnResults", 7, {"maxOutputDocuments": 7}),
        (f"{PARAMS}.filter", 'color: ANY("red")', {"filters": EXACTLY_RED}),
        (f"{PARAMS}.boostSpec.conditionBoostSpecs", [{"boost": 0.5}], {"unsupported": ["boostSpec"]}),
        (f"{PARAMS}.orderBy", "a desc", {"unsupported": ["orderBy"]}),
        (f"{PARAMS}.searchResultMode", "CHUNKS", {"resultMode": "chunks"}),
        (f"{PARAMS}.dataStoreSpecs", [STORES], {"dataStores": [READ_STORES], "unsupported": ["customSearchOperators"]}),
        (
            f"{UNDERSTANDING}.queryClassificationSpec.types",
            [1, 3, 1],
            {"classify": ["adversarialQuery", "jailBreakingQuery"]},
        ),
        (f"{UNDERSTANDING}.queryRephraserSpec.disable", True, {"retrievalReasoningEffort": {"kind": "minimal"}}),
        (f"{UNDERSTANDING}.queryRephraserSpec.maxRephraseSteps", 4, {"maxRephraseSteps": 4}),
        (f"{UNDERSTANDING}.queryRephraserSpec.modelSpec.modelType", "SMALL", {}),
        (f"{UNDERSTANDING}.disableSpellCorrection", True, {}),
        ("userPseudoId", "u", {"userPseudoId": "u"}),
        ("userLabels.k", "v", {"userLabels": {"k": "v"}}),
        ("endUserSpec.endUserMetadata", [CHUNK, {}], {"endUserChunks": [{"content": "c", "title": "t"}]}),
    ],
)
def test_every_field_means_what_it_says(path: str, value: Any, means: dict[str, Any]) -> None:
    """Each changes what it is read as, and nothing else."""
    none, one = (read_of(sent) for sent in (at("query.text", "Who?"), at(path, value)))
    assert {name: one[name] for name in one if one[name] != none.get(name)} == means


def read_of(sent: dict[str, Any]) -> dict[str, Any]:
    read = decode_answer_query(sent).to_dict()
    return {**read.pop("request"), **read}


def test_a_request_without_settings_has_googles() -> None:
    """Ten documents, and nothing else."""
    least = RetrievalRequest(messages=[Message(role="user", content="Who?")], max_output_documents=10)
    assert decode_answer_query({"query": {"text": "Who?"}}) == AnswerQuery(request=least)


def support(reference: str, score: float) -> Support:
    span = Span(start=0, end=7)
    return Support(reference_id=reference, node_id="n", span=span, quote=f"quote {reference}", score=score)


def claim(text: str, start: int, **fields: Any) -> GroundedClaim:
    return GroundedClaim(text=text, span=Span(start=start, end=start + len(text)), **fields)


def test_a_check_of_grounding_goes_both_ways() -> None:
    """The client's check is read, and the ledger's claims come back with bytes, indices and scores."""
    text = "Käse ist gelb. Here is what I found. Er fliegt."
    supports = [support("1", 0.9), support("0", 0.7), support("0", 0.1)]
    claims = [
        claim("Käse ist gelb.", 0, verdict=Verdict.SUPPORTED, score=0.9, supports=supports),
        claim("Here is what I found.", 15, check_required=False),
        claim("Er fliegt.", 37, verdict=Verdict.CONTRADICTED, score=0.2, supports=[support("0", 0.9)]),
    ]
    facts = [g.GroundingFact(fact_text=one, attributes={"author": "x"}) for one in ("A", "B")]
    spec = g.CheckGroundingSpec(citation_threshold=0.0, enable_claim_level_score=True)
    read = decode_check_grounding(
        sent(g.CheckGroundingRequest(answer_candidate=text, facts=facts, grounding_spec=spec))
    )
    assert (read.answer, read.citation_threshold, read.claim_scores) == (text, 0.0, True)
    assert [(fact.text, fact.attributes) for fact in read.facts] == [("A", {"author": "x"}), ("B", {"author": "x"})]
    query = GroundingQuery(answer=text, facts=[Fact(text="A"), Fact(text="B")], claim_scores=True)
    written = encode_check_grounding(query, GroundingLedger(claims=claims, grounding_score=0.55))
    got: Any = g.CheckGroundingResponse.from_json(json.dumps(written))
    assert got.support_score == pytest.approx(0.55)
    assert [(one.chunk_text, one.source) for one in got.cited_chunks] == [("quote 1", "1"), ("quote 0", "0")]
    spans = [(one.start_pos, one.end_pos, list(one.citation_indices)) for one in got.claims]
    assert spans == [(0, 15, [0, 1]), (16, 37, []), (38, 48, [])]
    assert [one.grounding_check_required for one in got.claims] == [True, False, True]
    assert [one.score if "score" in one else None for one in got.claims] == [0.9, None, 0.2]


def test_ranking_goes_both_ways() -> None:
    """The client's records are read, and come back best first, with details or without."""
    records = [g.RankingRecord(id="1", title="a"), g.RankingRecord(id="2", content="b")]
    read = decode_rank(sent(g.RankRequest(query="q", records=records, top_n=1)))
    assert (read.query, read.top_n, read.model, read.ids_only) == ("q", 1, "semantic-ranker-512@latest", False)
    assert [(one.id, one.title, one.content) for one in read.records] == [("1", "a", ""), ("2", "", "b")]
    ranked = [RankRecord(id="2", content="b", score=0.8597)]
    got: Any = g.RankResponse.from_json(json.dumps(encode_rank(RankQuery(records=[RankRecord(id="2")]), ranked)))
    assert [(one.id, one.content, round(one.score, 4)) for one in got.records] == [("2", "b", 0.8597)]
    bare = encode_rank(RankQuery(records=[RankRecord(id="2")], ids_only=True), [RankRecord(id="2", content="b")])
    assert bare == {"records": [{"id": "2"}]}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidRequestError("query.text: a question is needed"), 400, "query.text"),
        (NotFoundError("session: there is no session of this name"), 404, "no session"),
        (RetrievalError("all sources failed"), 503, "all sources"),
        (DeadlineExceededError("late"), 504, "late"),
        (KeyError("sk-secret-123456"), 500, "Internal error."),
        (InvalidRequestError("password=hunter22"), 400, "password=***"),
    ],
    ids=repr,
)
def test_errors_are_told_as_what_they_are(error: Exception, status: int, message: str) -> None:
    """Each has its own status, and says what to do; foreign ones say nothing, and no secret is repeated."""
    found, (body,) = encode_error(error)
    assert (found, body["error"]["code"]) == (status, status)
    assert message in body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    shown = [one["metadata"] for one in body["error"]["details"]]
    assert shown == ([{"remedy": error.remedy, "docs": error.docs}] if isinstance(error, AgenticKBError) else [])
