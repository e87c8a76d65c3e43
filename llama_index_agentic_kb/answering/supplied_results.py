"""Search results supplied by the caller: they are used as evidence, in the given order, without any search.

References, grounding ledger and citations are as after a search. Google's name is ``searchSpec.searchResultList``.
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
from llama_index_agentic_kb.retriever import AgenticRetriever
from llama_index_agentic_kb.schema import ReasoningEffort, ResultsProcessing, RetrievalRequest
from llama_index_agentic_kb.schema.answer import AnswerReference, ChunkReference, DocumentReference
from llama_index_agentic_kb.sources import KnowledgeSource

SUPPLIED_SOURCE: Final = "given_results"  # the name of the source of supplied results

MAX_NAME: Final = 1_000  # maximum characters of a result's name to use in a node id


class SuppliedResults(KnowledgeSource):
    """A source that returns all supplied results, in the given order, for every query; each becomes one node."""

    def __init__(self, results: Sequence[AnswerReference]) -> None:
        nodes: dict[str, TextNode] = {}
        for position, result in enumerate(results):
            name = result.chunk if isinstance(result, ChunkReference) else result.document
            name = without_surrogates(name[:MAX_NAME]) or f"result-{position}"
            while name in nodes:
                name += f"#{position}"
            nodes[name] = _node(name, result)
        self._made = {
            node_id: (node.text, result) for (node_id, node), result in zip(nodes.items(), results, strict=True)
        }
        super().__init__(
            SUPPLIED_SOURCE,
            "Results that came with the question.",
            retriever=_SameNodes(list(nodes.values())),
            similarity_top_k=max(1, len(nodes)),
            native_async=True,
            hybrid=False,
        )

    def result_of(self, node: BaseNode) -> AnswerReference | None:
        """Return the result that a node was created from; None if there is none or the node's text was changed."""
        text, result = self._made.get(node.node_id, ("", None))
        return result if node.get_content(metadata_mode=MetadataMode.NONE) == text else None


def _node(node_id: str, result: AnswerReference) -> TextNode:
    fields = {"title": result.title, "url": result.uri}
    own: dict[str, Any] = {}
    if isinstance(result, ChunkReference):
        text, own = result.content, result.metadata
        fields["page_identifier"] = result.page_identifier
    elif isinstance(result, DocumentReference):
        text, own = "\n\n".join(chunk.content for chunk in result.chunks if chunk.content), result.metadata
    else:
        text = json.dumps(result.data, ensure_ascii=False, default=str) if result.data else ""
    metadata = {**own, **{key: value for key, value in fields.items() if value}}
    node = TextNode(id_=node_id, text=without_surrogates(text), metadata=metadata)
    if isinstance(result, ChunkReference) and result.document:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=result.document)
    return node


class _SameNodes(BaseRetriever):
    """Returns the same nodes for every query, without scores."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self._nodes = list(nodes)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        del query_bundle
        return [NodeWithScore(node=node) for node in self._nodes]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._retrieve(query_bundle)


def supplied_retriever(results: Sequence[AnswerReference], like: AgenticRetriever) -> AgenticRetriever:
    """Return a retriever over supplied results only, unranked, with the model, options and callbacks of another."""
    shared: dict[str, Any] = {
        name: getattr(like, name)
        for name in ("llm", "max_runtime_in_seconds", "principal", "observer", "callback_manager")
    }
    return AgenticRetriever(
        [SuppliedResults(results)],
        effort=ReasoningEffort.MINIMAL,
        similarity_top_k=max(1, len(results)),
        options=replace(like.options, results_processing=ResultsProcessing.NONE, embedding_cache=None),
        **shared,
    )


def supplied_request(request: RetrievalRequest, results: Sequence[AnswerReference]) -> RetrievalRequest:
    """Return the request changed so that all results are returned in order, without planning."""
    return request.model_copy(
        update={
            "retrieval_reasoning_effort": ReasoningEffort.MINIMAL,
            "results_processing": ResultsProcessing.NONE,
            "max_output_documents": max(1, len(results)),
            "knowledge_source_params": [],
        }
    )
