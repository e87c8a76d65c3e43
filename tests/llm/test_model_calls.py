"""Calls of OpenAI's client: retried here alone, ended with their deadline, bounded for each model."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import CustomLLM

from llama_index_agentic_kb._aio import arun, deadline_after, gather, iterate, run
from llama_index_agentic_kb.account.budget import Budget, RetryBudget, set_budget
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError
from llama_index_agentic_kb.guard.bulkhead import BulkheadState
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.llm import LanguageModel, Reply, calls
from llama_index_agentic_kb.llm.calls import calls_of
from llama_index_agentic_kb.testing import LoopbackOpenAI, ScriptedLLM
from tests.faulty_server import Fault

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


def state_of(llm: Any) -> BulkheadState:
    return calls_of(llm, "", lambda error: error).bulkhead.state


def freed(llm: Any) -> bool:
    """Whether nothing of a model runs any more, within some seconds."""
    ends = time.monotonic() + 5
    while time.monotonic() < ends and (state_of(llm).abandoned or state_of(llm).at_work):
        time.sleep(0.01)
    return not state_of(llm).abandoned and not state_of(llm).at_work


@pytest.mark.parametrize("way", ["chat", "stream"])
@pytest.mark.parametrize("max_retries", [0, 3])
def test_a_failing_call_is_three_requests(perform: Perform, way: str, max_retries: int) -> None:
    """However often the client and LlamaIndex would retry, one inside the other: the attempts are ours."""
    with LoopbackOpenAI(lambda _: Fault.status(503)) as server:
        with pytest.raises(LLMError, match="status 503"):
            perform(ask(model_of(server.llm(max_retries=max_retries)), way))
        assert len(server.requests) == 3


@pytest.mark.parametrize("way", ["chat", "stream"])
@pytest.mark.parametrize("fault", [Fault.status(429), Fault.status(500), Fault.reset()], ids=["429", "500", "reset"])
def test_what_passes_is_waited_for(perform: Perform, way: str, fault: Fault) -> None:
    """The answer comes, billed once, and handlers are told of each attempt."""
    counter = TokenCountingHandler()
    with LoopbackOpenAI([fault, SAID]) as server:
        reply = perform(ask(model_of(server.llm(), counter), way))
        assert (reply.text, reply.usage.output_tokens) == (SAID, server.billed.completion_tokens)
        assert len(server.requests) == 2


def test_a_stream_is_not_begun_again_after_its_first_token() -> None:
    """What was told stays told, once."""
    with LoopbackOpenAI(lambda _: Fault.stream_reset(SAID)) as server:
        flow = ask(model_of(server.llm()), "stream")
        told: list[str] = []
        with pytest.raises(LLMError, match="connection to the model's server failed"):
            told.extend(iterate(flow))
        assert SAID.startswith("".join(told))
        assert told
        assert len(server.requests) == 1


def test_a_request_shares_its_retries(perform: Perform) -> None:
    """Calls made for one request take their retries from its budget."""
    budget = RetryBudget(share=0, minimum=3)

    async def flow(model: LanguageModel) -> None:
        set_budget(Budget(retries=budget))
        await gather([ask(model) for _ in range(4)])

    with LoopbackOpenAI(lambda _: Fault.status(503)) as server:
        perform(flow(model_of(server.llm())))
        assert len(server.requests) == 4 + 3
    assert (budget.calls, budget.retries) == (4, 3)


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


HANGS = {
    "hang": Fault.hang(),
    "drip": Fault.drip(0.05),
    "half": Fault.stream_hang(),
    "late": Fault.status(200).after(60),
}


@pytest.mark.parametrize("way", ["chat", "stream"])
@pytest.mark.parametrize("fault", HANGS.values(), ids=HANGS.keys())
def test_a_call_that_is_given_up_keeps_nothing(perform: Perform, way: str, fault: Fault) -> None:
    """Its thread and its place are free soon after the deadline, sync and async."""
    with LoopbackOpenAI(lambda _: fault) as server:
        llm = server.llm()
        with pytest.raises(DeadlineExceededError, match="language model gpt-4o-mini"):
            perform(ask(model_of(llm), way, seconds=0.3))
        assert freed(llm)
        assert len(server.requests) <= 1  # none where making the client took all the time


def test_a_stream_that_is_left_keeps_nothing() -> None:
    """A reader who goes away frees the thread, though the stream hangs and has no deadline near."""
    with LoopbackOpenAI(lambda _: Fault.stream_hang(content=SAID)) as server:
        llm = server.llm()
        reading = iterate(ask(model_of(llm), "stream", seconds=600))
        assert next(reading)
        reading.close()
        assert freed(llm)


GO = threading.Event()


class Stuck(CustomLLM):
    """A model whose calls can't be ended from outside."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="stuck")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        GO.wait(60)
        return CompletionResponse(text="at last")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        def tell() -> CompletionResponseGen:
            said = self.complete(prompt).text
            yield CompletionResponse(text=said, delta=said)

        return tell()


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_hung_calls_are_counted_and_bounded(perform: Perform, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model's places are all held by calls that hang, further ones are refused at once; others go on."""
    monkeypatch.setattr(calls, "MODEL_PLACES", 2)
    GO.clear()
    llm = Stuck()
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            perform(ask(model_of(llm), way, seconds=0.1))
    assert state_of(llm).abandoned == 2
    started = time.monotonic()
    with pytest.raises(LLMError, match="all its 2 places are held by calls that were given up"):
        perform(ask(model_of(llm), way, seconds=30))
    assert time.monotonic() - started < 10
    assert perform(ask(model_of(ScriptedLLM(SAID)), way)).text == SAID
    GO.set()
    assert freed(llm)
    assert perform(ask(model_of(llm), way)).text == "at last"
