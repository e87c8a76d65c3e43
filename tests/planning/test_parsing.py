from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.planning.plan_graph import MAX_QUERY, Proposal
from llama_index_agentic_kb.planning.planner import read_partial_plan, read_proposals

PLAN = {
    "sub_queries": [
        {"id": "a", "query": "Who built it?", "sources": ["docs"], "depends_on": []},
        {"id": "b", "query": "When was it built?", "sources": ["docs", "wiki"], "depends_on": ["a"]},
    ]
}
READ = [Proposal("a", "Who built it?", ("docs",)), Proposal("b", "When was it built?", ("docs", "wiki"), ("a",))]
TEXT = json.dumps(PLAN)


@pytest.mark.parametrize(
    "reply",
    [
        TEXT, PLAN, json.dumps(PLAN, indent=2), f"{TEXT}\n\nI hope this helps.",
        f"Here you are:\n```json\n{TEXT}\n```\nAnything else?", f"```JSON{TEXT}```", json.dumps(PLAN["sub_queries"]),
        json.dumps({"plan": PLAN}), f'{{"thought": "two facts"}}\n{TEXT}',
        TEXT.replace('"sub_queries"', '"subQueries"').replace('"depends_on"', '"dependsOn"'),
        TEXT.replace('"sub_queries"', '"Sub-Questions"').replace('"query"', '"Sub Question"'),
        TEXT.replace('"sources"', '"tool_name"'), TEXT.replace('"', "'"), TEXT[:-1], TEXT.replace("]}", "],}"),
        "\ufeff" + TEXT,
    ],
)  # fmt: skip
def test_plans_are_read_in_whatever_dress_they_come(reply: str | dict[str, Any]) -> None:
    """Preamble, fences, wrappers, other spellings of keys and small breaks change nothing."""
    assert read_proposals(reply) == READ


@pytest.mark.parametrize(
    ("reply", "queries"),
    [
        ("1. Who built it?\n2. When was it built?", ["Who built it?", "When was it built?"]),
        ("Plan:\n\n (1) First one \n (2) Second one\nDone.", ["First one", "Second one"]),
        ("- Rain in Paris\n* Snow in Oslo\n• Fog", ["Rain in Paris", "Snow in Oslo", "Fog"]),
        ('["Rain in Paris", "Snow in Oslo"]', ["Rain in Paris", "Snow in Oslo"]),
        ('{"queries": ["1. Rain", "2) Snow", "  ", ""]}', ["Rain", "Snow"]),
        ('{"sub_queries": []}', []),
        (TEXT[:110], ["Who built it?"]),
        ('{"query": "Rain"}\n{"query": "Snow"}', ["Rain", "Snow"]),
        ('[{"question": "\\"Rain?\\""}, 7, null, {"note": "x"}]', ["Rain?"]),
        ('{"sub_queries": [{"query": "line one\\n  line two"}]}', ["line one line two"]),
    ],
)
def test_lists_of_queries_are_plans(reply: str, queries: list[str]) -> None:
    """Lists of any kind, single objects and the start of a cut plan are read; what holds no query is left out."""
    assert [proposal.query for proposal in read_proposals(reply)] == queries


def test_fields_are_taken_as_they_may_be_meant() -> None:
    """Sources may be one name or several in a text, ids may be numbers or missing; what is no name is left out."""
    reply: Any = {
        "sub_queries": [
            {"id": 1, "query": "Rain", "source": "docs, wiki", "dependencies": [2, None, {}]},
            {"query": "Snow", "sources": [{"name": "docs"}, "wiki"]},
        ]
    }
    assert read_proposals(reply) == [Proposal("1", "Rain", ("docs", "wiki"), ("2",)), Proposal("q2", "Snow", ("wiki",))]


@pytest.mark.parametrize(
    "reply",
    [
        "", "I'm sorry, but I can't help with that.", "<html><body><h1>502 Bad Gateway</h1></body></html>", "{}", "[]",
        '{"sub_queries": "none"}', "{{{{", "```json\n```",
    ],
)  # fmt: skip
def test_what_holds_no_plan_is_refused(reply: str) -> None:
    """Prose, pages of HTML, other JSON and nothing at all are no plan."""
    with pytest.raises(PlanningError, match="holds no plan"):
        read_proposals(reply)


@pytest.mark.parametrize(
    "hostile",
    [
        "\n" * 100_000, "1." + " " * 100_000, ("1." + " " * 300 + "\n") * 300, "- a" + " " * 100_000 + "\x0bb",
        "```" + " " * 100_000, "`" * 100_000, "```json" * 15_000, "[" * 100_000, "{" * 100_000, "(" * 100_000,
        '{"a":' * 20_000, '{"' + "\\" * 100_000, '{"sub_queries": [' + "{" * 100_000, '{"' + '"' * 100_000,
        "{}" * 50_000, "[]" + " " * 100_000,
    ],
    ids=lambda text: text[:10],
)  # fmt: skip
def test_hostile_replies_end(hostile: str) -> None:
    """No reply keeps the reader busy for long (a quadratic reader would need minutes for some of these)."""
    started = time.thread_time()  # of the processor: a busy machine is not the reader's fault
    with contextlib.suppress(PlanningError):
        assert isinstance(read_proposals(hostile), list)
    assert time.thread_time() - started < 20


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["sub_queries", "query", "sources", "id", "dependsOn", "plan", "x"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda value: "```json\n" + json.dumps(value)[:-1]))
@example('{"plan": {"plan": {}}}')
@example('{"sub_queries": [{"query": true}]}')
def test_any_text_is_read_or_refused(reply: str) -> None:
    """Whatever the model wrote gives clean proposals, or the one error that the planner expects."""
    try:
        proposals = read_proposals(reply)
    except PlanningError:
        return
    for proposal in proposals:
        assert proposal.query == " ".join(proposal.query.split())
        assert 0 < len(proposal.query) <= MAX_QUERY
        assert proposal.id
        assert all(isinstance(name, str) for name in (*proposal.sources, *proposal.depends_on))


@pytest.mark.parametrize(
    ("written", "queries"),
    [
        ("", []),
        ("Let me think", []),
        ('{"sub_queries": [{"id": "a", "query": "rain', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "sources": ["docs"]', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "sources": ["docs"], "depends_on": []', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "depends_on": [], "finds": "the', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the rain", "depends_on": ["b"', []),
        ('{"sub_queries": [{"id": "a", "query": "rain", "finds": "the', []),
        ('{"sub_queries": [{"id": "a", "query": "rain"}', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain"}, {"id": "b", "query": "sn', ["rain"]),
        ('{"sub_queries": [{"id": "a", "query": "rain"}, {"id": "b", "query": "snow"}]', ["rain", "snow"]),
        ('Plan:\n```json\n[{"query": "rain"}, {"query": "snow"}', ["rain", "snow"]),
        ('{"query": "rain", "sources": ["docs"]', []),
        ('{"query": "rain", "sources": ["docs"]}', []),
        ('{"id": "a", "query": "rain"}\n{"id": "b", "query": "snow"}', []),
        ('{"a": [[{[', []),
    ],
)
def test_what_is_still_written_is_read_as_far_as_it_can_be_searched(written: str, queries: list[str]) -> None:
    """A sub-query counts when it is known what it builds on: at its end, or where its last key begins."""
    assert [proposal.query for proposal in read_partial_plan(written)] == queries


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(TEXT)))
def test_nothing_is_begun_that_the_plan_does_not_hold(end: int) -> None:
    """Wherever a stream stands, what was read of it is the start of the plan, dependencies and all."""
    begun = read_partial_plan(TEXT[:end])
    assert begun == READ[: len(begun)]
