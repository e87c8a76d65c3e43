"""The provenance of evidence nodes (their searches and scores), and the references made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.schema import Reference
from llama_index_agentic_kb.sources.selection import SelectedSource

PROVENANCE_KEY: Final = "agentic_kb"
"""Metadata key of a node's provenance, a dictionary.

    source            name of the source that found the node (the first, if there are several)
    activity          id of that search's activity record
    searches          all searches that found the node: activity, source, sub_query, query, list, rank, score
    best_for          ids of the sub-queries for which the node is the best evidence
    proof             findings that the node supports: step (or "verdict"), finding, and rank in the chain
    reranker_score    score of 0 to 4, if a calibrated reranker scored the node
    source_score      the source's score, if the node's ``score`` is a reranker's
    parts             chunks of a joined node: node_id, start, end (character positions in its text), score
"""


CHUNK_INDEX: Final = "chunk_index"  # metadata key of a chunk's position in its document

MAX_METADATA_VALUE: Final = 100  # maximum number of characters of one metadata value in a prompt


def provenance(node: NodeWithScore) -> dict[str, Any] | None:
    """Return the provenance of a node; None if it has none, as no search found it."""
    mark = node.node.metadata.get(PROVENANCE_KEY)
    return mark if isinstance(mark, dict) else None


def drop_provenance(node: NodeWithScore) -> NodeWithScore:
    """Return a node of the evidence, a copy that a request has made, after removing its provenance in place."""
    if node.node.metadata.pop(PROVENANCE_KEY, None) is not None:
        for keys in (node.node.excluded_llm_metadata_keys, node.node.excluded_embed_metadata_keys):
            if PROVENANCE_KEY in keys:
                keys.remove(PROVENANCE_KEY)
    return node


def shown_metadata(node: NodeWithScore, permissions: Permissions | None, known: Collection[str | None] = ()) -> str:
    """Return the metadata that LlamaIndex shows to a language model (``MetadataMode.LLM``), on one line.

    Permission fields, and values that are ``known`` from the prompt (such as the title), are left out.
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
    """Return the references of the evidence, by position; sources with ``includeReferences: false`` get none."""
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
