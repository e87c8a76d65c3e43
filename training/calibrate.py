"""Calibration and measurement of the offline scorers on claims that the cross-encoder was not trained on.

Features and the cross-encoder's log odds are weighed by logistic models. Figures come from cross-validation by group
(document or claim), never from the claims that a model was fitted on; intervals are bootstrapped over groups. The
shipped weights are fitted on all groups, and their scale is set so that 0.6 is the operating point.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pairs import EXACT, held_out
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from llama_index_agentic_kb.grounding.features import FEATURES, Corpus, Premise, Reading
from llama_index_agentic_kb.grounding.scorers.lexical import (
    SmallModel,
    denials,
    long_document,
    margin,
    read_windows,
    support,
)

OPERATING = 0.6
STEEPNESS = {"small": 1.3}
"""Factor of a model's slope at the operating point: with it, what short passages do not say is not partially supported."""


@dataclass
class Case:
    """A labelled claim with its evidence."""

    set: str
    group: str
    claim: str
    passages: list[Premise]
    label: str
    kind: str = ""
    reading: Reading | None = None
    logits: list[tuple[float, float, float]] = field(default_factory=list)
    long: float = 0.0


def written(folder: Path, bench: Path, rng: random.Random) -> list[Case]:
    others: dict[str, list[Premise]] = {}
    for name in ("2wiki", "musique-dev", "mtrag-human", "strategyqa-facts"):
        lines = (bench / name / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
        picked = rng.sample(lines, min(400, len(lines)))
        others[name] = [Premise(one["text"][:1500], one.get("title", "")) for one in map(json.loads, picked)]
    cases = []
    for path in sorted(folder.glob("pairs_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            if not held_out(item["doc"]):
                continue
            passages = [Premise(item["evidence"]), *rng.sample(others[item["set"]], 4)]
            rng.shuffle(passages)
            cases.append(Case("written", item["doc"], item["claim"], passages, "supported", "claim"))
            cases.append(Case("written", item["doc"], item["paraphrase"], passages, "supported", "paraphrase"))
            cases += [
                Case(
                    "written",
                    item["doc"],
                    twin["text"],
                    passages,
                    "contradicted" if twin["kind"] in EXACT else "not_supported",
                    twin["kind"],
                )
                for twin in item["twins"]
            ]
    return cases


def claims(path: Path, name: str, *, held_only: bool, of: int = 3) -> list[Case]:
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        key = item["claim"] if name == "climate_fever" else item["id"]
        if held_only and not held_out(key, of):
            continue
        evidence = [Premise("\n".join(item["evidence"]), item.get("about", "") if name == "climate_fever" else "")]
        cases.append(Case(name, key, item["claim"], evidence, item["label"]))
    return cases


def read(cases: Sequence[Case], model: SmallModel | None) -> None:
    """Read each claim as the scorer does."""
    for case in cases:
        corpus = Corpus(case.passages)
        case.reading = corpus.read(case.claim)
        case.long = long_document(case.reading)
        if model is not None:
            case.logits = read_windows(model, {case.claim: case.reading})[case.claim]


def matrix(cases: Sequence[Case], *, small: bool) -> np.ndarray:
    """Return the features of each case, and in the last column the cross-encoder's log odds."""
    rows = []
    for case in cases:
        chosen = max(case.logits, key=margin, default=(0.0, 0.0, -3.0))
        rows.append((*case.reading.features, *([support(chosen)] if small else ())))
    return np.array(rows)


def weights(cases: Sequence[Case], *, small: bool) -> np.ndarray:
    """Each set counts by its share, and in it supported and other claims alike.

    Features alone can't tell a paraphrase from a twin: they are fitted without the paraphrases.
    """
    keys = [(case.set, case.label == "supported") for case in cases]
    counts = {key: keys.count(key) for key in set(keys)}
    share = {"written": 2.0, "wice_dev": 1.0, "wice_parts": 0.3, "climate_fever": 0.7}
    if small:  # the model of short passages; long documents have one of their own
        share |= {"wice_dev": 0.0, "wice_parts": 0.0}
    sample = np.array([share[key[0]] * 1000 / counts[key] for key in keys]) / 100
    return sample if small else sample * np.array([case.kind != "paraphrase" for case in cases])


NAMES = [*FEATURES, "support"]


class Fit:
    """A logistic model whose weights may only have the sign that their feature means, in the features' own units.

    Without the signs it learns how a set was made (long paraphrases, short twins) and not what support is.
    """

    def __init__(self, X: np.ndarray, y: np.ndarray, sample: np.ndarray, strength: float, names: Sequence[str]) -> None:
        mean, scale = X.mean(0), X.std(0) + 1e-6
        Z = (X - mean) / scale
        bounds = [(None, 0) if name == "negation_differs" else (0, None) for name in names]

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            z = Z @ w[:-1] + w[-1]
            p = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
            value = (sample * (np.logaddexp(0, z) - y * z)).sum() + (w[:-1] ** 2).sum() / (2 * strength)
            inner = sample * (p - y)
            return float(value), np.append(Z.T @ inner + w[:-1] / strength, inner.sum())

        found = minimize(loss, np.zeros(X.shape[1] + 1), jac=True, method="L-BFGS-B", bounds=[*bounds, (None, None)]).x
        self.weights = found[:-1] / scale
        self.bias = float(found[-1] - (self.weights * mean).sum())

    def score(self, X: np.ndarray) -> np.ndarray:
        return X @ self.weights + self.bias


class Blend:
    """Two logistic models: the cross-encoder alone in short passages, with features in long documents (WiCE)."""

    def __init__(self, cases: Sequence[Case], X: np.ndarray, strength: float) -> None:
        y = np.array([case.label == "supported" for case in cases]).astype(float)
        self.short = Fit(X[:, -1:], y, weights(cases, small=True), strength, NAMES[-1:])
        mine = [k for k, case in enumerate(cases) if case.set in ("wice_dev", "wice_parts")]
        sample = np.array([1.0 if cases[k].set == "wice_dev" else 0.3 for k in mine])
        self.long = Fit(X[mine], y[mine], sample, strength, NAMES)

    def score(self, X: np.ndarray, long: np.ndarray) -> np.ndarray:
        return (1 - long) * self.short.score(X[:, -1:]) + long * self.long.score(X)


def out_of_fold(cases: Sequence[Case], X: np.ndarray, strength: float, *, small: bool) -> np.ndarray:
    y = np.array([case.label == "supported" for case in cases]).astype(int)
    groups, long = np.array([case.group for case in cases]), np.array([case.long for case in cases])
    sample = None if small else weights(cases, small=False)
    scores = np.zeros(len(cases))
    for seed in range(3):
        for train, test in GroupKFold(5, shuffle=True, random_state=seed).split(X, y, groups):
            if sample is None:
                scores[test] += Blend([cases[k] for k in train], X[train], strength).score(X[test], long[test]) / 3
            else:
                scores[test] += Fit(X[train], y[train], sample[train], strength, FEATURES).score(X[test]) / 3
    return scores


def area(scores: np.ndarray, cases: Sequence[Case], good: list[int], bad: list[int], rounds: int = 300) -> str:
    if not good or not bad:
        return "-"
    value = roc_auc_score([1] * len(good) + [0] * len(bad), scores[good + bad])
    rng = np.random.default_rng(7)
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for index in good:
        groups.setdefault(cases[index].group, ([], []))[0].append(index)
    for index in bad:
        groups.setdefault(cases[index].group, ([], []))[1].append(index)
    keys, values = list(groups), []
    for _ in range(rounds):
        picked = [groups[keys[k]] for k in rng.integers(len(keys), size=len(keys))]
        a = [index for one, _ in picked for index in one]
        b = [index for _, one in picked for index in one]
        if a and b:
            values.append(roc_auc_score([1] * len(a) + [0] * len(b), scores[a + b]))
    low, high = np.percentile(values, [2.5, 97.5])
    return f"{value:.3f} [{low:.3f}, {high:.3f}] n={len(good)}+{len(bad)}"


def table(cases: Sequence[Case], scores: np.ndarray) -> dict[str, str]:
    def where(test) -> list[int]:
        return [index for index, case in enumerate(cases) if test(case)]

    def labelled(name: str, *labels: str) -> list[int]:
        return where(lambda c: c.set == name and c.label in labels)

    twins = where(lambda c: c.set == "written" and c.label != "supported")
    rest = sorted({case.label for case in cases} - {"supported"})
    report = {}
    for title, name, first in (
        ("WiCE dev, supported v not", "wice_dev", "not_supported"),
        ("CLIMATE-FEVER, supported v refuted", "climate_fever", "contradicted"),
    ):
        good = labelled(name, "supported")
        report[title] = area(scores, cases, good, labelled(name, first))
        report[f"{title.partition(',')[0]}, supported v rest"] = area(scores, cases, good, labelled(name, *rest))
    for kind in ("claim", "paraphrase"):
        report[f"written {kind}s v twins"] = area(scores, cases, where(lambda c, kind=kind: c.kind == kind), twins)
    for kind in sorted({case.kind for case in cases if case.set == "written"} - {"claim", "paraphrase"}):
        report[f"written, supported v {kind}"] = area(
            scores,
            cases,
            where(lambda c: c.kind in ("claim", "paraphrase")),
            where(lambda c, kind=kind: c.kind == kind),
            100,
        )
    return report


def operating_point(cases: Sequence[Case], scores: np.ndarray, most_false: float) -> tuple[float, dict[str, float]]:
    """Return the score at which so many false written claims pass, and what passes of each kind."""
    false = np.array([s for s, c in zip(scores, cases, strict=True) if c.set == "written" and c.label != "supported"])
    cut = float(np.quantile(false, 1 - most_false))
    shares: dict[str, float] = {}
    for name, test in (
        ("true claims", lambda c: c.kind == "claim"),
        ("true paraphrases", lambda c: c.kind == "paraphrase"),
        ("false twins", lambda c: c.set == "written" and c.label != "supported"),
        ("WiCE supported", lambda c: c.set == "wice_dev" and c.label == "supported"),
        ("WiCE partially", lambda c: c.set == "wice_dev" and c.label == "partially_supported"),
        ("WiCE not", lambda c: c.set == "wice_dev" and c.label == "not_supported"),
        ("CLIMATE-FEVER supported", lambda c: c.set == "climate_fever" and c.label == "supported"),
        ("CLIMATE-FEVER refuted", lambda c: c.set == "climate_fever" and c.label == "contradicted"),
        ("CLIMATE-FEVER neither", lambda c: c.set == "climate_fever" and c.label == "not_supported"),
    ):
        chosen = [s for s, c in zip(scores, cases, strict=True) if test(c)]
        shares[name] = round(float(np.mean([s >= cut for s in chosen])), 3) if chosen else 0.0
    return cut, shares


def against(cases: Sequence[Case], scores: np.ndarray, cut: float) -> tuple[float, list[str]]:
    """Return the probability of contradiction from which 95 % of the claims called contradicted are so labelled."""
    rows = []
    for case, score in zip(cases, scores, strict=True):
        if score < cut and case.logits and case.long < 0.5:
            against = denials(case.reading, case.logits)
            share = min(against[0], against[case.logits.index(max(case.logits, key=margin))])
            false = case.label == "contradicted" or (case.set == "written" and case.label != "supported")
            rows.append((share, false, case))
    told, best = [], 1.01
    true_all = [c for c in cases if c.label == "supported"]
    for least in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995):
        over = [(false, case) for share, false, case in rows if share >= least]
        if not over:
            continue
        precision = {}
        for name in ("written", "climate_fever", "wice_dev"):
            mine = [false for false, case in over if case.set == name]
            precision[name] = f"{np.mean(mine):.3f} of {len(mine)}" if mine else "-"
        wrong = sum(case.label == "supported" for _, case in over)
        told.append(f"p>={least}: {precision}, supported ones called contradicted {wrong}/{len(true_all)}")
        fine = all(
            np.mean([f for f, c in over if c.set == name] or [1]) >= 0.95 for name in ("written", "climate_fever")
        )
        if fine and wrong <= 0.015 * len(true_all) and best > 1:
            best = least
    return best, told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder with proof.onnx and tokenizer.json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--false", type=float, default=0.08)
    args = parser.parse_args()
    rng = random.Random(7)
    cases = [
        *written(args.data, args.bench, rng),
        *claims(args.bench / "claims/wice-dev.jsonl", "wice_dev", held_only=False),
        *claims(args.bench / "claims/wice-parts.jsonl", "wice_parts", held_only=True, of=4),
        *claims(args.bench / "claims/climate-fever.jsonl", "climate_fever", held_only=True),
    ]
    model = None
    digests = {}
    if args.weights and (args.weights / "proof.onnx").exists():
        digests = {
            name: hashlib.sha256((args.weights / name).read_bytes()).hexdigest()
            for name in ("proof.onnx", "proof.onnx.data", "tokenizer.json")
        }
        model = SmallModel(args.weights, digests)
    begun = time.time()
    read(cases, model)
    print(f"{len(cases)} claims read in {time.time() - begun:.0f} s")
    y = np.array([case.label == "supported" for case in cases]).astype(int)
    result: dict[str, object] = {}
    for name in ("lexical", "small") if model else ("lexical",):
        X = matrix(cases, small=name == "small")
        scores = out_of_fold(cases, X, 0.3, small=name == "small")
        print(f"== {name}")
        for key, value in table(cases, scores).items():
            print(f"  {key}: {value}")
        cut, shares = operating_point(cases, scores, args.false if name == "small" else 0.25)
        print(f"  at the operating point: {shares}")
        for rate in (0.05, 0.1, 0.15, 0.2) if name == "small" else ():
            print(f"  at {rate:.2f}: {operating_point(cases, scores, rate)[1]}")
        aim = float(np.log(OPERATING / (1 - OPERATING)))
        if name == "lexical":
            fits = {name: (Fit(X, y, weights(cases, small=False), 0.3, FEATURES), aim - cut)}
        else:
            blend = Blend(cases, X, 0.3)
            wice = [k for k, case in enumerate(cases) if case.set == "wice_dev" and case.label != "supported"]
            long_cut = float(np.quantile(blend.long.score(X)[wice], 0.9))
            fits = {"small": (blend.short, aim - cut), "long": (blend.long, aim - long_cut)}
        for part, (fit, shift) in fits.items():
            steep = STEEPNESS.get(part, 1.0)
            bias = steep * (fit.bias + shift - aim) + aim
            result[part] = {"weights": [round(steep * float(w), 5) for w in fit.weights], "bias": round(bias, 5)}
        if name == "small":
            least, lines = against(cases, scores, cut)
            print(*lines, sep="\n")
            print("contradicted from", least)
            result["contradicted"] = least
            result["digests"] = digests
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
