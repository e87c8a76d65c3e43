import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from llama_index_agentic_kb._html import ROWS, response_html
from llama_index_agentic_kb.schema import Message, Reference, RetrievalResponse, SourceActivity

ALLOWED = {
    "a": {"href", "title", "target", "rel"},
    "br": set(),
    "details": set(),
    "div": {"class", "style", "role", "dir"},
    "li": {"class", "id"},
    "ol": {"class"},
    "p": {"class", "role", "aria-level", "dir"},
    "small": set(),
    "span": {"class"},
    "strong": {"dir"},
    "style": set(),
    "summary": set(),
    "sup": set(),
    "ul": set(),
}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></details></div><iframe src=javascript:alert(1)>",
    "{{7*7}} {0} %s &lt;b&gt; <!-- ]]>",
    "[ref_id:0]<svg/onload=alert(1)>",
)
TIMES = {"startedAt": "2026-01-01T00:00:00Z", "completedAt": "2026-01-01T00:00:01Z"}


class Page(HTMLParser):
    """Reads a fragment, and fails at whatever a response may not contain."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.hrefs: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(fragment)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        assert {name for name, _ in attrs} <= ALLOWED[tag]
        self.tags.append(tag)
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.hrefs += [given["href"]] if "href" in given else []
        self.styles += [given["style"]] if "style" in given else []
        if tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] != "style":
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")


def answer(text: str, references: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "statusCode": 200,
        "response": [{"role": "assistant", "content": [{"type": "text", "text": text}]}],
        "references": [reference(number) for number in range(references)],
        **more,
    }


def reference(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": str(number),
        "title": f"Title {number}",
        "knowledgeSourceName": "missions",
        "docKey": f"d{number}",
        "url": f"https://example.org/{number}",
        "score": 0.5,
        "sourceData": {"content": f"Content {number}."},
        **more,
    }


def hostile_response(text: str) -> dict[str, Any]:
    record = {
        "type": text,
        "outcome": text,
        "knowledgeSourceName": text,
        "subQueryId": text,
        "warning": text,
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
        plan={"warnings": [text]},
        activity=[record, record],
    ) | {"references": [source, {**source, "id": text, "terms": text, "citationUrl": text, "url": None}]}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    """Markup in any field of a response is shown as the text that it is."""
    page = Page(response_html(hostile_response(text)))
    visible = text.replace("[ref_id:0]", "")
    assert page.text.count(visible) >= 20
    assert [href for href in page.hrefs if not href.startswith("#akb-")] == []


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        " javascript:alert(1)",
        "java\tscript:alert(1)",
        "JAVASCRIPT:https://example.org",
        "data:text/html,<script>alert(1)</script>",
        "file:///etc/passwd",
        "//example.org",
        "https://exa\u202emple.org",
        "https://example.org/ onclick=alert(1)",
        'https://example.org/"onclick="alert(1)',
        "https://",
        "vbscript:x",
    ],
)
def test_only_web_addresses_are_links(url: str) -> None:
    """An address that isn't plainly http or https is text, never a link."""
    assert Page(response_html(answer("Yes.", 0) | {"references": [reference(0, url=url)]})).hrefs == []


def test_web_addresses_are_links() -> None:
    """An http or https address is a link, its ampersands kept."""
    page = Page(response_html(answer("Yes.", 0) | {"references": [reference(0, url="HTTPS://example.org/?a=1&b=2")]}))
    assert page.hrefs == ["HTTPS://example.org/?a=1&b=2"]


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
    assert "1 more, read and not cited" in page.text


@pytest.mark.parametrize(
    "marker", ["[ref_id:7]", "[ref_id:-1]", "[ref_id:99999999999]", "[ref_id:x]", "[ref_id:\u0661]"]
)
def test_markers_out_of_range_stay_text(marker: str) -> None:
    """A marker that names no source is shown as it was written."""
    page = Page(response_html(answer(f"So {marker}.")))
    assert f"So {marker}." in page.text
    assert "sup" not in page.tags


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


@pytest.mark.parametrize("text", ["[]", '["a"]', "[1", "[ref_id:0] it is", '[{"title": "no id"}]', "[" * 100_000, "{}"])
def test_what_is_no_list_of_extracts_is_an_answer(text: str) -> None:
    """Only a JSON list of objects with ref_id is extracted data; an empty one says that nothing was found."""
    page = Page(response_html(answer(text)))
    assert ("Nothing was found." if text == "[]" else "Answer") in page.text


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
        styles = Page(response_html(answer("Yes.", activity=some))).styles
        places = [re.fullmatch(r"left:([\d.]+)%;width:([\d.]+)%", style) for style in styles]
        assert len(places) == sum(record in records[:4] for record in some)
        for place in places:
            assert place is not None
            left, width = float(place[1]), float(place[2])
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


def test_an_empty_response_is_shown() -> None:
    """A response with nothing in it is a page that says so."""
    assert "No answer." in Page(response_html({})).text
    assert "No answer." in Page(RetrievalResponse()._repr_html_()).text


def test_long_lists_are_cut() -> None:
    """Of thousands of records the first are shown, and the page tells how many more; every link leads somewhere."""
    count = 5000
    record = {"type": "searchIndex", "knowledgeSourceName": "s", **TIMES}
    data = answer("".join(f"[ref_id:{number}]" for number in range(count)), count, activity=[record] * count)
    data |= {"missing": [{"what": "w"}] * count, "plan": {"warnings": ["w"] * count}}
    shown = response_html(data)
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


def test_a_real_response_is_shown() -> None:
    """The models' own wire form is what the page reads."""
    response = RetrievalResponse(
        response=[Message(role="assistant", content="In 2012 [ref_id:0].")],
        activity=[SourceActivity(id=0, knowledge_source_name="missions", sub_query_id="q0", count=1)],
        references=[
            Reference(id="0", activity_source=0, knowledge_source_name="missions", doc_key="d", title="T", node_id="n")
        ],
    )
    page = Page(response._repr_html_())
    assert page.hrefs == [f"#{page.ids[0]}"]
    assert "In 20121." in page.text
    assert "q0 · 1 found" in page.text
