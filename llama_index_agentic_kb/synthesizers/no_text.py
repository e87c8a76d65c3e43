"""``no_text``: the evidence alone."""

from __future__ import annotations

from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft

__all__ = ["NoText"]


class NoText(AgenticSynthesizer):
    """Gives no text; the response's source nodes are what is wanted. Needs no language model."""

    mode = "no_text"
    needs_llm = False
    makes_objects = False

    async def _compose(self, draft: Draft) -> str:
        del draft
        return ""

    def _nothing(self) -> str:
        return ""
