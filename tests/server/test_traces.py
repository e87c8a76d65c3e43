"""The server's traces reach an OpenTelemetry collector, with the id that the response and the log have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
from llama_index_instrumentation import get_dispatcher
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.util._once import Once

from llama_index_agentic_kb.server.configuration import _register_traces

REQUEST_ID = "agentic_kb.request_id"


class Collector(service.TraceServiceServicer):
    """Keeps what it receives over OTLP."""

    def __init__(self) -> None:
        self.resources: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (OTLP's name)
        self.resources += request.resource_spans
        return messages.ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector on this machine, and LlamaIndex's dispatcher and the tracer provider as they were afterwards."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)  # another test may have set its own, for good
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    root = get_dispatcher()
    monkeypatch.setattr(root, "span_handlers", [*root.span_handlers])
    monkeypatch.setattr(root, "event_handlers", [*root.event_handlers])
    yield collector
    server.stop(None).wait()


def test_a_question_is_a_trace_with_the_request_id(collector: Collector, client: httpx.Client) -> None:
    """All spans of two questions arrive, one trace each, under the ``request-id`` of its response."""
    _register_traces()
    body = {"intents": [{"type": "semantic", "search": "How tall was the Saturn V?"}]}
    ids = set()
    for _ in range(2):
        response = client.post("/knowledgebases/space/retrieve?api-version=2025-11-01-preview", json=body)
        assert response.status_code == 200, response.text
        ids.add(response.headers["request-id"])
    get_dispatcher().span_handlers[-1].close()  # flushes

    names = {
        a.value.string_value for r in collector.resources for a in r.resource.attributes if a.key == "service.name"
    }
    assert names == {"agentic-kb"}
    spans = [span for r in collector.resources for scope in r.scope_spans for span in scope.spans]
    assert len({span.trace_id for span in spans}) == len([span for span in spans if not span.parent_span_id]) == 2
    inside = [span for span in spans if not span.name.startswith(("POST ", "fastapi."))]
    tags = [(span.trace_id, a.value.string_value) for span in inside for a in span.attributes if a.key == REQUEST_ID]
    assert len(tags) == len(inside) >= 4
    assert len(set(tags)) == 2
    assert {tag for _, tag in tags} == ids
