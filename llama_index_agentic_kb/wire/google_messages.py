"""Google's messages in protobuf's JSON, parsed strictly and written; and resource names (``projects/P/...``).

Serving configs, sessions and answers have one of three parents: a data store, a data store in a collection, an engine
in a collection. The Python client's own helpers for names support only the first. The last part of a parent's name is
its id.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar

from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.errors import ConfigurationError, InvalidAnswerError, InvalidRequestError
from llama_index_agentic_kb.schema.grounding import MAX_FACT_CHARACTERS, MAX_FACTS, MAX_RECORDS
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS

Untyped: TypeAlias = Any
"""A protobuf message, its class or its descriptor; they are created at run time and have no static types."""
Fields: TypeAlias = JsonObject  # fields of a message by JSON name

MAX_DEPTH: Final = 40  # of objects and lists in encoded JSON; deeper values become text. Protobuf's parsers stop at 100
_EXACT: Final = 2**53
_INT32: Final = 2**31 - 1
_MAX_LABELS: Final = 64
_MAX_LABEL: Final = 63
_SHOWN: Final = 60

_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "SearchParams.max_return_results": (0, MAX_DOCUMENTS),
    "DataStoreSpec.num_results": (0, MAX_DOCUMENTS),
    "ConditionBoostSpec.boost": (-1, 1),
    "ControlPoint.boost_amount": (-1, 1),
    "QueryRephraserSpec.max_rephrase_steps": (0, 5),
    "CheckGroundingSpec.citation_threshold": (0, 1),
    "RankRequest.top_n": (0, _INT32),
    "ListSessionsRequest.page_size": (0, _INT32),
    "AnswerQueryRequest.user_pseudo_id": (0, 128),
    "Session.user_pseudo_id": (0, 128),
    "EndUserMetaData.ChunkInfo.content": (0, 8_000),
    "BoostSpec.condition_boost_specs": (0, 20),
    "CheckGroundingRequest.facts": (0, MAX_FACTS),
    "GroundingFact.fact_text": (0, MAX_FACT_CHARACTERS),
    "RankRequest.records": (0, MAX_RECORDS),
}
"""Range of each number, and of the number of characters or items of each other field.

The protos have none; these are from Google's reference, with our maximum of documents."""

E = TypeVar("E", bound=Enum)


def message_class(kind: str) -> Untyped:
    """Return one of Google's message classes; raise ``ConfigurationError`` if the package is not installed."""
    try:
        from google.cloud import discoveryengine_v1  # noqa: PLC0415 (an extra, and 0.7 s)
    except ImportError as error:
        raise ConfigurationError(
            "Google's contract needs the package google-cloud-discoveryengine; "
            "install it with: pip install 'llama-index-agentic-kb[google]'"
        ) from error
    return getattr(discoveryengine_v1, kind).pb()


def member(kind: type[E], value: int) -> E | None:
    """Return the enum member with a protobuf number (our enums have Google's order); None for 0, unspecified."""
    return list(kind)[value - 1] if value else None


def clean(text: str) -> str:
    """Return the text with lone surrogates replaced by U+FFFD, so that UTF-8 can encode it. Its length is unchanged."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def write(kind: str, data: Mapping[str, object], *, enum_as_int: bool = False) -> Fields:
    """Return a message as JSON data in protobuf's form: defaults omitted, int64 as text, times in UTC, no None.

    Unusual values in a document's metadata cause no error: lone surrogates become U+FFFD, infinite numbers and NaN
    become null, whole numbers beyond 2^53 and values of types that JSON lacks become text. With ``enum_as_int`` enums
    are numbers (``$alt=json;enum-encoding=int``). Data of other fields and types raise ``InvalidAnswerError``.
    """
    message = message_class(kind)()
    from google.protobuf import json_format  # type: ignore[import-untyped]  # noqa: PLC0415 (an extra)

    try:
        json_format.ParseDict(plain(data, numbers=True), message)
    except json_format.ParseError as error:
        raise InvalidAnswerError(f"{kind}: {error}") from error
    written: Fields = json_format.MessageToDict(message, use_integers_for_enums=enum_as_int)
    return written


def plain(value: object, depth: int = 0, *, numbers: bool = False) -> object:
    """Return data as JSON data (see ``write``); enum members become text, or protobuf's ``numbers``."""
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return {clean(str(key)): plain(item, depth + 1, numbers=numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < MAX_DEPTH:
        return [plain(item, depth + 1, numbers=numbers) for item in value]
    return 1 + list(type(value)).index(value) if numbers and isinstance(value, Enum) else _plain_scalar(value)


def _plain_scalar(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) <= _EXACT):
        return value
    return value.isoformat() if isinstance(value, date) else clean(str(value))


def read(kind: str, body: object) -> Untyped:
    """Parse and check a request's body (JSON text, or parsed JSON) as a message such as "RankRequest".

    Field names are camelCase or snake_case, null means unset, int64 is a number or text, enums are names or numbers. An
    ``InvalidRequestError`` names the field: not JSON, a duplicate key, an unknown field or enum value, two members of a
    oneof, a wrong type (an empty list or text counts as an empty message), a lone surrogate, a value out of range.
    """
    message = message_class(kind)()
    from google.protobuf import json_format  # noqa: PLC0415 (an extra)

    if isinstance(body, (str, bytes, bytearray)):
        try:
            body = json.loads(body, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise _refused("body", f"it is no JSON that can be read: {reason}") from None
    if not isinstance(body, Mapping):
        raise _refused("body", f"an object is expected, found {str(body)[:_SHOWN]!r}")
    try:
        json_format.ParseDict(body, message)
    except json_format.ParseError as error:
        raise _parse_error(str(error), kind) from None
    except OverflowError:
        raise _refused("body", "a number is too large") from None
    _check_bounds(message, "")
    return message


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {key[:_SHOWN]!r} is given twice")
        data[key] = value
    return data


def _refused(path: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path.lstrip('.') or 'body'}: {reason}")


def _parse_error(text: str, kind: str) -> InvalidRequestError:
    """Return an error with the message of ``json_format``, preceded by the field's path."""
    place = re.search(rf' at "?{kind}\.?([\w.\[\]]*?)"?\.*(?:\n|$)', text)
    path = place[1] if place else ".".join(re.findall(r"Failed to parse (\w+) field: ", text))
    reason = re.sub(r"Failed to parse \w+ field: ", "", text[: place.start()] if place else text).strip(".")
    reason = re.sub(r'"?google\.[\w.]*\.(\w+)"?', r"\1", reason)
    return _refused(re.sub(r"\[(\d+)\]", r".\1", path), reason[: 5 * _SHOWN])


def _check_bounds(message: Untyped, path: str) -> None:
    """Refuse values that the protos allow and Google's reference does not, and unknown numbers of enums."""
    for field, value in message.ListFields():
        at, kind = f"{path}.{field.json_name}", field.message_type
        if field.name == "user_labels":
            _check_labels(value, at)
        elif kind is None:
            _check_value(field, value, at)
        elif not (kind.GetOptions().map_entry or kind.full_name.startswith("google.protobuf.")):  # these have no bounds
            _check_size(field, value, at)
            for position, item in enumerate(value if field.is_repeated else [value]):
                _check_bounds(item, f"{at}.{position}" if field.is_repeated else at)


@cache
def _range_of(name: str) -> tuple[float, float]:
    return next((bounds for end, bounds in _BOUNDS.items() if name.endswith(f".{end}")), (-math.inf, math.inf))


def _check_size(field: Untyped, value: Untyped, path: str) -> None:
    most = _range_of(field.full_name)[1]
    if (field.is_repeated or isinstance(value, str)) and len(value) > most:
        unit = "items" if field.is_repeated else "characters"
        raise _refused(path, f"{len(value)} {unit}; at most {most} are taken")


def _check_value(field: Untyped, value: Untyped, path: str) -> None:
    _check_size(field, value, path)
    least, most = _range_of(field.full_name)
    if field.enum_type and not set(value if field.is_repeated else [value]) <= set(field.enum_type.values_by_number):
        names = ", ".join(field.enum_type.values_by_name)
        raise _refused(path, f"{field.enum_type.name} has no such value; it has {names}")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and least <= value <= most):
        raise _refused(path, f"a finite number from {least:,} to {most:,} is expected, found {value}")


def _check_labels(labels: Mapping[str, str], path: str) -> None:
    if len(labels) > _MAX_LABELS:
        raise _refused(path, f"{len(labels)} labels; at most {_MAX_LABELS} are taken")
    if any(not 1 <= len(key) <= _MAX_LABEL or len(text) > _MAX_LABEL for key, text in labels.items()):
        raise _refused(path, f"a label's key has 1 to {_MAX_LABEL} characters, its value at most {_MAX_LABEL}")


# -- resource names ----------------------------------------------------------------------------------------------------

_PART: Final = r"[^/\s\x00-\x1f]{1,250}"
_COLLECTION: Final = f"/collections/{_PART}"
_PARENT: Final = f"projects/{_PART}/locations/{_PART}(?:(?:{_COLLECTION})?/dataStores|{_COLLECTION}/engines)/{_PART}"


def parse_parent(name: str, field: str = "parent") -> str:
    """Check the name of a data store or an engine, and return it; an ``InvalidRequestError`` names the field."""
    return _parts("{parent}", name, field)[0]


def parse_serving_config(name: str) -> str:
    """Parse the resource name of a serving config, and return its parent."""
    return _parts("{parent}/servingConfigs/{config}", name, "servingConfig")[0]


def parse_session_name(name: str) -> tuple[str, str]:
    """Parse the resource name of a session, and return its parent and its id, which may be ``-`` (a new session)."""
    parent, session = _parts("{parent}/sessions/{session}", name, "session")
    return parent, session


def parse_answer_name(name: str) -> tuple[str, str, str]:
    """Parse the resource name of an answer, and return its session's parent and id (``-``: any), and its own id."""
    parent, session, answer = _parts("{parent}/sessions/{session}/answers/{answer}", name, "name")
    return parent, session, answer


def check_config_name(name: str, field: str) -> None:
    """Check the resource name of a config; ``field`` is "groundingConfig" or "rankingConfig"."""
    _parts(f"projects/{{project}}/locations/{{location}}/{field}s/{{config}}", name, field)


def _parts(shape: str, name: str, field: str) -> tuple[str, ...]:
    """Return the parts of a resource name at the ``{placeholders}`` of its shape; errors name ``field``."""
    found = re.fullmatch(
        re.sub(r"\{(\w+)\}", lambda part: f"({_PARENT if part[1] == 'parent' else _PART})", shape), name
    )
    if found is None:
        parent = "projects/P/locations/L/collections/C/engines/E (an engine is named with its collection)"
        example = f", with a parent such as {parent}" if "{parent}" in shape else ""
        raise InvalidRequestError(f"{field}: {name[:200]!r} is no resource name of the form {shape}{example}")
    return found.groups()
