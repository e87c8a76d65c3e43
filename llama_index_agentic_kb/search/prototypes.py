"""Document prototypes: the few vectors by which a document is compared with a conversation (``ScopeIndex``).

A document of up to ``MAX_PROTOTYPES`` chunks is represented by its chunks; a longer one by the centres of as many
clusters of chunks (spherical k-means), so that a document on several topics is near each of them. The clustering starts
from equal runs of consecutive chunks and draws nothing at random: the same chunks have the same prototypes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb.errors import RetrievalError

Floats: TypeAlias = NDArray[np.float32]

MAX_PROTOTYPES: Final = 4  # maximum number of prototypes of a document
SAMPLE: Final = 1_024  # maximum number of documents whose similarities stand for those of all
_PASSES: Final = 5
_BATCH: Final = 200  # documents whose vectors are read at once
_FORMAT: Final = 1


class VectorReader(Protocol):
    """Reads the vectors of a source's chunks."""

    def version(self) -> str:
        """Return a text that changes whenever the chunks do. It is called for every request and must be fast."""

    def chunks(self) -> Mapping[str, Sequence[str]]:
        """Return the chunk ids of each document, by the document's id."""

    def vectors(self, chunks: Sequence[str]) -> Mapping[str, Sequence[float] | Floats]:
        """Return the vectors of chunks, by id; deleted chunks are omitted."""


@dataclass(frozen=True, slots=True)
class ScopeSettings:
    """When a document is in the scope, and when a message changes the topic; ``agentic-kb calibrate`` measures them.

    Args:
        deviations: How many standard deviations above the mean of all documents a document's similarity must be.
        floor: The minimum similarity of the best document; below it, the search is not narrowed.
        shift: The cosine between a message and the earlier ones below which the topic has changed.
    """

    deviations: float = 1.6
    floor: float = 0.2
    shift: float = 0.15


@dataclass(frozen=True)
class ScopeIndex:
    """The prototypes of a source's documents. Immutable; ``updated`` returns another index."""

    model: str  # the identity of the embedding model (``embed_model_fingerprint``); others can't be compared
    version: str  # the source's ``VectorReader.version`` when the index was made
    documents: tuple[str, ...]  # their ids
    digests: tuple[str, ...]  # one digest of the chunk ids per document
    starts: NDArray[np.int64]  # the position of each document's first prototype
    prototypes: Floats  # of all documents, each of unit length
    settings: ScopeSettings = field(default_factory=ScopeSettings)

    @classmethod
    def build(cls, reader: VectorReader, model: str) -> Self:
        """Return the index of a source; reads all its vectors."""
        empty = cls(model, "", (), (), np.zeros(0, np.int64), np.zeros((0, 1), np.float32))
        return empty.updated(reader)

    def updated(self, reader: VectorReader) -> Self:
        """Return an index of the source's current chunks; only the vectors of changed documents are read.

        A document changes if its set of chunk ids does. (LlamaIndex and the store never reuse an id for another text.)
        """
        version, chunks = reader.version(), reader.chunks()
        digests = {document: _digest(ids) for document, ids in chunks.items()}
        known = zip(self.documents, self.digests, strict=True)
        found = self._rows([document for document, digest in known if digests.get(document) == digest])
        found |= _prototypes_of(reader, {name: ids for name, ids in chunks.items() if name not in found})
        rows = {name: found[name] for name in chunks if name in found}
        return replace(self._of(rows, map(digests.__getitem__, rows)), version=version)

    def _rows(self, documents: Iterable[str]) -> dict[str, Floats]:
        """Return the prototypes of each of these documents, in the order of the index."""
        places, ends = self._places, np.append(self.starts[1:], len(self.prototypes))
        known = sorted(places[one] for one in documents if one in places)
        return {self.documents[at]: self.prototypes[self.starts[at] : ends[at]] for at in known}

    def _of(self, rows: Mapping[str, Floats], digests: Iterable[str]) -> Self:
        """Return the index of documents with these prototypes."""
        counts = np.array(list(map(len, rows.values())), np.int64)
        return replace(
            self,
            documents=tuple(rows),
            digests=tuple(digests),
            starts=np.cumsum(counts) - counts,
            prototypes=np.concatenate(list(rows.values())) if rows else self.prototypes[:0],
        )

    def similarities(self, vectors: Floats) -> Floats:
        """Return one row per document: the cosine of its nearest prototype with each vector of unit length."""
        if not len(self.documents):
            return np.zeros((0, len(vectors)), np.float32)
        # On one thread: BLAS takes 2 ms as well, and ten times as long if other threads hold the cores.
        cosines = np.einsum("ij,kj->ik", self.prototypes, vectors)
        nearest: Floats = np.maximum.reduceat(cosines, self.starts, axis=0)
        return nearest

    def part(self, documents: Collection[str]) -> Self:
        """Return the index of some of the documents; unknown ones are left out."""
        rows = self._rows(documents)
        return self._of(rows, (self.digests[self._places[one]] for one in rows))

    @cached_property
    def sample(self) -> Self:
        """The index of ``SAMPLE`` of the documents at most, which stand for all of them; always the same ones."""
        if len(self.documents) <= SAMPLE:
            return self
        drawn = np.random.default_rng(0).choice(len(self.documents), SAMPLE, replace=False)
        return self.part([self.documents[at] for at in drawn.tolist()])

    @property
    def weights(self) -> NDArray[np.float64]:
        """The number of documents that each document of the sample stands for."""
        return np.full(len(self.sample.documents), len(self.documents) / max(1, len(self.sample.documents)))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {document: at for at, document in enumerate(self.documents)}

    def save(self, path: Path) -> None:
        """Write the index to a file, in one step."""
        about = {name: getattr(self, name) for name in ("model", "version", "documents", "digests")}
        about |= {"format": _FORMAT, "settings": asdict(self.settings)}
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with made.open("wb") as file:
                text = np.frombuffer(json.dumps(about).encode(), np.uint8)
                np.savez(file, about=text, starts=self.starts, prototypes=self.prototypes)
            made.chmod(0o600)
            made.replace(path)
        finally:
            made.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an index from a file.

        Raises:
            RetrievalError: The file is missing or damaged, or another release made it.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
                about = json.loads(data["about"].tobytes())
                starts, prototypes = data["starts"].astype(np.int64), data["prototypes"].astype(np.float32)
            parts = tuple(about["documents"]), tuple(about["digests"]), starts, prototypes
            made = cls(about["model"], about["version"], *parts, ScopeSettings(**about["settings"]))
            ordered = np.diff(np.append(starts, len(prototypes))) > 0
            fits = len({*map(len, parts[:3])}) == 1 and prototypes.ndim == 2 and ordered.all()  # noqa: PLR2004
            is_whole = about["format"] == _FORMAT and fits
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise RetrievalError(f"the scope index {str(path)!r} can't be read ({error}); make it again") from error
        if not is_whole:
            raise RetrievalError(f"the scope index {str(path)!r} is of another release, or not whole; make it again")
        return made


def unit_rows(vectors: Sequence[Sequence[float]] | Sequence[Floats] | Floats) -> Floats:
    """Return vectors of unit length; zero vectors are unchanged."""
    rows = np.asarray(vectors, np.float32)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    made: Floats = (rows / np.where(length == 0, 1, length)).astype(np.float32)
    return made


def _digest(chunks: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(chunks)).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _prototypes_of(reader: VectorReader, chunks: Mapping[str, Sequence[str]]) -> dict[str, Floats]:
    """Return the prototypes of documents; those whose chunks have no vectors are omitted."""
    made, names = dict[str, Floats](), list(chunks)
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        vectors = reader.vectors([one for name in batch for one in chunks[name]])
        for name in batch:
            if rows := [vectors[one] for one in chunks[name] if one in vectors]:
                made[name] = prototypes(unit_rows(np.asarray(rows, np.float32)))
    return made


def prototypes(vectors: Floats) -> Floats:
    """Return at most ``MAX_PROTOTYPES`` unit vectors that represent a document's chunks, in order of position."""
    if len(vectors) <= MAX_PROTOTYPES:
        return vectors
    of = np.arange(len(vectors)) * MAX_PROTOTYPES // len(vectors)
    centres = vectors[:0]
    for _ in range(_PASSES):
        centres = unit_rows(np.stack([vectors[of == at].mean(axis=0) for at in np.unique(of)]))
        nearest = (vectors @ centres.T).argmax(axis=1)
        if (nearest == of).all():
            break
        of = nearest
    return centres
