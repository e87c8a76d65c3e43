from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from html.parser import HTMLParser
from typing import Final
from urllib.parse import quote

import markdown  # type: ignore[import-untyped]
import mistune
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from llama_index_agentic_kb.guard.links import LinkFilter
from tests.injection.attacks import links_in


def clean_links(text: str, addresses: Collection[str]) -> tuple[str, int]:
    """Return a text without links to anything but the references, and how many were taken out."""
    links = LinkFilter(addresses)
    return links.feed(text) + links.close(), links.removed


KNOWN = {"https://a.org/x", "https://a.org/y?b=1&c=2", "https://en.wiki.org/Foo_(bar)", "javascript:alert(1)", ""}
KEPT = [
    "See [x](https://a.org/x) and ![y](https://a.org/x).", "Bare https://a.org/x, and <https://a.org/x>.",
    "*see* https://a.org/x; (https://a.org/x).", "[l][1]\n\n[1]: https://a.org/x",
    "vector<int> v; a<b and c>d; <system>x</system> <b>bold</b> <br/>",
    "said [ref_id:0]: The capital. [1] [note]: some words", "as follows [ref_id:0]:\n\n- a",
    "node.js/x README.md and/or src/guard/text.py e.g. 3.14/2 {a=b} onclick=x x=main.py:3 *.md",
    "C:\\Users\\x and C:\\\\Users 10:30 a:b", "x[0]: int = 3", "\u4e2d\u6587\u3002 \u0430\u0431\u0432 \U0001f600",
]  # fmt: skip
TAKEN = [
    ("![y](https://evil.org/?q=1)!", "![y] (link removed)!", 1),
    ("[a [b] c](https://evil.org)", "[a [b] c] (link removed)", 1),
    ("[![i](https://e.com/1)](https://e.com/2)", "[![i] (link removed)] (link removed)", 2),
    ("[t][l]\n\n[l]: https://evil.com/?d=1", "[t][l]\n\n[l] : (link removed)", 1),
    ("[l]: <https://evil.com>\n", "[l] : (link removed)\n", 1),
    ('[l]:\n  https://evil.com "t"', '[l] :\n  (link removed) "t"', 1),
    ("[l]: //evil.com/x", "[l] : (link removed)", 1),
    ("[l]: logout", "[l] : logout", 0),
    ("<https://evil.com/a?b=c>", "(link removed)", 1),
    ("bare https://evil.com/a?b, next", "bare (link removed), next", 1),
    ("HTTPS://EVIL.com/x", "(link removed)", 1),
    ("www.evil.com/x evil.com/?x=1 t.co/abc", "(link removed) (link removed) (link removed)", 3),
    ("https://a.org/x?q=1", "(link removed)", 1),
    ("https://a.org/x#f", "(link removed)", 1),
    ("https://a.org/x/../y", "(link removed)", 1),
    ("https://a.org/x@evil.com", "(link removed)", 1),
    ("https://a.org@evil.com/x", "(link removed)", 1),
    ("[x](https://a.org/x?)", "[x] (link removed)", 1),
    ("[x](https://a.org/%78)", "[x] (link removed)", 1),
    ("[x](https:/a.org/x)", "[x] (link removed)", 1),
    ("[x](https&#58;//evil.com)", "[x] (link removed)", 1),
    ("https\\://evil.com https&#x3a;//evil.com", "(link removed) (link removed)", 2),
    ("https:\\\\evil.com", "(link removed)", 1),
    ("https://xn--e1awd7f.com/", "(link removed)", 1),
    ("[x](javascript:alert(1))", "[x] (link removed)", 1),
    ("javascript:alert(1)", "(link removed))", 1),
    ("[x](data:text/html;base64,xx)", "[x] (link removed)", 1),
    ("[x](//evil.com) [y](\\\\evil.com) [z](/logout)", "[x] (link removed) [y] (link removed) [z] (link removed)", 3),
    ("[x](< https://evil.com >)", "[x] (link removed)", 1),
    ('[x](\n https://evil.com\n "t")', "[x] (link removed)", 1),
    ("[x](https://evil.com\n\n)", "[x] (link removed)", 1),
    ("f[a](b)", "f[a] (b)", 1),
    ("![x]https://evil.com", "![x] (link removed)", 1),
    ("![x]" + "https://evil.com/" + "a" * 3_000, "![x] (link removed)", 1),
    ("mailto:a@b.c?body=x <mailto:a@b.c>", "(link removed) (link removed)", 2),
    ("ftp://evil.com s3://bucket/x", "(link removed) (link removed)", 2),
    ("<img src=x onerror=1>", "< img src=x onerror=1>", 1),
    ("<a href='x'>t</a>", "< a href='x'>t< /a>", 2),
    ("<svg/onload=alert(1)>", "< svg/onload=alert(1)>", 1),
    ("<x onmouseover=y>", "< x onmouseover=y>", 1),
    ("<b <img src=x>", "< b < img src=x>", 2),
    ("<script>alert(1)</script>", "< script>alert(1)< /script>", 2),
    ("<!-- x --> <?x?> <![CDATA[", "< !-- x --> < ?x?> < ![CDATA[", 0),
    ("std::vector<std::string>", "std::vector< std::string>", 0),
    ("https://a.org/x\u3002\u4e2d", "<https://a.org/x>\u3002\u4e2d", 0),
    ("**https://a.org/x**", "**<https://a.org/x>**", 0),
    ("https://a.org/x!", "<https://a.org/x>!", 0),
    ("\\https://a.org/x**", "\\(link removed)**", 1),
    ("![x]\n\n> [x]:\n> //evil.example/p.png?q=1", "![x]\n\n> [x] :\n> (link removed)", 1),
    ("![x]\n\n- [x]:\n  b", "![x]\n\n- [x] :\n  b", 0),
    ("![x]\n\n[x]:b\r\n", "![x]\n\n[x] :b\r\n", 0),
    ("see //evil.example/p.png, or a // comment", "see (link removed), or a // comment", 1),
    ("mail to bob@evil.com or @evil", "mail to bob (at) evil .com or @evil", 0),
    ("Booking.com and node.js", "Booking .com and node.js", 0),
    ("a.evil.sh evil.md/?q=1 evil.py:80/x", "a.evil .sh evil .md/?q=1 evil .py:80/x", 0),
    (
        "\u00fc.evil.com/x \u00fc.com/x \u043f.\u0440\u0444/x",
        "\u00fc.(link removed) \u00fc .com/x \u043f .\u0440\u0444/x",
        1,
    ),
    ("https://evil.org/\u00fc.evil.com", "(link removed)\u00fc.evil .com", 1),
    ("a&#64;evil.com b@evil&#46;com <c@d>", "a (at) evil .com b (at) evil&#46;com <c (at) d>", 0),
    ("*x*{: onclick=f() }\n{href=/out}", "*x*{: onclick =f() }\n{href =/out}", 0),
    ("<x\xa0/onfocus=f()> <x\x85y=1>", "< x\xa0/onfocus=f()> < x\x85y=1>", 1),
    ("[^1](https://a.org/x))SECRET", "[^1](<https://a.org/x>))SECRET", 0),
    ("[1]<https://evil.org/x>", "[1] (link removed)", 1),
    ("> <b\n> onclick=f()>", "> < b\n> onclick=f()>", 0),
    ("SECRET.evil.com.zz e~~.com =.org/x", "SECRET.evil .com .zz e~~ .com = .org/x", 0),
    ("\u00e9.evil.md", "\u00e9.evil .md", 0),
    ('<a@b"c> x@e`f', '< a (at) b"c> x (at) e`f', 0),
    ("https://en.wiki.org/Foo_(bar)", "<https://en.wiki.org/Foo_(bar)>", 0),
    ("www.`x www..", "www .`x www ..", 0),
    ("[x]:a javascript:b)", "[x] :a (link removed))", 1),
    ("`https://a.org/x`", "`<https://a.org/x>`", 0),
    ("<" + "x" * 99 + " onclick=y>", "< " + "x" * 99 + " onclick=y>", 0),
    ("[w](https://en.wiki.org/Foo_(bar))", "[w](<https://en.wiki.org/Foo_(bar)>)", 0),
    ('[y](https://a.org/y?b=1&amp;c=2 "t")', "[y](https://a.org/y?b=1&c=2)", 0),
    ("\u898b\u3066https://evil.com/\u5bc6", "\u898b\u3066(link removed)\u5bc6", 1),
    ("https://evil.com/" + "a" * 5_000 + " end", "(link removed) end", 1),
]
PIECES = [
    *("[", "]", "(", ")", "<", ">", "!", ":", "/", "\\", " ", "\n", "a", ".", "=", '"', "`", "&#58;", "http", "s://"),
    *("https://evil.com/?q", "https://a.org/x", "www.", "](", "]: ", "<a ", "img src", "javascript:", "\u4e2d", "?d=1"),
]


MORE = [
    "> ", "- ", "1. ", "    ", "\t", "\n\n", "\r", "\u2028", "//evil.example/p.png", "/evil", "evil.cx", "[x]", "![x]",
    "[x]: ", "[x]:\n> ", "[^1]: ", "a@evil.com", "ftp://evil.com", "data:image/png,x", "![x][]", "\u00fc", ".com/x",
    ".sh/?q", "{: onclick=f()}", "\xa0", "&#64;", "@evil", "[^1](", "<div>", "&lt;", "*",
]  # fmt: skip
ENGINES: Final[dict[str, Callable[[str], object]]] = {
    "CommonMark": MarkdownIt("commonmark").render,
    "markdown-it, guessing links": MarkdownIt("default", {"linkify": True, "typographer": True, "html": True}).render,
    "markdown-it as GitHub": MarkdownIt("gfm-like", {"linkify": True, "html": True}).render,
    "mistune": mistune.create_markdown(escape=False, plugins=["url", "footnotes", "table", "def_list"]),
    "python-markdown": partial(markdown.markdown, extensions=["tables", "footnotes", "def_list", "fenced_code"]),
}
LEADS: Final = ("href", "src", "srcset", "action", "formaction", "data", "poster", "background", "style", "xlink:href")


class _Leads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in LEADS or name.startswith("on")]


def foreign(rendered: str) -> list[str]:
    """Where a page leads beside the references and itself."""
    leads = _Leads()
    leads.feed(rendered)
    leads.close()
    ours = ({*KNOWN, *(quote(address, ":/?&=") for address in KNOWN)} - {"javascript:alert(1)"}) | {""}
    return [to for to in leads.found if not to.startswith("#") and to not in ours and "text-align" not in to]


def shown(text: str, size: int = 10_000) -> tuple[str, int]:
    """What a stream shows of a text that is cut into pieces of a size."""
    links = LinkFilter(KNOWN)
    said = "".join(links.feed(text[at : at + size]) for at in range(0, len(text), size)) + links.close()
    return said, links.removed


@pytest.mark.parametrize("text", KEPT)
def test_links_to_references_and_plain_text_stay(text: str) -> None:
    """In every form of Markdown; formulas, code, footnotes and other scripts are not touched."""
    assert clean_links(text, KNOWN) == (text, 0)


@pytest.mark.parametrize(("text", "left", "removed"), TAKEN)
@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_other_links_become_text(text: str, left: str, removed: int, size: int) -> None:
    """Whatever their form, and however the text is cut into deltas; they are counted."""
    assert shown(text, size) == (left, removed)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES + MORE), max_size=20), st.integers(1, 9))
def test_no_mixture_leads_anywhere_else(pieces: list[str], size: int) -> None:
    """Whatever renders it; in a stream the same is shown."""
    text = "".join(pieces)
    left, removed = clean_links(text, KNOWN)
    assert shown(text, size) == (left, removed)
    for name, render in ENGINES.items():
        assert foreign(str(render(left))) == [], (name, left)
    assert not [link for link in links_in(left) if "evil" in link or "removed" in link]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("text", [text for text, _, _ in TAKEN], ids=lambda text: text[:30])
def test_attacks_lead_nowhere(name: str, text: str) -> None:
    """In every renderer, after a link and before one, in quotes and in lists; as they are, they do in some."""
    for around in ("{}", "[x](https://a.org/x) {}", "> {}\n\n![x]", "- ![x]\n- {}"):
        left, _ = clean_links(around.format(text), KNOWN)
        assert foreign(str(ENGINES[name](left))) == [], left


def test_little_is_held_back() -> None:
    """A stream without links is told word by word; what is open is told at the end."""
    links = LinkFilter(())
    assert [links.feed(piece) for piece in ("One two", " three [a", "] (b) <", "3 ")] == [
        "One ",
        "two three ",
        "[a] (b) ",
        "<3 ",
    ]
    assert links.feed("[x](https://e") == "[x"
    assert links.close() == "] ((link removed)"


@pytest.mark.parametrize(
    "text",
    [
        "](" * 20_000, "](a" * 20_000, "](<" * 20_000, "]:" * 20_000, "]: a" * 20_000, "<a " * 20_000, "<a:" * 20_000,
        "(" * 50_000, "](" + "(" * 50_000, "](" + "(a)" * 20_000, "a" * 100_000, "a." * 50_000, "http" * 20_000,
        "https:" * 20_000, "&#58;" * 20_000, "\\" * 50_000, "www." * 20_000,
    ],
)  # fmt: skip
def test_hostile_text_takes_little_time(text: str) -> None:
    """No pattern goes back far over what it has read; in a stream neither."""
    began = time.monotonic()
    clean_links(text, KNOWN)
    links = LinkFilter(KNOWN)
    for at in range(0, len(text), 97):
        links.feed(text[at : at + 97])
    links.close()
    assert time.monotonic() - began < 15
