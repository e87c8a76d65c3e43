"""Resource names: ``projects/P/locations/L/...``, parsed and built.

Serving configs, sessions and answers have one of three parents: a data store, a data store in a collection, an engine
in a collection. The Python client's own helpers support only the first. A name of another form
raises ``InvalidRequestError``, which names the field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from llama_index_agentic_kb.errors import InvalidRequestError

_SEGMENT: Final = r"[^/\s\x00-\x1f]{1,250}"
_LOCATION: Final = rf"projects/(?P<project>{_SEGMENT})/locations/(?P<location>{_SEGMENT})"
_PARENT: Final = (
    rf"{_LOCATION}(?:/collections/(?P<collection>{_SEGMENT}))?/(?P<kind>dataStores|engines)/(?P<id>{_SEGMENT})"
)
_SESSION: Final = rf"/sessions/(?P<session>{_SEGMENT})"


@dataclass(frozen=True, slots=True)
class Parent:
    """A data store or an engine; ``str`` of it is the resource name."""

    project: str  # its id or number
    location: str  # such as "global"
    id: str
    collection: str | None = None  # an engine needs one
    engine: bool = False

    def __str__(self) -> str:
        """Return the resource name."""
        collection = f"/collections/{self.collection}" if self.collection else ""
        kind = "engines" if self.engine else "dataStores"
        return f"projects/{self.project}/locations/{self.location}{collection}/{kind}/{self.id}"


@dataclass(frozen=True, slots=True)
class SessionName:
    """A session's resource name; the id ``-`` means a new session or, in an answer's name, any session."""

    parent: Parent
    id: str

    def __str__(self) -> str:
        """Return the resource name."""
        return f"{self.parent}/sessions/{self.id}"

    def answer(self, answer_id: str) -> str:
        """Return the resource name of an answer of this session."""
        return f"{self}/answers/{answer_id}"


def parse_parent(name: str, field: str = "parent") -> Parent:
    """Parse the resource name of a data store or an engine."""
    return _under_parent("", name, field, "")[0]


def parse_serving_config(name: str) -> Parent:
    """Parse the resource name of a serving config, and return its parent."""
    return _under_parent(f"/servingConfigs/{_SEGMENT}", name, "servingConfig", "/servingConfigs/{id}")[0]


def parse_session_name(name: str) -> SessionName:
    """Parse the resource name of a session; its id may be ``-`` (a new session)."""
    parent, found = _under_parent(_SESSION, name, "session", "/sessions/{id}")
    return SessionName(parent, found["session"])


def parse_answer_name(name: str) -> tuple[SessionName, str]:
    """Parse the resource name of an answer, and return the session's name and the answer's id."""
    pattern = rf"{_SESSION}/answers/(?P<answer>{_SEGMENT})"
    parent, found = _under_parent(pattern, name, "name", "/sessions/{session}/answers/{answer}")
    return SessionName(parent, found["session"]), found["answer"]


def check_config_name(name: str, field: str) -> None:
    """Check the resource name of a config; ``field`` is "groundingConfig" or "rankingConfig"."""
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
