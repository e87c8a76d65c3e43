import io
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llama_index_agentic_kb import KnowledgeBase, KnowledgeSource
from llama_index_agentic_kb._html import LIMIT, ROWS, page_html, response_html
from llama_index_agentic_kb._terminal import show_response
from llama_index_agentic_kb.schema import RetrievalResponse
from llama_index_agentic_kb.testing import MemoryRetriever, ScriptedLLM

PLAIN = "blockquote br em g h4 pre s small style summary sup table tbody thead title tr ul"
ALLOWED = {tag: set(names.split()) for tag, names in {
    **dict.fromkeys(PLAIN.split(), ""),
    "a": "href title target rel", "code": "class", "details": "open", "div": "class role dir", "li": "class id dir",
    "ol": "class start", "p": "class role aria-level dir", "path": "d", "rect": "x y width height rx",
    "span": "class title", "strong": "dir", "svg": "class aria-hidden aria-label role viewbox width",
    "td": "style", "text": "x y class", "th": "style",
}.items()}  # fmt: skip
HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)",
    "</style></details></div><iframe src=javascript:alert(1)>", "{{7*7}} {0} %s &lt;b&gt; <!-- ]]>",
    "[ref_id:0]<svg/onload=alert(1)>",
)  # fmt: skip
TIMES = {"startedAt": "2026-01-01T00:00:00Z", "completedAt": "2026-01-01T00:00:01Z"}


class Page(HTMLParser):
    """Reads a fragment, and fails at whatever a response may not contain."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.hrefs: list[str] = []
        self.bars: list[tuple[str, str]] = []
        self.text = ""
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(fragment)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        given = {name: value or "" for name, value in attrs}
        assert given.keys() <= ALLOWED[tag]
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.hrefs += [given["href"]] if "href" in given else []
        self.bars += [(given["x"], given["width"])] if given.get("height") == "8" else []
        assert given.get("style", "") in ("", "text-align:left", "text-align:right")
        if tag not in ("br", "hr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] != "style":
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)


def answer(text: str, references: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "statusCode": 200,
        "response": [{"role": "assistant", "content": [{"type": "text", "text": text}]}],
        "references": [reference(number) for number in range(references)],
        **more,
    }


def reference(number: int, **more: Any) -> dict[str, Any]:
    named = {"id": str(number), "title": f"Title {number}", "url": f"https://example.org/{number}", "score": 0.5}
    data = {"docKey": f"d{number}", "sourceData": {"content": f"Content {number}."}}
    return {**named, "knowledgeSourceName": "missions", **data, **more}


def hostile_response(text: str) -> dict[str, Any]:
    record = {
        **dict.fromkeys(("type", "outcome", "knowledgeSourceName", "subQueryId", "warning"), text),
        "error": {"code": text, "message": text},
        "model": {"modelName": text},
        f"{text}Arguments": {"search": text, "filter": {"type": "condition", "key": text, "value": [text]}},
        text: 7,
        **TIMES,
    }
    source = reference(0, title=text, url=text, knowledgeSourceName=text, docKey=text, sourceData={"content": text})
    return answer(
        f"{text} [ref_id:0]",
        references=0,
        statusCode=206,
        missing=[{"what": text, "outcome": text, "reason": text, "subQueryId": text}],
        plan={"warnings": [text], "subQueries": [{"id": text, "query": text, "dependsOn": [text]}] * 2},
        relatedQuestions=[text],
        activity=[record, record],
    ) | {"references": [source, {**source, "id": text, "terms": text, "citationUrl": text, "url": None}]}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    """Markup in any field of a response is shown as the text that it is."""
    page = Page(response_html(hostile_response(text)))
    visible = text.replace("[ref_id:0]", "")
    assert page.text.count(visible) >= 20
    assert [href for href in page.hrefs if not href.startswith("#akb-")] == []


URLS = [
    "javascript:alert(1)", " javascript:alert(1)", "java\tscript:alert(1)", "JAVASCRIPT:https://example.org",
    "data:text/html,<script>alert(1)</script>", "file:///etc/passwd", "//example.org", "https://exa\u202emple.org",
    "https://example.org/ onclick=alert(1)", 'https://example.org/"onclick="alert(1)', "https://", "vbscript:x",
]  # fmt: skip


@pytest.mark.parametrize(("url", "is_link"), [("HTTPS://example.org/?a=1&b=2", True), *((url, False) for url in URLS)])
def test_only_web_addresses_are_links(url: str, is_link: bool) -> None:
    """An address that isn't plainly http or https is text, never a link; one that is keeps its ampersands."""
    page = Page(response_html(answer("Yes.", 0) | {"references": [reference(0, url=url)]}))
    assert page.hrefs == [url] * is_link


def test_hidden_characters_are_removed() -> None:
    """Control, bidirectional, tag and surrogate characters don't reach the page; joiners and line breaks do."""
    text = "a\x00b\x1b[31mc\u202ed\u2066e\U000e0041f\ud800g\u200bh \U0001f469\u200d\U0001f680"
    shown = response_html(hostile_response(text))
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]", shown
    )
    assert "ab[31mcdefgh \U0001f469\u200d\U0001f680" in Page(shown).text


def test_markers_link_to_their_sources() -> None:
    """Each marker is a link, numbered from 1, to an id that exists once."""
    page = Page(response_html(answer("One [ref_id:1]. Both [ref_id:0][ref_id:1].", 3)))
    links = [href[1:] for href in page.hrefs if href.startswith("#")]
    assert len(links) == 3
    assert set(links) <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "One2. Both12." in page.text
    assert "1 more, found and not cited" in page.text


def test_each_claim_stands_with_the_words_that_support_it() -> None:
    """Open where one has none; hostile text stays text."""
    claims = [
        {"text": "It is tall [ref_id:0].", "verdict": "supported", "score": 1.0, "supports": [{"quote": "so <b>tall"}]},
        {"text": "<script>x</script>", "verdict": "unsupported", "score": 0.0, "supports": []},
        {"text": "Here it is.", "verdict": "notCheckable"},
    ]
    data = {"response": [{"role": "assistant", "content": "It is tall [ref_id:0]."}]}
    shown = response_html({**data, "grounding": {"claims": claims}})
    assert "1 of 2 claims supported" in shown
    assert "so &lt;b&gt;tall" in shown
    assert "<script" not in shown
    assert "<details open>" in shown
    assert "<details open>" not in response_html({**data, "grounding": {"claims": claims[:1]}})
    assert "claims supported" not in response_html(data)


def test_extracts_are_listed_with_their_sources() -> None:
    """Extracted data is a numbered list; what is known of each source stands beside it, other sources are folded."""
    items = [
        {"ref_id": 1, "title": "Short", "content": "Few words."},
        {"ref_id": 0, "title": "L", "content": "w " * 999},
    ]
    page = Page(response_html(answer(json.dumps(items), 3)))
    assert "Extracts 2" in page.text
    assert "2Short missions · score 0.500 · https://example.org/1Few words." in page.text
    assert "1 more, read and not extracted" in page.text
    assert page.tags.count("details") == 3  # the long one, the rest, and the passage in the rest
    assert len(page.ids) == 2


def test_timeline_bars_stay_in_their_track() -> None:
    """Bars lie within 0 and 100 percent, whatever the times; a record that has not begun has none."""
    times: list[tuple[Any, Any]] = [
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z"),
        ("2026-01-01T00:00:09", "2026-01-01T00:00:01Z"),
        ("2026-01-01T00:00:10+00:00", None),
        ("0001-01-02T00:00:00+00:00", "9999-12-30T23:59:59+00:00"),
        (None, None),
        (None, "2026-01-01T00:00:01Z"),
    ]
    records = [{"type": "searchIndex", "startedAt": start, "completedAt": end} for start, end in times]
    for some in (records, records[:3], records[2:3], records[4:]):
        bars = Page(response_html(answer("Yes.", activity=some))).bars
        assert len(bars) == sum(record in records[:4] for record in some)
        for place in bars:
            left, width = (float(part.removesuffix("%")) for part in place)
            assert 0 <= left <= 100
            assert 0 < width <= 100
            assert left + width <= 100.01


def test_what_is_missing_stands_first() -> None:
    """A partial response says so before the answer, and names each part; the plan's warnings follow."""
    missing = [{"what": "press", "outcome": "denied", "reason": "no filter", "subQueryId": "q2"}]
    text = Page(response_html(answer("Yes.", statusCode=206, missing=missing, plan={"warnings": ["odd plan"]}))).text
    assert text.startswith("Incomplete (206): some of it is missing.press (q2) denied: no filterAbout the planodd plan")
    assert "Incomplete" not in Page(response_html(answer("Yes."))).text
    assert "Incomplete" in Page(response_html(answer("Yes.", statusCode=206))).text


def test_long_lists_are_cut() -> None:
    """Of thousands of records the first are shown, and the page tells how many more; every link leads somewhere."""
    count = 1500
    record = {"type": "searchIndex", "knowledgeSourceName": "s", **TIMES}
    data = answer("".join(f"[ref_id:{number}]" for number in range(count)), count, activity=[record] * count)
    data |= {"missing": [{"what": "w"}] * count, "plan": {"warnings": ["w"] * count}}
    shown = response_html(data, limit=None)
    page = Page(shown)
    assert page.text.count(f"… and {count - ROWS:,} more") == 4
    assert len(page.ids) == len([href for href in page.hrefs if href.startswith("#")]) == ROWS
    assert f"[ref_id:{count - 1}]" in page.text
    assert len(shown) < 500_000


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The style names no resource, and each of its rules is inside the one class."""
    shown = response_html({})
    style = shown[shown.index("<style>") + 7 : shown.index("</style>")]
    assert not re.search(r"url\(|@import|expression|https?:", style)
    assert style.strip().startswith(".agentic-kb{")
    depth = 0
    for index, char in enumerate(style.strip()):
        depth += {"{": 1, "}": -1}.get(char, 0)
        assert depth > 0 or index in range(11) or index == len(style.strip()) - 1


MARKDOWN = """# Heights

- The **Saturn V** was *110.6 m* tall [ref_id:0].
- It was painted `green` [ref_id:1].

| name | height |
|:-----|-------:|
| Saturn V | 110.6 |

See [the page](https://example.org/a_b), [this](javascript:alert(1)) or ![it](https://example.org/x.png)."""


def claim(text: str, verdict: str, *, within: str = MARKDOWN, **more: Any) -> dict[str, Any]:
    start = within.index(text)
    return {"text": text, "span": {"start": start, "end": start + len(text)}, "verdict": verdict, "score": 0.5, **more}


def test_an_answer_s_markdown_is_rendered() -> None:
    """Lists, tables, emphasis, headings and web links; no image is loaded, and no other address is a link."""
    page = Page(response_html(answer(MARKDOWN)))
    assert {"h4", "ul", "strong", "em", "code", "table", "th", "td"} <= set(page.tags)
    assert next(href for href in page.hrefs if not href.startswith("#")) == "https://example.org/a_b"
    assert "img" not in page.tags
    assert "[this](javascript:alert(1))" in page.text


def test_sentences_are_marked_by_their_support() -> None:
    """Each by its verdict, in lists and around emphasis too; the words stay as they were."""
    claims = [
        claim("The **Saturn V** was *110.6 m* tall [ref_id:0].", "supported"),
        claim("- It was painted `green` [ref_id:1].", "contradicted"),
    ]
    shown = response_html(answer(MARKDOWN, grounding={"claims": claims}))
    said = re.findall(r'<span class="akb-said akb-(\w+)" title="(\w+), 0.50">([^<]*)</span>', shown)
    told = [("ok", text) for text in ("The ", "Saturn V", " was ", "110.6 m", " tall", ".")]
    assert [(tone, text) for tone, verdict, text in said] == [*told, ("bad", "It was painted "), ("bad", ".")]
    plain = Page(response_html(answer(MARKDOWN))).text
    assert Page(shown).text.startswith(plain[: plain.index("Sources")][:150])
    elsewhere = response_html(answer("Other words.", grounding={"claims": claims}))
    assert "akb-said" not in elsewhere[elsewhere.index("</style>") :]


def test_a_plan_is_a_graph() -> None:
    """A box for each search, in a column for each round, with its whole query as its title; a line for each need."""
    queries = [
        {"id": "q1", "query": "Who built the engines of the Saturn V rocket of Apollo 11?", "sources": ["rockets"]},
        {"id": "q2", "query": "Where is #q1?", "dependsOn": ["q1"]},
        {"id": "q3", "query": "How tall was it?"},
    ]
    page = Page(response_html(answer("Yes.", plan={"subQueries": queries})))
    assert (page.tags.count("rect"), page.tags.count("path")) == (3, 1)
    assert "q1: Who built the engines of the Saturn V rocket of Apollo 11? (rockets)" in page.text
    assert "svg" not in Page(response_html(answer("Yes.", plan={"subQueries": queries[:1]}))).tags


def test_fragments_for_notebooks_are_small() -> None:
    """A large response is shortened to 15 kB; the page that is saved has all of it."""
    references = [reference(number, sourceData={"content": "many words " * 300}) for number in range(20)]
    record = {"type": "searchIndex", "knowledgeSourceName": "s", "searchIndexArguments": {"search": "x" * 90}, **TIMES}
    cited = "".join(f"[ref_id:{n}]" for n in range(20))
    data = answer(f"Words {cited}.", activity=[record] * 20) | {"references": references}
    assert len(response_html(data).encode()) <= LIMIT
    assert page_html(data).count("many words") >= 20 * 300


@pytest.mark.parametrize("text", ["[" * 20_000, "*a " * 6_000, "> " * 9_000, "[ref_id:0]" * 2_000, "x" * 200_000])
def test_odd_text_is_rendered_in_time(text: str) -> None:
    """No text takes a time that grows without bound."""
    started = time.monotonic()
    response_html(answer(text))
    assert time.monotonic() - started < 10


def test_a_response_is_saved_as_a_page(tmp_path: Path) -> None:
    """A whole document that may load nothing, of each kind of response."""
    kb = KnowledgeBase(
        [KnowledgeSource("docs", "manuals <b>", retriever=MemoryRetriever(["The Saturn V was 110.6 m tall."]))],
        llm=ScriptedLLM("It was **110.6 m** tall [ref_id:0]."),
        effort="minimal",
    )
    responses: list[Any] = [kb.retrieve("How tall?"), kb.answer("How tall?"), kb.as_query_engine().query("How tall?")]
    for number, response in enumerate(responses):
        page = response.save(tmp_path / f"{number}.html").read_text("utf-8")
        assert page.startswith("<!doctype html>\n<html lang=")
        assert "default-src 'none'" in page
        assert "<title>It was" in page
        body = page[page.index('<div class="agentic-kb">') : page.index("</main>")]
        assert "110.6 m</span></strong>" in body
        assert Page(body).hrefs
        assert body == response._repr_html_()
    shown = kb._repr_html_()
    assert "manuals &lt;b&gt;" in shown
    assert Page(shown).text.count("docs") == 1
    assert len(shown) < LIMIT


def terminal(data: dict[str, Any]) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    show_response(console, RetrievalResponse.parse(data))
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]


def test_a_terminal_shows_no_json_where_nothing_was_found() -> None:
    shown = terminal(answer("[]") | {"references": []})
    assert "Extracts (0)" in shown
    assert "[]" not in shown


def test_a_terminal_shows_markdown_and_hostile_text_as_text() -> None:
    """Tables and lists are laid out; what looks like HTML, a link, rich's markup or a control sequence is words."""
    text = MARKDOWN + "\n\n<b>bold</b> a < b \x1b[31m [link](file:///etc/passwd)"
    shown = terminal(answer(text) | {"references": []})
    assert "• The Saturn V was 110.6 m tall [1]." in shown
    assert "Saturn V   110.6" in shown
    assert "<b>bold</b> a < b" in shown
    hostile = "\x1b[31mred\x1b[0m [bold]x[/bold] \u202eevil"
    found = {"type": "searchIndex", "knowledgeSourceName": hostile}
    named = terminal(
        answer(f"{hostile} [ref_id:0]", missing=[{"what": hostile, "outcome": "error", "reason": hostile}])
        | {"references": [{"id": "0", "activitySource": 0, "docKey": "k", "title": hostile, "nodeId": "n", **found}]}
        | {"activity": [{"id": 0, "subQueryId": "q", "error": {"code": "x", "message": hostile}, **found}]}
        | {"plan": {"subQueries": [{"id": "q", "query": hostile, "sources": [hostile]}], "warnings": [hostile]}}
    )
    assert named.count("[bold]x[/bold]") >= 5
    assert not set(shown + named) & {"\x1b", "\u202e"}
