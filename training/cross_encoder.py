"""Training of the cross-encoder: DeBERTa-v3-xsmall (He et al. 2021) over evidence and claim side by side.

Its disentangled attention is written for pairs of at most 128 word pieces, where each distance of two pieces has its own
embedding: no gathering of indices, which ONNX runs slowly. Word embeddings stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import gelu, layer_norm, pad

LABELS = ("contradicted", "neutral", "supported")
MAX_TOKENS = 128
HALF = MAX_TOKENS - 1
"""Longest distance of two pieces."""
CLS, SEP, SPECIAL = 1, 2, 4
LAYERS, HEADS, SIZE = 12, 6, 384
_LINEAR = {
    "query": "attention.self.query_proj", "key": "attention.self.key_proj", "value": "attention.self.value_proj",
    "context": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
    "context_norm": "attention.output.LayerNorm", "down_norm": "output.LayerNorm",
}  # fmt: skip
_PLACES = {
    **{f"{name}_{layer}": f"deberta.encoder.layer.{layer}.{own}" for layer in range(LAYERS) for name, own in _LINEAR.items()},
    "norm": "deberta.embeddings.LayerNorm", "pooler": "pooler.dense",
}  # fmt: skip
NAMES = {
    f"{name}{end}": f"{own}.{kind}"
    for name, own in _PLACES.items()
    for end, kind in (("", "weight"), ("_bias", "bias"))
}
"""The weights by the names that transformers knows; matrices are transposed."""


class CrossEncoder(nn.Module):
    """DeBERTa-v3-xsmall with a classifier of three labels, for pairs of at most ``MAX_TOKENS`` pieces."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in weights.items()})
        self.weights["words"].requires_grad = False

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        own, (rows, length) = self.weights, input_ids.shape
        mask = attention_mask.to(torch.float32)
        states = self._normed(own["words"][input_ids], "norm") * mask.unsqueeze(-1)
        unseen = (1 - mask).view(rows, 1, 1, length) * -1e4
        distances = own["distances"][MAX_TOKENS - length : HALF + length]

        def linear(values: torch.Tensor, name: str) -> torch.Tensor:
            return torch.matmul(values, own[name]) + own[f"{name}_bias"]

        def heads(values: torch.Tensor) -> torch.Tensor:
            return values.view(rows, length, HEADS, -1).transpose(1, 2)

        def apart(values: torch.Tensor) -> torch.Tensor:  # with room for the shift
            return pad(values.view(1, 2 * length - 1, HEADS, -1).transpose(1, 2), (0, 0, 0, 1)).transpose(-1, -2)

        def placed(scores: torch.Tensor) -> torch.Tensor:
            """Move the score of each distance to the piece at that distance (the shift of Dai et al. 2019)."""
            flat = scores.reshape(rows, HEADS, 2 * length * length)[:, :, length - 1 : 2 * length**2 - 1]
            return flat.reshape(rows, HEADS, length, 2 * length - 1)[:, :, :, :length]

        scale = 1 / math.sqrt(3 * SIZE / HEADS)
        for layer in range(LAYERS):
            query, key = heads(linear(states, f"query_{layer}")) * scale, heads(linear(states, f"key_{layer}"))
            far_keys = apart(linear(distances, f"key_{layer}").flip(0))
            far_queries = apart(linear(distances, f"query_{layer}") * scale)
            scores = torch.matmul(query, key.transpose(-1, -2)) + placed(torch.matmul(query, far_keys)) + unseen
            scores = scores + placed(torch.matmul(key, far_queries)).transpose(-1, -2)
            read = torch.matmul(torch.softmax(scores, -1), heads(linear(states, f"value_{layer}")))
            joined = read.transpose(1, 2).reshape(rows, length, SIZE)
            states = self._normed(linear(joined, f"context_{layer}") + states, f"context_norm_{layer}")
            further = linear(gelu(linear(states, f"up_{layer}")), f"down_{layer}")
            states = self._normed(further + states, f"down_norm_{layer}")
        return linear(gelu(linear(states[:, 0], "pooler")), "labels")

    def _normed(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(values, (SIZE,), self.weights[name], self.weights[f"{name}_bias"], 1e-7)


def load(paths: Sequence[Path]) -> CrossEncoder:
    """Return a model with the mean of some weights."""
    loaded = [load_file(path) for path in paths]
    return CrossEncoder({name: sum(one[name] for one in loaded) / len(loaded) for name in loaded[0]})


def encode(tokenizer: Tokenizer, premises: Sequence[str], claims: Sequence[str]) -> list[list[int]]:
    """Return the pieces of each pair, the evidence cut at its end."""
    rows = []
    for premise, claim in zip(
        tokenizer.encode_batch(list(premises), add_special_tokens=False),
        tokenizer.encode_batch(list(claims), add_special_tokens=False),
        strict=True,
    ):
        said = claim.ids[: MAX_TOKENS // 2]
        rows.append([CLS, *premise.ids[: MAX_TOKENS - 3 - len(said)], SEP, *said, SEP])
    return rows


def batches(rows: list, order: list[int], budget: int, rng: random.Random | None) -> Iterator[list[int]]:
    size = 4096 if rng else len(order)
    out: list[list[int]] = []
    for start in range(0, len(order), size):
        part = sorted(order[start : start + size], key=lambda i: len(rows[i]))
        batch: list[int] = []
        for index in part:
            batch.append(index)
            if len(batch) * len(rows[index]) >= budget:
                out.append(batch)
                batch = []
        if batch:
            out.append(batch)
    if rng:
        rng.shuffle(out)
    return iter(out)


def tensors(rows: list, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(rows[i]) for i in batch)
    ids, mask = (torch.zeros(len(batch), longest, dtype=torch.long) for _ in range(2))
    for line, index in enumerate(batch):
        ids[line, : len(rows[index])] = torch.tensor(rows[index])
        mask[line, : len(rows[index])] = 1
    return ids, mask


def loss_of(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross entropy; label 3 means any of the first two classes."""
    logs = torch.log_softmax(logits.float(), -1)
    either = torch.logsumexp(logs[:, :2], -1)
    chosen = torch.where(labels == 3, either, logs.gather(1, labels.clamp(max=2).unsqueeze(1)).squeeze(1))
    return -(chosen * weights).sum() / weights.sum()


def predict(model: CrossEncoder, rows: list) -> torch.Tensor:
    out = torch.zeros(len(rows), 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches(rows, list(range(len(rows))), 4096, None):
            out[batch] = model(*tensors(rows, batch)).float()
    return out


def auroc(scores: Sequence[float], labels: Sequence[int]) -> float:
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    ranks = [0.0] * len(scores)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and scores[order[j + 1]] == scores[order[i]]:
            j += 1
        for k in range(i, j + 1):
            ranks[order[k]] = (i + j) / 2 + 1
        i = j + 1
    positive = sum(labels)
    negative = len(labels) - positive
    if not positive or not negative:
        return math.nan
    return (sum(r for r, y in zip(ranks, labels, strict=True) if y) - positive * (positive + 1) / 2) / (
        positive * negative
    )


def evaluate(model: CrossEncoder, held: dict[str, tuple[list, list[str]]]) -> str:
    parts = []
    for name, (rows, labels) in held.items():
        logits = predict(model, rows)
        probs = torch.softmax(logits, -1)
        score = probs[:, 2].tolist()
        area = auroc(score, [int(label == "supported") for label in labels])
        guess = logits.argmax(-1).tolist()
        three = [(LABELS.index(label), g) for label, g in zip(labels, guess, strict=True) if label in LABELS]
        accuracy = sum(a == b for a, b in three) / max(1, len(three))
        parts.append(f"{name} {area:.3f}/{accuracy:.3f}")
    return " · ".join(parts)


def save(model: CrossEncoder, path: Path) -> None:
    """Write a model's weights."""
    save_file({name: one.detach().contiguous() for name, one in model.weights.items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, nargs="+", required=True, help="several are averaged")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--stage", required=True, help="of stages.json, which says how often a set is seen in an epoch")
    args = parser.parse_args()
    torch.set_num_threads(2)
    rng = random.Random(args.seed)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    repeat = json.loads((Path(__file__).parent / "stages.json").read_text(encoding="utf-8"))[args.stage]
    train: list[dict] = []
    held: dict[str, list[dict]] = {}
    for path in args.data:
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            if item["split"] == "train":
                times = repeat.get(item["set"], 1)
                whole = int(times) + int(rng.random() < times - int(times))
                train.extend([item] * whole)
            else:
                held.setdefault(item["set"], []).append(item)
    rng.shuffle(train)
    print(len(train), "pairs; held:", {k: len(v) for k, v in held.items()}, flush=True)
    encoded = encode(tokenizer, [t["premise"] for t in train], [t["claim"] for t in train])
    labels = torch.tensor([LABELS.index(t["label"]) if t["label"] in LABELS else 3 for t in train])
    weights = torch.tensor([float(t.get("weight", 1.0)) for t in train])
    checks = {}
    written = held.get("written_twin", [])
    for name in ("written_claim", "written_paraphrase"):
        if name in held:
            held[name] = [*held[name], *written]
    for name, items in held.items():
        items = random.Random(1).sample(items, min(400, len(items)))
        checks[name] = (
            encode(tokenizer, [t["premise"] for t in items], [t["claim"] for t in items]),
            [t["label"] for t in items],
        )
    model = load(args.start)
    decay = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=args.rate, fused=True
    )
    order = list(range(len(train)))
    rng.shuffle(order)
    plan = list(batches(encoded, order, 2048, rng))
    print(len(plan), "steps", flush=True)
    begun = time.time()
    mean, seen = 0.0, 0
    for step, batch in enumerate(plan):
        share = step / len(plan)
        passed = (time.time() - begun) / 60 / args.minutes
        share = max(share, passed)
        if share >= 1.0:
            break
        rate = args.rate * min(1.0, (step + 1) / (0.05 * len(plan) + 1)) * max(0.02, 1.0 - share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(*tensors(encoded, batch))
        loss = loss_of(logits, labels[batch], weights[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.item()
        seen += len(batch)
        if (step + 1) % 100 == 0:
            print(
                f"{step + 1} loss {mean / 100:.4f} {seen / (time.time() - begun):.0f} pairs/s {(time.time() - begun) / 60:.1f} min",
                flush=True,
            )
            mean = 0.0
        if (step + 1) % 350 == 0:
            print(evaluate(model, checks), flush=True)
            save(model, args.out)
    print(evaluate(model, checks), flush=True)
    save(model, args.out)


if __name__ == "__main__":
    main()
