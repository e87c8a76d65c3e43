"""A reranker without weights: it scores nodes by the words that they share with the query, and can be slow or fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from llama_index_agentic_kb.testing.doubles import words


class OverlapReranker(BaseNodePostprocessor):
    """Orders nodes by the share of the query's distinct words that they hold, 0 to 1, and writes it as their score.

    Like many a real one it keeps ``top_n`` nodes and writes into the nodes that it is given.

        reranker = Reranker(OverlapReranker(), calibration=Calibration.piecewise([(0.0, 0.0), (1.0, 4.0)]))
    """

    top_n: int = 2
    latency: float = 0.0
    fault: Any = None
    fails_on: str | None = None
    calls: list[tuple[str, list[str]]] = Field(default_factory=list)
    """Each call so far: the query, and the ids of the nodes in the order in which they came."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = "" if query_bundle is None else query_bundle.query_str
        self.calls.append((query, [node.node.node_id for node in nodes]))
        time.sleep(self.latency)
        fault = self.fault if self.fails_on is None or self.fails_on in query else None
        if isinstance(fault, Exception):
            raise fault
        return _answer(fault, query, nodes)[: self.top_n]


def _answer(
    fault: Literal["empty", "none", "nan"] | None, query: str, nodes: Sequence[NodeWithScore]
) -> list[NodeWithScore]:
    if fault == "empty":
        return []
    asked = set(words(query))
    for node in nodes:
        held = set(words(node.node.get_content(MetadataMode.EMBED)))
        score = len(asked & held) / max(1, len(asked))
        node.score = {"none": None, "nan": float("nan")}.get(fault, score) if fault else score
        node.node.metadata["retrieval_score"] = score
    return list(nodes) if fault else sorted(nodes, key=lambda node: -(node.score or 0.0))
