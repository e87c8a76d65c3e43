"""Splitting of file texts into chunks that fit the embedding model, with stable ids."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.node_parser.text.utils import split_by_sentence_tokenizer
from llama_index.core.schema import Document, MetadataMode, NodeRelationship, ObjectType, RelatedNodeInfo, TextNode
from llama_index.core.utils import get_tokenizer

from llama_index_agentic_kb.store.database import Chunk, MetadataValue
from llama_index_agentic_kb.store.embedding_model import check_sizes, input_window, model_tokenizer
from llama_index_agentic_kb.store.reading import ParsedFile

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from llama_index_agentic_kb.store.files import Access, FoundFile

_NAMESPACE: Final = uuid.UUID("6f3c1d5a-2d0e-5b8e-9a55-3d1f6c1b7a10")
_PLACES: Final = frozenset({"page_label", "sheet"})
"""The metadata keys of a chunk's place in its document, which language models see."""
_RESERVED_KEYS: Final = frozenset(
    {"title", "url", "source", "document_id", "doc_id", "ref_doc_id", "file_path", "file_name", "chunk_index"}
)
"""Metadata keys written by this library or LlamaIndex; a file can't set them to pose as another document."""


class Chunker:
    """A splitter of files at sentence ends, into chunks that don't exceed the embedding model's input window.

    Tokens of the title line and the chunk together are counted by the model's tokenizer if it is local, else by
    LlamaIndex's. Sizes that don't fit the model are a ``ConfigurationError``.
    """

    def __init__(self, embed_model: BaseEmbedding, chunk_size: int, chunk_overlap: int) -> None:
        check_sizes(chunk_size, chunk_overlap, input_window(embed_model))
        self._tokenizer = model_tokenizer(embed_model) or get_tokenizer()
        self._title_size = chunk_size // 4
        # Neighbours are found by chunk_index: a link would become outdated whenever the neighbour changes.
        self._splitter = SentenceSplitter(
            chunk_size=chunk_size,
            chunk_overlap=chunk_overlap,
            tokenizer=self._tokenizer,
            paragraph_separator="\n\n",
            chunking_tokenizer_fn=_sentences,
            include_prev_next_rel=False,
        )

    def chunks(self, source: str, file: FoundFile, parsed: ParsedFile, access: Access) -> Iterator[Chunk]:
        """Yield the chunks of a file in reading order; a file without text has none.

        A chunk's id is derived from its text, metadata and position, so the same file always has the same chunks.
        """
        title = self._short_title(parsed.title)
        document_id = f"{source}/{file.relative}"
        stamped = access.stamp(file.path, parsed.metadata)
        index = 0
        for section in parsed.sections:
            held = {**parsed.metadata, **section.metadata}
            own = {key: held[key] for key in held if key.casefold() not in _RESERVED_KEYS and not access.protects(key)}
            # With the title as metadata, the splitter leaves room for it.
            document = Document(text=section.text, metadata={"title": title})
            for node in self._splitter.get_nodes_from_documents([document]):
                text = node.get_content(metadata_mode=MetadataMode.NONE)
                if not text.strip():
                    continue
                metadata: dict[str, MetadataValue] = {
                    **own,
                    **stamped,
                    "title": title,
                    "source": source,
                    "document_id": document_id,
                    "file_path": file.relative,
                    "file_name": file.path.name,
                    "chunk_index": index,
                }
                found = node.start_char_idx if isinstance(node, TextNode) else None
                start = None if found is None else section.start + found
                content_hash = _sha256([text, metadata, start])
                yield Chunk(
                    node_id=str(uuid.uuid5(_NAMESPACE, f"{document_id}\n{index}\n{content_hash}")),
                    index=index,
                    text=text,
                    metadata=metadata,
                    # The content that is embedded, in a form that is independent of LlamaIndex's text templates.
                    embedding_hash=_sha256([title, text]),
                    start_char=start,
                    end_char=None if start is None else start + len(text),
                )
                index += 1

    def _short_title(self, title: str) -> str:
        short = title = " ".join(title[:2_000].split())[:500]
        while len(self._tokenizer(short)) > self._title_size:
            title = title[: len(title) * 9 // 10]
            short = title.rstrip() + "…"
        return short


def chunk_to_node(chunk: Chunk) -> TextNode:
    """Return a chunk as a LlamaIndex node for the vector index, without its embedding.

    Of its metadata, the embedding model sees only the title; the language model sees the page and the sheet as well.
    The node's source relationship is the document, so ``ref_doc_id`` is the document's id.
    """
    hidden = sorted(key for key in chunk.metadata if key != "title")
    document = RelatedNodeInfo(node_id=str(chunk.metadata["document_id"]), node_type=ObjectType.DOCUMENT)
    return TextNode(
        id_=chunk.node_id,
        text=chunk.text,
        metadata=dict(chunk.metadata),
        excluded_embed_metadata_keys=hidden,
        excluded_llm_metadata_keys=[key for key in hidden if key not in _PLACES],
        start_char_idx=chunk.start_char,
        end_char_idx=chunk.end_char,
        relationships={NodeRelationship.SOURCE: document},
    )


def _sentences(text: str) -> list[str]:
    """Split a text into sentences with LlamaIndex's tokenizer, but return it whole if one sentence is over 90% of it.

    For 16,000 exclamation marks, LlamaIndex would split off one mark per recursive call, which takes 40 s. A text
    returned whole is split at commas, words and characters instead.
    """
    parts = split_by_sentence_tokenizer()(text)
    return [text] if max(map(len, parts), default=0) > len(text) * 0.9 else parts


def _sha256(content: list[object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
