"""An agentic knowledge base for LlamaIndex: plan, search many sources at once, answer with citations, check the answer.

The doors are ``KnowledgeBase`` and LlamaIndex's own (retriever, query engine, chat engine, index); docs/architecture.md
follows a query through the modules. Names are exported lazily (PEP 562): importing the package loads neither torch nor
chromadb nor a model's client. They are listed in ``__init__.pyi`` only.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

__version__ = "0.1.0"

_STUB = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
_HOME_OF = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import a public name's home when it is first asked for."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
