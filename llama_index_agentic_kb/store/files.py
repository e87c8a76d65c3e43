"""The files to ingest, their sources, and who may see them.

Permissions and links are set by the caller of `ingest` and never by the files themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypedDict

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.guard.permissions import Permissions
from llama_index_agentic_kb.store.database import MetadataValue
from llama_index_agentic_kb.store.parsing import PARSERS
from llama_index_agentic_kb.store.reading import (
    IMAGES,
    IRREGULAR,
    TEXT_SUFFIXES,
    FileReader,
    ParsedFile,
    UnreadableError,
    check_size,
    open_regular,
    parsed_documents,
    scalar_fields,
    text_of,
)

if TYPE_CHECKING:
    from llama_index.core.schema import Document

SUFFIXES: Final = TEXT_SUFFIXES | PARSERS.keys()  # the lower-case suffixes of supported files
MAX_DEPTH: Final = 64  # the maximum folder depth; deeper folders are reported as failed
_LEAVES: Final = "is a symlink that leaves the folder, or leads nowhere; ingest its target by its own path"
OCR_HINT: Final = "; text in images is read by ocr=True, --ocr"
NO_SUCH_PATH: Final = "no such file or folder"
DEFAULT_SOURCE: Final = "documents"  # the default source of files and documents that are passed directly


@dataclass(frozen=True)
class FoundFile:
    """A file to ingest."""

    path: Path  # the file's absolute path
    relative: str  # the file's path relative to its source, with forward slashes
    root: str
    """The absolute path of the ingested folder that contained the file; empty for a file that was passed directly."""
    origin: str  # the path on disk, or the URL; empty for a document that was passed
    inside: Path | None = field(default=None, kw_only=True)
    """The folder as it was resolved when it was listed, which the file may not leave; None if a link may lead away."""

    def digest(self, max_bytes: int) -> str:
        """Return the SHA-256 of the file's bytes; raise ``UnreadableError`` if the file is larger than the limit."""
        self.check_place()
        with open_regular(self.path) as opened:
            check_size(os.fstat(opened.fileno()).st_size, max_bytes)
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def parsed(self, reader: FileReader) -> ParsedFile:
        """Return the text with title and metadata; see ``FileReader.read`` for the errors."""
        self.check_place()
        return reader.read(self.path)

    def check_place(self) -> None:
        """Raise ``UnreadableError`` if a link that leaves the folder was put in the file's place meanwhile."""
        if self.inside is None:
            return
        try:
            stays = self.path.resolve().is_relative_to(self.inside)
        except (OSError, RuntimeError):  # a loop
            stays = False
        if not stays:
            raise UnreadableError(_LEAVES)


@dataclass(frozen=True)
class GivenDocument(FoundFile):
    """A document passed to ``ingest(documents=)``: one LlamaIndex document, or all those of one file (its pages)."""

    documents: Sequence[Document] = ()

    def digest(self, max_bytes: int) -> str:
        """Return a hash of the documents' texts and metadata."""
        content = [[text_of(document), scalar_fields(document.metadata)] for document in self.documents]
        check_size(sum(len(text) for text, _ in content), max_bytes)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def parsed(self, _: FileReader) -> ParsedFile:
        """Return the documents as sections of one file."""
        return parsed_documents(self.documents, self.path.stem)


@dataclass
class SourceFiles:
    """The files and folders that one ingestion reads for one source."""

    files: dict[str, FoundFile] = field(default_factory=dict)  # the files by their path relative to the source
    roots: set[str] = field(default_factory=set)
    """The ingested folders and deleted paths; their stored documents that are not in ``files`` are gone from disk."""
    unlisted: set[str] = field(default_factory=set)
    """Folders that could not be listed; documents below them are left unchanged."""


class Selection:
    """The files of an ingestion by source, in an order independent of the file system, and the paths that failed.

    Hidden files and folders are skipped. A symlink to a file inside the ingested folder is followed. A symlink to a
    folder inside it is skipped, since its files are found directly. Symlinks that leave the folder are reported.

    Args:
        paths: The files and folders to ingest.
        source: The source name for all paths. If None, each folder's source is named after the folder, and the source
            of single files is ``documents``.
        sources_at: A function that returns the names of sources with documents from a path that was deleted.
        suffixes: Supported suffixes besides ``SUFFIXES``.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] = (),
        *,
        source: str | None = None,
        sources_at: Callable[[str], Iterable[str]] = lambda _: (),
        suffixes: Iterable[str] = (),
    ) -> None:
        self.failed: list[tuple[str, str]] = []
        self.skipped: list[tuple[str, str]] = []
        self._suffixes = SUFFIXES.union(suffixes)
        self.sources: defaultdict[str, SourceFiles] = defaultdict(SourceFiles)
        for listed in paths:
            path = Path(os.path.abspath(listed))  # noqa: PTH100 (resolve() would rename a linked folder's source)
            if path.is_dir():
                self._add_folder(source, path)
            elif path.exists():
                self._add_file(DEFAULT_SOURCE if source is None else source, path)
            else:
                self._add_deleted([name for name in sources_at(str(path)) if source in (None, name)], path)
        for group in self.sources.values():
            group.files = dict(sorted(group.files.items()))

    def add_documents(self, source: str, documents: Iterable[Document]) -> None:
        """Add documents, grouped by the file that a reader took them from, else each under its own id."""
        groups: dict[str, list[Document]] = {}
        for document in documents:
            path = document.metadata.get("file_path")
            name = printable(str(path)).lstrip("/") if path else document.node_id
            groups.setdefault(name, []).append(document)
        for name, group in groups.items():
            self.sources[source].files[name] = GivenDocument(Path(name), name, "", "", tuple(group))

    def _fail(self, path: str | Path, reason: str) -> None:
        self.failed.append((printable(path), reason))

    def _add_deleted(self, sources: Sequence[str], path: Path) -> None:
        """Note a deleted path, whose documents are removed from these sources; an unknown path is an error."""
        for name in sources:
            self.sources[name].roots.add(str(path))
        if not sources:
            self._fail(path, NO_SUCH_PATH)

    def _add_file(self, source: str, path: Path) -> None:
        if path.suffix.lower() not in self._suffixes:
            self._fail(path, f"is not of a kind that is read ({', '.join(sorted(self._suffixes))})")
        else:  # passed by the caller: it may be a symlink
            self._add(source, FoundFile(path, path.name, "", str(path)))

    def _add(self, source: str, file: FoundFile) -> None:
        if reason := _unfit(file.path, file.inside):
            self._fail(file.path, reason)
        elif file.relative != printable(file.relative):
            self._fail(file.path, "has a name that is not valid text")
        elif self.sources[source].files.setdefault(file.relative, file).path != file.path:
            self._fail(file.path, "has the same path in this source as another file; give its folder another source")

    def _add_folder(self, source: str | None, root: Path) -> None:
        if source is None and not root.name:
            raise ConfigurationError(f"The folder {str(root)!r} has no name; pass source= to name its source.")
        source = root.name if source is None else source
        self.sources[source].roots.add(str(root))
        inside = root.resolve()
        for path in self._walk(self.sources[source], root, inside):
            if path.suffix.lower() not in self._suffixes:
                kind = f"({path.suffix or 'no suffix'}){OCR_HINT if path.suffix.lower() in IMAGES else ''}"
                self.skipped.append((printable(path), f"is of a kind that is not read {kind}"))
            else:
                relative = path.relative_to(root).as_posix()
                self._add(source, FoundFile(path, relative, str(root), str(path), inside=inside))

    def _walk(self, group: SourceFiles, root: Path, inside: Path) -> Iterator[Path]:
        """Yield all non-hidden files below a folder; add folders that can't be listed to ``unlisted``."""

        def unlisted(error: OSError) -> None:
            group.unlisted.add(str(error.filename))
            self._fail(error.filename, f"can't be listed: {error.strerror}")

        for folder, folders, names in os.walk(root, onerror=unlisted):
            shown = [Path(folder, name) for name in sorted(folders) if not name.startswith(".")]
            is_deep = len(Path(folder).relative_to(root).parts) >= MAX_DEPTH
            for path in shown:
                if is_deep:
                    group.unlisted.add(str(path))
                    self._fail(path, f"is more than {MAX_DEPTH} folders deep")
                elif path.is_symlink() and not _stays_inside(path, inside):  # files of others inside are found directly
                    self._fail(path, _LEAVES)
            folders[:] = [] if is_deep else [path.name for path in shown]
            yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def printable(path: str | Path) -> str:
    """Return a path as valid UTF-8 text; undecodable characters are escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _unfit(path: Path, inside: Path | None) -> str:
    if inside is not None and not _stays_inside(path, inside):
        return _LEAVES
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return "" if stat.S_ISREG(mode) else IRREGULAR


def _stays_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder)
    except (OSError, RuntimeError):  # a broken link, or a loop
        return False


# -- access -----------------------------------------------------------------------------------------------------------

STORE_PERMISSIONS: Final = Permissions(
    tenant="tenant", owner="owner", users="acl_user_", groups="acl_group_", public="acl_public"
)
"""The default metadata fields for document permissions, used unless `ingest` is given others."""


class Grants(TypedDict, total=False):
    """The tenant, owner, users and groups that may see a document, or whether it is public."""

    tenant: str
    owner: str
    users: Sequence[str]
    groups: Sequence[str]
    public: bool


Stamp: TypeAlias = Grants | Callable[[Path], Grants] | None
"""The grants for all files of an ingestion, or a function from a file's path to its grants."""


@dataclass(frozen=True)
class Access:
    """The metadata fields that ingested files may not set, and the grants that are written instead."""

    permissions: Permissions | None = None
    """The fields that grants are written to. Files can set neither these nor those of `STORE_PERMISSIONS`."""
    grants: Stamp = None
    trust_urls: bool = False  # whether the ``url`` in a file's metadata is used as its link

    def protects(self, key: str) -> bool:
        """Return whether files can't set a metadata field, in whatever letter case."""
        return any(one.declares(name) for one in _both(self.permissions) for name in (key, key.casefold()))

    def stamp(self, path: Path, metadata: Mapping[str, MetadataValue]) -> dict[str, MetadataValue]:
        """Return a file's permission fields and, if trusted, link; raise ``ConfigurationError`` for a wrong grant."""
        grants = self.grants(path) if callable(self.grants) else self.grants
        permissions = self.permissions or STORE_PERMISSIONS
        if self.permissions is None and "tenant" not in (grants or {}):
            permissions = replace(permissions, tenant=None)
        url = next((str(value) for key, value in metadata.items() if key.casefold() == "url"), "")
        stamped = {} if grants is None else permissions.stamp({}, **grants)
        return {**stamped, "url": url} if self.trust_urls and url else stamped

    def settings(self, path: Path) -> str:
        """Return the settings recorded with a document, which is ingested again when they change."""
        stamped = json.dumps(self.stamp(path, {}), sort_keys=True)
        digest = hashlib.sha256(stamped.encode()).hexdigest()[:16]
        return f"urls={self.trust_urls:d} stamp={digest} protects={','.join(sorted(_names(self.permissions)))}"


def unprotected(permissions: Permissions, settings: Iterable[str]) -> list[str]:
    """Return the permission fields that documents may have set themselves, according to their recorded settings."""
    recorded = [set(one.rpartition("protects=")[2].split(",")) if "protects=" in one else set() for one in settings]
    return sorted(name for name in _names(permissions) if not all(name in protected for protected in recorded))


def _names(permissions: Permissions | None) -> set[str]:
    """Return the names of all permission fields that files can't set."""
    return {name for one in _both(permissions) for role in fields(one) if (name := getattr(one, role.name)) is not None}


def _both(permissions: Permissions | None) -> list[Permissions]:
    return [STORE_PERMISSIONS] if permissions is None else [STORE_PERMISSIONS, permissions]
