"""Runs a server: uvicorn, logs, traces, the first key."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.server.access import JwksVerifier
from llama_index_agentic_kb.server.app import create_app
from llama_index_agentic_kb.server.configuration import Configuration
from llama_index_agentic_kb.server.http import JsonFormatter
from llama_index_agentic_kb.server.quotas import Quotas
from llama_index_agentic_kb.server.service import KnowledgeService

MAX_STOPPING_SECONDS: Final = 120
"""The maximum seconds that running answers get to finish when the server stops."""


def serve(configuration: Configuration) -> None:
    """Serve until the process gets SIGTERM or SIGINT; running answers are finished first."""
    service, keys = configuration.service(), configuration.api_keys()
    tokens = configuration.tokens
    if not keys and tokens is None:
        announce_first_key(service)
    if configuration.traces:
        _register_traces()
    limits = configuration.limits
    app = create_app(
        service,
        keys=keys,
        verifier=None if tokens is None else JwksVerifier(**tokens.model_dump(by_alias=False)),
        requests_per_minute=limits.requests_per_minute,
        max_running=limits.running_requests,
        quotas=Quotas(
            running=limits.running_questions,
            tenant_running=limits.tenant_running_questions,
            tenant_per_minute=limits.tenant_questions_per_minute,
            weights=limits.tenant_weights,
        ),
        max_body_bytes=limits.body_bytes,
        cors_origins=configuration.cors_origins,
    )
    with _json_logs():
        uvicorn.run(
            app,
            host=configuration.host,
            port=configuration.port,
            access_log=False,  # the server writes its own
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=MAX_STOPPING_SECONDS,
            ws="none",
        )


def _register_traces() -> None:
    """Send LlamaIndex's spans and events to the OpenTelemetry collector of the standard environment variables."""
    try:
        from llama_index.observability.otel import LlamaIndexOpenTelemetry  # noqa: PLC0415 (only if traces are on)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (same)
    except ModuleNotFoundError as error:
        raise ConfigurationError("traces: pip install llama-index-observability-otel") from error
    LlamaIndexOpenTelemetry(service_name_or_resource="agentic-kb", span_exporter=OTLPSpanExporter()).start_registering()


def announce_first_key(service: KnowledgeService) -> None:
    """Create an admin key and print it, if the catalog has none: nobody could use the server otherwise."""

    async def made() -> str | None:
        if (await service.catalog.snapshot()).keys:
            return None
        return (await service.catalog.add_key("admin", "first"))[1]

    key = asyncio.run(made())
    if key is not None:
        sys.stderr.write(f"admin key (shown once, stored as a hash): {key}\n")


@contextmanager
def _json_logs() -> Iterator[None]:
    """Write logs as lines of JSON to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
