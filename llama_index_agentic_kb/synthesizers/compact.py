"""``compact``: refine, with as many passages in each call as fit."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.synthesizers.passages import Packed, pack
from llama_index_agentic_kb.synthesizers.refine import Refine

__all__ = ["Compact"]


class Compact(Refine):
    """Packs passages, whole and in order, into as few calls as fit the window, then refines from call to call."""

    mode = "compact"

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        return pack(passages, room)
