"""The base of every model here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from llama_index_agentic_kb.errors import InvalidRequestError

__all__ = ["Model"]


class Model(BaseModel):
    """A model with camelCase names on the wire and snake_case names in Python; both are taken as input."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        serialize_by_alias=True,
        protected_namespaces=(),
    )

    def to_dict(self) -> dict[str, Any]:
        """Give the wire form: camelCase, JSON types only, nothing that is None; what JSON has no type for is text."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, fallback=str)

    def to_json(self, *, indent: int | None = None) -> str:
        """Give the wire form as JSON text."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=indent, fallback=str)

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Load wire data (a mapping, or JSON text), with errors that name each field at fault.

        Raises:
            InvalidRequestError: The data doesn't fit; the message lists field and reason.
        """
        try:
            if isinstance(data, (str, bytes)):
                return cls.model_validate_json(data)
            return cls.model_validate(_plain(data))
        except ValidationError as error:
            raise InvalidRequestError(describe(error)) from error


def _plain(data: Any) -> Any:
    """Give mappings of any kind, such as the models of Azure's SDK, as dictionaries, all the way down."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list) else data


def describe(error: ValidationError) -> str:
    """Tell a validation error in one line: each field by its path, and what is wrong with it."""
    parts = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(step) for step in problem["loc"]) or "request"
        message = problem["msg"].removeprefix("Value error, ")
        parts.append(message if message.startswith(where) else f"{where}: {message}")
    return "; ".join(parts)
