"""The OpenAPI description is true: schemathesis sends what it allows, and what it does not, to a real server."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from llama_index_agentic_kb.server.app import _OPERATIONS, create_app
from tests.server.serving import ADMIN, space_service

EXAMPLES = int(os.environ.get("SERVER_EXAMPLES", "15"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

FRAMING = {"connection", "content-length", "expect", "host", "te", "transfer-encoding", "upgrade"}
"""Headers of HTTP itself: with odd values uvicorn refuses the request before any route, in plain text."""


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", trust_env=False).json())


@pytest.mark.slow
@pytest.mark.parametrize("operation", [*_OPERATIONS])
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
    """Each operation of the description is completed, and each of the completed ones exists."""
    service = space_service(tmp_path / "server.db", None)
    app: Any = create_app(service)
    paths = app._app.openapi()["paths"]
    service.close()
    ids = {
        one["operationId"] for path, methods in paths.items() for one in methods.values() if path.startswith("/know")
    }
    assert ids <= {*_OPERATIONS} <= ids | {"get_service_statistics"}
