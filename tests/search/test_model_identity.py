from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.embeddings import MockEmbedding
from pydantic import Field, PrivateAttr

from llama_index_agentic_kb.account.activity_log import with_handlers
from llama_index_agentic_kb.search import embedding as module
from llama_index_agentic_kb.search.embedding import model_identity
from llama_index_agentic_kb.testing import HashEmbedding


class OpenAIEmbedding(MockEmbedding):
    """Shaped as LlamaIndex's of that name, which is not installed: its state, and clients made when first needed."""

    api_key: str = "key"
    api_base: str = "https://api.openai.com/v1"
    dimensions: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    default_headers: dict[str, str] | None = None
    timeout: float = 60.0

    _query_engine: str = PrivateAttr(default="text-embedding-3-small")
    _client: Any = PrivateAttr(default=None)
    _http_client: Any = PrivateAttr(default=None)


OpenAIEmbedding.__module__ = "llama_index.embeddings.openai.base"


class Client:
    """Something that is no plain data."""


def openai(**kwargs: Any) -> OpenAIEmbedding:
    return OpenAIEmbedding(embed_dim=3, **{"model_name": "text-embedding-3-small", **kwargs})


def test_equal_models_of_llama_index_are_one() -> None:
    """Two objects with equal arguments share an identity, however they are called and whether they have been used."""
    used = openai(timeout=1.0, embed_batch_size=7, num_workers=2)
    used._client = Client()
    used.callback_manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
    assert model_identity(openai()) == model_identity(used)
    assert model_identity(MockEmbedding(embed_dim=3)) == model_identity(MockEmbedding(embed_dim=3))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "text-embedding-3-large"},
        {"dimensions": 256},
        {"api_base": "http://localhost/v1"},
        {"api_key": "another"},
        {"additional_kwargs": {"dimensions": 256}},
        {"additional_kwargs": {"user": ["1", 2]}},
        {"default_headers": {"x-deployment": "blue"}},
    ],
    ids=str,
)
def test_any_state_that_may_matter_tells_models_apart(other: dict[str, Any]) -> None:
    """Name, dimensions, address, key, extra arguments and headers: each of them, also changed later, tells."""
    model = openai()
    before = model_identity(model)
    for name, value in other.items():
        setattr(model, name, value)
    assert before != model_identity(model) == model_identity(openai(**other))
    assert len(before or "") == 32  # a digest: no key can be read in it


def test_an_identity_is_never_used_twice() -> None:
    """Objects made and dropped one after the other, often at the same address, never share an identity."""
    seen = [model_identity(HashEmbedding()) for _ in range(500)]
    assert len(set(seen)) == 500
    gc.collect()
    assert len(module._named) < 400  # the dead are forgotten


@pytest.mark.parametrize(
    "value", [list(range(1000)), {str(number): 1.0 for number in range(1000)}, [object()]], ids=["list", "map", "slots"]
)
def test_what_can_not_be_described_has_no_identity(value: Any) -> None:
    """A model with large tables of its own, or objects without weak references, is not cached."""
    assert model_identity(openai(additional_kwargs={"table": value})) is None


def test_a_loaded_model_counts_by_its_weights(embed_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that share weights are one model, until an instruction, the window or normalisation changes."""
    identity = model_identity(embed_model)
    assert identity is not None
    twin = with_handlers(embed_model, CallbackManager([LlamaDebugHandler(print_trace_on_end=False)]))
    assert model_identity(twin) == identity
    unnormalised = copy.copy(embed_model)
    unnormalised.normalize = False
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setitem(embed_model._model.prompts, "query", "query: "),
        lambda: monkeypatch.setattr(embed_model._model, "max_seq_length", 16),
    ]
    seen = {identity, model_identity(unnormalised)}
    for change in changes:
        change()
        seen.add(model_identity(embed_model))
        monkeypatch.undo()
    assert len(seen) == 4
    assert model_identity(embed_model) == identity
