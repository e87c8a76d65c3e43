"""Shows a response as HTML for notebooks and pages: one fragment, no script, nothing loaded from elsewhere.

Works on the wire form. Whatever it holds is shown as text: every value goes through ``_text``, the only door.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TypeAlias

__all__ = ["response_html"]

Record: TypeAlias = Mapping[str, Any]

ROWS: Final = 100
"""How many rows of a list are shown."""
LONG: Final = 360
"""An extract longer than this is folded."""
MOST: Final = 20_000
"""How many characters of one passage are shown."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_KEPT: Final = "\n\t\u200c\u200d"  # the joiners: some scripts and emoji can't be written without them
_MARKER: Final = re.compile(r"[ \t]{0,8}\[ref_id:([0-9]{1,9})\]")
_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}]+", re.IGNORECASE)
_TONES: Final = {"ok": "ok", "empty": "warn", "skipped": "warn", "timeout": "bad", "error": "bad", "denied": "bad"}
_STAGES: Final = {"modelQueryPlanning": "Plan", "agenticReasoning": "Evidence", "modelAnswerSynthesis": "Answer"}
_SCORES: Final = {"score": "score", "rerankerScore": "reranked"}
_WORDS: Final = {"count": "found", "inputTokens": "tokens in", "outputTokens": "tokens out"}
_TOLD_IF_ZERO: Final = ("candidates", "count", "kept")
_TOLD_ELSEWHERE: Final = ("id", "elapsedMs")

# Colours: the notebook's own, else VS Code's, else the reader's preference. Bars and dots read on light and on dark.
_STYLE: Final = """<style>
.agentic-kb{--l-fg:#1f2328;--l-dim:#59636e;--l-bg:#fff;--l-link:#0969da;--ok:#2f9e5b;--warn:#c98a0b;--bad:#df4a43;
--line:rgba(128,128,128,.28);--tint:rgba(128,128,128,.1);
@media (prefers-color-scheme:dark){--l-fg:#e6edf3;--l-dim:#9da7b1;--l-bg:#0d1117;--l-link:#6cb0ff}
--fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--l-fg)));
--dim:var(--jp-content-font-color2,var(--vscode-descriptionForeground,var(--l-dim)));
--bg:var(--jp-layout-color0,var(--vscode-editor-background,var(--l-bg)));
--link:var(--jp-content-link-color,var(--vscode-textLink-foreground,var(--l-link)));
box-sizing:border-box;max-width:60rem;padding:1rem 1.25rem;border:1px solid var(--line);border-radius:8px;
background:var(--bg);color:var(--fg);font:14px/1.55 system-ui,sans-serif;overflow-wrap:anywhere;text-align:start;
& p,& ul{margin:0 0 .6em;max-width:46rem}& ul{padding-inline-start:1.2em}
& a{color:var(--link);text-decoration:none}& a:hover{text-decoration:underline}
& .akb-head{margin:1.5em 0 .5em;max-width:none;padding-bottom:.3em;border-bottom:1px solid var(--line)}
& .akb-head:first-of-type{margin-top:0}& .akb-dim,& details{color:var(--dim);font-size:12.5px}
& sup{line-height:0;font-size:.75em;margin-inline-start:.15em}
& sup a{padding:.1em .35em;border-radius:4px;background:var(--tint);font-weight:600}
& ol.akb-list{list-style:none;margin:0;padding:0}
& ol.akb-list>li{position:relative;margin:0;padding:.35em .4em .35em 2.4em;border-radius:4px}
& ol.akb-list>li:target{background:var(--tint);box-shadow:inset 3px 0 var(--link)}
& .akb-number{position:absolute;left:0;width:1.7em;text-align:right;color:var(--dim)}
& summary{cursor:pointer}& details[open]>summary>.akb-preview{display:none}
& details[open]>summary:has(.akb-preview)::after{content:"Show less"}
& .akb-passage{white-space:pre-wrap;max-width:46rem}& details>.akb-passage{margin:.4em 0;padding:.6em .8em;max-height:24em;
overflow:auto;border-inline-start:3px solid var(--line);background:var(--tint);color:var(--fg);font-size:13px}
& .akb-notice{margin:0 0 1em;padding:.6em .9em;border:1px solid var(--warn);border-inline-start-width:4px;
border-radius:4px;background:rgba(201,138,11,.1);& ul{margin:.3em 0 0}}
& .akb-row{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,2fr) 5.5em 5em;gap:0 1em;padding:.45em 0;
border-bottom:1px solid var(--line);&:last-child{border-bottom:0}}& .akb-wide{grid-column:1/-1}
& .akb-track{position:relative;height:8px;margin-top:.5em;border-radius:4px;background:var(--tint);overflow:hidden}
& .akb-bar{position:absolute;top:0;bottom:0;min-width:3px;border-radius:4px;background:var(--dim)}
& .akb-ms{text-align:end;color:var(--dim);font-variant-numeric:tabular-nums}
& .akb-outcome::before{content:"";display:inline-block;width:.6em;height:.6em;margin-inline-end:.45em;
border-radius:50%;background:var(--dim)}
& .akb-ok::before,& .akb-bar.akb-ok{background:var(--ok)}& .akb-warn::before,& .akb-bar.akb-warn{background:var(--warn)}
& .akb-bad::before,& .akb-bar.akb-bad{background:var(--bad)}
& .akb-told{border-inline-start:3px solid var(--warn);padding-inline-start:.6em;&.akb-bad{border-color:var(--bad)}}
@media (max-width:600px){& .akb-row{grid-template-columns:1fr auto auto}& .akb-track{grid-row:2;grid-column:1/-1}}}
</style>"""


def response_html(data: dict[str, Any]) -> str:
    """Render a response: what is missing, the answer or the extracts, the sources, the timeline.

    Args:
        data: The wire form of a response. Missing keys and odd types are left out, not raised.

    Returns:
        A fragment whose style is scoped to its class and whose ids are made from its content.
    """
    text = "\n".join(_message(message) for message in _records(data.get("response")))
    references, activity = _records(data.get("references")), _records(data.get("activity"))
    keys = [_plain(item.get(key)) for item in (*references, *activity) for key in ("docKey", "startedAt")]
    prefix = f"akb-{hashlib.sha256(chr(10).join((text, *keys)).encode(errors='replace')).hexdigest()[:12]}"
    extracts = _extracts(text)
    result = _answer(text, references, prefix) if extracts is None else _extracted(extracts, references, prefix)
    return f'<div class="agentic-kb">{_STYLE}{_notices(data)}{result}{_timeline(activity)}</div>'


def _notices(data: Record) -> str:
    """Tell what is missing, and what was wrong with the plan."""

    def part(item: Record) -> str:
        told = _joined(_text(item.get("outcome"), 40), _text(item.get("reason"), 500), between=": ")
        query = f" ({shown})" if (shown := _text(item.get("subQueryId"), 60)) else ""
        return f"<li><strong>{_text(item.get('what'), 100)}</strong>{query} {told}</li>"

    missing, warnings = _records(data.get("missing")), _record(data.get("plan")).get("warnings")
    notices = ""
    if missing or data.get("statusCode") == 206:  # noqa: PLR2004 (HTTP: partial content)
        notices += _notice("Incomplete (206): a part is missing from this response.", _rows(missing, part))
    if isinstance(warnings, list) and warnings:
        notices += _notice("About the plan", _rows(warnings, lambda item: f"<li>{_text(item, 500)}</li>"))
    return notices


def _notice(title: str, rows: str) -> str:
    return f'<div class="akb-notice" role="note"><strong>{title}</strong>{f"<ul>{rows}</ul>" if rows else ""}</div>'


def _answer(text: str, references: Sequence[Record], prefix: str) -> str:
    """Show the answer, each marker a link to its source, and the sources; those not cited are folded."""
    cited = {int(number) for number in _MARKER.findall(text)}
    used = [item for item in references if not cited or _ref_number(item.get("id")) in cited]
    rest = [item for item in references if cited and _ref_number(item.get("id")) not in cited]
    titles = {number: item.get("title") for item in used[:ROWS] if (number := _ref_number(item.get("id"))) is not None}
    paragraphs = [part.strip("\n") for part in re.split(r"\n[ \t]*\n", _plain(text)) if part.strip()]
    shown = "".join(f'<p dir="auto">{_cited(part, titles, prefix)}</p>' for part in paragraphs)
    listed = _heading("Sources", f"{len(references):,}") + _listed(used, prefix, fold=True) if references else ""
    return _heading("Answer") + (shown or "<p>No answer.</p>") + listed + _rest(rest, "read and not cited")


def _cited(text: str, titles: Mapping[int, Any], prefix: str) -> str:
    """Escape a text; a marker becomes a link if its source is shown, and stays text if it isn't."""
    shown, position = "", 0
    for marker in _MARKER.finditer(text):
        number = int(marker[1])
        shown += _text(text[position : marker.start()])
        title = f'title="{_text(titles.get(number), 200)}"'
        link = f'<sup><a href="#{prefix}-{number}" {title}>{number + 1}</a></sup>'
        shown += link if number in titles else _text(marker[0])
        position = marker.end()
    return (shown + _text(text[position:])).replace("\n", "<br>\n")


def _extracted(extracts: Sequence[Record], references: Sequence[Record], prefix: str) -> str:
    """Show the extracts, each with what is known of its source."""
    known = {_ref_number(item.get("id")): item for item in reversed(references)}
    items = []
    for extract in extracts:
        number = _ref_number(extract.get("ref_id"))
        own = {"id": number, "title": extract.get("title"), "terms": extract.get("terms"), "sourceData": extract}
        items.append({**known.pop(number, {}), **own})
    listed = _listed(items, prefix, fold=False) or "<p>Nothing was found.</p>"
    rest = [item for item in references if known.get(_ref_number(item.get("id"))) is item]
    return _heading("Extracts", f"{len(extracts):,}") + listed + _rest(rest, "read and not extracted")


def _rest(items: Sequence[Record], what: str) -> str:
    listed = _listed(items, "", fold=True)
    return f"<details><summary>{len(items):,} more that were {what}</summary>{listed}</details>" if items else ""


def _listed(items: Sequence[Record], prefix: str, *, fold: bool) -> str:
    """List sources by number; with a prefix, the first of each number gets an id."""
    taken: set[int] = set()

    def row(item: Record) -> str:
        number = _ref_number(item.get("id"))
        anchor = f' id="{prefix}-{number}"' if prefix and number is not None and number not in taken else ""
        taken.update(() if number is None else (number,))
        scores = (f"{word} {item[key]:.3f}" for key, word in _SCORES.items() if _number(item.get(key)))
        address = _address(item.get("url") or item.get("citationUrl"))
        name, terms = _text(item.get("knowledgeSourceName"), 100), _text(item.get("terms"), 300)
        label = _text(item.get("id"), 12) if number is None else str(number + 1)
        return (
            f'<li{anchor}><span class="akb-number">{label}</span>'
            f'<strong dir="auto">{_text(item.get("title"), 300) or "(untitled)"}</strong> '
            f'<span class="akb-dim">{_joined(name, *scores, terms, address)}</span>'
            f"{_passage(_record(item.get('sourceData')).get('content'), fold=fold)}</li>"
        )

    return f'<ol class="akb-list">{_rows(items, row)}</ol>' if items else ""


def _passage(content: Any, *, fold: bool) -> str:
    """Show a passage; a long one opens from its first words, and so does each if told to fold."""
    text = _plain(content).strip()
    passage = f'<div class="akb-passage" dir="auto">{_text(text, MOST)}</div>' if text else ""
    if not text or (not fold and len(text) <= LONG):
        return passage
    preview = _text(" ".join(text[:LONG].split()), 110 if fold else LONG // 2)
    return f'<details><summary><span class="akb-preview">{preview}</span></summary>{passage}</details>'


def _timeline(records: Sequence[Record]) -> str:
    """Show one row a record, with a bar where it lies in the whole time."""
    spans = [span for span in map(_span, records) if span]
    first, last = min((start for start, _ in spans), default=0.0), max((end for _, end in spans), default=0.0)
    rows = _rows(records, lambda record: _timeline_row(record, _place(_span(record), first, last - first)), "div")
    return _heading("Timeline", f"{(last - first) * 1000:,.0f} ms") + f"<div>{rows}</div>" if records else ""


def _timeline_row(record: Record, place: str) -> str:
    kind, outcome, error = _plain(record.get("type")), _plain(record.get("outcome")), _record(record.get("error"))
    name = _STAGES.get(kind) or _text(record.get("knowledgeSourceName"), 100) or _text(kind, 60)
    tone, elapsed = f"akb-{_TONES.get(outcome, 'none')}", _number(record.get("elapsedMs"))
    arguments = _record(record.get(f"{kind}Arguments"))
    query = _joined(_text(record.get("subQueryId"), 40), _text(arguments.get("search"), 300), between=": ")
    failure = _joined(_text(error.get("code"), 80), _text(error.get("message"), 500), between=": ")
    warning = _text(record.get("warning"), 500)
    return (
        f'<div class="akb-row"><strong dir="auto">{name}</strong>'
        f'<div class="akb-track">{place and f"""<div class="akb-bar {tone}" style="{place}"></div>"""}</div>'
        f'<div class="akb-outcome {tone}">{_text(outcome, 20) or "open"}</div>'
        f'<div class="akb-ms">{elapsed and f"{elapsed} ms"}</div>'
        f"{_line(query, 'dim')}{_line(_facts(record, arguments), 'dim')}"
        f"{_line(failure, 'told akb-bad')}{_line(warning, 'told')}</div>"
    )


def _line(shown: str, style: str) -> str:
    return f'<div class="akb-wide akb-{style}" dir="auto">{shown}</div>' if shown else ""


def _facts(record: Record, arguments: Record) -> str:
    """Tell what a record counts, under which filter it searched, and which model it called."""
    told = []
    for key, value in islice(record.items(), ROWS):
        if (number := _number(value)) and key not in _TOLD_ELSEWHERE and (value or key in _TOLD_IF_ZERO):
            told.append(f"{number} {_WORDS.get(key) or _text(re.sub('([A-Z])', r' \1', _plain(key)).lower(), 60)}")
    if isinstance(queries := record.get("subQueries"), list):
        told.append(f"{len(queries):,} queries")
    if narrowed := arguments.get("filter"):
        told.append(f"filter {_text(json.dumps(narrowed, ensure_ascii=False, default=_plain, skipkeys=True), 300)}")
    return _joined(*told, _text(_record(record.get("model")).get("modelName"), 80))


def _place(span: tuple[float, float] | None, first: float, total: float) -> str:
    """Give the style of a bar, in percent of the whole time; empty where a record's times can't be told."""
    if span is None:
        return ""
    width = min(100.0, max(0.5, (span[1] - span[0]) / total * 100)) if total > 0 else 100.0
    left = min(100.0 - width, (span[0] - first) / total * 100) if total > 0 else 0.0
    return f"left:{left:.2f}%;width:{width:.2f}%"


def _span(record: Record) -> tuple[float, float] | None:
    start, end = _seconds(record.get("startedAt")), _seconds(record.get("completedAt"))
    return None if start is None else (start, start if end is None else max(start, end))


def _seconds(value: Any) -> float | None:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH).total_seconds()


def _message(message: Record) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(_plain(part.get("text")) for part in _records(content))


def _extracts(text: str) -> list[Record] | None:
    """Read the extracted data; None where the text is an answer."""
    try:
        items = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    extracted = isinstance(items, list) and all(isinstance(item, dict) and "ref_id" in item for item in items)
    return items if extracted else None


def _ref_number(value: Any) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,9}", text := _plain(value)) else None


def _number(value: Any) -> str:
    """Write a number with its thousands apart; empty for what is none, or absurd."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.0f}" if numeric and abs(value) < 1e15 else ""  # noqa: PLR2004 (no count is beyond it)


def _address(value: Any) -> str:
    """Link a web address; anything else that stands in its place, scripts included, is only shown."""
    shown = _text(value, 120)
    if not isinstance(value, str) or value != _plain(value) or not _WEB.fullmatch(value):
        return shown
    return f'<a href="{html.escape(value)}" target="_blank" rel="noopener noreferrer nofollow">{shown}</a>'


def _heading(title: str, note: str = "") -> str:
    told = f' <span class="akb-dim">{note}</span>' if note else ""
    return f'<p class="akb-head" role="heading" aria-level="3"><strong>{title}</strong>{told}</p>'


def _rows(items: Sequence[Any], show: Callable[[Any], str], tag: str = "li") -> str:
    left = len(items) - ROWS
    return "".join(map(show, items[:ROWS])) + (
        f'<{tag} class="akb-dim">… and {left:,} more</{tag}>' if left > 0 else ""
    )


def _joined(*parts: str, between: str = " · ") -> str:
    return between.join(part for part in parts if part)


def _record(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


def _records(value: Any) -> list[Record]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _plain(value: Any) -> str:
    """Give a value as text, without what hides in it or turns it round: control, format and surrogate characters."""
    if not isinstance(value, str):
        return "" if value is None else _number(value).replace(",", "") or f"({type(value).__name__})"
    return "".join(char for char in value if char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


def _text(value: Any, limit: int = MOST) -> str:
    """Escape a value for an element or a quoted attribute, cut to so many characters."""
    text = _plain(value)
    return html.escape(text if len(text) <= limit else text[:limit].rstrip() + "…")
