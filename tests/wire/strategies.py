"""Generated answers, sessions and requests, as odd as they may be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from google.cloud import discoveryengine_v1 as g
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import AwareDatetime, BaseModel

from llama_index_agentic_kb.schema import answer as a
from llama_index_agentic_kb.wire.google import AnswerStream

# Few in CI; the long run has 1000.
EXAMPLES = int(os.environ.get("WIRE_EXAMPLES", "100"))
many = settings(max_examples=EXAMPLES)

# All characters, surrogates without their other half included.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["", "Müller 東京 😀", "a\u2028b", '"\\\n\t', "\x00", "\ud800", "*   item\n"]
)
IDS = st.text(st.sampled_from("abcdefXYZ0189-_.~"), min_size=1, max_size=8).filter(lambda one: one != "-")
SCORES = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.1, 1e-40, 0.8])
TIMES = st.datetimes(
    datetime(1, 1, 3),  # noqa: DTZ001 (the time zones are generated beside)
    datetime(9999, 12, 29),  # noqa: DTZ001 (same)
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-11))]),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.dates()
    | st.binary(max_size=3)
    | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)
DATA = st.dictionaries(TEXTS, JSON, max_size=3)


def built(kind: type[BaseModel], **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any model of a kind: each field by its type, but for those that are given."""
    if kind is a.AnswerStep:
        own = {"state": st.sampled_from([a.AnswerState.IN_PROGRESS, a.AnswerState.FAILED, a.AnswerState.SUCCEEDED])}
    fields = {name: _of(field.annotation) for name, field in kind.model_fields.items() if name not in own}
    return st.fixed_dictionaries({**fields, **own}).map(lambda given: kind(**given))


def _of(kind: Any) -> st.SearchStrategy[Any]:
    plain = {str: TEXTS, float: SCORES, bool: st.booleans(), AwareDatetime: TIMES, NoneType: st.none(), int: st.just(1)}
    if kind in plain:
        return plain[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return st.lists(_of(inner[0]), max_size=2)
    if origin is dict:
        return DATA if inner[1] is object else st.dictionaries(TEXTS, TEXTS, max_size=2)
    if origin in (Union, UnionType, Annotated):
        return st.one_of(*map(_of, inner[: 1 if origin is Annotated else None]))
    if origin is Literal:
        return st.sampled_from(inner)
    return built(kind) if issubclass(kind, BaseModel) else st.sampled_from(kind)


REFERENCES = _of(a.AnswerReference)


@st.composite
def answers(draw: st.DrawFn, *, done: bool = False) -> Any:
    """Any answer; of one that is done, the state is final."""
    text = draw(st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(["Paris. 東京 😀 é."]))
    references = draw(st.lists(REFERENCES, max_size=3))
    states = [a.AnswerState.SUCCEEDED, a.AnswerState.FAILED] if done else list(a.AnswerState)
    own: dict[str, Any] = {
        "id": IDS,
        "state": st.sampled_from(states),
        "text": st.just(text),
        "citations": st.lists(_claims(text, references, a.Citation), max_size=3) if text else st.just([]),
        "grounding_supports": st.lists(_claims(text, references, a.GroundingSupport), max_size=3)
        if text
        else st.just([]),
        "references": st.just(references),
    }
    return draw(built(a.Answer, **own))


@st.composite
def _claims(draw: st.DrawFn, text: str, references: list[Any], kind: type[a.Citation]) -> Any:
    start = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(start + 1, len(text)))
    sources = st.lists(st.integers(0, len(references) - 1), max_size=3) if references else st.just([])
    own = {"start": st.just(start), "end": st.just(end), "sources": sources}
    if kind is a.Citation:
        return draw(built(kind, **own))
    unchecked = {**own, "sources": st.just([]), "score": st.none(), "check_required": st.just(value=False)}
    return draw(built(kind, **own, check_required=st.sampled_from([None, True])) | built(kind, **unchecked))


@st.composite
def sessions(draw: st.DrawFn) -> Any:
    session_id = draw(IDS)
    turns = []
    for number in range(1, 1 + draw(st.integers(0, 2))):
        answer = draw(st.none() | answers(done=True))
        own = {"session_id": session_id, "number": number, "answer": answer}
        named = IDS if answer is None else st.just(answer.id)
        turns.append(draw(built(a.Turn, answer_id=named, **{name: st.just(value) for name, value in own.items()})))
    return draw(built(a.Session, id=st.just(session_id), turns=st.just(turns)))


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


def stream_answer(answer: a.Answer, session: a.Session | None = None, **options: Any) -> Iterator[bytes]:
    """The text claim by claim, each followed by its citations."""
    stream = AnswerStream(**options)
    yield stream.piece(a.StepsPiece(steps=answer.steps))
    yield stream.piece(a.ReferencesPiece(references=answer.references))
    sent = 0
    for citation in sorted(answer.citations, key=lambda one: one.end):
        yield stream.piece(a.TextPiece(text=answer.text[sent : max(sent, citation.end)]))
        sent = max(sent, citation.end)
        yield stream.piece(a.CitationPiece(citation=citation))
    yield stream.piece(a.TextPiece(text=answer.text[sent:]))
    yield stream.piece(a.WholePiece(answer=answer, session=session))
