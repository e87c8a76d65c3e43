"""Generated AnswerQueryRequests, made from Google's own description of the message; and one with every field set."""

from __future__ import annotations

from typing import Any

from google.cloud import discoveryengine_v1 as g
from hypothesis import strategies as st

STORE = "projects/1/locations/global/collections/default_collection/dataStores/d"
CONFIGS = [
    "projects/p/locations/global/dataStores/d/servingConfigs/s",
    "projects/p/locations/global/collections/c/dataStores/d/servingConfigs/s",
    "projects/p/locations/global/collections/c/engines/e/servingConfigs/s",
]
_FILTERS = st.sampled_from(["", 'color: ANY("red", "a\\"b")', "year: IN(1969, 1972e) AND NOT (public = true)"])
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "serving_config": st.sampled_from(CONFIGS),
    "session": st.sampled_from(["", "-", "a1"]).map(lambda one: one and f"{STORE}/sessions/{one}"),
    "data_store": st.just(STORE),
    "filter": _FILTERS,
    "condition": _FILTERS,
    "asynchronous_mode": st.just(value=False),
    "max_rephrase_steps": st.integers(0, 5),
    "safety_settings": st.lists(
        st.fixed_dictionaries({"category": st.integers(1, 5), "threshold": st.integers(1, 5)}), max_size=2
    ),
    "query": st.fixed_dictionaries(
        {"text": st.text(min_size=1, max_size=9).filter(str.strip)}, optional={"query_id": st.text(max_size=8)}
    ),
    "user_labels": st.dictionaries(st.text(min_size=1, max_size=63), st.text(max_size=63), max_size=3),
}


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.name in _SPECIAL:
        return _SPECIAL[field.name]
    if field.message_type is not None:
        return _messages(field.message_type)
    if field.enum_type is not None:
        return st.integers(0, len(field.enum_type.values) - 1)
    kinds = {field.CPPTYPE_STRING: st.text(max_size=8), field.CPPTYPE_BOOL: st.booleans()}
    small = st.sampled_from([0, 1]) if field.cpp_type != field.CPPTYPE_FLOAT else st.sampled_from([-1.0, -0.25, 0.5])
    return kinds.get(field.cpp_type, small)


def _messages(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any message of a kind as data, each field there or not; of a oneof at most one."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    choices: dict[str, dict[str, st.SearchStrategy[Any]]] = {}
    for field in kind.fields:
        many = field.is_repeated and field.name not in _SPECIAL
        values = st.lists(_values(field), max_size=2) if many else _values(field)
        oneof = field.containing_oneof
        (choices.setdefault(oneof.name, {}) if oneof and len(oneof.fields) > 1 else fields)[field.name] = values
    needed = {name: fields.pop(name) for name in ("data_store",) if name in fields}
    plain = st.fixed_dictionaries(needed, optional=fields)
    for group in choices.values():
        one = st.one_of(st.just({}), *(st.fixed_dictionaries({name: values}) for name, values in group.items()))
        plain = st.builds(lambda a, b: {**a, **b}, plain, one)
    return plain


REQUESTS = _messages(g.AnswerQueryRequest.pb().DESCRIPTOR).map(
    lambda data: g.AnswerQueryRequest({"query": {"text": "Q?"}, "serving_config": CONFIGS[0], **data})
)

FULL = {
    "serving_config": CONFIGS[2],
    "query": {"text": "Who?", "query_id": "id"},
    "session": f"{STORE}/sessions/a1",
    "safety_spec": {"enable": True, "safety_settings": [{"category": 2, "threshold": 3}]},
    "related_questions_spec": {"enable": True},
    "grounding_spec": {"include_grounding_supports": True, "filtering_level": 2},
    "answer_generation_spec": {
        "model_spec": {"model_version": "stable"},
        "prompt_spec": {"preamble": "Be brief."},
        "include_citations": True,
        "answer_language_code": "de",
        "ignore_adversarial_query": True,
        "ignore_non_answer_seeking_query": True,
        "ignore_low_relevant_content": False,
        "ignore_jail_breaking_query": True,
    },
    "search_spec": {
        "search_params": {
            "max_return_results": 7,
            "filter": 'color: ANY("red")',
            "boost_spec": {"condition_boost_specs": [{"condition": "a = 1", "boost": 0.5}]},
            "order_by": "a desc",
            "search_result_mode": 2,
            "data_store_specs": [
                {
                    "data_store": STORE,
                    "filter": "b = 2",
                    "boost_spec": {
                        "condition_boost_specs": [
                            {
                                "boost_control_spec": {
                                    "field_name": "f",
                                    "attribute_type": 2,
                                    "interpolation_type": 1,
                                    "control_points": [{"attribute_value": "5D", "boost_amount": -0.5}],
                                }
                            }
                        ]
                    },
                    "custom_search_operators": "x",
                    "num_results": 3,
                }
            ],
        }
    },
    "query_understanding_spec": {
        "query_classification_spec": {"types": [1, 3, 1]},
        "query_rephraser_spec": {"disable": True, "max_rephrase_steps": 4, "model_spec": {"model_type": 1}},
        "disable_spell_correction": True,
    },
    "user_pseudo_id": "u",
    "user_labels": {"k": "v"},
    "end_user_spec": {"end_user_metadata": [{"chunk_info": {"content": "c", "document_metadata": {"title": "t"}}}, {}]},
}
"""Every field of v1 but asynchronousMode and the results that take the place of a search."""

READ = {
    "request": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
        "retrievalReasoningEffort": {"kind": "minimal"},
        "includeActivity": True,
        "maxOutputDocuments": 7,
        "knowledgeSourceParams": [],
    },
    "queryId": "id",
    "session": "a1",
    "userPseudoId": "u",
    "userLabels": {"k": "v"},
    "filters": {"type": "condition", "key": "color", "operator": "in", "value": ["red"]},
    "resultMode": "chunks",
    "dataStores": [
        {
            "dataStore": STORE,
            "filters": {"type": "condition", "key": "b", "operator": "eq", "value": 2},
            "maxResults": 3,
        }
    ],
    "endUserChunks": [{"content": "c", "title": "t"}],
    "classify": ["adversarialQuery", "jailBreakingQuery"],
    "maxRephraseSteps": 4,
    "unsupported": ["boostSpec", "orderBy", "customSearchOperators", "modelVersion"],
    "preamble": "Be brief.",
    "language": "de",
    "includeCitations": True,
    "ignoreAdversarialQuery": True,
    "ignoreNonAnswerSeekingQuery": True,
    "ignoreJailBreakingQuery": True,
    "ignoreLowRelevantContent": False,
    "relatedQuestions": True,
    "groundingSupports": True,
    "filteringLevel": "high",
    "safety": True,
    "safetySettings": [{"category": "dangerousContent", "threshold": "blockOnlyHigh"}],
}
"""What it is read as."""
