"""What is searched and asked: passages of the package's own corpus in four sources, a question, its sub-queries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any, Final

from llama_index.core import VectorStoreIndex
from llama_index.core.llms import LLM
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import TextNode

from llama_index_agentic_kb import KnowledgeSource

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
