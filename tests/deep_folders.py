"""Folders nested deeper than Python may recurse, which pytest could not remove either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEPTH = 1_200


@contextmanager
def deep_folders(inside: Path) -> Iterator[None]:
    """Make them in a folder, and take them away again."""
    path = str(inside)
    try:
        for _ in range(DEPTH):
            path += "/d"
            os.mkdir(path)  # noqa: PTH102 (a Path this long is slow)
        yield
    finally:
        while path.endswith("/d"):
            os.rmdir(path)  # noqa: PTH106 (the same)
            path = path.removesuffix("/d")
