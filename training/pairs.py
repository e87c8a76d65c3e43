"""Pairs near to the task: claims over passages, in the form of ``sets.py``.

``written``: a claim, a paraphrase and twins with one error each, over one passage (see docs/proof.md). A third of the
passages is held out, by a hash of the document's id. ``pieces`` and ``joined``: parts of these claims, and two facts of
two passages in one claim. ``templated``: sentences of passages and the same with one thing swapped. WiCE's parts, and
CLIMATE-FEVER split by claim.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any

from llama_index_agentic_kb.grounding.features import Corpus, Premise, passage_sentences

Row = dict[str, object]
EXACT = frozenset({"number", "date", "negation", "unit", "refuted"})
"""Errors after which a passage denies the claim; after others it may only lack it."""
_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: (?:of |the |de |van |von )?[A-Z][\w’'-]+)*")
_YEAR = re.compile(r"\b(?:1[5-9]|20)\d\d\b")
_JOINT = re.compile(r"(?:[,;]? (?:and|but|while|whereas)|[,;]) ")
LEAST_PIECE = 4
"""Minimum words of a piece of a claim."""
MOST_CHANGED = 6
"""Maximum words from the first to the last changed word of a twin whose pieces are used."""
MOST_JOINED = 44
"""Maximum words of a joined claim, half of what the model reads."""
_DIGITS = re.compile(r"\b\d+(?:[.,]\d+)*\b")


def held_out(key: str, of: int = 3) -> bool:
    """Return whether a document or claim is kept out of training."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % of == 0


def window(claim: str, passages: list[Premise]) -> str:
    """Return the evidence as the scorer would choose it."""
    windows = Corpus(passages).read(claim).windows
    return windows[0].text if windows else " ".join(passage.text for passage in passages)[:500]


def written_items(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("pairs_*.jsonl")) for line in path.open(encoding="utf-8")]


def written(folder: Path, rng: random.Random) -> Iterator[Row]:
    items = written_items(folder)
    by_set: dict[str, list[dict]] = {}
    for item in items:
        if not held_out(item["doc"]):
            by_set.setdefault(item["set"], []).append(item)
    for item in items:
        split = "held" if held_out(item["doc"]) else "train"
        evidence = [Premise(item["evidence"])]
        told = [("written_claim", "claim", item["claim"], "supported", 1.6)]
        told.append(("written_paraphrase", "paraphrase", item["paraphrase"], "supported", 1.6))
        for twin in item["twins"]:
            label = "contradicted" if twin["kind"] in EXACT else "not_supported"
            told.append(("written_twin", twin["kind"], twin["text"], label, 1.0))
        for name, kind, text, label, weight in told:
            row = {"set": name, "split": split, "premise": window(text, evidence), "claim": text, "label": label}
            yield {**row, "doc": item["doc"], "kind": kind, "weight": weight}
        # What another passage says in some of the same words is no evidence, for or against.
        if split == "train":
            text = rng.choice([item["claim"], item["paraphrase"]])
            others = [one for one in rng.sample(by_set[item["set"]], 12) if one["doc"] != item["doc"]]
            premise = window(text, [Premise(one["evidence"]) for one in others])
            yield {"set": "written_other", "split": split, "premise": premise, "claim": text, "label": "neutral"}


def pieces(folder: Path, rng: random.Random) -> Iterator[Row]:
    """Beginnings and ends of the written claims; those of a twin that hold its error, and some beside other passages."""
    items = written_items(folder)
    for item in items:
        split = "held" if held_out(item["doc"]) else "train"
        evidence = [Premise(item["evidence"])]
        for text, label in _pieces(item):
            row = {"set": f"written_piece_{label}", "split": split, "premise": window(text, evidence), "claim": text}
            yield {**row, "label": label, "doc": item["doc"]}
        others = [one for one in rng.sample(items, 40) if one["doc"] != item["doc"] and one["set"] == item["set"]]
        others = [one for one in others if held_out(one["doc"]) == (split == "held")]
        for part, _, _ in list(_cut(item["claim"]))[:1]:
            premise = window(part, [Premise(one["evidence"]) for one in others])
            row = {"set": "written_piece_neutral", "split": split, "premise": premise, "claim": part}
            yield {**row, "label": "neutral", "doc": item["doc"]}


def _pieces(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    true = [item["claim"], item["paraphrase"]]
    for text in true:
        for part, _, _ in _cut(text):
            yield part, "supported"
    for twin in item["twins"]:
        said = twin["text"].split()
        codes = [SequenceMatcher(None, base.split(), said, autojunk=False).get_opcodes() for base in true]
        changes = min(([code for code in one if code[0] != "equal"] for one in codes), key=len)
        start, end = (changes[0][3], changes[-1][4]) if changes else (0, 0)
        if not changes or end - start > MOST_CHANGED:
            continue
        for part, first, last in _cut(twin["text"]):
            if first <= start and end <= last and end > start:
                yield part, "contradicted" if twin["kind"] in EXACT else "not_supported"


def _cut(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the beginnings and ends of a text at its joints, with the places of their words."""
    words = text.split()
    for joint in _JOINT.finditer(text):
        before, after = text[: joint.start()].split(), text[joint.end() :].split()
        if len(before) >= LEAST_PIECE:
            yield " ".join(before).rstrip(",;") + ".", 0, len(before)
        if len(after) >= LEAST_PIECE:
            yield " ".join(after), len(words) - len(after), len(words)


def joined(folder: Path, most: int, rng: random.Random) -> Iterator[Row]:
    """Two facts in one claim over two passages: both true, one a twin's, or one of another passage."""
    for split in ("train", "held"):
        items = [one for one in written_items(folder) if held_out(one["doc"]) == (split == "held")]
        by_set: dict[str, list[dict[str, Any]]] = {}
        for item in items:
            by_set.setdefault(item["set"], []).append(item)
        for _ in range(most if split == "train" else most // 4):
            first, second, third = rng.sample(by_set[rng.choice(items)["set"]], 3)
            kind = rng.choice(["true", "twin", "twin", "missing"])
            facts = [_fact(first, rng, twin=False), _fact(second, rng, twin=kind == "twin")]
            if None in facts or sum(len(fact.split()) for fact, _ in facts) > MOST_JOINED:
                continue
            label = "neutral" if kind == "missing" else facts[1][1]
            shown = [(first, facts[0][0]), (third if kind == "missing" else second, facts[1][0])]
            premises = [core(fact, one["evidence"]) for one, fact in shown]
            rng.shuffle(premises)
            said = [fact.rstrip(".") for fact, _ in facts]
            rng.shuffle(said)
            claim = rng.choice(["{}, and {}.", "{}, while {}.", "{}; {}.", "{} and {}."]).format(*said)
            row = {"set": f"written_joined_{label}", "split": split, "premise": " ".join(premises), "claim": claim}
            yield {**row, "label": label, "doc": first["doc"]}


def _fact(item: dict[str, Any], rng: random.Random, *, twin: bool) -> tuple[str, str] | None:
    """Return a short statement about an item's passage, with its label."""
    label = "supported"
    pool = [item["claim"], *(part for part, start, _ in _cut(item["claim"]) if start == 0)]
    if twin:
        found = [one for one in _pieces(item) if one[1] != "supported" and one[0][:1].isupper()]
        found += [(one["text"], "contradicted" if one["kind"] in EXACT else "not_supported") for one in item["twins"]]
        return rng.choice(sorted(found, key=lambda one: len(one[0]))[:3]) if found else None
    return rng.choice(sorted(pool, key=len)[:2]), label


def core(claim: str, evidence: str) -> str:
    """Return the sentences that cover most of a claim."""
    windows = Corpus([Premise(evidence)]).read(claim).windows
    spans = sorted(windows[0].spans, key=lambda one: one.start) if windows else []
    return " ".join(span.of(evidence) for span in spans) or evidence[:300]


def parts(path: Path) -> Iterator[Row]:
    """WiCE's parts (annotations ODC-BY, texts CC BY-SA and Common Crawl)."""
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        split = "held" if held_out(item["id"], 4) else "train"
        label = "supported" if item["label"] == "supported" else "not_supported"
        text = "\n".join(item["evidence"])
        yield {
            "set": "wice_parts",
            "split": split,
            "premise": window(item["claim"], [Premise(text)]),
            "claim": item["claim"],
            "label": label,
        }


def climate(path: Path) -> Iterator[Row]:
    """CLIMATE-FEVER, two thirds of its claims (see its repository for terms)."""
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        split = "held" if held_out(item["claim"]) else "train"
        label = {"supported": "supported", "contradicted": "contradicted"}.get(item["label"], "neutral")
        premise = " ".join(item["evidence"])
        if item.get("about"):
            premise = f"{item['about']}. {premise}"
        yield {"set": "climate_fever", "split": split, "premise": premise, "claim": item["claim"], "label": label}


def templated(folder: Path, most: int, rng: random.Random) -> Iterator[Row]:
    passages = []
    for name in ("2wiki", "musique-dev", "mtrag-human", "strategyqa-facts"):
        for line in (folder / name / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            if not held_out(item["_id"]) and len(item["text"]) > 80:
                passages.append((item["_id"], item.get("title", ""), item["text"]))
    rng.shuffle(passages)
    done = 0
    for identifier, title, text in passages:
        if done >= most:
            return
        spans = [span for span in passage_sentences(text[:1500]) if 40 <= span[1] - span[0] <= 260]
        if not spans:
            continue
        start, end = rng.choice(spans)
        sentence = text[start:end]
        head = title if title and not text.startswith(title) else ""
        premise = window(sentence, [Premise(text[:1500], head)])
        base = {"set": "templated", "split": "train", "premise": premise, "doc": identifier}
        yield {**base, "claim": sentence, "label": "supported", "weight": 0.7}
        for claim, label in _changed(sentence, text, rng):
            yield {**base, "claim": claim, "label": label}
            done += 1
        done += 1


def _changed(sentence: str, text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield one or two sentences with one thing changed."""
    names = [match for match in _NAME.finditer(sentence) if match.start() > 0 and len(match[0]) > 3]
    others = [name for name in dict.fromkeys(_NAME.findall(text)) if len(name) > 3 and name not in sentence]
    ways = []
    if names and others:
        chosen = rng.choice(names)
        ways.append((sentence[: chosen.start()] + rng.choice(others) + sentence[chosen.end() :], "not_supported"))
    if len(names) > 1:
        first, second = sorted(rng.sample(names, 2), key=lambda one: one.start())
        if first[0] != second[0] and not re.fullmatch(r",? ?(?:and|or|,) ?", sentence[first.end() : second.start()]):
            swapped = sentence[: first.start()] + second[0] + sentence[first.end() : second.start()] + first[0]
            ways.append((swapped + sentence[second.end() :], "not_supported"))
    years = list(_YEAR.finditer(sentence))
    if years:
        chosen = rng.choice(years)
        inside = [year for year in _YEAR.findall(text) if year not in sentence]
        value = (
            rng.choice(inside)
            if inside and rng.random() < 0.5
            else str(int(chosen[0]) + rng.choice([-7, -3, -2, -1, 1, 2, 4, 9]))
        )
        ways.append((sentence[: chosen.start()] + value + sentence[chosen.end() :], "contradicted"))
    digits = [match for match in _DIGITS.finditer(sentence) if not _YEAR.fullmatch(match[0])]
    if digits:
        chosen = rng.choice(digits)
        value = re.sub(r"\d", lambda found: str((int(found[0]) + rng.randint(1, 8)) % 9 + 1), chosen[0], count=1)
        if value != chosen[0]:
            ways.append((sentence[: chosen.start()] + value + sentence[chosen.end() :], "contradicted"))
    for old, new in (
        (" is ", " is not "),
        (" was ", " was not "),
        (" are ", " are not "),
        (" were ", " were not "),
        (" has ", " has never "),
    ):
        if old in sentence and f"{old}not" not in sentence:
            ways.append((sentence.replace(old, new, 1), "contradicted"))
            break
    rng.shuffle(ways)
    yield from ways[: rng.choice([1, 1, 2])]


def main() -> None:
    data, bench, near, smaller = map(Path, sys.argv[1:5])
    rng = random.Random(7)
    write(
        near,
        written(data, rng),
        parts(bench / "claims/wice-parts.jsonl"),
        climate(bench / "claims/climate-fever.jsonl"),
        templated(bench, 6000, rng),
    )
    write(smaller, pieces(data, random.Random(5)), joined(data, 6000, random.Random(7)))


def write(target: Path, *sets: Iterator[Row]) -> None:
    """Write pairs as JSON lines and print how many there are by set, split and label."""
    counts: dict[tuple[object, ...], int] = {}
    with target.open("w", encoding="utf-8") as out:
        for item in chain.from_iterable(sets):
            key = item["set"], item["split"], item["label"]
            counts[key] = counts.get(key, 0) + 1
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
    for key, count in sorted(counts.items(), key=str):
        print(*key, count)


if __name__ == "__main__":
    main()
