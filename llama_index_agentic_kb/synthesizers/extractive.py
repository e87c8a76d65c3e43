"""Modes without a language model: ``extractiveData``, ``context_only``, ``no_text``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.account.budget import current_budget
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.schema.request import MAX_TOKENS
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import Packed, fit, shortened

DEFAULT_BUDGET: Final = 5_000  # the default maximum length of the JSON text in tokens


class ExtractiveData(AgenticSynthesizer):
    """Returns a JSON array of ``{"ref_id": 0, "title": ..., "terms": ..., "content": ...}``. Needs no language model.

    ``terms`` is included if the source provides it. The whole text is limited to ``max_output_tokens`` (default 5,000
    if the request has no ``maxOutputDocuments``): passages that overflow are truncated at a sentence end, and passages
    that don't fit at all are dropped with a warning.
    """

    mode = "extractiveData"
    needs_llm = False
    makes_objects = False
    nothing = "[]"

    async def _compose(self, draft: Draft) -> str:
        # If the request only limits the number of documents, the default token budget does not apply.
        default = DEFAULT_BUDGET if current_budget().output_documents is None else MAX_TOKENS
        budget = draft.max_output_tokens or default
        work = partial(extract, draft.passages, budget)
        text, packed = await Call(sync=work, deadline=draft.deadline, what="extracting passages")
        draft.count(packed, f"the budget of {budget} tokens")
        return text


class ContextOnly(AgenticSynthesizer):
    """Returns the passages' contents in order, with a blank line between them. Needs no language model.

    The text is truncated only if ``max_output_tokens`` is set. It is raw retrieved text.
    """

    mode = "context_only"
    needs_llm = False
    makes_objects = False

    async def _compose(self, draft: Draft) -> str:
        kept = draft.passages
        if draft.max_output_tokens is not None:
            packing = partial(fit, kept, draft.max_output_tokens)
            packed = await Call(sync=packing, deadline=draft.deadline, what="packing passages")
            draft.count(packed, "the output's budget")
            kept = [passage for group in packed.groups for passage in group]
        return "\n\n".join(passage.content for passage in kept)


class NoText(AgenticSynthesizer):
    """Returns no text: the response's source nodes are the result. Needs no language model."""

    mode = "no_text"
    needs_llm = False
    makes_objects = False
    nothing = ""

    async def _compose(self, draft: Draft) -> str:
        del draft
        return ""


def extract(passages: Sequence[Passage], budget: int) -> tuple[str, Packed]:
    """Return passages as a JSON array of at most ``budget`` tokens, and the numbers of cut and dropped ones."""
    packed, items = Packed(), list[str]()
    room = budget - count_tokens("[]")
    for passage in passages:
        item = _item(passage, passage.content)
        if _cost(item[: max(room, 1) * 32 + 32]) > room or _cost(item) > room:  # no token has more than 32 characters
            content = shortened(passage.content, room, lambda text, passage=passage: _cost(_item(passage, text)))  # type: ignore[misc]
            if not content:
                packed.dropped += 1
                continue
            item = _item(passage, content)
            packed.cut += 1
        items.append(item)
        room -= _cost(item)
    while (
        items and count_tokens(f"[{', '.join(items)}]") > budget
    ):  # the joined text may have more tokens than its items
        items.pop()
        packed.dropped += 1
    return f"[{', '.join(items)}]", packed


def _item(passage: Passage, content: str) -> str:
    item = {"ref_id": passage.ref_id, "title": passage.title, "terms": passage.terms, "content": content}
    text = json.dumps({key: value for key, value in item.items() if value is not None}, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates can't be encoded


def _cost(item: str) -> int:
    return count_tokens(item) + 1  # and a comma
