"""The steps of a plan: what each has found, and what those that build on others are searched as.

A step is a planned sub-query. It is served by the search of its own query, by one search for each answer that was put
into it, or by another step's search where both come to the same query.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, product, zip_longest
from typing import Final

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.planning.plan_graph import description_of, fill
from llama_index_agentic_kb.schema import Confidence, Finding, SubQuery

__all__ = ["MAX_BRANCHES", "Steps"]

MAX_BRANCHES: Final = 3
"""Answers of a step that are built on, and searches that a step may become (three directors, two candidates)."""

MAX_SEARCHES: Final = 2 * MAX_BRANCHES
"""Searches of one step in all: its branches as its parents were read first, and once more as they were corrected. A
model that reads one step again and again would otherwise search without end."""


class Steps:
    """The steps of one plan, with what was found for them.

    Args:
        searched: Every sub-query whose search was started, by id; grows as searches start.
    """

    def __init__(self, searched: Mapping[str, SubQuery]) -> None:
        self.planned: dict[str, SubQuery] = {}
        self.found: dict[str, list[Finding]] = {}
        """By the id of the search that they were read for, or of the step that needed none."""
        self._searched = searched
        self._serves: dict[str, list[str]] = {}  # steps by search

    def add_search(self, sub_query: SubQuery) -> None:
        """Note that a search serves the step that it was made for."""
        self.share(sub_query.id, sub_query.part_of or sub_query.id)

    def share(self, search: str, step: str) -> None:
        """Note that a search serves a step."""
        steps = self._serves.setdefault(search, [])
        if step not in steps:
            steps.append(step)

    def searches_of(self, steps: Collection[str]) -> list[str]:
        """Return the searches that serve any of some steps."""
        return [search for search, served in self._serves.items() if any(step in served for step in steps)]

    def children_of(self, search: str) -> list[SubQuery]:
        """Return the steps that build on what a search finds."""
        served = self._serves.get(search, [search])
        return [step for step in self.planned.values() if not {*served}.isdisjoint(step.depends_on)]

    def answers_of(self, step: str) -> list[Finding]:
        """Return a step's answers: the best of each of its searches before the second of any."""
        by_search = [self.found.get(search, []) for search in self.searches_of([step])] or [self.found.get(step, [])]
        distinct: dict[str, Finding] = {}
        for answer in (item for rank in zip_longest(*by_search) for item in rank if item is not None):
            distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[:MAX_BRANCHES]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Keep what was read for a search, in place of what was read for it before.

        What merely follows from passages does not replace what a passage says.

        Returns:
            The answers that it corrects, if any.
        """
        before = self.found.get(search, [])
        if not answers or (_any_stated(before) and not _any_stated(answers)):
            return []
        self.found[search] = list(answers)
        values = {answer.value.casefold() for answer in answers}
        return before if before and not values & {answer.value.casefold() for answer in before} else []

    def __iter__(self) -> Iterator[Finding]:
        """Yield every answer, in the order in which searches were first answered."""
        return (answer for answers in self.found.values() for answer in answers)

    # -- searches of steps that build on others ----------------------------------------------------------------------

    def searches_for(self, step: SubQuery, number: int, started: Sequence[SubQuery]) -> list[SubQuery]:
        """Return one search for each combination of the answers that a step builds on, best first.

        A query that is searched already is not searched again, and serves both steps.

        Args:
            step: What is to be searched.
            number: The round of searches.
            started: What is about to be searched in the same round.
        """
        known = {normalize(one.query): one for one in (*self._searched.values(), *started)}
        queries = {normalize(query): query for query in self._queries(step)}
        fresh = [form for form in queries if form not in known]
        alone = len(fresh) == 1 and step.id not in self._searched
        branches = sum(one.part_of == step.id for one in self._searched.values())
        made: list[SubQuery] = []
        for form, query in queries.items():
            if form in known:
                self.share(known[form].id, step.id)
                made += _at_further_sources(known[form], step, number)
            elif branches + (step.id in self._searched) < MAX_SEARCHES:
                change: dict[str, object] = {"query": query, "wave": number}
                if not alone:
                    branches += 1
                    change |= {"id": f"{step.id}.{branches}", "part_of": step.id}
                made.append(step.model_copy(update=change))
        return made

    def _queries(self, step: SubQuery) -> list[str]:
        """Return the queries that a step becomes; what is not known is described in the question's own words."""
        template = step.template or step.query
        choices = [
            [answer.value for answer in self.answers_of(parent)] or [self._words_for(parent, template)]
            for parent in step.depends_on
        ]
        return [
            fill(template, dict(zip(step.depends_on, values, strict=True)))
            for values in islice(product(*choices), MAX_BRANCHES)
        ]

    def _words_for(self, parent: str, template: str) -> str:
        """Return what stands for a missing answer; without a place for it, the query is in plain words as it is."""
        return description_of(self.planned[parent]) if f"#{parent}" in template else ""


def _any_stated(answers: Sequence[Finding]) -> bool:
    return any(answer.confidence is Confidence.STATED for answer in answers)


def _at_further_sources(known: SubQuery, step: SubQuery, number: int) -> list[SubQuery]:
    """Return a search of the same query at the sources where it was not searched yet."""
    new = [name for name in step.sources if name not in known.sources]
    filters = {name: step.filters[name] for name in new if name in step.filters}
    return [known.model_copy(update={"sources": new, "filters": filters, "wave": number})] if new else []
