"""What the package of grounding offers, and that it stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llama_index_agentic_kb import grounding


def test_every_name_is_there() -> None:
    """Each name leads to what bears it; a misspelt one is named."""
    for name in " ".join(grounding._HOMES.values()).split():
        assert getattr(grounding, name).__name__ == name
    with pytest.raises(AttributeError, match="check_groundig"):
        _ = grounding.check_groundig


def test_import_is_light() -> None:
    """The package alone loads no model library and no LlamaIndex."""
    heavy = ("torch", "sentence_transformers", "nltk", "llama_index.core")
    code = f"import sys, llama_index_agentic_kb.grounding; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
