"""Measures the scorer without a model: what it tells apart, against three simpler signals, and how fast.

    python -m tests.benchmarks.grounding FOLDER...

Each folder is a set with a ``corpus.jsonl`` (``_id``, ``title``, ``text``); with ``queries.jsonl`` (``answer``) and
``qrels.tsv`` as well, the sentences of its answers are a further set: human wording of what the passages say, with the
same changes. No data is part of the project. Claims are held against their own passages and four others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from llama_index_agentic_kb.grounding.alignment.analysis import analyze
from llama_index_agentic_kb.grounding.claims import split_claims
from llama_index_agentic_kb.grounding.scorers import CITATION_THRESHOLD, LexicalScorer, Premise
from tests.benchmarks.grounding_changes import CHANGES
from tests.benchmarks.grounding_claims import KINDS, LabelledClaim, make_claims
from tests.benchmarks.grounding_passages import Document, read_corpus

__all__ = ["Signal", "answer_claims", "auroc", "measure", "speed"]

_DISTRACTORS: Final = 4
_WORD: Final = re.compile(r"\w+")

Signal = Callable[[str, Sequence[Document]], float]


def auroc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Give the share of pairs in which the positive one scores higher; ties count half (Mann and Whitney 1947)."""
    ordered = np.sort(np.asarray(negative))
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.mean() / 2 / len(ordered))


def alignment(claim: str, documents: Sequence[Document]) -> float:
    """Ours."""
    premises = [Premise(document.text, document.title) for document in documents]
    score = LexicalScorer().judge([claim], premises)[0].score
    return 0.0 if score is None else score


def token_coverage(claim: str, documents: Sequence[Document]) -> float:
    """Give the highest share of a claim's words that a passage has."""
    words = set(_WORD.findall(claim.casefold()))
    held = (set(_WORD.findall(f"{one.title} {one.text}".casefold())) for one in documents)
    return max(len(words & other) / len(words) for other in held)


def substring(claim: str, documents: Sequence[Document]) -> float:
    """Give the highest share of a claim's names and numbers, then of its words, that stand in a passage somewhere."""
    words = _WORD.findall(claim)
    told = [word.casefold() for word in words[1:] if word[0].isupper() or word[0].isdigit()]

    def share(parts: Sequence[str], text: str) -> float:
        return sum(part in text for part in parts) / len(parts) if parts else 1.0

    texts = [f"{one.title} {one.text}".casefold() for one in documents]
    return max(share(told, text) + 0.01 * share([word.casefold() for word in words], text) for text in texts)


class Cosine:
    """The highest cosine of a claim and a sentence, by an embedding model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[str, np.ndarray[Any, Any]] = {}

    def __call__(self, claim: str, documents: Sequence[Document]) -> float:
        """Score a claim."""
        told = np.concatenate([self._sentences(document) for document in documents])
        return float((told @ self._vectors([claim])[0]).max())

    def _sentences(self, document: Document) -> np.ndarray[Any, Any]:
        if document.id not in self._known:
            spans = analyze(document.text, document.title).sentences
            self._known[document.id] = self._vectors([document.text[start:end] for start, end in spans])
        return self._known[document.id]

    def _vectors(self, texts: list[str]) -> np.ndarray[Any, Any]:
        vectors = np.asarray(self._model.get_text_embedding_batch(texts))
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)  # type: ignore[no-any-return]  # numpy's


@dataclass(frozen=True)
class Outcome:
    """What signals are worth on one kind of change.

    Args:
        kind: What was changed; "all" is every kind.
        count: How many claims of it there are.
        values: The AUROC of each signal, against the supported claims.
    """

    kind: str
    count: int
    values: dict[str, float]


def measure(
    claims: Sequence[LabelledClaim], documents: Sequence[Document], signals: Mapping[str, Signal]
) -> list[Outcome]:
    """Give the AUROC of signals by kind of change."""
    by_id = {document.id: document for document in documents}
    chance = random.Random(1)
    scores: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in signals}
    for claim in claims:
        given = [by_id[one] for one in claim.passages] + chance.sample(
            list(documents), min(_DISTRACTORS, len(documents))
        )
        for name, signal in signals.items():
            scores[name][claim.kind].append(signal(claim.text, given))
    kinds = [kind for kind in KINDS if any(claim.kind == kind for claim in claims)]
    changed = {name: [one for kind in kinds for one in found[kind]] for name, found in scores.items()}
    rows = [Outcome("all", len(next(iter(changed.values()))), _worth(scores, changed))]
    for kind in kinds:
        of_kind = {name: found[kind] for name, found in scores.items()}
        rows.append(Outcome(kind, len(next(iter(of_kind.values()))), _worth(scores, of_kind)))
    return rows


def _worth(scores: dict[str, dict[str, list[float]]], changed: dict[str, list[float]]) -> dict[str, float]:
    return {name: auroc(scores[name]["supported"], values) for name, values in changed.items()}


def answer_claims(path: Path, documents: Sequence[Document], *, seed: int = 3) -> Iterator[LabelledClaim]:
    """Give the sentences of a set's answers, as they are and changed; labels hold as far as the answers do."""
    gold: dict[str, list[str]] = defaultdict(list)
    for line in (path / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, passage, _ = line.split("\t")
        gold[query].append(passage)
    by_id = {document.id: document for document in documents}
    chance = random.Random(seed)
    for line in (path / "queries.jsonl").read_text(encoding="utf-8").splitlines():
        query = json.loads(line)
        ids = tuple(one for one in gold[query["_id"]] if one in by_id)
        if query.get("answerability") != "ANSWERABLE" or not ids:
            continue
        whole = Document(query["_id"], "", " ".join(by_id[one].text for one in ids))
        for claim in split_claims(query["answer"]):
            if not claim.check_required:
                continue
            yield LabelledClaim(claim.plain, "supported", ids, held_out=True)
            for kind, change in CHANGES.items():
                changed = change(claim.plain, whole, chance)
                if changed is not None and changed != claim.plain:
                    yield LabelledClaim(changed, kind, ids, held_out=True)


def speed(documents: Sequence[Document], claims: Sequence[str], *, runs: int = 5) -> tuple[float, float]:
    """Give the seconds that 100 claims against 50 passages take: with nothing kept, and with the passages kept."""
    premises = [Premise(document.text, document.title) for document in documents[:50]]
    asked = list(claims[:100])
    cold, warm = [], []
    for _ in range(runs):
        analyze.cache_clear()
        cold.append(_seconds(asked, premises))
        warm.append(_seconds(asked, premises))
    return min(cold), min(warm)


def _seconds(claims: Sequence[str], premises: Sequence[Premise]) -> float:
    begun = time.perf_counter()
    LexicalScorer().judge(claims, premises)
    return time.perf_counter() - begun


def _signals() -> dict[str, Signal]:
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    return {
        "alignment": alignment,
        "MiniLM cosine": Cosine(default_embed_model()),
        "token coverage": token_coverage,
        "substring": substring,
    }


def _print(title: str, rows: Sequence[Outcome]) -> None:
    table = Table("change", "n", *rows[0].values, title=title)
    for row in rows:
        solved = row.values.get("substring", 0.0) > 0.85
        kind = f"{row.kind} (does not count)" if solved else row.kind
        table.add_row(kind, str(row.count), *(f"{value:.3f}" for value in row.values.values()))
    Console().print(table)


def main() -> None:
    """Measure the sets in the folders given."""
    parser = argparse.ArgumentParser(description="Grounding without a model: AUROC by kind of change, and speed.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=240, help="claims of a kind (default 240)")
    parser.add_argument("--part", choices=["developed on", "held out"], default="held out")
    options = parser.parse_args()
    signals = _signals()
    for folder in options.folders:
        documents = read_corpus(folder)
        made = make_claims(documents, most=options.most)
        claims = [claim for claim in made if claim.held_out == (options.part == "held out")]
        supported = sum(claim.kind == "supported" for claim in claims)
        _print(f"{folder.name}, {options.part}: {supported} supported", measure(claims, documents, signals))
        if (folder / "qrels.tsv").exists() and '"answer"' in (folder / "queries.jsonl").read_text(encoding="utf-8"):
            answers = list(answer_claims(folder, documents))
            if sum(claim.kind == "supported" and len(claim.text.split()) > 4 for claim in answers) > 100:  # sentences
                told = [claim.text for claim in answers if claim.kind == "supported"]
                title = f"{folder.name}, sentences of answers: {len(told)} taken for supported"
                _print(title, measure(answers, documents, signals))
        cold, warm = speed(documents, [claim.text for claim in claims])
        print(f"100 claims x 50 passages: {1000 * cold:.0f} ms, passages kept {1000 * warm:.0f} ms")
        print(f"(a claim is supported from {CITATION_THRESHOLD})")


if __name__ == "__main__":
    main()
