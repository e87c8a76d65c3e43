"""The parameters of a tool by its JSON schema: values are checked against it, and found in a user's words by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from typing import Annotated, Any, Final

from pydantic import JsonValue, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from llama_index_agentic_kb._text import normalize, one_line
from llama_index_agentic_kb.errors import ConfigurationError

MAX_SCHEMA: Final = 50_000
"""The maximum length of a tool's schema as JSON text, in characters."""

MAX_DEPTH: Final = 50
"""The maximum nesting depth of a tool's schema."""

MAX_CHECKS: Final = 10_000
"""The maximum number of a schema's keywords that are checked for one value: references multiply them."""

MAX_VALUE: Final = 500  # the maximum length of a text argument in characters
MAX_READ: Final = 2_000  # the maximum number of characters of a message in which values are looked for
MAX_PATTERN: Final = 200  # the maximum length of a schema's pattern that is looked for in messages
MAX_FOUND: Final = 20  # the maximum number of matches that are looked at; so many are ambiguous anyway
MAX_MATCH: Final = 100  # the maximum length of a match in characters

# The formats that can be found in a text; others are only checked.
_FORMATS: Final[Mapping[str, str]] = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "date-time": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(?::\d{2})?(?:Z|[+-]\d{2}:\d{2})?",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_NUMBERS: Final[Mapping[str, str]] = {"integer": r"[+-]?\d+", "number": r"[+-]?\d+(?:\.\d+)?"}
_BOOLEANS: Final = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool.

    Args:
        name: Its name.
        schema: Its JSON schema, without the variant null.
        required: Whether the tool can't be called without it.
        label: What it is, for the user: its description, or else its name.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool
    label: str

    @property
    def options(self) -> list[JsonValue]:
        """The only allowed values; empty if there is no such list."""
        return list(self.schema.get("enum") or ([self.schema["const"]] if "const" in self.schema else []))

    @property
    def free(self) -> bool:
        """Whether any text is a value, so that none can be recognised in a sentence."""
        fixed = self.options or self.schema.get("pattern") or self.schema.get("format")
        return self.schema.get("type") == "string" and not fixed

    @property
    def derived(self) -> bool:
        """Whether a value may be written otherwise than in the user's words: an option, a yes or no, a date."""
        by_format = str(self.schema.get("format", "")).startswith("date")
        return bool(self.options) or by_format or self.schema.get("type") == "boolean"

    def read(self, value: object) -> JsonValue:
        """Return a value as the schema's type.

        Raises:
            ValueError: The value does not fit the schema.
        """
        kind, options = self.schema.get("type"), self.options
        if isinstance(value, str):
            value = _of_text(value.strip(), kind)
            value = next((one for one in options if normalize(str(one)) == normalize(str(value))), value)
        elif kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and len(value) > MAX_VALUE:
            raise ValueError(f"{self.name}: at most {MAX_VALUE} characters")
        try:
            problem = next(_validator(self.schema).iter_errors(value), None)
        except Exception as error:  # no valid schema, or one that refers to another
            raise ValueError(f"{self.name}: its schema can't be checked: {type(error).__name__}") from error
        if value is None or problem is not None:
            raise ValueError(f"{self.name}: {one_line(problem.message if problem else 'it is null')}")
        return value  # type: ignore[return-value]  # the schema describes JSON

    def found_in(self, text: str) -> list[JsonValue]:
        """Return the distinct values in a text: options, matches of the pattern or format, numbers."""
        text, kind = text[:MAX_READ], str(self.schema.get("type"))
        if self.options:
            words = f" {_spaced(text)} "
            found = [str(one) for one in self.options if f" {_spaced(str(one))} " in words]
        else:
            pattern = self.schema.get("pattern") or _FORMATS.get(str(self.schema.get("format"))) or _NUMBERS.get(kind)
            found = _matches(pattern, text) if isinstance(pattern, str) else []
        distinct: dict[str, JsonValue] = {}
        for one in [*dict.fromkeys(found)][:MAX_FOUND]:
            for form in (one, one.upper(), one.lower()):
                try:
                    value = self.read(form)
                except ValueError:
                    continue
                distinct.setdefault(repr(value), value)
                break
        return list(distinct.values())


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a tool's JSON schema by name, in its order.

    Raises:
        ConfigurationError: The schema is too large, nested too deep, or no JSON schema of arguments.
    """
    try:
        _check_size(json.dumps(schema, default=str))
        shared = {key: {**schema[key]} for key in ("$defs", "definitions") if key in schema}
        required = [*(schema.get("required") or ())]
        declared = {**(schema.get("properties") or {})}
        return {name: _parameter(name, own, shared, required=name in required) for name, own in declared.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(f"a tool's schema can't be used: {one_line(str(error))}") from error


def _check_size(schema: str) -> None:
    signs = re.sub(r'"(?:[^"\\]|\\.)*"', "", schema[: MAX_SCHEMA + 1])  # brackets within texts nest nothing
    if len(schema) > MAX_SCHEMA or max(accumulate((c in "{[") - (c in "}]") for c in signs), default=0) > MAX_DEPTH:
        raise ValueError(f"at most {MAX_SCHEMA:,} characters of JSON, nested {MAX_DEPTH} deep, are read")


def _parameter(name: str, declared: object, shared: Mapping[str, Any], *, required: bool) -> Parameter:
    own = _resolved(declared if isinstance(declared, Mapping) else {}, shared)
    label = one_line(str(own.get("description") or name.replace("_", " ")), 150)
    return Parameter(name, {**own, **shared}, required, label)


def _resolved(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema without a local reference at its top, and without the variant null."""
    variants = [one for one in schema.get("anyOf") or schema.get("oneOf") or () if one.get("type") != "null"]
    if len(variants) == 1:
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "default")}
        schema = {**rest, **variants[0]}
    section, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    target = shared.get(section, {}).get(name)
    if isinstance(target, Mapping):
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import Draft202012Validator, validators  # noqa: PLC0415 (0.1 s; only tools need it)
    from referencing import Registry  # noqa: PLC0415

    if re.search("patternProperties|unevaluated", json.dumps(schema, default=str)):
        raise ValueError("patternProperties and unevaluatedProperties are not checked")
    checks, done, depth = {**Draft202012Validator.VALIDATORS, "pattern": _pattern_errors}, count(), 0

    def counted(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def errors(*args: Any) -> Iterator[Any]:
            nonlocal depth
            depth += 1  # beyond the interpreter's own limit, ``referencing`` panics
            try:
                if next(done) >= MAX_CHECKS or depth > MAX_DEPTH:
                    raise ValueError("its references lead to too many checks")
                yield from check(*args) or ()
            finally:
                depth -= 1

        return errors

    # An empty registry: a schema's references are never fetched.
    kind = validators.extend(Draft202012Validator, {name: counted(check) for name, check in checks.items()})
    return kind(schema, format_checker=Draft202012Validator.FORMAT_CHECKER, registry=Registry())


def _pattern_errors(_validator: object, pattern: str, instance: object, _schema: object) -> Iterator[Exception]:
    from jsonschema import ValidationError  # noqa: PLC0415 (as above)

    if isinstance(instance, str) and not _fits(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@lru_cache(maxsize=1_024)
def _matcher(pattern: str) -> TypeAdapter[str]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern, strict=True)])


def _fits(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text, in linear time: pydantic's engine (Rust's) never backtracks.

    A tool's schema may come from a server that is not trusted.

    Raises:
        SchemaError: The engine does not read the pattern (a lookaround, a back reference, an error).
    """
    try:
        _matcher(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


def _of_text(text: str, kind: object) -> JsonValue:
    """Return a text as a value of a type if it is one."""
    if kind == "boolean":
        return _BOOLEANS.get(text.casefold(), text)
    if kind in ("integer", "number") and re.fullmatch(r"[+-]?\d+(?:\.\d+)?", text):
        return int(text) if re.fullmatch(r"[+-]?\d{1,300}", text) else float(text)
    return text


def _matches(pattern: str, text: str) -> list[str]:
    """Return the parts of a text that match a pattern and stand alone as words: from each start, the longest.

    In another letter case ("a-4711", where the pattern says A) a part counts if it has a digit or is the whole text:
    plain words would match too often.
    """
    if len(pattern) > MAX_PATTERN:
        return []
    bare, pattern = text.strip(" .!,"), pattern.removeprefix("^").removesuffix("$")
    ends = [found.start() for found in re.finditer(r"(?<=\S)(?![\w-]|\.\d)", text)]
    words: list[str] = []
    try:
        if not _fits(f"(?i:{pattern})", text):  # most messages: one look in linear time
            return []
        for found in re.finditer(r"(?<![\w.-])(?=\S)", text):
            start = found.start()
            for end in reversed([end for end in ends if start < end <= start + MAX_MATCH]):
                if _fits(f"^(?i:{pattern})$", part := text[start:end]):
                    exact = _fits(f"^(?:{pattern})$", part)
                    words += [part] if exact or part == bare or any(map(str.isdigit, part)) else []
                    break
            if len(words) > MAX_FOUND:
                break
    except SchemaError:
        return []
    return words


def _spaced(text: str) -> str:
    return " ".join(re.findall(r"\w+", normalize(text.replace("_", " "))))
