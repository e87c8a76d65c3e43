"""Filters for a model's answer that check its markers and links, in a whole text or in a stream."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from llama_index_agentic_kb.grounding.citations import MarkerFilter
from llama_index_agentic_kb.grounding.own_citations import OwnCitations
from llama_index_agentic_kb.guard.links import LinkFilter
from llama_index_agentic_kb.guard.text import HiddenFilter


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The markers and links that an answer may contain.

    Args:
        ref_ids: The reference ids that a marker may name.
        addresses: The addresses that a link may lead to. None if all links are allowed.
    """

    ref_ids: Collection[int] = ()
    addresses: Collection[str] | None = ()


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A filtered text with counts of the removed parts.

    Args:
        text: The remaining text.
        markers: Number of removed reference ids that name no passage.
        links: Number of removed links that lead to no reference.
        hidden: Number of removed hidden characters.
    """

    text: str
    markers: int = 0
    links: int = 0
    hidden: int = 0


class AnswerFilter:
    """Filters an answer piece by piece: ``HiddenFilter``, ``OwnCitations``, ``MarkerFilter``, then ``LinkFilter``.

    The output does not depend on how the text is split into pieces.

    Args:
        rules: The allowed markers and links.
    """

    def __init__(self, rules: AnswerRules) -> None:
        self._hidden = HiddenFilter()
        self._own = OwnCitations(rules.ref_ids)
        self._markers = MarkerFilter(rules.ref_ids)
        self._links = None if rules.addresses is None else LinkFilter(rules.addresses)

    def feed(self, delta: str) -> str:
        """Process a piece and return the text that can be emitted now."""
        text = self._markers.feed(self._own.feed(self._hidden.feed(delta)))
        return text if self._links is None else self._links.feed(text)

    def close(self) -> str:
        """Return the buffered text at the end of the answer."""
        rest = self._markers.feed(self._own.feed(self._hidden.close()) + self._own.close()) + self._markers.close()
        return rest if self._links is None else self._links.feed(rest) + self._links.close()

    def checked(self, text: str) -> CheckedText:
        """Return a text with the counts of the parts that this filter has removed so far."""
        links = 0 if self._links is None else self._links.removed
        return CheckedText(text, self._markers.removed + self._own.removed, links, self._hidden.removed)


def clean_answer(text: str, rules: AnswerRules) -> CheckedText:
    """Filter a whole answer; see ``AnswerFilter``."""
    answer = AnswerFilter(rules)
    return answer.checked(answer.feed(text) + answer.close())


def clean_values(value: Any, rules: AnswerRules) -> tuple[Any, CheckedText]:
    """Check every text in JSON data.

    Args:
        value: The data, as returned by ``json.loads``.
        rules: The allowed markers and links.

    Returns:
        The data with its texts checked, and the total counts of removed parts (with an empty ``text``).
    """
    taken: list[CheckedText] = []

    def walk(part: Any) -> Any:
        if isinstance(part, str):
            taken.append(clean_answer(part, rules))
            return taken[-1].text
        if isinstance(part, list):
            return [walk(item) for item in part]
        return {key: walk(item) for key, item in part.items()} if isinstance(part, dict) else part

    cleaned = walk(value)
    sums = {name: sum(getattr(one, name) for one in taken) for name in ("markers", "links", "hidden")}
    return cleaned, CheckedText("", **sums)
