"""Makes a plan out of proposals: each query once, known sources only, within the limits, without cycles.

A plan is a graph: a sub-query may build on what others find, and has ``#q1`` where the answer of q1 belongs. The graph
grows while the model still writes, so that what depends on nothing is searched at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.planning.effort import MAX_SOURCES, EffortLimits
from llama_index_agentic_kb.planning.parsing import MAX_QUERY, Proposal
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.schema import FilterNode, QueryPlan, SubQuery, SubQueryOrigin
from llama_index_agentic_kb.sources.planner_filters import FilterField, read_planner_filter

__all__ = ["PlanGraph", "PlannerSource", "description_of", "fill", "plain_plan", "refers"]

# Interrogatives that leave the thing asked for: "Who is the director of Titanic?" asks for "the director of Titanic".
_ASKING: Final = re.compile(
    r"^(?:who|what|which|where|when)(?:\s+(?:is|are|was|were)|['\u2019]s)\s+(?=\S+\s+\S)", re.IGNORECASE
)
# The ways in which models refer to another step: #q1, {q1}, <q1>, [q1]; no two parts can match the same text twice.
_REFERENCE: Final = re.compile(
    r"#([\w-]{1,60})|(?<!\{)\{++#?([^\s{}#][^{}]{0,60})\}+|<#?([^\s<>#][^<>]{0,60})>|\[#?([^][\s#]{1,60})\]"
)
_STEP_ID: Final = re.compile(r"q\d+")


@dataclass(frozen=True, slots=True)
class PlannerSource:
    """A source as the planner sees it."""

    name: str
    description: str
    always: bool = False
    """Whether each sub-query goes to it, whatever the planner chose."""
    fields: Mapping[str, FilterField] = field(default_factory=dict)
    """What a planned filter may use."""


def plain_plan(scope: Scope, sources: Sequence[PlannerSource], limits: EffortLimits | None = None) -> QueryPlan:
    """Return the plan without a model: each intent, or else the question, at all sources."""
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
    """A plan that grows.

    Args:
        plan: What it starts from; its first sub-query is the question.
        sources: Those that may be searched, in declaration order.
        limits: How many sub-queries.
        prefix: What the ids of its sub-queries begin with; a number follows.
    """

    def __init__(
        self, plan: QueryPlan, sources: Sequence[PlannerSource], limits: EffortLimits, *, prefix: str = "q"
    ) -> None:
        self.plan = plan
        self._prefix = prefix
        self._sources = sources
        self._limits = limits
        self._ids: dict[str, str] = {}  # ours by the model's
        self._by_query = {normalize(sub_query.query): sub_query for sub_query in plan.sub_queries}
        self._parents: dict[str, tuple[str, ...]] = {}  # as the model named them, by our id
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
        return [by_id[name].model_copy(update={"sources": self._in_order(new)}) for name, new in ready.items()]

    def _take(self, proposal: Proposal) -> tuple[SubQuery | None, list[str]]:
        """Return the sub-query that a proposal stands for, and the sources that it brings."""
        names = self._known_sources(proposal)
        form = normalize(proposal.query)
        known = self._by_query.get(form)
        if known is not None:
            self._ids.setdefault(proposal.id, known.id)
            return known, self._widen(known, proposal, names)
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
        self._by_query[form] = sub_query
        self._parents[sub_query.id] = proposal.depends_on
        self.plan.sub_queries.append(sub_query)
        return sub_query, names

    def _widen(self, known: SubQuery, proposal: Proposal, names: Sequence[str]) -> list[str]:
        """Add to a sub-query what a proposal of the same query says beyond it; return its further sources."""
        if known.origin is SubQueryOrigin.QUESTION:
            return []
        new = [name for name in names if name not in known.sources]
        known.finds = known.finds or proposal.finds or None
        known.sources = self._in_order([*known.sources, *new])
        known.filters |= self._filters(proposal, new)
        return new

    def _waits(self, sub_query: SubQuery) -> bool:
        """Return whether it builds on others, as far as can be known before the plan is complete."""
        return bool(self._parents.get(sub_query.id)) or any(not name.isdigit() for name in _names_in(sub_query.query))

    def _in_order(self, names: Iterable[str]) -> list[str]:
        chosen = set(names)
        return [source.name for source in self._sources if source.name in chosen]

    def _known_sources(self, proposal: Proposal) -> list[str]:
        """Return a proposal's sources in declaration order: those it names, and those that are always searched."""
        named = {normalize(name) for name in proposal.sources}
        known = [source for source in self._sources if normalize(source.name) in named]
        self._unknown |= named - {normalize(source.name) for source in known}
        chosen = (known or list(self._sources))[:MAX_SOURCES]
        return [source.name for source in self._sources if source.always or source in chosen]

    def _filters(self, proposal: Proposal, names: Sequence[str]) -> dict[str, FilterNode]:
        """Return a proposal's filter for each source that declares fields; where it does not fit, it is left out."""
        read: dict[str, FilterNode] = {}
        for source in self._sources:
            if not proposal.filter or source.name not in names or not source.fields:
                continue
            try:
                read[source.name] = read_planner_filter(proposal.filter, source.fields)
            except PlanningError as error:
                reason = one_line(str(error))
                self.plan.warnings.append(f"a filter of the plan was left out at {source.name}: {reason}")
        return read

    # -- when the plan is complete ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Settle who depends on whom: unknown parents and cycles are dropped, with a warning.

        Every sub-query that still depends on others gets a ``template`` with our ids, and the number of its round; its
        ``query`` has the question's own words for what is not known yet. None refers to a step that does not exist.
        """
        planned = {one.id: one for one in self.plan.sub_queries if one.id in self._parents}
        for sub_query in planned.values():
            sub_query.depends_on = self._settled_parents(sub_query)
        for sub_query in planned.values():  # of two that depend on each other, the later one keeps its dependency
            kept = [parent for parent in sub_query.depends_on if not _reaches(parent, sub_query.id, planned)]
            if len(kept) < len(sub_query.depends_on):
                self.plan.warnings.append(f"{sub_query.id} depends on itself through others; searched without them")
                sub_query.depends_on = kept
        for sub_query in _parents_first(planned):
            self._word(sub_query, [planned[parent] for parent in sub_query.depends_on])
        if self._unknown:
            names = one_line(", ".join(sorted(self._unknown)))
            self.plan.warnings.append(f"the plan names unknown sources, which were left out: {names}")
        if self._cut:
            limit = self._limits.sub_queries
            self.plan.warnings.append(f"{self._cut} sub-queries over the limit of {limit} were left out")

    def _settled_parents(self, sub_query: SubQuery) -> list[str]:
        """Return the known parents that a sub-query names, or refers to in its text."""
        named = self._parents[sub_query.id]
        referred = [name for name in _names_in(sub_query.query) if name in self._ids and not name.isdigit()]
        ids = [self._ids.get(name) or self._ids.get(f"q{name}", "") for name in (*named, *referred)]
        known = [name for name in dict.fromkeys(ids) if name in self._parents and name != sub_query.id]
        if any(name not in known and name != "q0" for name in ids):
            self.plan.warnings.append(f"{sub_query.id} depends on unknown sub-queries; they were left out")
        return known

    def _word(self, sub_query: SubQuery, parents: Sequence[SubQuery]) -> None:
        """Put our ids, and the question's own words, in the place of references."""
        words = {parent.id: description_of(parent) for parent in parents}
        if sub_query.finds:
            finds, complete = self._with_our_ids(sub_query.finds, sub_query.depends_on)
            sub_query.finds = (_fill_places(finds, words) or None) if complete else None
        text, complete = self._with_our_ids(sub_query.query, sub_query.depends_on)
        if not complete:  # with a gap in it, it would search for nothing
            text = sub_query.finds or fill(text, {}) or self.plan.sub_queries[0].query
        sub_query.query = text
        if parents:
            sub_query.wave = 1 + max(parent.wave for parent in parents)
            sub_query.template = text
            sub_query.query = _fill_places(text, words)

    def _with_our_ids(self, text: str, parents: Sequence[str]) -> tuple[str, bool]:
        """Return a text whose references are ``#q1`` with our ids, and whether each is to one of the parents.

        A number alone is a reference only where the dependency is named too ("the #1 song of 1999").
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
    """Return what a sub-query finds in words that can be searched: its ``finds``, else what its question asks for."""
    if sub_query.finds:
        return sub_query.finds
    return _ASKING.sub("", sub_query.query).rstrip(" ?.") or sub_query.query


def refers(text: str) -> bool:
    """Return whether a text refers to a step of a plan, as ``#q1`` or in another of the ways in which models do."""
    return any(_STEP_ID.fullmatch(name) for name in _names_in(text))


def fill(template: str, answers: Mapping[str, str]) -> str:
    """Put answers in the place of ``#q1`` ...; an answer that has no place in the text is added at its end.

    Args:
        template: A query with references.
        answers: What stands for each sub-query, by id.

    Returns:
        One line, no longer than a query may be.
    """
    named = {name for name in _names_in(template) if f"#{name}" in template}
    text = _replace(template, lambda name, written: answers.get(name, "") if _STEP_ID.fullmatch(name) else written)
    form = normalize(text)
    added = [answer for name, answer in answers.items() if name not in named and normalize(answer) not in form]
    return " ".join([*text.split(), *added])[:MAX_QUERY].rstrip()


def _fill_places(text: str, words: Mapping[str, str]) -> str:
    """Fill in the words that have a place in a text; the others are left out."""
    names = set(_names_in(text))
    return fill(text, {name: said for name, said in words.items() if name in names})


def _names_in(text: str) -> list[str]:
    """Return what a text seems to refer to, in order."""
    return [_name_of(match) for match in _REFERENCE.finditer(text)]


def _name_of(match: re.Match[str]) -> str:
    return match.group(match.lastindex or 0).strip()


def _replace(text: str, replacement: Callable[[str, str], str]) -> str:
    """Replace each reference by what a function of its name, and of how it was written, returns."""
    return _REFERENCE.sub(lambda match: replacement(_name_of(match), match.group()), text)


def _reaches(start: str, goal: str, by_id: Mapping[str, SubQuery]) -> bool:
    """Return whether ``start`` depends on ``goal``, through any number of others."""
    seen, todo = {start}, [start]
    while todo:
        current = todo.pop()
        if current == goal:
            return True
        fresh = [parent for parent in by_id[current].depends_on if parent not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    return False


def _parents_first(by_id: Mapping[str, SubQuery]) -> Iterable[SubQuery]:
    """Return sub-queries, parents before children; there are no cycles any more."""
    done: dict[str, SubQuery] = {}
    while len(done) < len(by_id):
        done |= {
            name: one for name, one in by_id.items() if name not in done and all(p in done for p in one.depends_on)
        }
    return done.values()
