"""A tiny evaluation set: bridge questions that one query can't answer, over eight documents of two sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCUMENTS = {
    "d1": ("Silent Harbour", "Silent Harbour is a film of 1931 directed by Marta Lindqvist.", "films"),
    "d2": ("Red Orchard", "Red Orchard is a film of 1940 directed by Jonas Weber.", "films"),
    "d3": ("Marta Lindqvist", "Lindqvist was a painter from Uppsala who died on 3 May 1960.", "people"),
    "d4": ("Jonas Weber", "Weber, a violinist, passed away in Graz on 7 June 1971.", "people"),
    "d5": ("Uppsala", "A city in Sweden with a cathedral.", "people"),
    "d6": ("Graz", "A city in Austria on the Mur.", "people"),
    "d7": ("Blue Lantern", "Blue Lantern is a film about a lighthouse.", "films"),
    "d8": ("Old Mill", "A mill on the river, built in 1702.", "people"),
}

BRIDGE = {
    "_id": "b1",
    "text": "When did the director of Silent Harbour die, the film?",
    "type": "bridge",
    "decomposition": [
        {"id": 1, "text": "Who directed Silent Harbour?", "depends_on": [], "answer": "Marta Lindqvist"},
        {"id": 2, "text": "When did #1 die?", "depends_on": [1], "answer": "3 May 1960"},
        {"id": 3, "text": "Is #2 before 1970?", "depends_on": [2], "is_operation": True},
    ],
}
PLAIN = {"_id": "p1", "text": "Which city in Austria is on the Mur and has which river, exactly?", "type": "plain"}
UNJUDGED = {"_id": "u1", "text": "Nobody judged this."}


def write_set(folder: Path, **changes: str) -> Path:
    """Write the set; ``changes`` put other text in the place of a file's own."""
    corpus = [
        {"_id": name, "title": title, "text": text, "metadata": {"source": source}}
        for name, (title, text, source) in DOCUMENTS.items()
    ]
    own = {
        "corpus": "\n".join(json.dumps(row) for row in corpus),
        "queries": "\n".join(json.dumps(row) for row in (BRIDGE, PLAIN, UNJUDGED)),
        "qrels": "query-id\tcorpus-id\tscore\nb1\td1\t1\nb1\td3\t1\np1\td6\t2\np1\td5\t0\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in (("corpus", "corpus.jsonl"), ("queries", "queries.jsonl"), ("qrels", "qrels.tsv")):
        (folder / file).write_text(changes.get(name, own[name]), encoding="utf-8")
    return folder


def lines(*rows: Any) -> str:
    return "\n".join(json.dumps(row) for row in rows)
