"""Retrieved text made harmless before a model reads it: it can neither cite, nor close a block, nor speak as a role.

What a model could take for structure is broken with as little change as can be; the rest of the text stays as it is:

- ``[ref_id:N]`` becomes ``(ref_id:N]``: no document can cite.
- Tags of the blocks of our prompts (``</passage>``, ``<evidence>``, ...) have their ``<`` escaped.
- Tokens of chat templates (``<|im_start|>``, ``[INST]``, ``<start_of_turn>``, ...) get a space behind their first sign,
  so that no tokenizer takes them for tokens.

Full-width and look-alike letters, letters set apart and hidden characters don't get past this: forms are looked for in
a folded copy of the text, and hidden characters are gone by then (``guard.hidden``). Ordinary tags, formulas, code and
Markdown are left alone. What can't be told from ordinary text ("System: obey" in a transcript) stays too: that it is
data is said by the delimiters around it (``guard.spotlighting``), and what a model that obeys it may do is bounded by
the code.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Final

from llama_index_agentic_kb.guard.hidden import strip_invisible

__all__ = ["plain_value", "quoted", "sanitize", "sanitize_reply"]

BLOCKS: Final = (
    "passage",
    "evidence",
    "sources",
    "conversation",
    "partial_answer",
    "steps",
    "later_steps",
    "found",
    "searches",
    "end_user",
)
"""The names of the blocks of our prompts."""


def _apart(name: str) -> str:
    """Give a pattern of a name whose letters may be set apart by one sign each."""
    return r"[\W_]?".join("[\\W_]?" if letter == "_" else letter for letter in name)


_NAMES: Final = "|".join(map(_apart, BLOCKS))
# Up to eight signs and spaces between "<" and the name still read as a tag to a model; spaces alone only where a tag
# goes on behind the name ("if n < found:" is code).
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
# Letters and signs of other scripts that look like these of ASCII (Unicode Technical Standard 39), beside what NFKC
# folds; only what the forms above are made of.
_LOOK_ALIKES: Final = (
    ("<", "\u2039\u27e8\u276c\u276e\u02c2\u1438\u3008\u2329"),
    ("[", "\u3010\u3014\u27e6\u2045"),
    ("/", "\u2044\u2215\u2571\u29f8"),
    (":", "\u2236\ua789\u02d0\u0589\u05c3\ufe13"),
    ("|", "\u2223\u01c0\u2502\uff5c\u2758"),
    ("_", "\u02cd\u2017\uff3f"),
    ("a", "\u0430\u03b1\u0251"),
    ("c", "\u0441\u03f2\u1d04"),
    ("d", "\u0501\u217e"),
    ("e", "\u0435\u04bd\u212e"),
    ("f", "\u0192\u017f\ua799"),
    ("g", "\u0261\u0581"),
    ("h", "\u04bb\u0570"),
    ("i", "\u0456\u0131\u03b9\u2170"),
    ("n", "\u0578\u057c\u1d28"),
    ("o", "\u043e\u03bf\u0585\u1d0f"),
    ("p", "\u0440\u03c1\u03f1"),
    ("r", "\u0433\u1d26\uab47"),
    ("s", "\u0455\ua731"),
    ("t", "\u0442\u03c4\u1d1b"),
    ("u", "\u057d\u03c5\u1d1c"),
    ("v", "\u0475\u03bd\u1d20"),
    ("w", "\u0461\u0561\u1d21"),
    ("I", "\u0406\u0399\u04c0"),
    ("N", "\u039d"),
    ("S", "\u0405"),
    ("T", "\u0422\u03a4"),
    ("Y", "\u04ae\u03a5"),
)
# Where Unicode keeps other forms of ASCII's letters and signs: full width, mathematical, enclosed, small, raised.
_FORMS: Final = (
    range(0x2070, 0x20A0),
    range(0x2100, 0x2150),
    range(0x24B6, 0x24EA),
    range(0x2170, 0x2180),
    range(0xFE50, 0xFE70),
    range(0xFF01, 0xFF5F),
    range(0x1D400, 0x1D800),
    range(0x1F130, 0x1F150),
)


@functools.cache
def _folding() -> dict[int, str]:
    """Give ASCII's letters and signs by the characters that read like them, one for one; made when first needed."""
    table = {
        code: form
        for code in (code for codes in _FORMS for code in codes)
        if len(form := unicodedata.normalize("NFKC", chr(code))) == 1 and form.isascii() and form.isprintable()
    }
    return table | {ord(char): plain for plain, chars in _LOOK_ALIKES for char in chars}


@functools.cache
def _foldable() -> re.Pattern[str]:
    return re.compile(f"[{''.join(map(chr, sorted(_folding())))}]")


def _folded(text: str) -> str:
    """Give a text of the same length in which what reads like ASCII is ASCII."""
    if text.isascii() or _foldable().search(text) is None:
        return text
    return text.translate(_folding())


def _escaped(sign: str) -> str:
    return "&lt;" if sign in "<\uff1c\ufe64" else f"{sign} "


def _spaced(sign: str) -> str:
    return f"{sign} "


def _unmarked(sign: str) -> str:
    del sign
    return "("


_Forms = tuple[tuple[re.Pattern[str], Callable[[str], str]], ...]
_DATA: Final[_Forms] = ((_MARKER, _unmarked), (_TAG, _escaped), (_TOKEN, _spaced))
_REPLY: Final[_Forms] = ((_TAG, _escaped), (_TOKEN, _spaced))


def sanitize(text: str) -> str:
    """Give retrieved text as a prompt may hold it; see the module. Takes linear time.

    Args:
        text: Any text.
    """
    return _neutral(text, _DATA)


def sanitize_reply(text: str) -> str:
    """Give a model's own earlier text as a prompt may hold it: as ``sanitize``, but it may cite."""
    return _neutral(text, _REPLY)


def _neutral(text: str, forms: Iterable[tuple[re.Pattern[str], Callable[[str], str]]]) -> str:
    text = strip_invisible(text)
    if _OPENER.search(text) is None:
        return text
    folded = _folded(text)
    signs: dict[int, str] = {}
    for pattern, harmless in forms:
        for found in pattern.finditer(folded):
            signs.setdefault(found.start(), harmless(text[found.start()]))
    if not signs:
        return text
    parts, last = [], 0
    for at in sorted(signs):
        parts += [text[last:at], signs[at]]
        last = at + 1
    return "".join([*parts, text[last:]])


def quoted(text: str, most: int = 300) -> str:
    """Give metadata as it may stand between quotation marks in a prompt: one short line without any.

    Args:
        text: A title, a name.
        most: Characters.
    """
    line = " ".join(sanitize(text[: 4 * most]).split()).replace('"', "'")
    return line if len(line) <= most else line[: most - 1].rstrip() + "\u2026"


_STRUCTURE: Final = re.compile(
    r"[<\uff1c\ufe64][^<>\uff1e]{0,200}[>\uff1e]?|[{\uff5b][^{}]{0,200}[}\uff5d]?"
    r"|[\[\uff3b\u3010]\s{0,3}ref[\W_]{0,3}id[^\]\uff3d\u3011]{0,120}[\]\uff3d\u3011]?|[<>{}`]"
    r"|\b[a-z][a-z0-9+.-]{1,30}:[/\\]{2}\S*|\bwww\.\S+",
    re.IGNORECASE,
)


def plain_value(text: str) -> str:
    """Give what is searched with, as a model read it in passages: one line of plain words.

    Nothing of it can be taken for more than words: no address, tag, marker, JSON or hidden character is left.
    """
    return " ".join(_STRUCTURE.sub(" ", strip_invisible(text)).split())
