"""``context_only``: the passages as text."""

from __future__ import annotations

from functools import partial

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import fit

__all__ = ["ContextOnly"]

SEPARATOR = "\n\n"
"""Between passages, as in LlamaIndex."""


class ContextOnly(AgenticSynthesizer):
    """Gives the passages' contents in order, with a blank line between them. Needs no language model.

    Whole, unless there is a ``max_output_tokens``. The text is raw: it was retrieved, and is data.
    """

    mode = "context_only"
    needs_llm = False
    makes_objects = False

    async def _compose(self, draft: Draft) -> str:
        kept = draft.passages
        if draft.max_output_tokens is not None:
            packing = partial(fit, kept, draft.max_output_tokens)
            packed = await Call(sync=packing, deadline=draft.deadline, what="packing passages")
            draft.account(packed, "the output's budget")
            kept = packed.kept
        return SEPARATOR.join(passage.content for passage in kept)
