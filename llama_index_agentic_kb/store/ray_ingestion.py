"""Ingestion of files in object storage on Ray: actors read, cut, embed and store batches of them side by side.

The stages are those of ``store.ingestion``; here is only how files are spread over processes. Each actor has an open
shared store and an embedding model of its own. A document is one transaction, and a stored one is recognised by the
hash of its content. So a batch whose actor or database died is given to another actor, and an ingestion whose driver
died is run again: what was stored is found unchanged, and nothing is stored twice.

Ray's usage statistics and dashboard are off, and a cluster that is started here listens on loopback alone.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from llama_index_agentic_kb._text import error_message, know_secrets, redacted
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError, IngestionError
from llama_index_agentic_kb.store.embedding_model import check_sizes
from llama_index_agentic_kb.store.files import SUFFIXES, Access, FoundFile, Grants, Selection, SourceFiles
from llama_index_agentic_kb.store.ingestion import (
    DEFAULT_CHUNK_OVERLAP,
    DEFAULT_CHUNK_SIZE,
    Ingestion,
    IngestReport,
    ProgressCallback,
)
from llama_index_agentic_kb.store.reading import (
    IRREGULAR,
    MAX_BYTES,
    FileReader,
    UnreadableError,
    check_size,
    open_regular,
    readable,
)
from llama_index_agentic_kb.store.store import KnowledgeStore

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from llama_index_agentic_kb.store.database import StoredDocument

BATCH: Final = 128  # the maximum number of files that an actor is given together; their chunks are embedded together
AHEAD: Final = 2
"""The number of batches at an actor: the next one waits there. No more are sent, however many files there are."""
TRIES: Final = 5  # how often a batch is tried whose actor died or whose store could not be reached
PAUSE: Final = 5.0
"""Seconds before a batch is tried again whose store could not be reached; the store itself has waited before."""

_BLOCK: Final = 1_000_000  # bytes read at once
_SYMLINK: Final = "is a symlink"
_USER: Final = re.compile("://[^/]*@")

File = tuple[str, str, str]  # a file's URL, its path relative to its source, and the URL of the ingested folder


@dataclass(frozen=True)
class RemoteFile(FoundFile):
    """A file behind an fsspec URL, copied to ``path`` when it is hashed; neither URL has a user and a password."""

    folder: str = ""  # the URL by which ``root`` was passed

    def digest(self, max_bytes: int) -> str:
        """Copy the file, and return the SHA-256 of its bytes; see ``FoundFile.digest``."""
        with readable(), self._opened() as remote, self.path.open("wb") as copy:
            size = 0
            while block := remote.read(_BLOCK):
                check_size(size := size + len(block), max_bytes)
                copy.write(block)
        return super().digest(max_bytes)

    def _opened(self) -> Any:
        """Open the file, not by its own URL: that lacks the password, and "::" in a name would begin another URL."""
        system, root = _file_system(self.folder)
        inner = root if self.origin == self.root else root.rstrip("/") + "/" + self.relative
        if "file" not in (system.protocol, *system.protocol):
            return system.open(inner)
        if self.origin != self.root and Path(inner).resolve() != Path(root).resolve() / self.relative:
            raise UnreadableError(_SYMLINK)  # since it was listed
        return open_regular(Path(inner))


class _Job(NamedTuple):
    store: str
    embed_model: BaseEmbedding | str | None
    sizes: tuple[int, int]
    access: Access
    max_bytes: int
    folders: Mapping[str, str]  # the URL by which each folder was passed; see ``RemoteFile``


class _Worker:
    """An actor: ingests batches of files into the shared store."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    @cached_property
    def _store(self) -> KnowledgeStore:
        """The open store. Not opened at once: an actor that could not be made is not made again."""
        return KnowledgeStore.open(self._job.store, embed_model=self._job.embed_model)

    def ingest(self, source: str, batch: Sequence[File], known: Mapping[str, StoredDocument]) -> IngestReport:
        """Ingest a batch; see ``Ingestion.take``."""
        with FileReader(self._job.max_bytes) as reader, tempfile.TemporaryDirectory() as folder:
            run = Ingestion(self._store, self._job.sizes, reader, None, Selection(), self._job.access, known=known)
            files = []
            for number, (url, relative, root) in enumerate(batch):
                path = Path(folder, str(number), Path(relative).name)
                path.parent.mkdir()
                files.append(RemoteFile(path, relative, root, url, self._job.folders[root]))
            run.take(source, files, {root for *_, root in batch})
        return run.report()


@dataclass
class _OnRay(Ingestion):
    """An ingestion whose files are taken by the actors of a cluster."""

    cluster: _Cluster = field(init=False)

    def take(self, source: str, files: Iterable[FoundFile], roots: set[str]) -> None:  # noqa: ARG002 (the files' own)
        """Have the actors take the files; see ``Ingestion.take``."""
        batches = self.cluster.batches([(file.origin, file.relative, file.root) for file in files])
        for report in self.cluster.perform(source, batches, self.known, self.advance):
            for kind in ("added", "updated", "unchanged", "deleted"):
                getattr(self, kind).extend(getattr(report, kind))
            self.selection.failed += report.failed
            self.chunks_embedded += report.chunks_embedded


def ingest_on_ray(
    urls: Sequence[str],
    store: str,
    *,
    address: str | None = None,
    source: str | None = None,
    description: str | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
    embed_model: BaseEmbedding | str | None = None,
    stamp: Grants | None = None,
    trust_urls: bool = False,
    max_file_bytes: int = MAX_BYTES,
    cpus: float = 1.0,
    gpus: float = 0.0,
    progress: ProgressCallback | None = None,
) -> IngestReport:
    """Update a shared store from folders in object storage, on the machines of a Ray cluster.

    Args:
        urls: The folders, as fsspec URLs (``s3://bucket/manuals``) or paths that all machines share.
        store: The address of the store, such as ``postgresql://user@host/db``.
        address: The address of a Ray cluster. Defaults to one that is started on this machine and ends with the call.
        source: The source name for all URLs, as the next ones in ``ingest``. Defaults to each folder's name.
        description: A description of the content for the planner; None keeps the current one.
        chunk_size: The maximum number of tokens in a chunk.
        chunk_overlap: The number of tokens that neighbouring chunks share.
        embed_model: The embedding model of a new store.
        stamp: The grants to write to all files.
        trust_urls: Whether the ``url:`` in a file's front matter is used as its link in answers.
        max_file_bytes: The maximum size of a file.
        cpus: The cores of an actor; there are as many actors as fit. May be a fraction.
        gpus: The GPUs of an actor. May be a fraction.
        progress: A function called after each batch; see ``ProgressCallback``.

    Raises:
        ConfigurationError: The store is not shared, a folder can't be listed or is empty, or there is no room for one
            actor in the cluster.
        IngestionError: The store could not be reached. What was stored before remains; the next call continues there.
    """
    check_sizes(chunk_size, chunk_overlap, None)
    if callable(stamp):
        raise ConfigurationError("stamp: expected grants for all files: on Ray a file has no path of its own.")
    started, selection = time.monotonic(), Selection()
    with KnowledgeStore.open(store, embed_model=embed_model, create=True) as opened, FileReader() as reader:
        if not opened.shared:
            raise ConfigurationError(f"--on ray needs a shared store (postgresql://...): {store!r} has one writer.")
        sizes, access = (chunk_size, chunk_overlap), Access(None, stamp, trust_urls)
        groups, folders = _listed(urls, source, selection.skipped)
        selection.sources.update(groups)
        run = _OnRay(opened, sizes, reader, progress, selection, access, began=started)
        _ = run.chunker  # first: sizes that don't fit the model start no cluster
        job = _Job(store, embed_model, sizes, access, max_file_bytes, folders)
        with _cluster(address, job, cpus, gpus) as run.cluster:
            return run.perform(description)


# -- object storage ---------------------------------------------------------------------------------------------------


def _file_system(url: str) -> tuple[Any, str]:
    core = importlib.import_module("fsspec.core")  # extra [ray]
    know_secrets(filter(None, [urlsplit(url).password]))
    system, inner = core.url_to_fs(url)
    return system, inner


def _listed(
    urls: Sequence[str], source: str | None, skipped: list[tuple[str, str]]
) -> tuple[dict[str, SourceFiles], dict[str, str]]:
    """Return the files below URLs by source, and the URL by which each folder was passed."""
    groups: dict[str, SourceFiles] = {}
    folders: dict[str, str] = {}
    for url in urls:
        try:
            system, inner = _file_system(folder := url.rstrip("/"))
            root = _USER.sub("://", system.unstrip_protocol(inner))
            found = sorted(system.find(inner, detail=True).items())
        except Exception as error:
            raise ConfigurationError(f"{redacted(url)}: can't be listed: {error_message(error)}") from error
        if not found:
            raise ConfigurationError(f"{redacted(url)}: there is no file.")
        group = groups.setdefault(source or root.rsplit("/", 1)[-1], SourceFiles())
        group.roots.add(root)
        if folders.setdefault(root, folder) != folder:
            raise ConfigurationError(f"{redacted(url)}: this folder is named twice, by different URLs.")
        for path, info in found:
            relative = path.rsplit("/", 1)[-1] if path == inner else path.removeprefix(inner.rstrip("/") + "/")
            if any(part.startswith(".") for part in unquote(relative).split("/")):
                continue
            if reason := _left_out(relative, info):
                skipped.append((redacted(path), reason))
                continue
            origin = _USER.sub("://", system.unstrip_protocol(path))
            if group.files.setdefault(relative, RemoteFile(Path(relative), relative, root, origin)).origin != origin:
                why = f"{relative} is in another folder of this source; name it differently."
                raise ConfigurationError(f"{redacted(url)}: {why}")
    return groups, folders


def _left_out(relative: str, info: JsonMapping) -> str:
    if info.get("islink"):
        return _SYMLINK
    if info.get("type", "file") != "file":
        return IRREGULAR
    suffix = Path(relative).suffix
    return "" if suffix.lower() in SUFFIXES else f"is of a kind that is not read ({suffix or 'no suffix'})"


# -- the cluster ------------------------------------------------------------------------------------------------------


@contextmanager
def _cluster(address: str | None, job: _Job, cpus: float, gpus: float) -> Iterator[_Cluster]:
    """Yield as many actors as fit into a Ray cluster; without an address, into one that is started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:  # Ray's switch for a cluster of one machine: it then listens on 127.0.0.1
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray: Any = importlib.import_module("ray")  # extra [ray]
    own = {"include_dashboard": False} if address is None else {}
    ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)
    try:
        needs = [(kind, each) for kind, each in (("CPU", cpus), ("GPU", gpus)) if each > 0]
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fits = sum(min((int(node.get(kind, 0) / each) for kind, each in needs), default=0) for node in nodes)
        if fits < 1:
            raise ConfigurationError("The Ray cluster has no room for one actor: see --cpus and --gpus.")
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 0}
        make = ray.remote(_Worker).options(**options)
        yield _Cluster(ray, [make.remote(job) for _ in range(fits)])
    finally:
        ray.shutdown()


@dataclass
class _Cluster:
    """The actors of an ingestion."""

    ray: Any
    workers: Sequence[Any]

    def batches(self, files: Sequence[File]) -> deque[list[File]]:
        """Return files in batches, each actor's share in two of them or more."""
        size = max(1, min(BATCH, len(files) // (AHEAD * len(self.workers))))
        return deque(list(files[start : start + size]) for start in range(0, len(files), size))

    def perform(
        self,
        source: str,
        batches: deque[list[File]],
        known: Mapping[str, StoredDocument],
        advance: Callable[[int, str], None],
    ) -> list[IngestReport]:
        """Have all batches ingested; raise ``IngestionError`` if the store can't be reached again and again.

        After a death nothing waits behind a batch: it would die with it, and be blamed.
        """
        reports: list[IngestReport] = []
        running: dict[Any, tuple[Any, list[File]]] = {}
        tries: Counter[str] = Counter()
        died: dict[str, Any] = {}  # by batch, the actor that gets it no more: the file is not to blame for a bad actor
        workers = list(self.workers)  # the one whose batch ended last is the last to get another
        while batches or running:
            for ahead, worker in product(range(1 if tries else AHEAD), workers):
                batch = next((one for one in batches if died.get(one[0][0]) is not worker), [])
                if batch and sum(at is worker for at, _ in running.values()) <= ahead:
                    batches.remove(batch)
                    stored = {path: known[path] for _, path, _ in batch if path in known}
                    running[worker.ingest.remote(source, batch, stored)] = worker, batch
            (ended,), _ = self.ray.wait(list(running), num_returns=1)
            worker, batch = running.pop(ended)
            workers.sort(key=lambda one: one is worker)
            try:
                reports.append(self.ray.get(ended))
            except self.ray.exceptions.RayError as error:
                reports += self._failed(error, batch, batches, tries)
                if len(workers) > 1 and getattr(error, "cause", None) is None:
                    died[batch[0][0]] = worker
                continue
            advance(len(batch), batch[-1][0])
        return reports

    def _failed(
        self, error: Any, batch: list[File], batches: deque[list[File]], tries: Counter[str]
    ) -> list[IngestReport]:
        """Put a batch back that failed; a file at which actors die again and again is reported as failed."""
        cause = getattr(error, "cause", None)  # of an error in the actor; without one, the actor died
        if cause is not None and not isinstance(cause, AgenticKBError):
            raise error
        key = batch[0][0]
        tries[key] += 1
        if tries[key] < TRIES:
            batches.appendleft(batch)
            if cause is not None:
                time.sleep(PAUSE)
            return []
        if cause is not None:
            raise IngestionError(f"{error_message(cause)} Run the ingestion again to go on from there.") from error
        if len(batch) > 1:  # one of them is the cause: each alone
            batches.extendleft([file] for file in batch)
            tries[key] = 0
            return []
        reason = f"the process that read it died {TRIES} times"
        return [IngestReport((), (), (), (), ((batch[0][0], reason),), 0, 0, 0.0)]
