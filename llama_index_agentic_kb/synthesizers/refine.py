"""``refine`` and ``compact``: an answer from the first passages, improved with each further group of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias, cast

from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import BasePydanticProgram
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, Field, create_model

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.answers import clean_answer
from llama_index_agentic_kb.prompts import (
    ANSWER_TEMPLATE,
    REFINE_TEMPLATE,
    Passage,
    as_answer,
    format_passages,
)
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft, TextAnswer, ids_of
from llama_index_agentic_kb.synthesizers.passages import Packed, pack, singly

__all__ = ["Compact", "ProgramFactory", "Refine"]

dispatcher = get_dispatcher(__name__)

ProgramFactory: TypeAlias = Callable[[BasePromptTemplate], BasePydanticProgram[Any]]
"""Makes of a prompt a program that returns an object with ``query_satisfied`` and ``answer``."""

ANSWER_TOKENS: Final = 500
"""Room kept for the answer so far when passages are arranged, as in LlamaIndex; a longer one splits them again."""
MAX_CALLS: Final = 100
"""Calls of one answer; one hostile document must not cost hundreds. Passages beyond are counted as dropped."""


class Refine(AgenticSynthesizer):
    """Answers from the first passage and refines with each further one, in the order of the nodes.

    A reply that is empty, that is the template's word for "nothing changes", that has no answer, or that cites
    nothing where the earlier answer does, keeps the earlier answer. When streaming, the last call's deltas are
    emitted. Templates: ``text_qa_template``, ``refine_template``.

    Args:
        llm: See ``AgenticSynthesizer``.
        structured_answer_filtering: Each step also says whether its passages answer the question; a step that does
            not is skipped, and if none does, the text is that of an empty response.
        program_factory: Makes the programs of these steps, as in LlamaIndex. What they bill is not seen.
        settings: Further arguments of ``AgenticSynthesizer``.

    Raises:
        ConfigurationError: There is a program factory but no structured answer filtering.
    """

    mode: ClassVar[str] = "refine"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {
        "text_qa_template": ANSWER_TEMPLATE,
        "refine_template": REFINE_TEMPLATE,
    }

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        structured_answer_filtering: bool = False,
        program_factory: ProgramFactory | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm, **settings)
        if program_factory is not None and not structured_answer_filtering:
            raise ConfigurationError("program_factory: not supported without structured_answer_filtering=True")
        self._program_factory = program_factory
        self._step_cls = _step_class(self._output_cls) if structured_answer_filtering else None

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        """Return the groups of passages of each call."""
        return singly(passages, room)

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _compose(self, draft: Draft) -> str:
        earlier = draft.variables.pop("prev_response", None)
        draft.asked_cls = self._step_cls
        packed = await self._packed(draft)
        groups = draft.within_calls(packed, MAX_CALLS)
        texts = [format_passages(group) for group in groups]
        dispatcher.event(GetResponseStartEvent(query_str=draft.query, text_chunks=texts))
        run = _Run(draft, deque(groups), None if earlier is None else TextAnswer(str(earlier)))
        while run.waiting:
            await self._next(run)
        dispatcher.event(GetResponseEndEvent())
        draft.output = run.output
        draft.answerable = run.answer is not None and run.answer.answerable
        return self._empty_response if run.answer is None else run.answer.text

    def _packed(self, draft: Draft) -> Coroutine[Any, Any, Packed]:
        """Arrange all passages: for one call where that is enough, else with room for the answer between calls."""
        first, refining = self.templates["text_qa_template"], self.templates["refine_template"]
        answer = "word " * min(ANSWER_TOKENS, draft.window.tokens // 8)

        def arrange(passages: Sequence[Passage], room: int) -> Packed:
            at_once = self._arrange(passages, room)
            later = max(min(room, draft.room(refining, existing_answer=answer)), room // 2)
            return at_once if len(at_once.groups) <= 1 else self._arrange(passages, later)

        return draft.pack(arrange, first)

    async def _next(self, run: _Run) -> None:
        """Take the next group: make one step of it, or split it where it no longer fits beside the answer."""
        group = run.waiting.popleft()
        if run.answer is not None:
            parts = await self._beside_answer(run, group)
            if len(parts) != 1:
                run.waiting.extendleft(reversed(parts))
                return
            group = parts[0]
        run.shown |= ids_of(group)
        step = self._step_of(run, group)
        answer = await (self._text(run, step) if self._step_cls is None else self._filtered(run, step))
        if answer is not None:
            run.answer, run.draft.so_far = answer, answer.text
        run.step += 1

    async def _beside_answer(self, run: _Run, group: list[Passage]) -> list[list[Passage]]:
        """Return a group in as many parts as it needs beside the answer so far; none where there is no room at all."""
        template, answer = self.templates["refine_template"], as_answer(run.so_far)
        try:
            packed = await run.draft.pack(self._arrange, template, group, existing_answer=answer)
        except SynthesisError:  # no room: the answer so far stands
            run.draft.drop(len(group), "did not fit into the model's window beside the answer so far")
            return []
        return packed.groups

    def _step_of(self, run: _Run, group: list[Passage]) -> _Step:
        text = format_passages(group)
        if run.answer is None:
            return _Step(self.templates["text_qa_template"], {"context_str": text})
        variables = {"existing_answer": as_answer(run.so_far), "context_msg": text}
        return _Step(self.templates["refine_template"], variables)

    # -- one step --------------------------------------------------------------------------------------------------

    async def _text(self, run: _Run, step: _Step) -> TextAnswer | None:
        """Return the answer after a step; None keeps the earlier one."""
        asked = {"step": run.step, **step.variables}
        try:
            if self._output_cls is not None:
                run.output = await run.draft.ask_object(
                    self._output_cls, step.template, run.shown, so_far=run.so_far, **asked
                )
                return TextAnswer(run.output.model_dump_json())
            stream = run.draft.streaming and not run.waiting
            return await run.draft.ask(step.template, run.shown, stream=stream, earlier=run.answer, **asked)
        except SynthesisError as error:
            if run.answer is None or not (isinstance(error.__cause__, LLMError) and error.__cause__.empty):
                raise
            run.draft.warnings.append(f"call {run.step + 1} had an empty reply; the answer before it is kept")
            return None

    async def _filtered(self, run: _Run, step: _Step) -> TextAnswer | None:
        """Return the answer after a step that may find its passages unsatisfying; None keeps the earlier one."""
        if self._program_factory is not None:
            reply = await self._programmed(run, step, self._program_factory)
        else:
            assert self._step_cls is not None
            reply = await run.draft.ask_object(
                self._step_cls, step.template, run.shown, step=run.step, so_far=run.so_far, **step.variables
            )
        answer = getattr(reply, "answer", None)
        if not getattr(reply, "query_satisfied", False) or not answer:
            return None
        if isinstance(answer, BaseModel):
            run.output = answer
            return TextAnswer(answer.model_dump_json())
        return TextAnswer(str(answer))

    async def _programmed(self, run: _Run, step: _Step, factory: ProgramFactory) -> Any:
        """Run the user's program; as in core, its prompt has all but the passages filled in."""
        draft = run.draft
        context = {name: text for name, text in step.variables.items() if name.startswith("context")}
        fixed = {name: text for name, text in step.variables.items() if not name.startswith("context")}
        program = factory(step.template.partial_format(query_str=draft.query, **fixed))
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
            raise draft.failure(error, run.step, run.so_far) from error
        if isinstance(getattr(reply, "answer", None), str):
            checked = clean_answer(draft.spotlight.unmarked(reply.answer), draft.rules(run.shown))
            draft.count_removed(checked)
            reply.answer = checked.text
        return reply


@dataclass(slots=True)
class _Run:
    """A chain of steps under way."""

    draft: Draft
    waiting: deque[list[Passage]]
    answer: TextAnswer | None
    output: BaseModel | None = None
    step: int = 0
    shown: set[int] = field(default_factory=set)

    @property
    def so_far(self) -> str:
        return "" if self.answer is None else self.answer.text


@dataclass(frozen=True, slots=True)
class _Step:
    """The prompt of one step."""

    template: BasePromptTemplate
    variables: dict[str, Any]


def _step_class(output_cls: type[BaseModel] | None) -> type[BaseModel]:
    """Return the class of a step's reply. ``query_satisfied`` comes first, as models write in this order."""
    satisfied = Field(description="Whether the evidence is enough for an answer that satisfies the question.")
    answer = Field(description="The answer to the question, from the evidence and not from prior knowledge.")
    made = create_model(
        "RefinedAnswer", query_satisfied=(bool, satisfied), answer=(cast("Any", output_cls or str), answer)
    )
    return cast("type[BaseModel]", made)


class Compact(Refine):
    """Packs passages, whole and in order, into as few calls as fit the window, then refines from call to call."""

    mode = "compact"

    def _arrange(self, passages: Sequence[Passage], room: int) -> Packed:
        return pack(passages, room)
