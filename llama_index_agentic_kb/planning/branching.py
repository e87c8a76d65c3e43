"""What a dependent sub-query is searched as, once its parents have been read: one query for each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import Final

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.planning.answers import Answers
from llama_index_agentic_kb.planning.graph import described, filled
from llama_index_agentic_kb.schema import SubQuery

__all__ = ["Branching"]


CORRECTED: Final = 2
"""How many times its branches a sub-query may be searched: once as it was read first, once as it was corrected."""


class Branching:
    """Makes searches of the sub-queries that waited.

    Args:
        planned: Every planned sub-query, by id.
        searched: Every sub-query that was searched, by id.
        answers: What was found; searches that serve several steps are noted there.
        most: Searches that one sub-query may become.
    """

    def __init__(
        self, planned: Mapping[str, SubQuery], searched: Mapping[str, SubQuery], answers: Answers, most: int
    ) -> None:
        self._planned = planned
        self._searched = searched
        self._answers = answers
        self._most = most

    def of(self, child: SubQuery, wave: int, begun: Sequence[SubQuery]) -> list[SubQuery]:
        """Give one search for each combination of the parents' answers, best first.

        A query that another sub-query came to is searched once, and serves both.

        Args:
            child: What is to be searched.
            wave: The round of searches.
            begun: What is about to be searched in the same round.
        """
        known = {normalize(one.query): one for one in (*self._searched.values(), *begun)}
        queries = {normalize(query): query for query in self._queries(child)}
        fresh = [form for form in queries if form not in known]
        alone = len(fresh) == 1 and child.id not in self._searched
        number = sum(one.part_of == child.id for one in self._searched.values())
        made: list[SubQuery] = []
        for form, query in queries.items():
            if form in known:
                self._answers.share(known[form].id, child.id)
                made += _at_further_sources(known[form], child, wave)
            elif number + (child.id in self._searched) >= CORRECTED * self._most:
                continue  # a model that reads one step again and again would search for ever
            elif alone:
                made.append(child.model_copy(update={"query": query, "wave": wave}))
            else:
                number += 1
                branch = {"id": f"{child.id}.{number}", "part_of": child.id}
                made.append(child.model_copy(update={**branch, "query": query, "wave": wave}))
        return made

    def _queries(self, child: SubQuery) -> list[str]:
        """Give the queries that a sub-query becomes with what is known; what is not is told in the question's words."""
        template = child.template or child.query
        choices = [
            [answer.value for answer in self._answers.of(parent)] or [self._words_for(parent, template)]
            for parent in child.depends_on
        ]
        return [
            filled(template, dict(zip(child.depends_on, values, strict=True)))
            for values in islice(product(*choices), self._most)
        ]

    def _words_for(self, parent: str, template: str) -> str:
        """Give what stands for an answer that there is not; without a place for it, the query is in plain words."""
        return described(self._planned[parent]) if f"#{parent}" in template else ""


def _at_further_sources(known: SubQuery, child: SubQuery, wave: int) -> list[SubQuery]:
    """Give a search of the same query at the sources where it was not searched yet."""
    new = [name for name in child.sources if name not in known.sources]
    filters = {name: child.filters[name] for name in new if name in child.filters}
    return [known.model_copy(update={"sources": new, "filters": filters, "wave": wave})] if new else []
