"""From a source's own metadata keys to uniform ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_index.core.schema import MetadataMode, NodeWithScore
from pydantic_core import to_jsonable_python

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.schema import SourceData

__all__ = ["Fields"]


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata keys of a source's documents.

    Args:
        title: Of the title; the file name stands in for a missing one.
        content: Of the content to cite; None is the node's text.
        url: Of the URL.
        key: Of the document's key; None is the source document's id.
        terms: Of the document's terms; None shows none.
    """

    title: str = "title"
    content: str | None = None
    url: str = "url"
    key: str | None = None
    terms: str | None = None

    def data(self, node: NodeWithScore) -> SourceData:
        """Return a node's document under uniform keys."""
        inner = node.node
        metadata = inner.metadata
        content = metadata.get(self.content) if self.content else None
        key = metadata.get(self.key) if self.key else None
        if key is None or key == "":
            key = inner.ref_doc_id or inner.node_id
        title = metadata.get(self.title) or metadata.get("file_name") or key
        url = metadata.get(self.url)
        terms = metadata.get(self.terms) if self.terms else None
        return SourceData(
            doc_key=without_surrogates(str(key)),
            title=without_surrogates(str(title)),
            content=str(content) if content else inner.get_content(metadata_mode=MetadataMode.NONE),
            url=str(url) if url else None,
            terms=", ".join(map(str, terms)) if isinstance(terms, (list, tuple)) else str(terms or "") or None,
            metadata={name: _plain(value) for name, value in metadata.items() if not name.startswith("_")},
        )


def _plain(value: Any) -> Any:
    """Return a value of the metadata as JSON has it; what JSON does not have as text."""
    try:
        return _writable(to_jsonable_python(value, fallback=str, inf_nan_mode="null"))
    except ValueError:  # it holds itself, or bytes that are no text
        return without_surrogates(str(value))


def _writable(value: Any) -> Any:
    """Return JSON data without lone surrogates; it is not deep, see ``sources.cleaning``."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {without_surrogates(key): _writable(inner) for key, inner in value.items()}
    return [_writable(inner) for inner in value] if isinstance(value, list) else value
