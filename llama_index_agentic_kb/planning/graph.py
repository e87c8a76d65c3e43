"""Makes a plan out of proposals: each query once, known sources only, within the limits, without cycles.

A plan is a graph: a sub-query may build on what others find, and says where by ``#q1``. It is built while the model
still writes, so that what depends on nothing is searched at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.planning.effort import EffortLimits
from llama_index_agentic_kb.planning.parsing import MAX_QUERY, Proposal
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.schema import FilterNode, QueryPlan, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.sources.planner_filters import FilterField, read_planner_filter

__all__ = ["Candidate", "PlanGraph", "described", "filled", "plain_plan", "refers"]

# Interrogatives that leave the thing asked for: "Who is the director of Titanic?" asks for "the director of Titanic".
_ASKING: Final = re.compile(
    r"^(?:who|what|which|where|when)(?:\s+(?:is|are|was|were)|['\u2019]s)\s+(?=\S+\s+\S)", re.IGNORECASE
)
# The ways in which models refer to another step: #q1, {q1}, <q1>, [q1]; no two parts can match the same text twice.
_REFERENCE: Final = re.compile(
    r"#([\w-]{1,60})|(?<!\{)\{++#?([^\s{}#][^{}]{0,60})\}+|<#?([^\s<>#][^<>]{0,60})>|\[#?([^][\s#]{1,60})\]"
)
_OURS: Final = re.compile(r"q\d+")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source as the planner sees it."""

    name: str
    description: str
    always: bool = False
    fields: Mapping[str, FilterField] = field(default_factory=dict)


def plain_plan(scope: Scope, sources: Sequence[Candidate], limits: EffortLimits | None = None) -> QueryPlan:
    """Give the plan without a model: each intent, or else the question, to all sources."""
    names = [source.name for source in sources]
    if not scope.intents:
        question = SubQuery(id="q0", query=scope.question, sources=names, origin=SubQueryOrigin.QUESTION)
        return QueryPlan(sub_queries=[question])
    by_form: dict[str, str] = {}
    for intent in scope.intents:
        by_form.setdefault(normalize(intent), intent)
    distinct = list(by_form.values())
    allowed = distinct if limits is None else distinct[: limits.sub_queries]
    plan = QueryPlan(
        sub_queries=[
            SubQuery(id=f"q{position}", query=intent, sources=names, origin=SubQueryOrigin.INTENT)
            for position, intent in enumerate(allowed)
        ]
    )
    if len(allowed) < len(distinct):
        plan.warnings.append(f"{len(distinct)} intents were cut to {len(allowed)} (EffortLimits.sub_queries)")
    return plan


class PlanGraph:
    """A plan that grows.

    Args:
        plan: What it starts from; its first sub-query is the question.
        sources: Those that may be searched, in declaration order.
        limits: How many sub-queries, sources and waves.
        prefix: What the ids of its sub-queries begin with; a number follows.
    """

    def __init__(
        self, plan: QueryPlan, sources: Sequence[Candidate], limits: EffortLimits, *, prefix: str = "q"
    ) -> None:
        self.plan = plan
        self._prefix = prefix
        self._sources = sources
        self._limits = limits
        self._ids: dict[str, str] = {}
        self._by_query = {normalize(sub_query.query): sub_query for sub_query in plan.sub_queries}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._seen: set[Proposal] = set()
        self._cut = 0
        self._unknown: set[str] = set()

    @property
    def full(self) -> bool:
        """Whether there are as many sub-queries as there may be."""
        return len(self._parents) >= self._limits.sub_queries

    def add(self, proposals: Sequence[Proposal]) -> list[SubQuery]:
        """Take the proposals that are new.

        Args:
            proposals: All that were read so far, in order; some may have been taken before.

        Returns:
            What can be searched now, each as it is now: new sub-queries that build on nothing, and earlier ones that
            are to go to further sources, with these sources alone.
        """
        ready: dict[str, list[str]] = {}
        for proposal in proposals:
            if proposal in self._seen:
                continue
            self._seen.add(proposal)
            sub_query, names = self._take(proposal)
            if names and sub_query is not None and not self._waits(sub_query):
                ready.setdefault(sub_query.id, []).extend(names)
        by_id = {sub_query.id: sub_query for sub_query in self.plan.sub_queries}
        return [by_id[one].model_copy(update={"sources": self._in_order(names)}) for one, names in ready.items()]

    def _take(self, proposal: Proposal) -> tuple[SubQuery | None, list[str]]:
        """Give the sub-query that a proposal stands for, and the sources that it brings."""
        names = self._known_sources(proposal)
        known = self._by_query.get(normalize(proposal.query))
        if known is not None:
            self._ids.setdefault(proposal.id, known.id)
            return known, self._widened(known, proposal, names)
        if self.full:
            self._cut += 1
            return None, []
        sub_query = SubQuery(
            id=f"{self._prefix}{len(self._parents) + 1}",
            query=proposal.query,
            sources=names,
            finds=proposal.finds or None,
            filters=self._filters(proposal, names),
        )
        self._ids[proposal.id] = sub_query.id
        self._by_query[normalize(proposal.query)] = sub_query
        self._parents[sub_query.id] = proposal.depends_on
        self.plan.sub_queries.append(sub_query)
        return sub_query, names

    def _widened(self, known: SubQuery, proposal: Proposal, names: Sequence[str]) -> list[str]:
        """Add to a sub-query what a proposal of the same query says beyond it; give its further sources."""
        if known.origin is SubQueryOrigin.QUESTION:
            return []
        new = [name for name in names if name not in known.sources]
        known.finds = known.finds or proposal.finds or None
        known.sources = self._in_order([*known.sources, *new])
        known.filters |= self._filters(proposal, new)
        return new

    def _waits(self, sub_query: SubQuery) -> bool:
        """Whether it builds on others, as far as can be told before the plan is complete."""
        return bool(self._parents.get(sub_query.id)) or any(not name.isdigit() for name in _names_in(sub_query.query))

    def _in_order(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [source.name for source in self._sources if source.name in wanted]

    def finish(self) -> None:
        """Settle who depends on whom: unknown parents and cycles are dropped, and told.

        Every sub-query that still depends on others has a ``template`` then, its ids ours, and the number of its
        wave; its ``query`` is the question's own words for what is not known yet. None refers to what there is not.
        """
        planned = [sub_query for sub_query in self.plan.sub_queries if sub_query.id in self._parents]
        for sub_query in planned:
            sub_query.depends_on = self._settled_parents(sub_query)
        self._break_cycles(planned)
        by_id = {sub_query.id: sub_query for sub_query in planned}
        for sub_query in _in_order(by_id):
            self._word(sub_query, [by_id[parent] for parent in sub_query.depends_on])
        self._warn()

    def _word(self, sub_query: SubQuery, parents: Sequence[SubQuery]) -> None:
        """Put our ids, and the question's own words, in the place of references."""
        told = {parent.id: described(parent) for parent in parents}
        if sub_query.finds:
            finds, complete = self._with_our_ids(sub_query.finds, sub_query.depends_on)
            sub_query.finds = (filled(finds, _named(finds, told)) or None) if complete else None
        text, complete = self._with_our_ids(sub_query.query, sub_query.depends_on)
        if not complete:  # with a gap in it, it would search for nothing
            text = sub_query.finds or filled(text, {}) or self.plan.sub_queries[0].query
        sub_query.query = text
        if parents:
            sub_query.wave = 1 + max(parent.wave for parent in parents)
            sub_query.template = text
            sub_query.query = filled(text, _named(text, told))

    def _settled_parents(self, sub_query: SubQuery) -> list[str]:
        """Give the parents that a sub-query names, or refers to in its text, without unknown ones."""
        named = self._parents[sub_query.id]
        referred = [name for name in _names_in(sub_query.query) if name in self._ids and not name.isdigit()]
        ids = [self._ids.get(name) or self._ids.get(f"q{name}", "") for name in (*named, *referred)]
        known = [one for one in dict.fromkeys(ids) if one in self._parents and one != sub_query.id]
        if any(one not in known and one != "q0" for one in ids):
            self.plan.warnings.append(f"{sub_query.id} depends on unknown sub-queries; they were left out")
        return known

    def _break_cycles(self, planned: Sequence[SubQuery]) -> None:
        """Drop the dependency of an earlier sub-query on a later one wherever both depend on each other."""
        by_id = {sub_query.id: sub_query for sub_query in planned}
        for sub_query in planned:
            kept = [parent for parent in sub_query.depends_on if not _reaches(parent, sub_query.id, by_id)]
            if len(kept) < len(sub_query.depends_on):
                self.plan.warnings.append(f"{sub_query.id} depends on itself through others; searched without them")
                sub_query.depends_on = kept

    def _with_our_ids(self, text: str, parents: Sequence[str]) -> tuple[str, bool]:
        """Give a text whose references are ``#q1`` with our ids, and whether each is to one of the parents.

        A number alone is a reference only where the dependency is named too ("the #1 song of 1999").
        """
        question, unknown = described(self.plan.sub_queries[0]), False

        def replaced(name: str, written: str) -> str:
            nonlocal unknown
            own = self._ids.get(name) or (self._ids.get(f"q{name}") if name.isdigit() else None)
            if own in parents:
                return f"#{own}"
            if own == "q0":
                return question
            if own is None and not _OURS.fullmatch(name):
                return written
            unknown = unknown or not name.isdigit()
            return written if name.isdigit() else ""

        return " ".join(_replaced(text, replaced).split()), not unknown

    def _known_sources(self, proposal: Proposal) -> list[str]:
        """Give the sources of a proposal in declaration order: those it names and those that are always searched."""
        named = {normalize(name) for name in proposal.sources}
        known = [source for source in self._sources if normalize(source.name) in named]
        self._unknown |= named - {normalize(source.name) for source in known}
        chosen = (known or list(self._sources))[: self._limits.sources]
        return [source.name for source in self._sources if source.always or source in chosen]

    def _filters(self, proposal: Proposal, names: Sequence[str]) -> dict[str, FilterNode]:
        """Read a proposal's filter for each source that declares fields; where it does not fit, it is left out."""
        read: dict[str, FilterNode] = {}
        for source in self._sources:
            if not proposal.filter or source.name not in names or not source.fields:
                continue
            try:
                read[source.name] = read_planner_filter(proposal.filter, source.fields)
            except PlanningError as error:
                told = f"a filter of the plan was left out at {source.name}: {one_line(str(error))}"
                self.plan.warnings.append(told)
        return read

    def _warn(self) -> None:
        if self._unknown:
            names = one_line(", ".join(sorted(self._unknown)))
            self.plan.warnings.append(f"the plan names unknown sources, which were left out: {names}")
        if self._cut:
            self.plan.warnings.append(
                f"{self._cut} sub-queries over the limit of {self._limits.sub_queries} were left out"
            )


def described(sub_query: SubQuery) -> str:
    """Give what a sub-query finds in words that can be searched: its ``finds``, else what its question asks for."""
    if sub_query.finds:
        return sub_query.finds
    return _ASKING.sub("", sub_query.query).rstrip(" ?.") or sub_query.query


def refers(text: str) -> bool:
    """Whether a text refers to a step of a plan, as ``#q1`` or in another of the ways in which models do."""
    return any(_OURS.fullmatch(name) for name in _names_in(text))


def filled(template: str, answers: Mapping[str, str]) -> str:
    """Put answers in the place of ``#q1`` ...; an answer that has no place in the text is added to it.

    Args:
        template: A query with references.
        answers: What stands for each sub-query, by id.

    Returns:
        On one line, no longer than a query may be.
    """
    named = {name for name in _names_in(template) if f"#{name}" in template}

    def replaced(name: str, written: str) -> str:
        return answers.get(name, "") if _OURS.fullmatch(name) else written

    text = _replaced(template, replaced)
    added = [answer for one, answer in answers.items() if one not in named and normalize(answer) not in normalize(text)]
    return " ".join([*text.split(), *added])[:MAX_QUERY].rstrip()


def _named(text: str, words: Mapping[str, str]) -> dict[str, str]:
    """Give the words that have a place in a text; without one, the text is in the question's own words as it is."""
    names = set(_names_in(text))
    return {one: told for one, told in words.items() if one in names}


def _names_in(text: str) -> list[str]:
    """Give what a text seems to refer to, in order."""
    return [_name_of(match) for match in _REFERENCE.finditer(text)]


def _name_of(match: re.Match[str]) -> str:
    return match.group(match.lastindex or 0).strip()


def _replaced(text: str, by: Callable[[str, str], str]) -> str:
    """Replace each reference by what a function of its name, and of how it was written, gives."""
    return _REFERENCE.sub(lambda match: by(_name_of(match), match.group()), text)


def _reaches(start: str, goal: str, by_id: Mapping[str, SubQuery]) -> bool:
    """Whether ``start`` depends on ``goal``, through any number of others."""
    seen, todo = {start}, [start]
    while todo:
        current = todo.pop()
        if current == goal:
            return True
        fresh = [parent for parent in by_id[current].depends_on if parent not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    return False


def _in_order(by_id: Mapping[str, SubQuery]) -> Iterable[SubQuery]:
    """Give sub-queries, parents before children; there are no cycles any more."""
    done: dict[str, SubQuery] = {}
    while len(done) < len(by_id):
        ready = [one for one in by_id.values() if one.id not in done and all(p in done for p in one.depends_on)]
        done.update((one.id, one) for one in ready)
    return done.values()
