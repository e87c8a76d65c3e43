"""Export of a trained cross-encoder to an int8 ONNX file that onnxruntime runs without torch."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

import torch
from cross_encoder import CrossEncoder
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors.torch import load_file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="several are averaged")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = CrossEncoder(args.base)
    model.encoder.set_attn_implementation("eager")
    loaded = [load_file(path) for path in args.weights]
    model.load_state_dict({name: sum(one[name] for one in loaded) / len(loaded) for name in loaded[0]})
    model.eval()
    ids = torch.tensor([[101, 2054, 2003, 102, 2023, 102, 0, 0], [101, 2054, 2003, 102, 2023, 2003, 3231, 102]])
    types = torch.tensor([[0, 0, 1, 0, 2, 2, 0, 0], [0, 0, 1, 0, 2, 3, 2, 2]])
    mask = (ids != 0).long()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        torch.onnx.export(
            model,
            (ids, types, mask),
            str(plain),
            input_names=["input_ids", "token_type_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_axes={name: {0: "pairs", 1: "tokens"} for name in ("input_ids", "token_type_ids", "attention_mask")}
            | {"logits": {0: "pairs"}},
            opset_version=17,
            dynamo=False,
        )
        quantize_dynamic(str(plain), str(args.out), per_channel=True, weight_type=QuantType.QInt8)
    print(args.out, args.out.stat().st_size, hashlib.sha256(args.out.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
