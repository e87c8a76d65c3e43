"""Handlers, guarded: what they are told, and that they break nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.callbacks.base_handler import BaseCallbackHandler

from llama_index_agentic_kb import AgenticRetriever, KnowledgeSource
from llama_index_agentic_kb.account import ACTIVITY_KEY, ActivityCallbackHandler, GuardedCallbacks, guarded
from llama_index_agentic_kb.account.activity_log import GuardedCallbackManager, guard_component, with_handlers
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM

TEXTS = ["The moon is far away.", "The moon is made of rock.", "Mars is farther than the moon."]


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        super().__init__([], [])
        self.starts: list[tuple[CBEventType, str, str]] = []
        self.payloads: dict[str, dict[str, Any]] = {}

    def on_event_start(
        self, event_type: CBEventType, payload: Any = None, event_id: str = "", parent_id: str = "", **_: Any
    ) -> str:
        self.payloads[event_id] = payload
        self.starts.append((event_type, event_id, parent_id))
        return event_id

    def on_event_end(self, event_type: CBEventType, payload: Any = None, event_id: str = "", **_: Any) -> None: ...
    def start_trace(self, trace_id: str | None = None) -> None: ...
    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None: ...

    def of(self, kind: CBEventType) -> list[tuple[str, str]]:
        return [(event, parent) for event_type, event, parent in self.starts if event_type is kind]


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a handler's own trouble")


class Failing(Recorder):
    on_event_start = on_event_end = start_trace = end_trace = fails


def retriever(*handlers: BaseCallbackHandler) -> AgenticRetriever:
    modes: list[Any] = ["sync", "async", "async_only"]
    sources = [KnowledgeSource(mode, retriever=MemoryRetriever(TEXTS, mode=mode, latency=0.01)) for mode in modes]
    return AgenticRetriever(sources, callback_manager=CallbackManager(list(handlers)), effort="minimal")


def ask(asked: AgenticRetriever, is_async: bool, question: str = "moon") -> int:
    return len(asyncio.run(asked.aretrieve(question)) if is_async else asked.retrieve(question))


@pytest.mark.parametrize("is_async", [False, True])
def test_parents_in_many_threads(is_async: bool) -> None:
    """Sixteen threads that share one manager: by parent ids each search belongs to its own question's retrieval."""
    recorder = Recorder()
    asked = retriever(recorder)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: ask(asked, is_async, f"moon {n}"), range(16)))
    questions = {
        event: str(recorder.payloads[event][EventPayload.QUERY_STR]) for event, _ in recorder.of(CBEventType.RETRIEVE)
    }
    assert sorted(questions.values()) == sorted(f"moon {n}" for n in range(16))
    told = defaultdict(list)
    for event, parent in recorder.of(CBEventType.SUB_QUESTION):
        told[questions[parent]].append(recorder.payloads[event][ACTIVITY_KEY].arguments.search)
    assert told == {question: [question] * 3 for question in questions.values()}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failing_handler_breaks_nothing(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A user's handler that raises everywhere is logged; the query works and the others are told all of it."""
    recorder, plain = Recorder(), Recorder()
    assert ask(retriever(Failing(), recorder), is_async) == ask(retriever(plain), is_async) > 0
    assert Counter(kind for kind, *_ in recorder.starts) == Counter(kind for kind, *_ in plain.starts)
    assert "a callback handler failed: Failing" in caplog.text


def test_a_component_is_never_changed() -> None:
    """Handlers are added to a shallow copy, each once and guarded; a component with nothing to add is itself."""
    own, ours = Recorder(), Recorder()
    llm = ScriptedLLM("Hi", callback_manager=CallbackManager([own]))
    before, manager = llm.callback_manager, CallbackManager([ours, own])
    twin = with_handlers(llm, manager)
    assert twin is not llm
    assert (llm.callback_manager, llm.callback_manager.handlers) == (before, [own])
    twin.complete("?")
    assert len(own.of(CBEventType.LLM)) == len(ours.of(CBEventType.LLM)) == 1
    assert with_handlers(twin, manager) is twin
    assert with_handlers(ScriptedLLM(), CallbackManager([])).callback_manager.handlers == []
    bare = ScriptedLLM()
    assert guard_component(bare) is bare
    assert guard_component(object) is object
    assert guard_component(llm) is not llm


def test_a_manager_that_is_set_later_is_guarded() -> None:
    """However a component's manager is set, None included, what it gives is guarded; handlers can be removed."""

    class Component(GuardedCallbacks):
        pass

    component = Component()
    component.callback_manager = CallbackManager([Failing()])
    manager, recorder = component.callback_manager, Recorder()
    manager.add_handler(recorder)
    with manager.event(CBEventType.QUERY) as event:
        event.on_start()
    assert [kind for kind, *_ in recorder.starts] == [CBEventType.QUERY]
    manager.remove_handler(recorder)
    assert len(manager.handlers) == 1
    component.callback_manager = None
    assert isinstance(component.callback_manager, GuardedCallbackManager)


def test_activity_is_logged_as_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each closed record is a line of JSON, a failed one a warning; the function and the list get the records."""
    caplog.set_level(logging.INFO, logger="llama_index_agentic_kb.activity")
    told: list[Any] = []
    handler = ActivityCallbackHandler(told.append)
    sources = [
        KnowledgeSource("good", retriever=MemoryRetriever(TEXTS)),
        KnowledgeSource("bad", retriever=MemoryRetriever(TEXTS, fault=OSError("gone"))),
    ]
    asked = AgenticRetriever(sources, effort="minimal", callback_manager=CallbackManager([handler]))
    asked.retrieve("moon")
    lines = [r for r in caplog.records if r.name == "llama_index_agentic_kb.activity"]
    data = [json.loads(line.getMessage()) for line in lines]
    assert data == [record.to_dict() for record in handler.records]
    assert told == handler.records
    assert {line["knowledgeSourceName"]: line["outcome"] for line in data if line["type"] == "searchIndex"} == {
        "good": "ok",
        "bad": "error",
    }
    assert [r.levelno for r in lines].count(logging.WARNING) == 1
    assert all("completedAt" in line for line in data)


def test_the_trace_map_of_a_twin_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager inside another one's trace, which never sees it end, forgets old events at its limit."""
    monkeypatch.setattr("llama_index_agentic_kb.account.activity_log.TRACE_LIMIT", 50)
    outer, twin = guarded(CallbackManager([])), GuardedCallbackManager([Recorder()])
    with outer.as_trace("query"):
        for _ in range(500):
            with twin.as_trace("chat"):
                twin.on_event_start(CBEventType.SUB_QUESTION)
    assert len(twin.trace_map) <= 52
