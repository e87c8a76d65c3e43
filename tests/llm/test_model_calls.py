"""Calls of OpenAI's client: retried here alone, ended with their deadline, bounded for each model."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb._aio import arun, deadline_after, run
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.llm import LanguageModel, calls
from llama_index_agentic_kb.llm.replies import ThoughtFilter, without_thoughts
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply, ScriptedLLM

ASK = [ChatMessage(role="user", content="Who was first on the moon?")]
SAID = "Neil Armstrong, in July 1969."
QUICK = RetryPolicy(first_wait=0.01, max_wait=0.02)

Perform = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["sync", "async"])
def perform(request: pytest.FixtureRequest) -> Perform:
    return run if request.param == "sync" else lambda flow: asyncio.run(arun(flow))


def model_of(llm: Any, *handlers: Any, retries: RetryPolicy = QUICK) -> LanguageModel:
    manager = CallbackManager(list(handlers))
    return LanguageModel(llm, lambda: manager, retries=retries)


def ask(model: LanguageModel, way: str = "chat", seconds: float = 30) -> Coroutine[Any, Any, Any]:
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


CASES = [
    ("<think>\nHm, [ref_id:9].\n</think>\n\nIt was tall.", "It was tall."),
    ("<THINKING>a</thinking>It <reasoning>b</reasoning>was.", "It was."),
    ("thoughts that began in the prompt</think>\nIt was.", "It was."),
    ("<think></think>It was.", "It was."),
    ("<think>it never ends", ""),
    ("The tag `<think>` opens, `</think>` closes.", "The tag `<think>` opens, `</think>` closes."),
    ("a < b <thin", "a < b <thin"),
    ("  It was.", "  It was."),
    ("<think>a <b> </thought> c</think>It was.", "It was."),
]


@pytest.mark.parametrize(("text", "shown"), CASES)
def test_thoughts_are_left_out_of_a_reply(text: str, shown: str) -> None:
    """Blocks of any name, in any case, not closed, not opened; what is no block stays."""
    assert without_thoughts(text)[0] == shown


@given(st.sampled_from([case for case in CASES if "prompt" not in case[0]]), st.lists(st.integers(0, 60), max_size=20))
def test_a_stream_is_the_same(case: tuple[str, str], places: list[int]) -> None:
    """However it is cut."""
    text, shown = case
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    thoughts = ThoughtFilter()
    assert "".join(thoughts.feed(text[start:end]) for start, end in pairwise(bounds)) + thoughts.close() == shown


def think(request: ChatRequest) -> Reply:
    thought = '<think>{"sub_queries": [{"id": "q9", "query": "SECRET thought"}]} or [ref_id:7]?</think>\n\n'
    if "You plan searches" in request.text:
        return Reply(thought + json.dumps({"sub_queries": [{"id": "q1", "query": "height of the Saturn V rocket"}]}))
    return Reply(thought + "It was 110.6 m tall [ref_id:0].", chunk_size=3)


def test_neither_plan_nor_answer_nor_claims_nor_reader_get_a_thought() -> None:
    """Whole, as an answer, streamed and in a chat; the account counts them."""
    with LoopbackOpenAI(think) as server:
        source = KnowledgeSource("docs", retriever=MemoryRetriever(["The Saturn V rocket was 110.6 m tall."]))
        kb = KnowledgeBase([source], llm=server.llm())
        response = kb.retrieve("How tall was the Saturn V rocket?")
        assert response.text == "It was 110.6 m tall [ref_id:0]."
        assert "SECRET" not in response.to_json()
        assert response.plan is not None
        assert [sub_query.query for sub_query in response.plan.sub_queries][-1] == "height of the Saturn V rocket"
        assert response.grounding is not None
        assert [claim.text for claim in response.grounding.claims] == ["It was 110.6 m tall [ref_id:0]."]
        assert "characters of thoughts were left out" in str((response.activity or [])[-1].warning)
        assert kb.answer("How tall was the Saturn V rocket?").answer.text == "It was 110.6 m tall."
        told = "".join(piece.text for piece in kb.stream_answer("How tall was the rocket?") if piece.kind == "text")
        assert told == "It was 110.6 m tall."
        assert "".join(kb.as_chat_engine().stream_chat("How tall was it?").response_gen) == response.text
