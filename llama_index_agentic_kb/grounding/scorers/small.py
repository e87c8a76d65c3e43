"""The shipped cross-encoder: a small model that reads pairs of evidence and claim, through onnxruntime.

The package contains its weights as an int8 ONNX file, its tokenizer and its calibration (docs/proof.md). Digests are
checked before loading. Nothing is downloaded, and the weights contain no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypedDict

from llama_index_agentic_kb._text import without_surrogates
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError

WEIGHTS: Final = Path(__file__).parent.parent / "weights"
MAX_TOKENS: Final = 128  # maximum tokens of a pair, as in training
BATCH: Final = 256  # maximum tokens of a batch, to limit memory; the deadline is checked between batches
_INPUTS: Final = ("input_ids", "attention_mask")
_RAREST: Final = 29_000
"""The first of the 1,000 rarest pieces; they stand for unknown characters, so that these differ from each other."""
_LOCK: Final = threading.Lock()

Row = tuple[float, float, float]  # the logits of "contradicted", "neutral" and "supported"


class Logistic(TypedDict):
    """A logistic model over the features, and possibly over a pair's logits."""

    weights: list[float]
    bias: float


class Calibration(TypedDict):
    """The calibration file that ``training/calibrate.py`` writes."""

    lexical: Logistic
    small: Logistic
    long: Logistic
    contradicted: float  # minimum probability at which a claim is contradicted
    digests: dict[str, str]


@cache
def calibration() -> Calibration:
    """Return the weights of the logistic models, the contradiction threshold and the digests of the model files."""
    loaded: Calibration = json.loads((WEIGHTS / "calibration.json").read_text(encoding="utf-8"))
    return loaded


class SmallModel:
    """A model that scores pairs of evidence and claim.

    Args:
        folder: Folder with ``proof.onnx`` and ``tokenizer.json``.
        digests: SHA-256 digests of both files by name.

    Raises:
        ConfigurationError: A file is missing or has another digest.
    """

    def __init__(self, folder: Path, digests: dict[str, str]) -> None:
        for name, digest in digests.items():
            path = folder / name
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
            if found != digest:
                raise ConfigurationError(f"{path}: its digest is {found}, expected {digest}; install the package anew")
        # The import of 1.31 writes a device id and a database of telemetry into the user's cache, unless this is set.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime  # noqa: PLC0415 (takes 100 ms, and is needed only where claims are checked)
        from tokenizers import Tokenizer  # noqa: PLC0415 (same)

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take CPU time from other work while they wait.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False
        self._session = onnxruntime.InferenceSession(
            str(folder / "proof.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self._first: int = self._tokenizer.token_to_id("[CLS]") or 0
        self._last: int = self._tokenizer.token_to_id("[SEP]") or 0

    def logits(self, pairs: Sequence[tuple[str, str]], *, deadline: float | None = None) -> list[Row]:
        """Return the logits of each pair of evidence and claim."""
        import numpy as np  # noqa: PLC0415 (with onnxruntime)

        rows = [self._encoded(evidence, claim) for evidence, claim in pairs]
        found: dict[int, Row] = {}
        for batch in _batches(rows):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"the proof model: late after {len(found)} of {len(rows)} pairs")
            inputs = {name: np.zeros((len(batch), len(rows[batch[-1]])), dtype=np.int64) for name in _INPUTS}
            for line, ids in enumerate(rows[number] for number in batch):
                inputs["input_ids"][line, : len(ids)] = ids
                inputs["attention_mask"][line, : len(ids)] = 1
            found |= zip(batch, self._session.run(["logits"], inputs)[0].tolist(), strict=True)
        return [found[number] for number in range(len(rows))]

    def _encoded(self, evidence: str, claim: str) -> list[int]:
        asked, there = self._pieces(claim)[: MAX_TOKENS // 2], self._pieces(evidence)
        return [self._first, *there[: MAX_TOKENS - 3 - len(asked)], self._last, *asked, self._last]

    def _pieces(self, text: str) -> list[int]:
        found = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        return [
            _RAREST + zlib.crc32(piece.encode()) % 1_000 if one == self._unknown else one
            for one, piece in zip(found.ids, found.tokens, strict=True)
        ]


def _batches(rows: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield batches of pair indices, sorted by length, the longest last."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda one: len(rows[one])):
        if batch and (len(batch) + 1) * len(rows[number]) > BATCH:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def small_model() -> SmallModel:
    """Return the shipped model, loaded on first use, by one thread."""
    with _LOCK:
        return _loaded()


@cache
def _loaded() -> SmallModel:
    return SmallModel(WEIGHTS, calibration()["digests"])
