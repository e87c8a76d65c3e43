"""What all tests share: one loaded embedding model, a clean environment, LlamaIndex's settings as they were."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import HealthCheck, settings

from llama_index_agentic_kb._aio import arun, run
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, Reply
from tests.faulty_server import Fault
from tests.shop import Shop, open_shop
from tests.space import reply
from tests.suite import ALONE

if TYPE_CHECKING:
    from pathlib import Path

    from llama_index.core.base.embeddings.base import BaseEmbedding

    from llama_index_agentic_kb import SessionStore

Answer: TypeAlias = "str | Reply | Fault"
Serve: TypeAlias = "Callable[[Answer | Sequence[Answer] | Callable[[ChatRequest], Answer]], LoopbackOpenAI]"

# A run tells of the change it tests, not of the machine or of chance: fuzzing is apart.
settings.register_profile(
    "same-each-run", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same-each-run"))

# Threads of torch that spin while they wait slow each other down where more run than there are cores, up to tenfold.
# Read when torch is loaded, here and in the programs that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No key, address, proxy or terminal of the developer's reaches a test, a fixture of a module, or a program they start.
_KEYS = ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY")
_TERMINALS = ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS")  # what rich and typer ask
for _name in (*_KEYS, *_PROXIES, *map(str.lower, _PROXIES)):
    os.environ.pop(_name, None)

_LONG = (
    "tests/benchmarks/", "tests/faults/", "tests/kills", "tests/leaks/", "tests/server/", "tests/test_cli.py",
    "tests/test_notebook.py", "tests/test_readme.py",
)  # fmt: skip


def pytest_sessionstart() -> None:
    """Clear the terminal's variables, which pytest has read by now for its own colours, before tests are imported."""
    for name in _TERMINALS:
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that look at how long things take; begin with the long ones, so that no core waits for them."""
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker("alone")
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Performs a coroutine for a sync caller, and for an async one."""
    return run if request.param == "sync" else lambda work: asyncio.run(arun(work))


@pytest.fixture(scope="session")
def embed_model() -> BaseEmbedding:
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch, for who asks)

    return default_embed_model()


@pytest.fixture(autouse=True, scope="session")
def no_implicit_loop() -> None:
    """The main thread has no event loop but those that are run and closed.

    LlamaIndex's sync methods call ``asyncio.get_event_loop``. Where none was set it makes one, which nobody closes.
    """
    asyncio.set_event_loop(None)


@pytest.fixture(autouse=True)
def settings_as_they_were() -> Iterator[None]:
    """What a test sets in LlamaIndex's ``Settings`` is gone after it."""
    from llama_index.core import Settings  # noqa: PLC0415 (some tests are about what is imported)

    before = dict(vars(Settings))
    Settings._callback_manager = None  # core's managers without handlers share this one's list: each test has its own
    yield
    vars(Settings).clear()
    vars(Settings).update(before)


@pytest.fixture(autouse=True)
def empty_embedding_cache() -> None:
    """No test finds the vectors of another one's queries."""
    if (module := sys.modules.get("llama_index_agentic_kb.search.embedding")) is not None:
        module.SHARED_CACHE.clear()  # loaded by a test, not here: some tests are about what is imported


@pytest.fixture
def server() -> Iterator[LoopbackOpenAI]:
    with LoopbackOpenAI(reply) as running:
        yield running


@pytest.fixture
def shop() -> Iterator[Shop]:
    with open_shop() as opened:
        yield opened


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[SessionStore]:
    from llama_index_agentic_kb import SessionStore  # noqa: PLC0415 (loads SQLAlchemy, for who asks)

    with SessionStore(tmp_path / "sessions.db") as opened:
        yield opened


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that starts a server with an answer (or several, or a function); it stops with the test."""
    with ExitStack() as servers:

        def start(answer: Any) -> LoopbackOpenAI:
            return servers.enter_context(LoopbackOpenAI(answer))

        yield start
