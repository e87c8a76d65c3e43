"""The response modes: with one call, with concurrent calls, with a chain of calls, or without a language model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Final

from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import BasePydanticProgram
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, Field, create_model

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import cut_to_fit
from llama_index_agentic_kb.account import current_budget
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.citations import AnswerFilter
from llama_index_agentic_kb.llm import count_tokens
from llama_index_agentic_kb.prompts import (
    ANSWER_TEMPLATE,
    REFINE_TEMPLATE,
    SIMPLE_TEMPLATE,
    SUMMARY_TEMPLATE,
    Passage,
    as_answer,
    format_partial,
    format_passages,
)
from llama_index_agentic_kb.schema.request import MAX_TOKENS
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer, ProgramFactory
from llama_index_agentic_kb.synthesizers.draft import (
    Draft,
    TextAnswer,
    UnreadableReplyError,
    failure,
    ids_of,
    side_by_side,
)
from llama_index_agentic_kb.synthesizers.passages import Packed, PackerAttribute, fit, grouped, pack, share, singly

dispatcher = get_dispatcher(__name__)

SEPARATOR: Final = "\n---------------------\n"  # the default separator of accumulated answers, as in LlamaIndex
MAX_ANSWERS: Final = 100  # maximum calls of an accumulating synthesis; further passages are counted as dropped
DEFAULT_BUDGET: Final = 5_000  # the default maximum length of extracted data's JSON text in tokens
MAX_DEPTH: Final = 6  # maximum levels of a tree; the answers for the last level are truncated to fit one call
MAX_CALLS: Final = 64
"""Maximum calls of a tree. Further passages are counted as dropped; further answers are truncated to fit one call."""
MAX_STEPS: Final = 100  # maximum calls of a refinement; further passages are counted as dropped
ANSWER_TOKENS: Final = 500
"""Tokens to reserve for the existing answer when packing, as in LlamaIndex; for longer answers, groups are repacked."""


class AnswerSynthesis(AgenticSynthesizer):
    """Answers in one call and cites with ``[ref_id:N]`` markers.

    Passages are added in order until the context window is full; those that overflow are truncated at a sentence end
    or counted as dropped. Template: ``text_qa_template``.
    """

    mode: ClassVar[str] = "answerSynthesis"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}
    packer: ClassVar[PackerAttribute] = staticmethod(fit)

    async def _compose(self, draft: Draft) -> str:
        (group,) = await draft.pack(self.packer, self.templates["text_qa_template"])
        variables = {"context_str": format_passages(group)}
        answer = await draft.ask(self.templates["text_qa_template"], ids_of(group), variables, stream=draft.streaming)
        return answer.text


class SimpleSummarize(AnswerSynthesis):
    """Answers in one call from all passages, truncating long ones to equal shares of the context window."""

    mode = "simple_summarize"
    packer = staticmethod(share)


class Generation(AgenticSynthesizer):
    """Sends only the question to the model; the answer has no citations. Template: ``simple_template``.

    The nodes, if any, are still the response's source nodes, as in LlamaIndex.
    """

    mode = "generation"
    needs_nodes = False
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"simple_template": SIMPLE_TEMPLATE}

    async def _compose(self, draft: Draft) -> str:
        draft.passages = []  # the prompt has no passages, so the answer may not link to any
        return (await draft.ask(self.templates["simple_template"], (), {}, stream=draft.streaming)).text


class Accumulate(AgenticSynthesizer):
    """Answers from each passage alone and returns all answers: "Response 1: ...", "Response 2: ...", ...

    An empty reply is left out with a warning. If streaming, each answer is emitted as one piece, in order, once it is
    complete. Template: ``text_qa_template``; a ``separator`` may be passed with each question. With ``output_cls``,
    each answer is an object as JSON.
    """

    mode: ClassVar[str] = "accumulate"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}
    packer: ClassVar[PackerAttribute] = staticmethod(singly)

    async def _compose(self, draft: Draft) -> str:
        separator, template = str(draft.variables.pop("separator", SEPARATOR)), self.templates["text_qa_template"]
        groups = await draft.pack(self.packer, template, max_calls=MAX_ANSWERS)

        async def answered(group: Sequence[Passage]) -> TextAnswer | None:
            try:
                return await draft.ask(template, ids_of(group), {"context_str": format_passages(group)})
            except SynthesisError as error:
                if not (isinstance(error.__cause__, LLMError) and error.__cause__.empty):
                    raise
                draft.unreadable.append(error)
                return None

        async def add(position: int, answer: TextAnswer | None) -> None:
            if answer is None:
                draft.result.warnings.append(f"call {position + 1} had an empty reply; it is left out")
                return
            piece = f"{separator if draft.so_far else ''}Response {position + 1}: {answer.text}"
            draft.so_far += piece
            await draft.emit(piece)

        answers = list(filter(None, await side_by_side(list(map(answered, groups)), add)))
        if not answers:
            raise draft.unreadable[0]
        draft.result.answerable, draft.result.output = any(answer.answerable for answer in answers), None
        return draft.so_far


class CompactAccumulate(Accumulate):
    """Packs whole passages in order into as few calls as possible, and returns the answer of each call."""

    mode = "compact_accumulate"
    packer = staticmethod(pack)


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
        depth = 1

        async def keep(position: int, answer: TextAnswer) -> None:
            if depth == 1:  # the partial answer on a timeout
                draft.so_far += "\n\n" * (position > 0) + answer.text

        def joined(answers: Sequence[str], limit: int) -> tuple[list[str], int]:
            return join(answers, draft.room(template, {}), limit)

        while len(contexts) > 1:
            asked = [draft.ask(template, ids, {"context_str": text}, as_text=True) for text, ids in contexts]
            answers = [answer.text for answer in await side_by_side(asked, keep)]
            draft.so_far = "\n\n".join(answers)
            depth += 1
            limit = 1 if depth >= MAX_DEPTH else min(len(contexts) - 1, MAX_CALLS - draft.calls - 1)
            joining = Call(sync=partial(joined, answers, limit), deadline=draft.deadline, what="packing answers")
            texts, cut = await joining  # on a thread, as it counts tokens
            if cut:
                draft.result.warnings.append(f"{cut} partial answers were cut to fit into the model's window")
            shown = set().union(*(ids for _, ids in contexts))
            contexts = [(draft.spotlight.framed(text), shown) for text in texts]
        ((text, ids),) = contexts
        return (await draft.ask(template, ids, {"context_str": text}, stream=draft.streaming)).text


def join(answers: Sequence[str], room: int, limit: int) -> tuple[list[str], int]:
    """Return answers packed into contexts of ``room`` tokens (cut into one if over ``limit``), and the cut ones."""
    blocks = [format_partial(answer, number) for number, answer in enumerate(answers, start=1)]
    joined = ["\n".join(context) for context in grouped(blocks, [count_tokens(block) + 1 for block in blocks], room)]
    if len(joined) <= max(limit, 1) and all(count_tokens(context) <= room for context in joined):
        return joined, 0
    blocks, cut, part = [], 0, room // len(answers)
    for number, answer in enumerate(answers, start=1):
        kept = cut_to_fit(answer, part - count_tokens(format_partial("", number)) - 1, count_tokens)
        cut += kept != answer
        blocks += [format_partial(kept, number)] if kept else []
    return ["\n".join(blocks)], cut


class Refine(AgenticSynthesizer):
    """Answers from the first passage and refines the answer with each further one, in the order of the nodes.

    The earlier answer is kept if a reply is empty, ``UNCHANGED``, no answer, or cites nothing beside it. Templates:
    ``text_qa_template``, ``refine_template``.
    """

    mode: ClassVar[str] = "refine"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {
        "text_qa_template": ANSWER_TEMPLATE,
        "refine_template": REFINE_TEMPLATE,
    }
    filters_steps = True
    packer: ClassVar[PackerAttribute] = staticmethod(singly)

    async def _compose(self, draft: Draft) -> str:
        draft.so_far = str(draft.variables.pop("prev_response", None) or "")
        if self._filtering:
            draft.output_cls = self._step_cls
        first, refining = self.templates["text_qa_template"], self.templates["refine_template"]
        existing = "word " * min(ANSWER_TOKENS, draft.helper.context_window // 8)

        def arrange(passages: Sequence[Passage], room: int, overlap: float) -> Packed:
            """Pack all passages for one call if possible, else with room for the existing answer."""
            at_once = self.packer(passages, room, overlap)
            later = max(min(room, draft.room(refining, {"existing_answer": existing})), room // 2)
            return at_once if len(at_once.groups) <= 1 else self.packer(passages, later, overlap)

        waiting = deque(await draft.pack(arrange, first, max_calls=MAX_STEPS))
        dispatcher.event(GetResponseStartEvent(query_str=draft.query, text_chunks=list(map(format_passages, waiting))))
        answer = TextAnswer(draft.so_far) if draft.so_far else None
        shown = set[int]()
        while waiting:
            group, template, variables = waiting.popleft(), first, dict[str, str]()
            if answer is not None:
                template, variables = refining, {"existing_answer": as_answer(answer.text)}
                try:
                    group, *later = await draft.pack(self.packer, refining, group, variables=variables)
                except SynthesisError:  # no room: keep the existing answer
                    draft.drop(len(group), "did not fit into the model's window beside the answer so far")
                    continue
                waiting.extendleft(reversed(later))
            variables["context_str" if answer is None else "context_msg"] = format_passages(group)
            shown |= ids_of(group)
            stream = draft.streaming and not waiting
            answer = await self._step(draft, template, shown, answer, variables, stream=stream) or answer
            draft.so_far = "" if answer is None else answer.text
        dispatcher.event(GetResponseEndEvent())
        if answer is None and draft.unreadable and len(draft.unreadable) == draft.calls:
            raise draft.unreadable[-1]  # whether the evidence answers the question is unknown
        draft.result.answerable = answer is not None and answer.answerable
        return self._empty_response if answer is None else answer.text

    async def _step(
        self,
        draft: Draft,
        template: BasePromptTemplate,
        shown: Collection[int],
        earlier: TextAnswer | None,
        variables: Mapping[str, str],
        *,
        stream: bool,
    ) -> TextAnswer | None:
        """Make one call and return its answer; None keeps the earlier one: it is not satisfied, or can't be read."""
        object_before = draft.result.output
        # A program raises the same errors for a reply that it can't read as core expects of its programs.
        unread = UnreadableReplyError if self._program_factory is None else ValueError | TypeError
        try:
            if self._program_factory is None:
                answer = await draft.ask(template, shown, variables, stream=stream, earlier=earlier)
                if not self._filtering:
                    return answer
                made, draft.result.output = draft.result.output, object_before
            else:
                made = await self._programmed(draft, template, shown, variables, self._program_factory)
        except SynthesisError as error:
            cause = error.__cause__
            if self._filtering and isinstance(cause, unread):
                what = f"was not counted as satisfied: {cause}"
                draft.unreadable.append(error)
            elif not self._filtering and earlier is not None and isinstance(cause, LLMError) and cause.empty:
                what = "had an empty reply; the answer before it is kept"
            else:
                raise
            draft.result.warnings.append(f"call {draft.calls} {what}")
            return None
        found = getattr(made, "answer", None) if getattr(made, "query_satisfied", False) else None
        if isinstance(found, BaseModel):
            draft.result.output = found
            return TextAnswer(found.model_dump_json())
        return TextAnswer(str(found)) if found else None

    async def _programmed(
        self,
        draft: Draft,
        template: BasePromptTemplate,
        shown: Collection[int],
        variables: Mapping[str, str],
        factory: ProgramFactory,
    ) -> Any:
        """Run the user's program on a prompt in which, as in core, only the passages are left to fill in."""
        fixed = {name: text for name, text in variables.items() if not name.startswith("context")}
        context = {name: text for name, text in (draft.variables | dict(variables)).items() if name not in fixed}
        program = factory(template.partial_format(query_str=draft.query, **fixed))
        native = partial(program.acall, **context) if type(program).acall is not BasePydanticProgram.acall else None
        what, draft.calls = f"program {type(program).__name__}", draft.calls + 1
        try:
            reply: Any = await Call(sync=partial(program, **context), native=native, deadline=draft.deadline, what=what)
        except DeadlineExceededError:
            raise
        except Exception as error:
            raise failure(error, draft.calls - 1) from error
        if isinstance(getattr(reply, "answer", None), str):
            checked = AnswerFilter(draft.rules(shown)).checked(draft.spotlight.unmarked(reply.answer))
            draft.count_removed(checked)
            reply.answer = checked.text
        return reply

    @cached_property
    def _step_cls(self) -> type[BaseModel]:
        """The class of a step's reply; models generate its fields in this order."""
        satisfied = Field(description="Whether the evidence is enough for an answer that satisfies the question.")
        answer = Field(description="The answer to the question, from the evidence and not from prior knowledge.")
        kind = self._output_cls or str
        return create_model("RefinedAnswer", query_satisfied=(bool, satisfied), answer=(kind, answer))


class Compact(Refine):
    """Packs whole passages in order into as few calls as possible, and refines the answer with each call."""

    mode = "compact"
    packer = staticmethod(pack)


# -- without a language model -----------------------------------------------------------------------------------------


class ExtractiveData(AgenticSynthesizer):
    """Returns a JSON array of ``{"ref_id": 0, "title": ..., "terms": ..., "content": ...}``. Needs no language model.

    The text is limited to ``max_output_tokens`` (default 5,000 if the request has no ``maxOutputDocuments``): passages
    that overflow are truncated at a sentence end, and those that don't fit at all are dropped with a warning.
    """

    mode = "extractiveData"
    needs_llm = False
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
    nothing = ""

    async def _compose(self, draft: Draft) -> str:
        del draft
        return ""


def extract(passages: Sequence[Passage], budget: int) -> tuple[str, Packed]:
    """Return passages as a JSON array of at most ``budget`` tokens, and the numbers of cut and dropped ones."""

    def cost_of(passage: Passage) -> int:
        return count_tokens(_item(passage)) + 1  # and a comma

    packed = fit(passages, budget - count_tokens("[]"), cost_of=cost_of)
    items = [_item(passage) for group in packed.groups for passage in group]
    # The joined text may have more tokens than its items.
    while items and count_tokens(f"[{', '.join(items)}]") > budget:
        items.pop()
        packed.dropped += 1
    return f"[{', '.join(items)}]", packed


def _item(passage: Passage) -> str:
    item = {"ref_id": passage.ref_id, "title": passage.title, "terms": passage.terms, "content": passage.content}
    text = json.dumps({key: value for key, value in item.items() if value is not None}, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates can't be encoded
