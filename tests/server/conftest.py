"""One server for the tests that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from llama_index_agentic_kb.testing import LoopbackOpenAI
from tests.server.serving import ADMIN, QUERY, define, reply, served, space_service


@pytest.fixture(scope="session")
def model() -> Iterator[LoopbackOpenAI]:
    """The language model of the shared server."""
    with LoopbackOpenAI(reply) as server:
        yield server


@pytest.fixture(scope="session")
def url(model: LoopbackOpenAI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The shared server, with the knowledge bases ``space`` and ``private``."""
    database = tmp_path_factory.mktemp("server") / "server.db"
    with served(space_service(database, model.llm()), requests_per_minute=None) as address:
        with httpx.Client(base_url=address, headers={"api-key": ADMIN}, trust_env=False, timeout=60) as client:
            define(lambda path, body: client.put(path, json=body).raise_for_status())
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client with a query key."""
    with httpx.Client(base_url=url, headers={"api-key": QUERY}, trust_env=False, timeout=60) as made:
        yield made


@pytest.fixture
def admin(url: str) -> Iterator[httpx.Client]:
    """A client with an admin key."""
    with httpx.Client(base_url=url, headers={"api-key": ADMIN}, trust_env=False, timeout=60) as made:
        yield made
