"""An answer in the making: what it rests on, what it may spend, and what it has cost so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate
from pydantic import BaseModel

from llama_index_agentic_kb._aio import Call, Job, cancel, emit, start, wait
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.answers import AnswerFilter, AnswerRules, CheckedText, clean_answer
from llama_index_agentic_kb.grounding.citations import cited_ids
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.llm import CUT_SHORT, LanguageModel, Reply, Usage, count_tokens
from llama_index_agentic_kb.prompts import UNANSWERABLE, UNCHANGED, Passage, format_passages, with_instructions
from llama_index_agentic_kb.synthesizers.passages import Packed
from llama_index_agentic_kb.synthesizers.structured import ObjectAsker, read_object

__all__ = ["Draft", "TextAnswer", "Window", "ids_of", "side_by_side"]

MESSAGE_TOKENS: Final = 4
"""What a message costs beside its text."""
SLACK: Final = 64
"""Tokens kept free in each prompt: a model's own tokenizer may count a little more than ours."""
MIN_ROOM: Final = 64
"""Tokens of evidence below which a prompt is not worth sending."""

_SIGNS: Final = " \t\r\n*_`\"'#>"
_OPENING: Final = re.compile(r"[ \t\r\n*_`\"'#>]{0,100}UNANSWERABLE(?!\w)[\s*_`\"':.,;!–—-]{0,100}")  # noqa: RUF001 (dashes)
"""``prompts.UNANSWERABLE`` at the start of a reply, with the signs that models put around it."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class TextAnswer(NamedTuple):
    """The text that a model answered, and whether it answers the question.

    Args:
        text: The answer, without the words that are meant for this library.
        answerable: False where the model says that the evidence does not answer the question.
    """

    text: str
    answerable: bool = True


def read_answer(reply: str, earlier: TextAnswer | None = None) -> TextAnswer:
    """Read a reply for the words that are meant for this library.

    The earlier answer is returned where the reply leaves it as it is: it is the template's word for that, or it has
    no answer where the earlier one is there, or it cites nothing where the earlier answer cites (models that ignore
    the word remark, in any language, that there was nothing to refine).

    Args:
        reply: The whole reply, or its start.
        earlier: The answer that the reply refines.
    """
    opening = _OPENING.match(reply)
    answer = TextAnswer(reply) if opening is None else TextAnswer(reply[opening.end() :], answerable=False)
    if earlier is None:
        return answer
    keeps = (
        _bare(reply) == UNCHANGED.casefold()
        or (earlier.answerable and not answer.answerable)
        or (bool(cited_ids(earlier.text)) and not cited_ids(answer.text))
    )
    return earlier if keeps else answer


def _bare(text: str) -> str:
    return text.strip().strip(".\"'`*").casefold()


class _Gate:
    """Holds the start of a streamed reply back as long as it may yet be a word that is no part of the answer.

    Args:
        earlier: The answer that the reply refines; a reply that may yet leave it as it is stays held back.
    """

    def __init__(self, earlier: TextAnswer | None) -> None:
        self._earlier = earlier
        self._held: str | None = ""

    def feed(self, delta: str) -> str:
        """Return what of the reply can be passed on now."""
        if self._held is None:
            return delta
        self._held += delta
        start = self._held[:100].lstrip(_SIGNS) + self._held[100:]
        if UNANSWERABLE.startswith(start) or _OPENING.fullmatch(self._held):
            return ""
        answer = read_answer(self._held, self._earlier)
        if self._earlier is not None:
            unchanged = UNCHANGED.casefold().startswith(_bare(self._held)) and not cited_ids(self._held)
            if answer is self._earlier or unchanged:
                return ""
        self._held = None
        return answer.text


@dataclass(frozen=True, slots=True)
class Window:
    """How much goes into one call.

    Args:
        tokens: Prompt and reply together.
        reserved: Of these, the reply's.
        largest: The most evidence that a prompt may hold; None is what fits.
    """

    tokens: int
    reserved: int
    largest: int | None = None


@dataclass(slots=True, kw_only=True)
class Draft:
    """One synthesis under way.

    Args:
        model: What answers.
        asker: How it is asked for objects.
        window: How much goes into one call.
        query: The question.
        passages: The evidence; their order is that of the nodes.
        deadline: ``time.monotonic()`` by which the answer must be there; None waits.
        max_output_tokens: The answer's budget; None leaves it to the model.
        variables: Further variables of the templates.
        instructions: The caller's own; none is empty.
        streaming: Whether deltas of the answer are emitted.
        output_cls: The object that is wanted; None wants text.
        asked_cls: The class that prompts must leave room to describe; None is ``output_cls``.
        spotlight: How prompts mark what was retrieved.
        addresses: The addresses that links may lead to; None lets every link through.
    """

    model: LanguageModel
    asker: ObjectAsker
    window: Window
    query: str
    passages: list[Passage]
    deadline: float | None = None
    max_output_tokens: int | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    instructions: str = ""
    streaming: bool = False
    output_cls: type[BaseModel] | None = None
    asked_cls: type[BaseModel] | None = None
    spotlight: Spotlight = PLAIN
    addresses: Collection[str] | None = ()
    output: BaseModel | None = None
    usage: Usage = field(default_factory=Usage)
    dropped: int = 0
    links_removed: int = 0
    """Links that led to no reference, and were taken out of replies."""
    warnings: list[str] = field(default_factory=list)
    emitted: str = ""
    """What was emitted so far: a start of the answer."""
    so_far: str = ""
    """The answer as it stands between two calls: what is left of it where time runs out."""
    cut: bool = False
    """Whether a reply ended before the model was done."""
    answerable: bool = True
    """False where the model says that the evidence does not answer the question."""

    # -- prompts ---------------------------------------------------------------------------------------------------

    def messages(self, template: BasePromptTemplate, **variables: Any) -> list[ChatMessage]:
        """Fill a template in and add what the LLM itself adds to prompts, as core's ``LLM.predict`` does."""
        llm = self.model.llm
        values = {"query_str": self.query, **self.variables, **variables}
        messages = with_instructions(template.format_messages(llm=llm, **values), self.instructions)
        if llm.output_parser is not None:
            messages = llm.output_parser.format_messages(messages)
        return llm._extend_messages(messages)  # noqa: SLF001 (core's own prompt assembly has no public name)

    def room(self, template: BasePromptTemplate, **variables: Any) -> int:
        """Return the tokens of evidence that fit into a template's prompt; may be below 0."""
        nothing = self.spotlight.framed("")
        messages = self.messages(template, **{"context_str": nothing, "context_msg": nothing, **variables})
        asked = self.asked_cls or self.output_cls
        schema = 0 if asked is None else count_tokens(str(asked.model_json_schema()))
        prompt = schema + sum(count_tokens(message.content or "") + MESSAGE_TOKENS for message in messages)
        room = self.window.tokens - self.window.reserved - SLACK - prompt
        return room if self.window.largest is None else min(room, self.window.largest)

    async def pack(
        self,
        packer: Callable[[Sequence[Passage], int], Packed],
        template: BasePromptTemplate,
        passages: Sequence[Passage] | None = None,
        **variables: Any,
    ) -> Packed:
        """Pack passages into prompts of a template and account for what did not fit.

        It is done off the event loop: counting tokens takes its time.

        Args:
            packer: One of ``passages``.
            template: The prompt.
            passages: None is all.
            variables: The template's.

        Raises:
            SynthesisError: Question and template leave no room for any evidence.
        """
        candidates = self.passages if passages is None else passages

        def work() -> Packed:
            room = self.room(template, **variables)
            packed = packer(candidates, room) if room >= MIN_ROOM else Packed()
            if packed.groups:
                return packed
            raise SynthesisError(
                f"question and template leave no room for evidence in the model's window of "
                f"{self.window.tokens} tokens, {self.window.reserved} of them kept for the answer"
            )

        packed: Packed = await Call(sync=work, deadline=self.deadline, what="packing passages")
        self.account(packed, "the model's window")
        return packed

    def account(self, packed: Packed, limit: str) -> None:
        """Count the passages that did not fit into what the limit says, and those that were cut for it."""
        if packed.cut:
            self.warnings.append(f"{packed.cut} passages were cut to fit into {limit}")
        if packed.dropped:
            self.drop(packed.dropped, f"did not fit into {limit}")

    def within_calls(self, packed: Packed, calls: int) -> list[list[Passage]]:
        """Return the groups that so many calls can take; passages that stand in none of them are counted as dropped."""
        groups = packed.groups[:calls]
        beyond = ids_of(packed.kept) - {passage.ref_id for group in groups for passage in group}
        if beyond:
            self.drop(len(beyond), f"are beyond the limit of {calls} calls")
        return groups

    def drop(self, count: int, why: str) -> None:
        """Count passages that are left out."""
        self.dropped += count
        self.warnings.append(f"{count} passages {why} and were left out")

    # -- answers ---------------------------------------------------------------------------------------------------

    async def ask(
        self,
        template: BasePromptTemplate,
        valid: Collection[int],
        *,
        stream: bool = False,
        step: int = 0,
        earlier: TextAnswer | None = None,
        **variables: Any,
    ) -> TextAnswer:
        """Ask the model once and return its answer, its markers and links checked.

        Args:
            template: The prompt.
            valid: The reference ids that the answer may cite.
            stream: Whether its deltas are the whole answer's, and emitted.
            step: Which call it is, from 0, for errors.
            earlier: The answer that this call refines; it is returned where the reply leaves it as it is.
            variables: The template's.

        Raises:
            SynthesisError: The model failed.
            DeadlineExceededError: It did not answer in time.
        """
        messages = self.messages(template, **variables)
        parser = self.model.llm.output_parser
        rules = self.rules(valid)
        answer, gate = AnswerFilter(rules), _Gate(earlier)

        def pass_on(delta: str) -> str:
            clean = gate.feed(answer.feed(self.spotlight.unmarked(delta)))
            self.emitted += clean
            return clean

        try:
            if stream and parser is None:
                reply = await self.model.stream(messages, deadline=self.deadline, through=pass_on, **self._limits())
            else:
                reply = await self.model.chat(messages, deadline=self.deadline, **self._limits())
        except DeadlineExceededError:
            raise
        except Exception as error:
            raise self.failure(error, step, earlier.text if earlier is not None else self.emitted) from error
        self._settle(reply)
        checked = clean_answer(self.spotlight.unmarked(reply.text), rules)
        self.count_removed(checked)
        if parser is not None:
            return TextAnswer(str(parser.parse(checked.text)))
        return read_answer(checked.text, earlier)

    async def ask_object(
        self,
        output_cls: type[M],
        template: BasePromptTemplate,
        valid: Collection[int],
        *,
        step: int = 0,
        so_far: str = "",
        **variables: Any,
    ) -> M:
        """Ask the model once for an object; see ``ask``."""
        messages = self.messages(template, **variables)
        try:
            asking = self.asker.ask(self.model, messages, output_cls, deadline=self.deadline, **self._limits())
            reply = await asking
            made, removed = read_object(reply, output_cls, self.rules(valid), self.spotlight)
        except DeadlineExceededError:
            raise
        except Exception as error:
            raise self.failure(error, step, so_far) from error
        self._settle(reply)
        self.count_removed(removed)
        return made

    async def finish(self, template: BasePromptTemplate, valid: Collection[int], **asked: Any) -> str:
        """Make the last call of an answer: its text is streamed, or its object kept as ``output``.

        Args:
            template: The prompt.
            valid: The reference ids that the answer may cite.
            asked: See ``ask``.
        """
        if self.output_cls is None:
            text, self.answerable = await self.ask(template, valid, stream=self.streaming, **asked)
            return text
        self.output = await self.ask_object(self.output_cls, template, valid, **asked)
        return self.output.model_dump_json()

    async def answer_at_once(
        self, packer: Callable[[Sequence[Passage], int], Packed], template: BasePromptTemplate
    ) -> str:
        """Answer in one call from all passages that a packer keeps."""
        packed = await self.pack(packer, template)
        return await self.finish(template, ids_of(packed.kept), context_str=format_passages(packed.kept))

    async def emit(self, text: str) -> None:
        """Emit a piece of the answer, where it is streamed."""
        if self.streaming:
            self.emitted += text
            await emit(text)

    # -- accounts --------------------------------------------------------------------------------------------------

    def _limits(self) -> dict[str, int]:
        """Return the call arguments that keep the reply within the budget, for models that know them."""
        if self.max_output_tokens is None or "max_tokens" not in type(self.model.llm).model_fields:
            return {}
        return {"max_tokens": self.max_output_tokens}

    def _settle(self, reply: Reply) -> None:
        self.usage.add(reply.usage)
        if reply.cut_short:
            self.cut = True
            self.warnings.append(f"{CUT_SHORT}; its reply is cut")

    def rules(self, valid: Collection[int]) -> AnswerRules:
        """Return what an answer may hold that cites some of the passages."""
        return AnswerRules(valid, self.addresses)

    def count_removed(self, checked: CheckedText) -> None:
        """Warn of what was taken out of a reply."""
        self.links_removed += checked.links
        if checked.markers:
            self.warnings.append(f"{checked.markers} markers naming no passage were removed from the answer")
        if checked.links:
            self.warnings.append(f"{checked.links} links to no reference were removed from the answer")
        if checked.hidden:
            self.warnings.append(f"{checked.hidden} hidden characters were removed from the answer")

    def failure(self, error: Exception, step: int, so_far: str) -> SynthesisError:
        """Return the error of a failed call, and count what it billed all the same."""
        if isinstance(error, LLMError) and isinstance(error.usage, Usage):
            self.usage.add(error.usage)
        known = isinstance(error, AgenticKBError)
        why = error_message(error) if known else f"{type(error).__name__}: {one_line(error_message(error), 200)}"
        return SynthesisError(f"the language model failed at call {step + 1}: {why}", step=step, partial=so_far)


def ids_of(passages: Sequence[Passage]) -> set[int]:
    """Return the reference ids of passages."""
    return {passage.ref_id for passage in passages}


async def side_by_side(
    calls: Sequence[Coroutine[Any, Any, T]], each: Callable[[int, T], Coroutine[Any, Any, None]] | None = None
) -> list[T]:
    """Run calls side by side and return their results in order; the first failure stops the rest and is raised.

    Args:
        calls: Not yet started; each has its own deadline.
        each: Run with each position and result, in order, as soon as it and those before it are there.
    """
    jobs = [start(call) for call in calls]
    results: list[T] = []
    try:
        while len(results) < len(jobs):
            await wait([job for job in jobs if not job.done], first=True)
            _raise_first([job for job in jobs if job.done])
            while len(results) < len(jobs) and jobs[len(results)].done:
                results.append(jobs[len(results)].result())
                if each is not None:
                    await each(len(results) - 1, results[-1])
    except Exception:
        for job in jobs:
            if not job.done:
                await cancel(job)
        raise
    return results


def _raise_first(done: Sequence[Job[T]]) -> None:
    for job in done:
        job.result()
