"""Reading protobuf's JSON strictly, as ``json_format.Parse`` does, with errors that name the field.

Names are camelCase or snake_case; null is not set (but nothing inside a list is null); int64 is a number or text;
enums are names or numbers. Refused are unknown fields, a field in both spellings, two members of a ``oneof``, lone
surrogates, NaN, and JSON objects that name a key twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator, StrictBool, StrictStr, model_validator

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.wire.google_enums import ProtoEnum
from llama_index_agentic_kb.wire.google_values import LONE_SURROGATE

__all__ = ["Flag", "Int32", "Int64", "Labels", "Number", "Text", "WireMessage", "at_most", "enum", "load"]

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DIGITS: Final = 60
_MAX_LABELS: Final = 64
_MAX_LABEL: Final = 63


class WireMessage(Model):
    """A message as it is sent."""

    ONEOFS: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields of which at most one may be set, by their camelCase names."""

    @model_validator(mode="before")
    @classmethod
    def _protobuf_json(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"an object is expected, found {_told(data)}")  # noqa: TRY004 (pydantic takes ValueError)
        names: dict[Any, str] = {name: str(field.alias) for name, field in cls.model_fields.items()}
        known: dict[str, Any] = {}
        for key, value in data.items():
            name = str(names.get(key, key))
            if name in known:
                raise ValueError(f"{name} is given twice, in both spellings")
            known[name] = value
        for members in cls.ONEOFS:
            given = [name for name in members if known.get(name) is not None]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} exclude each other: send one of them")
        fields = set(names.values())
        return {name: value for name, value in known.items() if value is not None or name not in fields}


def load(body: Any) -> Any:
    """Give the data of a JSON body; data stays what it is.

    Raises:
        InvalidRequestError: It is no JSON, names a key twice, or holds NaN or Infinity.
    """
    if not isinstance(body, (str, bytes, bytearray)):
        return body
    try:
        return json.loads(body, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"body: it is no JSON that can be read: {reason}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:60]!r} is given twice")
    return data


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _told(value: Any) -> str:
    """Tell a value shortly, for errors."""
    return "null" if value is None else f"{str(value)[:60]!r}"


def _number(value: Any) -> float:
    """Read a number, or the text of one."""
    if isinstance(value, str) and len(value) <= _DIGITS and _NUMBER.fullmatch(value):
        return int(value) if value.removeprefix("-").isdigit() else float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise ValueError(f"a number is expected, found {_told(value)}")


def _finite(value: Any) -> float:
    number = _number(value)
    if not abs(number) < math.inf:
        raise ValueError("a number must be finite")
    return float(number)


def _whole(bits: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = _number(value)
        if not abs(number) < math.inf or number != int(number):
            raise ValueError(f"a whole number is expected, found {_told(value)}")
        if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            raise ValueError(f"{_told(value)} is out of the range of {bits} bits")
        return int(number)

    return read


def _writable(text: str) -> str:
    if LONE_SURROGATE.search(text):
        raise ValueError("the text holds a lone surrogate, which UTF-8 can't write")
    return text


def _few(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > _MAX_LABELS:
        raise ValueError(f"{len(labels)} labels; at most {_MAX_LABELS} are taken")
    for key, value in labels.items():
        if not 1 <= len(key) <= _MAX_LABEL or len(value) > _MAX_LABEL:
            raise ValueError(
                f"label {key[:80]!r}: a key has 1 to {_MAX_LABEL} characters, a value at most {_MAX_LABEL}"
            )
    return labels


def at_most(limit: int) -> AfterValidator:
    """Limit the characters of a ``Text``."""

    def check(value: str) -> str:
        if len(value) > limit:
            raise ValueError(f"the text has {len(value)} characters; at most {limit} are taken")
        return value

    return AfterValidator(check)


def enum(table: ProtoEnum[Any]) -> Any:
    """Give the type of a field that holds an enum's value; None is unspecified."""
    return BeforeValidator(table.decode)


Flag: TypeAlias = StrictBool
Text: TypeAlias = Annotated[StrictStr, AfterValidator(_writable)]
Number: TypeAlias = Annotated[float, BeforeValidator(_finite)]
Int32: TypeAlias = Annotated[int, BeforeValidator(_whole(32))]
Int64: TypeAlias = Annotated[int, BeforeValidator(_whole(64))]
Labels: TypeAlias = Annotated[dict[Text, Text], AfterValidator(_few)]
