"""Training of the small cross-encoder: all-MiniLM-L6-v2 read as one model over evidence and claim side by side.

A word piece that stands on both sides has a type of its own (0/1 evidence, 2/3 claim; odd: on both sides), so the model
need not learn from a few thousand pairs what a copied word is. Word embeddings stay as they are.
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
from transformers import AutoConfig, AutoModel

LABELS = ("contradicted", "neutral", "supported")
MAX_TOKENS = 128
CLS, SEP = 101, 102


class CrossEncoder(nn.Module):
    """Encoder with four token types and a head over [CLS], the mean of the claim and the mean of the evidence."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.encoder = AutoModel.from_pretrained(folder, config=config, add_pooling_layer=False)
        size = config.hidden_size
        old = self.encoder.embeddings.token_type_embeddings.weight.data
        types = nn.Embedding(4, size)
        types.weight.data.copy_(old[0].repeat(4, 1) + 0.02 * torch.randn(4, size))
        self.encoder.embeddings.token_type_embeddings = types
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(3 * size, size), nn.GELU(), nn.Linear(size, len(LABELS)))

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        states = self.encoder(
            input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask
        ).last_hidden_state
        mask = attention_mask.to(states.dtype)
        claim = mask * (token_type_ids >= 2).to(states.dtype)
        evidence = mask - claim
        pooled = [states[:, 0]]
        for part in (claim, evidence):
            weight = part.unsqueeze(-1)
            pooled.append((states * weight).sum(1) / weight.sum(1).clamp(min=1.0))
        return self.head(torch.cat(pooled, -1))


def encode(tokenizer: Tokenizer, premises: Sequence[str], claims: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return ids and types of each pair, the evidence cut at its end."""
    rows = []
    for premise, claim in zip(
        tokenizer.encode_batch(list(premises), add_special_tokens=False),
        tokenizer.encode_batch(list(claims), add_special_tokens=False),
        strict=True,
    ):
        b = claim.ids[: MAX_TOKENS // 2]
        a = premise.ids[: MAX_TOKENS - 3 - len(b)]
        in_a, in_b = set(a), set(b)
        ids = [CLS, *a, SEP, *b, SEP]
        types = [0, *(int(i in in_b) for i in a), 0, *(2 + int(i in in_a) for i in b), 2]
        rows.append((ids, types))
    return rows


def batches(rows: list, order: list[int], budget: int, rng: random.Random | None) -> Iterator[list[int]]:
    size = 4096 if rng else len(order)
    out: list[list[int]] = []
    for start in range(0, len(order), size):
        part = sorted(order[start : start + size], key=lambda i: len(rows[i][0]))
        batch: list[int] = []
        for index in part:
            batch.append(index)
            if len(batch) * len(rows[index][0]) >= budget:
                out.append(batch)
                batch = []
        if batch:
            out.append(batch)
    if rng:
        rng.shuffle(out)
    return iter(out)


def tensors(rows: list, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = -(-max(len(rows[i][0]) for i in batch) // 4) * 4
    ids, types, mask = (torch.zeros(len(batch), longest, dtype=torch.long) for _ in range(3))
    for line, index in enumerate(batch):
        a, b = rows[index]
        ids[line, : len(a)] = torch.tensor(a)
        types[line, : len(b)] = torch.tensor(b)
        mask[line, : len(a)] = 1
    return ids, types, mask


def loss_of(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross entropy; label 3 means any of the first two classes."""
    logs = torch.log_softmax(logits.float(), -1)
    either = torch.logsumexp(logs[:, :2], -1)
    chosen = torch.where(labels == 3, either, logs.gather(1, labels.clamp(max=2).unsqueeze(1)).squeeze(1))
    return -(chosen * weights).sum() / weights.sum()


def predict(model: CrossEncoder, rows: list) -> torch.Tensor:
    model.eval()
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
    model.train()
    return " · ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, nargs="+", default=[], help="several are averaged")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--stage", required=True, help="of stages.json, which says how often a set is seen in an epoch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
    model = CrossEncoder(args.base)
    if args.start:
        loaded = [load_file(path) for path in args.start]
        model.load_state_dict({name: sum(one[name] for one in loaded) / len(loaded) for name in loaded[0]})
    model.encoder.embeddings.word_embeddings.weight.requires_grad = False
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
    model.train()
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
            save_file(model.state_dict(), args.out)
    print(evaluate(model, checks), flush=True)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, args.out)


if __name__ == "__main__":
    main()
