"""Which files an ingestion takes, and which source each belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llama_index_agentic_kb.errors import ConfigurationError

__all__ = ["SUFFIXES", "FileSelection", "FoundFile", "SourceFiles", "select_files"]

SUFFIXES = frozenset({".txt", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx"})
"""The kinds of files that are read, by lower-case suffix."""

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


def select_files(
    paths: Sequence[str | Path],
    *,
    source: str | None,
    recursive: bool,
    sources_at: Callable[[str], Iterable[str]],
) -> FileSelection:
    """Find the files to ingest, in an order that doesn't depend on the file system.

    Hidden files and folders are left out. A symlink to a file is followed while it stays under its folder; symlinks
    to folders never are: what they show inside the folder is found without them.

    Args:
        paths: Files and folders.
        source: The source of all of them; ``None`` names each folder's source after the folder, and the source of
            single files ``documents``.
        recursive: Whether to go into subfolders.
        sources_at: Tells which sources hold documents from an absolute path, for paths that are gone from disk.

    Returns:
        The files by source, and what can't be taken.

    Raises:
        ConfigurationError: A folder has no name to call its source by.
    """
    selection = FileSelection()
    for given in paths:
        path = Path(os.path.abspath(given))  # noqa: PTH100  (resolve() would rename a linked folder's source)
        if path.is_dir():
            _add_folder(selection, path, _folder_name(path) if source is None else source, recursive=recursive)
        elif path.is_file():
            _add_file(selection, path, DEFAULT_SOURCE if source is None else source)
        else:
            _add_missing(selection, path, source, sources_at(str(path)))
    for group in selection.sources.values():
        group.files = dict(sorted(group.files.items()))
    selection.sources = dict(sorted(selection.sources.items()))
    return selection


def printable(path: str | Path) -> str:
    """Show a path whose name may not be valid text."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _folder_name(path: Path) -> str:
    if not path.name:
        raise ConfigurationError(f"The folder {str(path)!r} has no name; pass source= to name its source.")
    return path.name


def _add_folder(selection: FileSelection, root: Path, source: str, *, recursive: bool) -> None:
    group = selection.sources.setdefault(source, SourceFiles())
    group.roots.add(str(root))
    for path in _walk(root, selection, group, recursive=recursive):
        if path.suffix.lower() not in SUFFIXES:
            selection.skipped += 1
        elif not _stays_inside(path, root):
            selection.failed.append((printable(path), "is a symlink that leaves the folder, or leads nowhere"))
        else:
            _add(selection, group, FoundFile(path, path.relative_to(root).as_posix(), str(root)))


def _add_file(selection: FileSelection, path: Path, source: str) -> None:
    if path.suffix.lower() not in SUFFIXES:
        kinds = ", ".join(sorted(SUFFIXES))
        selection.failed.append((printable(path), f"is not of a kind that is read ({kinds})"))
        return
    _add(selection, selection.sources.setdefault(source, SourceFiles()), FoundFile(path, path.name, ""))


def _add_missing(selection: FileSelection, path: Path, source: str | None, known: Iterable[str]) -> None:
    """A path that is gone takes its documents out of the store; one that never was in it is a mistake."""
    names = [name for name in known if source in (None, name)]
    for name in names:
        selection.sources.setdefault(name, SourceFiles())
    if not names:
        selection.failed.append((printable(path), "no such file or folder"))


def _add(selection: FileSelection, group: SourceFiles, file: FoundFile) -> None:
    if file.relative != printable(file.relative):
        selection.failed.append((printable(file.path), "has a name that is not valid text"))
    elif group.files.setdefault(file.relative, file).path != file.path:
        selection.failed.append(
            (printable(file.path), "has the same path in this source as another file; give its folder another source")
        )


def _walk(root: Path, selection: FileSelection, group: SourceFiles, *, recursive: bool) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        group.unlisted.add(str(error.filename))
        selection.failed.append((printable(error.filename), f"can't be listed: {error.strerror}"))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        subfolders[:] = sorted(name for name in subfolders if recursive and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


def _stays_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a broken link, or a loop
        return False
