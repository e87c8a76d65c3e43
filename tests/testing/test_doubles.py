from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import IndexNode, TextNode

from llama_index_agentic_kb.testing import (
    ChatRequest,
    LoopbackOpenAI,
    MemoryRetriever,
    Reply,
    ScriptedLLM,
    ScriptedReply,
    ScriptExhaustedError,
    Usage,
)
from llama_index_agentic_kb.testing.doubles import Mode

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="The capital of France?")]
ASK_TOKENS = 3 + 5


def test_a_list_is_consumed() -> None:
    """A list answers in order, raises its exceptions, and then refuses."""
    llm = ScriptedLLM(["one", ValueError("two")])
    assert llm.complete("?").text == "one"
    with pytest.raises(ValueError, match="two"):
        llm.complete("?")
    with pytest.raises(ScriptExhaustedError, match="2 replies"):
        llm.complete("?")


async def test_streams_raise_when_read() -> None:
    """A stream raises its error after its content, and not before it is read."""
    llm = ScriptedLLM([ScriptedReply("half", error=OSError("gone"), chunk_size=2), OSError("gone"), OSError("gone")])
    pieces: list[str] = []
    stream = llm.stream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        pieces.extend(r.delta or "" for r in stream)
    assert pieces == ["ha", "lf"]
    empty = llm.stream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        next(empty)
    last = await llm.astream_chat(ASK)
    with pytest.raises(OSError, match="gone"):
        await anext(last)


def test_copies_share_script_and_record() -> None:
    """Shallow and deep copies consume the same list and fill the same record."""
    llm = ScriptedLLM(["one", "two", "three"], model_name="twin")
    copies = [llm.model_copy(), llm.model_copy(deep=True), copy.deepcopy(llm)]
    assert [twin.complete("?").text for twin in copies] == ["one", "two", "three"]
    assert len(llm.calls) == 3
    assert copies[0].metadata.model_name == "twin"


def usage_of(raw: Any) -> tuple[int, int]:
    return raw.usage.prompt_tokens, raw.usage.completion_tokens


def test_a_script_that_fails_is_a_bad_request() -> None:
    """A list is consumed in order; one call more, or a callable that raises, is a status that is not retried."""

    def fail(request: ChatRequest) -> str:
        raise KeyError(request.last)

    with LoopbackOpenAI(["first", Reply("second")]) as server:
        llm = server.llm()
        assert [llm.complete("?").text for _ in range(2)] == ["first", "second"]
        with pytest.raises(openai.BadRequestError, match="holds 2 replies and this is call 3"):
            llm.complete("?")
        assert (server.billed.calls, len(server.requests)) == (2, 3)
        assert isinstance(server.errors[0], ScriptExhaustedError)
    with LoopbackOpenAI(fail) as server, pytest.raises(openai.BadRequestError, match="KeyError: 'Hi'"):
        server.llm().complete("Hi")


async def test_streams() -> None:
    """A stream arrives in pieces of the size set, reports its usage if asked to, and is billed in full."""
    with LoopbackOpenAI(Reply("Paris, of course.", chunk_size=6)) as server:
        llm = server.llm()
        for responses in (list(llm.stream_chat(ASK)), [one async for one in await llm.astream_chat(ASK)]):
            assert [r.delta for r in responses if r.delta] == ["Paris,", " of co", "urse."]
            assert responses[-1].message.content == "Paris, of course."
            assert (responses[-1].raw.choices[0].finish_reason, responses[-1].raw.usage) == ("stop", None)
        assert server.billed == Usage(2 * ASK_TOKENS, 10, calls=2)
        last = list(llm.stream_chat(ASK, stream_options={"include_usage": True}))[-1]
        assert (last.raw.choices, usage_of(last.raw)) == ([], (ASK_TOKENS, 5))


TEXTS = ["Rain in Paris", "Snow in Oslo", "Rain and snow in Bergen"]


def test_nodes_are_ranked_by_shared_words() -> None:
    """The score is the share of the query's words found; ties keep their order, misses are left out."""
    source = MemoryRetriever(TEXTS, similarity_top_k=3)
    hits = source.retrieve("rain, SNOW")
    assert [(hit.text, hit.score) for hit in hits] == [(TEXTS[2], 1.0), (TEXTS[0], 0.5), (TEXTS[1], 0.5)]
    hits[0].score = 99.0
    hits[0].node.metadata["tags"] = ["b"]
    (again, *_) = source.retrieve("rain, SNOW")  # what a caller does to its nodes is not seen by the next one
    assert (again.score, again.node.metadata) == (1.0, {})
    assert [[hit.text for hit in source.retrieve(query)] for query in ("Paris?", "Rome", "?")] == [[TEXTS[0]], [], []]


@pytest.mark.parametrize("node", [TextNode(text="Rain"), IndexNode(text="Rain", index_id="rain")])
def test_results_are_fresh(node: TextNode) -> None:
    """What a caller does to its nodes is not seen by the next one."""
    node.metadata = {"tags": ["a"]}
    source = MemoryRetriever([node])
    source.retrieve("rain")[0].node.metadata["tags"].append("b")
    assert source.retrieve("rain")[0].node.metadata == node.metadata == {"tags": ["a"]}


async def test_modes_are_classes() -> None:
    """A native async method is there only if the mode says so, and callers can see it; all answer the same."""
    modes: list[Mode] = ["sync", "async", "async_only"]
    made = [MemoryRetriever(TEXTS, mode=mode) for mode in modes]
    assert [type(m)._aretrieve is BaseRetriever._aretrieve for m in made] == [True, False, False]
    assert [(await one.aretrieve("Oslo"))[0].text for one in made] == [TEXTS[1]] * 3
    with pytest.raises(NotImplementedError, match="async only"):
        made[2].retrieve("rain")


def test_hung_threads_end_with_the_context() -> None:
    """A hung sync query answers once it is released."""
    with ThreadPoolExecutor(1) as pool:
        with MemoryRetriever(TEXTS, fault="hang") as source:
            hung = pool.submit(source.retrieve, "Oslo")
            assert not hung.done()
        assert [hit.text for hit in hung.result(timeout=60)] == [TEXTS[1]]
