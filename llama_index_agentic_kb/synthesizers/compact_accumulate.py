"""``compact_accumulate``: accumulate, with as many passages in each call as fit."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.synthesizers.accumulate import Accumulate
from llama_index_agentic_kb.synthesizers.passages import Packed, pack

__all__ = ["CompactAccumulate"]


class CompactAccumulate(Accumulate):
    """Packs passages, whole and in order, into as few calls as fit the window, and gives the answer of each."""

    mode = "compact_accumulate"

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        return pack(passages, room)
