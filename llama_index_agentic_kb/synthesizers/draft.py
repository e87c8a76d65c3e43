"""The state of one synthesis: its evidence, its limits, its model calls and its result so far; objects as replies.

Objects are requested in the strictest form that a model supports, parsed leniently, and validated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ValidationError

from llama_index_agentic_kb._aio import Call, cancel, emit, start, wait
from llama_index_agentic_kb._text import error_message, one_line
from llama_index_agentic_kb._types import JsonObject, Work
from llama_index_agentic_kb.errors import AgenticKBError, DeadlineExceededError, LLMError, SynthesisError
from llama_index_agentic_kb.grounding.citations import AnswerFilter, AnswerRules, CheckedText, cited_ids, clean_values
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight
from llama_index_agentic_kb.llm import (
    CUT_SHORT,
    LanguageModel,
    Reply,
    count_tokens,
    is_function_calling,
    parsed,
    read_json,
    refuses_form,
    strip_code_fence,
    structured_output,
    takes_schema,
)
from llama_index_agentic_kb.prompts import UNANSWERABLE, UNCHANGED, Passage, with_instructions
from llama_index_agentic_kb.synthesizers.passages import Packed, Packer

MESSAGE_TOKENS: Final = 4  # overhead of a message in tokens, in addition to its text
SLACK: Final = 64  # tokens to leave free in each prompt, since the model's tokenizer may count slightly more than ours
MIN_ROOM: Final = 64  # minimum space for evidence in a prompt, in tokens

_SIGNS: Final = " \t\r\n*_`\"'#>"
_OPENING: Final = re.compile(r"[ \t\r\n*_`\"'#>]{0,100}UNANSWERABLE(?!\w)[*_`\"':.,;!]{0,50}[\s:–—-]{0,100}")  # noqa: RUF001 (dashes)
"""``prompts.UNANSWERABLE`` at the start of a reply, with the punctuation that models put around it.

A quotation mark after a space opens the text that follows, and is kept.
"""

_KEYWORDS: Final = ("default", "title", "examples")
"""JSON schema keywords to remove: OpenAI's strict mode rejects them, or they only cost tokens."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(slots=True)
class Synthesis:
    """The result of a synthesis: the answer with its ``[ref_id:N]`` markers, or the extracted data as JSON."""

    text: str
    output: BaseModel | None = None  # the validated object if ``output_cls`` is set; ``text`` is then its JSON
    dropped: int = 0  # the number of passages that did not fit into the budget or the context window
    warnings: list[str] = field(default_factory=list)
    cut: bool = False  # whether any reply was truncated by the model, so that the text may end too early
    links_removed: int = 0
    answerable: bool = True  # False if the model says that the evidence does not answer; the text says what is missing
    lacking: str = ""  # the reason why the text is only a partial answer, or extracted data in its place; else empty
    is_extract: bool = False

    @property
    def content(self) -> str | BaseModel:
        """The object if there is one, else the text."""
        return self.text if self.output is None else self.output


MAX_CLEANED_INLINE: Final = 50_000  # characters of an answer that is cleaned on the event loop: at worst 0.1 s


class TextAnswer(NamedTuple):
    """A model's answer without the control words of the prompt (``UNANSWERABLE``, ``UNCHANGED``)."""

    text: str
    answerable: bool = True


def read_answer(reply: str, earlier: TextAnswer | None = None) -> TextAnswer:
    """Parse a reply, or its start.

    ``earlier`` is returned if the reply is UNCHANGED or no answer, or lacks citations, which ``earlier`` has.
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


@dataclass(slots=True)
class _Gate:
    """Buffers the start of a streamed reply while it may be a control word or leave the ``earlier`` answer."""

    _earlier: TextAnswer | None
    _held: str | None = ""

    def feed(self, delta: str) -> str:
        """Return the part of the reply that can be emitted now."""
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


@dataclass(slots=True, kw_only=True)
class Draft:
    """The state of one running synthesis."""

    model: LanguageModel
    refused: set[str]  # the forms of objects that the model has rejected; shared by all syntheses of a synthesizer
    helper: PromptHelper  # the sizes of prompts in tokens
    reserved: int  # tokens of the context window that are kept for the reply
    query: str
    passages: list[Passage]
    deadline: float | None = None
    max_output_tokens: int | None = None
    variables: JsonObject = field(default_factory=dict)  # further variables of the templates
    instructions: str = ""
    streaming: bool = False
    output_cls: type[BaseModel] | None = None
    spotlight: Spotlight = PLAIN
    result: Synthesis = field(default_factory=partial(Synthesis, ""))
    calls: int = 0  # the number of model calls begun
    unreadable: list[SynthesisError] = field(default_factory=list)  # of replies that were skipped
    emitted: str = ""  # the text emitted so far, a prefix of the answer
    so_far: str = ""  # the answer after the last completed call, used as partial answer on a timeout

    def messages(self, template: BasePromptTemplate, variables: Mapping[str, str]) -> list[ChatMessage]:
        """Format a template and add the LLM's own system prompt and output format, as core's ``LLM.predict`` does."""
        llm = self.model.llm
        values = {"query_str": self.query, **self.variables, **variables}
        messages = template.format_messages(llm=llm, **values)
        if self.instructions.strip():
            messages = with_instructions(messages, self.instructions)
        if llm.output_parser is not None:
            messages = llm.output_parser.format_messages(messages)
        return llm._extend_messages(messages)  # noqa: SLF001 (core's own prompt assembly has no public name)

    def room(self, template: BasePromptTemplate, variables: Mapping[str, str]) -> int:
        """Return the number of tokens of evidence that fit into a template's prompt; may be negative."""
        nothing = self.spotlight.framed("")
        prompt = 0 if self.output_cls is None else count_tokens(str(self.output_cls.model_json_schema()))
        for message in self.messages(template, {"context_str": nothing, "context_msg": nothing, **variables}):
            prompt += count_tokens(message.content or "") + MESSAGE_TOKENS
        room, largest = self.helper.context_window - self.reserved - SLACK - prompt, self.helper.chunk_size_limit
        return room if largest is None else min(room, largest)

    async def pack(
        self,
        packer: Packer,
        template: BasePromptTemplate,
        candidates: Sequence[Passage] | None = None,
        *,
        max_calls: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> list[list[Passage]]:
        """Pack passages (all by default) into at most ``max_calls`` prompts; ``SynthesisError`` if none has room."""
        listed = self.passages if candidates is None else candidates

        def work() -> Packed:
            room = self.room(template, variables or {})
            if room >= MIN_ROOM and (packed := packer(listed, room, self.helper.chunk_overlap_ratio)).groups:
                return packed
            raise SynthesisError(
                f"question and template leave no room for evidence in the model's window of "
                f"{self.helper.context_window} tokens, {self.reserved} of them kept for the answer"
            )

        packed = await Call(sync=work, deadline=self.deadline, what="packing passages")  # counting tokens is slow
        if packed.cut or packed.dropped:
            self.count(packed, "the model's window")
        groups = packed.groups[:max_calls]
        if len(groups) < len(packed.groups) and (beyond := ids_of(*packed.groups) - ids_of(*groups)):
            self.drop(len(beyond), f"are beyond the limit of {max_calls} calls")
        return groups

    def count(self, packed: Packed, limit: str) -> None:
        """Add the dropped passages to ``result``, with warnings that name the limit."""
        if packed.cut:
            self.result.warnings.append(f"{packed.cut} passages were cut to fit into {limit}")
        if packed.dropped:
            self.drop(packed.dropped, f"did not fit into {limit}")

    def drop(self, count: int, why: str) -> None:
        """Add dropped passages to ``result``, with a warning."""
        self.result.dropped += count
        self.result.warnings.append(f"{count} passages {why} and were left out")

    async def ask(
        self,
        template: BasePromptTemplate,
        valid: Collection[int],
        variables: Mapping[str, str],
        *,
        stream: bool = False,
        earlier: TextAnswer | None = None,
        as_text: bool = False,
    ) -> TextAnswer:
        """Call the model once and return its answer, which may cite the ``valid`` ids; ``earlier`` if it is unchanged.

        The answer is the JSON of an object of ``output_cls``, set as ``result.output``, unless ``as_text``. If
        streaming, deltas of text are emitted. ``result.answerable`` is that of the last text.
        """
        output_cls, parser, model = None if as_text else self.output_cls, self.model.llm.output_parser, self.model
        rules = self.rules(valid)
        shown, gate = AnswerFilter(rules), _Gate(earlier)

        def pass_on(delta: str) -> str:
            clean = gate.feed(shown.feed(self.spotlight.unmarked(delta)))
            self.emitted += clean
            return clean

        messages, limits = self.messages(template, variables), dict[str, int]()
        if self.max_output_tokens is not None and "max_tokens" in type(model.llm).model_fields:
            limits["max_tokens"] = self.max_output_tokens
        step, self.calls = self.calls, self.calls + 1
        try:
            if output_cls is not None:
                reply = await ask_object(model, messages, output_cls, self.refused, deadline=self.deadline, **limits)
            elif stream and parser is None:
                reply = await model.stream(messages, deadline=self.deadline, through=pass_on, **limits)
            else:
                reply = await model.chat(messages, deadline=self.deadline, **limits)
            checked = await self._read(reply, output_cls, rules)
        except DeadlineExceededError:
            raise
        except Exception as error:
            raise failure(error, step) from error
        if checked.markers or checked.links or checked.hidden:
            self.count_removed(checked)
        if output_cls is not None:
            answer = TextAnswer(checked.text)
        elif parser is not None:
            answer = TextAnswer(str(parser.parse(checked.text)))
        else:
            answer = read_answer(checked.text, earlier)
        self.result.answerable = answer.answerable
        return answer

    async def _read(self, reply: Reply, output_cls: type[BaseModel] | None, rules: AnswerRules) -> CheckedText:
        """Return the text of a reply, or the JSON of its object, without what ``rules`` exclude; note what was cut."""
        self.result.cut |= reply.cut_short
        self.result.warnings += [f"{CUT_SHORT}; its reply is cut"] if reply.cut_short else []
        thoughts = f"{reply.thoughts} characters of thoughts were left out of the reply"
        self.result.warnings += [thoughts] if reply.thoughts else []
        if output_cls is None:
            clean = partial(_cleaned, self.spotlight.unmarked(reply.text), rules)
            return await parsed(clean, reply.text, deadline=self.deadline, max_inline=MAX_CLEANED_INLINE)
        read = partial(read_object, reply, output_cls, rules, self.spotlight)
        made, checked = await parsed(read, reply.text or str(reply.tool_arguments), deadline=self.deadline)
        self.result.output = made
        return replace(checked, text=made.model_dump_json())

    async def emit(self, text: str) -> None:
        """Emit a piece of the answer if streaming."""
        if self.streaming and text:
            self.emitted += text
            await emit(text)

    def rules(self, valid: Collection[int]) -> AnswerRules:
        """Return which ids an answer may cite, and the URLs it may link to."""
        return AnswerRules(valid, set(filter(None, map(attrgetter("url"), self.passages))))

    def count_removed(self, checked: CheckedText) -> None:
        """Add the removed links to ``result``, with warnings for all removed content."""
        self.result.links_removed += checked.links
        markers, links, hidden = "markers naming no passage", "links to no reference", "hidden characters"
        for number, what in ((checked.markers, markers), (checked.links, links), (checked.hidden, hidden)):
            if number:
                self.result.warnings.append(f"{number} {what} were removed from the answer")


def _cleaned(text: str, rules: AnswerRules) -> CheckedText:
    checked = AnswerFilter(rules).checked(text)
    if not checked.text.strip():
        raise LLMError("the model's reply is empty: a fence, hidden characters or unknown markers", empty=True)
    return checked


def ids_of(*groups: Sequence[Passage]) -> set[int]:
    """Return the reference ids of passages."""
    return set(map(attrgetter("ref_id"), chain.from_iterable(groups)))


async def side_by_side(calls: Sequence[Work[T]], each: Callable[[int, T], Awaitable[None]]) -> list[T]:
    """Run calls concurrently and return their results; a failure cancels the rest.

    ``each`` is called with the position and result of each call, in the order of the calls.
    """
    jobs, is_done = list(map(start, calls)), attrgetter("done")
    try:
        for position, job in enumerate(jobs):
            while not job.done:
                await wait(list(filterfalse(is_done, jobs)), first=True)
                for ended in filter(is_done, jobs):
                    ended.result()  # raises what a later call has raised
            await each(position, job.result())
    except Exception:
        for job in filterfalse(is_done, jobs):
            await cancel(job)
        raise
    return [job.result() for job in jobs]


# -- objects ----------------------------------------------------------------------------------------------------------


def failure(error: Exception, step: int) -> SynthesisError:
    """Return the error of a synthesis whose model call failed."""
    why = error_message(error)
    why = why if isinstance(error, AgenticKBError) else f"{type(error).__name__}: {one_line(why, 200)}"
    return SynthesisError(f"the language model failed at call {step + 1}: {why}", step=step)


class UnreadableReplyError(LLMError):
    """A model's reply contains no valid object of the requested class."""


async def ask_object(
    model: LanguageModel,
    messages: Sequence[ChatMessage],
    output_cls: type[BaseModel],
    refused: set[str],
    *,
    deadline: float | None,
    **limits: int,
) -> Reply:
    """Request an object by JSON schema, else by a tool call, else in words; use ``read_object`` to parse the reply.

    A rejected form is not used again: it is added to ``refused`` once a plainer one has worked.
    """
    name = re.sub(r"\W+", "_", output_cls.__name__)[:64]  # names of generic classes have brackets
    strict = strict_schema(output_cls)
    schema = structured_output(name, strict) if strict is not None and takes_schema(model.llm) else None
    rejected: set[str] = set()
    for form, can in (("schema", schema is not None), ("tool", is_function_calling(model.llm))):
        if not can or form in refused:
            continue
        try:
            if form == "tool":
                about = output_cls.__doc__ or "Give the answer."
                # Only the arguments of the tool call are used.
                tool = FunctionTool.from_defaults(lambda **_: None, name=name, description=about, fn_schema=output_cls)
                reply = await model.call_tool(messages, tool, deadline=deadline, **limits)
            else:
                reply = await model.chat(messages, deadline=deadline, **(schema or {}), **limits)
        except Exception as error:
            if not refuses_form(error):
                raise
            rejected.add(form)
        else:
            refused.update(rejected)
            return reply
    reply = await model.chat(in_words(messages, output_cls), deadline=deadline, **limits)
    refused.update(rejected)
    return reply


def in_words(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return the messages with the JSON schema of the object added to the last user message."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    wish = f"\n\nReply with one JSON object and nothing else. It must fit this JSON schema:\n{schema}"
    *before, last = messages
    if last.role is not MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, content=wish.strip())]
    return [*before, ChatMessage(role=MessageRole.USER, content=(last.content or "") + wish)]


def strict_schema(output_cls: type[BaseModel]) -> JsonObject | None:
    """Return the JSON schema of a class for OpenAI's strict mode; None if it can't be expressed there."""
    schema = output_cls.model_json_schema()
    strict = _strict(schema) if _closed(schema) else None
    return strict if isinstance(strict, dict) else None


def _closed(schema: object) -> bool:
    """Return whether no object of a JSON schema accepts keys that the schema does not list."""
    if isinstance(schema, list):
        return all(map(_closed, schema))
    if not isinstance(schema, dict):
        return True
    free = schema.get("type") == "object" and ("properties" not in schema or schema.get("additionalProperties"))
    return not free and all(map(_closed, schema.values()))


def _strict(schema: object, *, names: bool = False) -> object:
    """Return a schema that requires all properties and allows no others; ``names`` means its keys are names."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = [(key, value) for key, value in schema.items() if names or key not in _KEYWORDS]
    made = {key: _strict(value, names=key in ("properties", "$defs") and not names) for key, value in kept}
    if not names and "properties" in made:
        made |= {"required": list(schema["properties"]), "additionalProperties": False}
    return made


def read_object(
    reply: Reply, output_cls: type[M], rules: AnswerRules, spotlight: Spotlight = PLAIN
) -> tuple[M, CheckedText]:
    """Return the object in a reply, without invalid markers and links, and the counts of what was removed.

    Raises:
        UnreadableReplyError: The reply contains no valid object of the class.
    """
    spoken = reply.text if reply.tool_arguments is None else json.dumps(reply.tool_arguments, ensure_ascii=False)
    why = "it holds no JSON object"
    for item in _objects(spotlight.unmarked(spoken)):
        try:
            value, removed = clean_values(item, rules)
            return output_cls.model_validate(value), removed
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        except Exception as error:  # noqa: BLE001 (a validator's own; objects nested too deeply)
            why = f"{type(error).__name__}: {one_line(error_message(error), 200)}"
    message = f"the model's reply is no {output_cls.__name__} ({why}): {one_line(spoken, 80)!r}"
    raise UnreadableReplyError(message, usage=reply.usage)


def _objects(text: str) -> Iterator[JsonObject]:
    """Yield the JSON objects in a text, then the objects nested one level below them."""
    try:
        value = json.loads(strip_code_fence(text))
    except (ValueError, RecursionError):
        value = read_json(text)
    objects = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    yield from objects
    for item in objects:  # {"City": {"name": ...}} is how some models name the class
        yield from (inner for inner in item.values() if isinstance(inner, dict))
