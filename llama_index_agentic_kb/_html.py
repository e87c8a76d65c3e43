"""Renders a response as an HTML fragment for notebooks and web pages, without scripts or external resources.

The template is ``_html.jinja``. All values are shown as text: they are escaped, and characters that hide or reverse
text are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["response_html"]

Record: TypeAlias = Mapping[str, Any]

ROWS: Final = 100
"""Maximum rows of a list to show."""
LONG: Final = 360
"""Number of characters above which an extract is collapsed."""
MOST: Final = 20_000
"""Maximum characters of a passage to show."""

_KEPT: Final = frozenset("\n\t\u200c\u200d")  # the joiners, which some scripts and emoji need
_MARKER: Final = re.compile(r"[ \t]{0,8}\[ref_id:([0-9]{1,9})\]")
_PIECE: Final = re.compile(rf"\n|{_MARKER.pattern}")
_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}]+", re.IGNORECASE)
_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_TONES: Final = {"ok": "ok", "empty": "warn", "skipped": "warn", "timeout": "bad", "error": "bad", "denied": "bad"}
_STAGES: Final = {"modelQueryPlanning": "Plan", "agenticReasoning": "Evidence", "modelAnswerSynthesis": "Answer"}
_PURPOSES: Final = {"check": "Check", "repair": "Repair", "relatedQuestions": "Related questions"}
_VERDICTS: Final = {"supported": "ok", "partiallySupported": "warn", "unsupported": "bad", "contradicted": "bad"}
_WORDS: Final = {"count": "found", "inputTokens": "tokens in", "outputTokens": "tokens out"}


def response_html(data: Record) -> str:
    """Render a response: missing parts, answer or extracts, sources, and timeline.

    Args:
        data: The JSON form of a ``RetrievalResponse``.

    Returns:
        An HTML fragment with scoped styles, whose element ids are derived from its content.
    """
    text = "\n".join(map(_content, data.get("response") or ()))
    references, activity = data.get("references") or [], data.get("activity") or []
    keys = [str(item.get(key)) for item in (*references, *activity) for key in ("docKey", "startedAt")]
    sources = [_source(item, item.get("id"), (item.get("sourceData") or {}).get("content")) for item in references]
    extracts = _extracts(text, {source["number"]: source for source in reversed(sources)})
    cited = {int(number) for number in _MARKER.findall(text)}
    if extracts is not None:
        cited = {extract["number"] for extract in extracts}
    used = [source for source in sources if source["number"] in cited or (extracts is None and not cited)]
    titles = {source["number"]: source["title"] for source in used[:ROWS]}
    for listed in (used, extracts or []):
        seen: set[int | None] = {None}
        for source in listed:
            source["first"] = source["number"] not in seen
            seen.add(source["number"])
    claims = [claim for claim in (data.get("grounding") or {}).get("claims", ()) if claim.get("score") is not None]
    duration, records = _timeline(activity)
    return _template().render(
        prefix=f"akb-{hashlib.sha256(repr((text, keys)).encode()).hexdigest()[:12]}",
        missing=data.get("missing") or [],
        partial=data.get("statusCode") == 206,  # noqa: PLR2004 (HTTP: partial content)
        warnings=(data.get("plan") or {}).get("warnings") or [],
        extracts=extracts,
        paragraphs=_paragraphs(text, titles),
        titles=titles,
        claims=claims,
        supported=sum(claim["verdict"] == "supported" for claim in claims),
        verdicts=_VERDICTS,
        used=used,
        unused=[source for source in sources if source not in used],
        records=records,
        duration=duration,
        rows=ROWS,
        long=LONG,
        most=MOST,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, Undefined  # noqa: PLC0415 (loaded when a response is shown)
    from markupsafe import Markup  # noqa: PLC0415 (same)

    def shown(value: object) -> str:
        return value if isinstance(value, Markup) else "" if isinstance(value, Undefined) else _plain(value)

    environment = Environment(autoescape=True, finalize=shown)
    environment.filters |= {
        "cut": lambda value, limit: _cut(shown(value), limit),
        "number": lambda value: f"{value:,.0f}",
        "preview": lambda text, limit: _cut(" ".join(_plain(text)[: LONG + 1].split()), limit),
        "unmarked": lambda text: _MARKER.sub("", _plain(text)),
    }
    environment.tests["web"] = lambda url: isinstance(url, str) and url == _plain(url) and bool(_WEB.fullmatch(url))
    lines = files(__package__).joinpath("_html.jinja").read_text("utf-8").splitlines()
    return environment.from_string("".join(line.strip() for line in lines))


def _source(item: Record, ref_id: object, content: object) -> dict[str, Any]:
    """Return the template data for a source or an extract."""
    label = _plain(ref_id)
    number = int(label) if re.fullmatch("[0-9]{1,9}", label) else None
    scores = [
        f"{name} {item[key]:.3f}" for key, name in (("score", "score"), ("rerankerScore", "reranked")) if item.get(key)
    ]
    facts = [_cut(_plain(item.get("knowledgeSourceName")), 100), *scores, _cut(_plain(item.get("terms")), 300)]
    return {
        "number": number,
        "label": label if number is None else str(number + 1),
        "title": item.get("title"),
        "facts": " · ".join(filter(None, facts)),
        "url": item.get("url") or item.get("citationUrl"),
        "content": _plain(content).strip(),
        "name": item.get("knowledgeSourceName"),
        "item": item,
    }


def _extracts(text: str, known: Mapping[int | None, Record]) -> list[dict[str, Any]] | None:
    """Parse extracted data into rows, with the data of their sources; return None if the text is an answer."""
    try:
        items = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(items, list) or not all(isinstance(item, dict) and "ref_id" in item for item in items):
        return None
    rows = []
    for item in items:
        source = known.get(item["ref_id"] if isinstance(item["ref_id"], int) else None, {}).get("item", {})
        own = {"title": item.get("title"), "terms": item.get("terms")}
        rows.append(_source({**source, **own}, item["ref_id"], item.get("content")))
    return rows


def _paragraphs(text: str, titles: Mapping[int, object]) -> list[list[tuple[str, int | None]]]:
    """Split an answer into paragraphs of (text, None) pieces and (marker, number) pieces for listed references."""
    made = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        if not paragraph.strip():
            continue
        pieces: list[tuple[str, int | None]] = []
        at, body = 0, paragraph.strip("\n")
        for found in _PIECE.finditer(body):
            number = None if found[1] is None else int(found[1])
            if number is not None and number not in titles:
                continue
            pieces += [(body[at : found.start()], None), (found[0], number)]
            at = found.end()
        made.append([*pieces, (body[at:], None)])
    return made


def _timeline(activity: Sequence[Record]) -> tuple[float, list[dict[str, Any]]]:
    """Return the total time in milliseconds, and a timeline row with a bar for each activity record."""
    spans = [_span(record) for record in activity]
    first = min((span[0] for span in spans if span), default=0.0)
    total = max((span[1] for span in spans if span), default=0.0) - first
    rows = []
    for record, span in zip(activity, spans, strict=True):
        kind, error = record.get("type"), record.get("error") or {}
        rows.append(
            {
                "name": _PURPOSES.get(record.get("purpose") or "")
                or _STAGES.get(kind or "")
                or record.get("knowledgeSourceName")
                or kind,
                "tone": _TONES.get(record.get("outcome") or "", "none"),
                "outcome": record.get("outcome"),
                "elapsed": record.get("elapsedMs"),
                "bar": _bar(span, first, total) if span else "",
                "facts": " · ".join(filter(None, _facts(record))),
                "failure": ": ".join(filter(None, (_cut(_plain(error.get(key)), 500) for key in ("code", "message")))),
                "warning": record.get("warning"),
            }
        )
    return total * 1000, rows


def _facts(record: Record) -> list[str]:
    """Return the details of an activity record: query, counts, filter, and model."""
    arguments = record.get(f"{record.get('type')}Arguments") or {}
    asked = (_cut(_plain(record.get("subQueryId")), 40), _cut(_plain(arguments.get("search")), 300))
    facts = [": ".join(filter(None, asked))]
    for key, value in record.items():
        counts = isinstance(value, int | float) and not isinstance(value, bool) and key not in ("id", "elapsedMs")
        if counts and (value or key == "count"):
            facts.append(f"{value:,.0f} {_WORDS.get(key) or _CAPITAL.sub(' ', _plain(key)).lower()}")
    if queries := record.get("subQueries"):
        facts.append(f"{len(queries):,} {'query' if len(queries) == 1 else 'queries'}")
    if narrowed := arguments.get("filter"):
        facts.append(f"filter {_cut(_plain(json.dumps(narrowed, ensure_ascii=False)), 300)}")
    return [*facts, _cut(_plain((record.get("model") or {}).get("modelName")), 80)]


def _bar(span: tuple[float, float], first: float, total: float) -> str:
    """Return the CSS position and width of a bar, in percent of the total time."""
    width = min(100.0, max(0.5, (span[1] - span[0]) / total * 100)) if total > 0 else 100.0
    left = min(100.0 - width, (span[0] - first) / total * 100) if total > 0 else 0.0
    return f"left:{left:.2f}%;width:{width:.2f}%"


def _span(record: Record) -> tuple[float, float] | None:
    start, end = record.get("startedAt"), record.get("completedAt")
    if start is None:
        return None
    began = datetime.fromisoformat(start).timestamp()
    return began, began if end is None else max(began, datetime.fromisoformat(end).timestamp())


def _content(message: Record) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content or ())


def _plain(value: object) -> str:
    """Return a value as text, without control, format and surrogate characters, which hide or reverse text."""
    text = "" if value is None else str(value)
    hidden = {char for char in set(text) - _KEPT if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    return "".join(char for char in text if char not in hidden) if hidden else text


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + "…"
