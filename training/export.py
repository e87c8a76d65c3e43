"""Export of a trained cross-encoder to an int8 ONNX file that onnxruntime runs without torch."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
from cross_encoder import load
from onnxruntime.quantization import QuantType, quantize_dynamic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="several are averaged")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(args.weights)
    ids = torch.tensor([[1, 254, 203, 2, 223, 2, 0, 0], [1, 254, 203, 2, 223, 203, 323, 2]])
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        torch.onnx.export(
            model,
            (ids, (ids != 0).long()),
            str(plain),
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={name: {0: "pairs", 1: "tokens"} for name in ("input_ids", "attention_mask")}
            | {"logits": {0: "pairs"}},
            opset_version=17,
            dynamo=False,
        )
        Path(f"{args.out}.data").unlink(missing_ok=True)  # onnx would append to it
        # onnxruntime maps weights in a file of their own into memory, and copies those in the graph's file.
        quantize_dynamic(
            str(plain), str(args.out), per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=True
        )
    for path in sorted(args.out.parent.glob(f"{args.out.name}*")):
        print(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
