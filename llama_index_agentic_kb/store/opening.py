"""What must hold before a store is opened or made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb.errors import ConfigurationError, StoreDamagedError, StoreMismatchError
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    EmbedModelFingerprint,
    embed_model_fingerprint,
    embed_model_name,
)
from llama_index_agentic_kb.store.state import FIRST_VECTORS
from llama_index_agentic_kb.store.store_file import STORE_FILE

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

__all__ = ["DOCUMENTS_FILE", "check_directory_is_free", "check_documents", "check_embed_model"]

DOCUMENTS_FILE: Final = "documents.db"


def check_embed_model(directory: Path, made_with: EmbedModelFingerprint, embed_model: BaseEmbedding | None) -> None:
    """Refuse a model that a store's vectors don't come from.

    Names are compared first: measuring the dimension loads or calls the model.

    Raises:
        StoreMismatchError: It has another name, another dimension or other weights.
    """
    name = DEFAULT_EMBED_MODEL if embed_model is None else embed_model_name(embed_model)
    given: EmbedModelFingerprint | str = name
    if name == made_with.name:
        if embed_model is None:
            return
        given = embed_model_fingerprint(embed_model)
        if made_with.agrees_with(given):
            return
    given = f"{given} with other weights" if given == made_with else given
    raise StoreMismatchError(
        f"The store {str(directory)!r} was made with the embedding model {made_with} and is opened with {given}: "
        "their vectors can't be compared. Pass embed_model= the model it was made with, or make a new store for the "
        "other one with `agentic-kb ingest`."
    )


def check_documents(directory: Path) -> None:
    """Refuse a store whose documents are gone.

    A store is made in two steps and may have been left between them, but then it has no vectors either.

    Raises:
        StoreDamagedError: They are.
    """
    if not (directory / DOCUMENTS_FILE).exists() and (directory / FIRST_VECTORS).exists():
        raise StoreDamagedError(
            f"{str(directory / DOCUMENTS_FILE)!r} is gone, and with it the store's documents. Restore it, or make the "
            "store again with `agentic-kb ingest` in a directory of its own."
        )


def check_directory_is_free(directory: Path) -> None:
    """Refuse to make a store among other files.

    Raises:
        ConfigurationError: The directory holds any, or is a file.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigurationError(f"{str(directory)!r} is a file; a store is a directory.")
    # A creation that was killed may have left the temporary file.
    if any(entry.name != f"{STORE_FILE}.tmp" for entry in directory.iterdir()):
        raise ConfigurationError(
            f"{str(directory)!r} holds other files and no store. Give the store a directory of its own."
        )
