"""Google's messages in JSON: requests in each form are read, and what is written their parsers read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from google.cloud import discoveryengine_v1 as g
from google.protobuf import json_format  # type: ignore[import-untyped]  # has no types
from hypothesis import given

from llama_index_agentic_kb import errors
from llama_index_agentic_kb.schema import Message, RetrievalRequest, grounding
from llama_index_agentic_kb.schema.answer import AnswerQuery
from llama_index_agentic_kb.wire import google as codec
from llama_index_agentic_kb.wire import google_messages as names
from tests.wire.strategies import CONFIGS, REQUESTS, STORE, at, many


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
    first, *others = (codec.decode_answer_query(json.dumps(form), serving_config=config) for form in forms)
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
        *((f"{GENERATION}.ignoreLowRelevantContent", one, {"ignoreLowRelevantContent": one}) for one in (True, False)),
        (GENERATION, {"ignoreLowRelevantContent": None, "promptSpec": None}, {}),
        ("session", None, {}),
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
    read = codec.decode_answer_query(sent).to_dict()
    return {**read.pop("request"), **read}


def test_a_request_without_settings_has_googles() -> None:
    """Ten documents, and nothing else."""
    least = RetrievalRequest(messages=[Message(role="user", content="Who?")], max_output_documents=10)
    assert codec.decode_answer_query({"query": {"text": "Who?"}}) == AnswerQuery(request=least)


def support(reference: str, score: float) -> grounding.Support:
    span = grounding.Span(start=0, end=7)
    return grounding.Support(reference_id=reference, node_id="n", span=span, quote=f"quote {reference}", score=score)


def claim(text: str, start: int, **fields: Any) -> grounding.GroundedClaim:
    return grounding.GroundedClaim(text=text, span=grounding.Span(start=start, end=start + len(text)), **fields)


def test_a_check_of_grounding_goes_both_ways() -> None:
    """The client's check is read, and the ledger's claims come back with bytes, indices and scores."""
    text = "Käse ist gelb. Here is what I found. Er fliegt."
    supports = [support("1", 0.9), support("0", 0.7), support("0", 0.1)]
    claims = [
        claim("Käse ist gelb.", 0, verdict=grounding.Verdict.SUPPORTED, score=0.9, supports=supports),
        claim("Here is what I found.", 15, check_required=False),
        claim("Er fliegt.", 37, verdict=grounding.Verdict.CONTRADICTED, score=0.2, supports=[support("0", 0.9)]),
    ]
    facts = [g.GroundingFact(fact_text=one, attributes={"author": "x"}) for one in ("A", "B")]
    spec = g.CheckGroundingSpec(citation_threshold=0.0, enable_claim_level_score=True)
    read = codec.decode_check_grounding(
        sent(g.CheckGroundingRequest(answer_candidate=text, facts=facts, grounding_spec=spec))
    )
    assert (read.answer, read.citation_threshold, read.claim_scores) == (text, 0.0, True)
    assert [(fact.text, fact.attributes) for fact in read.facts] == [("A", {"author": "x"}), ("B", {"author": "x"})]
    query = grounding.GroundingQuery(
        answer=text, facts=[grounding.Fact(text="A"), grounding.Fact(text="B")], claim_scores=True
    )
    written = codec.encode_check_grounding(query, grounding.GroundingLedger(claims=claims, grounding_score=0.55))
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
    read = codec.decode_rank(sent(g.RankRequest(query="q", records=records, top_n=1)))
    assert (read.query, read.top_n, read.model, read.ids_only) == ("q", 1, "semantic-ranker-512@latest", False)
    assert [(one.id, one.title, one.content) for one in read.records] == [("1", "a", ""), ("2", "", "b")]
    ranked = [grounding.RankRecord(id="2", content="b", score=0.8597)]
    got: Any = g.RankResponse.from_json(
        json.dumps(codec.encode_rank(grounding.RankQuery(records=[grounding.RankRecord(id="2")]), ranked))
    )
    assert [(one.id, one.content, round(one.score, 4)) for one in got.records] == [("2", "b", 0.8597)]
    bare = codec.encode_rank(
        grounding.RankQuery(records=[grounding.RankRecord(id="2")], ids_only=True),
        [grounding.RankRecord(id="2", content="b")],
    )
    assert bare == {"records": [{"id": "2"}]}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (errors.InvalidRequestError("query.text: a question is needed"), 400, "query.text"),
        (errors.NotFoundError("session: there is no session of this name"), 404, "no session"),
        (errors.RetrievalError("all sources failed"), 503, "all sources"),
        (errors.DeadlineExceededError("late"), 504, "late"),
        (errors.SynthesisError("the model failed"), 503, "the model failed"),
        (KeyError("sk-secret-123456"), 500, "Internal error."),
        (errors.InvalidRequestError("password=hunter22"), 400, "password=***"),
    ],
    ids=repr,
)
def test_errors_are_told_as_what_they_are(error: Exception, status: int, message: str) -> None:
    """Each has its own status, and says what to do; foreign ones say nothing, and no secret is repeated."""
    found, (body,) = codec.encode_error(error)
    assert (found, body["error"]["code"]) == (status, status)
    assert message in body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    shown = [one["metadata"] for one in body["error"]["details"]]
    assert shown == ([{"remedy": error.remedy, "docs": error.docs}] if isinstance(error, errors.AgenticKBError) else [])


PARENTS = [
    "projects/p/locations/global/dataStores/d",
    "projects/123/locations/eu/collections/default_collection/dataStores/d-1",
    "projects/p/locations/us/collections/c/engines/e_2",
]


@pytest.mark.parametrize("parent", PARENTS)
def test_names_are_read_into_their_parts(parent: str) -> None:
    """A parent, and the ids of what stands under it."""
    assert names.parse_parent(parent) == names.parse_serving_config(f"{parent}/servingConfigs/default") == parent
    assert names.parse_session_name(f"{parent}/sessions/s") == (parent, "s")
    assert names.parse_answer_name(f"{parent}/sessions/-/answers/a") == (parent, "-", "a")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "projects/p",
        "projects/p/locations/l/dataStores/",
        "projects/p/locations/l/dataStores/d/",
        "projects/p/locations/l/dataStores/d\n",
        "projects/p/locations/l/dataStores/a b",
        "projects/p/locations/l/engines/e",
        "projects//locations/l/dataStores/d",
        "projects/p/locations/l/dataStores/" + "d" * 251,
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    """Neither a part of a name nor one with an empty part passes; the field is named."""
    with pytest.raises(errors.InvalidRequestError):
        names.parse_parent(name)
    with pytest.raises(errors.InvalidRequestError, match=r"^session: |an engine is named"):
        names.parse_session_name(f"{name}/sessions/s")
    with pytest.raises(errors.InvalidRequestError, match=r"^name: "):
        names.parse_answer_name(f"{PARENTS[0]}/sessions/s")
    with pytest.raises(errors.InvalidRequestError, match=r"^name: "):
        names.parse_answer_name(f"{PARENTS[0]}/servingConfigs/s/answers/a")


CLASSES = "queryUnderstandingSpec.queryClassificationSpec.types"
STEPS = "queryUnderstandingSpec.queryRephraserSpec.maxRephraseSteps"
BOOSTS = "searchSpec.searchParams.boostSpec.conditionBoostSpecs"


def body(**fields: Any) -> dict[str, Any]:
    return {"query": {"text": "Who?"}, **fields}


REFUSED = [
    ("{", "body: it is no JSON"),
    ('{"query": {"text": "a", "text": "b"}}', "body: it is no JSON that can be read: the key 'text' is given twice"),
    ('{"query": {"text": NaN}}', "query.text: "),
    (b"\xff", "body: it is no JSON"),
    ("[" * 100_000, "body: it is no JSON that can be read: it is nested too deeply"),
    (at(BOOSTS, [{"condition": 'a: ANY("b")', "boost": 10**400}]), "body: a number is too large"),
    ([], "body: an object is expected, found '[]'"),
    ({}, "query.text: a question is needed"),
    *(({"query": {"text": text}}, "query.text: ") for text in (" ", "\ud800", 3, ["a"])),
    ({"query": "Who?"}, 'query: Message type Query has no field named "W"'),
    (body(qeury=1), 'body: Message type AnswerQueryRequest has no field named "qeury"'),
    (at(PARAMS, {"blobs": {}}), f'{PARAMS}: Message type SearchParams has no field named "b'),
    (body(searchSpec={"search_params": {}, "searchResultList": {}}), "searchSpec: "),
    (body(userLabels={str(key): "" for key in range(65)}), "userLabels: 65 labels; at most 64"),
    (at(f"{PARAMS}.maxReturnResults", 2**31), "maxReturnResults: "),
    (body(session="projects/p/locations/l/engines/e/sessions/s"), "an engine is named with its collection"),
]
"""No JSON, unknown fields and two of a oneof, and the place that is named."""
WRONG = [
    ("asynchronousMode", True, ": asynchronous mode is deprecated."),
    ("userPseudoId", "x" * 129, ": 129 characters; at most 128"),
    ("userLabels", {"": "x"}, ": a label's key has 1 to 63 characters"),
    ("endUserSpec.endUserMetadata", [{"chunkInfo": {"content": "x" * 8001}}], ".0.chunkInfo.content: 8001 characters;"),
    (STEPS, -1, ": a finite number from 0 to 5 is expected, found -1"),
    (CLASSES, ["adversarial_query"], ".0: Invalid enum value adversarial_query for enum type Type"),
    (CLASSES, [6], ": Type has no such value; it has"),
    (CLASSES, [None], ".0: null is not allowed"),
    ("groundingSpec.filteringLevel", -1, ": FilteringLevel has no such value"),
    ("safetySpec.safetySettings", [{"category": 1}], ".0: category and threshold are both needed"),
    ("session", "sessions/1", ": 'sessions/1' is no resource name"),
    ("session", "projects/p/locations/l/collections/c/dataStores/d/sessions/s/answers/a", ": "),
    ("servingConfig", "x", ": 'x' is no resource name"),
    *((f"{PARAMS}.maxReturnResults", bad, ": ") for bad in (1.5, " 5", True, "1e999", 10_001)),
    (f"{PARAMS}.filter", "color = red", ", character 9: found 'red', expected: a text"),
    (f"{PARAMS}.dataStoreSpecs", [{"dataStore": "x"}], ".0.dataStore: 'x' is no resource name"),
    (BOOSTS, [{"boost": "NaN"}], ".0.boost: a finite number from -1 to 1 is expected, found nan"),
    (BOOSTS, [{}] * 21, ": 21 items; at most 20"),
    (BOOSTS, [{"condition": "("}], ".0.condition, character 2: the filter ends"),
]
"""By field: wrong kinds and what is out of a range, and what is said after the field's name."""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says what to install."""
    monkeypatch.setitem(sys.modules, "google.cloud.discoveryengine_v1", None)
    monkeypatch.delattr("google.cloud.discoveryengine_v1")
    with pytest.raises(errors.ConfigurationError, match=r"llama-index-agentic-kb\[google\]"):
        codec.decode_answer_query(body())


def test_the_path_and_the_body_name_one_serving_config() -> None:
    """Two different serving configs are refused; either alone does."""
    name = "projects/p/locations/l/dataStores/d/servingConfigs/s"
    assert codec.decode_answer_query(body(servingConfig=name)) == codec.decode_answer_query(body(), serving_config=name)
    with pytest.raises(errors.InvalidRequestError, match="servingConfig: the body names another one"):
        codec.decode_answer_query(body(servingConfig=name), serving_config=name + "2")


def test_results_that_are_brought_along_are_read_in_their_order() -> None:
    """Segments count only without contexts; an empty list is no search at all, which differs from none."""
    contexts, segments = {"documentContexts": [{"content": "a"}]}, {"extractiveSegments": [{"content": "b"}]}
    given = [
        {"unstructuredDocumentInfo": {**contexts, **segments}},
        {"unstructuredDocumentInfo": {**segments, "extractiveAnswers": [{"content": "c"}]}},
        {"chunkInfo": {"content": "d", "documentMetadata": {"title": "T"}}},
        {},
    ]
    results = codec.decode_answer_query(body(searchSpec={"searchResultList": {"searchResults": given}})).search_results
    assert results is not None
    contents = [[part.content for part in one.chunks] if one.kind == "document" else one.to_dict() for one in results]
    assert contents[:2] == [["a"], ["b"]]
    assert contents[3] == []
    assert codec.decode_answer_query(body(searchSpec={"searchResultList": {}})).search_results == []
    assert codec.decode_answer_query(body(searchSpec={})).search_results is None


RANKING = "projects/p/locations/l/rankingConfigs/r"
CANDIDATE = {"answerCandidate": "a"}


@pytest.mark.parametrize(
    ("decode", "sent", "message"),
    [
        *((codec.decode_answer_query, sent, message) for sent, message in REFUSED),
        *((codec.decode_answer_query, at(path, value), path + message) for path, value, message in WRONG),
        (codec.decode_check_grounding, {}, "answerCandidate: an answer to check is needed"),
        (codec.decode_check_grounding, {"answerCandidate": "a. " * 2049}, "answerCandidate: 4098 tokens; at most 4096"),
        (codec.decode_check_grounding, {**CANDIDATE, "facts": [{}] * 201}, "facts: 201 items; at most 200"),
        (
            codec.decode_check_grounding,
            {**CANDIDATE, "facts": [{"factText": "x" * 10_001}]},
            "facts.0.factText: 10001 char",
        ),
        (
            codec.decode_check_grounding,
            {**CANDIDATE, "groundingSpec": {"citationThreshold": 1.1}},
            "citationThreshold: a fin",
        ),
        (
            codec.decode_check_grounding,
            {**CANDIDATE, "groundingConfig": RANKING},
            "locations/{location}/groundingConfigs/",
        ),
        (codec.decode_rank, {"records": []}, "records: records to rank are needed"),
        (codec.decode_rank, {"records": [{"title": "a"}, {"id": "1"}]}, "records.1: a title or content is needed"),
        (
            codec.decode_rank,
            {"records": [{"title": "a"}] * (grounding.MAX_RECORDS + 1)},
            "records: 201 items; at most 200",
        ),
        (codec.decode_rank, {"records": [{"title": "a"}], "topN": -1}, "topN: a finite number from 0 to"),
        (codec.decode_create_session, {"turns": [{}]}, "session.turns: turns are made by answering"),
        (codec.decode_create_session, {"isPinned": "yes"}, "isPinned: Expected true or false"),
        (codec.decode_list_sessions, {"pageSize": "-1"}, "pageSize: a finite number from 0 to"),
        (codec.decode_list_sessions, {"orderBy": "update_time down"}, "orderBy: can't read 'update_time down'"),
        (codec.decode_list_sessions, {"filter": "title = a"}, "filter: there is no field 'title'"),
        (codec.decode_list_sessions, {"filter": "state = OPEN"}, "filter: Session.State has no value 'OPEN'"),
        (codec.wants_answer_details, {"includeAnswerDetails": "yes"}, "includeAnswerDetails: 'yes' is neither"),
        (lambda sent: codec.decode_update_session({}, sent), "name", "updateMask: 'name' can't be changed"),
    ],
    ids=lambda one: getattr(one, "__name__", str(one))[:40],
)
def test_what_is_wrong_is_refused_by_its_field(decode: Any, sent: Any, message: str) -> None:
    """In each method; the limits of CheckGrounding, Rank and sessions are Google's."""
    with pytest.raises(errors.InvalidRequestError) as refused:
        decode(sent)
    assert message in str(refused.value)


def test_an_empty_mask_changes_all_and_a_page_has_an_end() -> None:
    """Without a mask what is left out goes to its default; a page holds at most 1000."""
    whole = {"display_name": "", "labels": [], "is_pinned": True, "user_pseudo_id": ""}
    assert codec.decode_update_session({"isPinned": True}).model_dump(by_alias=False) == whole
    assert codec.decode_update_session({"displayName": "x"}, "displayName").to_dict() == {"displayName": "x"}
    assert codec.decode_list_sessions({"pageSize": "5000"}).page_size == 1000
    assert codec.decode_list_sessions({}).page_size == 50
    state = codec.decode_list_sessions({"filter": "state = IN_PROGRESS"}).filters
    assert state is not None
    assert state.to_dict()["value"] == "inProgress"
