"""How a server is run: its OpenAPI description (schemathesis sends it to a real one), its traces, several at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llama_index_instrumentation import get_dispatcher
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.util._once import Once
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from llama_index_agentic_kb.server.app import _register_traces, create_app
from llama_index_agentic_kb.server.catalog import MODELS
from tests.kills_sessions.postgres import why_not
from tests.server.replicas import Load, replace_and_kill
from tests.server.serving import ADMIN, space_service

EXAMPLES = int(os.environ.get("SERVER_EXAMPLES", "15"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

OPERATIONS = ["retrieve", "get_passage", "get_source_status", "get_service_statistics"]
OPERATIONS += [f"{verb}_{kind}" for verb in ("create", "put", "get", "delete") for kind in MODELS]
OPERATIONS += [f"list_{kind}s" for kind in MODELS]
FRAMING = {"connection", "content-length", "expect", "host", "te", "transfer-encoding", "upgrade"}
"""Headers of HTTP itself: with odd values uvicorn refuses the request before any route, in plain text."""


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", trust_env=False).json())


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_request_breaks_the_server(url: str, schema: Any, operation: str) -> None:
    """Whatever is sent, the status, type and body are among those described, and no failure of the server."""
    described = schema.find_operation_by_id(operation)
    modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    cases: Any = st.one_of([described.as_strategy(generation_mode=mode) for mode in modes])

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=cases)
    def check(case: Any) -> None:
        for name in FRAMING & {name.lower() for name in case.headers or ()}:
            del case.headers[name]
        case.call_and_validate(base_url=url, headers={"api-key": ADMIN}, checks=CHECKS)

    check()


def test_every_route_is_described(tmp_path: Any) -> None:
    """With credentials, the version, the common errors and, where one is sent, the body, whose schema is there."""
    service = space_service(tmp_path / "server.db", None)
    app: Any = create_app(service)
    schema = app._app.openapi()
    service.close()
    found = [
        one for path, own in schema["paths"].items() if path.startswith(("/know", "/serv")) for one in own.values()
    ]
    assert sorted(one["operationId"] for one in found) == sorted(OPERATIONS)
    for one in found:
        assert one["security"] == [{"apiKey": []}, {"bearer": []}]
        assert {"400", "401", "403", "429", "503"} <= one["responses"].keys()
        versions = [parameter["schema"] for parameter in one["parameters"] if parameter["name"] == "api-version"]
        assert versions or one["operationId"] == "get_passage"
        assert all(version.get("default") in (None, *version["enum"]) for version in versions)
    bodies = [
        one["requestBody"]["content"]["application/json"]["schema"]["$ref"] for one in found if "requestBody" in one
    ]
    assert len(bodies) == 5
    assert {ref.rpartition("/")[2] for ref in bodies} <= schema["components"]["schemas"].keys()


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


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
async def test_servers_come_and_go_under_load() -> None:
    """Definitions made on one server hold on both; every request is answered at last, and no answered turn is lost."""

    async def wait(load: Load) -> None:
        await load.more(4)

    load, lost, _ = await replace_and_kill(4, wait, rolled=1)
    assert (load.failed, lost) == ([], 0)
    assert load.turns >= 16
