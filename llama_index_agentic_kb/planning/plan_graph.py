"""Builds a plan from the model's proposals: unique queries, known sources only, within the limits, without cycles.

A plan is a dependency graph: a sub-query may depend on the answers of others, with ``#q1`` as the placeholder for the
answer of q1. The graph grows while the model is still writing, so independent sub-queries are searched at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from types import MappingProxyType
from typing import Final

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import PlanningError
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
    names = [source.name for source in sources]
    if not scope.intents:
        question = SubQuery(id="q0", query=scope.question, sources=names, origin=SubQueryOrigin.QUESTION)
        return QueryPlan(sub_queries=[question])
    by_form: dict[str, str] = {}
    for intent in scope.intents:
        by_form.setdefault(normalize(intent), intent)
    allowed = [*by_form.values()][: None if limits is None else limits.sub_queries]
    plan = QueryPlan(
        sub_queries=[
            SubQuery(id=f"q{position}", query=intent, sources=names, origin=SubQueryOrigin.INTENT)
            for position, intent in enumerate(allowed)
        ]
    )
    if len(allowed) < len(by_form):
        plan.warnings.append(f"{len(by_form)} intents were cut to {len(allowed)} (EffortLimits.sub_queries)")
    return plan


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
        self.finds: dict[str, str] = {}
        """Description of each sub-query's answer, by id, with ``#q1`` as the placeholder for the answer of q1."""
        self._prefix = f"r{revision}." if revision else "q"
        self._origin = SubQueryOrigin.REVISION if revision else SubQueryOrigin.PLANNER
        self._steps = steps
        self._first_round = first_round
        self._sources = sources
        self._limit = limits.sub_queries
        self._ids = {name: name for name in steps}  # our ids by the model's ids
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
            if names and all(name.isdigit() for name in _names_in(sub_query.query)):  # it waits for no other
                ready.setdefault(sub_query.id, (sub_query, []))[1].extend(names)
        return [one.model_copy(update={"sources": self._in_order(names)}) for one, names in ready.values()]

    def _take(self, proposal: Proposal) -> tuple[SubQuery | None, list[str]]:
        """Return the new or existing sub-query of a proposal (None over the limit), and the sources that it adds."""
        named = {normalize(name) for name in proposal.sources}
        known = {source.name: normalize(source.name) for source in self._sources}
        self._unknown |= named.difference(known.values())
        chosen = [name for name, form in known.items() if form in named] or [*known]
        chosen[MAX_SOURCES:] = [source.name for source in self._sources if source.always]
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
        return [source.name for source in self._sources if source.name in chosen]

    def _filters(self, proposal: Proposal, names: Sequence[str]) -> dict[str, FilterNode]:
        """Return a proposal's filter by source, for sources with declared fields; an invalid one adds a warning."""
        read: dict[str, FilterNode] = {}
        for source in self._sources if proposal.filter else ():
            if source.name not in names or not source.fields:
                continue
            try:
                read[source.name] = read_planner_filter(proposal.filter, source.fields)
            except PlanningError as error:
                reason = one_line(str(error))
                self.plan.warnings.append(f"a filter of the plan was left out at {source.name}: {reason}")
        return read

    # -- when the plan is complete ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Resolve the dependencies of all sub-queries; unknown parents and cycles are removed, with a warning."""
        planned = {one.id: one for one in self.plan.sub_queries if one.id in self._parents}
        for sub_query in planned.values():
            sub_query.depends_on = self._known_parents(sub_query)
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

    def _known_parents(self, sub_query: SubQuery) -> list[str]:
        """Return the ids of existing sub-queries that a sub-query depends on, by its parent list or by its text."""
        named = self._parents[sub_query.id]
        referred = [name for name in _names_in(sub_query.query) if name in self._ids and not name.isdigit()]
        ids = dict.fromkeys(self._ids.get(name) or self._ids.get(f"q{name}", "") for name in (*named, *referred))
        known = [name for name in ids if (name in self._parents or name in self._steps) and name != sub_query.id]
        if any(name not in known and name != "q0" for name in ids):
            self.plan.warnings.append(f"{sub_query.id} depends on unknown sub-queries; they were left out")
        return known

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
        """Return a text with references in the form ``#q1`` with our ids, and whether all of them could be resolved.

        A bare number is a reference only if the dependency is declared too (unlike "the #1 song of 1999").
        """
        question, unknown = description_of(self.plan.sub_queries[0]), False

        def replacement(name: str, written: str) -> str:
            nonlocal unknown
            own = self._ids.get(name) or (self._ids.get(f"q{name}") if name.isdigit() else None)
            if own in parents:
                return f"#{own}"
            if own == "q0":
                return question
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
    """Replace the references (``#q1``) in a template by answers, by id; with ``add``, append those it does not name.

    An answer that would stand twice in a row stands once.
    """
    text = _replace(template, lambda name, written: answers.get(name, "") if _STEP_ID.fullmatch(name) else written)
    words, form, named = text.split(), normalize(text), _names_in(template)
    for name, answer in answers.items() if add else ():
        if name not in named and normalize(answer) not in form:
            words.append(answer)
    text = " ".join(words)
    for answer in map(re.escape, filter(None, answers.values())):  # "White County, Arkansas" beside "Arkansas"
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
    seen, todo = {start}, [start] if start in by_id else []
    for current in todo:
        fresh = [parent for parent in by_id[current].depends_on if parent not in seen and parent in by_id]
        seen.update(fresh)
        todo.extend(fresh)
    return goal in todo
