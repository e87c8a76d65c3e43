"""Test doubles in the same process: an embedding model without weights, a scripted language model, and a retriever.

Texts that share words have close vectors; the retriever over texts in memory can be slow, fail, hang or return invalid
results.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeVar, cast

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.replay import ReplyingLLM, ScriptedReply

DIMENSIONS: Final = 256

EmbeddingCall = tuple[Literal["query", "text"], list[str]]


def words(text: str) -> list[str]:
    """Split a text into lower-cased runs of letters, digits and underscores."""
    return re.findall(r"\w+", text.lower())


def count_tokens(text: str) -> int:
    """Return the number of words and punctuation marks, as reported by all test doubles: "It's 5 km." has six."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def hash_vector(text: str, dimensions: int = DIMENSIONS) -> list[float]:
    """Return a bag of hashed words as a vector with L2 norm 1 and no negative value, the same in every process."""
    vector = [0.0] * dimensions
    for word in words(text) or [""]:  # a text without words must not be a zero vector
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        vector[int.from_bytes(digest, "big") % dimensions] += 1.0
    norm = math.hypot(*vector)
    return [value / norm for value in vector]


class HashEmbedding(BaseEmbedding):
    """Embeds a text as a bag of hashed words; the cosine of two texts grows with the words that they share."""

    model_name: str = Field(default="hash", description="The name of the model.")
    dimensions: int = Field(default=DIMENSIONS, ge=1, description="The length of the vectors.")
    latency: float = Field(default=0.0, ge=0.0, description="Seconds each call takes.")

    _calls: deque[EmbeddingCall] = PrivateAttr(default_factory=deque)  # a list would be part of the model's state

    @property
    def calls(self) -> list[EmbeddingCall]:
        """All calls so far: "query" or "text", and the texts of the call."""
        return list(self._calls)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed("query", [query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aembed("query", [query]))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed("text", [text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aembed("text", [text]))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed("text", texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._aembed("text", texts)

    def _embed(self, kind: Literal["query", "text"], texts: list[str]) -> list[list[float]]:
        self._calls.append((kind, list(texts)))
        time.sleep(self.latency)
        return self._vectors(texts)

    async def _aembed(self, kind: Literal["query", "text"], texts: list[str]) -> list[list[float]]:
        self._calls.append((kind, list(texts)))
        await asyncio.sleep(self.latency)
        return self._vectors(texts)

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        return [hash_vector(text, self.dimensions) for text in texts]


# -- language models --------------------------------------------------------------------------------------------------

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Scripted = str | Exception | ScriptedReply


class ScriptExhaustedError(LookupError):
    """Raised for a call after the last reply of a list, so that a test notices unexpected calls."""


def scripted(replies: Answer | Sequence[Answer] | Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """Return a thread-safe function with these answers: one for all calls, a list used in order, or a callable's."""
    if callable(replies):
        return replies
    if not isinstance(replies, list | tuple):
        return lambda _: cast("Answer", replies)
    numbers = itertools.count(1)

    def answer(_: Asked) -> Answer:
        used = next(numbers)
        if used > len(replies):
            raise ScriptExhaustedError(
                f"The script holds {len(replies)} replies and this is call {used}. "
                "Add a reply, or pass a callable or a single reply to answer any number of calls."
            )
        return cast("Answer", replies[used - 1])

    return answer


class _State:
    """The script and the recorded calls, shared by a model and all its copies, even deep ones."""

    def __init__(self, replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted]) -> None:
        self.answer: Callable[[list[ChatMessage]], Scripted] = scripted(replies)
        self.calls: list[list[ChatMessage]] = []

    def __deepcopy__(self, _: object) -> _State:
        return self


class ScriptedLLM(ReplyingLLM):
    """A chat model without tools that answers from a script; chats are native, async too.

    Callbacks and events are sent as for any other model. ``raw`` has the usage, counted with :func:`count_tokens`.
    Copies made with ``model_copy`` share the script and the recorded calls.

        llm = ScriptedLLM(["first", ScriptedReply("second", latency=0.1), ValueError("third")])
        assert llm.complete("Hi").text == "first"
        assert llm.calls[0][0].content == "Hi"

    Args:
        replies: One answer for all calls; a list used in order, after which :class:`ScriptExhaustedError` is raised;
            or a callable that maps each call's messages to an answer, in the calling thread. An answer is a text, a
            :class:`ScriptedReply`, or an exception to raise. As with OpenAI's client, a stream raises when its first
            piece is requested.
        **kwargs: The fields below and those of ``CustomLLM``, such as ``callback_manager``.
    """

    model_name: str = Field(default="scripted", description="The name in the metadata.")
    context_window: int = Field(default=16_384, description="Tokens of prompt and answer together.")
    num_output: int = Field(default=1_024, description="Tokens of an answer; nothing is cut to it.")

    _state: _State = PrivateAttr()

    def __init__(
        self, replies: Scripted | Sequence[Scripted] | Callable[[list[ChatMessage]], Scripted] = "OK.", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._state = _State(replies)

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of a chat model without function calls."""
        sizes = {"context_window": self.context_window, "num_output": self.num_output}
        return LLMMetadata(**sizes, is_chat_model=True, model_name=self.model_name)

    @property
    def calls(self) -> list[list[ChatMessage]]:
        """The messages of all calls so far, in order; a completion's prompt is one user message."""
        return list(self._state.calls)

    def respond(self, messages: Sequence[ChatMessage]) -> ScriptedReply:
        """Return the next reply of the script."""
        asked = [message.model_copy(deep=True) for message in messages]  # callers may change their messages later
        self._state.calls.append(asked)
        reply = self._state.answer(asked)
        if isinstance(reply, str):
            return ScriptedReply(reply)
        return ScriptedReply(error=reply) if isinstance(reply, Exception) else reply

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, as counted by all test doubles."""
        return count_tokens(text)


# -- sources ----------------------------------------------------------------------------------------------------------

HANG_SECONDS: Final = 60.0  # maximum seconds of a hang without a release, so that the interpreter can exit

Mode = Literal["sync", "async", "async_only"]


@dataclass(frozen=True)
class Verbatim:
    """A fault that returns ``value`` (None, a dict, ...) instead of a list of nodes."""

    value: object


SourceFault = Exception | Verbatim | Literal["hang"]


class MemoryRetriever(BaseRetriever):
    """Ranks texts by the words they share with the query.

    The score is the share of the query's distinct words found in a node, above 0 and up to 1. Nodes without such words
    are omitted; ties keep the order of the items.

        with MemoryRetriever(["Rain in Paris", "Snow in Oslo"], fault="hang") as source:
            ...  # queries hang here; leaving the context releases them

    Args:
        items: Nodes, or texts that become nodes with a hash of the text as id.
        similarity_top_k: Maximum number of nodes returned.
        latency: Duration of each query in seconds.
        mode: "sync" has only ``_retrieve``, so that an async call blocks its event loop, as with many vector stores;
            "async" also has a native ``_aretrieve``; in "async_only", ``_retrieve`` raises NotImplementedError.
        fault: Fault after the latency: an exception to raise; "hang", which ends at :meth:`release` or after 60 s;
            :class:`Verbatim`; or a callable that maps each QueryBundle to one of these or to None (no fault).
    """

    def __new__(cls, *_args: object, mode: Mode = "sync", **_kwargs: object) -> Self:
        """Create an object of the mode's class, because callers detect a native ``_aretrieve`` by the class."""
        return cast("Self", super().__new__(_CLASSES[mode] if cls is MemoryRetriever else cls))

    def __init__(
        self,
        items: Sequence[str | BaseNode],
        *,
        similarity_top_k: int = 2,
        latency: float = 0.0,
        mode: Mode = "sync",
        fault: SourceFault | Callable[[QueryBundle], SourceFault | None] | None = None,
    ) -> None:
        super().__init__()
        self.mode, self.similarity_top_k, self.latency, self.fault = mode, similarity_top_k, latency, fault
        self.queries: list[str] = []  # the texts of all queries so far, in order of arrival
        nodes = [item if isinstance(item, BaseNode) else TextNode(id_=_id(item), text=item) for item in items]
        self._nodes = [(node, set(words(node.get_content(MetadataMode.NONE)))) for node in nodes]
        self._released = threading.Event()

    def release(self) -> None:
        """End all current hangs, and prevent later ones."""
        self._released.set()

    def __enter__(self) -> Self:
        """Return this retriever; leaving the context ends its hangs."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all hangs."""
        self.release()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(query_bundle.query_str)
        time.sleep(self.latency)
        fault = self._fault_of(query_bundle)
        if fault == "hang":
            self._released.wait(HANG_SECONDS)
        return self._answer(query_bundle, fault)

    def _fault_of(self, query: QueryBundle) -> SourceFault | None:
        return self.fault(query) if callable(self.fault) else self.fault

    def _answer(self, query: QueryBundle, fault: SourceFault | None) -> list[NodeWithScore]:
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, Verbatim):
            return cast("list[NodeWithScore]", fault.value)
        asked = set(words(query.query_str))
        shared = [(node, len(asked & held)) for node, held in self._nodes]
        best = sorted((pair for pair in shared if pair[1]), key=lambda pair: -pair[1])[: self.similarity_top_k]
        return [NodeWithScore(node=_copied(node), score=count / len(asked)) for node, count in best]


class _AsyncMemoryRetriever(MemoryRetriever):
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(query_bundle.query_str)
        await asyncio.sleep(self.latency)
        fault = self._fault_of(query_bundle)
        ends = time.monotonic() + HANG_SECONDS
        # The release may come from any thread or event loop, so it is polled.
        while fault == "hang" and not self._released.is_set() and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self._answer(query_bundle, fault)


class _AsyncOnlyMemoryRetriever(_AsyncMemoryRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise NotImplementedError(f"This source is async only; {query_bundle.query_str!r} was asked synchronously.")


_CLASSES: dict[str, type[MemoryRetriever]] = {
    "sync": MemoryRetriever,
    "async": _AsyncMemoryRetriever,
    "async_only": _AsyncOnlyMemoryRetriever,
}


def _id(text: str) -> str:
    return f"text-{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _copied(node: BaseNode) -> BaseNode:
    if isinstance(node, IndexNode):  # its obj may be a retriever or an index, which must not be copied
        own: JsonObject = {"metadata": copy.deepcopy(node.metadata), "relationships": dict(node.relationships)}
        return node.model_copy(update=own)
    return node.model_copy(deep=True)
