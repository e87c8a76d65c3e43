"""Resource names: ``projects/P/locations/L/...``, read and written.

Serving configs, sessions and answers have one of three parents: a data store, a data store in a collection, an engine
in a collection. The Python client's own helpers know the first alone. What is no such name raises
``InvalidRequestError``, with the field where it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema.answer_query import NEW_SESSION

_SEGMENT: Final = r"[^/\s\x00-\x1f]{1,250}"
_LOCATION: Final = rf"projects/(?P<project>{_SEGMENT})/locations/(?P<location>{_SEGMENT})"
_PARENT: Final = (
    rf"{_LOCATION}(?:/collections/(?P<collection>{_SEGMENT}))?/(?P<kind>dataStores|engines)/(?P<id>{_SEGMENT})"
)
_SESSION: Final = rf"/sessions/(?P<session>{_SEGMENT})"


@dataclass(frozen=True, slots=True)
class Parent:
    """A data store or an engine; its text is the resource name.

    Args:
        project: The project id or number.
        location: The location, such as "global".
        id: The id of the data store or engine.
        collection: The collection; None is possible for a data store only.
        engine: Whether the resource is an engine.
    """

    project: str
    location: str
    id: str
    collection: str | None = None
    engine: bool = False

    def __str__(self) -> str:
        """Return the resource name."""
        collection = f"/collections/{self.collection}" if self.collection else ""
        kind = "engines" if self.engine else "dataStores"
        return f"projects/{self.project}/locations/{self.location}{collection}/{kind}/{self.id}"


@dataclass(frozen=True, slots=True)
class SessionName:
    """A session; the id ``-`` is one that is to be made, or (of an answer) any."""

    parent: Parent
    id: str

    @property
    def is_new(self) -> bool:
        """Whether it stands for a session that is to be made."""
        return self.id == NEW_SESSION

    def __str__(self) -> str:
        """Return the resource name."""
        return f"{self.parent}/sessions/{self.id}"

    def answer(self, answer_id: str) -> str:
        """Return the name of one of its answers."""
        return f"{self}/answers/{answer_id}"


def parse_parent(name: str, field: str = "parent") -> Parent:
    """Read the name of a data store or an engine."""
    return _under_parent("", name, field, "")[0]


def parse_serving_config(name: str, field: str = "servingConfig") -> Parent:
    """Read the name of a serving config, and return its parent."""
    return _under_parent(f"/servingConfigs/{_SEGMENT}", name, field, "/servingConfigs/{id}")[0]


def parse_session_name(name: str, field: str = "session") -> SessionName:
    """Read the name of a session, ``{parent}/sessions/-`` included."""
    parent, found = _under_parent(_SESSION, name, field, "/sessions/{id}")
    return SessionName(parent, found["session"])


def parse_answer_name(name: str, field: str = "name") -> tuple[SessionName, str]:
    """Read the name of an answer, and return its session's and its id."""
    pattern = rf"{_SESSION}/answers/(?P<answer>{_SEGMENT})"
    parent, found = _under_parent(pattern, name, field, "/sessions/{session}/answers/{answer}")
    return SessionName(parent, found["session"]), found["answer"]


def check_config_name(name: str, field: str) -> None:
    """Check the name of a grounding or a ranking config, by its field "groundingConfig" or "rankingConfig"."""
    shape = f"projects/{{project}}/locations/{{location}}/{field}s/{{config}}"
    _matched(rf"{_LOCATION}/{field}s/{_SEGMENT}", name, field, shape)


def _under_parent(pattern: str, name: str, field: str, shape: str) -> tuple[Parent, re.Match[str]]:
    found = _matched(_PARENT + pattern, name, field, f"{{parent}}{shape}")
    engine = found["kind"] == "engines"
    if engine and found["collection"] is None:
        raise InvalidRequestError(
            f"{found[0][:200]!r}: an engine is named with its collection, .../collections/C/engines/E"
        )
    return Parent(found["project"], found["location"], found["id"], found["collection"], engine), found


def _matched(pattern: str, name: str, field: str, shape: str) -> re.Match[str]:
    found = re.fullmatch(pattern, name)
    if found is None:
        raise InvalidRequestError(
            f"{field}: {name[:200]!r} is no resource name of the form {shape}, with a parent such as "
            "projects/P/locations/L/collections/C/engines/E"
        )
    return found
