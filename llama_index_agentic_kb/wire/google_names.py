"""Resource names: ``projects/P/locations/L/...``, read and written.

Serving configs, sessions and answers have one of three parents: a data store, a data store in a collection, an engine
in a collection. The Python client's own helpers know the first alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION

__all__ = [
    "AnswerName",
    "ConfigName",
    "Parent",
    "ServingConfigName",
    "SessionName",
    "parse_answer_name",
    "parse_config_name",
    "parse_parent",
    "parse_serving_config",
    "parse_session_name",
]

_SEGMENT: Final = r"[^/\s\x00-\x1f]{1,250}"
_LOCATION: Final = rf"projects/(?P<project>{_SEGMENT})/locations/(?P<location>{_SEGMENT})"
_PARENT: Final = (
    rf"{_LOCATION}(?:/collections/(?P<collection>{_SEGMENT}))?/(?P<kind>dataStores|engines)/(?P<id>{_SEGMENT})"
)
_PARENT_NAME: Final = re.compile(_PARENT)
_CHILD_NAME: Final = re.compile(
    rf"(?P<parent>{_PARENT})/(?P<child>servingConfigs|sessions)/(?P<child_id>{_SEGMENT})(?:/answers/(?P<answer>{_SEGMENT}))?"
)
_CONFIG_NAME: Final = re.compile(rf"{_LOCATION}/(?P<kind>groundingConfigs|rankingConfigs)/(?P<id>{_SEGMENT})")


@dataclass(frozen=True, slots=True)
class Parent:
    """A data store or an engine.

    Args:
        project: Its project.
        location: Where it is, "global" for one.
        id: Its own name.
        collection: Its collection; None only of a data store.
        engine: Whether it is an engine.
    """

    project: str
    location: str
    id: str
    collection: str | None = None
    engine: bool = False

    def __str__(self) -> str:
        """Give the resource name."""
        collection = f"/collections/{self.collection}" if self.collection else ""
        kind = "engines" if self.engine else "dataStores"
        return f"projects/{self.project}/locations/{self.location}{collection}/{kind}/{self.id}"


@dataclass(frozen=True, slots=True)
class ServingConfigName:
    """A serving config: what a question is put to."""

    parent: Parent
    id: str

    def __str__(self) -> str:
        """Give the resource name."""
        return f"{self.parent}/servingConfigs/{self.id}"


@dataclass(frozen=True, slots=True)
class SessionName:
    """A session; of id ``-`` one that is to be made, or (of an answer) any."""

    parent: Parent
    id: str

    @property
    def is_new(self) -> bool:
        """Whether it stands for a session that is to be made."""
        return self.id == NEW_SESSION

    def __str__(self) -> str:
        """Give the resource name."""
        return f"{self.parent}/sessions/{self.id}"

    def answer(self, answer_id: str) -> AnswerName:
        """Name an answer of the session."""
        return AnswerName(self, answer_id)


@dataclass(frozen=True, slots=True)
class AnswerName:
    """An answer of a session."""

    session: SessionName
    id: str

    def __str__(self) -> str:
        """Give the resource name."""
        return f"{self.session}/answers/{self.id}"


@dataclass(frozen=True, slots=True)
class ConfigName:
    """A grounding config or a ranking config."""

    project: str
    location: str
    id: str
    ranking: bool = False

    def __str__(self) -> str:
        """Give the resource name."""
        kind = "rankingConfigs" if self.ranking else "groundingConfigs"
        return f"projects/{self.project}/locations/{self.location}/{kind}/{self.id}"


def parse_parent(name: str, field: str = "parent") -> Parent:
    """Read the name of a data store or an engine.

    Args:
        name: The resource name.
        field: Where it stands, for errors.

    Raises:
        InvalidRequestError: It is no such name.
    """
    return _parent(_matched(_PARENT_NAME, name, field, "{parent}"))


def parse_serving_config(name: str, field: str = "servingConfig") -> ServingConfigName:
    """Read the name of a serving config; see ``parse_parent``."""
    return ServingConfigName(*_child(name, field, "servingConfigs"))


def parse_session_name(name: str, field: str = "session") -> SessionName:
    """Read the name of a session, ``{parent}/sessions/-`` included; see ``parse_parent``."""
    return SessionName(*_child(name, field, "sessions"))


def parse_answer_name(name: str, field: str = "name") -> AnswerName:
    """Read the name of an answer; see ``parse_parent``."""
    shape = "{parent}/sessions/{session}/answers/{answer}"
    found = _matched(_CHILD_NAME, name, field, shape)
    if found["child"] != "sessions" or found["answer"] is None:
        raise _refused(name, field, shape)
    return AnswerName(SessionName(_parent(found), found["child_id"]), found["answer"])


def parse_config_name(name: str, field: str) -> ConfigName:
    """Read the name of a grounding config or a ranking config; see ``parse_parent``."""
    kind = "rankingConfigs" if field == "rankingConfig" else "groundingConfigs"
    shape = f"projects/{{project}}/locations/{{location}}/{kind}/{{config}}"
    found = _matched(_CONFIG_NAME, name, field, shape)
    if found["kind"] != kind:
        raise _refused(name, field, shape)
    return ConfigName(found["project"], found["location"], found["id"], ranking=kind == "rankingConfigs")


def _child(name: str, field: str, kind: str) -> tuple[Parent, str]:
    shape = f"{{parent}}/{kind}/{{id}}"
    found = _matched(_CHILD_NAME, name, field, shape)
    if found["child"] != kind or found["answer"] is not None:
        raise _refused(name, field, shape)
    return _parent(found), found["child_id"]


def _parent(found: re.Match[str]) -> Parent:
    engine = found["kind"] == "engines"
    if engine and found["collection"] is None:
        raise InvalidRequestError(
            f"{found[0][:200]!r}: an engine is named with its collection, .../collections/C/engines/E"
        )
    return Parent(found["project"], found["location"], found["id"], found["collection"], engine)


def _matched(pattern: re.Pattern[str], name: str, field: str, shape: str) -> re.Match[str]:
    found = pattern.fullmatch(name)
    if found is None:
        raise _refused(name, field, shape)
    return found


def _refused(name: str, field: str, shape: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field}: {name[:200]!r} is no resource name of the form {shape}, with a parent such as "
        "projects/P/locations/L/collections/C/engines/E"
    )
