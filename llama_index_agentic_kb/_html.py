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
from typing import Any, Final, TypeAlias

__all__ = ["response_html"]

Record: TypeAlias = Mapping[str, Any]

ROWS: Final = 100  # rows of a list that are shown
LONG: Final = 360  # characters; an extract that has more is folded
MOST: Final = 20_000  # characters of one passage that are shown

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_KEPT: Final = frozenset("\n\t\u200c\u200d")  # the joiners: some scripts and emoji can't be written without them
_MARKER: Final = re.compile(r"[ \t]{0,8}\[ref_id:([0-9]{1,9})\]")
_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}]+", re.IGNORECASE)
_TONES: Final = {"ok": "ok", "empty": "warn", "skipped": "warn", "timeout": "bad", "error": "bad", "denied": "bad"}
_STAGES: Final = {"modelQueryPlanning": "Plan", "agenticReasoning": "Evidence", "modelAnswerSynthesis": "Answer"}
_VERDICTS: Final = {"supported": "ok", "partiallySupported": "warn", "unsupported": "bad", "contradicted": "bad"}
_SCORES: Final = (("score", "score"), ("rerankerScore", "reranked"))
_WORDS: Final = {"count": "found", "inputTokens": "tokens in", "outputTokens": "tokens out"}

# Colours: the notebook's own, else VS Code's, else the reader's preference. Bars and dots read on light and on dark.
_STYLE: Final = """<style>
.agentic-kb{--l-fg:#1f2328;--l-dim:#59636e;--l-bg:#fff;--l-link:#0969da;--ok:#2f9e5b;--warn:#c98a0b;--bad:#df4a43;
--line:#80808048;--tint:#8080801a;box-sizing:border-box;max-width:60rem;padding:1rem 1.25rem;border-radius:8px;
@media (prefers-color-scheme:dark){--l-fg:#e6edf3;--l-dim:#9da7b1;--l-bg:#0d1117;--l-link:#6cb0ff}
--fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--l-fg)));
--dim:var(--jp-content-font-color2,var(--vscode-descriptionForeground,var(--l-dim)));
--bg:var(--jp-layout-color0,var(--vscode-editor-background,var(--l-bg)));
--link:var(--jp-content-link-color,var(--vscode-textLink-foreground,var(--l-link)));
border:1px solid var(--line);background:var(--bg);color:var(--fg);font:14px/1.55 system-ui,sans-serif;
overflow-wrap:anywhere;text-align:start;& p,& ul{margin:0 0 .6em;max-width:46rem}& ul{padding-inline-start:1.2em}
& a{color:var(--link);text-decoration:none;&:hover{text-decoration:underline}}
& .akb-head{margin:1.5em 0 .5em;max-width:none;padding-bottom:.3em;border-bottom:1px solid var(--line);
&:first-of-type{margin-top:0}}& small,& .akb-dim,& details{color:var(--dim);font-size:12.5px}
& sup{line-height:0;font-size:.75em;& a{padding:.1em .35em;border-radius:4px;background:var(--tint);font-weight:600}}
& ol.akb-list{list-style:none;margin:0;padding:0;&>li{position:relative;margin:0;padding:.35em .4em .35em 2.4em}
&>li:target{background:var(--tint);box-shadow:inset 3px 0 var(--link)}}
& .akb-number{position:absolute;left:0;width:1.7em;text-align:right;color:var(--dim)}& .akb-bad{--tone:var(--bad)}
& summary{cursor:pointer;max-width:46rem}& details[open]>summary>.akb-preview{display:none}
& details[open]>summary:has(.akb-preview)::after{content:"Show less"}& .akb-lead{color:var(--fg);font-size:14px}
& .akb-passage{white-space:pre-wrap;max-width:46rem}& details>.akb-passage{margin:.4em 0;padding:.6em .8em;
max-height:24em;overflow:auto;border-inline-start:3px solid var(--line);background:var(--tint);color:var(--fg)}
& .akb-notice{margin:0 0 1em;padding:.6em .9em;border:1px solid var(--warn);border-inline-start-width:4px;
border-radius:4px;background:rgba(201,138,11,.1);& ul{margin:.3em 0 0}}
& .akb-row{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,2fr) 5.5em 5em;gap:0 1em;padding:.45em 0;
border-bottom:1px solid var(--line);&:last-child{border-bottom:0}}& .akb-wide{grid-column:1/-1}
& .akb-track{position:relative;height:8px;margin-top:.5em;border-radius:4px;background:var(--tint);overflow:hidden}
& .akb-bar{position:absolute;inset-block:0;min-width:3px;border-radius:4px;background:var(--tone,var(--dim))}
& .akb-ms{text-align:end;color:var(--dim)}& .akb-note{border-inline-start:3px solid var(--tone);padding:0 .6em}
& .akb-outcome::before{content:"";display:inline-block;width:.6em;height:.6em;margin-inline-end:.45em;
border-radius:50%;background:var(--tone,var(--dim))}& .akb-ok{--tone:var(--ok)}& .akb-warn{--tone:var(--warn)}
@media (max-width:600px){& .akb-row{grid-template-columns:1fr auto auto}& .akb-track{grid-area:2/1/3/-1;margin:.2em 0}}}
</style>"""


def response_html(data: dict[str, Any]) -> str:
    """Render a response: what is missing, the answer or the extracts, the sources, the timeline.

    Args:
        data: The wire form of a response. Missing keys and odd types are left out, not raised.

    Returns:
        A fragment whose style is scoped to its class and whose ids are made from its content.
    """
    text = "\n".join(map(_message, _records(data.get("response"))))
    references, activity = _records(data.get("references")), _records(data.get("activity"))
    keys = (_plain(item.get(key)) for item in (*references, *activity) for key in ("docKey", "startedAt"))
    prefix = f"akb-{hashlib.sha256(repr((text, *keys)).encode()).hexdigest()[:12]}"
    extracts = _extracts(text)
    if extracts is None:
        result = _answer(text, references, prefix, _proof(_record(data.get("grounding"))))
    else:
        result = _extracted(extracts, references, prefix)
    return f'<div class="agentic-kb">{_STYLE}{_notices(data)}{result}{_timeline(activity)}</div>'


def _notices(data: Record) -> str:
    """Show what is missing, and what was wrong with the plan."""

    def part(item: Record) -> str:
        note = _joined(_text(item.get("outcome"), 40), _text(item.get("reason"), 500), between=": ")
        query = f" ({shown})" if (shown := _text(item.get("subQueryId"), 60)) else ""
        return f"<li><strong>{_text(item.get('what'), 100)}</strong>{query} {note}</li>"

    def notice(title: str, rows: str) -> str:
        return f'<div class="akb-notice" role="note"><strong>{title}</strong><ul>{rows}</ul></div>'

    missing, warnings = _records(data.get("missing")), _record(data.get("plan")).get("warnings")
    incomplete = missing or data.get("statusCode") == 206  # noqa: PLR2004 (HTTP: partial content)
    shown = notice("Incomplete (206): some of it is missing.", _rows(missing, part)) if incomplete else ""
    if isinstance(warnings, list) and warnings:
        shown += notice("About the plan", _rows(warnings, lambda item: f"<li>{_text(item, 500)}</li>"))
    return shown


def _answer(text: str, references: Sequence[Record], prefix: str, proof: str) -> str:
    """Show the answer, each marker a link to its source, its proof, and the sources; those not cited are folded."""
    cited = {int(number) for number in _MARKER.findall(text)}
    used = [item for item in references if not cited or _ref_number(item.get("id")) in cited]
    rest = [item for item in references if cited and _ref_number(item.get("id")) not in cited]
    titles = {_ref_number(item.get("id")): item.get("title") for item in used[:ROWS]}

    def link(marker: re.Match[str]) -> str:
        number = int(marker[1])
        target = f'href="#{prefix}-{number}" title="{_text(titles.get(number), 200)}"'
        return f"<sup><a {target}>{number + 1}</a></sup>" if number in titles else marker[0]

    paragraphs = [part.strip("\n").replace("\n", "<br>") for part in re.split(r"\n[ \t]*\n", html.escape(text))]
    shown = "".join(f'<p dir="auto">{_MARKER.sub(link, part)}</p>' for part in paragraphs if part.strip())
    listed = _heading("Sources", f"{len(references):,}") + _listed(used, prefix) if references else ""
    return (
        _heading("Answer") + (shown or "<p>No answer.</p>") + proof + listed + _listed(rest, rest="read and not cited")
    )


def _proof(ledger: Record) -> str:
    """Show each checked claim with the words that support it, or contradict it; folded where all are supported."""
    claims = [claim for claim in _records(ledger.get("claims")) if _number(claim.get("score"))]
    good = sum(claim.get("verdict") == "supported" for claim in claims)

    def row(claim: Record) -> str:
        tone = _VERDICTS.get(_plain(claim.get("verdict")), "warn")
        said = _text(_MARKER.sub("", _plain(claim.get("text"))), 300)
        quotes = (f"“{_text(one.get('quote'), 300)}”" for one in _records(claim.get("supports"))[:2])
        note = _joined(_text(claim.get("verdict"), 40), said, between=": ")
        return f'<li class="akb-note akb-{tone}" dir="auto">{note}<div class="akb-dim">{_joined(*quotes)}</div></li>'

    summary = f"<summary>{good:,} of {len(claims):,} claims supported</summary>"
    opened = "" if good == len(claims) else " open"
    return f"<details{opened}>{summary}<ul>{_rows(claims, row)}</ul></details>" if claims else ""


def _extracted(extracts: Sequence[Record], references: Sequence[Record], prefix: str) -> str:
    """Show the extracts, each with what is known of its source."""
    known = {number: item for item in reversed(references) if (number := _ref_number(item.get("id"))) is not None}
    items, numbers = [], [_ref_number(extract.get("ref_id")) for extract in extracts]
    for number, extract in zip(numbers, extracts, strict=True):
        own = {"id": number, "title": extract.get("title"), "terms": extract.get("terms"), "sourceData": extract}
        items.append({**(known.get(number, {}) if number is not None else {}), **own})
    listed = _listed(items, prefix, fold=False) or "<p>Nothing was found.</p>"
    rest = [item for item in references if _ref_number(item.get("id")) not in set(numbers)]
    return _heading("Extracts", f"{len(extracts):,}") + listed + _listed(rest, rest="read and not extracted")


def _listed(items: Sequence[Record], prefix: str = "", rest: str = "", *, fold: bool = True) -> str:
    """List sources, the first of each number with an id if there is a prefix; folded where ``rest`` names them."""
    taken: set[int | None] = {None}

    def row(item: Record) -> str:
        number = _ref_number(item.get("id"))
        anchor = f' id="{prefix}-{number}"' if prefix and number not in taken else ""
        taken.add(number)
        scores = (f"{word} {item[key]:.3f}" for key, word in _SCORES if _number(item.get(key)))
        name = _text(item.get("knowledgeSourceName"), 100)
        address = _address(item.get("url") or item.get("citationUrl"))
        label = _text(item.get("id"), 12) if number is None else str(number + 1)
        return (
            f'<li{anchor}><span class="akb-number">{label}</span>'
            f'<strong dir="auto">{_text(item.get("title"), 300) or "(untitled)"}</strong> '
            f'<span class="akb-dim">{_joined(name, *scores, _text(item.get("terms"), 300), address)}</span>'
            f"{_passage(_record(item.get('sourceData')).get('content'), fold=fold)}</li>"
        )

    listed = f'<ol class="akb-list">{_rows(items, row)}</ol>' if items else ""
    return f"<details><summary>{len(items):,} more, {rest}</summary>{listed}</details>" if items and rest else listed


def _passage(content: Any, *, fold: bool) -> str:
    """Show a passage; a long one opens from its first words, and so does each if ``fold``."""
    text = _plain(content).strip()
    passage = f'<div class="akb-passage" dir="auto">{_text(text, MOST)}</div>' if text else ""
    if not text or (not fold and len(text) <= LONG):
        return passage
    preview, lead = _text(" ".join(text[: LONG + 1].split()), 110 if fold else 250), "" if fold else " akb-lead"
    return f'<details><summary><span class="akb-preview{lead}">{preview}</span></summary>{passage}</details>'


def _timeline(records: Sequence[Record]) -> str:
    """Show one row a record, with a bar where it lies in the whole time."""
    spans = [span for span in map(_span, records) if span]
    first, last = min((start for start, _ in spans), default=0.0), max((end for _, end in spans), default=0.0)
    rows = _rows(records, lambda record: _timeline_row(record, _bar(_span(record), first, last - first)), "div")
    return _heading("Timeline", f"{(last - first) * 1000:,.0f} ms") + f"<div>{rows}</div>" if records else ""


def _timeline_row(record: Record, bar: str) -> str:
    kind, outcome, error = _plain(record.get("type")), _plain(record.get("outcome")), _record(record.get("error"))
    name = _STAGES.get(kind) or _text(record.get("knowledgeSourceName"), 100) or _text(kind, 60)
    tone, elapsed = _TONES.get(outcome, "none"), _number(record.get("elapsedMs"))
    arguments = _record(record.get(f"{kind}Arguments"))
    query = _joined(_text(record.get("subQueryId"), 40), _text(arguments.get("search"), 300), between=": ")
    failure = _joined(_text(error.get("code"), 80), _text(error.get("message"), 500), between=": ")
    return (
        f'<div class="akb-row akb-{tone}"><strong dir="auto">{name}</strong><div class="akb-track">{bar}</div>'
        f'<div class="akb-outcome">{_text(outcome, 20) or "open"}</div>'
        f'<div class="akb-ms">{elapsed and f"{elapsed} ms"}</div>'
        f"{_line('dim', _joined(query, *_facts(record, arguments)))}"
        f"{_line('note akb-bad', failure)}{_line('note akb-warn', _text(record.get('warning'), 500))}</div>"
    )


def _line(style: str, shown: str) -> str:
    return f'<div class="akb-wide akb-{style}" dir="auto">{shown}</div>' if shown else ""


def _facts(record: Record, arguments: Record) -> list[str]:
    """Return what a record counts, under which filter it searched, and which model it called."""
    note = []
    for key, value in record.items():
        word = _WORDS.get(key) or re.sub("([A-Z])", r" \1", _plain(key)).lower()
        if (number := _number(value)) and key not in ("id", "elapsedMs") and (value or key == "count"):
            note.append(f"{number} {_text(word, 60)}")
    if isinstance(queries := record.get("subQueries"), list):
        note.append(f"{len(queries):,} {'query' if len(queries) == 1 else 'queries'}")
    if narrowed := arguments.get("filter"):
        note.append(f"filter {_text(json.dumps(narrowed, ensure_ascii=False, default=_plain, skipkeys=True), 300)}")
    return [*note, _text(_record(record.get("model")).get("modelName"), 80)]


def _bar(span: tuple[float, float] | None, first: float, total: float) -> str:
    """Draw a bar, in percent of the whole time; empty where a record has no times."""
    if span is None:
        return ""
    width = min(100.0, max(0.5, (span[1] - span[0]) / total * 100)) if total > 0 else 100.0
    left = min(100.0 - width, (span[0] - first) / total * 100) if total > 0 else 0.0
    return f'<div class="akb-bar" style="left:{left:.2f}%;width:{width:.2f}%"></div>'


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
    texts = [content] if isinstance(content, str) else [part.get("text") for part in _records(content)]
    return "\n".join(map(_plain, texts))


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
    """Write a number with its thousands apart; empty for anything else."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.0f}" if numeric and abs(value) < 1e15 else ""  # noqa: PLR2004 (no count is beyond it)


def _address(value: Any) -> str:
    """Link a web address; anything else that stands in its place, scripts included, is only shown."""
    shown = _text(value, 120)
    if not isinstance(value, str) or value != _plain(value) or not _WEB.fullmatch(value):
        return shown
    return f'<a href="{html.escape(value)}" target="_blank" rel="noopener noreferrer nofollow">{shown}</a>'


def _heading(title: str, note: str = "") -> str:
    return f'<p class="akb-head" role="heading" aria-level="3"><strong>{title}</strong> <small>{note}</small></p>'


def _rows(items: Sequence[Any], show: Callable[[Any], str], tag: str = "li") -> str:
    more = f'<{tag} class="akb-dim">… and {len(items) - ROWS:,} more</{tag}>' if len(items) > ROWS else ""
    return "".join(map(show, items[:ROWS])) + more


def _joined(*parts: str, between: str = " · ") -> str:
    return between.join(part for part in parts if part)


def _record(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


def _records(value: Any) -> list[Record]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _plain(value: Any) -> str:
    """Return a value as text, without control, format and surrogate characters, which hide or reverse text."""
    if not isinstance(value, str):
        return "" if value is None else _number(value).replace(",", "") or f"({type(value).__name__})"
    hidden = {char for char in set(value) - _KEPT if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    return "".join(char for char in value if char not in hidden) if hidden else value


def _text(value: Any, limit: int = MOST) -> str:
    """Escape a value for an element or a quoted attribute, cut to so many characters."""
    text = _plain(value)
    return html.escape(text if len(text) <= limit else text[:limit].rstrip() + "…")
