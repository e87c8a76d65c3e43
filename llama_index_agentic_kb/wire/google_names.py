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

_LOCATION: Final = "projects/{project}/locations/{location}"
_PARENT: Final = _LOCATION + "(?:/collections/{collection})?/(?P<kind>dataStores|engines)/{id}"


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
    return _under_parent("", name, field)[0]


def parse_serving_config(name: str) -> Parent:
    """Parse the resource name of a serving config, and return its parent."""
    return _under_parent("/servingConfigs/{config}", name, "servingConfig")[0]


def parse_session_name(name: str) -> SessionName:
    """Parse the resource name of a session; its id may be ``-`` (a new session)."""
    parent, parts = _under_parent("/sessions/{session}", name, "session")
    return SessionName(parent, parts["session"])


def parse_answer_name(name: str) -> tuple[SessionName, str]:
    """Parse the resource name of an answer, and return the session's name and the answer's id."""
    parent, parts = _under_parent("/sessions/{session}/answers/{answer}", name, "name")
    return SessionName(parent, parts["session"]), parts["answer"]


def check_config_name(name: str, field: str) -> None:
    """Check the resource name of a config; ``field`` is "groundingConfig" or "rankingConfig"."""
    _matched("", f"{_LOCATION}/{field}s/{{config}}", name, field)


def _under_parent(shape: str, name: str, field: str) -> tuple[Parent, re.Match[str]]:
    parts = _matched(_PARENT, shape, name, field)
    engine = parts["kind"] == "engines"
    if engine and parts["collection"] is None:
        raise InvalidRequestError(
            f"{name[:200]!r}: an engine is named with its collection, .../collections/C/engines/E"
        )
    return Parent(parts["project"], parts["location"], parts["id"], parts["collection"], engine), parts


def _matched(parent: str, shape: str, name: str, field: str) -> re.Match[str]:
    found = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/\\s\\x00-\\x1f]{1,250})", parent + shape), name)
    if found is None:
        example = ", with a parent such as projects/P/locations/L/collections/C/engines/E"
        form = f"{{parent}}{shape}{example}" if parent else shape
        raise InvalidRequestError(f"{field}: {name[:200]!r} is no resource name of the form {form}")
    return found
