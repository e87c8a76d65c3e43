"""What is refused, and with what words; what protobuf takes in odd forms is taken too."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from llama_index_agentic_kb.errors import ConfigurationError, InvalidRequestError
from llama_index_agentic_kb.schema.grounding import MAX_RECORDS
from llama_index_agentic_kb.wire.google_answer import decode_answer_query
from llama_index_agentic_kb.wire.google_methods import (
    decode_check_grounding,
    decode_create_session,
    decode_list_sessions,
    decode_rank,
    decode_update_session,
    wants_answer_details,
)
from tests.wire.google_requests import at

CLASSES = "queryUnderstandingSpec.queryClassificationSpec.types"
STEPS = "queryUnderstandingSpec.queryRephraserSpec.maxRephraseSteps"
BOOSTS = "searchSpec.searchParams.boostSpec.conditionBoostSpecs"
PARAMS = "searchSpec.searchParams"


def body(**fields: Any) -> dict[str, Any]:
    return {"query": {"text": "Who?"}, **fields}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("{", "body: it is no JSON"),
        (
            '{"query": {"text": "a", "text": "b"}}',
            "body: it is no JSON that can be read: the key 'text' is given twice",
        ),
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
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_is_no_request_is_refused(sent: Any, message: str) -> None:
    """No JSON, unknown fields and two of a oneof are refused, and the place is named."""
    with pytest.raises(InvalidRequestError) as refused:
        decode_answer_query(sent)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("asynchronousMode", True, ": asynchronous mode is deprecated."),
        ("userPseudoId", "x" * 129, ": 129 characters; at most 128"),
        ("userLabels", {"": "x"}, ": a label's key has 1 to 63 characters"),
        (
            "endUserSpec.endUserMetadata",
            [{"chunkInfo": {"content": "x" * 8001}}],
            ".0.chunkInfo.content: 8001 characters;",
        ),
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
    ],
)
def test_what_is_wrong_is_refused_by_its_field(path: str, value: Any, message: str) -> None:
    """Wrong kinds and what is out of a range are refused, and the field is named."""
    with pytest.raises(InvalidRequestError) as refused:
        decode_answer_query(at(path, value))
    assert path + message in str(refused.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says what to install."""
    monkeypatch.setitem(sys.modules, "google.cloud.discoveryengine_v1", None)
    monkeypatch.delattr("google.cloud.discoveryengine_v1")
    with pytest.raises(ConfigurationError, match=r"llama-index-agentic-kb\[google\]"):
        decode_answer_query(body())


def test_the_path_and_the_body_name_one_serving_config() -> None:
    """Two different serving configs are refused; either alone does."""
    name = "projects/p/locations/l/dataStores/d/servingConfigs/s"
    assert decode_answer_query(body(servingConfig=name)) == decode_answer_query(body(), serving_config=name)
    with pytest.raises(InvalidRequestError, match="servingConfig: the body names another one"):
        decode_answer_query(body(servingConfig=name), serving_config=name + "2")


@pytest.mark.parametrize("five", [5, 5.0, "5", "5.0", "05", "5e0", "0.5e1"])
def test_numbers_are_taken_as_protobuf_takes_them(five: Any) -> None:
    """Whole numbers may be decimal or text."""
    assert decode_answer_query(at(f"{PARAMS}.maxReturnResults", five)).request.max_output_documents == 5


@pytest.mark.parametrize("level", ["FILTERING_LEVEL_HIGH", 2, "2", 2.0])
def test_enums_are_names_or_numbers(level: Any) -> None:
    """An enum's value is its name, its number, or the number as text."""
    query = decode_answer_query(body(groundingSpec={"filteringLevel": level}))
    assert query.filtering_level == "high"


def test_null_is_not_set_and_false_is_not_null() -> None:
    """Null leaves a field at its default; the relevance gate tells false from unset."""
    generation = {"ignoreLowRelevantContent": None, "promptSpec": None}
    assert decode_answer_query(body(answerGenerationSpec=generation, session=None)).ignore_low_relevant_content is None
    for value in (True, False):
        query = decode_answer_query(body(answerGenerationSpec={"ignoreLowRelevantContent": value}))
        assert query.ignore_low_relevant_content is value


def test_results_that_are_brought_along_are_read_in_their_order() -> None:
    """Segments count only without contexts; an empty list is no search at all, which differs from none."""
    contexts, segments = {"documentContexts": [{"content": "a"}]}, {"extractiveSegments": [{"content": "b"}]}
    given = [
        {"unstructuredDocumentInfo": {**contexts, **segments}},
        {"unstructuredDocumentInfo": {**segments, "extractiveAnswers": [{"content": "c"}]}},
        {"chunkInfo": {"content": "d", "documentMetadata": {"title": "T"}}},
        {},
    ]
    results = decode_answer_query(body(searchSpec={"searchResultList": {"searchResults": given}})).search_results
    assert results is not None
    contents = [[part.content for part in one.chunks] if one.kind == "document" else one.to_dict() for one in results]
    assert contents[:2] == [["a"], ["b"]]
    assert contents[3] == []
    assert decode_answer_query(body(searchSpec={"searchResultList": {}})).search_results == []
    assert decode_answer_query(body(searchSpec={})).search_results is None


RANKING = "projects/p/locations/l/rankingConfigs/r"
CANDIDATE = {"answerCandidate": "a"}


@pytest.mark.parametrize(
    ("decode", "sent", "message"),
    [
        (decode_check_grounding, {}, "answerCandidate: an answer to check is needed"),
        (decode_check_grounding, {"answerCandidate": "a. " * 2049}, "answerCandidate: 4098 tokens; at most 4096"),
        (decode_check_grounding, {**CANDIDATE, "facts": [{}] * 201}, "facts: 201 items; at most 200"),
        (decode_check_grounding, {**CANDIDATE, "facts": [{"factText": "x" * 10_001}]}, "facts.0.factText: 10001 char"),
        (
            decode_check_grounding,
            {**CANDIDATE, "groundingSpec": {"citationThreshold": 1.1}},
            "citationThreshold: a fin",
        ),
        (decode_check_grounding, {**CANDIDATE, "groundingConfig": RANKING}, "locations/{location}/groundingConfigs/"),
        (decode_rank, {"records": []}, "records: records to rank are needed"),
        (decode_rank, {"records": [{"title": "a"}, {"id": "1"}]}, "records.1: a title or content is needed"),
        (decode_rank, {"records": [{"title": "a"}] * (MAX_RECORDS + 1)}, "records: 201 items; at most 200"),
        (decode_rank, {"records": [{"title": "a"}], "topN": -1}, "topN: a finite number from 0 to"),
        (decode_create_session, {"turns": [{}]}, "session.turns: turns are made by answering"),
        (decode_create_session, {"isPinned": "yes"}, "isPinned: Expected true or false"),
        (decode_list_sessions, {"pageSize": "-1"}, "pageSize: a finite number from 0 to"),
        (decode_list_sessions, {"orderBy": "update_time down"}, "orderBy: can't read 'update_time down'"),
        (decode_list_sessions, {"filter": "title = a"}, "filter: there is no field 'title'"),
        (decode_list_sessions, {"filter": "state = OPEN"}, "filter: Session.State has no value 'OPEN'"),
        (wants_answer_details, {"includeAnswerDetails": "yes"}, "includeAnswerDetails: 'yes' is neither"),
        (lambda sent: decode_update_session({}, sent), "name", "updateMask: 'name' can't be changed"),
    ],
)
def test_the_other_methods_refuse_by_field_too(decode: Any, sent: Any, message: str) -> None:
    """Limits of CheckGrounding, Rank and the session methods are Google's."""
    with pytest.raises(InvalidRequestError) as refused:
        decode(sent)
    assert message in str(refused.value)


def test_an_empty_mask_changes_all_and_a_page_has_an_end() -> None:
    """Without a mask what is left out goes to its default; a page holds at most 1000."""
    whole = {"display_name": "", "labels": [], "is_pinned": True, "user_pseudo_id": ""}
    assert decode_update_session({"isPinned": True}).model_dump(by_alias=False) == whole
    assert decode_update_session({"displayName": "x"}, "displayName").to_dict() == {"displayName": "x"}
    assert decode_list_sessions({"pageSize": "5000"}).page_size == 1000
    assert decode_list_sessions({}).page_size == 50
    state = decode_list_sessions({"filter": "state = IN_PROGRESS"}).filters
    assert state is not None
    assert state.to_dict()["value"] == "inProgress"
