"""``extractiveData``: the passages themselves, as JSON, within a budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import LEAST_CONTENT, Packed, somewhat_longer

__all__ = ["ExtractiveData"]

DEFAULT_BUDGET: Final = 5_000
"""Tokens of the whole JSON text."""


class ExtractiveData(AgenticSynthesizer):
    """Gives a JSON array of ``{"ref_id": 0, "title": ..., "terms": ..., "content": ...}``. Needs no language model.

    ``terms`` is there where the source has some. The text as a whole keeps to ``max_output_tokens`` (default 5,000):
    a passage that overflows is cut at a sentence end, and what doesn't fit at all is counted and warned of.
    """

    mode = "extractiveData"
    needs_llm = False
    makes_objects = False

    async def _compose(self, draft: Draft) -> str:
        budget = draft.max_output_tokens or DEFAULT_BUDGET
        work = partial(extract, draft.passages, budget)
        text, packed = await Call(sync=work, deadline=draft.deadline, what="extracting passages")
        draft.account(packed, f"the budget of {budget} tokens")
        return str(text)

    def _nothing(self) -> str:
        return "[]"


def extract(passages: Sequence[Passage], budget: int) -> tuple[str, Packed]:
    """Give passages as a JSON array that counts at most ``budget`` tokens (an empty one always fits), and the account.

    Args:
        passages: Best first.
        budget: Tokens, of LlamaIndex's global tokenizer.
    """
    packed = Packed([[]])
    items: list[str] = []
    room = budget - count_tokens("[]")
    for passage in passages:
        item = _fitting(passage, room)
        if item is None:
            packed.dropped += 1
            continue
        packed.cut += item != _item(passage, passage.content)
        items.append(item)
        packed.groups[0].append(passage)
        room -= _cost(item)
    while items and count_tokens(_array(items)) > budget:  # tokens may join differently than they were counted
        items.pop()
        packed.groups[0].pop()
        packed.dropped += 1
    return _array(items), packed


def _fitting(passage: Passage, room: int) -> str | None:
    """Give a passage's item, its content cut to fit; None where hardly anything would."""
    item = _item(passage, passage.content)
    if _cost(item[: max(room, 1) * 32 + 32]) <= room and _cost(item) <= room:  # no token is longer than 32 characters
        return item
    if _cost(_item(passage, "")) + LEAST_CONTENT > room:
        return None
    content = cut_to_fit(somewhat_longer(passage.content, room), room, lambda text: _cost(_item(passage, text)))
    return _item(passage, content) if content else None


def _item(passage: Passage, content: str) -> str:
    item: dict[str, Any] = {"ref_id": passage.ref_id, "title": _sound(passage.title)}
    if passage.terms:
        item["terms"] = _sound(passage.terms)
    return json.dumps({**item, "content": _sound(content)}, ensure_ascii=False)


def _cost(item: str) -> int:
    return count_tokens(item) + 1  # and a comma


def _array(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _sound(text: str) -> str:
    """Replace what no encoding can hold: halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
