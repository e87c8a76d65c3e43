"""Faults of language models and embedding models: their server on loopback misbehaves, the real client talks to it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource, RetrievalResponse, RetrieverOptions
from llama_index_agentic_kb.errors import DeadlineExceededError, SynthesisError
from llama_index_agentic_kb.guard.resilience import RetryPolicy
from llama_index_agentic_kb.llm.calls import calls_of
from llama_index_agentic_kb.schema import MissingPart, ModelAnswerSynthesisActivity, ModelQueryPlanningActivity, Outcome
from llama_index_agentic_kb.schema.answer import AnswerState
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, MemoryRetriever, Reply
from llama_index_agentic_kb.testing.openai_api import Connection
from tests.aio.conftest import until
from tests.faults.registry import HANGS, failing, fault, timed
from tests.faulty_server import Fault
from tests.openai_embedding import OpenAIEmbedding

AREA = "language model"
EMBEDDING = "embedding model"

SOON = 2.0
"""The deadline of requests that something hangs in, in seconds."""

LONGER = 6.0
"""The deadline where calls have to be answered before the one that hangs."""

MANY = 6.0
"""The deadline where many requests have to reach the model before it."""

LATE = 25.0
"""The deadline of requests that nothing hangs in; a Retry-After of 30 s is beyond it."""

QUICK = RetryPolicy(first_wait=0.02, max_wait=0.05)

SAID = "It rains in Paris [ref_id:0]."
TEXTS = ["Rain in Paris.", "Rain in Oslo.", "Rain in Rome."]

model = LoopbackOpenAI


def base(server: LoopbackOpenAI, *, seconds: float = LATE, **fields: Any) -> KnowledgeBase:
    """A knowledge base over three texts; without planning unless an effort says otherwise."""
    source = KnowledgeSource("docs", "Weather.", retriever=MemoryRetriever(TEXTS, similarity_top_k=3))
    options = RetrieverOptions(retries=QUICK)
    settings = {"effort": "minimal", "options": options, "max_runtime_in_seconds": seconds, **fields}
    return KnowledgeBase([source], llm=server.llm(), **settings)


def ask(kb: KnowledgeBase, *, in_a_loop: bool = False) -> RetrievalResponse:
    return asyncio.run(kb.aretrieve("Where does it rain?")) if in_a_loop else kb.retrieve("Where does it rain?")


def plan_or(answer: Any, plan: Any) -> Callable[[Any], Any]:
    """Answer planning with one thing and all else with another."""
    return lambda request: plan if request.response_format is not None else answer


def planned(*queries: str) -> str:
    steps = [{"id": f"q{n}", "query": query, "sources": ["docs"]} for n, query in enumerate(queries, start=1)]
    return json.dumps({"sub_queries": steps})


def record_of(response: RetrievalResponse, kind: type[Any]) -> Any:
    return next(record for record in response.activity or [] if isinstance(record, kind))


def missing_answer(response: RetrievalResponse) -> MissingPart:
    """The answer, which has to be named as missing."""
    assert response.status_code == 206
    (part,) = [part for part in response.missing if part.what == "answer"]
    return part


def all_threads_are_free(kb: KnowledgeBase) -> bool:
    """Whether no call of the model is under way any more, soon after."""
    bulkhead = calls_of(kb.llm, "", lambda error: error).bulkhead
    return until(lambda: not bulkhead.state.abandoned and not bulkhead.state.at_work, LATE)


def _retried(answers: Sequence[Any], waits: float) -> None:
    """Answer in the end, after as many HTTP requests and some seconds."""
    with model([*answers, SAID]) as server:
        response = ask(base(server))
        assert (response.status_code, response.text) == (200, SAID)
        assert len(server.requests) == len(answers) + 1
        assert server.requests[-1].arrived - server.requests[0].arrived >= waits


for injected, answers, waits in (
    ("status 500 once", [Fault.status(500)], 0),
    ("status 429 without Retry-After, twice", [Fault.status(429), Fault.status(429)], 0),
    ("connection reset, then body cut midway", [Fault.reset(), Fault.cut()], 0),
    ("status 503 with Retry-After 0.3 s", [Fault.status(503, retry_after=0.3)], 0.29),
):
    promise = f"{'it is waited for, then ' if waits else ''}the answer, after {len(answers) + 1} HTTP requests"
    fault(AREA, injected, promise)(partial(_retried, answers, waits))


def _extracted_instead(response: RetrievalResponse, why: str) -> None:
    part = missing_answer(response)
    assert part.outcome is Outcome.ERROR
    assert why in part.reason
    assert {extract.content for extract in response.extracts} == set(TEXTS)


@fault(
    AREA,
    "status 503 each time",
    "extracted data, status 206, the error named, after 3 HTTP requests (12 by the client's own retries)",
)
def down_for_ever() -> None:
    with model(lambda _: Fault.status(503)) as server:
        _extracted_instead(ask(base(server)), "status 503")
        assert len(server.requests) == 3


@fault(AREA, "its server is gone", "extracted data, status 206, the error named; an answer that FAILED says so")
def gone() -> None:
    with model(SAID) as server:
        kb = base(server)
    _extracted_instead(ask(kb), "connection")
    answer = kb.answer("Where does it rain?")
    assert (answer.answer.state, len(answer.answer.references)) == (AnswerState.FAILED, 3)
    assert "connection" in " ".join(answer.warnings)
    assert "It rains" not in answer.answer.text


def _given_up_at_once(code: int, retry_after: float | str, *, in_a_loop: bool) -> float:
    with model(lambda _: Fault.status(code, retry_after=retry_after)) as server:
        response, waited = timed(lambda: ask(base(server), in_a_loop=in_a_loop))
        _extracted_instead(response, f"status {code}")
        assert len(server.requests) == 1
        return waited


for injected, code, retry_after, in_a_loop in (
    ("status 429 with Retry-After 30 s", 429, 30, False),
    (
        "status 503 with a Retry-After date in an hour",
        503,
        format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True),
        True,
    ),
):
    fault(AREA, injected, "extracted data at once, after 1 HTTP request", deadline=LATE)(
        partial(_given_up_at_once, code, retry_after, in_a_loop=in_a_loop)
    )


def _refused(code: int) -> None:
    with model(lambda _: Fault.status(code)) as server:
        error = failing(SynthesisError, f"status {code}", lambda: ask(base(server)))
        assert len(server.requests) == 1
        assert "sk-loopback" not in f"{error!r} {error.__cause__!r}"


for code in (401, 400, 404):
    secretly = " without the key" if code == 401 else ""
    fault(AREA, f"status {code}", f"an error{secretly}, after 1 HTTP request")(partial(_refused, code))


@fault(AREA, "every call fails with 503, 6 answers side by side", "5 retries for the whole request, as its budget says")
def a_storm() -> None:
    def reply(request: Any) -> Any:
        return Fault.status(503) if "Oslo" in request.text else SAID

    policy = RetryPolicy(attempts=99, first_wait=0.01, max_wait=0.02)
    with model(reply) as server:
        engine = base(server, options=RetrieverOptions(retries=policy)).as_query_engine(response_mode="accumulate")
        assert engine.query("Where does it rain?").metadata["agentic_kb"]["statusCode"] == 206  # type: ignore[index]
        assert sum("Oslo" in chat.text for chat in server.chats) == 6


def _extracted_in_time(answer: Fault, *, in_a_loop: bool) -> float:
    with model(lambda _: answer) as server:
        kb = base(server, seconds=SOON)
        response, waited = timed(lambda: ask(kb, in_a_loop=in_a_loop))
        assert missing_answer(response).outcome is Outcome.TIMEOUT
        assert {extract.content for extract in response.extracts} == set(TEXTS)
        assert len(server.requests) <= 1
        assert record_of(response, ModelAnswerSynthesisActivity).outcome is Outcome.TIMEOUT
        assert all_threads_are_free(kb)
        return waited


for injected, freed, answer, in_a_loop in (
    ("the answer hangs (sync)", "status 206, its thread freed", Fault.hang(), False),
    ("the answer hangs (async)", "status 206, its call cancelled", Fault.hang(), True),
    ("the answer drips, a byte in 50 ms", "its thread freed", Fault.drip(0.05), False),
    ("the body stops halfway", "its thread freed", Fault.stream_hang(), False),
):
    fault(AREA, injected, f"extracted data by the deadline, {freed}", deadline=SOON)(
        partial(_extracted_in_time, answer, in_a_loop=in_a_loop)
    )


@fault(AREA, "planning hangs", "the question itself is searched and answered by the deadline", deadline=LONGER)
def planning_hangs() -> float:
    with model(plan_or(SAID, Fault.hang())) as server:
        kb = base(server, seconds=LONGER, effort="low")
        response, waited = timed(lambda: ask(kb))
        assert response.text == SAID
        planning = record_of(response, ModelQueryPlanningActivity)
        assert planning.error is not None
        assert planning.error.code == "deadlineExceeded"
        assert all_threads_are_free(kb)
        return waited


@fault(AREA, "a caller leaves while the answer hangs", "its call ends with it: no thread and no place is kept")
def caller_leaves() -> None:
    asked = threading.Event()

    def reply(_: Any) -> Fault:
        asked.set()
        return Fault.hang()

    async def leave(kb: KnowledgeBase) -> None:
        task = asyncio.create_task(kb.aretrieve("Where does it rain?"))
        assert await asyncio.to_thread(asked.wait, LATE)
        task.cancel()
        await asyncio.wait([task], timeout=HANGS)
        assert task.cancelled()

    with model(reply) as server:
        kb = base(server, seconds=60)
        asyncio.run(leave(kb))
        assert all_threads_are_free(kb)


@fault(AREA, "30 answers of one model hang at once", "another model answers meanwhile: each has a bulkhead of its own")
def a_model_hangs_beside_another() -> None:
    with model(lambda _: Fault.hang()) as bad, model(SAID) as good:
        stuck = base(bad, seconds=MANY)
        threads = [threading.Thread(target=ask, args=(stuck,), daemon=True) for _ in range(30)]
        for thread in threads:
            thread.start()
        until(lambda: len(bad.requests) >= 20, LATE)
        assert ask(base(good, seconds=LATE)).text == SAID
        for thread in threads:
            thread.join(LATE)
        assert not any(thread.is_alive() for thread in threads)
        assert all_threads_are_free(stuck)


def _typed(answer: Any, why: str) -> None:
    """Sync and async, the error says what came, and it was asked for once."""
    for in_a_loop in (False, True):
        with model(lambda _: answer) as server:
            kb = base(server)
            failing(SynthesisError, why, partial(ask, kb, in_a_loop=in_a_loop))
            assert len(server.requests) == 1


SAYS = "an error that says so"
for injected, promise, answer, why in (
    ("a web page in place of the answer", f"{SAYS}, after 1 HTTP request", Fault.html(), "a web page in place of JSON"),
    (
        "half a JSON object in place of the answer",
        f"{SAYS}, after 1 HTTP request",
        Fault.bad_json(),
        "JSON that is broken off",
    ),
    (
        "status 200 with an error body",
        "an error that holds its message, after 1 HTTP request",
        Fault.error_body(),
        "an error in place of a reply: Scripted error in a 200 answer",
    ),
    ("a reply without choices", f"{SAYS}, after 1 HTTP request", Fault.no_choices(), "a reply without choices"),
    ("null content", f"{SAYS}, never an empty answer", Fault.null_content(), "reply is empty"),
    ("a refusal", "an error with its words, never an empty answer", Fault.refusal("I can't."), "refused: I can't."),
    (
        "half an answer, stopped by a content filter",
        f"{SAYS}, never the half",
        Fault.content_filter("It rains"),
        "content filter",
    ),
):
    fault(AREA, injected, promise)(partial(_typed, answer, why))


@fault(AREA, "an answer cut off by its length", "the text, with status 206 and a warning")
def too_long() -> None:
    with model(lambda _: Fault.length("It rains in")) as server:
        response = ask(base(server))
        assert response.text == "It rains in"
        assert missing_answer(response).outcome is Outcome.ERROR
        assert "cut" in record_of(response, ModelAnswerSynthesisActivity).warning


@fault(AREA, "citations of passages that do not exist", "they are removed, and counted in a warning")
def wrong_citations() -> None:
    with model("It rains [ref_id:0][ref_id:7][ref_id:99].") as server:
        response = ask(base(server))
        assert response.text == "It rains [ref_id:0]."
        assert "2 markers" in record_of(response, ModelAnswerSynthesisActivity).warning


def _planned_all_the_same(plan: Any, queries: set[str], why: str) -> None:
    with model(plan_or(SAID, plan)) as server:
        response = ask(base(server, effort="low"))
        assert (response.status_code, response.text) == (200, SAID)
        searched = {sub_query.query for sub_query in response.plan.sub_queries} if response.plan else set()
        assert "Where does it rain?" in searched
        assert queries <= searched
        told = record_of(response, ModelQueryPlanningActivity)
        assert why in f"{told.warning} {told.error}"


FENCED = f"Gerne! Hier ist der Plan:\n```json\n{planned('Regen in Paris?')}\n```\nViel Erfolg!"
ITSELF = "the question itself is searched and answered; the account tells it"
for injected, promise, plan, queries, why in (
    ("a web page in place of a plan", ITSELF, Fault.html(), set[str](), "a web page"),
    ("prose in place of a plan", ITSELF, Reply("Je ne sais pas, cherchez partout."), set[str](), "holds no plan"),
    (
        "a plan in a code fence after a preamble in another language",
        "it is taken",
        Reply(FENCED),
        {"Regen in Paris?"},
        "",
    ),
    (
        "a plan cut off in the middle",
        "what was planned by then is searched",
        Fault.length(planned("Rain in Paris?", "Rain in Oslo?")[:-40]),
        {"Rain in Paris?"},
        "",
    ),
):
    fault(AREA, injected, promise)(partial(_planned_all_the_same, plan, queries, why))


@fault(AREA, "a plan of 50,000 tokens that never ends", "it is left, and what it began with is searched")
def endless_plan() -> None:
    plan = planned("Rain in Paris?")[:-2] + ', {"id": "x' + " and so on" * 25_000
    with model(plan_or(SAID, Reply(plan, chunk_size=2_000, chunk_delay=0.005))) as server:
        response = ask(base(server, effort="low"))
        assert response.text == SAID
        assert server.billed.completion_tokens < 45_000, server.billed


def _streamed(answer: Any, kind: type[Exception] | None, *, seconds: float = LATE) -> tuple[str, Any, int, float]:
    """Read a streamed answer; gives what was told, the account after it, the HTTP requests and the seconds."""
    with model(answer if isinstance(answer, list) else lambda _: answer) as server:
        response = base(server, seconds=seconds).as_query_engine(streaming=True).query("Where does it rain?")
        assert isinstance(response, StreamingResponse)
        told: list[str] = []
        read = partial(told.extend, response.response_gen)
        _, waited = timed(read if kind is None else partial(failing, kind, "", read))
        account = RetrievalResponse.parse((response.metadata or {})["agentic_kb"])
        return "".join(told), account, len(server.requests), waited


@fault(AREA, "status 503 before a stream's first token", "the stream, after 2 HTTP requests")
def stream_busy_once() -> None:
    told, account, requests, _ = _streamed([Fault.status(503), SAID], None)
    assert (told, account.status_code, requests) == (SAID, 200, 2)


@fault(AREA, "a stream cut cleanly, without a finish reason", "an error where it is read: never taken for the whole")
def stream_cut() -> None:
    told, _, requests, _ = _streamed(Fault.stream_cut(SAID), SynthesisError)
    assert (SAID.startswith(told), told != SAID, requests) == (True, True, 1)


@fault(AREA, "a stream reset after its first tokens", "an error where it is read; nothing is repeated")
def stream_reset() -> None:
    told, _, requests, _ = _streamed(Fault.stream_reset(SAID), SynthesisError)
    assert (SAID.startswith(told), requests) == (True, 1)


@fault(AREA, "a stream goes silent", "what arrived stands; an error by the deadline, 206 in the account", deadline=SOON)
def stream_hangs() -> float:
    told, account, _, waited = _streamed(Fault.stream_hang(content=SAID), DeadlineExceededError, seconds=SOON)
    assert SAID.startswith(told)
    assert missing_answer(account).outcome is Outcome.TIMEOUT
    return waited


@fault(AREA, "a web page in place of a stream", "an error where it is read, never an empty answer")
def page_as_stream() -> None:
    told, _, requests, _ = _streamed(Fault.html(), SynthesisError)
    assert (told, requests) == ("", 1)


class ShortVectors:
    """An embedding model with other weights: three numbers a text."""

    def send(self, connection: Connection, request: ChatRequest | None) -> None:
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        data = [{"object": "embedding", "index": 0, "embedding": [1.0, 0.0, 0.0]}]
        connection.send_json({"object": "list", "data": data, "model": "other", "usage": usage})


def _half_found(
    break_it: Callable[[LoopbackOpenAI], None], *, seconds: float = LATE
) -> tuple[RetrievalResponse, int, float]:
    """Search a source that needs the embedding server, and one that does not; gives HTTP requests and seconds too."""
    with LoopbackOpenAI() as server:
        index = VectorStoreIndex.from_documents([], embed_model=OpenAIEmbedding.of(server))
        index.insert_nodes([TextNode(text=text) for text in TEXTS])
        sources = [
            KnowledgeSource("vectors", index=index, hybrid=False),
            KnowledgeSource("words", retriever=MemoryRetriever(TEXTS, similarity_top_k=3)),
        ]
        kb = KnowledgeBase(
            sources,
            effort="minimal",
            options=RetrieverOptions(embedding_cache=None, retries=QUICK),
            max_runtime_in_seconds=seconds,
        )
        assert kb.retrieve("Where does it rain?").status_code == 200
        break_it(server)
        before = len(server.requests)
        response, waited = timed(lambda: kb.retrieve("And where is rain now?"))
        assert response.status_code == 206
        assert {part.what for part in response.missing} == {"vectors"}, response.missing
        assert {reference.knowledge_source_name for reference in response.references} == {"words"}
        return response, len(server.requests) - before, waited


@fault(EMBEDDING, "its server hangs", "the other source's evidence by the deadline, status 206", deadline=SOON)
def embedding_hangs() -> float:
    response, _, waited = _half_found(lambda server: setattr(server, "embedding_fault", Fault.hang()), seconds=SOON)
    assert response.missing[0].outcome is Outcome.TIMEOUT
    return waited


@fault(EMBEDDING, "status 503 each time", "3 HTTP requests at most, the other source's evidence")
def embedding_busy() -> None:
    _, requests, _ = _half_found(lambda server: setattr(server, "embedding_fault", Fault.status(503)))
    assert 1 < requests <= 3


@fault(EMBEDDING, "status 401", "1 HTTP request, the other source's evidence, no key in the account")
def embedding_unauthorized() -> None:
    response, requests, _ = _half_found(lambda server: setattr(server, "embedding_fault", Fault.status(401)))
    assert requests == 1
    assert "sk-" not in json.dumps(response.to_dict())


def _named(break_it: Callable[[LoopbackOpenAI], None]) -> None:
    _half_found(break_it)


for injected, work in (
    ("its server is down", lambda server: server.stop()),
    ("vectors of another dimension", lambda server: setattr(server, "embedding_fault", ShortVectors())),
):
    fault(EMBEDDING, injected, "the other source's evidence, status 206, the source named")(partial(_named, work))
