"""``refine`` and ``compact``: an answer from the first passages, refined with each further group of passages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Final, cast

from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import BasePydanticProgram
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, Field, create_model

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import DeadlineExceededError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.citations import clean_answer
from llama_index_agentic_kb.prompts import ANSWER_TEMPLATE, REFINE_TEMPLATE, Passage, as_answer, format_passages
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer, ProgramFactory
from llama_index_agentic_kb.synthesizers.draft import Draft, TextAnswer, ids_of
from llama_index_agentic_kb.synthesizers.passages import Packed, pack, singly
from llama_index_agentic_kb.synthesizers.structured import UnreadableReplyError

dispatcher = get_dispatcher(__name__)

ANSWER_TOKENS: Final = 500
"""Tokens to reserve for the existing answer when packing, as in LlamaIndex; for longer answers, groups are repacked."""
MAX_CALLS: Final = 100
"""Maximum calls of one answer, to bound the cost of huge documents. Further passages are counted as dropped."""


@dataclass(slots=True)
class _Chain:
    """The state of a refinement: the waiting groups of passages, and the answer so far."""

    draft: Draft
    waiting: deque[list[Passage]]
    answer: TextAnswer | None
    step: int = 0
    shown: set[int] = field(default_factory=set)
    unreadable: list[SynthesisError] = field(default_factory=list)


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
    packs: ClassVar[bool] = False  # whether each step gets as many passages as fit, rather than one

    async def _compose(self, draft: Draft) -> str:
        earlier = draft.variables.pop("prev_response", None)
        draft.asked_cls = self._step_cls if self._filtering else None
        first, refining = self.templates["text_qa_template"], self.templates["refine_template"]
        answer = "word " * min(ANSWER_TOKENS, draft.window // 8)
        packer = pack if self.packs else singly

        def arrange(passages: Sequence[Passage], room: int, overlap: float) -> Packed:
            """Pack all passages for one call if possible, else with room for the existing answer."""
            at_once = packer(passages, room, overlap)
            later = max(min(room, draft.room(refining, existing_answer=answer)), room // 2)
            return at_once if len(at_once.groups) <= 1 else packer(passages, later, overlap)

        groups = await draft.pack(arrange, first, max_calls=MAX_CALLS)
        texts = [format_passages(group) for group in groups]
        dispatcher.event(GetResponseStartEvent(query_str=draft.query, text_chunks=texts))
        chain = _Chain(draft, deque(groups), None if earlier is None else TextAnswer(str(earlier)))
        while chain.waiting:
            await self._next(chain)
        dispatcher.event(GetResponseEndEvent())
        if chain.answer is None and chain.unreadable and len(chain.unreadable) == chain.step:
            raise chain.unreadable[-1]  # whether the evidence answers the question is unknown
        draft.result.answerable = chain.answer is not None and chain.answer.answerable
        return self._empty_response if chain.answer is None else chain.answer.text

    async def _next(self, chain: _Chain) -> None:
        """Run one step with the next group, or split the group if it no longer fits with the existing answer."""
        group = chain.waiting.popleft()
        template, name, variables = self.templates["text_qa_template"], "context_str", dict[str, str]()
        if chain.answer is not None:
            template, name = self.templates["refine_template"], "context_msg"
            so_far = variables["existing_answer"] = as_answer(chain.answer.text)
            try:
                parts = await chain.draft.pack(pack if self.packs else singly, template, group, existing_answer=so_far)
            except SynthesisError:  # no room: keep the existing answer
                chain.draft.drop(len(group), "did not fit into the model's window beside the answer so far")
                return
            if len(parts) != 1:
                chain.waiting.extendleft(reversed(parts))
                return
            (group,) = parts
        variables[name] = format_passages(group)
        chain.shown |= ids_of(group)
        answer = await (self._filtered if self._filtering else self._text)(chain, template, variables)
        if answer is not None:
            chain.answer, chain.draft.so_far = answer, answer.text
        chain.step += 1

    async def _text(self, chain: _Chain, template: BasePromptTemplate, variables: dict[str, str]) -> TextAnswer | None:
        """Run a step and return its answer; None keeps the earlier answer."""
        draft = chain.draft
        try:
            if self._output_cls is not None:
                draft.result.output = await draft.ask_object(
                    self._output_cls, template, chain.shown, step=chain.step, earlier=chain.answer, **variables
                )
                return TextAnswer(draft.result.output.model_dump_json())
            stream = draft.streaming and not chain.waiting
            return await draft.ask(
                template, chain.shown, stream=stream, step=chain.step, earlier=chain.answer, **variables
            )
        except SynthesisError as error:
            if chain.answer is None or not (isinstance(error.__cause__, LLMError) and error.__cause__.empty):
                raise
            draft.result.warnings.append(f"call {chain.step + 1} had an empty reply; the answer before it is kept")
            return None

    async def _filtered(
        self, chain: _Chain, template: BasePromptTemplate, variables: dict[str, str]
    ) -> TextAnswer | None:
        """Run a step with structured answer filtering and return its answer; None keeps the earlier answer."""
        draft, factory = chain.draft, self._program_factory
        try:
            reply: object = (
                await self._programmed(chain, template, variables, factory)
                if factory is not None
                else await draft.ask_object(
                    self._step_cls, template, chain.shown, step=chain.step, earlier=chain.answer, **variables
                )
            )
        except SynthesisError as error:
            # A program raises the same errors for a reply that it can't read as core expects of its programs.
            if not isinstance(error.__cause__, UnreadableReplyError if factory is None else ValueError | TypeError):
                raise
            draft.result.warnings.append(f"call {chain.step + 1} was not counted as satisfied: {error.__cause__}")
            chain.unreadable.append(error)
            return None
        answer = getattr(reply, "answer", None)
        if not getattr(reply, "query_satisfied", False) or not answer:
            return None
        if isinstance(answer, BaseModel):
            draft.result.output = answer
            return TextAnswer(answer.model_dump_json())
        return TextAnswer(str(answer))

    async def _programmed(
        self, chain: _Chain, template: BasePromptTemplate, variables: dict[str, str], factory: ProgramFactory
    ) -> object:
        """Run the user's program on a prompt in which, as in core, only the passages are left to fill in."""
        draft = chain.draft
        context = {name: text for name, text in variables.items() if name.startswith("context")}
        fixed = {name: text for name, text in variables.items() if not name.startswith("context")}
        program = factory(template.partial_format(query_str=draft.query, **fixed))
        awaits = type(program).acall is not BasePydanticProgram.acall
        try:
            reply: Any = await Call(
                sync=partial(program, **context, **draft.variables),
                native=partial(program.acall, **context, **draft.variables) if awaits else None,
                deadline=draft.deadline,
                what=f"program {type(program).__name__}",
            )
        except DeadlineExceededError:
            raise
        except Exception as error:
            raise draft.failure(error, chain.step, chain.answer) from error
        if isinstance(getattr(reply, "answer", None), str):
            checked = clean_answer(draft.spotlight.unmarked(reply.answer), draft.rules(chain.shown))
            draft.count_removed(checked)
            reply.answer = checked.text
        return reply

    @cached_property
    def _step_cls(self) -> type[BaseModel]:
        """The class of a step's reply; models generate its fields in this order."""
        satisfied = Field(description="Whether the evidence is enough for an answer that satisfies the question.")
        answer = Field(description="The answer to the question, from the evidence and not from prior knowledge.")
        made = create_model(
            "RefinedAnswer", query_satisfied=(bool, satisfied), answer=(cast("Any", self._output_cls or str), answer)
        )
        return cast("type[BaseModel]", made)


class Compact(Refine):
    """Packs whole passages in order into as few calls as possible, and refines the answer with each call."""

    mode = "compact"
    packs = True
