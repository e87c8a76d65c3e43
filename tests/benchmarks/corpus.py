"""What is searched and asked: passages of the package's own corpus in four sources, a question, its sub-queries.

And the language model: ``LoopbackOpenAI`` in a process of its own, so that it shares no GIL with what is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from llama_index.core import VectorStoreIndex
from llama_index.core.llms import LLM
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import TextNode
from llama_index.llms.openai import OpenAI

from llama_index_agentic_kb import KnowledgeSource
from llama_index_agentic_kb.testing import ChatRequest, LoopbackOpenAI, Reply

SOURCES: Final = {
    "early_missions": "Space missions, from Apollo to Galileo.",
    "late_missions": "Space missions, from Hayabusa2 to Vostok.",
    "vehicles": "Launch vehicles.",
    "destinations": "Planets, moons and small bodies that missions went to.",
}

QUESTION: Final = "How do the missions that brought back samples of asteroids compare with the one that orbits Jupiter?"

SUB_QUERIES: Final = (
    "missions that returned samples from an asteroid",
    "mission that orbited Jupiter and its launch date",
    "rockets that launched asteroid sample return missions",
    "size and orbit of the asteroids that were sampled",
)

MISSIONS_BEFORE: Final = "hayabusa2.md"
ANSWER: Final = (
    "Hayabusa2 and OSIRIS-REx brought back samples of Ryugu and Bennu [ref_id:0] [1], while Galileo orbited Jupiter "
    "[ref_id:1] [2]."
)


def passages(source: str, count: int) -> list[TextNode]:
    """Return the first passages of a source: sentences, then pairs of neighbours, then triples."""
    texts = islice(_windows(_articles(source)), count)
    return [
        TextNode(id_=f"{source}-{at}", text=text, metadata={"title": title}) for at, (title, text) in enumerate(texts)
    ]


def _articles(source: str) -> list[tuple[str, list[str]]]:
    folder = files("llama_index_agentic_kb") / "corpus" / source.removeprefix("early_").removeprefix("late_")
    articles = sorted((file for file in folder.iterdir() if file.name.endswith(".md")), key=lambda file: file.name)
    if source.endswith("missions"):
        articles = [file for file in articles if (file.name < MISSIONS_BEFORE) == (source == "early_missions")]
    return [_sentences(file.read_text(encoding="utf-8")) for file in articles]


def _sentences(article: str) -> tuple[str, list[str]]:
    heading, _, body = article.split("---", 2)[2].strip().partition("\n")
    return heading.lstrip("# "), re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(body.split()))


def _windows(articles: list[tuple[str, list[str]]]) -> Iterator[tuple[str, str]]:
    for size in (1, 2, 3):
        for title, sentences in articles:
            for start in range(len(sentences) - size + 1):
                yield title, " ".join(sentences[start : start + size])


def knowledge_sources(indexes: Mapping[str, VectorStoreIndex], **options: Any) -> list[KnowledgeSource]:
    """Return ours over indexes of the four sources."""
    return [KnowledgeSource(name, SOURCES[name], index=index, **options) for name, index in indexes.items()]


def fused(
    retrievers: Sequence[BaseRetriever], llm: LLM, *, top_k: int, queries: int, use_async: bool = True
) -> QueryFusionRetriever:
    """Return LlamaIndex's fusion of retrievers, the peer of ours, by reciprocal rank."""
    mode = FUSION_MODES.RECIPROCAL_RANK
    return QueryFusionRetriever(
        list(retrievers), llm=llm, mode=mode, similarity_top_k=top_k, num_queries=queries, use_async=use_async
    )


def reply_to(request: ChatRequest | str) -> str:
    """Answer each engine's prompt as a good model would: a plan, queries, sub-questions, or an answer."""
    prompt = request if isinstance(request, str) else request.text
    if "You plan searches" in prompt:
        plan = [
            {"id": f"q{number}", "query": query, "sources": list(SOURCES), "depends_on": []}
            for number, query in enumerate(SUB_QUERIES, start=1)
        ]
        return json.dumps({"sub_queries": plan})
    if "generates multiple search queries" in prompt:  # QueryFusionRetriever
        return "\n".join(SUB_QUERIES)
    if "output a list of relevant sub-questions" in prompt:  # SubQuestionQueryEngine: one question to one tool
        items = [{"sub_question": query, "tool_name": name} for query in SUB_QUERIES for name in SOURCES]
        return f"```json\n{json.dumps({'items': items})}\n```"
    return ANSWER


class ModelServer:
    """The server, from the outside; each reply takes so long."""

    def __init__(self, latency: float) -> None:
        spawned = get_context("spawn")
        self._pipe, there = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(there, latency), daemon=True)
        self._process.start()
        there.close()
        self._base_url: str = self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def llm(self) -> OpenAI:
        """Make a client of its own for a contestant, with LlamaIndex's defaults."""
        return OpenAI(model="gpt-4o-mini", api_base=self._base_url, api_key="sk-loopback-no-secret")

    def billed(self) -> tuple[int, int]:
        """Return the calls and the tokens so far."""
        self._pipe.send("billed")
        calls, tokens = self._pipe.recv()
        return calls, tokens


def _serve(pipe: Connection, latency: float) -> None:
    with LoopbackOpenAI(lambda request: Reply(reply_to(request), latency=latency)) as model:
        pipe.send(model.base_url)
        while pipe.recv():
            pipe.send((model.billed.calls, model.billed.total_tokens))
