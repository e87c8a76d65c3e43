"""Links and images in answers lead only to the references' own addresses; all others are taken out and counted.

A document may tell a model to write an image whose address carries what it has read: whoever renders the answer then
sends it to the attacker (EchoLeak, CVE-2025-32711, got past a filter of inline links by reference-style ones). So what
may be a link in Markdown, HTML or plain text is looked for in every form, and what is not exactly a reference's address
is made text:

- ``[text](address)`` and images, however nested: without a reference's address they become ``[text] (link removed)``.
- ``[label]: address``, the definition behind reference-style links: broken by a space, its address taken out. Links
  without a definition are text.
- ``<address>``, bare addresses (``https://…``, ``www.…``, ``name.com/…``), ``mailto:``: become ``(link removed)``.
- HTML tags that have attributes, load, run or style something: broken by a space behind ``<``.

An address with anything more (a query, a fragment, another path) is another address. What is kept is written as the
reference has it. All of this holds in code blocks too: renderers disagree on where code ends.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection
from typing import Final

REMOVED: Final = "(link removed)"

MAX: Final = 2_048
"""Characters of an address, or of a stream that is held back for one; what is longer is no reference's."""
MAX_NAME: Final = 64
"""Characters of a tag's name; what is longer is broken."""
MAX_TAG: Final = 256
"""Characters of a tag that are looked at for attributes."""

_WEB: Final = re.compile(r"https?://[^\s\"'<>\\^`{|}\x00-\x20\x7f-\x9f]+", re.IGNORECASE)
_URL_SIGNS: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"<>`')
"""What an address may go on with: signs of ASCII without quotes, backticks and angle brackets."""
_CLOSING: Final = ".,;:!?)]}'*_~|"
"""Signs that end a sentence or an emphasis, and not an address."""
_ENDING: Final = ".,;)'"
"""Those of them that no renderer takes for a part of the address before them."""

# The signs of a scheme as they may be written: escaped, or as an entity.
_COLON: Final = r"(?:\\?:|&(?:\#0*58|\#x0*3a|colon);?)"
_SLASH: Final = r"(?:\\?/|\\|&(?:\#0*47|\#0*92|\#x0*2f|\#x0*5c|sol|bsol);?)"
_DOT: Final = r"(?:\\?\.|&(?:\#0*46|\#x0*2e|period);?)"
_MORE: Final = r"[^\s<>\"`]"
# Top-level domains under which plain names are made links by mail and chat programs, and by renderers that guess;
# endings of files ("README.md") are left out, though some are countries.
_FILES: Final = "md|py|sh|rs|pl|pm|ps|cs|js|ts|go|rb|hs|ml|mk|so|gz|xz|db|cc|cl|vb|kt|tf|td|id"
_TOP: Final = (
    rf"(?!(?:{_FILES})(?![a-z0-9]))[a-z]{{2}}|com|org|net|edu|gov|mil|int|info|biz|app|dev|xyz|top|site|online|link|"
    "click|live|shop|store|cloud|page|web|pro|tech|space|website|world|club|vip|icu|fun|buzz|rest|zone|xxx|aero|asia|"
    "coop|museum|name"
)
# A name without a path, and one behind "@", get a space before their last part, and are not counted.
_BARE: Final = re.compile(
    rf"(?:[a-z][a-z0-9+.-]{{1,30}}{_COLON}{_SLASH}{{2}}"
    rf"|(?<![a-z0-9])(?:(?:javascript|vbscript|mailto){_COLON}(?={_MORE})|data{_COLON}[a-z]+/|www{_DOT}(?=[a-z0-9_&\\-]))"
    rf"|(?<![:/]){_SLASH}{{2}}(?=[{re.escape(_URL_SIGNS)}]{{0,64}}(?:\.[^\s<>\"`]|[^\x00-\x7f]))"
    rf"|(?<![a-z0-9_@/.-])(?:[a-z0-9-]{{1,63}}{_DOT}){{1,8}}(?:{_TOP})(?::\d{{1,5}})?[/?\#](?={_MORE}))"
    rf"[{re.escape(_URL_SIGNS)}]*"
    rf"|(?P<at>@)(?=[a-z0-9_.-]{{0,255}}(?:\.[a-z0-9_-]|[^\x00-\x7f]|\[))"
    rf"|(?P<host>(?<=@)[a-z0-9_-]+(?:\.[a-z0-9_-]+)+)"
    rf"|(?P<www>(?<![a-z0-9])www\.)"
    rf"|(?P<name>(?<![a-z0-9_/.-])(?:[a-z0-9-]{{1,63}}\.){{1,8}})(?P<top>{_TOP})(?![a-z0-9_-])",
    re.IGNORECASE,
)
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
"""A plain word behind what would be an address: a definition has nothing more, or a title."""
_NAME: Final = re.compile(rf"</?[a-z][^\s/>]{{0,{MAX_NAME}}}+", re.IGNORECASE)
_NO_NAME: Final = re.compile(r"[\"'`=\[\](){}<:]")
"""Signs in a tag's name around which something may be put that makes an attribute, or an address, of the rest."""
_DECIDES: Final = re.compile("[>=]")
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
"""Elements that load, run, style or swallow something even without attributes."""


class LinkFilter:
    """Passes an answer on piece by piece, without links to anything but the references.

    However the text is cut into pieces, the same comes out. Held back is what may become a link: mostly a word, at
    most about 2,000 characters.

        links = LinkFilter({"https://a.org/x"})
        text = links.feed("See [x](https://a.org/x) and ![y](https://evil.") + links.feed("org/?q=1)") + links.close()
        assert (text, links.removed) == ("See [x](https://a.org/x) and ![y] (link removed)", 1)

    Args:
        addresses: The references' addresses; what is no plain web address (http, https) is left out.
    """

    def __init__(self, addresses: Collection[str]) -> None:
        self.removed = 0
        """The number of links removed so far."""
        known = {address for address in addresses if len(address) <= MAX and _WEB.fullmatch(address)}
        self._allowed = sorted(known, key=len, reverse=True)
        self._held = ""
        self._swallows = False
        self._ends_here = True

    def feed(self, delta: str) -> str:
        """Add a piece of text and return the filtered text that later pieces can't change."""
        return self._feed(self._held + delta, final=False)

    def close(self) -> str:
        """Return the remaining filtered text at the end of the stream."""
        return self._feed(self._held, final=True)

    def _feed(self, text: str, *, final: bool) -> str:
        """Work through what is there; what can't be decided yet is held."""
        parts: list[str] = []
        position, self._held = 0, ""
        while (trigger := _TRIGGER.search(text, position)) is not None:
            start = trigger.start()
            parts.append(self._plain(text[position:start], ends_here=False))
            decided = self._construct(text, start, final=final)
            if decided is None:
                self._held = text[start:]
                return "".join(parts)
            said, position = decided
            parts.append(said)
        rest = text[position:]
        parts.append(self._plain(rest, ends_here=True) if final else self._but_the_last_word(rest))
        return "".join(parts)

    # -- plain text ------------------------------------------------------------------------------------------------

    def _plain(self, text: str, *, ends_here: bool) -> str:
        """Take the bare addresses out of a text that ends here, or where a construct begins."""
        self._ends_here = ends_here
        return _BARE.sub(self._bare, self._after_address(text, ended=True))

    def _but_the_last_word(self, text: str) -> str:
        """Return a text but for its last word, which may become an address; one too long for that is passed on."""
        text = self._after_address(text, ended=False)
        head = text.rstrip(_URL_SIGNS)
        word = text[len(head) :]
        clean = _BARE.sub(self._bare, head)
        if len(word) <= MAX:
            self._held = word
            return clean
        begun = _BARE.search(word)
        if begun is None:  # no scheme is as long as what is held
            self._held = word[-128:]
            return clean + word[:-128]
        self.removed += 1
        self._swallows = True
        return clean + word[: begun.start()] + _removed(word, begun.start())

    def _after_address(self, text: str, *, ended: bool) -> str:
        """Return what follows an address that was too long, once it has ended."""
        if self._swallows:
            text = text.lstrip(_URL_SIGNS)
            self._swallows = not text and not ended
        return text

    def _bare(self, found: re.Match[str]) -> str:
        """Keep a reference's bare address, set off from what follows; take out any other."""
        written, text = found.group(), found.string
        if found["at"] or found["host"]:
            return " (at) " if found["at"] else written.replace(".", " .")
        if found["www"] or found["name"]:
            return f"{(found['www'] or found['name'])[:-1]} .{found['top'] or ''}"
        core = written.rstrip(_CLOSING)
        for address in self._allowed:
            rest = written[len(address) :]
            before = text[max(0, found.start() - 1) : found.start()]
            if written.startswith(address) and not rest.strip(_CLOSING) and before != "\\":
                apart = self._ends_here if found.end() == len(text) else text[found.end()] in " \t\n"
                return written if apart and not rest.strip(_ENDING) else f"<{address}>{rest}"
        self.removed += 1
        return _removed(text, found.start()) + written[len(core) :]

    # -- Markdown and HTML -----------------------------------------------------------------------------------------

    def _construct(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        """Return what becomes of a construct, and where to go on; None where more of it may come."""
        following = text[start + 1 : start + 2]
        if following == "(":
            return self._inline(text, start, final=final)
        if following == ":":
            return self._definition(text, start, final=final)
        if not following:
            return ("<", start + 1) if final else None
        return ("< ", start + 1) if following in "!?" else self._tag(text, start, final=final)

    def _inline(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        link = _INLINE.match(text, start)
        if link is None:
            begun = not final and len(text) - start <= 2 * MAX and _INLINE_BEGUN.match(text, start)
            return None if begun else ("] (", start + 2)
        address, after = self._known(link["address"]), text[link.end() : link.end() + 1]
        if address is not None:
            if not after and not final:
                return None
            plain = (after or " ") in " \t\n.,;:!?)*_'\"" and "(" not in address and ")" not in address
            return f"]({address if plain else f'<{address}>'})", link.end()
        self.removed += 1
        return (f"] {REMOVED}", link.end()) if _ADDRESSLIKE.search(link["address"]) else ("] (", start + 2)

    def _definition(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        """Break what defines the address of reference-style links; "[note]: some words" defines nothing."""
        if not final and len(text) - start <= 2 * MAX and _DEFINED_BEGUN.match(text, start):
            return None
        if _DEFINES_NOTHING.match(text, start):
            return "]:", start + 2
        defined = _DEFINED.match(text, start)
        if defined is None:
            return "] :", start + 2
        written, address = defined["address"], self._known(defined["address"])
        if address is not None:
            return f"]:{defined['space']}{_written(address)}", defined.end()
        if _BARE.match(written.lstrip("<")) or written.startswith(("<", "//", "\\")):
            self.removed += 1
            return f"] :{defined['space']}{REMOVED}", defined.end()
        is_prose = "\n" not in defined["space"] and not _ADDRESSLIKE.search(written)
        return ("]:" if is_prose and _GOES_ON.match(text, defined.end()) else "] :"), start + 2

    def _tag(self, text: str, start: int, *, final: bool) -> tuple[str, int] | None:
        link = _AUTOLINK.match(text, start)
        if link is not None:
            return self._autolink(link)
        if not final and _AUTOLINK_BEGUN.match(text, start):
            return None
        name = _NAME.match(text, start)
        if name is None:  # "</" and no letter
            return None if not final and start + 2 == len(text) else ("<", start + 1)
        dangerous = name.group().strip("</").lower() in _DANGEROUS
        follows = text[name.end() : name.end() + MAX_TAG + 1]
        decides = _DECIDES.search(follows)
        if not follows.startswith((">", "/", " ", "\t", "\n", "\r", "\f", "\v")):
            if not follows and not final:
                return None
            odd = len(name.group()) > MAX_NAME or _NO_NAME.search(name.group(), 1)
            counted, broken = dangerous, dangerous or bool(odd)
        elif decides is None:
            if len(follows) <= MAX_TAG and not final:
                return None
            counted, broken = dangerous, True
        else:
            counted = dangerous or decides.group() == "="
            broken = counted or _NO_NAME.search(name.group(), 1) is not None
        self.removed += counted
        return ("< " if broken else "<"), start + 1

    def _autolink(self, link: re.Match[str]) -> tuple[str, int]:
        address = self._known(link["address"])
        if address is not None:
            return f"<{address}>", link.end()
        if _BARE.match(link["address"]) is None:  # std::vector<std::string>
            return "< ", link.start() + 1
        self.removed += 1
        return _removed(link.string, link.start()), link.end()

    def _known(self, written: str) -> str | None:
        """Return the reference's address that this is, however it is written; None where it is no reference's."""
        bare = written[1:-1] if written.startswith("<") and written.endswith(">") else written
        address = html.unescape(_ESCAPED.sub(r"\1", bare))
        return address if address in self._allowed else None


def _removed(text: str, at: int) -> str:
    """Return what stands for a bare address; behind "]" apart from it, for "](" begins a link."""
    return f" {REMOVED}" if text[max(0, at - 1) : at] == "]" else REMOVED


def _written(address: str) -> str:
    """Return an address as a destination in Markdown."""
    return f"<{address}>" if "(" in address or ")" in address else address
