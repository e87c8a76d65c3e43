"""The references of an answer: what the model was given, cited or not, each as what it is in its source.

Reference N of the response is the N of ``[ref_id:N]``. What ``RetrievalResponse.references`` would not show is not
shown here either: a source without ``includeReferences``, the content where ``includeReferenceSourceData`` is false,
the fields that say whom a document is shared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from llama_index.core.schema import Document, NodeWithScore

from llama_index_agentic_kb.answering.given_results import GivenResults
from llama_index_agentic_kb.evidence.provenance import PROVENANCE_KEY, references
from llama_index_agentic_kb.schema import Reference, SourceData
from llama_index_agentic_kb.schema.answer import (
    AnswerReference,
    ChunkContent,
    ChunkReference,
    DocumentReference,
    StructuredReference,
)
from llama_index_agentic_kb.sources.selection import SelectedSource

__all__ = ["answer_references", "unit_relevance"]

PAGE_KEYS: Final = ("page_label", "page_identifier", "pageIdentifier", "page_number", "page")
"""Metadata keys of a passage's page, the first that is there; LlamaIndex's PDF readers write ``page_label``."""

RECORD_KEYS: Final = ("struct_data", "structData")
"""Metadata keys of a record: Google's own name, in both spellings."""

CALIBRATED: Final = 4.0
"""The top of the calibrated rerankers' scale."""

MOST_RECORD: Final = 100_000
"""Characters of a text that is looked at for being a record."""
MOST_LEVELS: Final = 20
"""Levels of objects and lists inside of a record; deeper ones are read as text."""
MOST_VALUE: Final = 10_000
"""Characters of one field of the metadata, as JSON; a longer one (a window of sentences) is left out."""
MOST_METADATA: Final = 50_000
"""Characters of all of them; what comes beyond is left out."""


def answer_references(
    nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource]
) -> dict[str, AnswerReference]:
    """Give the references of the evidence, in its order, by the N of ``[ref_id:N]``.

    A source that has no references shown leaves a gap in these ids. The kind of a reference:

    * structured: a record without prose. Its metadata hold an object under ``struct_data`` (or ``structData``), or its
      text is one JSON object, or it has metadata and no text.
    * document: a LlamaIndex ``Document``, or a node that names no other document as its own.
    * chunk: a node of a document: one with a source document, or with a document's key of its source's.

    A relevance score is a calibrated reranker's, divided by 4; none is made of anything else.

    Args:
        nodes: The evidence, as a retrieval gave it.
        selected: The sources that were searched, by name.
    """
    return {shown.id: _reference(nodes[int(shown.id)], shown, selected) for shown in references(nodes, selected)}


def _reference(node: NodeWithScore, shown: Reference, selected: Mapping[str, SelectedSource]) -> AnswerReference:
    source, inner = selected[shown.knowledge_source_name].source, node.node
    relevance = unit_relevance(shown.reranker_score)
    given = source.result_of(inner) if isinstance(source, GivenResults) else None
    if given is not None:
        return _scored(given, relevance)
    named: dict[str, Any] = {"document": shown.doc_key, "uri": shown.url or "", "title": shown.title}
    # What kind it is does not depend on how much of it is shown.
    record = _record(shown.source_data or source.source_data(node))
    data = shown.source_data
    if record is not None:
        return StructuredReference(**named, data={} if data is None else _kept(record))
    content, page, metadata = ("", "", {}) if data is None else (data.content, _page(data), _kept(data.metadata))
    if isinstance(inner, Document) or shown.doc_key == inner.node_id:
        chunk = ChunkContent(content=content, page_identifier=page, relevance_score=relevance)
        return DocumentReference(**named, chunks=[] if data is None else [chunk], metadata=metadata)
    return ChunkReference(
        **named,
        chunk=inner.node_id,
        content=content,
        page_identifier=page,
        relevance_score=relevance,
        metadata=metadata,
    )


def _scored(given: AnswerReference, relevance: float | None) -> AnswerReference:
    if relevance is None or not isinstance(given, ChunkReference):
        return given
    return given.model_copy(update={"relevance_score": relevance})


def unit_relevance(reranker_score: float | None) -> float | None:
    """Give a calibrated reranker's score on the scale of 0 to 1; None where there is none."""
    return None if reranker_score is None else min(1.0, max(0.0, reranker_score / CALIBRATED))


def _page(data: SourceData) -> str:
    found = (data.metadata.get(key) for key in PAGE_KEYS)
    return next((str(value) for value in found if isinstance(value, (str, int)) and str(value)), "")


def _record(data: SourceData) -> Mapping[str, Any] | None:
    """Give the record that a node is; None for prose."""
    for key in RECORD_KEYS:
        told = data.metadata.get(key)
        if isinstance(told, Mapping) and told:
            return told
    text = data.content.strip()
    if not text:
        fields = {key: value for key, value in data.metadata.items() if key != PROVENANCE_KEY}
        return fields or None
    return _json_object(text)


def _json_object(text: str) -> dict[str, Any] | None:
    """Read a text that is one JSON object, with something in it."""
    if not (text.startswith("{") and text.endswith("}") and len(text) <= MOST_RECORD):
        return None
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value and _is_flat(value) else None


def _is_flat(value: Any) -> bool:
    """Whether data is nested no deeper than all that reads it can follow."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return True
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give JSON data without what is huge, in its order."""
    kept: dict[str, Any] = {}
    left = MOST_METADATA
    for key, value in fields.items():
        size = len(key) + len(json.dumps(value, ensure_ascii=False, default=str))
        if size <= min(MOST_VALUE, left):
            kept[key] = value
            left -= size
    return kept
