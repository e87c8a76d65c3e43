"""Sanitizing of retrieved text for prompts: it can neither cite, nor close a block, nor imitate a chat role.

Character sequences that a model could read as structure are changed as little as possible:

- ``[ref_id:N]`` becomes ``(ref_id:N]``: no document can cite.
- Tags of the blocks of our prompts (``</passage>``, ``<evidence>``, ...) have their ``<`` escaped.
- Tokens of chat templates (``<|im_start|>``, ``[INST]``, ``<start_of_turn>``, ...) get a space after their first
  character, so that no tokenizer recognises them.

Full-width, look-alike and separated letters and hidden characters can't bypass this: the sequences are searched for in
a folded copy of the text, without hidden characters. Ordinary tags, formulas, code, Markdown and text ("System: obey"
in a transcript) are unchanged: delimiters mark the text as data (``guard.spotlighting``), and the code limits the
actions of a model that obeys it.

Invisible characters are removed from prompts and from answers by the same rule: control characters (C0 and C1; line
breaks become line feeds, tabs stay), bidi controls, the tag characters (U+E0000 ...), zero-width and other invisible
characters, and unpaired surrogates (replaced by U+FFFD). They can contain instructions that readers can't see ("ASCII
smuggling"), split words so that filters miss them, or reverse the direction of text.

Two kinds are needed for writing, and remain, one at a time, where they have an effect:

- The joiners U+200C and U+200D between letters of scripts that join (Persian, Hindi, Sinhala, ...), and U+200D between
  emoji.
- Variation selectors after their base character: U+FE0E and U+FE0F after emoji, U+180B ... after Mongolian letters,
  U+E0100 ... after Han characters. Runs of them, which can encode bytes, are removed.

A user's nodes are never changed: only copies of their text are.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from abc import abstractmethod
from typing import Final

from llama_index_agentic_kb._text import one_line, without_surrogates

# -- invisible characters ---------------------------------------------------------------------------------------------

_BREAKS: Final = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_JOINERS: Final = "\u200c\u200d"
# Character classes within the Basic Multilingual Plane are bitmaps in the regex engine, and five times as fast.
_BASIC: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"  # soft hyphen, fillers, invisible vowels
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # bidi controls, zero-width, joiners, invisible operators
    "\u180b-\u180f\ufe00-\ufe0f\ufeff\ufff0-\ufffb"  # variation selectors, BOM, annotations
)
_HIDDEN: Final = re.compile(f"[{_BASIC}]+")
_SUSPECT: Final = re.compile(f"[{_BASIC}\ud800-\udfff\U00010000-\U0010ffff]")
_ASTRAL: Final = re.compile(
    "[\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"  # shorthand, music, tags, selectors
)
_OPEN_END: Final = re.compile(f"{_HIDDEN.pattern}|{_ASTRAL.pattern}|[\ud800-\udfff]")
"""A character at the end of a piece of text, of which the next one decides what becomes of it."""

# Scripts whose letters join or form clusters: Arabic and related ones, Mongolian, and those of India to Indonesia.
_JOINING: Final = re.compile(
    "[\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1700-\u18af\u1a20-\u1aad\u1b00-\u1c4f\ua840-\ua8ff\ua980-\ua9df"
    "\uaa60-\uaa7f\uabc0-\uabff\ufb50-\ufdff\ufe70-\ufefe\U00010a00-\U00011fff]"
)
_HAN: Final = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_MONGOLIAN: Final = re.compile("[\u1820-\u18aa]")
_EMOJI: Final = re.compile(
    "[#*0-9\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u27bf\u2934\u2935\u2b00-\u2bff\u3030\u303d\u3297"
    "\u3299\U0001f000-\U0001faff]"
)


def strip_invisible(text: str) -> str:
    """Return a text without invisible characters, see the module."""
    return without_hidden(text)[0]


def without_hidden(text: str) -> tuple[str, int]:
    """Return a text without invisible characters, and the number removed; unpaired surrogates become U+FFFD.

    Takes linear time: 0.5 ms for 50,000 characters, 10 ms if every tenth is an emoji or a joiner.
    """
    if (_CONTROLS if text.isascii() else _SUSPECT).search(text) is None:
        return text, 0
    joined = without_surrogates(text)
    halves = joined.count("\ufffd") - text.count("\ufffd")
    whole = _BREAKS.sub("\n", joined)
    clean = _ASTRAL.sub(_needed, _HIDDEN.sub(_needed, whole))
    return clean, len(whole) - len(clean) + halves


def _needed(found: re.Match[str]) -> str:
    run, text = found.group(), found.string
    if not found.start() or len(run) > 2:  # noqa: PLR2004 (a selector and a joiner)
        return ""
    return _kept(run, text[found.start() - 1], text[found.end() : found.end() + 1])


@functools.lru_cache(maxsize=4_096)
def _kept(run: str, before: str, after: str) -> str:
    selector = run[0] if _selects(run[0], before) else ""
    joiner = run[len(selector) :]
    if not joiner or (len(joiner) == 1 and joiner in _JOINERS and _joins(joiner, before, after)):
        return selector + joiner
    return selector if joiner in _JOINERS else ""  # several selectors can encode bytes


def _selects(selector: str, base: str) -> bool:
    if selector in "\ufe0e\ufe0f":
        return _EMOJI.match(base) is not None
    if "\u180b" <= selector <= "\u180f":
        return selector != "\u180e" and _MONGOLIAN.match(base) is not None
    return "\U000e0100" <= selector <= "\U000e01ef" and _HAN.match(base) is not None


def _joins(joiner: str, before: str, after: str) -> bool:
    """Return whether a joiner is between letters or emoji that join; U+200D may end a word (Malayalam, Sinhala)."""
    if _JOINING.match(before) is not None:
        ends = joiner == "\u200d" and unicodedata.category(before).startswith("M")
        return ends or _JOINING.match(after) is not None
    pictures = not before.isascii() and _EMOJI.match(before) is not None and _EMOJI.match(after) is not None
    return joiner == "\u200d" and pictures and not after.isascii()


_MAX_HELD: Final = 1_000  # hidden characters that a stream buffers; no text needs more than two


class TextFilter:
    """Base of filters of a text that arrives in pieces; the result does not depend on how the text is split."""

    _held = ""  # the end of the text so far, buffered since later pieces may change its meaning

    @abstractmethod
    def feed(self, piece: str, *, final: bool = False) -> str:
        """Add a piece, the last one if ``final``, and return the filtered text that later pieces can't change."""

    def close(self) -> str:
        """Return the remaining filtered text at the end of the text."""
        return self.feed("", final=True)


class HiddenFilter(TextFilter):
    """Removes invisible characters; only these and carriage returns at the end of a piece are buffered."""

    removed = 0  # number of characters removed so far
    _before = ""

    def feed(self, piece: str, *, final: bool = False) -> str:
        """See ``TextFilter``."""
        text = self._held + piece
        end, least = len(text), max(0, len(text) - _MAX_HELD)
        while not final and end > least and _OPEN_END.match(text, end - 1, end):
            end -= 1
        before, self._held = self._before, text[end:]
        kept, removed = without_hidden(before + text[:end])
        self.removed += removed
        self._before = kept[-1:]
        return kept[len(before) :]


# -- sequences that a model could read as structure -------------------------------------------------------------------

BLOCKS: Final = "passage evidence sources conversation partial_answer steps later_steps found searches end_user".split()
"""The names of the blocks (XML-like elements) in this package's prompts."""


_NAMES: Final = "|".join(r"[\W_]?".join(name).replace("?_[", r"?[\W_]?[") for name in BLOCKS)  # letters may be apart
# With up to eight signs and spaces between "<" and the name, a model still reads a tag; with spaces only, just if a tag
# continues after the name ("if n < found:" is code).
_TAG: Final = re.compile(
    rf"<(?=(?:(?=\s{{0,8}}[^\w\s])\W{{1,8}})?(?:{_NAMES})(?![^\W_]))"
    rf"|<(?=\s{{1,8}}(?:{_NAMES})\s{{0,8}}(?:/?\s?>|\w{{1,20}}\s?=))",
    re.IGNORECASE,
)
_MARKER: Final = re.compile(r"\[(?=\s{0,3}r[\W_]?e[\W_]?f[\W_]{0,3}i[\W_]?d\s{0,3}:)", re.IGNORECASE)
_TOKEN: Final = re.compile(
    r"<(?=\|[\w\u2581./-]{1,40}\|\s?>)"  # <|im_start|>, <|system|>, <|end of sentence|> of many models
    r"|<(?=/?(?:start_of_turn|end_of_turn|bos|eos|tool_calls?|tool_responses?|function_calls?|invoke|think)\b)"
    r"|<(?=<\s?/?SYS\s?>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\s?\])"
)
_OPENERS: Final = "<\uff1c\ufe64\u2039\u27e8\u276c\u276e\u02c2\u1438\u3008\u2329[\uff3b\ufe5d\u3010\u3014\u27e6\u2045"
_OPENER: Final = re.compile(f"[{re.escape(_OPENERS)}]")
# Characters of other scripts that look like ASCII (Unicode Technical Standard 39), in addition to those that NFKC
# folds; only for the characters of the patterns above. In pairs: the ASCII character, and what looks like it.
# fmt: off
_LOOK_ALIKES: Final = (
    ("<", "\u2039\u27e8\u276c\u276e\u02c2\u1438\u3008\u2329"), ("[", "\u3010\u3014\u27e6\u2045"),
    ("/", "\u2044\u2215\u2571\u29f8"), (":", "\u2236\ua789\u02d0\u0589\u05c3\ufe13"),
    ("|", "\u2223\u01c0\u2502\uff5c\u2758"), ("_", "\u02cd\u2017\uff3f"), ("a", "\u0430\u03b1\u0251"),
    ("c", "\u0441\u03f2\u1d04"), ("d", "\u0501\u217e"), ("e", "\u0435\u04bd\u212e"), ("f", "\u0192\u017f\ua799"),
    ("g", "\u0261\u0581"), ("h", "\u04bb\u0570"), ("i", "\u0456\u0131\u03b9\u2170"), ("n", "\u0578\u057c\u1d28"),
    ("o", "\u043e\u03bf\u0585\u1d0f"), ("p", "\u0440\u03c1\u03f1"), ("r", "\u0433\u1d26\uab47"),
    ("s", "\u0455\ua731"), ("t", "\u0442\u03c4\u1d1b"), ("u", "\u057d\u03c5\u1d1c"), ("v", "\u0475\u03bd\u1d20"),
    ("w", "\u0461\u0561\u1d21"), ("I", "\u0406\u0399\u04c0"), ("N", "\u039d"), ("S", "\u0405"), ("T", "\u0422\u03a4"),
    ("Y", "\u04ae\u03a5"),
)
# fmt: on
# Unicode ranges of variants of ASCII characters: full width, mathematical, enclosed, small, superscript.
_FORMS: Final = (
    range(0x2070, 0x20A0),
    range(0x2100, 0x2180),
    range(0x24B6, 0x24EA),
    range(0xFE50, 0xFE70),
    range(0xFF01, 0xFF5F),
    range(0x1D400, 0x1D800),
    range(0x1F130, 0x1F150),
)  # fmt: skip


@functools.cache
def _folding() -> tuple[dict[int, str], re.Pattern[str]]:
    """Return the translation table from look-alike characters to ASCII, and a pattern of them."""
    table = {
        code: form
        for code in (code for codes in _FORMS for code in codes)
        if len(form := unicodedata.normalize("NFKC", chr(code))) == 1 and form.isascii() and form.isprintable()
    }
    table |= {ord(char): plain for plain, chars in _LOOK_ALIKES for char in chars}
    return table, re.compile(f"[{''.join(map(chr, sorted(table)))}]")


def sanitize(text: str, *, cites: bool = False) -> str:
    """Return a text that is safe to insert into a prompt; see the module. Takes linear time.

    ``cites`` says that its citation markers stay: a model's own earlier text.
    """
    text = without_hidden(text)[0]
    if _OPENER.search(text) is None:
        return text
    folded = text
    if not text.isascii() and (look_alikes := _folding())[1].search(text) is not None:
        folded = text.translate(look_alikes[0])  # of the same length
    signs: dict[int, str] = {}
    for pattern in (_TAG, _TOKEN) if cites else (_MARKER, _TAG, _TOKEN):
        for found in pattern.finditer(folded):
            sign = text[found.start()]
            escaped = "&lt;" if pattern is _TAG and sign in "<\uff1c\ufe64" else f"{sign} "
            signs.setdefault(found.start(), "(" if pattern is _MARKER else escaped)
    parts, last = [], 0
    for at in sorted(signs):
        parts += [text[last:at], signs[at]]
        last = at + 1
    return "".join([*parts, text[last:]])


def quoted(text: str, most: int = 300) -> str:
    """Return a metadata value for use within double quotes in a prompt: sanitized, one line, ``most`` characters."""
    return one_line(sanitize(text[: 4 * most]), most).replace('"', "'")


_STRUCTURE: Final = re.compile(
    r"[<\uff1c\ufe64][^<>\uff1e]{0,200}[>\uff1e]?|[{\uff5b][^{}]{0,200}[}\uff5d]?"
    r"|[\[\uff3b\u3010]\s{0,3}ref[\W_]{0,3}id[^\]\uff3d\u3011]{0,120}[\]\uff3d\u3011]?|[<>{}`]"
    r"|\b[a-z][a-z0-9+.-]{1,30}:[/\\]{2}\S*|\bwww\.\S+",
    re.IGNORECASE,
)


def plain_value(text: str) -> str:
    """Return a text as one line of plain words: no address, tag, citation marker, JSON or invisible character."""
    return " ".join(_STRUCTURE.sub(" ", strip_invisible(text)).split())
