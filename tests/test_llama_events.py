"""A question is announced to LlamaIndex's callbacks and dispatcher as its own engines announce theirs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.observability.otel.base import OTelCompatibleSpanHandler
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span_handlers import SimpleSpanHandler
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import PrivateAttr

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb.testing import LoopbackOpenAI, MemoryRetriever
from tests.space import ANSWER, reply

QUESTION = "How tall was the Saturn V rocket?"


class Events(BaseEventHandler):
    _seen: list[BaseEvent] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "events"

    def handle(self, event: BaseEvent, **_kwargs: Any) -> None:
        self._seen.append(event)

    @property
    def names(self) -> list[str]:
        """Of a question: what happens inside of a stage is left out."""
        stages = ("Query", "Retrieval", "Synthesize")
        return [name for event in self._seen if (name := event.class_name()).startswith(stages)]

    def one(self, name: str) -> Any:
        (event,) = [event for event in self._seen if event.class_name() == name]
        return event


class Tree(LlamaDebugHandler):
    """Keeps the parent of each event, and each trace's map."""

    def __init__(self) -> None:
        super().__init__(print_trace_on_end=False)
        self.parents: dict[str, str] = {}
        self.kinds: dict[str, CBEventType] = {}
        self.traced: set[str] = set()

    def on_event_start(self, event_type: CBEventType, *args: Any, **kwargs: Any) -> str:
        self.parents[kwargs["event_id"]], self.kinds[kwargs["event_id"]] = kwargs["parent_id"], event_type
        return super().on_event_start(event_type, *args, **kwargs)

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        self.traced |= {event for events in (trace_map or {}).values() for event in events}

    def below(self, kind: CBEventType) -> set[str]:
        """The kinds of the events that have a parent of a kind."""
        return {self.kinds[event].value for event, parent in self.parents.items() if self.kinds.get(parent) is kind}


async def _streamed(kb: KnowledgeBase) -> None:
    assert [piece async for piece in kb.astream_answer(QUESTION)]


WAYS: dict[str, Callable[[KnowledgeBase], Any]] = {
    "retrieve": lambda kb: kb.retrieve(QUESTION),
    "aretrieve": lambda kb: asyncio.run(kb.aretrieve(QUESTION)),
    "answer": lambda kb: kb.answer(QUESTION),
    "stream_answer": lambda kb: list(kb.stream_answer(QUESTION)),
    "astream_answer": lambda kb: asyncio.run(_streamed(kb)),
    "query": lambda kb: kb.as_query_engine().query(QUESTION),
    "stream": lambda kb: str(kb.as_query_engine(streaming=True).query(QUESTION)),
    "chat": lambda kb: kb.as_chat_engine().chat(QUESTION),
    "stream_chat": lambda kb: list(kb.as_chat_engine().stream_chat(QUESTION).response_gen),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_question_is_one_tree(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """QUERY, in it RETRIEVE and SYNTHESIZE with LlamaIndex's payloads, model calls below; one root span.

    A stream's QUERY ends when it is returned, as in LlamaIndex; what is written later stands below it all the same.
    """
    root, events, spans, tree = get_dispatcher(), Events(), SimpleSpanHandler(), Tree()
    monkeypatch.setattr(root, "event_handlers", [*root.event_handlers, events])
    monkeypatch.setattr(root, "span_handlers", [*root.span_handlers, spans])
    with LoopbackOpenAI(reply) as server:
        source = KnowledgeSource("docs", retriever=MemoryRetriever(["The Saturn V rocket was 110.6 m tall."]))
        kb = KnowledgeBase([source], llm=server.llm(), callback_manager=CallbackManager([tree]))
        WAYS[way](kb)

    ((start, end),) = tree.get_event_pairs(CBEventType.QUERY)
    assert (start.payload or {})[EventPayload.QUERY_STR] == QUESTION
    streams = way in ("stream", "stream_chat")
    assert (end.payload or {})[EventPayload.RESPONSE].source_nodes
    assert str((end.payload or {})[EventPayload.RESPONSE]).startswith("" if streams else "It was 110.6 m tall")
    ((start, end),) = tree.get_event_pairs(CBEventType.RETRIEVE)
    assert (start.payload or {})[EventPayload.QUERY_STR] == QUESTION
    assert [node.text for node in (end.payload or {})[EventPayload.NODES]] == ["The Saturn V rocket was 110.6 m tall."]
    ((_, end),) = tree.get_event_pairs(CBEventType.SYNTHESIZE)
    assert str((end.payload or {})[EventPayload.RESPONSE]) == ANSWER
    assert tree.below(CBEventType.QUERY) == {"retrieve", "synthesize"}
    assert tree.below(CBEventType.SYNTHESIZE) == {"llm"}
    assert "sub_question" in tree.below(CBEventType.RETRIEVE)
    assert streams or set(tree.kinds) == tree.traced

    ended = [*spans.completed_spans, *spans.open_spans.values()]
    assert len([span for span in ended if span.parent_id is None]) == 1
    assert {span.parent_id for span in ended} <= {None, *(span.id_ for span in ended)}
    assert spans.open_spans == {}
    names = [name for name in events.names if not name.startswith("Retrieval")]
    query, synthesis = ["QueryStartEvent", "QueryEndEvent"], ["SynthesizeStartEvent", "SynthesizeEndEvent"]
    expected = [query[0], *synthesis, query[1]]
    if streams:
        expected = query + synthesis
    assert names == (synthesis if "chat" in way else expected)
    assert str(events.one("SynthesizeEndEvent").response) == ANSWER
    assert events.names.count("RetrievalStartEvent") == events.names.count("RetrievalEndEvent") >= 1


def _question(engine: str, manager: CallbackManager, llm: Any) -> None:
    """Ask LlamaIndex's engine or ours, each over the same retriever."""
    retriever = MemoryRetriever(["The Saturn V rocket was 110.6 m tall."])
    if engine == "ours":
        source = KnowledgeSource("docs", retriever=retriever)
        KnowledgeBase([source], llm=llm, callback_manager=manager).as_query_engine().query(QUESTION)
    else:
        retriever.callback_manager = manager
        synthesizer = get_response_synthesizer(llm=llm, callback_manager=manager)
        RetrieverQueryEngine(retriever, synthesizer, callback_manager=manager).query(QUESTION)


def _drawn(parents: Mapping[str, str | None], names: Mapping[str, str]) -> list[str]:
    """Return the names as a tree, by indentation, in the order in which they began."""

    def below(parent: str | None, depth: int) -> list[str]:
        mine = [name for name, above in parents.items() if (above if above in names else None) == parent]
        return [line for name in mine for line in (" " * 2 * depth + names[name], *below(name, depth + 1))]

    return below(None, 0)


def _trees(engine: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Return the tree of ``LlamaDebugHandler`` and that of the OpenTelemetry export, of one question."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    handler = OTelCompatibleSpanHandler(provider.get_tracer("test"), tracer_provider=provider)
    root, tree = get_dispatcher(), Tree()
    with LoopbackOpenAI(reply) as server, monkeypatch.context() as patch:
        patch.setattr(root, "span_handlers", [*root.span_handlers, handler])
        manager = CallbackManager([tree])
        _question(engine, manager, server.llm(callback_manager=manager))
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    parents = {str(s.context.span_id): str(s.parent.span_id) if s.parent else None for s in spans}
    names = {event: kind.value for event, kind in tree.kinds.items()}
    return _drawn(dict(tree.parents), names), _drawn(parents, {str(s.context.span_id): s.name for s in spans})


def test_the_page_shows_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/account.md has the trees of LlamaIndex's engine and of ours side by side; what runs at once has no order."""
    page = (Path(__file__).parent.parent / "docs" / "account.md").read_text(encoding="utf-8")
    lines = [line[4:] for line in re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines() if line[:4].isspace()]
    for column, engine in ((slice(52), "theirs"), (slice(52, None), "ours")):
        shown = [line[column].rstrip() for line in lines if line[column].strip()]
        debug, spans = _trees(engine, monkeypatch)
        assert sorted(shown) == sorted(debug + spans), "\n".join(debug + spans)
