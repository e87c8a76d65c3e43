"""What the routes of a server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.server.access import Access
from llama_index_agentic_kb.server.http import Metrics
from llama_index_agentic_kb.server.quotas import FairQueue
from llama_index_agentic_kb.server.service import KnowledgeService


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of a server that its routes use."""

    service: KnowledgeService
    access: Access
    queue: FairQueue
    max_body_bytes: int  # of a question
    metrics: Metrics = field(default_factory=Metrics)

    def count(self, response: RetrievalResponse) -> None:
        """Add a response's tokens and missing parts to the metrics."""
        for record in response.activity or ():
            for direction in ("input", "output"):
                self.metrics.tokens.labels(direction).inc(getattr(record, f"{direction}_tokens", None) or 0)
        for part in response.missing:
            self.metrics.failed_searches.labels(part.outcome.value).inc()
