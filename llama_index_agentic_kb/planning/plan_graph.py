"""Builds a plan from the model's proposals: unique queries, known sources only, within the limits, without cycles.

A plan is a dependency graph: a sub-query may depend on the answers of others, with ``#q1`` as the placeholder for the
answer of q1. The graph grows while the model is still writing, so independent sub-queries are searched at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb._text import normalize, one_line, without_surrogates
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.llm import read_json, strip_code_fence
from llama_index_agentic_kb.planning.effort import MAX_SOURCES, EffortLimits
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.schema import FilterNode, QueryPlan, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.sources.filters import FilterField, read_planner_filter

MAX_QUERY: Final = 1_000  # maximum number of characters of one sub-query; longer ones are truncated

# Interrogatives whose removal leaves a noun phrase: "Who is the director of Titanic?" -> "the director of Titanic".
_ASKING: Final = re.compile(
    r"^(?:who|what|which|where|when)(?:\s+(?:is|are|was|were)|['\u2019]s)\s+(?=\S+\s+\S)", re.IGNORECASE
)
# The ways in which models refer to another step: #q1, {q1}, <q1>, [q1]; no two parts can match the same text twice.
_REFERENCE: Final = re.compile(
    r"#([\w-]{1,60}(?:\.\d{1,3}){0,2})|(?<!\{)\{++#?([^\s{}#][^{}]{0,60})\}+|<#?([^\s<>#][^<>]{0,60})>|\[#?([^][\s#]{1,60})\]"
)
_STEP_ID: Final = re.compile(r"(?:q|r\d{1,3}\.)\d+")


@dataclass(frozen=True, slots=True)
class PlannerSource:
    """A knowledge source as described to the planner."""

    name: str
    description: str
    always: bool = False  # whether every sub-query is searched in this source, whatever sources the planner chose
    fields: Mapping[str, FilterField] = field(default_factory=dict)  # the metadata fields that a planned filter may use


@dataclass(frozen=True, slots=True)
class Proposal:
    """One sub-query as the model proposed it, not validated yet."""

    id: str
    query: str
    sources: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    finds: str = ""
    filter: str = ""


def plain_plan(scope: Scope, sources: Sequence[PlannerSource], limits: EffortLimits | None = None) -> QueryPlan:
    """Return the plan made without a model: the intents, or else the question, each searched in all sources."""
    names: list[str] = list(map(attrgetter("name"), sources))
    origin = SubQueryOrigin.INTENT if scope.intents else SubQueryOrigin.QUESTION
    by_form: dict[str, str] = {}
    for text in scope.intents or (scope.question,):
        by_form.setdefault(normalize(text), text)
    allowed = [*by_form.values()][: None if limits is None else limits.sub_queries]
    listed = [SubQuery(id=f"q{at}", query=text, sources=names, origin=origin) for at, text in enumerate(allowed)]
    many = f"{len(by_form)} intents were cut to {len(allowed)} (EffortLimits.sub_queries)"
    return QueryPlan(sub_queries=listed, warnings=[many] if len(allowed) < len(by_form) else [])


class PlanGraph:
    """A plan to which the model's proposals are added as they arrive; its first sub-query is the question.

    ``revision`` is the number of the revision that it is for (0 is the plan), and ``steps`` are earlier sub-queries
    that a revision may depend on.
    """

    def __init__(
        self,
        plan: QueryPlan,
        sources: Sequence[PlannerSource],
        limits: EffortLimits,
        *,
        revision: int = 0,
        steps: Mapping[str, SubQuery] = MappingProxyType({}),
        first_round: int = 1,
    ) -> None:
        self.plan = plan
        # Description of each sub-query's answer, by id, with ``#q1`` as the placeholder for the answer of q1.
        self.finds: dict[str, str] = {}
        self._prefix = f"r{revision}." if revision else "q"
        self._origin = SubQueryOrigin.REVISION if revision else SubQueryOrigin.PLANNER
        self._steps = steps
        self._first_round = first_round
        self.sources = sources
        self._limit = limits.sub_queries
        self._ids = dict(zip(steps, steps, strict=True))  # our ids by the model's ids
        self._by_query: dict[str, SubQuery] = {}
        for one in plan.sub_queries:
            first = self._by_query.setdefault(normalize(one.query), one)
            first.sources = self._in_order([*first.sources, *one.sources])
        self._parents: dict[str, tuple[str, ...]] = {}  # as the model wrote them, by our id
        self._seen: set[Proposal] = set()
        self._cut = 0
        self._unknown: set[str] = set()

    @property
    def full(self) -> bool:
        """Whether the maximum number of sub-queries is reached."""
        return len(self._parents) >= self._limit

    def add(self, proposals: Sequence[Proposal]) -> list[SubQuery]:
        """Add what is new in the proposals parsed so far; return copies of what to search now, with its new sources."""
        ready: dict[str, tuple[SubQuery, list[str]]] = {}
        for proposal in proposals:
            if proposal in self._seen:
                continue
            self._seen.add(proposal)
            sub_query, names = self._take(proposal)
            if sub_query is None or self._parents.get(sub_query.id):
                continue
            if names and all(map(str.isdigit, _names_in(sub_query.query))):  # it waits for no other
                ready.setdefault(sub_query.id, (sub_query, []))[1].extend(names)
        return [one.model_copy(update={"sources": self._in_order(names)}) for one, names in ready.values()]

    def _take(self, proposal: Proposal) -> tuple[SubQuery | None, list[str]]:
        """Return the new or existing sub-query of a proposal (None over the limit), and the sources that it adds."""
        named = set(map(normalize, proposal.sources))
        known = {source.name: normalize(source.name) for source in self.sources}
        self._unknown |= named.difference(known.values())
        chosen = [name for name, form in known.items() if form in named] or [*known]
        chosen[MAX_SOURCES:] = [source.name for source in self.sources if source.always]
        names, form = self._in_order(chosen), normalize(proposal.query)
        same = self._by_query.get(form)
        if same is not None:
            self._ids.setdefault(proposal.id, same.id)
            if same.origin is SubQueryOrigin.QUESTION:
                return same, []
            new = [name for name in names if name not in same.sources]
            same.finds = same.finds or proposal.finds or None
            same.sources = self._in_order([*same.sources, *new])
            same.filters |= self._filters(proposal, new)
            return same, new
        if self.full:
            self._cut += 1
            return None, []
        sub_query = SubQuery(
            id=f"{self._prefix}{len(self._parents) + 1}",
            query=proposal.query,
            sources=names,
            finds=proposal.finds or None,
            filters=self._filters(proposal, names),
            origin=self._origin,
            wave=self._first_round,
        )
        self._ids[proposal.id] = sub_query.id
        self._by_query[form] = sub_query
        self._parents[sub_query.id] = proposal.depends_on
        self.plan.sub_queries.append(sub_query)
        return sub_query, names

    def _in_order(self, names: Iterable[str]) -> list[str]:
        chosen = set(names)
        return [source.name for source in self.sources if source.name in chosen]

    def _filters(self, proposal: Proposal, names: Sequence[str]) -> dict[str, FilterNode]:
        """Return a proposal's filter by source, for sources with declared fields; an invalid one adds a warning."""
        read: dict[str, FilterNode] = {}
        for source in [one for one in self.sources if proposal.filter and one.name in names and one.fields]:
            try:
                read[source.name] = read_planner_filter(proposal.filter, source.fields)
            except PlanningError as error:
                reason = one_line(str(error))
                self.plan.warnings.append(f"a filter of the plan was left out at {source.name}: {reason}")
        return read

    def finish(self) -> None:
        """Resolve the dependencies of all sub-queries; unknown parents and cycles are removed, with a warning."""
        planned = {one.id: one for one in self.plan.sub_queries if one.id in self._parents}
        for sub_query in planned.values():  # it depends on those in its parent list, and on those in its text
            referred = [name for name in _names_in(sub_query.query) if name in self._ids and not name.isdigit()]
            named = (*self._parents[sub_query.id], *referred)
            ids = dict.fromkeys(self._ids.get(name) or self._ids.get(f"q{name}", "") for name in named)
            known = [name for name in ids if (name in self._parents or name in self._steps) and name != sub_query.id]
            if any(name not in known and name != "q0" for name in ids):
                self.plan.warnings.append(f"{sub_query.id} depends on unknown sub-queries; they were left out")
            sub_query.depends_on = known
        for sub_query in planned.values():  # of two that depend on each other, the later one keeps its dependency
            kept = [parent for parent in sub_query.depends_on if not _reaches(parent, sub_query.id, planned)]
            if len(kept) < len(sub_query.depends_on):
                self.plan.warnings.append(f"{sub_query.id} depends on itself through others; searched without them")
                sub_query.depends_on = kept
        for name in TopologicalSorter({one.id: one.depends_on for one in planned.values()}).static_order():
            if name in planned:
                self._word(planned[name], [planned.get(one) or self._steps[one] for one in planned[name].depends_on])
        if self._unknown:
            names = one_line(", ".join(sorted(self._unknown)))
            self.plan.warnings.append(f"the plan names unknown sources, which were left out: {names}")
        if self._cut:
            self.plan.warnings.append(f"{self._cut} sub-queries over the limit of {self._limit} were left out")

    def _word(self, sub_query: SubQuery, parents: Sequence[SubQuery]) -> None:
        """Set a sub-query's template (references with our ids), query (references described), ``finds`` and round."""
        words = {parent.id: description_of(parent) for parent in parents}
        if sub_query.finds:
            finds, complete = self._with_our_ids(sub_query.finds, sub_query.depends_on)
            self.finds |= {sub_query.id: finds} if complete else {}
            sub_query.finds = (fill(finds, words, add=False) or None) if complete else None
        text, complete = self._with_our_ids(sub_query.query, sub_query.depends_on)
        if not complete:  # a query with a gap would find nothing useful
            text = sub_query.finds or fill(text, {}) or self.plan.sub_queries[0].query
        sub_query.query = text
        if parents:
            own = [1 + parent.wave for parent in parents if parent.id in self._parents]
            sub_query.wave = max([self._first_round, *own])
            sub_query.template = text
            sub_query.query = fill(text, words, add=False)

    def _with_our_ids(self, text: str, parents: Sequence[str]) -> tuple[str, bool]:
        """Return a text with references in the form ``#q1`` with our ids, and whether all of them could be resolved."""
        question, unknown = description_of(self.plan.sub_queries[0]), False

        def replacement(name: str, written: str) -> str:
            nonlocal unknown
            own = self._ids.get(name) or (self._ids.get(f"q{name}") if name.isdigit() else None)
            if own in parents:
                return f"#{own}"
            if own == "q0":
                return question
            # A bare number refers only to a declared dependency (unlike "the #1 song of 1999").
            if name.isdigit() or (own is None and not _STEP_ID.fullmatch(name)):
                return written
            unknown = True
            return ""

        return " ".join(_replace(text, replacement).split()), not unknown


def description_of(sub_query: SubQuery) -> str:
    """Return a searchable description of a sub-query's answer: its ``finds``, else a noun phrase from its query."""
    return sub_query.finds or asked_for(sub_query.query)


def asked_for(query: str) -> str:
    """Return the noun phrase that a question asks for, without its interrogative; else the question itself."""
    return _ASKING.sub("", query).rstrip(" ?.") or query


def refers(text: str) -> bool:
    """Return whether a text refers to a step of a plan, as ``#q1`` or in another form that models use."""
    return any(_STEP_ID.fullmatch(name) for name in _names_in(text))


def fill(template: str, answers: Mapping[str, str], *, add: bool = True) -> str:
    """Replace the references (``#q1``) in a template by answers, by id; with ``add``, append those it does not name."""
    text = _replace(template, lambda name, written: answers.get(name, "") if _STEP_ID.fullmatch(name) else written)
    form, named = normalize(text), _names_in(template)
    more = [answer for name, answer in answers.items() if name not in named and normalize(answer) not in form]
    text = " ".join([*text.split(), *(more if add else ())])
    # An answer that would stand twice in a row stands once: "White County, Arkansas" beside "Arkansas".
    for answer in map(re.escape, filter(None, answers.values())):
        if not re.search(rf"(?<!\w){answer}(?!\w)", template):  # "mayor of New York, #q1" keeps its own words
            text = re.sub(rf"(?<!\w)({answer})(?:,? {answer})+(?!\w)", r"\1", text)
    return text[:MAX_QUERY].rstrip()


def _names_in(text: str) -> list[str]:
    """Return the names in the references of a text, in order."""
    return [match.group(match.lastindex or 0).strip() for match in _REFERENCE.finditer(text)]


def _replace(text: str, replacement: Callable[[str, str], str]) -> str:
    """Replace each reference by the result of ``replacement(name, matched_text)``."""
    return _REFERENCE.sub(lambda match: replacement(match.group(match.lastindex or 0).strip(), match.group()), text)


def _reaches(start: str, goal: str, by_id: Mapping[str, SubQuery]) -> bool:
    """Return whether ``start`` depends on ``goal``, directly or through others."""
    reached = [start]
    for current in reached:
        parents = by_id[current].depends_on if current in by_id else ()
        reached += [parent for parent in parents if parent not in reached]
    return goal in reached


# -- the model's reply ---------------------------------------------------------------------------------------------

MAX_REPLY: Final = 100_000  # maximum number of characters of a planner's reply that are parsed
MAX_PARTIAL: Final = 20_000  # while it is streamed; the rest is parsed when it is complete
MAX_ITEMS: Final = 2_000  # maximum number of sub-queries read from a reply
MAX_NUMBER: Final = 2**63  # of an id; Python can't convert integers of thousands of digits to text

_LISTS: Final = ("sub_queries", "subqueries", "sub_questions", "subquestions", "queries", "questions", "plan", "items")
_QUERIES: Final = ("query", "sub_query", "sub_question", "question", "search", "q", "text")
_SOURCES: Final = ("sources", "source", "tool_name", "tools", "tool", "source_names", "knowledge_sources")
_FINDS: Final = ("finds", "answer_is", "looks_for")
_FILTERS: Final = ("filter", "filters")
_DEPENDS: Final = ("depends_on", "dependson", "dependencies", "parents")
# In these, no two repetitions can match the same text: a hostile reply takes linear time.
_NUMBERED: Final = re.compile(r"^[ \t]*(?:\(?(\d{1,4})[.):]|[-*•])[ \t]+(\S.*)$", re.MULTILINE)
_FIRST_ITEM: Final = re.compile(r"\[\s{0,100}(?=\{)")
_NEXT_ITEM: Final = re.compile(r"\s{0,100},\s{0,100}(?=\{)")
LAST_KEY: Final = re.compile(r'"finds"\s{0,3}:\s{0,3}"')
"""Start of the last key of a sub-query (``finds``), which is not needed to search it."""
_DECODER: Final = json.JSONDecoder()


def read_proposals(reply: str | JsonMapping, prefix: str = "q") -> list[Proposal]:
    """Return the proposals of a reply in any form (without an id they get ``prefix`` and their number), or raise."""
    if isinstance(reply, str):
        text = reply[:MAX_REPLY]
        body = strip_code_fence(text)
        if "}\n{" in body:  # one object a line
            body = "[" + body[body.find("{") : body.rfind("}") + 1].replace("}\n{", "},\n{") + "]"
        items = _items(read_json(body, "{["))
        items = [query for _, query in _NUMBERED.findall(text)] or None if items is None else items
    else:
        items = _items(reply)
    if items is None:
        raise PlanningError(f"the model's reply holds no plan: {one_line(str(reply)[:400], 80)!r}")
    return _proposals(items[:MAX_ITEMS], prefix)


def read_partial_plan(text: str) -> list[Proposal]:
    """Return the complete proposals of a reply that is still being streamed; the last one needs no ``finds``."""
    items: list[object] = []
    start = _FIRST_ITEM.search(text[:MAX_PARTIAL])
    while start is not None:
        position = start.end()
        try:
            item, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            last = LAST_KEY.search(text, position)
            with suppress(ValueError, RecursionError):
                item = json.loads(text[position : last.start() if last else position].rstrip(", \n") + "}")
                items += [item] if isinstance(item, dict) and "depends_on" in item else []
            break
        items.append(item)
        start = _NEXT_ITEM.match(text, end)
    return _proposals(items)


def _items(value: object) -> list[object] | None:
    """Return the list of sub-queries in a JSON value; None if it has no such list."""
    if isinstance(value, Mapping):
        items = _listed(value)
        return [value] if items is None and _text(_fields(value), _QUERIES) else items
    if not isinstance(value, list):
        return None
    objects = [item for item in value if isinstance(item, dict)]
    listed = next((items for item in objects if (items := _listed(item)) is not None), None)
    if listed is not None:  # several objects: the text contained more than the plan
        return listed
    return value if objects or (value and all(isinstance(item, str) for item in value)) else None


def _listed(item: Mapping[object, object]) -> list[object] | None:
    fields = _fields(item)
    for name in _LISTS:
        value = fields.get(name)
        if isinstance(value, list):
            return [*value]
        if isinstance(value, dict):
            return _listed(value)
    return None


def _proposals(items: Sequence[object], prefix: str = "q") -> list[Proposal]:
    proposals = []
    for position, item in enumerate(items, start=1):
        fields = {"query": item} if isinstance(item, str) else _fields(item) if isinstance(item, dict) else {}
        query = " ".join(_text(fields, _QUERIES)[:MAX_REPLY].split())
        numbered = _NUMBERED.match(query)
        if numbered and numbered.group(1) in (None, str(position)):  # other numbers belong to the text ("7. Symphonie")
            query = numbered.group(2)
        query = query.strip("\"'` ")
        if re.search(r"\w", query):
            name = _text(fields, ("id",)) or f"{prefix}{position}"
            finds = one_line(_text(fields, _FINDS), MAX_QUERY)
            sources, parents = _names(fields, _SOURCES), _names(fields, _DEPENDS)
            query = query[:MAX_QUERY].rstrip()
            proposals.append(Proposal(name, query, sources, parents, finds, _text(fields, _FILTERS)))
    return proposals


def _fields(item: Mapping[object, object]) -> dict[str, object]:
    """Return an object with its keys in snake case: ``subQueries`` and ``Sub-Queries`` become ``sub_queries``."""
    fields = {}
    for key, value in item.items():
        name = str(key)
        if not (name.islower() and name.isidentifier()):
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")
        fields[name] = value
    return fields


def _text(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first non-empty text under any of these keys; "" if there is none."""
    return next(filter(None, map(_as_text, map(fields.get, names))), "")


def _names(fields: Mapping[str, object], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the names under the first of these keys with a value, which is a list or a comma-separated text."""
    for key in keys:
        value = fields.get(key)
        if isinstance(value, str):
            value = without_surrogates(value).split(",")
        if isinstance(value, list):
            return tuple(text.strip() for part in value if (text := _as_text(part)))
    return ()


def _as_text(value: object) -> str:
    """Return a string without surrogates, or an integer as text; "" for any other value."""
    if isinstance(value, str):
        return without_surrogates(value) if value.strip() else ""
    return str(value) if isinstance(value, int) and abs(value) < MAX_NUMBER else ""
