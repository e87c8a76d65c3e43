"""What is given in place of an answer that did not come in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import deadline_after
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.extractive import ExtractiveData
from llama_index_agentic_kb.synthesizers.responses import Synthesis

__all__ = ["what_arrived"]

EXTRACTING_SECONDS: Final = 0.3
"""Time to make extracted data of the evidence: the answer's own is used up."""


async def what_arrived(
    error: DeadlineExceededError,
    question: str,
    nodes: Sequence[NodeWithScore],
    *,
    max_output_tokens: int | None = None,
    sources: Mapping[str, KnowledgeSource] | None = None,
) -> Synthesis:
    """Give the answer so far, or else the evidence as extracted data. Its only warning says which.

    Args:
        error: What the synthesis raised; its ``partial`` is the answer so far.
        question: What was asked.
        nodes: The evidence, best first.
        max_output_tokens: The budget of the extracted data; None is its own.
        sources: By name.
    """
    if error.partial:
        return Synthesis(error.partial, warnings=["it was not done by its deadline: what there was of it is given"])
    told = "it was not there by its deadline: the evidence is given as extracted data"
    try:
        synthesis = await ExtractiveData().synthesis(
            QueryBundle(question),
            nodes,
            deadline=deadline_after(EXTRACTING_SECONDS),
            max_output_tokens=max_output_tokens,
            sources=sources,
        )
    except DeadlineExceededError:  # of very much text
        return Synthesis("", warnings=["it was not there by its deadline; the references name the evidence"])
    synthesis.warnings = [told]
    return synthesis
