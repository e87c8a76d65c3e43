"""What comes of a whole way: as our response object, and as LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.evidence.gathering import PROVENANCE_KEY
from llama_index_agentic_kb.grounding import cited_ids
from llama_index_agentic_kb.grounding.grounded import GroundedText
from llama_index_agentic_kb.retriever import Retrieval
from llama_index_agentic_kb.schema import Message, RetrievalResponse
from llama_index_agentic_kb.schema.answer import SkippedReason
from llama_index_agentic_kb.synthesizers import Synthesis

__all__ = [
    "WITHHELD",
    "AgenticAsyncStreamingResponse",
    "AgenticResponse",
    "AgenticStreamingResponse",
    "Answered",
    "llama_response",
    "metadata_of",
]

WITHHELD = "No answer is given: what was found does not bear one out. The sources are listed."
"""What is said in place of an answer that is withheld; ``skipped_reasons`` say why, as data."""


@dataclass(slots=True)
class Answered:
    """A whole way: what was found, what was made of it, and what it rests on.

    Args:
        retrieval: The evidence and the account.
        synthesis: The answer as the synthesizer wrote it.
        grounded: The answer as it was checked; None where there is nothing to check.
        skipped: Why there is no answer, or none that is given; empty where there is one.
    """

    retrieval: Retrieval
    synthesis: Synthesis
    grounded: GroundedText | None = None
    skipped: list[SkippedReason] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What is told: the answer, repaired where that was asked for, or what is said in its place."""
        if self.grounded is None:
            return self.synthesis.text
        return WITHHELD if self.grounded.skipped else self.grounded.text

    def response(self, *, include_activity: bool = True) -> RetrievalResponse:
        """Give the response object."""
        retrieval, text = self.retrieval, self.text
        return RetrievalResponse(
            status_code=206 if any(part.outcome.failed for part in retrieval.missing) else 200,
            response=[Message.model_validate({"role": "assistant", "content": text})] if text else [],
            activity=list(retrieval.log.records) if include_activity else None,
            references=retrieval.references,
            missing=retrieval.missing,
            plan=retrieval.plan,
            grounding=None if self.grounded is None else self.grounded.ledger,
            skipped_reasons=self.skipped,
        )


class _Accounted:
    """What our LlamaIndex responses tell beside their text."""

    source_nodes: list[NodeWithScore]
    metadata: dict[str, Any] | None

    @property
    def account(self) -> RetrievalResponse:
        """Answer, references, grounding, activity, plan and what is missing; of a stream, once it was read."""
        return RetrievalResponse.parse((self.metadata or {}).get(PROVENANCE_KEY, {}))

    @property
    def cited_nodes(self) -> list[NodeWithScore]:
        """Those of ``source_nodes`` that the answer cites, in order of first mention; of a stream, once it was read."""
        return _cited(self.account, self.source_nodes)

    def _repr_html_(self) -> str:
        return self.account._repr_html_()


class AgenticResponse(_Accounted, Response):
    """A LlamaIndex ``Response`` that carries the whole account and shows itself in a notebook."""


class AgenticStreamingResponse(_Accounted, StreamingResponse):
    """A LlamaIndex ``StreamingResponse`` that carries the whole account."""


class AgenticAsyncStreamingResponse(_Accounted, AsyncStreamingResponse):
    """A LlamaIndex ``AsyncStreamingResponse`` that carries the whole account."""


def _cited(account: RetrievalResponse, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Give the nodes that an answer that is given cites, its headings and lead-ins too."""
    if SkippedReason.LOW_GROUNDED_ANSWER in account.skipped_reasons:
        return []
    claimed = [] if account.grounding is None else [int(number) for number in account.grounding.cited]
    numbers = dict.fromkeys([*cited_ids(account.text), *claimed])
    return [nodes[number] for number in numbers if number < len(nodes)]


def metadata_of(answered: Answered) -> dict[str, Any]:
    """Give the metadata of a LlamaIndex response: each node's, as core has it, and the account."""
    nodes: Mapping[str, Any] = {node.node.node_id: node.node.metadata for node in answered.retrieval.nodes}
    return {**nodes, PROVENANCE_KEY: answered.response().to_dict()}


def llama_response(answered: Answered) -> Response | PydanticResponse:
    """Give a LlamaIndex response: its text, its nodes, and the account in its metadata."""
    nodes, metadata = answered.retrieval.nodes, metadata_of(answered)
    if answered.synthesis.output is not None:
        return PydanticResponse(answered.synthesis.output, source_nodes=nodes, metadata=metadata)
    return AgenticResponse(answered.text, source_nodes=nodes, metadata=metadata)
