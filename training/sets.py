"""Readers of the public sets that the proof scorer is trained on.

Each reader yields rows ``{"set", "split", "premise", "claim", "label"}``. Labels are ``supported``, ``neutral``,
``contradicted``, or ``not_supported`` where the set does not part the last two. ``split`` is ``train`` or ``held``.
A repository is a bare or ordinary git directory below ``ROOT/owner+name``; only its newest commit is read.
Licences stand beside each reader and in docs/proof.md.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pairs import held_out

Row = dict[str, str]
ENTAILMENT = {"entailment": "supported", "neutral": "neutral", "contradiction": "contradicted"}


class Repositories:
    """Files of git directories below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str, path: str) -> bytes:
        """Return one file of the newest commit."""
        folder = self.root / name.replace("/", "+") / "repo"
        git = folder / ".git" if (folder / ".git").exists() else folder
        return subprocess.run(["git", "-C", str(git), "show", f"HEAD:{path}"], check=True, capture_output=True).stdout

    def text(self, name: str, path: str) -> str:
        """Return one file as text."""
        return self.read(name, path).decode("utf-8-sig", errors="replace")

    def table(self, name: str, path: str, quoting: int = csv.QUOTE_NONE) -> Iterator[Row]:
        """Yield the rows of a table with tabs between its columns."""
        yield from csv.DictReader(io.StringIO(self.text(name, path)), delimiter="\t", quoting=quoting)

    def lines(self, name: str, path: str) -> Iterator[dict]:
        """Yield the objects of a JSON-lines file."""
        for line in self.text(name, path).splitlines():
            if line.strip():
                yield json.loads(line)


def row(name: str, split: str, premise: str, claim: str, label: str) -> Row:
    return {"set": name, "split": split, "premise": premise.strip(), "claim": claim.strip(), "label": label}


def ling_in_loop(repos: Repositories) -> Iterator[Row]:
    """Parrish et al. 2021 (no licence file; premises from MultiNLI, OANC)."""
    name = "Alicia-Parrish/ling_in_loop"
    for folder, ending, val in (
        ("1_Baseline_protocol", "baseline", "base"),
        ("2_Ling_on_side_protocol", "LotS", "LotS"),
        ("3_Ling_in_loop_protocol", "LitL", "LitL"),
    ):
        for turn in range(1, 6):
            for split, path in (
                ("train", f"NLI_data/{folder}/train_round{turn}_{ending}.jsonl"),
                ("held", f"NLI_data/{folder}/val_round{turn}_{val}.jsonl"),
            ):
                for item in repos.lines(name, path):
                    if item["label"] in ENTAILMENT:
                        yield row("ling_in_loop", split, item["premise"], item["hypothesis"], ENTAILMENT[item["label"]])


def counterfactual(repos: Repositories) -> Iterator[Row]:
    """Kaushik et al. 2020 (Apache-2.0; SNLI sentences, CC BY-SA 4.0): minimal edits by people."""
    name = "acmi-lab/counterfactually-augmented-data"
    for split, part in (("train", "train"), ("train", "dev"), ("held", "test")):
        for item in repos.table(name, f"NLI/all_combined/{part}.tsv"):
            if item["gold_label"] in ENTAILMENT:
                yield row("counterfactual", split, item["sentence1"], item["sentence2"], ENTAILMENT[item["gold_label"]])


def snli(repos: Repositories) -> Iterator[Row]:
    """SNLI dev and test (CC BY-SA 4.0) as e-SNLI carries them; the last 1,500 of test are held."""
    name = "OanaMariaCamburu/e-SNLI"
    for part in ("dev", "test"):
        first, second, labels = (
            repos.text(name, f"dataset/eSNLI/{kind}.{part}").splitlines() for kind in ("s1", "s2", "labels")
        )
        for index, (premise, claim, label) in enumerate(zip(first, second, labels, strict=True)):
            split = "held" if part == "test" and index >= len(first) - 1500 else "train"
            if label.strip() in ENTAILMENT:
                yield row("snli", split, detokenized(premise), detokenized(claim), ENTAILMENT[label.strip()])


def detokenized(text: str) -> str:
    for mark in ".,!?;:')":
        text = text.replace(f" {mark}", mark)
    return text.replace("( ", "(").replace("-LRB- ", "(").replace(" -RRB-", ")").replace("`` ", '"').replace(" ''", '"')


def conjunctions(repos: Repositories) -> Iterator[Row]:
    """ConjNLI (MIT; sentences from Wikipedia, SNLI and MultiNLI)."""
    for split, path in (("train", "adversarial_train_15k"), ("held", "conj_dev")):
        for item in repos.table("swarnaHub/ConjNLI", f"data/NLI/{path}.tsv"):
            if item["Label"] in ENTAILMENT:
                yield row("conjunctions", split, item["Premise"], item["Hypothesis"], ENTAILMENT[item["Label"]])


def entailment_challenge(repos: Repositories) -> Iterator[Row]:
    """RTE 1-5 as GLUE carries them (terms of the PASCAL and TAC challenges)."""
    for split, part in (("train", "train"), ("held", "dev")):
        for item in repos.table("amrnag/Specialized-Transformers", f"data/RTE/{part}.tsv"):
            label = {"entailment": "supported", "not_entailment": "not_supported"}.get(item["label"])
            if label:
                yield row("rte", split, item["sentence1"], item["sentence2"], label)


def fever_symmetric(repos: Repositories) -> Iterator[Row]:
    """Schuster et al. 2019 (MIT; FEVER, CC BY-SA 3.0): each claim with evidence for and against it."""
    names = {"SUPPORTS": "supported", "REFUTES": "contradicted"}
    for split, part in (("train", "dev"), ("held", "test")):
        for item in repos.lines("TalSchuster/FeverSymmetric", f"symmetric_v0.2/fever_symmetric_{part}.jsonl"):
            if item["gold_label"] in names:
                yield row(
                    "fever_symmetric",
                    split,
                    detokenized(item["evidence"]),
                    detokenized(item["claim"]),
                    names[item["gold_label"]],
                )


def fever(repos: Repositories) -> Iterator[Row]:
    """FEVER's dev claims with their evidence, for or against (CC BY-SA 3.0), as COVID-Fact carries them."""
    name, folder = "asaakyan/covidfact", "RTE-Fever/processed/dev"
    names = {"entailment": "supported", "not_entailment": "contradicted"}
    columns = (repos.text(name, f"{folder}.{part}").splitlines() for part in ("raw.input0", "raw.input1", "label"))
    kept = {item["claim"] for item in fever_symmetric(repos) if item["split"] == "held"}
    for premise, claim, label in zip(*columns, strict=True):
        if detokenized(claim) not in kept:
            yield row("fever", held_part(claim, 13), detokenized(premise), detokenized(claim), names[label])


def fool_me_twice(repos: Repositories) -> Iterator[Row]:
    """Eisenschlos et al. 2021 (Apache-2.0; Wikipedia): claims that players wrote to fool others, with their evidence."""
    names = {"SUPPORTS": "supported", "REFUTES": "contradicted"}
    for part in ("dev", "test"):
        for item in repos.lines("google-research/fool-me-twice", f"dataset/{part}.jsonl"):
            premise = " ".join([f"{item['wikipedia_page']}.", *(one["text"] for one in item["gold_evidence"])])
            yield row("fool_me_twice", held_part(item["id"], 6), premise, item["text"], names[item["label"]])


def healthver(repos: Repositories) -> Iterator[Row]:
    """Sarrouti et al. 2021, dev and test (no licence file): claims of web pages beside sentences of papers."""
    names = {"Supports": "supported", "Neutral": "neutral", "Refutes": "contradicted"}
    for part in ("dev", "test"):
        for item in csv.DictReader(io.StringIO(repos.text("sarrouti/HealthVer", f"data/healthver_{part}.csv"))):
            split = held_part(item["claim"].strip(), 5)
            yield row("healthver", split, item["evidence"], item["claim"], names[item["label"]])


def held_part(key: str, of: int) -> str:
    """Return the split of a claim: one part in so many is held."""
    return "held" if held_out(key, of) else "train"


def begin(repos: Repositories) -> Iterator[Row]:
    """BEGIN (CC BY 4.0 and the licences of its dialogues): answers of models over Wikipedia, labelled by readers."""
    names = {"Fully attributable": "supported", "Not fully attributable": "not_supported"}
    for part in ("dev", "test"):
        for item in repos.table("google/BEGIN-dataset", f"wow/begin_{part}_wow.tsv"):
            label = names.get(item.get("begin_label") or "")
            if label and item.get("knowledge") and item.get("response"):
                yield row("begin_wow", "train", item["knowledge"], item["response"], label)


READERS = (
    ling_in_loop,
    counterfactual,
    snli,
    conjunctions,
    entailment_challenge,
    fever_symmetric,
    fever,
    fool_me_twice,
    healthver,
    begin,
)


def main() -> None:
    root, target = Path(sys.argv[1]), Path(sys.argv[2])
    repos = Repositories(root)
    with target.open("w", encoding="utf-8") as out:
        for reader in READERS:
            counts: dict[tuple[str, str], int] = {}
            for item in reader(repos):
                if item["premise"] and item["claim"]:
                    counts[item["split"], item["label"]] = counts.get((item["split"], item["label"]), 0) + 1
                    out.write(json.dumps(item, ensure_ascii=False) + "\n")
            print(reader.__name__, counts, flush=True)


if __name__ == "__main__":
    main()
