"""Which files an ingestion takes, and which source each belongs to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store.reading import IRREGULAR

SUFFIXES: Final = frozenset({".txt", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx"})
"""The kinds of files that are read, by lower-case suffix."""
MAX_DEPTH: Final = 64
"""Folders below this depth are not gone into."""
_LEAVES: Final = "is a symlink that leaves the folder, or leads nowhere (see follow_symlinks=, --follow-symlinks)"
NO_SUCH_PATH: Final = "no such file or folder"
_DEFAULT_SOURCE: Final = "documents"
"""The source of files that are named one by one."""


@dataclass(frozen=True)
class FoundFile:
    """A file to ingest."""

    path: Path
    """Its absolute path."""
    relative: str
    """Its path inside its source, with forward slashes."""
    root: str
    """The absolute path of the folder it was found under; empty for a file that was named itself."""


@dataclass
class SourceFiles:
    """What one ingestion brings to one source."""

    files: dict[str, FoundFile] = field(default_factory=dict)
    """By their path inside the source."""
    roots: set[str] = field(default_factory=set)
    """The folders that were searched; documents of theirs that are not among ``files`` are gone."""
    unlisted: set[str] = field(default_factory=set)
    """Folders that could not be looked into; nothing is known about documents below them."""


class Selection:
    """The files of an ingestion by source, in an order that doesn't depend on the file system; and what can't be taken.

    Hidden files and folders are left out. A symlink to a file is followed while it stays under its folder; symlinks
    to folders are not: what they show inside the folder is found without them. What leaves the folder is reported.

    Args:
        paths: Files and folders.
        source: The source of all of them; None names each folder's source after the folder, and the source of
            single files ``documents``.
        follow_symlinks: Whether to follow all symlinks, wherever they lead.
        sources_at: Returns the sources that hold documents from an absolute path, for paths that are gone from disk.

    Raises:
        ConfigurationError: A folder has no name to call its source by.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        source: str | None,
        follow_symlinks: bool,
        sources_at: Callable[[str], Iterable[str]],
    ) -> None:
        self.failed: list[tuple[str, str]] = []
        self.skipped = 0
        self._follow = follow_symlinks
        self._sources: dict[str, SourceFiles] = {}
        for listed in paths:
            path = Path(os.path.abspath(listed))  # noqa: PTH100 (resolve() would rename a linked folder's source)
            if path.is_dir():
                if source is None and not path.name:
                    raise ConfigurationError(f"The folder {str(path)!r} has no name; pass source= to name its source.")
                self._add_folder(self._group(path.name if source is None else source), path)
            elif not path.exists():
                # A path that is gone takes its documents out of the store; one that never was in it is a mistake.
                names = [name for name in sources_at(str(path)) if source in (None, name)]
                for name in names:
                    self._group(name)
                if not names:
                    self._fail(path, NO_SUCH_PATH)
            elif path.suffix.lower() not in SUFFIXES:
                self._fail(path, f"is not of a kind that is read ({', '.join(sorted(SUFFIXES))})")
            else:  # named by the caller: it may lie behind a symlink
                self._add(_DEFAULT_SOURCE if source is None else source, FoundFile(path, path.name, ""), None)
        for group in self._sources.values():
            group.files = dict(sorted(group.files.items()))

    def sources(self) -> list[tuple[str, SourceFiles]]:
        """Return the files by source, in the order of the sources' names."""
        return sorted(self._sources.items())

    def _group(self, source: str) -> SourceFiles:
        return self._sources.setdefault(source, SourceFiles())

    def _fail(self, path: str | Path, reason: str) -> None:
        self.failed.append((printable(path), reason))

    def _add(self, source: str | SourceFiles, file: FoundFile, inside: Path | None) -> None:
        """Take a file; one that is irregular, leaves its folder, or has another's place is recorded as failed."""
        if reason := _unfit(file.path, inside):
            self._fail(file.path, reason)
        elif file.relative != printable(file.relative):
            self._fail(file.path, "has a name that is not valid text")
        else:
            group = self._group(source) if isinstance(source, str) else source
            if group.files.setdefault(file.relative, file).path != file.path:
                self._fail(
                    file.path, "has the same path in this source as another file; give its folder another source"
                )

    def _add_folder(self, group: SourceFiles, root: Path) -> None:
        group.roots.add(str(root))
        for path in self._walk(group, root):
            if path.suffix.lower() not in SUFFIXES:
                self.skipped += 1
            else:
                file = FoundFile(path, path.relative_to(root).as_posix(), str(root))
                self._add(group, file, None if self._follow else root)

    def _walk(self, group: SourceFiles, root: Path) -> Iterator[Path]:
        """Yield every entry that is not hidden and no folder."""

        def unlisted(error: OSError) -> None:
            group.unlisted.add(str(error.filename))
            self._fail(error.filename, f"can't be listed: {error.strerror}")

        seen: set[tuple[int, int]] = set()
        for folder, folders, names in os.walk(root, onerror=unlisted, followlinks=True):
            shown = [Path(folder, name) for name in sorted(folders) if not name.startswith(".")]
            depth = len(Path(folder).relative_to(root).parts)
            if depth >= MAX_DEPTH:
                for path in shown:
                    group.unlisted.add(str(path))
                    self._fail(path, f"is more than {MAX_DEPTH} folders deep")
                shown = []
            folders[:] = [path.name for path in shown if self._enters(path, root, seen)]
            yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))

    def _enters(self, folder: Path, root: Path, seen: set[tuple[int, int]]) -> bool:
        if not folder.is_symlink():
            return True
        if _stays_inside(folder, root):
            return False  # what it shows is found without it
        if not self._follow:
            self._fail(folder, _LEAVES)
            return False
        status = folder.stat()
        known = (status.st_dev, status.st_ino) in seen
        seen.add((status.st_dev, status.st_ino))
        return not known


def printable(path: str | Path) -> str:
    """Return a path as text, whose name may not be valid text."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _unfit(path: Path, root: Path | None) -> str:
    """Return why a file can't be taken: it is not regular, or a symlink out of its folder; else ""."""
    if root is not None and not _stays_inside(path, root):
        return _LEAVES
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
