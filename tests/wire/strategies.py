"""Generated answers, sessions and requests, as odd as they may be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from google.cloud import discoveryengine_v1 as g
from hypothesis import settings
from hypothesis import strategies as st

from llama_index_agentic_kb.schema import QueryClass, QueryClassification, SkippedReason
from llama_index_agentic_kb.schema import answer as a
from llama_index_agentic_kb.schema.answer import (
    Answer,
    CitationPiece,
    ReferencesPiece,
    Session,
    StepsPiece,
    TextPiece,
    Turn,
    WholePiece,
)
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
CHUNKS = st.builds(
    a.ChunkReference,
    chunk=TEXTS,
    content=TEXTS,
    relevance_score=st.none() | SCORES,
    document=TEXTS,
    uri=TEXTS,
    title=TEXTS,
    page_identifier=TEXTS,
    metadata=DATA,
)
REFERENCES = st.one_of(
    CHUNKS,
    st.builds(
        a.DocumentReference,
        document=TEXTS,
        uri=TEXTS,
        title=TEXTS,
        chunks=st.lists(
            st.builds(a.ChunkContent, content=TEXTS, page_identifier=TEXTS, relevance_score=st.none() | SCORES),
            max_size=2,
        ),
        metadata=DATA,
    ),
    st.builds(a.StructuredReference, document=TEXTS, uri=TEXTS, title=TEXTS, data=DATA),
)
RESULTS = st.builds(
    a.SearchObservation,
    document=TEXTS,
    uri=TEXTS,
    title=TEXTS,
    snippets=st.lists(st.builds(a.Snippet, snippet=TEXTS, status=TEXTS), max_size=2),
    chunks=st.lists(CHUNKS, max_size=1),
    metadata=DATA,
)
STEPS = st.builds(
    a.AnswerStep,
    state=st.sampled_from([a.AnswerState.IN_PROGRESS, a.AnswerState.FAILED, a.AnswerState.SUCCEEDED]),
    description=TEXTS,
    thought=TEXTS,
    actions=st.lists(
        st.builds(a.AnswerStepAction, query=st.none() | TEXTS, results=st.none() | st.lists(RESULTS, max_size=2)),
        max_size=2,
    ),
)
RATINGS = st.builds(
    a.SafetyRating,
    category=st.sampled_from(a.HarmCategory),
    probability=st.none() | st.sampled_from(a.HarmLevel),
    probability_score=SCORES,
    severity=st.none() | st.sampled_from(a.HarmLevel),
    severity_score=SCORES,
    blocked=st.booleans(),
)


@st.composite
def answers(draw: st.DrawFn, *, done: bool = False) -> a.Answer:
    """Any answer; of one that is done, the state is final."""
    text = draw(st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(["Paris. 東京 😀 é."]))
    references = draw(st.lists(REFERENCES, max_size=3))
    states = [a.AnswerState.SUCCEEDED, a.AnswerState.FAILED]
    return a.Answer(
        id=draw(IDS),
        state=draw(st.sampled_from(states if done else list(a.AnswerState))),
        text=text,
        grounding_score=draw(st.none() | SCORES),
        citations=draw(st.lists(_claims(text, references, _citation), max_size=3)) if text else [],
        grounding_supports=draw(st.lists(_claims(text, references, _support), max_size=3)) if text else [],
        references=references,
        related_questions=draw(st.lists(TEXTS, max_size=2)),
        steps=draw(st.lists(STEPS, max_size=2)),
        query_classifications=draw(
            st.none()
            | st.lists(
                st.builds(QueryClassification, type=st.sampled_from(QueryClass), positive=st.booleans()), max_size=2
            )
        ),
        skipped_reasons=draw(st.lists(st.sampled_from(SkippedReason), max_size=2)),
        created_at=draw(st.none() | TIMES),
        completed_at=draw(st.none() | TIMES),
        safety_ratings=draw(st.lists(RATINGS, max_size=2)),
        language=draw(st.none() | st.just("de")),
    )


@st.composite
def _claims(draw: st.DrawFn, text: str, references: list[Any], make: Any) -> Any:
    start = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(start + 1, len(text)))
    sources = draw(st.lists(st.integers(0, len(references) - 1), max_size=3)) if references else []
    return draw(make(start, end, sources))


def _citation(start: int, end: int, sources: list[int]) -> st.SearchStrategy[a.Citation]:
    return st.just(a.Citation(start=start, end=end, sources=sources))


def _support(start: int, end: int, sources: list[int]) -> st.SearchStrategy[a.GroundingSupport]:
    unchecked = st.just(a.GroundingSupport(start=start, end=end, check_required=False))
    return unchecked | st.builds(
        a.GroundingSupport,
        start=st.just(start),
        end=st.just(end),
        score=st.none() | SCORES,
        check_required=st.sampled_from([None, True]),
        sources=st.just(sources),
    )


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    session_id = draw(IDS)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    turns = []
    for number in range(1, 1 + draw(st.integers(0, 2))):
        answer = draw(st.none() | answers(done=True))
        turn = Turn(
            session_id=session_id,
            number=number,
            query=draw(TEXTS),
            query_id=draw(TEXTS),
            answer_id=(answer.id if answer else None) or draw(IDS),
            answer=answer,
            query_config=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
            created_at=moment,
            completed_at=moment,
        )
        turns.append(turn)
    return Session(
        id=session_id,
        display_name=draw(TEXTS),
        user_pseudo_id=draw(TEXTS),
        turns=turns,
        labels=draw(st.lists(TEXTS, max_size=2)),
        is_pinned=draw(st.booleans()),
        started_at=draw(TIMES),
        updated_at=moment,
        ended_at=draw(st.none() | TIMES),
    )


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


def stream_answer(answer: Answer, session: Session | None = None, **options: Any) -> Iterator[bytes]:
    """The text claim by claim, each followed by its citations."""
    stream = AnswerStream(**options)
    yield stream.piece(StepsPiece(steps=answer.steps))
    yield stream.piece(ReferencesPiece(references=answer.references))
    sent = 0
    for citation in sorted(answer.citations, key=lambda one: one.end):
        yield stream.piece(TextPiece(text=answer.text[sent : max(sent, citation.end)]))
        sent = max(sent, citation.end)
        yield stream.piece(CitationPiece(citation=citation))
    yield stream.piece(TextPiece(text=answer.text[sent:]))
    yield stream.piece(WholePiece(answer=answer, session=session))
