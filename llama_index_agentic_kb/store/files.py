"""Which files an ingestion takes, and which source each belongs to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["SUFFIXES", "FileSelection", "FoundFile", "SourceFiles", "open_regular", "select_files"]

SUFFIXES = frozenset({".txt", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx"})
"""The kinds of files that are read, by lower-case suffix."""

MAX_DEPTH = 64
"""Folders below this depth are not gone into."""

LEAVES = "is a symlink that leaves the folder, or leads nowhere (see follow_symlinks=, --follow-symlinks)"
"""Why what lies behind a symlink is not read."""

IRREGULAR = "is no regular file: a pipe, a socket or a device"
"""Why something with a document's name is not read: it might never give an end."""

DEFAULT_SOURCE = "documents"
"""The source of files that are named one by one."""


@dataclass(frozen=True)
class FoundFile:
    """A file to ingest.

    Args:
        path: Its absolute path.
        relative: Its path inside its source, with forward slashes.
        root: The absolute path of the folder it was found under; empty for a file that was named itself.
    """

    path: Path
    relative: str
    root: str


@dataclass
class SourceFiles:
    """What one ingestion brings to one source.

    Args:
        files: The files by their path inside the source, in the order of the paths.
        roots: The folders that were searched; documents of theirs that are not among ``files`` are gone.
        unlisted: Folders that could not be looked into; nothing is known about documents below them.
    """

    files: dict[str, FoundFile] = field(default_factory=dict)
    roots: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)


@dataclass
class FileSelection:
    """What one ingestion works on.

    Args:
        sources: The files by source, in the order of the sources' names.
        failed: ``(path, reason)`` of what can't be taken.
        skipped: How many files in the folders are of a kind that isn't read.
    """

    sources: dict[str, SourceFiles] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: int = 0

    def group(self, source: str) -> SourceFiles:
        """Return what there is for a source."""
        return self.sources.setdefault(source, SourceFiles())

    def fail(self, path: str | Path, reason: str) -> None:
        """Record what can't be taken."""
        self.failed.append((printable(path), reason))

    def add(self, group: SourceFiles, file: FoundFile, inside: Path | None) -> None:
        """Take a file; one that is irregular, leaves its folder, or has another's place is recorded as failed."""
        if reason := _unfit(file.path, inside):
            self.fail(file.path, reason)
        elif file.relative != printable(file.relative):
            self.fail(file.path, "has a name that is not valid text")
        elif group.files.setdefault(file.relative, file).path != file.path:
            self.fail(file.path, "has the same path in this source as another file; give its folder another source")


def select_files(
    paths: Sequence[str | Path],
    *,
    source: str | None,
    recursive: bool,
    follow_symlinks: bool = False,
    sources_at: Callable[[str], Iterable[str]],
) -> FileSelection:
    """Find the files to ingest, in an order that doesn't depend on the file system.

    Hidden files and folders are left out. A symlink to a file is followed while it stays under its folder; symlinks
    to folders are not: what they show inside the folder is found without them. What leaves the folder is reported.

    Args:
        paths: Files and folders.
        source: The source of all of them; None names each folder's source after the folder, and the source of
            single files ``documents``.
        recursive: Whether to go into subfolders.
        follow_symlinks: Whether to follow all symlinks, wherever they lead.
        sources_at: Returns the sources that hold documents from an absolute path, for paths that are gone from disk.

    Returns:
        The files by source, and what can't be taken.

    Raises:
        ConfigurationError: A folder has no name to call its source by.
    """
    selection = FileSelection()
    for listed in paths:
        path = Path(os.path.abspath(listed))  # noqa: PTH100 (resolve() would rename a linked folder's source)
        if path.is_dir():
            if source is None and not path.name:
                raise ConfigurationError(f"The folder {str(path)!r} has no name; pass source= to name its source.")
            name = path.name if source is None else source
            _add_folder(selection, path, name, recursive=recursive, follow=follow_symlinks)
        elif path.exists():
            _add_file(selection, path, DEFAULT_SOURCE if source is None else source)
        else:
            # A path that is gone takes its documents out of the store; one that never was in it is a mistake.
            names = [name for name in sources_at(str(path)) if source in (None, name)]
            for name in names:
                selection.group(name)
            if not names:
                selection.fail(path, "no such file or folder")
    for group in selection.sources.values():
        group.files = dict(sorted(group.files.items()))
    selection.sources = dict(sorted(selection.sources.items()))
    return selection


def printable(path: str | Path) -> str:
    """Return a path as text, whose name may not be valid text."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, unless it has become a pipe or a device, which might never give an end.

    Raises:
        OSError: It can't be opened, or is no regular file.
    """
    # Not blocking: to open a pipe nobody writes into would wait without end.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    opened = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(IRREGULAR)
    return opened


def _add_folder(selection: FileSelection, root: Path, source: str, *, recursive: bool, follow: bool) -> None:
    group = selection.group(source)
    group.roots.add(str(root))
    for path in _Walk(root, selection, group, recursive=recursive, follow=follow).files():
        if path.suffix.lower() not in SUFFIXES:
            selection.skipped += 1
        else:
            file = FoundFile(path, path.relative_to(root).as_posix(), str(root))
            selection.add(group, file, None if follow else root)


def _add_file(selection: FileSelection, path: Path, source: str) -> None:
    if path.suffix.lower() not in SUFFIXES:
        selection.fail(path, f"is not of a kind that is read ({', '.join(sorted(SUFFIXES))})")
    elif reason := _unfit(path, None):  # named by the caller: it may lie behind a symlink
        selection.fail(path, reason)
    else:
        selection.add(selection.group(source), FoundFile(path, path.name, ""), None)


class _Walk:
    """Goes through a folder, however deep it is and whatever links it holds."""

    def __init__(
        self, root: Path, selection: FileSelection, group: SourceFiles, *, recursive: bool, follow: bool
    ) -> None:
        self._root = root
        self._selection = selection
        self._group = group
        self._recursive = recursive
        self._follow = follow
        self._seen: set[tuple[int, int]] = set()

    def files(self) -> Iterator[Path]:
        """Yield every entry that is not hidden and no folder."""
        waiting = [(str(self._root), 0)]
        while waiting:
            folder, depth = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    listed = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self._group.unlisted.add(folder)
                self._selection.fail(folder, f"can't be listed: {error.strerror}")
                continue
            shown = [entry for entry in listed if not entry.name.startswith(".")]
            folders = [entry for entry in shown if _is_folder(entry)]
            yield from (Path(folder, entry.name) for entry in shown if entry not in folders)
            below = [(entry.path, depth + 1) for entry in folders if self._enters(entry, depth)]
            waiting += reversed(below)

    def _enters(self, entry: os.DirEntry[str], depth: int) -> bool:
        if not self._recursive:
            return False
        if depth >= MAX_DEPTH:
            self._group.unlisted.add(entry.path)
            self._selection.fail(entry.path, f"is more than {MAX_DEPTH} folders deep")
            return False
        if not entry.is_symlink():
            return True
        if _stays_inside(Path(entry.path), self._root):
            return False  # what it shows is found without it
        if not self._follow:
            self._selection.fail(entry.path, LEAVES)
            return False
        status = entry.stat()
        known = (status.st_dev, status.st_ino) in self._seen
        self._seen.add((status.st_dev, status.st_ino))
        return not known


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle
        return False


def _unfit(path: Path, root: Path | None) -> str:
    """Return why a file can't be taken: it is not regular, or a symlink out of its folder; else ""."""
    if root is not None and not _stays_inside(path, root):
        return LEAVES
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return "" if stat.S_ISREG(mode) else IRREGULAR


def _stays_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a broken link, or a loop
        return False
