"""Calls of OpenAI's client: retried here alone, ended with their deadline, bounded for each model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb._aio import arun, deadline_after, run
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.llm import LanguageModel, Reply, calls
from llama_index_agentic_kb.testing import LoopbackOpenAI, ScriptedLLM

ASK = [ChatMessage(role="user", content="Who was first on the moon?")]
SAID = "Neil Armstrong, in July 1969."
QUICK = RetryPolicy(first_wait=0.01, max_wait=0.02)

Perform = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Perform:
    """Performs a flow with either driver."""
    return run if request.param == "sync" else lambda flow: asyncio.run(arun(flow))


def model_of(llm: Any, *handlers: Any, retries: RetryPolicy = QUICK) -> LanguageModel:
    manager = CallbackManager(list(handlers))
    return LanguageModel(llm, lambda: manager, retries=retries)


def ask(model: LanguageModel, way: str = "chat", seconds: float = 30) -> Coroutine[Any, Any, Reply]:
    return (model.chat if way == "chat" else model.stream)(ASK, deadline=deadline_after(seconds))


class RetriesItself(ScriptedLLM):
    """A model of another kind, whose client has retries of its own."""

    max_retries: int = 3


def test_a_model_that_retries_itself_is_left_to_it(perform: Perform) -> None:
    """Ours around its own would multiply; a model without any is retried here."""

    def gone(_: Any) -> Exception:
        return ConnectionError("gone")

    own, none = RetriesItself(gone), ScriptedLLM(gone)  # type: ignore[call-arg]  # pydantic's plugin sees the field alone
    for llm in (own, none):
        with pytest.raises(LLMError, match="ConnectionError: gone"):
            perform(ask(model_of(llm)))
    assert (len(own.calls), len(none.calls)) == (1, 3)


def test_settings_of_the_users_client_hold(perform: Perform) -> None:
    """Headers, authentication and event hooks of an ``http_client`` of the user's own are applied, once."""
    hooked: list[str] = []
    with LoopbackOpenAI(SAID) as server:
        theirs = httpx.Client(
            headers={"x-team": "blue"},
            params={"region": "eu"},
            event_hooks={"request": [lambda request: hooked.append(str(request.url))]},
        )
        llm = server.llm(http_client=theirs, default_headers={"x-app": "kb"})
        run(ask(model_of(llm)))
        perform(ask(model_of(llm)))
        headers = server.requests[0].headers
        assert (headers["x-team"], headers["x-app"]) == ("blue", "kb")
        assert hooked[0].count("region=eu") == 1
        theirs.close()


def test_one_model_has_one_bulkhead() -> None:
    """Whoever uses it; it goes with the model's object."""
    llm = ScriptedLLM(SAID)
    first, second = model_of(llm), model_of(llm)
    assert first._calls is second._calls
    assert model_of(ScriptedLLM(SAID))._calls is not first._calls
    known = id(llm)
    del llm, first, second
    gc.collect()
    assert known not in calls._CALLS
