"""One server for the tests that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from llama_index_agentic_kb.testing import LoopbackOpenAI
from tests.server.serving import ADMIN, client_of, define, reply, served, space_service


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
        with client_of(address, ADMIN) as client:
            define(client)
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client with a query key."""
    with client_of(url) as made:
        yield made


@pytest.fixture
def admin(url: str) -> Iterator[httpx.Client]:
    """A client with an admin key."""
    with client_of(url, ADMIN) as made:
        yield made
