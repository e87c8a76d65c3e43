"""Starts modules of this package as processes of their own: for work that may crash, hang or fill the memory."""

from __future__ import annotations

import os
import sys

__all__ = ["limit_resources", "own_command", "own_environment"]


def own_command(module: str, *arguments: str) -> list[str]:
    """Give the command that runs a module of this package.

    Args:
        module: Its full name.
        arguments: What it is given.
    """
    # -P: a module in the working directory, or in a folder that is ingested, must not stand in for ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment() -> dict[str, str]:
    """Give the environment for it: it finds the same packages as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def limit_resources(*, file_bytes: int | None = None, memory_bytes: int | None = None) -> None:
    """Limit what this process may take, where the system can; it leaves no core dump either.

    Args:
        file_bytes: The largest file that it may write.
        memory_bytes: The address space that it may have.
    """
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  (not on Windows)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in ((resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_AS, memory_bytes)):
        if most is not None:
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
