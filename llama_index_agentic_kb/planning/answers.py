"""What the steps of a plan have found: which searches serve which step, and what was read in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from llama_index_agentic_kb.schema import Confidence, Finding, SubQuery

__all__ = ["Answers"]


class Answers:
    """The answers of one plan.

    A step is a planned sub-query. It is served by the search of its own query, by one search for each answer that was
    put into it, or by another step's search where both come to the same query.

    Args:
        most: Answers of a step that are built on.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._serves: dict[str, list[str]] = {}
        self.found: dict[str, list[Finding]] = {}
        """By the id of the search that they were read for, or of the step that needed none."""

    def add_search(self, sub_query: SubQuery) -> None:
        """Let a search serve the step that it was made for."""
        self.share(sub_query.id, sub_query.part_of or sub_query.id)

    def share(self, search: str, step: str) -> None:
        """Let a search serve a step."""
        served = self._serves.setdefault(search, [])
        if step not in served:
            served.append(step)

    def searches_of(self, steps: Collection[str]) -> list[str]:
        """Give the searches that serve any of some steps."""
        return [search for search, served in self._serves.items() if any(step in served for step in steps)]

    def steps_of(self, search: str) -> list[str]:
        """Give the steps that a search serves."""
        return self._serves.get(search, [search])

    def of(self, step: str) -> list[Finding]:
        """Give a step's answers: the best of each of its searches before the second of any."""
        by_search = [self.found.get(search, []) for search in self.searches_of([step])] or [self.found.get(step, [])]
        distinct: dict[str, Finding] = {}
        for answer in (one for rank in zip_longest(*by_search) for one in rank if one is not None):
            distinct.setdefault(answer.value.casefold(), answer)
        return list(distinct.values())[: self._most]

    def take(self, search: str, answers: Sequence[Finding]) -> list[Finding]:
        """Keep what was read for a search, in place of what was read for it before.

        What follows from passages does not replace what one says.

        Returns:
            The answers that it corrected, if any.
        """
        before = self.found.get(search, [])
        if not answers or (_any_stated(before) and not _any_stated(answers)):
            return []
        self.found[search] = list(answers)
        values = {answer.value.casefold() for answer in answers}
        return before if before and not values & {answer.value.casefold() for answer in before} else []

    def __iter__(self) -> Iterator[Finding]:
        """Give every answer, in the order in which steps were first answered."""
        return (answer for answers in self.found.values() for answer in answers)


def _any_stated(answers: Sequence[Finding]) -> bool:
    return any(answer.confidence is Confidence.STATED for answer in answers)
