"""Sources that installed packages offer, by Python entry points; they can be loaded again without a restart.

    [project.entry-points."llama_index_agentic_kb.sources"]
    orders = "my_shop.sources:orders"

An entry point names a source, a list of sources, or a function without arguments that returns either.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Collection
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, NamedTuple

from llama_index_agentic_kb._aio import Call, deadline_after, gather, run
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.sources.base import KnowledgeSource

GROUP: Final = "llama_index_agentic_kb.sources"
"""The group of the entry points."""

LOAD_SECONDS: Final = 30.0
"""The maximum number of seconds in which all plugins must have been loaded."""

_loaded: Final[dict[str, float]] = {}
"""The modification time of each plugin's module when it was loaded, by module name."""

_locks: Final[dict[str, threading.Lock]] = {}
"""One for each module: entry points are loaded on threads, and a module must not be reloaded during its import."""


class PluginFailure(NamedTuple):
    """A plugin that could not be loaded: its entry point's name and object, and the reason."""

    name: str
    value: str
    reason: str


def discover_sources(taken: Collection[str] = ()) -> tuple[list[KnowledgeSource], list[PluginFailure]]:
    """Load the sources of all installed plugins; a plugin that fails, or takes too long, costs only itself.

    A plugin whose file has changed since it was loaded is loaded again. ``taken`` are names that plugins may not use.
    """
    importlib.invalidate_caches()
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    deadline = deadline_after(LOAD_SECONDS)
    calls = [Call(sync=partial(_load, point), deadline=deadline, what=f"plugin {point.name!r}") for point in points]
    sources: dict[str, KnowledgeSource] = {}
    failures = []
    for point, job in zip(points, run(gather(calls)), strict=True):
        reason = "" if job.error is None else error_message(job.error)
        found = [] if reason else job.result()
        twice = [source.name for source in found if source.name in {*taken, *sources}]
        reason = f"a source is named {twice[0]!r} already" if twice else reason
        if reason:
            failures.append(PluginFailure(point.name, point.value, reason))
            logger.warning("plugin %r (%s) was not loaded: %s", point.name, point.value, reason)
        else:
            sources.update({source.name: source for source in found})
    return list(sources.values()), failures


def _load(point: EntryPoint) -> list[KnowledgeSource]:
    name = point.module
    with _locks.setdefault(name, threading.Lock()):
        if name in sys.modules and _loaded.get(name, _changed(name)) != _changed(name):
            importlib.reload(sys.modules[name])
        try:
            offered = point.load()
        finally:
            _loaded[name] = _changed(name)
    made = offered if isinstance(offered, KnowledgeSource | list | tuple) else offered()
    listed = [made] if isinstance(made, KnowledgeSource) else list(made)
    wrong = [type(one).__name__ for one in listed if not issubclass(type(one), KnowledgeSource)]
    if wrong:
        raise ConfigurationError(f"expected a KnowledgeSource, got {wrong[0]}")
    return listed


def _changed(module: str) -> float:
    """Return the time at which a loaded module's file was changed; 0 if it has no file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).stat().st_mtime if path and Path(path).exists() else 0.0
