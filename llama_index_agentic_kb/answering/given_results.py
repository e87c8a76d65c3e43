"""Results that the asker brings along: they are read as evidence, in their order, and nothing is searched.

    retriever = given_retriever(query.search_results, kb.as_retriever())
    engine = AgenticQueryEngine(retriever)
    answered = engine.answer(given_request(query))

References, ledger and citations come about as after a search. Google calls it ``searchSpec.searchResultList``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.retriever import AgenticRetriever
from llama_index_agentic_kb.schema import ReasoningEffort, ResultsProcessing, RetrievalRequest
from llama_index_agentic_kb.schema.answer import AnswerReference, ChunkReference, DocumentReference
from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.sources import KnowledgeSource

__all__ = ["GIVEN_SOURCE", "GivenResults", "given_nodes", "given_request", "given_retriever"]

GIVEN_SOURCE: Final = "given_results"
"""The name of the source that holds them."""

MOST_NAME: Final = 1_000
"""Characters of a name that a node's id has."""


def given_nodes(results: Sequence[AnswerReference]) -> list[TextNode]:
    """Give results as LlamaIndex nodes: one each, in their order.

    A document is one node, its passages as paragraphs one below the other; a record is its JSON text. A node's id is
    the passage's or the document's name, and further marked where two have the same.

    Args:
        results: What was brought along.
    """
    nodes: list[TextNode] = []
    taken: set[str] = set()
    for position, result in enumerate(results):
        name = result.chunk if isinstance(result, ChunkReference) else result.document
        name = without_surrogates(name[:MOST_NAME]) or f"result-{position}"
        node_id = name if name not in taken else f"{name}#{position}"
        taken.add(node_id)
        nodes.append(_node(node_id, result))
    return nodes


def _node(node_id: str, result: AnswerReference) -> TextNode:
    told = {"title": result.title, "url": result.uri}
    if isinstance(result, ChunkReference):
        told["page_identifier"] = result.page_identifier
    own = {} if not isinstance(result, (ChunkReference, DocumentReference)) else result.metadata
    node = TextNode(
        id_=node_id,
        text=without_surrogates(_text(result)),
        metadata={**own, **{key: value for key, value in told.items() if value}},
    )
    if isinstance(result, ChunkReference) and result.document:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=result.document)
    return node


def _text(result: AnswerReference) -> str:
    if isinstance(result, ChunkReference):
        return result.content
    if isinstance(result, DocumentReference):
        return "\n\n".join(chunk.content for chunk in result.chunks if chunk.content)
    return json.dumps(result.data, ensure_ascii=False, default=str) if result.data else ""


class GivenResults(KnowledgeSource):
    """A source that gives the same results, all of them and in their order, whatever is asked.

    Args:
        results: What was brought along; may be none.
    """

    def __init__(self, results: Sequence[AnswerReference]) -> None:
        nodes = given_nodes(results)
        self._made = {node.node_id: (node.text, result) for node, result in zip(nodes, results, strict=True)}
        super().__init__(
            GIVEN_SOURCE,
            "Results that came with the question.",
            retriever=_GivenRetriever(nodes),
            similarity_top_k=max(1, len(nodes)),
            breaker=None,
            native_async=True,
            hybrid=False,
        )

    def result_of(self, node: BaseNode) -> AnswerReference | None:
        """Give the result that a node was made of; None for another's, and where its text was changed on the way."""
        text, result = self._made.get(node.node_id, ("", None))
        return result if node.get_content(metadata_mode=MetadataMode.NONE) == text else None


class _GivenRetriever(BaseRetriever):
    """Gives the same nodes for every query. They have no scores: nobody ranked them for this question."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self._given = list(nodes)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        del query_bundle
        return [NodeWithScore(node=node) for node in self._given]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._retrieve(query_bundle)


def given_retriever(results: Sequence[AnswerReference], like: AgenticRetriever) -> AgenticRetriever:
    """Give a retriever over results that were brought along; none of the other's sources is searched.

    Nothing ranks, joins or drops the results: neither filters nor postprocessors nor the reranker of the other
    retriever apply. It shares no memory either: a memory is read by the retriever that knows whose it is, and the
    conversation comes with the request.

    Args:
        results: What was brought along; none finds nothing.
        like: Whose language model, limits, deadline, principal and callbacks it has.
    """
    further: dict[str, Any] = {
        name: getattr(like, name)
        for name in (
            "llm",
            "max_runtime_in_seconds",
            "principal",
            "observer",
            "callback_manager",
        )
    }
    return AgenticRetriever(
        [GivenResults(results)],
        effort=ReasoningEffort.MINIMAL,
        similarity_top_k=max(1, len(results)),
        options=replace(like.options, results_processing=ResultsProcessing.NONE, embedding_cache=None),
        **further,
    )


def given_request(query: AnswerQuery) -> RetrievalRequest:
    """Give the request under which all results of a query are read, unplanned and in their order.

    Raises:
        InvalidRequestError: The query brings no results along.
    """
    if query.search_results is None:
        raise InvalidRequestError("searchResults: the query brings no results along; search the sources instead")
    return query.request.model_copy(
        update={
            "retrieval_reasoning_effort": ReasoningEffort.MINIMAL,
            "results_processing": ResultsProcessing.NONE,
            "max_output_documents": max(1, len(query.search_results)),
            "knowledge_source_params": [],
        }
    )
