"""Prints responses to a terminal with rich: what notebooks show too. Markup and control characters are only text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llama_index_agentic_kb._html import MAX_MARKDOWN, VERDICTS, timeline, unmarked, view
from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb._types import JsonMapping
from llama_index_agentic_kb.schema import ActivityRecord, QueryPlan, RetrievalResponse

_MARKER: Final = re.compile(r"\[ref_id:(\d+)\]")
_HEADING: Final = re.compile(r"\A#+ [^\n]*\n")
_COLOURS: Final = {"ok": "green", "warn": "yellow", "bad": "red", "none": ""}
_PLACES: Final = {"page_label": "p.", "sheet": "sheet"}
BAR: Final = 24  # width of a timeline bar in columns
MAX_EXTRACT: Final = 300  # maximum characters of an extract to show


def show_response(console: Console, response: RetrievalResponse) -> None:
    """Print a response: plan, timeline, answer or extracts, proof, numbered sources, and missing parts."""
    shown = view(response.to_dict())
    if response.plan is not None:
        _section(console, "Plan", _plan(response.plan))
    if shown["records"]:
        _section(console, "Activity", _timeline(shown["records"]))
    if shown["extracts"] is not None:
        extracts = [(source, _HEADING.sub("", source["content"], 1)) for source in shown["extracts"]]
        _section(console, f"Extracts ({len(extracts)})", _sources(extracts))
    else:
        _section(console, "Answer", _answer(response.text))
        if response.grounding is not None and response.grounding.grounding_score is not None:
            counts = f"{shown['supported']} of {len(shown['claims'])} claims supported"
            title = f"Proof ({counts}, score {response.grounding.grounding_score:.2f})"
            _section(console, title, _proof(shown["claims"]))
        used, left = [(source, "") for source in shown["used"]], len(shown["unused"])
        more = [Text(f"and {left} more that were found and not cited", "dim")] if left else []
        _section(console, "Sources", Group(_sources(used), *more))
    if shown["conversation"]:
        facts = "\n".join(f"{name}: {text}" for name, text in shown["conversation"])
        _section(console, "Conversation", _text(facts))
    for part in response.missing:
        reason = one_line(printable(part.reason))
        console.print(Text(f"Missing: {printable(part.what)} ({part.outcome.value}): {reason}", "red"))


def show_turn(console: Console, text: str, titles: Sequence[str]) -> None:
    """Print an answer of a chat, and the titles of the sources that it cites, or the first few if it cites none."""
    console.print(_answer(text))
    cited = {int(number) for number in _MARKER.findall(text)} or range(3)
    for number, title in enumerate(titles):
        if number in cited:
            console.print(Text(f"  [{number + 1}] {one_line(printable(title), 90)}", "dim"))


class Watch(Live):
    """A view, on a terminal, of a question that is being answered: its activity and text so far; removed at the end."""

    def __init__(self, console: Console) -> None:
        self._records: dict[int, ActivityRecord] = {}
        self._text = ""
        super().__init__(console=console, transient=True, refresh_per_second=8, get_renderable=self._view)

    def record(self, record: ActivityRecord) -> None:
        """Show an activity record, or its new state."""
        self._records[record.id] = record

    def write(self, text: str) -> None:
        """Append text of the answer."""
        self._text += text

    def _view(self) -> RenderableType:
        _, rows = timeline([record.to_dict() for record in list(self._records.values())])
        lines = _numbered(self._text).wrap(self.console, self.console.width)
        room = max(3, self.console.height - len(rows) - 4)
        return Group(_timeline(rows), *lines[-room:] if self._text else [Text("Searching", "dim")])


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print(Text(title, style="bold cyan"))
    console.print(Padding(body, (0, 0, 1, 2)))


def _plan(plan: QueryPlan) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 3, 1, None):
        table.add_column(ratio=ratio, no_wrap=ratio is None)
    for sub_query in plan.sub_queries:
        where = Text(printable(", ".join(sub_query.sources)), "dim")
        after = Text(f"after {', '.join(sub_query.depends_on)}" if sub_query.depends_on else "", "dim")
        table.add_row(Text(sub_query.id, "bold"), _text(sub_query.query), where, after)
    return Group(table, *map(_note, plan.warnings))


def _timeline(rows: Sequence[JsonMapping]) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        left, width = (share * BAR / 100 for share in row["bar"] or (0, 0))
        start = min(BAR - 1, int(left))
        bar = " " * start + "█" * max(1, min(BAR - start, round(width)))
        table.add_row(
            Text(bar.ljust(BAR), "blue"),
            Text(f"{row['elapsed'] or 0:>5} ms", "dim"),
            Text(row["outcome"] or "open", _COLOURS[row["tone"]]),
            Text(printable(str(row["name"])), "bold"),
            _text(one_line(row["facts"])),
        )
        if note := row["failure"] or row["warning"]:
            table.add_row("", "", "", "", _note(note))
    return table


def _note(text: str) -> Text:
    return Text(f"! {one_line(printable(text))}", "yellow")


def _numbered(text: str) -> Text:
    """Return a text with its markers replaced by 1-based numbers."""
    return _text(_MARKER.sub(lambda marker: f"[{int(marker.group(1)) + 1}]", text))


def _answer(text: str) -> RenderableType:
    """Return the answer's Markdown with its markers replaced by 1-based numbers, as in the list of sources."""
    shown = _numbered(text).plain
    if not shown or len(shown) > MAX_MARKDOWN:
        return Text(shown or "(no answer)")
    from markdown_it import MarkdownIt  # noqa: PLC0415 (it and rich's part load pygments)
    from rich.markdown import Markdown  # noqa: PLC0415 (same)

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    rendered = Markdown("", hyperlinks=False)
    rendered.parsed = parser.disable(["image", "reference"]).parse(shown)  # rich's own leaves out what looks like HTML
    return rendered


def _proof(claims: Sequence[JsonMapping]) -> Table:
    """Return a table of the checked claims with quotes that support or contradict them."""
    table = Table.grid(padding=(0, 1))
    for claim in claims:
        verdict = Text(claim["verdict"], _COLOURS[VERDICTS.get(claim["verdict"], "none")])
        table.add_row(verdict, _text(one_line(unmarked(claim["text"]).replace("**", ""), 100)))
        best = {support["referenceId"]: support["quote"] for support in reversed(claim.get("supports", ()))}
        for reference, quote in list(reversed(best.items()))[:3]:  # the first of each reference
            table.add_row("", Text(f"[{int(reference) + 1}] \u201c{printable(one_line(quote, 100))}\u201d", "dim"))
    return table


def _sources(sources: Sequence[tuple[JsonMapping, str]]) -> Table:
    """Return a table of sources with titles, places, names and addresses; below each, its text if there is one."""
    table = Table.grid(padding=(0, 1))
    for source, content in sources:
        head = Text(printable(one_line(source["title"] or "", 100)), "bold" if content else "")
        metadata = source["item"].get("sourceData", {}).get("metadata", {})
        for key, word in _PLACES.items():
            if metadata.get(key):
                head.append(f", {word} {printable(one_line(str(metadata[key]), 40))}")
        head.append(f"  {printable(source['name'] or '')}  {printable(source['url'] or '')}".rstrip(), "dim")
        table.add_row(Text(f"[{source['label']}]", "bold"), head)
        if content:
            table.add_row("", _text(one_line(content, MAX_EXTRACT)))
    return table


def _text(text: str) -> Text:
    return Text(printable(text))
