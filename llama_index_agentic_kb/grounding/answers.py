"""What a model answers, on its way to the reader: its markers and links checked, whole or in a stream."""

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
    """What an answer may hold.

    Args:
        ref_ids: The reference ids that a marker may name.
        addresses: The addresses that a link may lead to; None lets every link through.
    """

    ref_ids: Collection[int] = ()
    addresses: Collection[str] | None = ()


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A text, and what was taken out of it.

    Args:
        text: What is left.
        markers: Reference ids that name no passage.
        links: Links that lead to no reference.
        hidden: Hidden characters.
    """

    text: str
    markers: int = 0
    links: int = 0
    hidden: int = 0


class AnswerFilter:
    """Passes an answer on piece by piece: ``HiddenFilter``, ``OwnCitations``, ``MarkerFilter``, then ``LinkFilter``.

    However the text is cut into pieces, the same comes out.

    Args:
        rules: What may stay.
    """

    def __init__(self, rules: AnswerRules) -> None:
        self._hidden = HiddenFilter()
        self._own = OwnCitations(rules.ref_ids)
        self._markers = MarkerFilter(rules.ref_ids)
        self._links = None if rules.addresses is None else LinkFilter(rules.addresses)

    def feed(self, delta: str) -> str:
        """Take a piece and return the text that can be emitted now."""
        text = self._markers.feed(self._own.feed(self._hidden.feed(delta)))
        return text if self._links is None else self._links.feed(text)

    def close(self) -> str:
        """Return what was held back."""
        rest = self._markers.feed(self._own.feed(self._hidden.close()) + self._own.close()) + self._markers.close()
        return rest if self._links is None else self._links.feed(rest) + self._links.close()

    def checked(self, text: str) -> CheckedText:
        """Return a text of this filter with what was taken out of it so far."""
        links = 0 if self._links is None else self._links.removed
        return CheckedText(text, self._markers.removed + self._own.removed, links, self._hidden.removed)


def clean_answer(text: str, rules: AnswerRules) -> CheckedText:
    """Check a whole answer; see ``AnswerFilter``."""
    answer = AnswerFilter(rules)
    return answer.checked(answer.feed(text) + answer.close())


def clean_values(value: Any, rules: AnswerRules) -> tuple[Any, CheckedText]:
    """Check every text in JSON data.

    Args:
        value: What ``json.loads`` gives.
        rules: What may stay.

    Returns:
        The same data with its texts checked, and what was taken out of all of them together (its ``text`` is empty).
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
