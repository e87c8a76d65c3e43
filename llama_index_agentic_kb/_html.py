"""Renders a response as an HTML fragment for notebooks and web pages, without scripts or external resources.

The template is ``_html.jinja``. All values are shown as text: they are escaped, and characters that hide or reverse
text are removed.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from llama_index_agentic_kb._text import printable
from llama_index_agentic_kb._types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from jinja2 import Template
    from markdown_it import MarkdownIt
    from markdown_it.rules_core import StateCore
    from markdown_it.token import Token
    from markupsafe import Markup


ROWS: Final = 100  # maximum rows of a list to show
LONG: Final = 360  # number of characters above which an extract is collapsed
MOST: Final = 20_000  # maximum characters of a passage to show
LIMIT: Final = 15_000  # size in bytes of a fragment for notebooks, which are saved with all that they show
_SIZES: Final = ((ROWS, MOST), (ROWS, 1_000), (25, 300), (8, 80))  # rows, characters of a passage: until it is small
# The maximum number of characters of an answer whose Markdown is rendered; longer ones are shown as text.
MAX_MARKDOWN: Final = 20_000
MAX_BOXES: Final = 24  # maximum searches in the picture of a plan
MAX_COLUMNS: Final = 5  # maximum columns in the picture of a plan; later rounds share the last one

_START, _END = "\u2e14", "\u2e15"
"""Signs at the bounds of a claim while Markdown is parsed: punctuation, beside which emphasis is read as it stands."""

_MARKER: Final = re.compile(r"[ \t]{0,8}\[ref_id:([0-9]{1,9})\]")
_INLINE: Final = re.compile(rf"([{_START}{_END}]|[ \t]{{0,8}}\[ref_id:[0-9]{{1,9}}\])")
_BLOCK: Final = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)]|#{1,6}|>)[ \t]+)*")  # of lists, headings and quotes
_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}]+", re.IGNORECASE)
_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_TONES: Final = {"ok": "ok", "empty": "warn", "skipped": "warn", "timeout": "bad", "error": "bad", "denied": "bad"}
_STAGES: Final = {"modelQueryPlanning": "Plan", "agenticReasoning": "Evidence", "modelAnswerSynthesis": "Answer"}
_PURPOSES: Final = {"check": "Check", "repair": "Repair", "relatedQuestions": "Related questions"}
VERDICTS: Final = {"supported": "ok", "partiallySupported": "warn", "unsupported": "bad", "contradicted": "bad"}
_ONE: Final = {plural: plural[:-1] for plural in ("calls", "candidates", "claims", "supported claims")}
_WORDS: Final = {"count": "found", "inputTokens": "tokens in", "outputTokens": "tokens out"}


def response_html(data: JsonMapping, *, limit: int | None = LIMIT, page_title: str = "") -> str:
    """Render a response as HTML with scoped styles, whose element ids are derived from its content.

    Lists and passages are shortened, as far as possible, until it has at most ``limit`` bytes (None: never). ``data``
    is the JSON form of a ``RetrievalResponse``, which may have ``relatedQuestions`` too. A title makes it a page.
    """
    shown = view(data)
    for rows, most in _SIZES:
        sized = {"answer": _answer(shown, rows), "rows": rows, "most": most}
        fragment = _template().render(shown, data=data, page_title=page_title, **sized)
        if limit is None or len(fragment.encode()) <= limit:
            break
    return fragment


def page_html(data: JsonMapping) -> str:
    """Render a response as a whole page that loads nothing; see ``response_html``."""
    title = _cut(" ".join(_plain(_text_of(data)).split()), 80) or "Answer"
    return response_html(data, limit=None, page_title=title)


def base_html(name: str, description: str, sources: Sequence[tuple[str, str]], facts: Mapping[str, object]) -> str:
    """Render a knowledge base: its name, its sources as (name, description), and its settings."""
    return _template().render(base=name, description=description, sources=sources, settings=facts, rows=ROWS)


def view(data: JsonMapping) -> JsonObject:
    """Return what the template and the terminal show of a response (its JSON form, without nulls) beside its fields."""
    text, references = _text_of(data), data.get("references", [])
    activity, queries = data.get("activity", []), data.get("plan", {}).get("subQueries", [])
    claims = [claim for claim in data.get("grounding", {}).get("claims", ()) if "score" in claim]
    sources = [_source(item, item.get("id"), item.get("sourceData", {}).get("content")) for item in references]
    extracts = _extracts(text, sources)
    cites = [] if extracts is not None else _citations(text, claims)
    cited = _cited(text, extracts, cites, sources)
    duration, records = timeline(activity)
    return {
        "prefix": _prefix(text, [*references, *activity]),
        "text": text,
        "extracts": extracts,
        "cites": cites,
        "claims": claims,
        "supported": sum(claim["verdict"] == "supported" for claim in claims),
        "used": [source for source in sources if source["number"] in cited],
        "unused": [source for source in sources if source["number"] not in cited],
        "plan": _graph(queries),
        "conversation": conversation_facts(data),
        "records": records,
        "duration": duration,
    }


def _prefix(text: str, items: Sequence[JsonMapping]) -> str:
    """Return the beginning of a response's element ids, derived from its text, references and activity records."""
    keys = [str(item.get(key)) for item in items for key in ("docKey", "startedAt")]
    return f"akb-{hashlib.sha256(repr((text, keys)).encode()).hexdigest()[:12]}"


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
        "unmarked": unmarked,
    }
    environment.globals |= {"verdicts": VERDICTS, "long": LONG}
    environment.tests["web"] = lambda url: isinstance(url, str) and url == _plain(url) and bool(_WEB.fullmatch(url))
    lines = files(__package__).joinpath("_html.jinja").read_text("utf-8").splitlines()
    return environment.from_string("".join(line.strip() for line in lines))


def _source(item: JsonMapping, ref_id: object, content: object) -> JsonObject:
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


def _extracts(text: str, sources: Sequence[JsonMapping]) -> list[JsonObject] | None:
    """Parse extracted data into rows, with the data of their sources; return None if the text is an answer."""
    try:
        items = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(items, list) or not all(isinstance(item, dict) and "ref_id" in item for item in items):
        return None
    rows, known = [], {source["number"]: source for source in reversed(sources)}
    for item in items:
        source = known.get(item["ref_id"] if isinstance(item["ref_id"], int) else None, {}).get("item", {})
        own = {"title": item.get("title"), "terms": item.get("terms")}
        rows.append(_source({**source, **own}, item["ref_id"], item.get("content")))
    return rows


def conversation_facts(data: JsonMapping) -> list[tuple[str, str]]:
    """Return the state of the conversation after a response's turn as (name, text); empty without a conversation."""
    dialogue, scope = data.get("dialogue", {}), data.get("scopeState", {}).get("last", {})
    if not dialogue and scope.get("topic") in (None, "first"):
        return []
    kept = f"{scope.get('scope')} of {scope.get('documents')} documents" if scope.get("documents") else ""
    whole = scope.get("reason") and f"all documents ({_CAPITAL.sub(' ', scope['reason']).lower()})"
    facts = {
        "turn": scope.get("turn") or dialogue.get("turn"),
        "topic": scope.get("topic"),
        "searched as": scope.get("expanded"),
        "scope": whole or kept,
        **(_tool_facts(dialogue) if dialogue else {}),
    }
    return [(name, _cut(_plain(text), 300)) for name, text in facts.items() if text]


def _tool_facts(dialogue: JsonMapping) -> dict[str, str]:
    pending, shift = dialogue.get("pending", {}), dialogue.get("shift", {})
    known, asked = (
        ", ".join(f"{name} = {value}" for name, value in values.items())
        for values in (dialogue.get("slots", {}), pending.get("arguments", {}))
    )
    return {
        "tool": " ".join(filter(None, [dialogue.get("tool"), f"({dialogue.get('stage')})"])),
        "known": known,
        "missing": ", ".join(map(str, dialogue.get("missing", ()))),
        "to be confirmed": f"{pending.get('tool')}: {asked}" if pending else "",
        "changed": f"{shift.get('fromTool')} to {shift.get('toTool', 'no tool')}" if shift else "",
        "forgotten": ", ".join(map(str, shift.get("cleared", ()))),
    }


# -- the answer --------------------------------------------------------------------------------------------------------


def _citations(text: str, claims: Sequence[JsonMapping]) -> list[tuple[int, int]]:
    """Return (position, number) of the citations of an answer from its claims; none if it has markers."""
    found: list[tuple[int, int]] = []
    if _MARKER.search(text):
        return found
    for claim in claims:
        supports = claim.get("supports", ()) if claim.get("verdict") in ("supported", "partiallySupported") else ()
        ids = claim.get("cited") or [support.get("referenceId") for support in supports]
        numbers = [int(item) for item in dict.fromkeys(map(str, ids)) if item.isdecimal()]
        found += [(claim["span"]["end"], number) for number in numbers if _is_at_its_place(claim, text)]
    return found


def _cited(
    text: str, extracts: Sequence[JsonMapping] | None, cites: Sequence[tuple[int, int]], sources: Sequence[JsonMapping]
) -> Collection[int]:
    """Return the numbers of the references that extracts or an answer are from; of all if an answer cites none."""
    if extracts is not None:
        return {row["number"] for row in extracts}
    numbers = {*map(int, _MARKER.findall(text)), *(number for _, number in cites)}
    return numbers or {source["number"] for source in sources}


def _is_at_its_place(claim: JsonMapping, text: str) -> bool:
    span = claim.get("span", {})
    return bool(span) and text[span["start"] : span["end"]] == claim["text"]


def _answer(shown: JsonObject, rows: int) -> Markup | str:
    """Render an answer's Markdown; markers of listed references are links, checked claims are marked by verdict."""
    if shown["extracts"] is not None:
        return ""
    from markupsafe import Markup  # noqa: PLC0415 (loaded when a response is shown)

    text: str = shown["text"].translate({ord(_START): "?", ord(_END): "?"})
    if len(text) > MAX_MARKDOWN:  # parsing takes time that grows with the square of some texts
        return Markup("<p>{}</p>").format(_cut(_plain(text), MOST))
    claims = [one for one in shown["claims"] if _is_at_its_place(one, text) and "|" not in one["text"]]
    marks = [(number, 1, f"[ref_id:{reference}]") for number, reference in shown["cites"]]
    for claim in claims:
        start = claim["span"]["start"]
        if not text[text.rfind("\n", 0, start) + 1 : start].strip():  # at the start of a line
            start = _BLOCK.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing too
        marks += [(start, 2, _START), (start + len(text[start : claim["span"]["end"]].rstrip()), 0, _END)]
    pieces, at = [], 0
    for position, _, mark in sorted(marks):
        pieces += [text[at:position], mark]
        at = position
    body = _plain("".join([*pieces, text[at:]]))
    titles = {source["number"]: source["title"] for source in shown["used"][:rows]}
    env = {"titles": titles, "prefix": shown["prefix"], "claims": iter(claims), "claim": None}
    rendered: str = _markdown().render(body, env)
    return Markup(rendered.replace(_START, "").replace(_END, ""))  # noqa: S704 (the renderer escapes all text)


@cache
def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt  # noqa: PLC0415 (loaded when a response is shown)

    markdown = MarkdownIt("commonmark", {"html": False, "breaks": True, "xhtmlOut": False})
    markdown.enable(["table", "strikethrough"]).disable(["image", "entity", "reference"])
    markdown.validateLink = lambda url: bool(_WEB.fullmatch(url))  # type: ignore[method-assign]

    def text(_: object, tokens: Sequence[Token], position: int, __: object, env: JsonObject) -> str:
        return "".join(_inline(piece, env) for piece in _INLINE.split(tokens[position].content) if piece)

    def finish(state: StateCore) -> None:
        for token in [one for block in state.tokens for one in (block, *(block.children or ()))]:
            if token.type in ("heading_open", "heading_close"):
                token.tag = "h4"
            elif token.type == "paragraph_open":
                token.attrSet("dir", "auto")
            elif token.type == "link_open":
                token.attrs |= {"target": "_blank", "rel": "noopener noreferrer nofollow"}

    markdown.add_render_rule("text", text)
    markdown.core.ruler.push("finish", finish)
    return markdown


def _inline(piece: str, env: JsonObject) -> str:
    """Return a piece of text as HTML: the start or end of a claim, a marker, or text within or outside a claim."""
    if piece in (_START, _END):
        env["claim"] = next(env["claims"], None) if piece == _START else None
        return ""
    marker = _MARKER.fullmatch(piece)
    if marker is not None and int(marker[1]) in env["titles"]:
        number, title = int(marker[1]), _cut(_plain(env["titles"][int(marker[1])]), 200)
        return f'<sup><a href="#{env["prefix"]}-{number}" title="{html.escape(title)}">{number + 1}</a></sup>'
    claim = env["claim"]
    if claim is None or not piece.strip():
        return html.escape(piece)
    said = f"{_CAPITAL.sub(' ', claim['verdict']).lower()}, {claim['score']:.2f}"
    tone = VERDICTS.get(claim["verdict"], "warn")
    return f'<span class="akb-said akb-{tone}" title="{html.escape(said)}">{html.escape(piece)}</span>'


# -- plan and timeline -------------------------------------------------------------------------------------------------


def _graph(sub_queries: Sequence[JsonMapping]) -> JsonObject | None:
    """Return the boxes and lines of a plan's graph, one column for each round; None if the plan has only one search."""
    if len(sub_queries) < 2:  # noqa: PLR2004
        return None
    column: dict[str, int] = {}
    rows: dict[int, int] = {}
    boxes: dict[str, JsonObject] = {}
    for item in sub_queries[:MAX_BOXES]:  # parents stand before their children
        name, parents = str(item.get("id")), [str(one) for one in item.get("dependsOn", ())]
        column[name] = min(1 + max((column.get(one, -1) for one in parents), default=-1), MAX_COLUMNS - 1)
        row = rows[column[name]] = rows.get(column[name], -1) + 1
        place = {"x": column[name] * 290, "y": row * 50, "name": name, "query": _plain(item.get("query"))}
        boxes[name] = {**place, "sources": ", ".join(map(str, item.get("sources", ()))), "parents": parents}
    lines = [(boxes[one], box) for box in boxes.values() for one in box["parents"] if one in boxes]
    size = (max(column.values()) * 290 + 250, max(rows.values()) * 50 + 42)
    return {"boxes": [*boxes.values()], "lines": lines, "width": size[0], "height": size[1], "all": len(sub_queries)}


def timeline(activity: Sequence[JsonMapping]) -> tuple[float, list[JsonObject]]:
    """Return the total time in milliseconds, and a timeline row with a bar for each activity record."""
    spans = [_span(record) for record in activity]
    first = min((span[0] for span in spans if span), default=0.0)
    total = max((span[1] for span in spans if span), default=0.0) - first
    rows = []
    for record, span in zip(activity, spans, strict=True):
        kind, error = record.get("type", ""), record.get("error", {})
        rows.append(
            {
                "name": _PURPOSES.get(
                    record.get("purpose", ""), _STAGES.get(kind, record.get("knowledgeSourceName", kind))
                ),
                "tone": _TONES.get(record.get("outcome", ""), "none"),
                "outcome": record.get("outcome"),
                "elapsed": record.get("elapsedMs"),
                "bar": span and _bar(span[0] - first, span[1] - span[0], total),
                "facts": " · ".join(filter(None, _facts(record))),
                "failure": ": ".join(filter(None, (_cut(_plain(error.get(key)), 500) for key in ("code", "message")))),
                "warning": record.get("warning"),
            }
        )
    return total * 1000, rows


def _facts(record: JsonMapping) -> list[str]:
    """Return the details of an activity record: query, counts, filter, and model; empty texts are none."""
    arguments = record.get(f"{record.get('type')}Arguments", {})
    asked = (_cut(_plain(record.get("subQueryId")), 40), _cut(_plain(arguments.get("search")), 300))
    facts = [": ".join(filter(None, asked)), _cut(_plain(record.get("model", {}).get("modelName")), 80)]
    facts += [_count(key, value) for key, value in record.items()]
    if queries := record.get("subQueries"):
        facts.append(f"{len(queries):,} {'query' if len(queries) == 1 else 'queries'}")
    if narrowed := arguments.get("filter"):
        facts.append(f"filter {_cut(_plain(json.dumps(narrowed, ensure_ascii=False)), 300)}")
    return facts


def _count(key: str, value: object) -> str:
    """Return a number of an activity record in words; empty if it is no count, or is 0 but for ``count``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or key in ("id", "elapsedMs") or not (value or key == "count"):
        return ""
    words = _WORDS.get(key) or _CAPITAL.sub(" ", _plain(key)).lower()
    if key == "groundingScore":
        return f"{words} {value:.2f}"
    return f"{value:,.0f} {_ONE.get(words, words) if value == 1 else words}"


def _bar(start: float, took: float, total: float) -> tuple[float, float]:
    """Return the position and width of a bar, in percent of the total time."""
    width = min(100.0, max(0.5, took / total * 100)) if total > 0 else 100.0
    return (min(100.0 - width, start / total * 100) if total > 0 else 0.0), width


def _span(record: JsonMapping) -> tuple[float, float] | None:
    times = [datetime.fromisoformat(at).timestamp() for key in ("startedAt", "completedAt") if (at := record.get(key))]
    return (times[0], max(times)) if record.get("startedAt") else None


def _text_of(data: JsonMapping) -> str:
    contents = [message.get("content", ()) for message in data.get("response", ())]
    return "\n".join(
        one if isinstance(one, str) else "\n".join(part.get("text", "") for part in one) for one in contents
    )


def _plain(value: object) -> str:
    """Return a value as text, without characters that hide or reverse text; joiners, which emoji need, are kept."""
    return printable("" if value is None else str(value), keep="\n\t\u200c\u200d")


def unmarked(text: object) -> str:
    """Return a claim without the markers and the signs of Markdown around it."""
    return _BLOCK.sub("", _MARKER.sub("", _plain(text)), 1).strip("| ")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit].rstrip() + "…"
