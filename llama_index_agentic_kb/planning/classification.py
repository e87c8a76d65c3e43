"""Query classification: what kind of question it is, judged by the planning model in the planner's own call.

The classes are those of Google's ``queryClassificationSpec`` (Discovery Engine v1), and labels of the user's own. The
verdicts stand first in the reply, so that they are read while the plan is still written, and are kept where the rest
of it fails. They are made from the user's messages alone: no retrieved text is in the planner's prompt.

A class that was not judged has no verdict: not classified is never the same as passed.
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
from llama_index_agentic_kb.llm import repair_json, strip_code_fence
from llama_index_agentic_kb.prompts import CLASSES, CLASSIFICATION, LABEL, as_data, with_rules
from llama_index_agentic_kb.schema import QueryPlan
from llama_index_agentic_kb.schema.activity import QueryClass, QueryClassification

PART: Final = "classification"
"""The key of the verdicts in a reply."""

MAX_LABELS: Final = 50

KEYS: Final[Mapping[QueryClass, str]] = {
    QueryClass.ADVERSARIAL_QUERY: "adversarial",
    QueryClass.JAIL_BREAKING_QUERY: "jail_breaking",
    QueryClass.NON_ANSWER_SEEKING_QUERY: "non_answer_seeking",
    QueryClass.NON_ANSWER_SEEKING_QUERY_V2: "no_clear_intent",
}
"""The key of each class in a reply; labels are ``label_1``, ``label_2``, ..."""

MAX_REPLY: Final = 100_000
"""Characters of a planner's reply that are read; a plan is never that long."""

MAX_READ: Final = 8_000
"""Characters of one set of verdicts that are read, and of a reply that is still written."""

MAX_PARTS: Final = 20
"""Sets of verdicts of one reply that are read: each may be 8,000 characters of nothing."""

_PART: Final = re.compile(rf'"{PART}"\s{{0,20}}:\s{{0,20}}(?=\{{)', re.IGNORECASE)
_STARTS: Final = re.compile(r"\s{0,20}(?:```\w{0,10}\s{0,20})?\{\s{0,20}" + _PART.pattern, re.IGNORECASE)
_WORDS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class ClassificationSpec:
    """Which classes a question is judged by.

    Args:
        types: The classes that are asked for, each once. ``USER_DEFINED_CLASSIFICATION_QUERY`` can only be judged where
            there are labels.
        labels: The user's own labels: a name, and a description of the questions that it fits. With any, the
            user-defined class is judged too: it is positive where a label fits.

    Raises:
        ConfigurationError: A type is unknown, a label has no name or no text, two labels have the same name, or there
            are more than 50.
    """

    types: tuple[QueryClass, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the arguments, and keep copies of them."""
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
        """What is asked for: each key of the reply, with its name outside of it."""
        named = {KEYS[item]: item.value for item in self.types if item in KEYS}
        return named | {f"label_{number}": name for number, name in enumerate(self.labels, start=1)}


def requested(spec: ClassificationSpec | None) -> ClassificationSpec | None:
    """Return a specification that asks for anything, else None."""
    return spec if spec is not None and spec.keys else None


def ask_for_classes(messages: Sequence[ChatMessage], spec: ClassificationSpec) -> list[ChatMessage]:
    """Return a planner's messages, whatever their template, with the classes asked for.

    A label's words are the application's; they can't end a line or a block.
    """
    lines = []
    for key, name in spec.keys.items():
        definition = CLASSES.get(key)
        if definition is None:
            about = one_line(as_data(spec.labels[name]), 400)
            definition = LABEL.format(name=quoted(name)) + (f": {about}" if about else ".")
        lines.append(f'- "{key}": {definition}')
    form = json.dumps({PART: dict.fromkeys(spec.keys, False)})[:-1] + ', "sub_queries": [...]}'
    return with_rules(messages, CLASSIFICATION.format(classes="\n".join(lines), form=form))


def strict_object(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON schema of an object with these properties, strict enough for OpenAI's structured outputs."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def read_verdicts(reply: str, spec: ClassificationSpec, *, whole: bool = True) -> dict[str, bool] | None:
    """Return the verdicts of a reply by key, for what it says plainly; None where it has none.

    A model may repeat what a user wrote, verdicts and all, before it gives its own. So where there are several sets,
    each class is positive where any of them says so, and negative only where all of them do.

    Before the reply has ended (``whole``), only complete verdicts at its very start are read, and nothing is repaired.
    """
    text = reply[: MAX_REPLY if whole else MAX_READ]
    parts = _parts(text) if whole or _STARTS.match(text) else []
    if whole and not parts:
        parts = _repaired(text)
    read = [_booleans(part, spec) for part in parts]
    agreed = {key: _agreed([verdicts.get(key) for verdicts in read]) for key in spec.keys}
    return {key: verdict for key, verdict in agreed.items() if verdict is not None} or None


def _agreed(verdicts: Sequence[bool | None]) -> bool | None:
    """Return True where any verdict is, False where all are, else None."""
    if any(verdicts):
        return True
    return False if verdicts and None not in verdicts else None


def _parts(text: str) -> list[Mapping[str, object]]:
    """Return the complete verdicts of a text; inside a JSON string there are none, for its quotes are escaped."""
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


def _repaired(text: str) -> list[Mapping[str, object]]:
    """Return the verdicts of broken JSON: cut off, with other quotes, with a comma too many."""
    body = strip_code_fence(text)
    start = body.find("{")
    try:
        value = repair_json(body[start : start + MAX_READ]) if start >= 0 else None
    except (ValueError, RecursionError):
        return []
    values = value if isinstance(value, list) else [value]
    parts = [item.get(PART) for item in values if isinstance(item, dict)]
    return [part for part in parts if isinstance(part, dict)]


def _booleans(part: Mapping[str, object], spec: ClassificationSpec) -> dict[str, bool]:
    """Return the booleans of one set of verdicts by our keys; models also name a class or a label in full."""
    known = {_form(name): key for key, name in spec.keys.items()} | {_form(key): key for key in spec.keys}
    read: dict[str, bool] = {}
    for name, value in part.items():
        verdict = _WORDS.get(value.strip().casefold()) if isinstance(value, str) else value
        if isinstance(verdict, bool) and (key := known.get(_form(name))) is not None:
            read[key] = read.get(key, False) or verdict
    return read


def _form(name: str) -> str:
    """``jailBreakingQuery``, ``JAIL_BREAKING_QUERY``, ``jail-breaking`` and ``jail_breaking`` are one name."""
    return re.sub(r"[\W_]+", "", normalize(str(name)[:400])).removesuffix("query")


def classify(plan: QueryPlan, spec: ClassificationSpec | None, verdicts: Mapping[str, bool] | None) -> None:
    """Write the classes of its question into a plan, with a warning for those that were not judged.

    Its ``classifications`` stay None where nothing was judged; ``verdicts`` are what the model said, by key.
    """
    if spec is None:
        return
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
