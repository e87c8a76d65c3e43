"""A filter for links and images in answers: only links to the references' addresses remain.

A document may instruct a model to write an image whose address contains data that the model has read: a program that
renders the answer then sends the data to the attacker (EchoLeak, CVE-2025-32711, bypassed a filter of inline links with
reference-style links). So every form of link in Markdown, HTML and plain text is searched for, and a link to anything
but the exact address of a reference becomes text:

- ``[text](address)`` and images, however nested, become ``[text] (link removed)``.
- ``[label]: address``, the definition of a reference-style link: disabled by a space, and its address removed. Links
  without a definition are text.
- ``<address>``, bare addresses (``https://…``, ``www.…``, ``name.com/…``), ``mailto:``: become ``(link removed)``.
- HTML tags that have attributes, or that load, run or style something: disabled by a space after ``<``.
- Attributes in braces, as Python-Markdown reads them: disabled by a space before ``=``.

A reference's address with an additional query, fragment or path is a different address. A link that remains is written
exactly as in the reference. All rules apply in code blocks too: renderers disagree on where code ends.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection
from typing import Final

from llama_index_agentic_kb.guard.text import TextFilter

REMOVED: Final = "(link removed)"

MAX: Final = 2_048  # characters of a reference's address, and of the text that a stream buffers for it
MAX_NAME: Final = 64  # characters of a tag's name; a tag with a longer one is disabled
MAX_TAG: Final = 256  # characters after a tag's name that are searched for attributes

_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}\x00-\x20\x7f-\x9f]+", re.IGNORECASE)
_GOES_ON_AS_URL: Final = re.compile(r"(?::\d{1,5})?[/?#]")
"""What may follow a host's name in an address."""
_IN_HOST: Final = (".", "~", "$", "&", "+", "%")
"""ASCII characters that renderers take as part of a host's name, beside letters, digits and hyphens."""
_URL_SIGNS: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"<>`')
"""The characters that may continue an address: printable ASCII without double quotes, backticks and angle brackets."""
_CLOSING: Final = ".,;:!?)]}'*_~|"
"""Characters that at the end of an address belong to the sentence or the emphasis around it."""
_FOLLOWING: Final = ".,;:!?)*_'\""
_APART: Final = re.compile(rf"[{re.escape(_FOLLOWING)}]?(?:[ \t\n]|\Z)")
"""What may follow an address that is written without angle brackets."""
_ENDING: Final = ".,;)'"
"""The subset of ``_CLOSING`` that no renderer treats as part of the preceding address."""

# The characters of a scheme, plain, escaped or as an HTML entity.
_COLON: Final = r"(?:\\?:|&(?:\#0*58|\#x0*3a|colon);?)"
_SLASH: Final = r"(?:\\?/|\\|&(?:\#0*47|\#0*92|\#x0*2f|\#x0*5c|sol|bsol);?)"
_DOT: Final = r"(?:\\?\.|&(?:\#0*46|\#x0*2e|period);?)"
_MORE: Final = r"[^\s<>\"`]"
# Top-level domains whose plain names become links in mail and chat programs, and in renderers that guess. File names
# such as README.md are left, though some extensions are countries: nobody owns the domains of all names.
_COUNTRIES: Final = "md|py|sh|rs|pl|pm|ps|ml|mk|so|cc|cl|tf|td|id"
_FILES: Final = f"{_COUNTRIES}|cs|js|ts|go|rb|hs|gz|xz|db|vb|kt"
_TOP: Final = (
    rf"(?!(?:{_FILES})(?![a-z0-9]))[a-z]{{2}}|com|org|net|edu|gov|mil|int|info|biz|app|dev|xyz|top|site|online|link|"
    "click|live|shop|store|cloud|page|web|pro|tech|space|website|world|club|vip|icu|fun|buzz|rest|zone|xxx|aero|asia|"
    "coop|museum|name"
)
# A name without a path, and a name after "@", are split by spaces before their dots, and are not counted. So are
# attributes in braces before their "=": Python-Markdown's attr_list sets these.
_BARE: Final = re.compile(
    rf"(?:[a-z][a-z0-9+.-]{{1,30}}{_COLON}{_SLASH}{{2}}"
    rf"|(?<![a-z0-9])(?:(?:javascript|vbscript|mailto){_COLON}(?={_MORE})|data{_COLON}[a-z]+/|www{_DOT}(?=[a-z0-9_&\\-]))"
    rf"|(?<![:/]){_SLASH}{{2}}(?=[{re.escape(_URL_SIGNS)}]{{0,64}}(?:\.[^\s<>\"`]|[^\x00-\x7f]))"
    rf"|(?<![a-z0-9_@/-])(?:[a-z0-9-]{{1,63}}{_DOT}){{1,8}}(?:{_TOP})(?::\d{{1,5}})?[/?\#](?={_MORE}))"
    rf"[{re.escape(_URL_SIGNS)}]*"
    rf"|(?P<at>@(?=[a-z0-9_.-]{{0,255}}(?:\.[a-z0-9_-]|[^\x00-\x7f]|[\[&\\\"`])|[{re.escape(_URL_SIGNS)}]{{0,255}}>)"
    r"|&(?:\#0*64|\#x0*40|commat);)"
    rf"|(?P<host>(?<=@)[a-z0-9_-]+(?:\.[a-z0-9_-]+)+)"
    rf"|(?P<www>(?<![a-z0-9])www\.)"
    rf"|(?P<name>(?<![a-z0-9_/-])(?:[a-z0-9-]{{1,63}}\.){{1,8}}(?:{_TOP}))(?![a-z0-9_-])"
    rf"|(?P<file>(?<![a-z0-9_/-])(?:[a-z0-9-]{{1,63}}\.){{1,8}}(?:{_COUNTRIES}))(?![a-z0-9_-])"
    rf"|(?P<top>\.(?=[\u0440\u0420])|(?<![a-z0-9_-])\.(?=(?:{_TOP})(?![a-z0-9_-])|(?:{_COUNTRIES})(?::\d{{1,5}})?[/?\#]))"
    r"|(?P<brace>[{}\n])"
    r"|(?<![a-z0-9_.-])(?P<attribute>on[a-z]{3,30}|href|src|srcset|style)(?==)",
    re.IGNORECASE | re.ASCII,
)
_TOP_DOT: Final = re.compile(rf"\.(?=(?:{_TOP}|{_COUNTRIES})?(?:\.|\Z))|\.(?=[\u0440\u0420])", re.IGNORECASE | re.ASCII)
_LETTERS: Final = re.compile(r"(?<![a-z])[a-z]{1,40}\Z", re.IGNORECASE | re.ASCII)
_ADDRESS: Final = rf"<[^<>\n]{{0,{MAX}}}>|(?:[^\s<>()]|\([^\s<>()]{{0,{MAX}}}+\)){{1,{MAX}}}+"
_INLINE: Final = re.compile(
    rf"\]\(\s{{0,4}}(?P<address>{_ADDRESS})(?:\s{{1,4}}(?:\"[^\"]{{0,300}}\"|'[^']{{0,300}}'|\([^()]{{0,300}}\)))?\s{{0,4}}\)"
)
_INLINE_BEGUN: Final = re.compile(
    rf"\]\(\s{{0,4}}(?:<[^<>\n]{{0,{MAX}}}|(?:{_ADDRESS})?(?:\([^\s<>()]{{0,{MAX}}}+"
    r"|\s{1,4}(?:\"[^\"]{0,300}\"?|'[^']{0,300}'?|\([^()]{0,300}\)?)?\s{0,4})?)\Z"
)
_DEFINED: Final = re.compile(
    rf"\]:(?P<space>[ \t]{{0,8}}\n?[ \t]{{0,8}})(?P<address>[^ \t\n]{{1,{MAX}}}+)(?=[ \t\n]|\Z)"
)
_DEFINED_BEGUN: Final = re.compile(
    rf"\]:[ \t]{{0,8}}\n?[ \t]{{0,8}}(?:[^ \t\n]{{0,{MAX - 1}}}+(?:[ \t]{{1,8}}[\w.,=+-]{{0,40}}+)?)?\Z"
)
_DEFINES_NOTHING: Final = re.compile(r"\]:[ \t]{0,8}(?:\n[ \t]{0,8}\n|\n?[ \t]{0,8}\Z)")
_ADDRESSLIKE: Final = re.compile(r"[/\\:?#&@<%\x00-\x1f\x7f-\xa0\u2028\u2029]|\.\w")
_GOES_ON: Final = re.compile(r"[ \t]{1,8}[\w.,=+-]{1,40}+(?=[\s!?;)\]]|\Z)")
"""A plain word after a possible address: a definition ends there, or has a title in quotes."""
_NAME: Final = re.compile(rf"</?[a-z][^ \t\n\r\f\v/>]{{0,{MAX_NAME}}}+", re.IGNORECASE)
_AFTER_NAME: Final = re.compile(r"(?=[>/ \t\n\r\f\v])(?P<before>[^>=]*)(?P<decides>[>=])?")
_NO_NAME: Final = re.compile(r"[\"'`=\[\](){}<:]")
"""Characters in a tag's name that may turn the rest into an attribute or an address for some renderers."""

_AUTOLINK: Final = re.compile(rf"<(?P<address>[a-z][a-z0-9+.-]{{1,31}}:[^\s<>]{{0,{MAX}}})>", re.IGNORECASE)
_AUTOLINK_BEGUN: Final = re.compile(rf"<[a-z][a-z0-9+.-]{{1,31}}:[^\s<>]{{0,{MAX - 1}}}\Z", re.IGNORECASE)
_TRIGGER: Final = re.compile(r"\](?=[(:])|<(?=[a-z/!?]|\Z)", re.IGNORECASE)
_ESCAPED: Final = re.compile(r"\\([!-/:-@\[-`{-~])")
# fmt: off
_DANGEROUS: Final = frozenset((
    "a", "applet", "area", "audio", "base", "body", "button", "embed", "form", "frame", "frameset", "head", "html",
    "iframe", "image", "img", "input", "link", "map", "marquee", "math", "meta", "noembed", "noframes", "noscript",
    "object", "option", "picture", "plaintext", "portal", "script", "select", "slot", "source", "style", "svg",
    "template", "textarea", "title", "track", "video", "xml", "xmp",
))
# fmt: on
"""HTML elements that load, run, style or hide content even without attributes."""


class LinkFilter(TextFilter):
    """Removes all links of an answer except those to the references, piece by piece.

    Text that may become a link is buffered: usually one word, at most about 2,000 characters.

        links = LinkFilter({"https://a.org/x"})
        text = links.feed("See [x](https://a.org/x) and ![y](https://evil.") + links.feed("org/?q=1)") + links.close()
        assert (text, links.removed) == ("See [x](https://a.org/x) and ![y] (link removed)", 1)

    Args:
        addresses: The references' addresses; those that are no plain web addresses (http, https) are ignored.
    """

    removed = 0  # number of links removed so far

    def __init__(self, addresses: Collection[str]) -> None:
        known = {address for address in addresses if len(address) <= MAX and _WEB.fullmatch(address)}
        self._allowed = sorted(known, key=len, reverse=True)
        self._last = self._before = ""
        self._swallows = self._in_braces = False
        self._ends_here = True

    def feed(self, piece: str, *, final: bool = False) -> str:
        """See ``TextFilter``."""
        text, parts = self._held + piece, list[str]()
        position, self._held = 0, ""
        while (trigger := _TRIGGER.search(text, position)) is not None:
            start = trigger.start()
            self._before = text[position - 1 : position] if position else self._last
            parts.append(self._plain(text[position:start], ends_here=False))
            self._before = text[start - 1 : start] or self._last
            decided = self._construct(text, start, final=final)
            if decided is None:
                self._held = text[start:]
                break
            said, position = decided
            parts.append(said)
        else:
            rest = text[position:]
            self._before = text[position - 1 : position] if position else self._last
            parts.append(self._plain(rest, ends_here=True) if final else self._but_the_last_word(rest))
        self._last = text[: len(text) - len(self._held)][-1:] or self._last
        return "".join(parts)

    # -- plain text ------------------------------------------------------------------------------------------------

    def _plain(self, text: str, *, ends_here: bool) -> str:
        """Return a text without bare addresses; it ends with the stream, or before a Markdown or HTML construct."""
        self._ends_here = ends_here
        return _BARE.sub(self._bare, self._after_address(text, ended=True) if self._swallows else text)

    def _but_the_last_word(self, text: str) -> str:
        """Return a filtered text without its last word, which is buffered, since it may become an address."""
        text = self._after_address(text, ended=False) if self._swallows else text
        head = text.rstrip(_URL_SIGNS)
        word = text[len(head) :]
        clean = _BARE.sub(self._bare, head)
        if len(word) <= MAX:
            self._held = word
            return clean
        first = _BARE.search(word)
        rest = () if first is None else _BARE.finditer(word, first.start())
        begun = next((one for one in rest if one.lastgroup not in ("brace", "attribute")), None)
        if begun is None:  # no scheme, and no attribute, is as long as what is held
            cut = _LETTERS.search(word, 0, len(word) - 128)
            at = len(word) - 128 if cut is None else cut.start()
            self._held = word[at:]
            return clean + (word[:at] if first is None else _BARE.sub(self._bare, word[:at]))
        self.removed += 1
        self._swallows = True
        return clean + word[: begun.start()] + _removed(word[: begun.start()][-1:])

    def _after_address(self, text: str, *, ended: bool) -> str:
        """Return a text without the rest of an address that was too long to buffer."""
        text = text.lstrip(_URL_SIGNS)
        self._swallows = not text and not ended
        return text

    def _bare(self, found: re.Match[str]) -> str:
        """Return the replacement of a bare address: a reference's own address, delimited, or the removal notice."""
        written, text, kind = found.group(), found.string, found.lastgroup
        before = text[found.start() - 1] if found.start() else self._before
        if kind == "brace":
            self._in_braces = written == "{"
            return written
        if kind is not None:
            return self._split(kind, found, before)
        core = written.rstrip(_CLOSING)
        for address in self._allowed:
            rest = written[len(address) :]
            if written.startswith(address) and not rest.strip(_CLOSING) and before != "\\":
                apart = self._ends_here if found.end() == len(text) else text[found.end()] in " \t\n"
                return _delimited(address, is_apart=apart and not rest.strip(_ENDING)) + rest
        self.removed += 1
        return _removed(before) + written[len(core) :]

    def _split(self, kind: str, found: re.Match[str], before: str) -> str:
        """Return a name, or a part of one, with spaces that keep renderers from making a link or an attribute."""
        written = found.group()
        if kind == "attribute":
            return f"{written} " if self._in_braces else written
        if kind == "at":
            return " (at) "
        if kind == "host":
            return written.replace(".", " .")
        if _is_harmless(kind, found, before):
            return written
        return f"{written[:-1]} ." if kind == "www" else _TOP_DOT.sub(" .", written)

    # -- Markdown and HTML -----------------------------------------------------------------------------------------

    def _construct(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        """Return the replacement of a construct and the position after it; None if later text may change it."""
        following = text[start + 1 : start + 2]
        if following in ("(", ":"):
            return (self._inline if following == "(" else self._definition)(text, start, final=final)
        if not following:
            return ("<", start + 1) if final else None
        return ("< ", start + 1) if following in "!?" else self._tag(text, start, final=final)

    def _inline(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        link = _INLINE.match(text, start)
        if link is None:
            return None if not final and _is_within(_INLINE_BEGUN, text, start) else ("] (", start + 2)
        address, after = self._known(link["address"]), text[link.end() : link.end() + 2]
        if address is None:
            self.removed += 1
            return (f"] {REMOVED}", link.end()) if _ADDRESSLIKE.search(link["address"]) else ("] (", start + 2)
        if not final and after in ("", *_FOLLOWING):
            return None
        return f"]({_delimited(address, is_apart=_APART.match(after) is not None)})", link.end()

    def _definition(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        """Disable the definition of a reference-style link; prose such as "[note]: some words" is no definition."""
        if not final and _is_within(_DEFINED_BEGUN, text, start):
            return None
        if _DEFINES_NOTHING.match(text, start):
            return "]:", start + 2
        defined = _DEFINED.match(text, start)
        if defined is None:
            return "] :", start + 2
        written, address = defined["address"], self._known(defined["address"])
        if address is not None:
            return f"]:{defined['space']}{_delimited(address)}", defined.end()
        if _BARE.match(written.lstrip("<")) or written.startswith(("<", "//", "\\")):
            self.removed += 1
            return f"] :{defined['space']}{REMOVED}", defined.end()
        is_prose = "\n" not in defined["space"] and not _ADDRESSLIKE.search(written)
        return ("]:" if is_prose and _GOES_ON.match(text, defined.end()) else "] :"), start + 2

    def _tag(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        if (link := _AUTOLINK.match(text, start)) is not None:
            if (address := self._known(link["address"])) is not None:
                return f"<{address}>", link.end()
            if not _BARE.match(link["address"]):
                return "< ", start + 1  # std::vector<std::string>
            self.removed += 1
            return _removed(self._before), link.end()
        if not final and _AUTOLINK_BEGUN.match(text, start):
            return None
        name = _NAME.match(text, start)
        if name is None:  # "</" and no letter
            return None if not final and start + 2 == len(text) else ("<", start + 1)
        return self._named(name, final=final)

    def _named(self, name: re.Match[str], *, final: bool) -> tuple[str, int] | None:
        tag, follows = name.group(), name.string[name.end() : name.end() + MAX_TAG + 1]
        rest = _AFTER_NAME.match(follows)
        if not final and (not follows or (rest is not None and not rest["decides"] and len(follows) <= MAX_TAG)):
            return None
        counted = tag.strip("</").lower() in _DANGEROUS or (rest is not None and rest["decides"] == "=")
        self.removed += counted
        return ("< " if counted or _is_odd(tag, rest) else "<"), name.start() + 1

    def _known(self, written: str) -> str | None:
        """Return the reference's address that an escaped address stands for; None if it is no reference's address."""
        bare = written[1:-1] if written.startswith("<") and written.endswith(">") else written
        address = html.unescape(_ESCAPED.sub(r"\1", bare))
        return address if address in self._allowed else None


def _removed(before: str) -> str:
    """Return the notice that replaces a bare address; after "]" with a space before it, since "](" begins a link."""
    return f" {REMOVED}" if before == "]" else REMOVED


def _delimited(address: str, *, is_apart: bool = True) -> str:
    """Return an address in angle brackets, unless all renderers agree on where it ends without them."""
    return address if is_apart and not any(sign in address for sign in "()[]") else f"<{address}>"


def _is_within(begun: re.Pattern[str], text: str, start: int) -> bool:
    """Return whether a text ends within a construct that is not too long to buffer."""
    return len(text) - start <= 2 * MAX and begun.match(text, start) is not None


def _is_harmless(kind: str, found: re.Match[str], before: str) -> bool:
    """Return whether a name is that of a file, or a top-level domain's begins a word."""
    if kind == "top":
        return not before.strip()
    is_file = kind == "file" and found.group().count(".") == 1 and before.isascii() and before not in _IN_HOST
    return is_file and _GOES_ON_AS_URL.match(found.string, found.end()) is None


def _is_odd(tag: str, rest: re.Match[str] | None) -> bool:
    """Return whether renderers may disagree on a tag's name or on where the tag ends."""
    if rest is None:
        return len(tag) > MAX_NAME or _NO_NAME.search(tag, 1) is not None
    several = re.search(r"[\n\r]", rest["before"])  # ">" may mark a quote
    return bool(not rest["decides"] or several or _NO_NAME.search(tag, 1))
