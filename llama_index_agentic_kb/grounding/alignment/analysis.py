"""A text taken apart for alignment: its sentences, words, names, numbers and dates, each with its place.

Made once for each passage and kept (see ``analyze``); aligning a claim with a passage then only compares small
integers and strings.
"""

# ruff: noqa: RUF001 (typographic signs are the point)
from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llama_index_agentic_kb.grounding.alignment.lexicon import BE_FORMS, PRONOUNS
from llama_index_agentic_kb.grounding.alignment.quantities import Fact, read_facts
from llama_index_agentic_kb.grounding.alignment.vocabulary import concept_of, stems_of
from llama_index_agentic_kb.grounding.sentences import sentence_ends
from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS, detect_language, split_words

__all__ = ["PREFIX", "Analysis", "Item", "Token", "analyze"]

_TOKEN: Final = re.compile(r"(?:[A-Z]\.){2,}|[^\W\d_]+(?:['’][^\W\d_]+)*|\d+(?:[.,]\d+)*")
_WIDE: Final = re.compile("[\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e01-\u0e4e]")
_LETTERS: Final = 2
_CONNECTORS: Final = frozenset("of de la le von van der den di da du del al bin ibn y the".split())  # noqa: SIM905


class Token(NamedTuple):
    """A word.

    Args:
        word: As compared: lower case, without possessive.
        stem: Its stem, or, in scripts without spaces, a pair of characters.
        start: In characters.
        end: Exclusive.
        sentence: Which one it stands in, from 0.
        content: Whether it is no function word and no part of a number or date.
        name: Whether it is part of a name.
    """

    word: str
    stem: str
    start: int
    end: int
    sentence: int
    content: bool
    name: bool


class Item(NamedTuple):
    """What has to be exactly right: a number, a date or a name.

    Args:
        kind: "number", "date" or "name".
        first: Its first token.
        last: Its last token.
        words: A name's words, as compared.
        fact: The number or date.
    """

    kind: str
    first: int
    last: int
    words: tuple[str, ...] = ()
    fact: Fact | None = None


@dataclass(slots=True)
class Analysis:
    """A text taken apart.

    Args:
        text: As given.
        language: By its Snowball name.
        tokens: In order.
        sentences: Spans in characters.
        items: Numbers, dates and names, in order.
        places: Where each stem stands.
        topics: For each sentence, the stems of what it speaks of without naming it, by a pronoun or not at all:
            the text's title, or the name that it begins with.
    """

    text: str
    language: str
    tokens: list[Token]
    sentences: list[tuple[int, int]]
    items: list[Item]
    topics: list[frozenset[str]] = field(default_factory=list)
    topic: frozenset[str] = frozenset()
    places: dict[str, list[int]] = field(default_factory=dict)
    concepts: dict[int, list[int]] = field(default_factory=dict)
    prefixes: dict[str, list[int]] = field(default_factory=dict)
    sentence_of: list[int] = field(default_factory=list)
    """The sentence of each token."""
    firsts: list[int] = field(default_factory=list)
    """The first token of each sentence, and behind the last."""

    def within(self, sentences: Collection[int]) -> Iterator[int]:
        """Give the tokens of some sentences, in order."""
        for sentence in sorted(sentences):
            yield from range(self.firsts[sentence], self.firsts[sentence + 1])


@functools.lru_cache(maxsize=4096)
def analyze(text: str, title: str = "", language: str | None = None) -> Analysis:
    """Take a text apart; the last 4,096 texts are kept.

    Args:
        text: A passage, or a claim.
        title: What the passage is about, where known.
        language: None finds out.
    """
    language = language or detect_language([word.casefold() for word in _TOKEN.findall(text[:4000])])
    german = language == "german"
    sentences = _sentences(text, german=german)
    facts = list(read_facts(text, german=german))
    tokens = _tokens(text, sentences, facts, language)
    analysis = Analysis(text, language, tokens, sentences, [])
    analysis.items = _items(analysis, facts, german=german)
    _index(analysis)
    _find_topic(analysis, title)
    return analysis


def _sentences(text: str, *, german: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start = 0
    for paragraph in re.finditer(r"[^\n]+(?:\n(?![^\S\n]*(?:\n|[-*•#|]))[^\n]+)*", text):
        start = paragraph.start()
        for end, following in sentence_ends(paragraph[0], german=german):
            if text[start : paragraph.start() + end].strip():
                found.append((start, paragraph.start() + end))
            start = paragraph.start() + following
    return found or [(0, len(text))]


def _tokens(text: str, sentences: Sequence[tuple[int, int]], facts: Sequence[Fact], language: str) -> list[Token]:
    functions = FUNCTION_WORDS.get(language, frozenset())
    spans = [match.span() for match in _TOKEN.finditer(text)]
    words = [_plain_word(text[start:end]) for start, end in spans]
    stems = stems_of(tuple(words), language)
    ends = [end for _, end in sentences]
    in_facts = _covered(spans, [(fact.start, fact.end) for fact in facts])
    tokens: list[Token] = []
    sentence = 0
    previous_starts = True
    for (start, end), word, stem, is_fact in zip(spans, words, stems, in_facts, strict=True):
        while sentence < len(ends) - 1 and start >= ends[sentence]:
            sentence, previous_starts = sentence + 1, True
        if _WIDE.match(word):
            tokens.extend(_pairs(text, start, end, sentence))
            continue
        is_name = text[start].isupper() and not is_fact and word not in functions and not previous_starts
        # The first word of a sentence has a capital anyway: it is a name if the next one is.
        if previous_starts and text[start].isupper() and word not in functions and not is_fact:
            is_name = _goes_on(text, end) or "." in text[start:end]
        content = not is_fact and word not in functions and (len(word) > 1 or is_name)
        tokens.append(Token(word, stem, start, end, sentence, content, is_name))
        previous_starts = False
    return tokens


def _plain_word(word: str) -> str:
    """Give a word as compared: lower case, without possessive and the points of an acronym."""
    folded = word.casefold().replace("’", "'")
    return folded.removesuffix("'s").replace(".", "") if not folded[0].isdigit() else folded


def _goes_on(text: str, end: int) -> bool:
    return re.match(r"[ -]{1,2}[A-ZÀ-Þ]|['’]s ", text[end : end + 4]) is not None


def _covered(spans: Sequence[tuple[int, int]], covering: Sequence[tuple[int, int]]) -> list[bool]:
    found: list[bool] = []
    position = 0
    for start, _ in spans:
        while position < len(covering) and covering[position][1] <= start:
            position += 1
        found.append(position < len(covering) and covering[position][0] <= start)
    return found


def _pairs(text: str, start: int, end: int, sentence: int) -> list[Token]:
    """Give the overlapping pairs of characters of a run without spaces."""
    if end - start == 1:
        return [Token(text[start], text[start], start, end, sentence, content=True, name=False)]
    return [
        Token(text[at : at + 2], text[at : at + 2], at, at + 2, sentence, content=True, name=False)
        for at in range(start, end - 1)
    ]


def _items(analysis: Analysis, facts: Sequence[Fact], *, german: bool) -> list[Item]:
    """Give numbers, dates and names in order; in German, where all nouns have capitals, names are of two words."""
    items: list[Item] = []
    tokens = analysis.tokens
    starts = [token.start for token in tokens]
    for fact in facts:
        first, behind = bisect_left(starts, fact.start), bisect_left(starts, fact.end)
        if first < behind:
            items.append(Item(fact.kind, first, behind - 1, fact=fact))
    for first, last in _name_runs(analysis):
        words = tuple(token.word for token in tokens[first : last + 1] if token.name)
        if not german or len(words) >= _LETTERS:
            items.append(Item("name", first, last, words))
    return sorted(items, key=lambda item: item.first)


def _name_runs(analysis: Analysis) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    tokens, text = analysis.tokens, analysis.text
    at = 0
    while at < len(tokens):
        if not tokens[at].name:
            at += 1
            continue
        last = at
        while last + 1 < len(tokens) and _joined(tokens, last, text):
            last += 1 if tokens[last + 1].name else 2
        runs.append((at, last))
        at = last + 1
    return runs


def _joined(tokens: Sequence[Token], last: int, text: str) -> bool:
    """Whether a name goes on behind a token: with a name word, or with one behind "of", "de", ..."""
    following = tokens[last + 1]
    if following.sentence != tokens[last].sentence:
        return False
    between = text[tokens[last].end : following.start]
    if following.name:
        return between.strip(" -–.\"'“”") == ""
    is_joint = following.word in _CONNECTORS and between == " " and last + 2 < len(tokens)
    return is_joint and tokens[last + 2].name and text[following.end : tokens[last + 2].start] == " "


def _index(analysis: Analysis) -> None:
    analysis.sentence_of = [token.sentence for token in analysis.tokens]
    for at, token in enumerate(analysis.tokens):
        if not token.content:
            continue
        analysis.places.setdefault(token.stem, []).append(at)
        for concept in concept_of(token.stem):
            analysis.concepts.setdefault(concept, []).append(at)
        if len(token.stem) >= PREFIX:
            analysis.prefixes.setdefault(token.stem[:PREFIX], []).append(at)
    counted = itertools.groupby(range(len(analysis.tokens)), key=lambda at: analysis.tokens[at].sentence)
    first_of = {sentence: next(group) for sentence, group in counted}
    known = len(analysis.tokens)
    for sentence in reversed(range(len(analysis.sentences))):
        known = first_of.get(sentence, known)
        analysis.firsts.append(known)
    analysis.firsts.reverse()
    analysis.firsts.append(len(analysis.tokens))


PREFIX: Final = 4
"""Letters that two stems of one family share ("direct", "director")."""
_OPENING_WORDS: Final = 6
_FRONTED: Final = 9
_FRONTING: Final = frozenset(["after", "before", "in", "on", "at", "under", "during", "from", "since", "with", "by"])


def _find_topic(analysis: Analysis, title: str) -> None:
    """Find what the text is about, and which sentences say so by a pronoun or not at all."""
    # As the text is: "Hayabusa2" is Hayabusa and a 2 in both.
    found = [_plain_word(word) for word in _TOKEN.findall(title)] if title.isascii() else split_words(title)
    words = tuple(word for word in found if word not in FUNCTION_WORDS.get(analysis.language, ()))
    analysis.topic = frozenset(stems_of(words, analysis.language))
    if not analysis.topic:
        analysis.topic = _opening_subject(analysis)
    names = {item.first for item in analysis.items if item.kind == "name"}
    for sentence in range(len(analysis.sentences)):
        begin, behind = analysis.firsts[sentence], analysis.firsts[sentence + 1]
        opening = range(begin, min(behind, begin + _OPENING_WORDS))
        opening = range(
            begin, next((at for at in opening if at > begin and analysis.tokens[at].word in BE_FORMS), opening.stop)
        )
        own = next((at for at in opening if at in names), None)
        pronoun = next((at for at in opening if analysis.tokens[at].word in PRONOUNS), None)
        # "After an Earth flyby it ...": what stands before the subject is not spoken of.
        fronted = analysis.tokens[begin:behind][:_FRONTED]
        is_fronted = any(token.word in PRONOUNS for token in fronted) and fronted[0].word in _FRONTING
        implied = own is None or (pronoun is not None and pronoun < own) or sentence == 0 or is_fronted
        analysis.topics.append(analysis.topic if implied else frozenset())


def _opening_subject(analysis: Analysis) -> frozenset[str]:
    """Give the stems of the name that a text begins with, or of its first word where "is" or "was" follows."""
    first = next((item for item in analysis.items if item.kind == "name" and item.first <= 1), None)
    if first is not None:
        named = analysis.tokens[first.first : first.last + 1]
        return frozenset(token.stem for token in named if token.name)
    words = analysis.tokens[:2]
    is_subject = len(words) == 2 and words[0].content and words[1].word in BE_FORMS  # noqa: PLR2004 (two words)
    return frozenset({words[0].stem}) if is_subject else frozenset()
