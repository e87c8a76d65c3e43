"""Calibrates scope contraction on a source's own passages: the command ``agentic-kb calibrate``.

There are no conversations to learn from, so they are imitated: one sentence of a document stands for an earlier
message, one of another passage of the same document for the message, and the document is the evidence. A change of
topic is a sentence after one of another document. Sentences of a document are easier to find it by than real questions;
therefore the calibration can only make the scope wider than the default, which was measured on real conversations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Final

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding

from llama_index_agentic_kb.planning.contraction import contract
from llama_index_agentic_kb.search.follow_up import DECAY
from llama_index_agentic_kb.search.prototypes import Floats, ScopeIndex, ScopeSettings, unit_rows
from llama_index_agentic_kb.store import KnowledgeStore
from llama_index_agentic_kb.store.embedding_model import embed_model_name

TARGET: Final = 0.98  # share of the evidence that a scope must keep
GRID: Final = (1.6, 1.5, 1.25, 1.0, 0.75, 0.5)
SAMPLE: Final = 150  # maximum number of imitated turns
MAX_CHUNKS: Final = 20  # maximum number of chunks of a document from which sentences are drawn
MIN_TURNS: Final = 20  # number of imitated turns below which the defaults are kept
_WORDS: Final = (5, 30)
_SENTENCE: Final = re.compile(r"(?<=[.!?\n])\s+")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration: a scope index with the best settings, and the quality that these reach."""

    index: ScopeIndex
    turns: int = 0  # imitated; 0 if the corpus has too few, and the defaults were kept
    evidence: tuple[float, float] = (0.0, 0.0)  # of turns: document in the scope, after the same topic and another
    scope: float = 0.0  # of the documents: in the scope, on average
    shifts: float = 0.0  # of changes of topic: recognised
    false_shifts: float = 0.0  # of continued topics: taken for a change

    def __str__(self) -> str:
        """Return the result as a line of text."""
        made, settings = self.index, self.index.settings
        text = f"{len(made.documents):,} documents, {len(made.prototypes):,} prototypes"
        if not self.turns:
            return f"{text}; too few passages to calibrate with: the defaults are kept"
        return (
            f"{text}; {settings.deviations} deviations keep {self.evidence[0]:.1%} of the evidence, and "
            f"{self.evidence[1]:.1%} after a change of topic, in {self.scope:.1%} of the documents; a cosine below "
            f"{settings.shift:.2f} is a change of topic ({self.shifts:.0%} recognised, {self.false_shifts:.0%} falsely)"
        )


def calibrate_store(store: KnowledgeStore) -> Iterator[tuple[str, Calibration]]:
    """Make or update the scope index of each source, calibrate and save it; yield the results by source."""
    known = store.scopes()
    for info in store.sources():
        reader, model = store.reader(info.name), embed_model_name(store.embed_model)
        old = known.get(info.name)
        index = ScopeIndex.build(reader, model) if old is None or old.model != model else old.updated(reader)
        every = list(index.documents)
        drawn = random.Random(0).sample(every, min(2 * SAMPLE, len(every)))  # noqa: S311 (a sample, no secret)
        chunks = reader.chunks()
        rows = [int(row) for document in drawn for row in chunks.get(document, ())[:MAX_CHUNKS]]
        texts: dict[str, list[str]] = {}
        for chunk in sorted(store.chunks_of("id", rows), key=lambda chunk: chunk.id):
            texts.setdefault(str(chunk.metadata.get("document_id")), []).append(chunk.text)
        made = calibrate(info.name, index, texts, store.embed_model)
        store.save_scope(info.name, made.index)
        yield info.name, made


def calibrate(source: str, index: ScopeIndex, texts: Mapping[str, Sequence[str]], model: BaseEmbedding) -> Calibration:
    """Return an index with settings that suit its documents; ``texts`` has the chunks of some of them, in order."""
    drawn = random.Random(0)  # noqa: S311 (a sample, no secret)
    known = {*index.documents}
    pairs = [(document, *_pair(chunks, drawn)) for document, chunks in texts.items() if document in known]
    turns = [pair for pair in pairs if all(pair[1:])]
    turns = drawn.sample(turns, min(SAMPLE, len(turns)))
    if len(turns) < MIN_TURNS:
        return Calibration(index)
    documents, *said = zip(*turns, strict=True)
    before, own = (unit_rows([model.get_query_embedding(text) for text in texts]) for texts in said)
    far = np.roll(before, len(turns) // 2, axis=0)
    near, apart = (own * before).sum(axis=1), (own * far).sum(axis=1)
    edges = np.unique(np.concatenate([near, apart]))
    shift = float(max(edges, key=lambda edge: (apart < edge).mean() - (near < edge).mean()))
    made = Calibration(index)
    for deviations in GRID:
        settings = ScopeSettings(deviations, ScopeSettings().floor, round(max(0.0, shift), 3))
        made = _tried(source, replace(index, settings=settings), documents, own, before, far)
        if min(made.evidence) >= TARGET:
            break
    shifts, false_shifts = float((apart < shift).mean()), float((near < shift).mean())
    return replace(made, shifts=shifts, false_shifts=false_shifts)


def _tried(
    source: str, index: ScopeIndex, documents: Sequence[str], own: Floats, before: Floats, far: Floats
) -> Calibration:
    """Return what an index's settings keep: with the history of the same document, and of another."""
    sizes: list[float] = []
    kept = []
    for history in (before, far):
        shifts = [float(at @ past) < index.settings.shift for at, past in zip(own, history, strict=True)]
        made = [
            contract({source: index}, [at, at + DECAY * past, at], {source: [document]}, is_shift=is_shift)
            for document, at, past, is_shift in zip(documents, own, history, shifts, strict=True)
        ]
        hits = [one.reason is not None or bool(one.documents) for one in made]
        sizes += [one.size / one.total for one in made if one.reason is None]
        kept.append(fmean(hits))
    return Calibration(index, len(documents), (kept[0], kept[1]), fmean(sizes or [1.0]))


def _pair(chunks: Sequence[str], drawn: random.Random) -> tuple[str, str]:
    """Return a sentence of a chunk and one of the next; of a document of one chunk, two of its sentences."""
    listed = [_sentences(chunk) for chunk in chunks]
    pairs = [(before, after) for before, after in pairwise(listed) if before and after]
    if pairs:
        before, after = drawn.choice(pairs)
        return drawn.choice(before), drawn.choice(after)
    own = listed[0] if listed else []
    return (own[0], own[-1]) if len(own) > 1 else ("", "")


def _sentences(text: str) -> list[str]:
    parts = [part.strip() for part in _SENTENCE.split(text)]
    return [part for part in parts if _WORDS[0] <= len(part.split()) <= _WORDS[1]]
