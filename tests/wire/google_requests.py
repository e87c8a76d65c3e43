"""Generated AnswerQueryRequests, made from Google's own description of the message."""

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


def at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return {**value, "query": {"text": "Who?", **value.get("query", {})}}
