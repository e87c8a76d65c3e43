"""``tree_summarize``: answers from packs of passages, side by side; then answers from these answers, up to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import SUMMARY_TEMPLATE, format_partial, format_passages
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft, TextAnswer, ids_of, side_by_side
from llama_index_agentic_kb.synthesizers.passages import pack

__all__ = ["TreeSummarize"]

MAX_DEPTH: Final = 6
"""Levels of calls, the last one included: the one before it is cut to fit into a single call."""
SEPARATOR: Final = "\n\n"
"""Between partial answers, where no time is left to make one of them."""
MAX_CALLS: Final = 64
"""Calls of one answer. Packs beyond are counted as dropped; partial answers beyond are cut to fit into one call."""


class TreeSummarize(AgenticSynthesizer):
    """Answers from all packs of passages side by side, then from the partial answers, until one is left.

    Partial answers keep their markers. It always ends: each level has fewer calls than the one below, or its texts
    are cut to fit into the last one; depth and number of calls are bounded. When streaming, the last call's deltas
    are emitted; with ``output_cls``, the last call returns the object. Template: ``summary_template``.
    """

    mode = "tree_summarize"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"summary_template": SUMMARY_TEMPLATE}

    async def _compose(self, draft: Draft) -> str:
        template = self.templates["summary_template"]
        packed = await draft.pack(pack, template)
        groups = draft.within_calls(packed, MAX_CALLS - 1)
        contexts = [(format_passages(group), ids_of(group)) for group in groups]
        calls, depth = 0, 1
        while len(contexts) > 1:
            asked = [
                draft.ask(template, ids, step=calls + position, context_str=text)
                for position, (text, ids) in enumerate(contexts)
            ]
            answers = [one.text for one in await side_by_side(asked, partial(_keep, draft) if depth == 1 else None)]
            draft.so_far = SEPARATOR.join(answers)
            calls += len(contexts)
            depth += 1
            shown = set().union(*(ids for _, ids in contexts))
            limit = 1 if depth >= MAX_DEPTH else min(len(contexts) - 1, MAX_CALLS - calls - 1)
            texts = await self._join(draft, answers, limit)
            contexts = [(text, shown) for text in texts]
        ((text, ids),) = contexts
        return await draft.finish(template, ids, step=calls, context_str=text)

    async def _join(self, draft: Draft, answers: Sequence[str], limit: int) -> list[str]:
        """Return the contexts of the next level: at most ``limit``, or one into which all answers are cut."""

        def work() -> tuple[list[str], int]:
            made, short = join(answers, draft.room(self.templates["summary_template"]), limit)
            return [draft.spotlight.framed(text) for text in made], short

        texts, cut = await Call(sync=work, deadline=draft.deadline, what="packing answers")
        if cut:
            draft.warnings.append(f"{cut} partial answers were cut to fit into the model's window")
        return list(texts)


async def _keep(draft: Draft, position: int, answer: TextAnswer) -> None:
    """Keep the first level's partial answers, as they come, as the answer so far."""
    draft.so_far += SEPARATOR * (position > 0) + answer.text


def join(answers: Sequence[str], room: int, limit: int) -> tuple[list[str], int]:
    """Pack partial answers into contexts.

    Args:
        answers: The model's own texts.
        room: Tokens of one context.
        limit: How many contexts there may be; where more are needed, all answers are cut to equal shares of one.

    Returns:
        The contexts, and how many answers were cut.
    """
    blocks = [format_partial(answer, number) for number, answer in enumerate(answers, start=1)]
    contexts: list[list[str]] = []
    used = room
    for block in blocks:
        needed = count_tokens(block) + 1
        if contexts and used + needed <= room:
            contexts[-1].append(block)
            used += needed
        else:
            contexts.append([block])
            used = needed
    if len(contexts) <= max(limit, 1) and all(count_tokens("\n".join(context)) <= room for context in contexts):
        return ["\n".join(context) for context in contexts], 0
    return _one_context(answers, room // len(answers))


def _one_context(answers: Sequence[str], part: int) -> tuple[list[str], int]:
    """Cut each answer to so many tokens; those of which nothing is left are left out."""
    blocks, cut = [], 0
    for number, answer in enumerate(answers, start=1):
        around = count_tokens(format_partial("", number)) + 1
        kept = cut_to_fit(answer, part - around, count_tokens)
        cut += kept != answer
        if kept:
            blocks.append(format_partial(kept, number))
    return ["\n".join(blocks)], cut
