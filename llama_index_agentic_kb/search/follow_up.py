"""Searches a message in the light of a conversation, without a language model.

A message that stands alone is searched as it is: history only distorts it (measured, see docs/conversations.md). One
that leans on the conversation ("How tall was it?", "Why?", "And in Europe?") is expanded by the words that it may refer
to: the names that open the last reply, or the content words of earlier messages, back to one that stands alone. Its
query vector is that of the expanded text, with a part of the message's own; keyword search uses the expanded text and
the words that the last reply repeats.

Whether a message leans is judged by its words. The drift, the cosine between a message and the earlier ones, decides
where they say nothing: the vector of a short message without a name ("Who is at high risk?") is expanded only if it is
near the earlier ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, takewhile
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS, detect_language, split_words

Numbers: TypeAlias = NDArray[np.float64]

OWN_WEIGHT: Final = 0.5  # the weight of the message's own vector beside that of its expanded text, which has 1
LONG_OWN_WEIGHT: Final = 1.5  # the same of a message with more than two content words, which says more by itself
DECAY: Final = 0.5  # the weight of an earlier message relative to the next one
MAX_EARLIER: Final = 3  # number of earlier user messages that are compared with a message
MAX_BACK: Final = 4  # number of earlier user messages in which the words that a message refers to are looked for
MAX_TERMS: Final = 10  # maximum number of words from earlier messages that expand a message
MAX_NAMES: Final = 2  # maximum number of names from the last reply that expand a message
MAX_TOPIC: Final = 2  # maximum number of words that the last reply repeats, for keyword search
REPEATED: Final = 3  # number of times that the last reply must have such a word
MAX_SENTENCE: Final = 25  # maximum number of words of a reply's first sentence with names; a longer one rarely answers
SURE_DRIFT: Final = 0.2  # the drift from which a short message that refers to nothing by its words is expanded
_MAX_REPLY: Final = 1_000
_MAX_MESSAGE: Final = 2_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_THINGS: Final = _words("it its")
# English, then German, French, Spanish, Portuguese, Italian
_PRONOUNS: Final = _THINGS | _words(
    "he him his she her hers they them their theirs er ihn ihm ihr ihre ihren ihrer ihnen sein seine seinen seiner es "
    "elle elles ils lui leur leurs ses él ella ellos ellas sus ele ela eles elas seu sua seus suas lei loro suo suoi"
)
"""Words that refer to something named before."""
_POINTERS: Final = _words(
    "this that these those one ones here then such former latter else "
    "dies diese dieser dieses dort dessen davon dazu dabei darin damit cela ceci ça celui celle ceux celles "
    "eso esto ese esa aquello isso isto esse essa questo questa quello quella ciò"
)
"""Words that may refer to something named before, but often don't ("the scams that ...")."""
_OPENINGS: Final = _words("and but so also then or no und aber oder nein et mais non y pero e ma mas")
"""First words of a message that continues another."""
_CHATTER: Final = _words(
    "tell talk let know explain describe give show want need please thanks thank okay ok yes wow cool great amazing "
    "interesting nice sure hi hello hey never mind mentioned said heard danke bitte merci gracias obrigado grazie"
)
"""Words that say nothing about what is asked."""
_ORDERS: Final = _words("explain describe show")
"""Words after which "that" points: "Explain that second step"."""
_EMPTY: Final = _PRONOUNS | _POINTERS | _CHATTER
_FOR_PERSONS: Final = _words("who whom whose wer wen wem wessen qui quién quiénes quem chi")
_FOR_NAMES: Final = _FOR_PERSONS | _words(
    "which welche welcher welches quel quelle quels quelles cuál cuáles qual quais quale quali"
)
"""First words of a question for a person, and for any name."""
_IDENTITY: Final = re.compile(
    r"\W*(?:who|wer|qui|quién|quem|chi)\s+(?:is|was|are|were|ist|war|sind|waren|est|était|es|era|fue|è|é)\s+"
    r"(?!(?:the|der|die|das|le|la|les|el|il|lo|o|a)\b)",
    re.IGNORECASE,
)
"""A question about a person that it names ("Who was Ada Lovelace?"); "Who was the king of ..." asks for a name."""
_PRONOUN_WORDS: Final = 5  # maximum number of content words of a message that leans by a pronoun
_POINTER_WORDS: Final = 3  # the same of one that leans by a pointer, its opening or its drift
_SHORT: Final = 2  # maximum number of content words before a pronoun that refers back, and of a short message

_SENTENCE: Final = re.compile(r"(?<=[.!?:\n])(?<!\W[A-Z]\.)(?<!^[A-Z]\.)\s+")  # not after an initial
_END: Final = re.compile(r"(?<=[.!?])\s+")
_WORD: Final = r"(?:[A-Z]\.|[^\W\d_a-zß-öø-ÿ][\w'\u2019&-]*(?:\.[\w'\u2019&-]+)*)"
_NAME: Final = re.compile(rf"\b{_WORD}(?:\s+(?:(?:of|the|de|la|von|van|der|du|di|da)\s+)?{_WORD})*")


class Compared(NamedTuple):
    """A message compared with its conversation by vectors."""

    expanded: str | None  # the message with the words that it refers to; None if it is searched alone
    query: list[float]  # the query vector
    own: Numbers  # the vector of the message alone, of unit length
    history: Numbers | None  # the weighted sum of the earlier messages' vectors, of unit length
    drift: float | None  # the cosine between the message and the earlier ones


@dataclass(frozen=True, slots=True)
class FollowUp:
    """How a message is searched in a conversation."""

    question: str
    expanded: str | None  # the message with the words that it may refer to; None if it stands alone
    words: str  # the text for keyword search
    earlier: tuple[str, ...] = ()  # the latest earlier user messages, newest first
    own_weight: float = OWN_WEIGHT  # of the message's own vector beside that of its expanded text
    least_drift: float = -1.0  # the drift from which the vector is that of the expanded text

    @classmethod
    def of(cls, question: str, history: Sequence[tuple[str, str]]) -> FollowUp:
        """Return how a message is searched after these (role, text) pairs of users and assistants, oldest first."""
        mine, reply = list(_said(history, "user")), next(_said(history, "assistant"), "")
        alone = cls(question, None, question, tuple(dict.fromkeys(mine))[:MAX_EARLIER])
        read = _read(question)
        if not mine or not read.may_lean:
            return alone
        names = names_of(reply, mine) if read.leans and read.can_be_about_name(mine[0]) else []
        terms = names or list(islice(_terms(mine), MAX_TERMS))
        added = [term for term in terms if not {*read.words}.issuperset(split_words(term))]
        if not added:
            return alone
        words, expanded = question, f"{question} {' '.join(added)}"
        if read.points or not read.content:
            topic = [] if names else islice(_repeated(reply, {*read.words, *added}), MAX_TOPIC)
            words = " ".join([expanded, *topic])
        own_weight = OWN_WEIGHT if read.content <= _SHORT else LONG_OWN_WEIGHT
        least_drift = -1.0 if read.leans else SURE_DRIFT
        return replace(alone, expanded=expanded, words=words, own_weight=own_weight, least_drift=least_drift)

    @property
    def texts(self) -> list[str]:
        """The texts whose vectors ``compared`` needs."""
        return [self.question, *filter(None, [self.expanded]), *self.earlier]

    def compared(self, vectors: Mapping[str, Sequence[float]]) -> Compared:
        """Return the query vector and the drift, given the vectors of ``texts``."""
        own, history, drift = _unit(vectors[self.question]), None, None
        if self.earlier:
            decayed = [DECAY**age * _unit(vectors[text]) for age, text in enumerate(self.earlier)]
            history = _unit(np.sum(decayed, axis=0))
            drift = float(np.clip(own @ history, -1, 1))
        if self.expanded is None or (drift is not None and drift < self.least_drift):
            return Compared(None, list(vectors[self.question]), own, history, drift)
        query = self.own_weight * own + _unit(vectors[self.expanded])
        return Compared(self.expanded, list(map(float, query)), own, history, drift)


class _Reading(NamedTuple):
    """A message read without its conversation."""

    words: list[str]
    content: int  # the number of its content words
    is_named: bool  # whether it names something
    points: bool  # whether a pronoun, a pointer or its opening refers back

    @property
    def leans(self) -> bool:
        """Whether it needs the conversation to be understood: it points back, or says hardly a word."""
        return self.points or (self.content <= 1 and not self.is_named)

    @property
    def may_lean(self) -> bool:
        return self.leans or (self.content <= _POINTER_WORDS and not self.is_named)

    def can_be_about_name(self, before: str) -> bool:
        """Return whether the message before asked for a name, and this one can be about a bearer of it."""
        first = split_words(before)[:1]
        is_asked = not _FOR_NAMES.isdisjoint(first) and _IDENTITY.match(before) is None
        return is_asked and (_THINGS.isdisjoint(self.words) or _FOR_PERSONS.isdisjoint(first))


def _said(history: Sequence[tuple[str, str]], speaker: str) -> Iterator[str]:
    """Yield what the user or the assistant said, newest first."""
    return (text.strip() for role, text in reversed(history) if role == speaker and text.strip())


def _repeated(reply: str, known: Collection[str]) -> Iterator[str]:
    """Yield the content words that a reply repeats, but those that are known, most frequent first."""
    counts = Counter(_content(split_words(reply[:_MAX_REPLY])))
    return (word for word, count in counts.most_common() if count >= REPEATED and word not in known)


def leans(question: str) -> bool:
    """Return whether a message needs the conversation to be understood, judged by its words; in doubt, False.

    A pronoun after three content words refers to one of them ("Where can people report a scam that they ..."). In a
    language without a list of pronouns here, only a message with a single content word counts.
    """
    return _read(question).leans


def _read(message: str) -> _Reading:
    sentences = _END.split(message[:_MAX_MESSAGE].strip())
    while len(sentences) > 1 and len(_content(split_words(sentences[0]))) <= 1 and not _has_name(sentences[0]):
        sentences.pop(0)  # it only opens the message: "That's interesting. Why?"
    text = " ".join(sentences)
    words = split_words(text)
    content = len(_content(words))
    points = (content <= _PRONOUN_WORDS and _refers_back(words)) or (
        content <= _POINTER_WORDS and _opens_or_points(words)
    )
    return _Reading(words, content, _has_name(text), points)


def _refers_back(words: Sequence[str]) -> bool:
    """Return whether words have a pronoun, after so few content words that it does not refer to one of them."""
    before = list(takewhile(lambda word: word not in _PRONOUNS, words))
    return len(before) < len(words) and len(_content(before)) <= _SHORT


def _opens_or_points(words: Sequence[str]) -> bool:
    """Return whether words open as the continuation of something, or have a pointer."""
    pointers = (at for at, word in enumerate(words) if word in _POINTERS and not _is_conjunction(words, at))
    return not _OPENINGS.isdisjoint(words[:1]) or words[1:2] == ["about"] or next(pointers, None) is not None


def _is_conjunction(words: Sequence[str], at: int) -> bool:
    """Return whether a word is "that" between others: "the scams that ...", "How do I know that ..."."""
    if words[at] != "that" or not 0 < at < len(words) - 1 or (at == 1 and words[0] in _ORDERS):
        return False
    return words[at - 1] not in FUNCTION_WORDS["english"]


def _has_name(message: str) -> bool:
    """Return whether a message has a capitalised word after the first."""
    return any(word[:1].isupper() and word.rstrip("'\u2019m,.?!") != "I" for word in message.split()[1:])


def names_of(reply: str, messages: Iterable[str] = ()) -> list[str]:
    """Return the names in a reply's first sentence, those that no message has before others.

    A name is a run of capitalised words. A single word at the beginning of a longer sentence is not a name.
    """
    sentence = _SENTENCE.split(reply[:_MAX_REPLY].strip(), maxsplit=1)[0]
    if len(sentence.split()) > MAX_SENTENCE:
        return []
    names: dict[str, str] = {}
    for found in _NAME.finditer(sentence):
        parts = list(dropwhile(_is_empty, found.group().split()))
        begins = found.start() == 0 and len(parts) == 1 and len(sentence.split()) > 2  # noqa: PLR2004 ("Paris, France.")
        if parts and not begins:
            names.setdefault(" ".join(parts).casefold(), " ".join(parts))
    asked = "\n".join(messages).casefold()
    new = [name for form, name in names.items() if form not in asked]
    return (new or [*names.values()])[:MAX_NAMES]


def _is_empty(word: str) -> bool:
    """Return whether a word is neither an initial nor a content word."""
    return not (word.endswith(".") or _content(split_words(word)))


def _terms(messages: Iterable[str]) -> Iterator[str]:
    """Yield the distinct content words of earlier messages, newest first, back to one that stands alone."""
    seen: set[str] = set()
    for read in map(_read, islice(messages, MAX_BACK)):
        new = [word for word in dict.fromkeys(_content(read.words)) if word not in seen]
        yield from new
        seen.update(new)
        if not read.leans:
            return


def _content(words: Sequence[str]) -> list[str]:
    """Return the words that carry meaning: without function words, pronouns, pointers and chatter."""
    function_words = FUNCTION_WORDS.get(detect_language(words), frozenset[str]())
    return [word for word in words if word not in function_words and word not in _EMPTY]


def _unit(vector: Sequence[float] | Numbers) -> Numbers:
    made = np.asarray(vector, np.float64)
    return made / (float(np.linalg.norm(made)) or 1.0)
