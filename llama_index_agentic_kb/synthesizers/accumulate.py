"""``accumulate`` and ``compact_accumulate``: one answer for each passage, or for each full prompt, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.prompts import ANSWER_TEMPLATE, Passage, format_passages
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft, TextAnswer, ids_of, side_by_side
from llama_index_agentic_kb.synthesizers.passages import Packed, pack, singly

__all__ = ["Accumulate", "CompactAccumulate"]

SEPARATOR: Final = "\n---------------------\n"
"""Between answers, unless ``separator=`` is given; as in LlamaIndex."""
MAX_CALLS: Final = 100
"""Calls of one synthesis; passages beyond are counted as dropped."""


class Accumulate(AgenticSynthesizer):
    """Answers from each passage alone and returns all answers: "Response 1: ...", "Response 2: ...", ...

    When streaming, each answer is emitted whole, in order, as soon as it is complete. Template: ``text_qa_template``; a
    ``separator`` may be given with each question. With ``output_cls`` each answer is an object's JSON.
    """

    mode: ClassVar[str] = "accumulate"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        """Return the groups of passages of each call."""
        return singly(passages, room)

    async def _compose(self, draft: Draft) -> str:
        separator = str(draft.variables.pop("separator", SEPARATOR))
        packed = await draft.pack(self._arrange, self.templates["text_qa_template"])
        groups = draft.within_calls(packed, MAX_CALLS)
        pieces: list[str] = []

        async def each(position: int, answer: TextAnswer) -> None:
            pieces.append(f"{separator if position else ''}Response {position + 1}: {answer.text}")
            draft.so_far += pieces[-1]
            await draft.emit(pieces[-1])

        answers = await side_by_side([self._one(draft, group, step) for step, group in enumerate(groups)], each)
        draft.answerable = any(answer.answerable for answer in answers)
        return "".join(pieces)

    async def _one(self, draft: Draft, group: list[Passage], step: int) -> TextAnswer:
        template, text = self.templates["text_qa_template"], format_passages(group)
        if draft.output_cls is None:
            return await draft.ask(template, ids_of(group), step=step, context_str=text)
        made = await draft.ask_object(draft.output_cls, template, ids_of(group), step=step, context_str=text)
        return TextAnswer(made.model_dump_json())


class CompactAccumulate(Accumulate):
    """Packs passages, whole and in order, into as few calls as fit the window, and returns the answer of each."""

    mode = "compact_accumulate"

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        return pack(passages, room)
