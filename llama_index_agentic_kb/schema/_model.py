"""The base class of all models in this package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticSerializationError

from llama_index_agentic_kb._text import one_line, without_surrogates
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import InvalidRequestError

MAX_DEPTH: Final = 200  # maximum nesting of objects and lists; close to pydantic's own limit for JSON text
MAX_FIELDS: Final = 20  # maximum number of invalid fields named in an error message
MAX_CHARACTERS: Final = 300  # for each field's path and message, as callers may send long names and values


class Shown:
    """Mixin of responses that can be shown in a notebook, or saved as a page."""

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: answer or extracts, sources, plan and timeline; all text is escaped."""
        from llama_index_agentic_kb import _html  # noqa: PLC0415 (only if a response is shown)

        return _html.response_html(self._shown())

    def save(self, path: str | Path) -> Path:
        """Write the response as an HTML page that needs nothing else, and return its path."""
        from llama_index_agentic_kb import _html  # noqa: PLC0415 (same)

        page = Path(path)
        page.write_text(_html.page_html(self._shown()), encoding="utf-8")
        return page

    def _shown(self) -> JsonMapping:
        """Return the JSON form of the ``RetrievalResponse`` to show. Subclasses must implement this."""
        raise NotImplementedError


class Model(BaseModel):
    """A model with camelCase names in JSON and snake_case names in Python; input may use either."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        serialize_by_alias=True,
        protected_namespaces=(),
        defer_build=True,  # build validators at first use, to keep imports fast
    )

    def to_dict(self) -> JsonObject:
        """Return the JSON form: camelCase keys, no None values; values without a JSON type become text."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, fallback=str)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the JSON form as text."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=indent, fallback=str)

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """Return JSON text with all control characters escaped, for terminals; lone surrogates become U+FFFD."""
        try:
            text = super().model_dump_json(indent=indent, **options)
        except PydanticSerializationError:
            options.pop("ensure_ascii", None)
            data = self.model_dump(mode="json", **options)
            separators = (",", ":") if indent is None else None
            text = without_surrogates(json.dumps(data, ensure_ascii=False, indent=indent, separators=separators))
        return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)

    @classmethod
    def parse(cls, data: object) -> Self:
        """Load a model from a mapping or JSON text; raise ``InvalidRequestError``, which names each invalid field."""
        try:
            if isinstance(data, (str, bytes)):
                return cls.model_validate_json(data)
            return cls.model_validate(_plain(data))
        except ValidationError as error:
            raise InvalidRequestError(describe(error)) from error


def _plain(data: object, depth: int = 0) -> object:
    """Convert nested mappings of any type, such as the models of Azure's SDK, to dictionaries."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"request: it is nested too deep; at most {MAX_DEPTH} objects inside each other")
    if isinstance(data, Mapping):
        return {key: _plain(value, depth + 1) for key, value in data.items()}
    return [_plain(value, depth + 1) for value in data] if isinstance(data, list) else data


def describe(error: ValidationError) -> str:
    """Return a validation error as one line: the path and the error of each invalid field, at most 20."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    parts = []
    for problem in problems[:MAX_FIELDS]:
        where = one_line(".".join(str(step)[:MAX_CHARACTERS] for step in problem["loc"]), MAX_CHARACTERS) or "request"
        message = one_line(problem["msg"][: 2 * MAX_CHARACTERS].removeprefix("Value error, "), MAX_CHARACTERS)
        parts.append(message if message.startswith(where) else f"{where}: {message}")
    if len(problems) > MAX_FIELDS:
        parts.append(f"and {len(problems) - MAX_FIELDS:,} more")
    return "; ".join(parts)
