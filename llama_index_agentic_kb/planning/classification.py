"""Query classification by the planning model, in the same call that plans the searches.

The classes are those of Google's ``queryClassificationSpec`` (Discovery Engine v1), and user-defined labels. The
verdicts come first in the reply, so they are kept if planning fails. They depend on the user's messages only.

A class without a verdict was not classified; that never means that the question passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_index.core.base.llms.types import ChatMessage

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.guard.text import quoted
from llama_index_agentic_kb.llm import read_json
from llama_index_agentic_kb.prompts import CLASSES, CLASSIFICATION, LABEL, as_data, with_rules
from llama_index_agentic_kb.schema import QueryPlan
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification

PART: Final = "classification"  # JSON key of the verdicts in a planner's reply

MAX_LABELS: Final = 50

KEYS: Final[Mapping[QueryClass, str]] = {
    QueryClass.ADVERSARIAL_QUERY: "adversarial",
    QueryClass.JAIL_BREAKING_QUERY: "jail_breaking",
    QueryClass.NON_ANSWER_SEEKING_QUERY: "non_answer_seeking",
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: "no_clear_intent",
}
"""JSON key of each class in a reply; labels have the keys ``label_1``, ``label_2``, ..."""

# The maximum number of characters of a planner's reply that are parsed, and of one set of verdicts, or of a reply that
# is still being streamed; and the maximum number of such sets. They bound the work on a hostile reply.
MAX_REPLY: Final = 100_000
MAX_READ: Final = 8_000
MAX_PARTS: Final = 20

_PART: Final = re.compile(rf'"{PART}"\s{{0,20}}:\s{{0,20}}(?=\{{)', re.IGNORECASE)
_STARTS: Final = re.compile(r"\s{0,20}(?:```\w{0,10}\s{0,20})?\{\s{0,20}" + _PART.pattern, re.IGNORECASE)
_WORDS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class ClassificationSpec:
    """The classes that a question is checked for.

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
        if not isinstance(labels, Mapping) or not all(
            isinstance(text, str) for pair in labels.items() for text in pair
        ):
            raise ConfigurationError("labels: expected a mapping of names to descriptions, {'billing': 'On invoices.'}")
        forms = {normalize(name) for name in labels}
        if "" in forms or len(forms) < len(labels) or len(forms) > MAX_LABELS:
            raise ConfigurationError(f"labels: there may be at most {MAX_LABELS}, each with a name of its own")
        object.__setattr__(self, "types", types)
        object.__setattr__(self, "labels", dict(labels))

    @property
    def keys(self) -> dict[str, str]:
        """Each JSON key of the reply, mapped to the name of its class or label."""
        named = {KEYS[item]: item.value for item in self.types if item in KEYS}
        return named | {f"label_{number}": name for number, name in enumerate(self.labels, start=1)}


def requested(spec: ClassificationSpec) -> ClassificationSpec | None:
    """Return the specification if it has any class or label to check, else None."""
    return spec if spec.keys else None


def ask_for_classes(messages: Sequence[ChatMessage], spec: ClassificationSpec) -> list[ChatMessage]:
    """Return a planner's messages with the classification rules added; the application's names can't end a line."""
    lines = []
    for key, name in spec.keys.items():
        definition = CLASSES.get(key)
        if definition is None:
            about = one_line(as_data(spec.labels[name]), 400)
            definition = LABEL.format(name=quoted(name)) + (f": {about}" if about else ".")
        lines.append(f'- "{key}": {definition}')
    form = json.dumps({PART: dict.fromkeys(spec.keys, False)})[:-1] + ', "sub_queries": [...]}'
    return with_rules(messages, CLASSIFICATION.format(classes="\n".join(lines), form=form))


def read_verdicts(reply: str, spec: ClassificationSpec, *, whole: bool = True) -> dict[str, bool] | None:
    """Return the verdicts of a reply by key; None if it contains no clear verdict.

    A model may repeat the user's text, with fake verdicts, before its own: a class is positive if any set says so, and
    negative only if all do. While the reply is being written (``whole=False``), only its start is read.
    """
    text = reply[: MAX_REPLY if whole else MAX_READ]
    parts = _parts(text) if whole or _STARTS.match(text) else []
    if whole and not parts:
        value = read_json(text)
        values = value if isinstance(value, list) else [value]
        parts = [item[PART] for item in values if isinstance(item, dict) and isinstance(item.get(PART), dict)]
    known = {_form(name): key for key, name in spec.keys.items()} | {_form(key): key for key in spec.keys}
    said: list[dict[str, bool]] = []
    for part in parts:
        read: dict[str, bool] = {}
        for name, value in part.items():
            verdict = _WORDS.get(value.strip().casefold()) if isinstance(value, str) else value
            if isinstance(verdict, bool) and (key := known.get(_form(name))) is not None:
                read[key] = read.get(key, False) or verdict
        said.append(read)
    agreed = {key: _agreed([verdicts.get(key) for verdicts in said]) for key in spec.keys}
    return {key: verdict for key, verdict in agreed.items() if verdict is not None} or None


def _agreed(verdicts: Sequence[bool | None]) -> bool | None:
    """Return True if any verdict is True, False if there are some and all are False, else None."""
    return True if any(verdicts) else False if verdicts and None not in verdicts else None


def _parts(text: str) -> list[Mapping[str, object]]:
    """Return the complete sets of verdicts in a text; quoted JSON inside a string never matches, as it is escaped."""
    parts: list[Mapping[str, object]] = []
    decoder, position = json.JSONDecoder(), 0
    while len(parts) < MAX_PARTS and (start := _PART.search(text, position)) is not None:
        position = start.end()
        try:
            value, end = decoder.raw_decode(text[position : position + MAX_READ])
        except (ValueError, RecursionError):
            continue
        parts.append(value)
        position += end
    return parts


def _form(name: str) -> str:
    """Normalize a class name: ``jailBreakingQuery``, ``JAIL_BREAKING_QUERY`` and ``jail-breaking`` are the same."""
    return re.sub(r"[\W_]+", "", normalize(str(name)[:400])).removesuffix("query")


def classify(plan: QueryPlan, spec: ClassificationSpec, verdicts: Mapping[str, bool] | None) -> None:
    """Set a plan's ``classifications`` (None without a verdict) and ``labels``; warn of classes without a verdict."""
    said = verdicts or {}
    judged = {item: said[KEYS[item]] for item in spec.types if item in KEYS and KEYS[item] in said}
    labels = {name: said.get(key) for key, name in spec.keys.items() if key not in CLASSES}
    plan.labels = [name for name, fits in labels.items() if fits]
    fits_any = _agreed([*labels.values()])
    if fits_any is not None:
        judged[QueryClass.USER_DEFINED_CLASSIFICATION_QUERY] = fits_any
    plan.classifications = [QueryClassification(type=item, positive=judged[item]) for item in judged] or None
    lacking = [item.value for item in spec.types if item not in judged]
    lacking += [f"label {quoted(name)!r}" for name, fits in labels.items() if fits is None]
    if lacking:
        plan.warnings.append(f"the question was not classified as to: {', '.join(lacking)}")
