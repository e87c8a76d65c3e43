"""Modes with one call, with concurrent calls, or without a language model.

``answerSynthesis``, ``simple_summarize``, ``generation``: one call. ``accumulate``, ``compact_accumulate``: an answer
for each passage, or for each full prompt. ``tree_summarize``: answers combined recursively.
``extractiveData``, ``context_only``, ``no_text``: no call.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.account.budget import current_budget
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import (
    ANSWER_TEMPLATE,
    SIMPLE_TEMPLATE,
    SUMMARY_TEMPLATE,
    Passage,
    format_partial,
    format_passages,
)
from llama_index_agentic_kb.schema.request import MAX_TOKENS
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft, TextAnswer, ids_of, side_by_side
from llama_index_agentic_kb.synthesizers.passages import Packed, fit, pack, share, shortened, singly

SEPARATOR: Final = "\n---------------------\n"  # the default separator of accumulated answers, as in LlamaIndex
MAX_ANSWERS: Final = 100  # maximum calls of an accumulating synthesis; further passages are counted as dropped
DEFAULT_BUDGET: Final = 5_000  # the default maximum length of extracted data's JSON text in tokens
MAX_DEPTH: Final = 6
"""Maximum levels of a tree, including the last; the answers for the last level are truncated to fit one call."""
MAX_CALLS: Final = 64
"""Maximum calls of a tree. Further passages are counted as dropped; further answers are truncated to fit one call."""


class AnswerSynthesis(AgenticSynthesizer):
    """Answers in one call and cites with ``[ref_id:N]`` markers.

    Passages are added in order until the context window is full; those that overflow are truncated at a sentence end
    or counted as dropped. Template: ``text_qa_template``.
    """

    mode = "answerSynthesis"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.answer_at_once(fit, self.templates["text_qa_template"])


class SimpleSummarize(AgenticSynthesizer):
    """Answers in one call from all passages, truncating long ones to equal shares of the context window.

    Template: ``text_qa_template``.
    """

    mode = "simple_summarize"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.answer_at_once(share, self.templates["text_qa_template"])


class Generation(AgenticSynthesizer):
    """Sends only the question to the model; the answer has no citations. Template: ``simple_template``.

    The nodes, if any, are still the response's source nodes, as in LlamaIndex.
    """

    mode = "generation"
    needs_nodes = False
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"simple_template": SIMPLE_TEMPLATE}

    async def _compose(self, draft: Draft) -> str:
        draft.passages = []  # the prompt has no passages, so the answer may not link to any
        return await draft.finish(self.templates["simple_template"], ())


class Accumulate(AgenticSynthesizer):
    """Answers from each passage alone and returns all answers: "Response 1: ...", "Response 2: ...", ...

    If streaming, each answer is emitted as one piece, in order, once it is complete. Template: ``text_qa_template``; a
    ``separator`` may be passed with each question. With ``output_cls``, each answer is an object as JSON.
    """

    mode: ClassVar[str] = "accumulate"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}
    packs: ClassVar[bool] = False  # whether each call gets as many passages as fit, rather than one

    async def _compose(self, draft: Draft) -> str:
        separator = str(draft.variables.pop("separator", SEPARATOR))
        groups = await draft.pack(
            pack if self.packs else singly, self.templates["text_qa_template"], max_calls=MAX_ANSWERS
        )

        async def add(position: int, answer: TextAnswer) -> None:
            piece = f"{separator if position else ''}Response {position + 1}: {answer.text}"
            draft.so_far += piece
            await draft.emit(piece)

        answers = await side_by_side([self._one(draft, group, step) for step, group in enumerate(groups)], add)
        draft.result.answerable = any(answer.answerable for answer in answers)
        return draft.so_far

    async def _one(self, draft: Draft, group: list[Passage], step: int) -> TextAnswer:
        template, text = self.templates["text_qa_template"], format_passages(group)
        if draft.output_cls is None:
            return await draft.ask(template, ids_of(group), step=step, context_str=text)
        made = await draft.ask_object(draft.output_cls, template, ids_of(group), step=step, context_str=text)
        return TextAnswer(made.model_dump_json())


class CompactAccumulate(Accumulate):
    """Packs whole passages in order into as few calls as possible, and returns the answer of each call."""

    mode = "compact_accumulate"
    packs = True


class TreeSummarize(AgenticSynthesizer):
    """Answers from all groups of passages concurrently, then combines the partial answers until one remains.

    Each level has fewer calls than the one before, or its texts are cut to fit the last call, which is streamed or
    returns the object. Template: ``summary_template``.
    """

    mode = "tree_summarize"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"summary_template": SUMMARY_TEMPLATE}

    async def _compose(self, draft: Draft) -> str:
        template = self.templates["summary_template"]
        groups = await draft.pack(pack, template, max_calls=MAX_CALLS - 1)
        contexts = [(format_passages(group), ids_of(group)) for group in groups]
        calls, depth = 0, 1

        async def keep(position: int, answer: TextAnswer) -> None:
            if depth == 1:  # the partial answer on a timeout
                draft.so_far += "\n\n" * (position > 0) + answer.text

        def joined(answers: Sequence[str], limit: int) -> tuple[list[str], int]:
            return join(answers, draft.room(template), limit)  # counts tokens

        while len(contexts) > 1:
            asked = [
                draft.ask(template, ids, step=calls + position, context_str=text)
                for position, (text, ids) in enumerate(contexts)
            ]
            answers = [answer.text for answer in await side_by_side(asked, keep)]
            draft.so_far = "\n\n".join(answers)
            calls += len(contexts)
            depth += 1
            limit = 1 if depth >= MAX_DEPTH else min(len(contexts) - 1, MAX_CALLS - calls - 1)
            joining = partial(joined, answers, limit)
            texts, cut = await Call(sync=joining, deadline=draft.deadline, what="packing answers")
            if cut:
                draft.result.warnings.append(f"{cut} partial answers were cut to fit into the model's window")
            shown = set().union(*(ids for _, ids in contexts))
            contexts = [(draft.spotlight.framed(text), shown) for text in texts]
        ((text, ids),) = contexts
        return await draft.finish(template, ids, step=calls, context_str=text)


def join(answers: Sequence[str], room: int, limit: int) -> tuple[list[str], int]:
    """Return answers packed into contexts of ``room`` tokens (cut into one if over ``limit``), and the cut ones."""
    contexts: list[list[str]] = []
    used = room
    for number, answer in enumerate(answers, start=1):
        block = format_partial(answer, number)
        needed = count_tokens(block) + 1
        if contexts and used + needed <= room:
            contexts[-1].append(block)
            used += needed
        else:
            contexts.append([block])
            used = needed
    joined = ["\n".join(context) for context in contexts]
    if len(joined) <= max(limit, 1) and all(count_tokens(context) <= room for context in joined):
        return joined, 0
    blocks, cut, part = [], 0, room // len(answers)
    for number, answer in enumerate(answers, start=1):
        kept = cut_to_fit(answer, part - count_tokens(format_partial("", number)) - 1, count_tokens)
        cut += kept != answer
        if kept:
            blocks.append(format_partial(kept, number))
    return ["\n".join(blocks)], cut


# -- without a language model -----------------------------------------------------------------------------------------


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
