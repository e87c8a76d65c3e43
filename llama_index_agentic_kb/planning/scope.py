"""A question with its conversation, and whether it needs a plan: by its wording and first results, without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.evidence.candidates import Fusion, best_of
from llama_index_agentic_kb.schema.activity import QueryClass
from llama_index_agentic_kb.sources.fan_out import SourceSearch

SIMPLE_WORDS: Final = 8  # at most, of a simple question
FEW_WORDS: Final = 4  # at most, if it is not recognised as English
TOP: Final = 3  # number of top passages searched for the question's words
COVERED: Final = 0.75  # share of the question's words that strong evidence must contain

# Words that join or compare facts, in the most common languages; for other languages only the length counts.
_JOINING: Final = re.compile(
    r"\b(and|or|both|either|than|same|between|versus|vs|compared?|compare|difference|first|last|earlier|later|older|"
    r"younger|more|less|most|least|before|after|while|who|which|that|whose|where|when|if|because|why|how|"
    r"und|oder|beide|als|et|ou|y|o)\b"
)
# Openings that ask for a relation itself ("who is the director of ..."), not for a fact about the related thing.
_ASKS_FOR_IT: Final = re.compile(r"(?:who|what)(?:['\u2019]s| is| are| was| were)\s")
_ENGLISH: Final = re.compile(r"\b(?:the|of|is|are|were|do|does|did|has|have|who|what|where|when|which|how|a|to|for)\b")
# A yes/no question ("would a Pict be confused by Old English?") needs facts about each thing that it names.
_YES_OR_NO: Final = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|may|might|must)(?:n['\u2019]t)?\s"
)
_RELATIONS: Final = re.compile(r"\bof\b|['\u2019]s\b|s['\u2019]\s")
# Kinship words that combine two relations: a father's father, a spouse's mother.
_KINSHIP: Final = re.compile(
    r"\b(grand|great-grand|step|half-)\w+|\b\w+-in-law\b|\b(aunt|uncle|cousin|nephew|niece)s?\b"
)
_CJK: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_STOP: Final = (
    "a an the of in on at to for from by with and or is are was were be been do does did has have had who what which "
    "when where why how whose that this it its as about into than then there their his her he she they i you we can "
    "could will would should may might not no"
)


MAX_LABELS: Final = 50

KEYS: Final[Mapping[QueryClass, str]] = {
    QueryClass.ADVERSARIAL_QUERY: "adversarial",
    QueryClass.JAIL_BREAKING_QUERY: "jail_breaking",
    QueryClass.NON_ANSWER_SEEKING_QUERY: "non_answer_seeking",
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: "no_clear_intent",
}
"""JSON key of each class in a planner's reply; labels have the keys ``label_1``, ``label_2``, ..."""


@dataclass(frozen=True, slots=True)
class ClassificationSpec:
    """The classes that a question is checked for.

    They are those of Google's ``queryClassificationSpec`` (Discovery Engine v1), and user-defined labels.

    Args:
        types: The classes, each once. ``USER_DEFINED_CLASSIFICATION_QUERY`` requires labels.
        labels: The questions that each user-defined label fits, described, by the label's name. With labels, the
            user-defined class is checked too: it is positive if any label fits.

    Raises:
        ConfigurationError: A type is unknown, a name or a description is no text, a name is empty or given twice, or
            there are more than 50 labels.
    """

    types: tuple[QueryClass, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check and copy the arguments."""
        try:
            types = tuple(dict.fromkeys(QueryClass(item) for item in self.types))
        except (TypeError, ValueError):
            known = ", ".join(item.value for item in QueryClass)
            raise ConfigurationError(f"types: {self.types!r} are no query classes; known are {known}") from None
        labels: object = self.labels
        if not isinstance(labels, Mapping) or not all(isinstance(text, str) for text in chain(labels, labels.values())):
            raise ConfigurationError("labels: expected a mapping of names to descriptions, {'billing': 'On invoices.'}")
        forms = {normalize(name) for name in labels}
        if "" in forms or not len(labels) == len(forms) <= MAX_LABELS:
            raise ConfigurationError(f"labels: there may be at most {MAX_LABELS}, each with a name of its own")
        object.__setattr__(self, "types", types)
        object.__setattr__(self, "labels", dict(labels))

    @property
    def keys(self) -> dict[str, str]:
        """Each JSON key of the reply, mapped to the name of its class or label."""
        named = {KEYS[item]: item.value for item in self.types if item in KEYS}
        return named | {f"label_{number}": name for number, name in enumerate(self.labels, start=1)}


@dataclass(frozen=True, slots=True)
class Scope:
    """A question and its conversation."""

    question: str  # the last user message
    history: tuple[tuple[str, str], ...] = ()  # earlier messages as (role, text) pairs, oldest first
    intents: tuple[str, ...] = ()  # the caller's search queries, which need no planning and replace the question
    classification: ClassificationSpec | None = None  # the classes to check the question for
    retrieval_instructions: str = ""  # the application's for planning, with the system messages
    answer_instructions: str = ""  # the application's for the answer, with the system messages

    def without_answers(self) -> Scope:
        """Return the scope without earlier answers: they hold text of passages, which not every source may get."""
        return replace(self, history=tuple((role, text) for role, text in self.history if role == "user"))


def is_simple(scope: Scope) -> bool:
    """Return whether a question asks for a single fact, judged by its wording only; in doubt, False."""
    words = scope.question.split()
    if scope.history or not words or len(words) > SIMPLE_WORDS or "\n" in scope.question.strip():
        return False
    text = normalize(scope.question)
    if _YES_OR_NO.match(text) or _joins(text):
        return False
    return len(words) <= FEW_WORDS or _ENGLISH.search(text) is not None


def coverage_of(scope: Scope, searches: Sequence[SourceSearch], fusion: Fusion) -> tuple[float, str]:
    """Return the share of the question's words in its best passages, and why it needs a plan (empty if it doesn't)."""
    best = best_of(searches, fusion)[:TOP]
    text = normalize("\n".join(one.node.node.get_content(MetadataMode.EMBED) for one in best))
    words = {*re.findall(r"\w+", normalize(scope.question))}.difference(_STOP.split())
    held = sum(word[: max(4, len(word) - 2)] in text for word in words)  # without endings: "directed" and "director"
    coverage = round(held / len(words) if words else 0.0, 3)
    if scope.history:
        return coverage, "the question follows a conversation"
    if _joins(normalize(scope.question)):  # high coverage may come from one fact alone
        return coverage, "the question joins several facts"
    return coverage, "the best passages hold too few of the question's words" if coverage < COVERED else ""


def _joins(text: str) -> bool:
    """Return whether a normalized question asks for more than one fact, or for a relation of a relation."""
    asks_for_it = _ASKS_FOR_IT.match(text) is not None
    return bool(
        _JOINING.search(" ".join(text.split()[1:]))
        or _KINSHIP.search(text)
        or len(_RELATIONS.findall(_ASKS_FOR_IT.sub("", text, count=1))) > asks_for_it
        or len(text.split()) > 2 * SIMPLE_WORDS
        or _CJK.search(text)
    )
