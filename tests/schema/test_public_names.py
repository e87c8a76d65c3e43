"""The names that go over the wire: fields of every public model and values of every enumeration, frozen."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from llama_index_agentic_kb import schema
from llama_index_agentic_kb.schema._model import Model

Kind = TypeVar("Kind")
FROZEN = Path(__file__).with_name("public_names.json")


def names() -> dict[str, list[str]]:
    """The JSON names of each model's fields, and each enumeration's values."""
    for module in pkgutil.iter_modules(schema.__path__, f"{schema.__name__}."):
        importlib.import_module(module.name)
    models = {
        kind.__name__: sorted(field.alias or name for name, field in kind.model_fields.items())
        for kind in _below(Model)
    }
    enums = {kind.__name__: sorted(str(one) for one in kind) for kind in _below(StrEnum)}
    return dict(sorted({**models, **enums}.items()))


def _below(kind: type[Kind]) -> Iterator[type[Kind]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith(f"{schema.__name__}.") and not child.__name__.startswith("_"):
            yield child
        yield from _below(child)


def test_names_that_others_read_stay() -> None:
    """A name of this file is a contract: Azure's, Google's, or that of stored sessions and recordings."""
    assert names() == json.loads(FROZEN.read_text())
