"""The provenance of a piece of evidence: which searches found it, how it was scored, and its reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.sources.selection import SelectedSource

PROVENANCE_KEY: Final = "agentic_kb"
"""Metadata key of a node's provenance, a dictionary.

    source            the source that found it (first, if several did)
    activity          the id of that search's record
    searches          every search that found it: activity, source, sub_query, query, list, rank, score
    best_for          sub-queries whose best evidence it is
    proof             what it proves: step (or "verdict"), finding, and rank in the chain of findings
    reranker_score    0 to 4, where a calibrated reranker scored it
    source_score      the source's score, where a reranker's stands in the node's ``score``
    parts             of a node made of neighbouring chunks: node_id, start, end (characters of its text), score
"""


CHUNK_INDEX: Final = "chunk_index"
"""Metadata key of a chunk's number in its document."""

MAX_METADATA_VALUE: Final = 100
"""Characters of one metadata value in a prompt."""


def provenance(node: NodeWithScore) -> dict[str, Any] | None:
    """Return the provenance of a piece of evidence; None for a node that no search found."""
    mark = node.node.metadata.get(PROVENANCE_KEY)
    return mark if isinstance(mark, dict) else None


def shown_metadata(node: NodeWithScore, permissions: Permissions | None, known: Collection[str | None] = ()) -> str:
    """Return the metadata that LlamaIndex shows to a language model (``MetadataMode.LLM``), on one line.

    Args:
        node: Its ``excluded_llm_metadata_keys`` are left out.
        permissions: Its source's: whom a document is shared with is never shown.
        known: Values that are shown anyway, such as the title.
    """
    hidden = {PROVENANCE_KEY, CHUNK_INDEX, *node.node.excluded_llm_metadata_keys}
    parts = []
    for key, value in node.node.metadata.items():
        text = " ".join(str(value).split())[:MAX_METADATA_VALUE]
        if key in hidden or key.startswith("_") or not isinstance(value, str | int | float) or not text:
            continue
        if str(value) not in known and not (permissions is not None and permissions.declares(key)):
            parts.append(f"{key}: {text}")
    return "; ".join(parts)


def references(nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]) -> list[Reference]:
    """Return the references of the evidence: the N-th node is reference N.

    A source whose parameters say ``includeReferences: false`` has none; numbers stay as they are in the text.
    """
    made = []
    for position, node in enumerate(nodes):
        mark = provenance(node)
        chosen = selected.get(mark["source"]) if mark else None
        if mark is None or chosen is None or not chosen.params.include_references:
            continue
        data = chosen.source.source_data(node)
        data.metadata.pop(PROVENANCE_KEY, None)
        made.append(
            Reference(
                type=chosen.source.kind,
                id=str(position),
                activity_source=mark["activity"],
                knowledge_source_name=chosen.source.name,
                doc_key=data.doc_key,
                title=data.title,
                url=data.url,
                citation_url=data.url,
                node_id=node.node.node_id,
                score=mark.get("source_score", node.score),
                reranker_score=mark.get("reranker_score"),
                source_data=None if chosen.params.include_reference_source_data is False else data,
            )
        )
    return made
