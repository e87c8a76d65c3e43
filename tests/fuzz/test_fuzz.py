"""Fuzzing: readers of outside text, each with inputs to begin with and what must hold for any input."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb._aio import run
from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.errors import AgenticKBError, InvalidRequestError
from llama_index_agentic_kb.grounding.citations import AnswerFilter, AnswerRules, MarkerFilter, cited_ids, clean_markers
from llama_index_agentic_kb.planning.findings import (
    MAX_VALUE,
    FindingsIntake,
    PassageSet,
    ShownPassage,
    StepAnswer,
    lines_in,
)
from llama_index_agentic_kb.planning.plan_graph import MAX_QUERY, Proposal, read_partial_plan, read_proposals, refers
from llama_index_agentic_kb.schema import (
    FilterNode,
    Finding,
    Message,
    Principal,
    RetrievalRequest,
    SourceParams,
    matches,
    parse_odata,
    to_odata,
)
from llama_index_agentic_kb.schema.filters import conditions, matcher
from llama_index_agentic_kb.schema.odata import MAX_LENGTH
from llama_index_agentic_kb.testing import MemoryRetriever
from llama_index_agentic_kb.wire import google, google_filter, google_messages

MAX_SECONDS: Final = 10.0
"""Time of the processor that one input may take: several hundred times what it takes."""

VALID: Final = (0, 1, 12)
ADDRESSES: Final = ("https://a.example/x",)


@dataclass(frozen=True)
class Target:
    read: Callable[[str], None]
    seeds: tuple[str, ...]
    words: tuple[str, ...]


def check(target: Target, text: str) -> None:
    """Read a text; an error of this library's tree is an answer, any other is not, nor is a long wait."""
    began = time.thread_time()
    with suppress(AgenticKBError):
        target.read(text)
    took = time.thread_time() - began
    assert took < MAX_SECONDS, f"reading {len(text)} characters took {took:.1f} s"


def _odata(text: str) -> None:
    tree = parse_odata(text)
    written = to_odata(tree)
    try:
        again = parse_odata(written)
    except InvalidRequestError as error:  # in full it may be beyond the limits: a long list, a parenthesis more
        if len(written) <= MAX_LENGTH and "at most" not in str(error):
            raise AssertionError(f"what was written can't be read: {written}") from error
        return
    assert to_odata(again) == written
    for metadata in _metadata(tree):
        held = matches(tree, metadata)
        assert held == matches(again, metadata) == matcher(tree)(metadata), (written, metadata)
    params = SourceParams(knowledge_source_name="docs", filters=tree)
    assert SourceParams.parse(json.loads(params.to_json())).filters == tree


def _metadata(tree: FilterNode) -> Iterator[dict[str, Any]]:
    """Yield metadata that a filter is about: each condition's own values, of another kind, in lists, and none."""
    parts = list(conditions(tree))[:20]
    yield {}
    yield {one.key: one.values[0] for one in parts}
    yield {one.key: one.values[-1:] for one in parts}
    yield {one.key: str(one.values[0]) + "x" for one in parts}
    yield {one.key: number for number, one in enumerate(parts)}


def _plan(text: str) -> None:
    for cut in {len(text), len(text) // 2, len(text) * 3 // 4}:
        for proposal in read_partial_plan(text[:cut]):
            _check_proposal(proposal)
    with suppress(AgenticKBError):
        for proposal in read_proposals(text):
            _check_proposal(proposal)


def _check_proposal(proposal: Proposal) -> None:
    assert 0 < len(proposal.query) <= MAX_QUERY
    names = (proposal.id, proposal.finds, proposal.filter, *proposal.sources, *proposal.depends_on)
    assert all(isinstance(one, str) for one in names)
    "".join([proposal.query, *names]).encode("utf-8")


def _citations(text: str) -> None:
    whole, removed = clean_markers(text, VALID)
    for size in (1, 3, 7):
        markers = MarkerFilter(VALID)
        cleaned = "".join([*(markers.feed(piece) for piece in _cut(text, size)), markers.close()])
        assert (cleaned, markers.removed) == (whole, removed), size
    assert set(cited_ids(whole)) <= set(VALID), whole
    assert clean_markers(whole, VALID) == (whole, 0), whole
    answers = []
    for size in (max(1, len(text)), 5):
        answer = AnswerFilter(AnswerRules(VALID, ADDRESSES))
        answers.append("".join([*(answer.feed(piece) for piece in _cut(text, size)), answer.close()]))
    assert answers[0] == answers[1]
    assert set(cited_ids(answers[0])) <= set(VALID), answers[0]


def _cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@cache
def _reading() -> PassageSet:
    source = KnowledgeSource("docs", retriever=MemoryRetriever(["x"]), description="x")
    node = NodeWithScore(node=TextNode(text="Ada Lund was born in 1961 (Bergen).", metadata={"title": "Lund"}))
    made = PassageSet()
    made.passages[1] = ShownPassage(node, source, "Lund", "Ada Lund was born in 1961 (Bergen).")
    return made


def _findings(text: str) -> None:
    found: dict[str, list[Finding]] = {}

    async def take(step: str, read: StepAnswer) -> None:
        found[step] = read.findings

    async def flow() -> None:
        intake = FindingsIntake(("q1", "q2"), ("q1", "q2", "q3"), _reading(), take)
        for end in range(9, len(text) + 9, 9):
            await intake.read(text[end - 9 : end], text[:end])
        if not intake.is_complete:
            await intake.finish(lines_in(text))

    run(flow())
    assert found.keys() <= {"q1", "q2", "q3"}
    for finding in (one for findings in found.values() for one in findings):
        assert 0 < len(finding.value) <= MAX_VALUE
        assert "\n" not in finding.value
        assert not refers(finding.value)
        assert not cited_ids(finding.value)
        finding.value.encode("utf-8")


def _request(text: str) -> None:
    for model in (RetrievalRequest, Message, SourceParams):
        with suppress(AgenticKBError):
            _round_trip(model, model.parse(text))
        with suppress(AgenticKBError, ValueError, RecursionError):
            data = json.loads(text)
            if not isinstance(data, str):
                _read_data(model, data)


def _read_data(model: Any, data: Any) -> None:
    try:
        read = model.parse(data)
    except InvalidRequestError:
        return
    except (ValueError, RecursionError) as error:
        raise AssertionError(f"{model.__name__}.parse: {type(error).__name__}: {error}") from error
    _round_trip(model, read)


def _round_trip(model: Any, read: Any) -> None:
    """What is read can be written, and read again as the same; a principal is never read."""
    wire = without_surrogates(json.dumps(read.to_dict(), ensure_ascii=False))
    text = read.to_json()
    text.encode("utf-8")
    again = model.parse(json.loads(wire)).to_dict()
    assert again == json.loads(wire) or "null" in wire  # an infinite number of an unknown field
    assert model.parse(again).to_dict() == again
    assert model.parse(text).to_dict() == model.parse(json.loads(text)).to_dict()
    assert not isinstance(getattr(read, "principal", None), Principal)


def _google(text: str) -> None:
    readers: tuple[Callable[[str], Any], ...] = (
        google.decode_answer_query,
        google.decode_check_grounding,
        google.decode_rank,
        google.decode_create_session,
        google.decode_update_session,
        lambda mask: google.decode_update_session({}, mask),
        lambda wanted: google.decode_list_sessions({"filter": wanted, "pageSize": wanted}),
        google_filter.parse_filter,
        google_messages.parse_serving_config,
        google_messages.parse_answer_name,
    )
    for read in readers:
        with suppress(AgenticKBError):
            read(text)


_PLAN: Final = (
    '{"sub_queries": [{"id": "q1", "query": "Who keeps the tower?", "sources": ["docs"], "depends_on": [], '
    '"filter": "year ge 2000", "finds": "the keeper"}, {"id": "q2", "query": "When was #q1 born?", "sources": '
    '["docs"], "depends_on": ["q1"], "finds": "a date"}]}'
)
_JSON: Final = ('{"', '": ', '"', "[", "]", "{", "}", ",", "null", "true", "1e999", "NaN", "\\ud800", "[[[[[[[[")

_ODATA_WORDS: Final = "eq ' ne gt ge lt le in ( ) or and not true false null , : /any( search.in( [ ] ]] '' 1e308"
_MARKER_WORDS: Final = "[ ] [ref_id: [ref_id:0] [ref_id:9] ref_ id : , ; 0 1 9 ( ) ![ http:// www.a.de/x <a"

TARGETS: Final[dict[str, Target]] = {
    "odata": Target(
        _odata,
        (
            "(category eq 'a''b' or year ge 1969) and not (public eq false) and tags/any(t: t eq 'x' or t eq 'y')",
            "search.in(id, 'a,b|c', ',|') and 1.5 lt size and date le 2024-01-31T12:00:00Z and [a]] b] ne null",
            "not (tags/any(x: search.in(x, 'a b')) or a/b in (1, 'x', true) or flag) and list/any()",
        ),
        (*_ODATA_WORDS.split(), " "),
    ),
    "plan": Target(
        _plan,
        (_PLAN, f"Sure:\n```json\n{_PLAN}\n```", "1. Who built it?\n2) When?\n- And why?", '["a", "b"]\n{"query": 1}'),
        (*_JSON, "sub_queries", "query", "plan", "depends_on", "sources", "finds", "filter", "id", "```", "\n1. "),
    ),
    "citations": Target(
        _citations,
        (
            "Paris [ref_id:0] and [ref_id: 1, 12]. [ref_id:7] [REF_ID:0; ref_id:9] [ref_",
            "[ref_[ref_id:9]id:7] [[ref_id:9]ref_id:7] [x](https://a.example/x) ![y](http://evil)",
        ),
        (*_MARKER_WORDS.split(), "\n", "  "),
    ),
    "findings": Target(
        _findings,
        (
            (
                '{"step": "q1", "answers": [{"value": "Ada Lund", "confidence": "stated", "ref": 1}]}\n'
                '{"step": "q2", "answers": [{"value": "1961 (Bergen)", "ref": [1]}, {"value": "#q1"}]}'
            ),
            '```json\n[{"id": 1, "answer": "Ada"}, {"step": "q3", "value": null}]\n```',
            '{"q1": ["a", "b"], "q2": {"value": 1e999}}',
        ),
        (*_JSON, '{"step"', "answers", "value", "ref", "confidence", "none", "#q1", "q2", "[ref_id:0]", "http://x"),
    ),
    "request": Target(
        _request,
        (
            (
                '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}], "retrievalReasoningEffort"'  # noqa: E501 (text as it is sent)
                ': {"kind": "low"}, "maxRuntimeInSeconds": 3, "maxOutputSize": 500, "knowledgeSourceParams": [{'
                '"knowledgeSourceName": "docs", "kind": "x", "filterAddOn": "a eq 1", "rerankerThreshold": 2.5, "more": 1}]}'  # noqa: E501 (text as it is sent)
            ),
            '{"intents": [{"type": "semantic", "search": "a"}], "outputMode": "extractiveData"}',
            '{"role": "user", "content": "hi"}',
            (
                '{"knowledgeSourceName": "docs", "filters": {"logic": "and", "filters": [{"key": "a", "operator": "in", '  # noqa: E501 (text as it is sent)
                '"value": ["x", 1, true, 1.5]}, {"logic": "not", "filters": [{"key": "$or", "value": 1}]}]}}'
            ),
        ),
        (*_JSON, "filters", "logic", "key", "value", "operator", "principal", "messages", "content", "image", "url"),
    ),
    "google": Target(
        _google,
        (
            (
                '{"query": {"text": "Who?"}, "session": "projects/p/locations/global/dataStores/d/sessions/-", '
                '"searchSpec": {"searchParams": {"maxReturnResults": 5, "filter": "color: ANY(\\"red\\")", "orderBy": "a"}},'  # noqa: E501 (text as it is sent)
                '"answerGenerationSpec": {"includeCitations": true, "modelSpec": {"modelVersion": "stable"}}, '
                '"queryUnderstandingSpec": {"queryRephraserSpec": {"maxRephraseSteps": 2}}, "userLabels": {"a": "b"}}'
            ),
            'color: ANY("red", "a\\"b") AND NOT (year: IN(1969, 1972e) OR public = true)',
            '{"answerCandidate": "x", "facts": [{"factText": "y", "attributes": {"a": "b"}}]}',
            '{"records": [{"id": "1", "title": "t", "content": "c"}], "query": "q", "topN": 2}',
            "projects/p/locations/global/collections/c/engines/e/servingConfigs/s",
        ),
        (*_JSON, "query", "text", "ANY(", "IN(", "AND", "OR", "NOT", "1e", "*", "projects/", "pageSize", "displayName"),
    ),
}

_ODD = ("\x00", "\ud800", "\u202e", "\u200b", "é", "東", "😀", "\U000e0041", "9" * 30, "\\", "\u2028", "((((((((", "\r")


def texts(target: Target) -> st.SearchStrategy[str]:
    piece = st.sampled_from([*target.words, *_ODD])
    made = st.lists(piece | st.text(max_size=3), max_size=40).map("".join)
    return st.one_of(made, _changed(target, piece), st.text(st.characters(exclude_categories=()), max_size=60))


@st.composite
def _changed(draw: st.DrawFn, target: Target, piece: st.SearchStrategy[str]) -> str:
    text = draw(st.sampled_from(target.seeds))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        put = draw(piece | st.sampled_from(target.seeds) | st.just(text[start:end] * 3))
        text = text[:start] + put + text[end:]
    return text


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

FOUND: dict[str, tuple[str, ...]] = {
    # Removing the marker in the middle made one of what stood around it.
    "odata": (
        "name eq '\ud800'",  # a lone surrogate, which no JSON text could be made of
        "[$or] eq 1",  # pydantic's error instead of ours
        "[_node_type] ne null",
        "not (b in (1, 2))",  # written with two pairs of parentheses, and read back with one
    ),
    "plan": (
        '[{"query": "\udc81", "sources": ["d\udc81"]}]',  # TypeError while it streamed
        f'{{"sub_queries": [{{"query": {"9" * 5_000}}}]}}',  # more digits than Python writes
        *(sign * 100_000 for sign in ("\n", "`", "[", "{", "(", "{}", '{"a":', '{"\\')),  # a quadratic reader
        ("1." + " " * 300 + "\n") * 300,
        "- a" + " " * 100_000 + "\x0bb",
    ),
    "request": (
        '{"role": "use\\ud800r", "content": "?"}',
        '{"knowledgeSourceName": "docs", "kind": "\\udcf6", "more": 1e9991}',
        *(opened * 100_000 for opened in ("[", '{"a":', '{"filters": [')),  # CVE-2025-5302, CVE-2025-1752
        '{"messages": ' + "[" * 900 + "]" * 900 + "}",  # RecursionError
    ),
    "citations": ("[ref_[ref_id:9]id:7]", "[[ref_id:9]ref_id:7]", "[ref_id:[ref_id:9]7]"),
}
"""What the fuzzer found once."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks_a_reader(name: str) -> None:
    """Whatever comes, a reader reads it or raises this library's own errors, soon; ``make fuzz`` is the long form."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(texts(TARGETS[name]))
    def feed(text: str) -> None:
        check(TARGETS[name], text)

    feed()


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in TARGETS for text in (*TARGETS[name].seeds, *FOUND.get(name, ()))]
)
def test_seeds_are_read_and_what_was_found_once_stays_mended(name: str, text: str) -> None:
    """What the fuzzer begins with, and inputs that broke a reader, hold every promise."""
    check(TARGETS[name], text)
