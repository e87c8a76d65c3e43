"""Modes without a language model: ``extractiveData``, ``context_only``, ``no_text``; and answers that came too late."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_agentic_kb._aio import Call, deadline_after
from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer, Synthesis
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import MIN_CONTENT, Packed, fit, somewhat_longer

__all__ = ["ContextOnly", "ExtractiveData", "NoText", "partial_answer"]

DEFAULT_BUDGET: Final = 5_000
"""Tokens of the whole JSON text."""

EXTRACTING_SECONDS: Final = 0.3
"""Time to make extracted data in place of a late answer: the answer's own time is used up."""


class ExtractiveData(AgenticSynthesizer):
    """Returns a JSON array of ``{"ref_id": 0, "title": ..., "terms": ..., "content": ...}``. Needs no language model.

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


class ContextOnly(AgenticSynthesizer):
    """Returns the passages' contents in order, with a blank line between them. Needs no language model.

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
        return "\n\n".join(passage.content for passage in kept)


class NoText(AgenticSynthesizer):
    """Returns no text: the response's source nodes are the result. Needs no language model."""

    mode = "no_text"
    needs_llm = False
    makes_objects = False

    async def _compose(self, draft: Draft) -> str:
        del draft
        return ""

    def _nothing(self) -> str:
        return ""


async def partial_answer(
    error: DeadlineExceededError,
    question: str,
    nodes: Sequence[NodeWithScore],
    *,
    max_output_tokens: int | None = None,
    sources: Mapping[str, KnowledgeSource] | None = None,
) -> Synthesis:
    """Return the answer so far of a synthesis that was late, or else the evidence as extracted data.

    Args:
        error: What the synthesis raised; its ``partial`` is the answer so far.
        question: The question.
        nodes: The evidence, best first.
        max_output_tokens: The budget of the extracted data; None is its own.
        sources: By name.

    Returns:
        A synthesis whose only warning says which of the two it is.
    """
    if error.partial:
        return Synthesis(error.partial, warnings=["it was not done by its deadline: what there was of it is given"])
    try:
        synthesis = await ExtractiveData().synthesis(
            QueryBundle(question),
            nodes,
            deadline=deadline_after(EXTRACTING_SECONDS),
            max_output_tokens=max_output_tokens,
            sources=sources,
        )
    except DeadlineExceededError:  # of very much text
        return Synthesis("", warnings=["it was not there by its deadline; the references name the evidence"])
    synthesis.warnings = ["it was not there by its deadline: the evidence is given as extracted data"]
    return synthesis


def extract(passages: Sequence[Passage], budget: int) -> tuple[str, Packed]:
    """Return passages as a JSON array of at most ``budget`` tokens (an empty one always fits), and the account.

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
    """Return a passage's item, its content cut to fit; None where hardly anything would."""
    item = _item(passage, passage.content)
    if _cost(item[: max(room, 1) * 32 + 32]) <= room and _cost(item) <= room:  # no token is longer than 32 characters
        return item
    if _cost(_item(passage, "")) + MIN_CONTENT > room:
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
