"""Markdown and HTML: their text, their titles, and Markdown's front matter."""

from __future__ import annotations

import re

from llama_index_agentic_kb.store.database import MetadataValue

__all__ = ["first_heading", "html_to_text", "split_front_matter", "without_title"]

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)[ \t]*:(?:[ \t]+(.*))?")
# Lines that a YAML mapping may hold beside fields: empty, comment, continuation of a list or block.
_OTHER_LINE = re.compile(r"\s*(?:#.*)?|[ \t].*|-(?:[ \t].*)?")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{1,17}")

_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*")
_CODE_FENCE = re.compile(r" {0,3}(```|~~~)")
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^)]{0,2000}\)")

_NO_TEXT = ("script", "style", "template", "noscript", "svg", "head", "title")
_BLOCKS = (
    *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "ul"),
)


def split_front_matter(text: str) -> tuple[dict[str, MetadataValue], str]:
    """Take the front matter off a Markdown text.

    Front matter is a block of ``key: value`` lines between two lines of ``---`` at the very start. Anything else
    between such lines is text, and stays.

    Args:
        text: The file's text.

    Returns:
        The fields with a scalar value (text, whole number, decimal, ``true`` or ``false``; lists and nested values
        are left out), and the text behind them.
    """
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    fields: dict[str, MetadataValue] = {}
    for line in match.group(1).split("\n"):
        found = _FIELD.fullmatch(line.rstrip())
        if found is not None:
            value = _scalar((found.group(2) or "").strip())
            if value is not None:
                fields[found.group(1)] = value
        elif _OTHER_LINE.fullmatch(line) is None:
            return {}, text
    return fields, text[match.end() :].lstrip("\n")


def first_heading(text: str) -> str:
    """Find the first ``#`` heading of a Markdown text outside code blocks; empty when there is none."""
    in_code = False
    for line in text.split("\n"):
        if _CODE_FENCE.match(line):
            in_code = not in_code
            continue
        match = None if in_code else _HEADING.fullmatch(line)
        if match is not None:
            return _LINK.sub(r"\1", match.group(1)).strip(" *`")
    return ""


def without_title(text: str, title: str) -> str:
    """Drop the heading with which a Markdown text begins, where it only repeats the title and more follows it."""
    head, _, rest = text.lstrip().partition("\n")
    repeats = head.startswith("# ") and " ".join(head[2:].split()).casefold() == " ".join(title.split()).casefold()
    return rest.lstrip("\n") if repeats and rest.strip() else text


def html_to_text(data: bytes) -> tuple[str, str]:
    """Read a page's title and text.

    Args:
        data: The page; its encoding is taken from the page itself.

    Returns:
        The first ``<h1>``, else the ``<title>``, else an empty title; and the text without scripts and styles,
        blocks apart by a blank line, list items and rows on lines of their own.
    """
    from bs4 import BeautifulSoup  # noqa: PLC0415  (comes with LlamaIndex's file readers)

    # html.parser warns about an XML declaration, which means nothing to it.
    soup = BeautifulSoup(re.sub(rb"\A\s*<\?xml[^>]*\?>", b"", data), "html.parser")
    heading = soup.find("h1") or soup.find("title")
    title = " ".join(heading.get_text(" ").split()) if heading is not None else ""
    for tag in soup(_NO_TEXT):
        tag.decompose()
    # White space in the source means one space; only the marks put in below break lines.
    for string in soup.find_all(string=True):
        if string.find_parent("pre") is None:
            string.replace_with(type(string)(re.sub(r"\s+", " ", string)))
    for tag in soup(_BLOCKS):
        tag.insert_before("\n\n")
        tag.append("\n\n")
    for tag in soup(("br", "li", "tr")):
        tag.insert_before("\n")
    for tag in soup(("td", "th")):
        tag.append(" ")
    lines = [line.strip(" ") if line.strip() else "" for line in soup.get_text().split("\n")]
    return title, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _scalar(value: str) -> MetadataValue | None:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    value = re.sub(r"(?:^|(?<!\s)\s+)#.*", "", value)
    if not value or value[0] in "[{|>&*!":
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _INTEGER.fullmatch(value):
        return int(value)
    return float(value) if _FLOAT.fullmatch(value) else value
