"""Builds a plan from the model's proposals: unique queries, known sources only, within the limits, without cycles.

A plan is a dependency graph: a sub-query may depend on the answers of others, with ``#q1`` as the placeholder for the
answer of q1. The graph grows while the model is still writing, so independent sub-queries are searched at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from graphlib import TopologicalSorter
from typing import Final

from llama_index_agentic_kb._text import normalize, one_line, without_surrogates
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.llm import read_json, strip_code_fence
from llama_index_agentic_kb.planning.effort import MAX_SOURCES, EffortLimits
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.schema import FilterNode, QueryPlan, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.sources.base import SelectedSource
from llama_index_agentic_kb.sources.filters import read_planner_filter

MAX_QUERY: Final = 1_000  # maximum number of characters of one sub-query; longer ones are truncated

# Interrogatives whose removal leaves a noun phrase: "Who is the director of Titanic?" -> "the director of Titanic".
_ASKING: Final = re.compile(
    r"^(?:who|what|which|where|when)(?:\s+(?:is|are|was|were)|['\u2019]s)\s+(?=\S+\s+\S)", re.IGNORECASE
)
# The ways in which models refer to another step: #q1, {q1}, <q1>, [q1]; no two parts can match the same text twice.
# In "{capital of #q1}" the reference is #q1, in the plan's numbering as in ours.
_REFERENCE: Final = re.compile(
    r"#([\w-]{1,60}(?:\.\d{1,3}){0,2})|(?<!\{)\{++#?([^\s{}#][^{}#]{0,60})\}+"
    r"|<#?([^\s<>#][^<>#]{0,60})>|\[#?([^][\s#]{1,60})\]"
)
_STEP_ID: Final = re.compile(r"(?:q|r\d{1,3}\.)\d+")
_OWN_REFERENCE: Final = re.compile(rf"#({_STEP_ID.pattern})(?![\w-]|\.\d)")


@dataclass(frozen=True, slots=True)
class Proposal:
    """One sub-query as the model proposed it, not validated yet."""

    id: str
    query: str
    sources: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    finds: str = ""
    filter: str = ""


def plain_plan(scope: Scope, sources: Sequence[SelectedSource], limits: EffortLimits) -> QueryPlan:
    """Return the plan made without a model: the intents, or else the question, each searched in all sources."""
    origin = SubQueryOrigin.INTENT if scope.intents else SubQueryOrigin.QUESTION
    names, queries = [source.name for source in sources], dict[str, SubQuery]()
    for text in scope.intents or (scope.question,):
        queries.setdefault(normalize(text), SubQuery(id=f"q{len(queries)}", query=text, sources=names, origin=origin))
    plan = QueryPlan(sub_queries=[*queries.values()][: limits.sub_queries])
    if len(queries) > limits.sub_queries:
        plan.warnings.append(f"{len(queries)} intents were cut to {limits.sub_queries} (EffortLimits.sub_queries)")
    return plan


@dataclass(eq=False)
class PlanGraph:
    """A plan to which the model's proposals are added as they arrive; its first sub-query is the question."""

    plan: QueryPlan
    sources: Sequence[SelectedSource]
    limits: EffortLimits
    _: KW_ONLY
    revision: int = 0  # number of the revision that the graph is for; 0 is the plan
    steps: Mapping[str, SubQuery] = field(default_factory=dict)  # earlier sub-queries that a revision may depend on
    first_round: int = 1
    finds: dict[str, str] = field(default_factory=dict)
    """Description of each sub-query's answer, by id, with ``#q1`` as the placeholder for the answer of q1."""
    _known: dict[str, str] = field(default_factory=dict)  # the sources' names, in order, with their normal forms
    _always: list[str] = field(default_factory=list)  # names of the sources that each sub-query is searched in
    _ids: dict[str, str] = field(default_factory=dict)  # our ids by the model's ids
    _by_query: dict[str, SubQuery] = field(default_factory=dict)
    _parents: dict[str, tuple[str, ...]] = field(default_factory=dict)  # as the model wrote them, by our id
    _seen: set[Proposal] = field(default_factory=set)
    _unknown: set[str] = field(default_factory=set)
    _cut: int = 0

    def __post_init__(self) -> None:
        """Note what the plan and the earlier steps have."""
        for source in self.sources:
            self._known[source.name] = normalize(source.name)
            if source.params.always_query_source:
                self._always.append(source.name)
        self._ids = dict(zip(self.steps, self.steps, strict=True))
        for one in self.plan.sub_queries:
            first = self._by_query.setdefault(normalize(one.query), one)
            first.sources = self._in_order([*first.sources, *one.sources])

    @property
    def full(self) -> bool:
        """Whether the maximum number of sub-queries is reached."""
        return len(self._parents) >= self.limits.sub_queries

    def add(self, proposals: Sequence[Proposal]) -> list[SubQuery]:
        """Add what is new in the proposals parsed so far; return copies of what to search now, with its new sources."""
        ready: dict[str, tuple[SubQuery, list[str]]] = {}
        for proposal in proposals:
            if proposal in self._seen:
                continue
            self._seen.add(proposal)
            sub_query, names = self._take(proposal)
            if sub_query is None or not names or self._parents.get(sub_query.id):
                continue
            if all(map(str.isdigit, _names_in(sub_query.query))):  # it waits for no other
                ready.setdefault(sub_query.id, (sub_query, []))[1].extend(names)
        return [one.model_copy(update={"sources": self._in_order(names)}) for one, names in ready.values()]

    def _take(self, proposal: Proposal) -> tuple[SubQuery | None, list[str]]:
        """Return the new or existing sub-query of a proposal (None over the limit), and the sources that it adds."""
        named, form = set(map(normalize, proposal.sources)), normalize(proposal.query)
        self._unknown |= named.difference(self._known.values())
        chosen = [name for name in self._known if self._known[name] in named] or [*self._known]
        chosen[MAX_SOURCES:] = self._always
        names, sub_query = self._in_order(chosen), self._by_query.get(form)
        if sub_query is not None:
            self._ids.setdefault(proposal.id, sub_query.id)
            if sub_query.origin is SubQueryOrigin.QUESTION:
                return sub_query, []
            names = [name for name in names if name not in sub_query.sources]
            sub_query.finds = sub_query.finds or proposal.finds or None
            sub_query.sources = self._in_order([*sub_query.sources, *names])
        elif self.full:
            self._cut += 1
            return None, []
        else:
            origin, prefix = SubQueryOrigin.PLANNER, "q"
            if self.revision:
                origin, prefix = SubQueryOrigin.REVISION, f"r{self.revision}."
            sub_query = SubQuery(
                id=f"{prefix}{len(self._parents) + 1}",
                query=proposal.query,
                sources=names,
                finds=proposal.finds or None,
                origin=origin,
                wave=self.first_round,
            )
            self._ids[proposal.id] = sub_query.id
            self._by_query[form] = sub_query
            self._parents[sub_query.id] = proposal.depends_on
            self.plan.sub_queries.append(sub_query)
        if proposal.filter:
            sub_query.filters |= self._filters(proposal, names)
        return sub_query, names

    def _in_order(self, names: Collection[str]) -> list[str]:
        return list(filter(names.__contains__, self._known))

    def _filters(self, proposal: Proposal, names: Collection[str]) -> dict[str, FilterNode]:
        """Return a proposal's filter by source, for sources with declared fields; an invalid one adds a warning."""
        read: dict[str, FilterNode] = {}
        for source in self.sources:
            fields = source.source.filterable
            if source.name in names and fields:
                try:
                    read[source.name] = read_planner_filter(proposal.filter, fields)
                except PlanningError as error:
                    reason = one_line(str(error))
                    self.plan.warnings.append(f"a filter of the plan was left out at {source.name}: {reason}")
        return read

    def finish(self) -> None:
        """Resolve the dependencies of all sub-queries; unknown parents and cycles are removed, with a warning."""
        warnings = self.plan.warnings
        planned = {one.id: one for one in self.plan.sub_queries if one.id in self._parents}
        if any(self._parents.values()) or any(
            _REFERENCE.search(f"{one.query} {one.finds}") for one in planned.values()
        ):
            self._resolve(planned)
        if self._unknown:
            names = one_line(", ".join(sorted(self._unknown)))
            warnings.append(f"the plan names unknown sources, which were left out: {names}")
        if self._cut:
            warnings.append(f"{self._cut} sub-queries over the limit of {self.limits.sub_queries} were left out")

    def _resolve(self, planned: Mapping[str, SubQuery]) -> None:
        known = {**self.steps, **planned}
        for one in planned.values():
            self._link(one, known)
        for one in planned.values():  # of two that depend on each other, the later one keeps its dependency
            kept = [parent for parent in one.depends_on if not _reaches(parent, one.id, planned)]
            if len(kept) < len(one.depends_on):
                self.plan.warnings.append(f"{one.id} depends on itself through others; searched without them")
                one.depends_on = kept
        order = TopologicalSorter({one.id: one.depends_on for one in planned.values()}).static_order()
        for name in filter(planned.__contains__, order):
            self._word(planned[name], [known[parent] for parent in planned[name].depends_on])

    def _link(self, sub_query: SubQuery, known: Collection[str]) -> None:
        """Set what a sub-query depends on: the steps in its parent list, and those in its text."""
        referred = [name for name in _names_in(sub_query.query) if name in self._ids and not name.isdigit()]
        ids = dict.fromkeys(map(self._own_id, (*self._parents[sub_query.id], *referred)))
        sub_query.depends_on = [name for name in ids if name != sub_query.id and name in known]
        if not ids.keys() <= {*sub_query.depends_on, "q0"}:
            self.plan.warnings.append(f"{sub_query.id} depends on unknown sub-queries; they were left out")

    def _own_id(self, name: str) -> str:
        """Return our id of a step that the model calls ``name``, or numbers so; "" if it is unknown."""
        return self._ids.get(name) or self._ids.get(f"q{name}", "")

    def _word(self, sub_query: SubQuery, parents: Sequence[SubQuery]) -> None:
        """Set a sub-query's template (references with our ids), query (references described), ``finds`` and round."""
        words = {parent.id: description_of(parent) for parent in parents}
        waves = [parent.wave + 1 for parent in parents if parent.id in self._parents]
        sub_query.wave = max([sub_query.wave, *waves])
        if sub_query.finds:
            finds, complete = self._with_our_ids(sub_query.finds, words)
            sub_query.finds = None
            if complete:
                self.finds[sub_query.id] = finds
                sub_query.finds = fill(finds, words, add=False) or None
        text, complete = self._with_our_ids(sub_query.query, words)
        if not complete:  # a query with a gap would find nothing useful
            text = sub_query.finds or fill(text, {}) or self.plan.sub_queries[0].query
        sub_query.query = text
        if parents:
            sub_query.template, sub_query.query = text, fill(text, words, add=False)

    def _with_our_ids(self, text: str, parents: Collection[str]) -> tuple[str, bool]:
        """Return a text with references in the form ``#q1`` with our ids, and whether all of them could be resolved."""
        unknown = False

        def replacement(match: re.Match[str]) -> str:
            nonlocal unknown
            name = _name_in(match)
            own = self._own_id(name)
            if own in parents:
                return f"#{own}"
            if own == "q0":
                return description_of(self.plan.sub_queries[0])
            # A bare number refers only to a declared dependency (unlike "the #1 song of 1999").
            if name.isdigit() or not (own or _STEP_ID.fullmatch(name)):
                return match[0]
            unknown = True
            return ""

        return " ".join(_REFERENCE.sub(replacement, text).split()), not unknown


def description_of(sub_query: SubQuery) -> str:
    """Return a searchable description of a sub-query's answer: its ``finds``, else a noun phrase from its query."""
    return sub_query.finds or asked_for(sub_query.query)


def asked_for(query: str) -> str:
    """Return the noun phrase that a question asks for, without its interrogative; else the question itself."""
    return _ASKING.sub("", query).rstrip(" ?.") or query


def refers(text: str) -> bool:
    """Return whether a text refers to a step of a plan, as ``#q1`` or in another form that models use."""
    return any(map(_STEP_ID.fullmatch, _names_in(text)))


def fill(template: str, answers: Mapping[str, str], *, add: bool = True) -> str:
    """Replace the references (``#q1``) in a template by answers, by id; with ``add``, append those it does not name."""
    text, named = _OWN_REFERENCE.sub(lambda one: answers.get(one[1], ""), template), _OWN_REFERENCE.findall(template)
    form, words = normalize(text), text.split()
    if add:
        words += [answer for name, answer in answers.items() if name not in named and normalize(answer) not in form]
    text = " ".join(words)
    # An answer that would stand twice in a row stands once: "White County, Arkansas" beside "Arkansas".
    for answer in map(re.escape, filter(None, answers.values())):
        if not re.search(rf"(?<!\w){answer}(?!\w)", template):  # "mayor of New York, #q1" keeps its own words
            text = re.sub(rf"(?<!\w)({answer})(?:,? {answer})+(?!\w)", r"\1", text)
    return text[:MAX_QUERY].rstrip()


def _names_in(text: str) -> list[str]:
    """Return the names in the references of a text, in order."""
    return list(map(_name_in, _REFERENCE.finditer(text)))


def _name_in(match: re.Match[str]) -> str:
    return match[match.lastindex or 0].strip()


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

# Keys in the form of ``_fields``; the first that has a value counts.
_LISTS: Final = ("subqueries", "subquestions", "queries", "questions", "plan", "items")
_QUERIES: Final = ("query", "subquery", "subquestion", "question", "search", "q", "text")
_SOURCES: Final = ("sources", "source", "toolname", "tools", "tool", "sourcenames", "knowledgesources")
_FINDS: Final = ("finds", "answeris", "looksfor")
_FILTERS: Final = ("filter", "filters")
_DEPENDS: Final = ("dependson", "dependencies", "parents")
# In these, no two repetitions can match the same text: a hostile reply takes linear time.
_NUMBERED: Final = re.compile(r"^[ \t]*(?:\(?(\d{1,4})[.):]|[-*•])[ \t]+(\S.*)$", re.MULTILINE)
_FIRST_ITEM: Final = re.compile(r"\[\s{0,100}(?=\{)")
_NEXT_ITEM: Final = re.compile(r"\s{0,100},\s{0,100}(?=\{)")
LAST_KEY: Final = re.compile(r'"finds"\s{0,3}:\s{0,3}"')
"""Start of the last key of a sub-query (``finds``), which is not needed to search it."""
_DECODER: Final = json.JSONDecoder()


def read_proposals(reply: str) -> list[Proposal]:
    """Return the proposals of a complete reply in any form; raise ``PlanningError`` if it holds no plan."""
    text = reply[:MAX_REPLY]
    body = strip_code_fence(text)
    if "}\n{" in body:  # one object a line
        body = "[" + body[body.find("{") : body.rfind("}") + 1].replace("}\n{", "},\n{") + "]"
    items = _items(read_json(body, "{["))
    if items is None:
        items = [query for _, query in _NUMBERED.findall(text)]
        if not items:
            raise PlanningError(f"the model's reply holds no plan: {one_line(reply[:400], 80)!r}")
    return proposals_in(items)


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
    return proposals_in(items)


def _items(value: object) -> list[object] | None:
    """Return the list of sub-queries in a JSON value; None if it has no such list."""
    if isinstance(value, dict):
        items = _listed(value)
        return [value] if items is None and _text(_fields(value), _QUERIES) else items
    if not isinstance(value, list):
        return None
    for item in value:  # several objects: the text contained more than the plan
        if (items := _listed(item)) is not None:
            return items
    kinds = set(map(type, value))
    return value if dict in kinds or kinds == {str} else None


def _listed(item: object) -> list[object] | None:
    fields = _fields(item) if isinstance(item, dict) else {}
    values = (value for value in map(fields.get, _LISTS) if isinstance(value, list | dict))
    first = next(values, None)
    return first if isinstance(first, list | None) else _listed(first)


def proposals_in(items: Sequence[object], prefix: str = "q") -> list[Proposal]:
    """Return the proposals in a list of a reply; those without an id get ``prefix`` and their number."""
    proposals = []
    for position, item in enumerate(items[:MAX_ITEMS], start=1):
        fields = _fields(item) if isinstance(item, dict) else {"query": item if isinstance(item, str) else ""}
        query = " ".join(_text(fields, _QUERIES)[:MAX_REPLY].split())
        numbered = _NUMBERED.match(query)
        if numbered and numbered[1] in (None, str(position)):  # other numbers belong to the text ("7. Symphonie")
            query = numbered[2]
        query = query.strip("\"'` ")
        if re.search(r"\w", query):
            name = _text(fields, ("id",)) or f"{prefix}{position}"
            finds = one_line(_text(fields, _FINDS), MAX_QUERY)
            sources, parents = _names(fields, _SOURCES), _names(fields, _DEPENDS)
            query = query[:MAX_QUERY].rstrip()
            proposals.append(Proposal(name, query, sources, parents, finds, _text(fields, _FILTERS)))
    return proposals


def _fields(item: Mapping[object, object]) -> dict[str, object]:
    """Return an object with plain keys: ``subQueries``, ``Sub-Queries`` and ``sub_queries`` become ``subqueries``."""
    fields: dict[str, object] = {}  # of several keys that become the same one, the first that has a value counts
    for key, value in item.items():
        name = re.sub(r"[\W_]+", "", str(key)).lower()
        fields[name] = fields.get(name) or value
    return fields


def _text(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """Return the first non-empty text under any of these keys; "" if there is none."""
    return next(filter(None, map(_as_text, map(fields.get, names))), "")


def _names(fields: Mapping[str, object], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the names under the first of these keys with a value, which is a list or a comma-separated text."""
    for key in keys:
        value = fields.get(key)
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list):
            return tuple(map(str.strip, filter(None, map(_as_text, value))))
    return ()


def _as_text(value: object) -> str:
    """Return a string without surrogates, or an integer as text; "" for any other value."""
    if isinstance(value, str):
        return without_surrogates(value) if value.strip() else ""
    return str(value) if isinstance(value, int) and abs(value) < MAX_NUMBER else ""
