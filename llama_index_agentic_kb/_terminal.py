"""Prints plans, activity and responses to a terminal with rich. Markup and control characters are not interpreted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llama_index_agentic_kb._html import conversation_facts
from llama_index_agentic_kb._text import one_line, printable
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    Extract,
    GroundingLedger,
    ModelAnswerSynthesisActivity,
    ModelQueryPlanningActivity,
    QueryPlan,
    Reference,
    RetrievalResponse,
    SourceActivity,
    Verdict,
)

__all__ = ["Watch", "show_response", "show_turn"]

_MARKER = re.compile(r"\[ref_id:(\d+)\]")
_SPACED_MARKER = re.compile(r"[ \t]{0,8}\[ref_id:\d+\]")
_SIGNS = re.compile(r"\A[ \t]*(?:(?:[-*+|]|\d{1,9}[.)]|#{1,6}|>)[ \t]+)*")
_HEADING = re.compile(r"\A#+ [^\n]*\n")
_COLOURS = {"ok": "green", "empty": "yellow", "skipped": "yellow", "timeout": "red", "error": "red", "denied": "red"}
_VERDICTS = {
    Verdict.SUPPORTED: Text("supported", "green"),
    Verdict.PARTIALLY_SUPPORTED: Text("partly", "yellow"),
    Verdict.UNSUPPORTED: Text("unsupported", "red"),
    Verdict.CONTRADICTED: Text("contradicted", "red"),
    Verdict.NOT_CHECKABLE: Text("not checked", "dim"),
}
_PLACES = {"page_label": "p.", "sheet": "sheet"}
MAX_MARKDOWN = 20_000
"""Maximum characters of an answer whose Markdown is rendered; longer ones are shown as text."""
BAR = 24
"""Width of a timeline bar in columns."""


def show_response(console: Console, response: RetrievalResponse, *, extract_lines: int = 3) -> None:
    """Print a response: plan, timeline, answer or extracts, numbered sources, and missing parts.

    Args:
        console: The rich console to print to.
        response: The response to print.
        extract_lines: Maximum lines per extract; 0 means all.
    """
    if response.plan is not None:
        _section(console, "Plan", _plan(response.plan))
    if response.activity:
        _section(console, "Activity", _timeline(response.activity))
    extracts = response.extracts
    if extracts:
        _section(console, f"Extracts ({len(extracts)})", _extracts(extracts, response.references, extract_lines))
    else:
        _section(console, "Answer", _answer(response.text))
        if response.grounding is not None and response.grounding.grounding_score is not None:
            _section(console, f"Proof ({_counted(response.grounding)})", _proof(response.grounding))
        _section(console, "Sources", _sources(response))
    if facts := conversation_facts(response.to_dict()):
        _section(console, "Conversation", _text("\n".join(f"{name}: {text}" for name, text in facts)))
    for part in response.missing:
        console.print(
            Text(f"Missing: {printable(part.what)} ({part.outcome.value}): {one_line(printable(part.reason))}", "red")
        )


def show_turn(console: Console, text: str, titles: Sequence[str]) -> None:
    """Print an answer of a chat with the sources that it cites, or the first few if it cites none.

    Args:
        console: The rich console to print to.
        text: The answer, with its markers.
        titles: The titles of the sources, in order of their numbers.
    """
    console.print(_answer(text))
    cited = {int(number) for number in _MARKER.findall(text)} or range(3)
    for number, title in enumerate(titles):
        if number in cited:
            console.print(Text(f"  [{number + 1}] {one_line(printable(title), 90)}", "dim"))


class Watch:
    """A view of a question that is being answered: its activity, and the text so far; removed at the end.

    Args:
        console: The rich console to show it on; must be a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._records: dict[int, ActivityRecord] = {}
        self._text = ""
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._view)

    def __enter__(self) -> Self:
        """Show the view."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the view."""
        self._live.stop()

    def record(self, record: ActivityRecord) -> None:
        """Show an activity record, or its new state."""
        self._records[record.id] = record

    def write(self, text: str) -> None:
        """Append text of the answer."""
        self._text += text

    def _view(self) -> Any:
        timeline = _timeline(list(self._records.values()))
        lines = _numbered(self._text).wrap(self._console, self._console.width)
        room = max(3, self._console.height - len(self._records) - 4)
        return Group(timeline, *lines[-room:] if self._text else [Text("Searching", "dim")])


def _section(console: Console, title: str, body: Any) -> None:
    console.print(Text(title, style="bold cyan"))
    console.print(Padding(body, (0, 0, 1, 2)))


def _plan(plan: QueryPlan) -> Any:
    table = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 3, 1, None):
        table.add_column(ratio=ratio, no_wrap=ratio is None)
    for sub_query in plan.sub_queries:
        where = ", ".join(sub_query.sources)
        after = f"after {', '.join(sub_query.depends_on)}" if sub_query.depends_on else ""
        table.add_row(
            Text(sub_query.id, "bold"), _text(sub_query.query), Text(printable(where), "dim"), Text(after, "dim")
        )
    warnings = [Text(f"! {one_line(printable(warning))}", "yellow") for warning in plan.warnings]
    return Group(table, *warnings)


def _timeline(records: Sequence[ActivityRecord]) -> Any:
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    started = [record.started_at for record in records if record.started_at is not None]
    first = min(started, default=None)
    ends = [record.completed_at for record in records if record.completed_at is not None]
    total = (max(ends) - first).total_seconds() * 1000 if first is not None and ends else 0.0
    for record in records:
        offset = (record.started_at - first).total_seconds() * 1000 if first and record.started_at else 0.0
        outcome = record.outcome.value if record.outcome else "open"
        table.add_row(
            _bar(offset, record.elapsed_ms or 0, total),
            Text(f"{record.elapsed_ms or 0:>5} ms", "dim"),
            Text(outcome, _COLOURS.get(outcome, "")),
            *_described(record),
        )
        note = record.error.message if record.error else record.warning
        if note:
            table.add_row("", "", "", "", Text(f"! {one_line(printable(note))}", "yellow"))
    return table


def _bar(offset: float, elapsed: float, total: float) -> Text:
    if total <= 0:
        return Text("▏".ljust(BAR))
    start = min(BAR - 1, int(offset / total * BAR))
    length = max(1, min(BAR - start, round(elapsed / total * BAR)))
    return Text(" " * start + "█" * length + " " * (BAR - start - length), "blue")


def _described(record: ActivityRecord) -> tuple[Text, Text]:
    match record:
        case SourceActivity():
            found = f"{record.count or 0} found"
            query = record.arguments.search if record.arguments else ""
            return Text(printable(record.knowledge_source_name), "bold"), _text(f"{found}: {one_line(query)}")
        case ModelQueryPlanningActivity():
            name = {"findings": "read", "revision": "check"}.get(record.purpose, "plan")
            made = len(record.sub_queries or [])
            note = f"{made} queries" if made or name == "plan" else name
            return Text(name, "bold"), _text(f"{note}{_tokens(record)}")
        case ModelAnswerSynthesisActivity():
            name = {"relatedQuestions": "related"}.get(record.purpose, record.purpose)
            return Text(name, "bold"), _text(f"{record.response_mode or f'{record.calls} calls'}{_tokens(record)}")
        case AgenticReasoningActivity():
            merged = f"{record.candidates} candidates, {record.merged} merged, {record.kept} kept"
            return Text("evidence", "bold"), Text(merged)
        case _:
            return Text(printable(record.type), "bold"), Text("")


def _tokens(record: ModelQueryPlanningActivity | ModelAnswerSynthesisActivity) -> str:
    model = f", {record.model.model_name}" if record.model else ""
    if record.input_tokens is None:
        return model
    return f"{model}, {record.input_tokens} + {record.output_tokens} tokens"


def _numbered(text: str) -> Text:
    """Return a text with its markers replaced by 1-based numbers."""
    return _text(_MARKER.sub(lambda marker: f"[{int(marker.group(1)) + 1}]", text))


def _answer(text: str) -> Any:
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


def _counted(ledger: GroundingLedger) -> str:
    checked = [claim for claim in ledger.claims if claim.score is not None]
    supported = sum(claim.verdict is Verdict.SUPPORTED for claim in checked)
    return f"{supported} of {len(checked)} claims supported, score {ledger.grounding_score:.2f}"


def _proof(ledger: GroundingLedger) -> Any:
    """Return a table of the checked claims with quotes that support or contradict them."""
    table = Table.grid(padding=(0, 1))
    for claim in ledger.claims:
        if claim.score is None:
            continue
        table.add_row(
            _VERDICTS[claim.verdict], _text(one_line(_SIGNS.sub("", _SPACED_MARKER.sub("", claim.text)), 100))
        )
        best = {support.reference_id: support for support in reversed(claim.supports)}  # first of each reference
        for support in list(reversed(best.values()))[:3]:
            quote = Text(f"[{int(support.reference_id) + 1}] ", "dim")
            table.add_row("", quote.append(f"\u201c{printable(one_line(support.quote, 100))}\u201d", "dim"))
    return table


def _sources(response: RetrievalResponse) -> Any:
    cited = {int(number) for number in _MARKER.findall(response.text)}
    table = Table.grid(padding=(0, 1))
    for reference in response.references:
        number = int(reference.id)
        if number in cited or not cited:
            table.add_row(Text(f"[{number + 1}]", "bold"), _described_source(reference))
    left = len(response.references) - table.row_count
    more = [Text(f"and {left} more that were read and not cited", "dim")] if left else []
    return Group(table, *more)


def _described_source(reference: Reference) -> Text:
    text = Text(printable(one_line(reference.title, 100)))
    metadata = {} if reference.source_data is None else reference.source_data.metadata
    for key, word in _PLACES.items():
        if metadata.get(key):
            text.append(f", {word} {printable(one_line(str(metadata[key]), 40))}")
    text.append(f"  {printable(reference.knowledge_source_name)}", "dim")
    if reference.url:
        text.append(f"  {printable(reference.url)}", "dim")
    return text


def _extracts(extracts: Sequence[Extract], references: Sequence[Reference], lines: int) -> Any:
    by_id = {reference.id: reference for reference in references}
    table = Table.grid(padding=(0, 1))
    for extract in extracts:
        reference = by_id.get(str(extract.ref_id))
        head = _described_source(reference) if reference else _text(extract.title)
        head.stylize("bold", 0, len(one_line(extract.title, 100)))
        table.add_row(Text(f"[{extract.ref_id + 1}]", "bold"), head)
        table.add_row("", _text(_short(extract.content, lines)))
    return table


def _short(content: str, lines: int) -> str:
    text = " ".join(_HEADING.sub("", content, count=1).split())  # the title is shown above
    return text if lines == 0 else one_line(text, 100 * lines)


def _text(text: str) -> Text:
    return Text(printable(text))
