"""One turn of a conversation with tools: which tool is asked for, with which arguments, and what has to be asked first.

    message ─▶ confirmed or declined? ─▶ tool and arguments ─▶ missing: ask · changes something: ask · else: call

A model chooses the tool and reads its arguments, in a call whose prompt has the user's messages and nothing else: no
retrieved text, no answers. Without a model the words of the tools' examples choose it, and the schema's options,
patterns and types find the arguments where they are unambiguous. Either way an argument counts only if the user wrote
it, and it fits the tool's schema.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from pydantic import JsonValue

from llama_index_agentic_kb._aio import Call, start, wait
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb.account import current_budget
from llama_index_agentic_kb.errors import DeadlineExceededError, DeniedError, PlanningError, SourceUnavailableError
from llama_index_agentic_kb.evidence.candidates import Proof
from llama_index_agentic_kb.guard.links import LinkFilter
from llama_index_agentic_kb.guard.permissions import current_principal
from llama_index_agentic_kb.guard.text import strip_invisible
from llama_index_agentic_kb.llm import parsed, read_json
from llama_index_agentic_kb.planning.planner import ModelCall, Task
from llama_index_agentic_kb.planning.rounds import PlanOutcome, search_question
from llama_index_agentic_kb.schema import (
    DialogueStage,
    DialogueState,
    PendingWrite,
    QueryPlan,
    ReasoningEffort,
    SubQuery,
    SubQueryOrigin,
    TopicShift,
)
from llama_index_agentic_kb.search.tokenizing import detect_language, query_terms, split_words
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.fan_out import FanOut, SourceSearch
from llama_index_agentic_kb.sources.tool import IDEMPOTENCY_KEY, Parameter, ToolSource, WriteRecord, digest_of

TOOL_SECONDS: Final = 20.0  # for the model's choice of a tool, or a quarter of the retrieval time if that is less
MAX_MESSAGES: Final = 10  # the number of the user's last messages that are read for arguments
MAX_SCHEMA: Final = 2_000  # the maximum number of characters of a tool's schema in the prompt
MAX_ANSWER: Final = 200  # the maximum characters of a message that is taken as a whole for the value asked for

_YES: Final = re.compile(
    r"y|yes|yep|yeah|yes please|please do|(i )?confirm(ed)?|ok|okay|sure|do it|go ahead|ja|oui|s[ií]"
)
_NO: Final = re.compile(r"n|no|nope|no thanks|cancel|stop|don't|do not|never ?mind|forget it|rather not|nein|non")
_TOKEN: Final = re.compile(r"(confirm|cancel)\s+([\w-]{16,64})", re.IGNORECASE)
_CHANGE: Final = re.compile(
    r"(?:never ?mind|forget (?:it|that|about it)|scrap that)\b[\s,.;:!-]*"
    r"|(?:cancel(?: that| it)?|stop|drop it|leave it)\s*(?:$|[,.;:!]+\s*)",
    re.IGNORECASE,
)
_ASKS: Final = re.compile(
    r"(?:who|what|which|where|when|why|how|is|are|was|were|do|does|did|can|could|will|would|should|tell|show|explain)\b"
    r"|.*\?\s*$",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """What a turn does."""

    state: DialogueState | None  # the state of the conversation after the turn; None if there are no tools
    reply: str = ""  # what is said in place of an answer; empty if there is an answer to look for
    call: SubQuery | None = None  # the call to make
    write: PendingWrite | None = None  # the confirmed call, if ``call`` changes something
    documents: bool = True  # whether the other sources are searched
    warning: str = ""  # what the plan's warnings say of the turn: a failure of the model's choice, a change of mind


@dataclass(slots=True)
class _Choice(ModelCall):
    """A chosen tool with the arguments that were read; ``tool`` is None if no tool is asked for."""

    tool: ToolSource | None = None
    arguments: Arguments = field(default_factory=dict)


Tools = Mapping[str, ToolSource]
Arguments = dict[str, JsonValue]
_WAITING: Final = (DialogueStage.ASKING, DialogueStage.CONFIRMING)


async def take_turn(task: Task, before: DialogueState | None, tools: Tools) -> ToolTurn:
    """Return what the last message means for the tools that the principal may call, after the state ``before``."""
    scope, old = task.scope, before or DialogueState()
    state = old.model_copy(update={"turn": old.turn + 1, "question": None, "shift": None, "pending": None})
    agreed = None if old.pending is None else _agreed(scope.question, old.pending)
    if old.pending is not None and agreed is not None:
        return _decided(state, old.pending, tools, agreed=agreed)
    change = _CHANGE.match(scope.question.strip())
    if change is not None and not scope.question.strip()[change.end() :].strip():
        left = _moved(state, None, tools, scope.question)
        return ToolTurn(left, reply=_left(old, left) or "All right.", documents=False)
    choice = await _chosen(task, [*_said(task, old.topic)[-MAX_MESSAGES:], scope.question], state, tools)
    turn = _next(choice, old, state, tools, scope.question)
    failed = "" if choice.error is None else f"no model chose among the tools: {error_message(choice.error)}"
    return replace(turn, warning="; ".join(filter(None, (failed, _left(old, turn.state)))))


def _said(task: Task, topic: str) -> list[str]:
    """Return the user's earlier messages, of the present topic if one was begun; no answers: they are of passages."""
    said = [text for role, text in task.scope.history if role == "user"]
    starts = [position for position, text in enumerate(said) if text.strip() == topic] if topic else [0]
    return said[starts[-1] :] if starts else []


async def _chosen(task: Task, messages: Sequence[str], state: DialogueState, tools: Tools) -> _Choice:
    """Return the choice of the model, or of the examples if there is no model, or if it failed."""
    choice, with_model = _Choice(), task.model is not None and task.effort is not ReasoningEffort.MINIMAL
    if with_model and tools:
        await _choose(choice, task, messages, state, tools)
    if not with_model or choice.error is not None:
        work = partial(_match, choice, messages, state, tools)
        await Call(sync=work, what="choosing a tool by its examples")  # off the loop: patterns, many messages
    return choice


def _next(choice: _Choice, old: DialogueState, state: DialogueState, tools: Tools, message: str) -> ToolTurn:
    """Return the turn for a choice: ask for arguments, ask for confirmation, call the tool, or leave the tools."""
    tool = choice.tool
    if tool is None:
        return ToolTurn(_moved(state, None, tools, message))
    if state.tool != tool.name:
        state = _moved(state, tool, tools, message)
    state = _filled(state, tool, choice.arguments)
    if state.missing:
        parts = "; ".join(_named(tool.parameters[name]) for name in state.missing)
        wanted = f"For {tool.name.replace('_', ' ')}, please tell: {parts}."
        return _question(state, DialogueStage.ASKING, " ".join(filter(None, (_left(old, state), wanted))))
    arguments: Arguments = {name: state.slots[name] for name in tool.parameters if name in state.slots}
    if tool.writes is not None:
        return _confirmation(state, tool, arguments)
    done = state.model_copy(update={"stage": DialogueStage.DONE})
    # A message that only gives what was asked for is no question for the documents.
    answers = old.stage is DialogueStage.ASKING and old.tool == tool.name
    return ToolTurn(done, call=_call(tool, arguments), documents=not answers)


def _filled(state: DialogueState, tool: ToolSource, given: Mapping[str, JsonValue]) -> DialogueState:
    """Return the state with a tool's arguments, known and ``given``, and the required ones that are missing."""
    known = {**_fitting(tool, state.slots), **given}
    slots = {name: value for name, value in known.items() if value is not None}
    missing = tuple(name for name, one in tool.parameters.items() if one.required and name not in slots)
    return state.model_copy(update={"tool": tool.name, "slots": slots, "missing": missing})


def _named(parameter: Parameter) -> str:
    options = ", ".join(map(str, parameter.options[:10]))
    return f"{parameter.label} ({options})" if options else parameter.label


def _confirmation(state: DialogueState, tool: ToolSource, arguments: Arguments) -> ToolTurn:
    asked_of = digest_of(current_principal())
    pending = PendingWrite(token=secrets.token_urlsafe(18), tool=tool.name, arguments=arguments, asked_of=asked_of)
    given = "; ".join(f"{name}: {one_line(str(value))}" for name, value in arguments.items())
    about = one_line(tool.description, 150)
    asked = f"{about.rstrip('.')}? ({given})" if given else f"{about}?"
    return _question(state, DialogueStage.CONFIRMING, f"{asked} Reply yes to confirm, or no to cancel.", pending)


def _call(tool: ToolSource, arguments: Mapping[str, JsonValue]) -> SubQuery:
    text = json.dumps(arguments, ensure_ascii=False)
    return SubQuery(id="t1", query=text, sources=[tool.name], origin=SubQueryOrigin.TOOL)


def _question(state: DialogueState, stage: DialogueStage, text: str, pending: PendingWrite | None = None) -> ToolTurn:
    """Return a turn that asks, without links and invisible characters: a server's descriptions are in the text."""
    links = LinkFilter(())
    question = links.feed(strip_invisible(text), final=True)
    asking = state.model_copy(update={"stage": stage, "question": question, "pending": pending})
    return ToolTurn(asking, reply=question, documents=False)


# -- confirmations ----------------------------------------------------------------------------------------------------


def _agreed(message: str, pending: PendingWrite) -> bool | None:
    """Return whether a message confirms (True) or declines (False) a pending call; None if it does neither."""
    token = _TOKEN.fullmatch(message.strip())
    if token is not None:
        same = secrets.compare_digest(token[2].encode(), pending.token.encode())
        return token[1].casefold() == "confirm" if same else None
    words = " ".join(re.findall(r"[\w']+", normalize(message)))
    return True if _YES.fullmatch(words) else False if _NO.fullmatch(words) else None


def _decided(state: DialogueState, pending: PendingWrite, tools: Tools, *, agreed: bool) -> ToolTurn:
    """Return the turn that calls the tool of a confirmed call, or declines the call."""
    tool = tools.get(pending.tool)
    state = state.model_copy(update={"stage": DialogueStage.DONE, "missing": ()})
    if not agreed:
        return ToolTurn(state, reply=f"Cancelled: {pending.tool} was not called.", documents=False)
    fits = tool is not None and all(_takes(tool, name, value) for name, value in pending.arguments.items())
    if tool is None or tool.writes is None or not fits:
        return ToolTurn(state, reply=f"{pending.tool} is not available; it was not called.", documents=False)
    if digest_of(current_principal()) != pending.asked_of:
        raise DeniedError(f"source {pending.tool!r}: another principal was asked to confirm the call")
    key = {IDEMPOTENCY_KEY: pending.token} if tool.takes_key else {}
    return ToolTurn(state, call=_call(tool, {**pending.arguments, **key}), write=pending, documents=False)


def _moved(state: DialogueState, to: ToolSource | None, tools: Tools, message: str) -> DialogueState:
    """Return the state after a turn to another tool, or to none; arguments that another tool takes too are kept."""
    if state.tool is None:
        return state.model_copy(update={"stage": DialogueStage.OPEN})
    others = [tool for name, tool in tools.items() if name != state.tool]
    kept = {name: value for name, value in state.slots.items() if any(_takes(tool, name, value) for tool in others)}
    if to is not None:
        kept = _fitting(to, kept)
    shift = TopicShift(
        from_tool=state.tool,
        to_tool=None if to is None else to.name,
        cleared=tuple(name for name in state.slots if name not in kept),
        kept=tuple(kept),
    )
    update = {"stage": DialogueStage.OPEN, "tool": None, "slots": kept, "missing": (), "shift": shift}
    return state.model_copy(update={**update, "topic": message.strip()[:MAX_SCHEMA]})


def _takes(tool: ToolSource, name: str, value: JsonValue) -> bool:
    with suppress(ValueError):
        return name in tool.parameters and tool.parameters[name].read(value) == value
    return False


def _fitting(tool: ToolSource, values: Mapping[str, JsonValue]) -> Arguments:
    """Return the values but those that a parameter of the tool does not take."""
    return {name: one for name, one in values.items() if name not in tool.parameters or _takes(tool, name, one)}


def _left(old: DialogueState, state: DialogueState | None) -> str:
    """Return a sentence on a tool that was left before it was called; empty if none was."""
    if state is None or state.shift is None or old.stage not in _WAITING:
        return ""
    kept = ", ".join(f"{name}: {one_line(str(state.slots[name]))}" for name in state.shift.kept if name in state.slots)
    return f"All right, no {state.shift.from_tool.replace('_', ' ')}" + (f" (kept: {kept})." if kept else ".")


async def _choose(choice: _Choice, task: Task, messages: Sequence[str], state: DialogueState, tools: Tools) -> None:
    """Ask the model for a tool and its arguments; those that the user did not write, or that don't fit, are dropped."""
    models, deadline = task.model, current_budget().retrieval_share(0.25, TOOL_SECONDS)
    assert models is not None
    lines = "\n".join(map(_described, tools.values()))
    current = f"{state.tool} {json.dumps(state.slots, ensure_ascii=False)}" if state.tool in tools else "nothing"
    said = [f"{number}: {one_line(text, 2_000)}" for number, text in enumerate(messages, start=1)]
    prompt = models.messages("tool_prompt", tools=lines, current=current, messages="\n".join(said))
    with choice.recorded(task.log, models, "tool"):
        reply = await models.model.chat(prompt, deadline=deadline)
        choice.usage = reply.usage
        name, given = await parsed(partial(read_choice, reply.text), reply.text, deadline=deadline)
        choice.tool = tools.get(name)
        words = {*re.findall(r"\w+", normalize("\n".join([*messages, *map(str, state.slots.values())])))}
        parameters = {} if choice.tool is None else choice.tool.parameters
        for name, value in given.items():
            parameter, parts = parameters.get(name), re.findall(r"\w+", normalize(str(value)))
            if parameter is not None and (parameter.derived or (parts and words.issuperset(parts))):
                with suppress(ValueError):
                    choice.arguments[name] = parameter.read(value)


def _described(tool: ToolSource) -> str:
    properties = {name: {**one.schema, "required": one.required} for name, one in tool.parameters.items()}
    schema = json.dumps(properties, ensure_ascii=False)[:MAX_SCHEMA]
    return f"- {tool.name}: {one_line(tool.description, 400)} Parameters: {schema}"


def read_choice(text: str) -> tuple[str, dict[str, object]]:
    """Return the chosen tool's name ("" for none) and arguments; raise ``PlanningError`` if there is no choice."""
    value = read_json(text)
    if not isinstance(value, dict) or "tool" not in value:
        raise PlanningError(f"the model's reply holds no choice of a tool: {one_line(text[:400], 80)!r}")
    given = value.get("arguments")
    return str(value["tool"] or ""), given if isinstance(given, dict) else {}


# -- the choice without a model ---------------------------------------------------------------------------------------


def _match(choice: _Choice, messages: Sequence[str], state: DialogueState, tools: Tools) -> None:
    """Choose by the words of the tools' examples; a message that gives what was asked for belongs to the same tool."""
    message, current = messages[-1].strip(), tools.get(state.tool or "")
    change = _CHANGE.match(message)
    if change is not None:
        message, current = message[change.end() :], None
    found = {} if current is None else _found(current, [message], state.slots)
    is_awaited = state.stage in _WAITING
    has_value = bool(found)
    is_statement = _ASKS.match(message) is None
    # Two of the three decide that it is an answer; if all hold, only a whole example in it means a tool.
    is_answer = sum((is_awaited, has_value, is_statement)) > 1
    asked = _asked_for(message, tools, whole=is_awaited and has_value and is_statement)
    if current is not None and current in asked:
        asked = [current]
    if len(asked) == 1:
        choice.tool = asked[0]
        choice.arguments = _found(asked[0], messages, state.slots)
    elif current is not None and not asked and is_answer:
        choice.tool, choice.arguments = current, _answer(current, message, found, state.missing)


def _answer(tool: ToolSource, message: str, found: Arguments, missing: Sequence[str]) -> Arguments:
    """Return the arguments in an answer, of which those were ``found`` that are not ambiguous."""
    if answer := _in_order(tool, message, missing):
        return {name: value for name, value in found.items() if value is not None} | answer
    if not found and len(missing) == 1 and len(message) <= MAX_ANSWER:
        asked_for = tool.parameters.get(missing[0])
        if asked_for is not None and asked_for.free:  # any text: the whole message is its value
            return {asked_for.name: message}
    return found


def _asked_for(message: str, tools: Tools, *, whole: bool) -> list[ToolSource]:
    """Return the tools one of whose examples stands in a message by its content words, or ``whole``."""
    # Examples with more content words win, and of these, those all of whose words stand there.
    said, best = {*split_words(message)}, dict[str, tuple[int, bool]]()

    def stems(text: str, language: str) -> set[str]:
        return {form for forms in query_terms(text, [language], language) for form in forms}

    for tool in tools.values():
        for example in tool.examples:
            words = split_words(example)
            language = detect_language(words)
            wanted = stems(example, language)
            stands = said.issuperset(words)
            if wanted and wanted <= stems(message, language) and (stands or not whole):
                best[tool.name] = max(best.get(tool.name, (0, False)), (len(wanted), stands))
    return [tools[name] for name, rank in best.items() if rank == max(best.values())]


def _found(tool: ToolSource, messages: Sequence[str], known: Mapping[str, JsonValue]) -> Arguments:
    """Return the arguments that stand in the messages; None for one that is ambiguous, which is asked for."""
    # The latest message counts first, and for known arguments it alone. A value that fits several parameters, and one
    # of several new values for a parameter, is ambiguous.
    made: Arguments = {}
    wanted, held = [*tool.parameters], {name: value for name, value in known.items() if name in tool.parameters}
    for message in reversed(messages):
        made |= _found_in(message, {name: tool.parameters[name] for name in wanted}, held)
        wanted = [name for name in wanted if name not in made and name not in held]
    return made


def _found_in(message: str, parameters: Mapping[str, Parameter], known: Arguments) -> Arguments:
    values = {name: one.found_in(message) for name, one in parameters.items()}
    others = {name: [value] for name, value in known.items()}
    times = Counter(repr(value) for found in {**others, **values}.values() for value in found)
    made: Arguments = {}
    for name, found in values.items():
        new = [value for value in found if value != known.get(name)] or found
        if new:
            made[name] = new[0] if len(new) == 1 and times[repr(new[0])] == 1 else None
    return made


def _in_order(tool: ToolSource, message: str, missing: Sequence[str]) -> Arguments:
    """Return an answer's values for the missing arguments, in order; none if it has more than were asked for."""
    made: Arguments = {}
    values = {name: tool.parameters[name].found_in(message) for name in missing if name in tool.parameters}
    for name, found in values.items():
        left = [value for value in found if value not in made.values()]
        made |= {name: left[0]} if left else {}
    return made if all(value in made.values() for found in values.values() for value in found) else {}


# -- the call ---------------------------------------------------------------------------------------------------------


async def search_turn(
    task: Task, before: DialogueState | None, selected: Mapping[str, SelectedSource]
) -> tuple[ToolTurn, PlanOutcome]:
    """Take a turn: call the tool that it asks for, and search the other sources, side by side.

    ``before`` is the state after the last turn, ``selected`` are all sources of the request. The returned turn has no
    state if no tool may be called. Results of tools come first.
    """
    tools = _tools_in(selected)
    if not tools and before is None:
        return ToolTurn(None), await search_question(task)
    turn = await take_turn(task, before, tools)
    calling = None if turn.call is None else start(call_tool(task, turn, turn.call, selected))
    wanted = turn.documents and bool(task.fan_out.selected)
    outcome = await search_question(task) if wanted else PlanOutcome(QueryPlan(sub_queries=[]))
    if turn.warning:
        outcome.plan.warnings.append(turn.warning)
    if calling is not None:
        await wait([calling])
        turn, searches = calling.result()
        outcome.plan.sub_queries += [search.sub_query for search in searches]
        outcome.searches += searches
        outcome.proof[:0] = [Proof(node.node.node_id, one.sub_query.id) for one in searches for node in one.nodes]
    return turn, outcome


def _tools_in(selected: Mapping[str, SelectedSource]) -> Tools:
    allowed = {name: chosen.source for name, chosen in selected.items() if chosen.denied is None}
    return {name: source for name, source in allowed.items() if isinstance(source, ToolSource)}


async def call_tool(
    task: Task, turn: ToolTurn, call: SubQuery, selected: Mapping[str, SelectedSource]
) -> tuple[ToolTurn, list[SourceSearch]]:
    """Make a turn's call, within its source's time limit; return the search, if any, and the turn with its reply."""
    # A confirmed call is recorded before it is made, so that it is never made twice.
    chosen, write, plan = selected[call.sources[0]], turn.write, QueryPlan(sub_queries=[call])
    tool, seconds = chosen.source, task.limits.search_seconds
    fan_out = FanOut({tool.name: chosen}, task.log, top_k=1, search_seconds=seconds, embedding_cache=None)
    if write is None or not isinstance(tool, ToolSource) or tool.writes is None:
        return turn, await fan_out.search(plan)
    ledger, principal = tool.writes.ledger, current_principal()
    who = "" if principal is None else "/".join(filter(None, (principal.tenant, principal.user)))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    record = WriteRecord(write.token, tool.name, who, json.dumps(write.arguments, ensure_ascii=False), started)
    earlier = await Call(sync=partial(ledger.claim, record), what="record of confirmed calls")
    if earlier is not None:
        said = f"{tool.name} was called already at {earlier.started}, and is not called again"
        return replace(turn, reply=f"{said} (outcome: {earlier.outcome})."), []
    outcome, result = "error", "it was interrupted"
    try:
        (search,) = searches = await fan_out.search(plan)
        if search.error is None:
            outcome, result = "ok", one_line(" ".join(node.get_content() for node in search.nodes), 500)
            return turn, searches
        outcome = "timeout" if isinstance(search.error, DeadlineExceededError) else "error"
        result = error_message(search.error, 300)
        if isinstance(search.error, DeniedError | SourceUnavailableError):
            return replace(turn, reply=f"{tool.name} was not called."), searches
        unknown = f"{tool.name} failed. Whether it was carried out is not known; it is not repeated."
        return replace(turn, reply=unknown), searches
    finally:
        ledger.finish(record.key, outcome, result)
