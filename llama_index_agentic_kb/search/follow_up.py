"""Searches a message in the light of a conversation, without a language model.

A message that stands alone is searched as it is: history only distorts it (measured, see docs/conversations.md). One
that leans on the conversation ("How tall was it?", "Why?", "And in Europe?") is expanded by the words that it may refer
to: the names that open the last reply, or the content words of earlier messages, back to one that stands alone. Its
query vector is that of the expanded text, with a part of the message's own and of the last reply's; keyword search uses
the expanded text and the words that the reply repeats.

The drift is the cosine between a message and the earlier ones, the latest weighing most. It decides where the words of
a message don't: a short message without a name ("Who is at high risk?") is expanded only if it is near the earlier
ones, and a reply counts only in such a conversation. A message that refers to something is expanded at a low drift too,
because "How do I use them?" is near nothing; the more it says by itself, the nearer it must be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llama_index_agentic_kb.search.tokenizing import FUNCTION_WORDS, detect_language, split_words

VectorOf: TypeAlias = Callable[[str], Sequence[float]]

OWN_WEIGHT: Final = 0.5
LONG_OWN_WEIGHT: Final = 1.5
"""The weight of the message's own vector beside that of its expanded text, which has 1; and that of a message with more
than two content words, which says more by itself."""
DECAY: Final = 0.5  # the weight of an earlier message relative to the next one
MAX_EARLIER: Final = 3  # number of earlier user messages that are compared with a message
MAX_BACK: Final = 4  # number of earlier user messages in which the words that a message refers to are looked for
MAX_TERMS: Final = 10
MAX_NAMES: Final = 2
"""Maximum number of words from earlier messages, and of names from the last reply, that expand a message."""
SURE_DRIFT: Final = 0.2  # the drift from which a short message that refers to nothing by its words is expanded
LEAST_DRIFTS: Final = (-1.0, -1.0, 0.0, 0.05, 0.1)
"""The drift from which a message that refers to something is expanded, by its content words: none, one, two, ..."""
REPLY_DRIFT: Final = 0.1  # the drift from which the last reply counts
REPLY_WEIGHT: Final = 0.3  # the weight of the last reply's vector beside the others' sum
REPLY_CHARACTERS: Final = 400  # number of characters of the last reply that are embedded
MAX_TOPIC: Final = 2
REPEATED: Final = 3
"""Maximum number of words that the last reply repeats, for keyword search; and how often it must have them."""
MAX_SENTENCE: Final = 25
"""Maximum number of words of a reply's first sentence for its names to be used; a longer one rarely answers."""
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
_ARTICLES: Final = _words("the der die das den le la les el los las il")
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
_PRONOUN_WORDS: Final = 5
_POINTER_WORDS: Final = 3
_ARTICLE_WORDS: Final = 2
_UNSURE_WORDS: Final = 3
"""Maximum number of content words of a message that leans on the conversation, by the kind of its reference."""
_OPENING_WORDS: Final = 2
"""Maximum number of content words of a sentence that only opens a message ("That's interesting.")."""
_TOPIC_LETTERS: Final = 4

_SENTENCE: Final = re.compile(r"(?<=[.!?:\n])(?<!\W[A-Z]\.)(?<!^[A-Z]\.)\s+")  # not after an initial
_END: Final = re.compile(r"(?<=[.!?])\s+")
_WORD: Final = r"(?:[A-Z]\.|[^\W\d_a-zß-öø-ÿ][\w'\u2019&-]*(?:\.[\w'\u2019&-]+)*)"
_NAME: Final = re.compile(rf"\b{_WORD}(?:\s+(?:(?:of|the|de|la|von|van|der|du|di|da)\s+)?{_WORD})*")


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A message as it is searched in a conversation.

    Args:
        question: The message.
        expanded: The message with the words that it refers to; None if it stands alone.
        earlier: The latest earlier user messages, newest first.
        is_loose: Whether only the vector uses the expanded text, and keyword search the message.
        is_unsure: Whether only the drift says if the message leans on the conversation.
        reply: The beginning of the last reply, if it counts: where only the drift decides, it misleads.
        topic: The words that the last reply repeats.
    """

    question: str
    expanded: str | None = None
    earlier: tuple[str, ...] = ()
    is_loose: bool = False
    is_unsure: bool = False
    reply: str = ""
    topic: tuple[str, ...] = ()

    @classmethod
    def of(cls, question: str, history: Sequence[tuple[str, str]]) -> FollowUp:
        """Return how a message is searched.

        Args:
            question: The message.
            history: The earlier messages as (role, text) pairs, oldest first; other roles than "user" and "assistant"
                are ignored.
        """
        mine = [text.strip() for role, text in reversed(history) if role == "user" and text.strip()]
        replies = (text.strip() for role, text in reversed(history) if role == "assistant" and text.strip())
        earlier, reply = tuple(dict.fromkeys(mine))[:MAX_EARLIER], next(replies, "")
        asked, is_unsure = _core(question), not leans(question)
        said = split_words(asked)
        if not mine or (is_unsure and (len(_content(said)) > _UNSURE_WORDS or _has_name(asked))):
            return cls(question, None, earlier)
        names = [] if is_unsure else _names_asked_for(reply, said, mine)
        terms = names or list(islice(_terms(mine), MAX_TERMS))
        added = [term for term in terms if not {*said}.issuperset(split_words(term))]
        if not added:
            return cls(question, None, earlier)
        is_loose = is_unsure or not _refers(asked, said)
        expanded, topic = f"{question} {' '.join(added)}", () if names else _repeated(reply, [*said, *added])
        counted = "" if is_unsure else reply[:REPLY_CHARACTERS]
        return cls(question, expanded, earlier, is_loose, is_unsure, counted, topic)

    def drift(self, vector_of: VectorOf) -> float | None:
        """Return the cosine between the message and the earlier ones; None without earlier ones."""
        history = self.history(vector_of)
        return None if history is None else float(np.clip(_unit(vector_of(self.question)) @ history, -1, 1))

    def settled(self, vector_of: VectorOf) -> FollowUp:
        """Return how the message is searched, now that its drift is known."""
        drift = self.drift(vector_of) if self.expanded else None
        if drift is None:
            return self
        said = len(_content(split_words(_core(self.question))))
        if drift < (SURE_DRIFT if self.is_unsure else LEAST_DRIFTS[min(said, len(LEAST_DRIFTS) - 1)]):
            return replace(self, expanded=None, reply="", topic=())
        return self if drift >= REPLY_DRIFT else replace(self, reply="", topic=())

    @property
    def words(self) -> str:
        """The text for keyword search."""
        return self.question if self.is_loose or not self.expanded else " ".join([self.expanded, *self.topic])

    @property
    def texts(self) -> list[str]:
        """The texts whose vectors the other methods need."""
        return [self.question, *filter(None, [self.expanded, self.reply]), *self.earlier]

    def vector(self, vector_of: VectorOf) -> list[float]:
        """Return the query vector."""
        own = list(vector_of(self.question))
        if self.expanded is None:
            return own
        is_long = len(_content(split_words(_core(self.question)))) > _ARTICLE_WORDS
        made = (LONG_OWN_WEIGHT if is_long else OWN_WEIGHT) * _unit(own) + _unit(vector_of(self.expanded))
        if self.reply:
            made = _unit(made) + REPLY_WEIGHT * _unit(vector_of(self.reply))
        return list(map(float, made))

    def history(self, vector_of: VectorOf) -> NDArray[np.float64] | None:
        """Return the weighted sum of the earlier messages' vectors, of unit length; None without earlier messages."""
        if not self.earlier:
            return None
        return _unit(np.sum([DECAY**age * _unit(vector_of(text)) for age, text in enumerate(self.earlier)], axis=0))


def leans(question: str) -> bool:
    """Return whether a message needs the conversation to be understood, judged by its words; in doubt, False.

    A message that names something leans only by a pronoun, a pointer or its opening: "Who is Ada Lovelace?" does not. A
    pronoun after three content words refers to one of them ("Where can people report a scam that they ..."). In a
    language without a list of pronouns here, only a message with a single content word counts.
    """
    question = _core(question)
    words = split_words(question)
    few = len(_content(words)) <= _POINTER_WORDS
    return _refers(question, words) or (few and not _has_name(question) and _ends_definitely(words))


def _core(message: str) -> str:
    """Return a message without the sentences that only open it ("That's interesting. Why?")."""
    sentences = _END.split(message[:_MAX_MESSAGE].strip())
    while len(sentences) > 1 and len(_content(split_words(sentences[0]))) <= _OPENING_WORDS:
        if _has_name(sentences[0]):
            break
        sentences.pop(0)
    return " ".join(sentences)


def _refers(question: str, words: Sequence[str]) -> bool:
    """Return whether a message refers back: by a pronoun, a pointer or its opening, or as it says hardly a word."""
    content = len(_content(words))
    opens = words[:1] and (words[0] in _OPENINGS or words[1:2] == ["about"])
    pronoun = next((at for at, word in enumerate(words) if word in _PRONOUNS), len(words))
    refers_back = pronoun < len(words) and len(_content(words[:pronoun])) <= _ARTICLE_WORDS
    return (
        (content <= 1 and not _has_name(question))
        or (content <= _PRONOUN_WORDS and refers_back)
        or (content <= _POINTER_WORDS and bool(opens or not _POINTERS.isdisjoint(words)))
    )


def _ends_definitely(words: Sequence[str]) -> bool:
    """Return whether a message ends with an article and one word: "... in the film?", or "When was the film released?".

    Two words after an article mostly name a thing by themselves ("the tax rate").
    """
    end = words[:-1] if words[-1:] and words[-1].endswith("ed") else words
    return not _ARTICLES.isdisjoint(end[-2:-1])


def _has_name(message: str) -> bool:
    """Return whether a message has a capitalised word after the first."""
    return any(word[:1].isupper() and word.rstrip("'\u2019m,.?!") != "I" for word in message.split()[1:])


def _names_asked_for(reply: str, said: Sequence[str], mine: Sequence[str]) -> list[str]:
    """Return the names in a reply, if the message before asked for one, and this message can be about it."""
    before = split_words(mine[0])[:1]
    is_asked = not _FOR_NAMES.isdisjoint(before) and _IDENTITY.match(mine[0]) is None
    is_person_for_thing = not (_THINGS.isdisjoint(said) or _FOR_PERSONS.isdisjoint(before))
    return names_of(reply, mine) if is_asked and not is_person_for_thing else []


def names_of(reply: str, messages: Iterable[str] = ()) -> list[str]:
    """Return the names in a reply's first sentence, those that no message has before others.

    A name is a run of capitalised words. A single word at the beginning of a longer sentence is not a name.
    """
    sentence = _SENTENCE.split(reply[:_MAX_REPLY].strip(), maxsplit=1)[0]
    if len(sentence.split()) > MAX_SENTENCE:
        return []
    names: dict[str, str] = {}
    for found in _NAME.finditer(sentence):
        parts = found.group().split()
        while parts and not (parts[0].endswith(".") or _content(split_words(parts[0]))):
            parts.pop(0)
        begins = found.start() == 0 and len(parts) == 1 and len(sentence.split()) > 2  # noqa: PLR2004 ("Paris, France.")
        if parts and not begins:
            names.setdefault(" ".join(parts).casefold(), " ".join(parts))
    asked = "\n".join(messages).casefold()
    new = [name for form, name in names.items() if form not in asked]
    return (new or [*names.values()])[:MAX_NAMES]


def _repeated(reply: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the content words that a reply has most often, without known ones."""
    counts = Counter(word for word in _content(split_words(reply[:_MAX_REPLY])) if len(word) >= _TOPIC_LETTERS)
    often = (word for word, count in counts.most_common() if count >= REPEATED)
    seen = {*known}
    return tuple(islice((word for word in often if word not in seen), MAX_TOPIC))


def _terms(messages: Iterable[str]) -> Iterator[str]:
    """Yield the distinct content words of earlier messages, newest first, back to one that stands alone."""
    seen: set[str] = set()
    for message in islice(messages, MAX_BACK):
        for word in _content(split_words(_core(message))):
            if word not in seen:
                seen.add(word)
                yield word
        if not leans(message):
            return


def _content(words: Sequence[str]) -> list[str]:
    """Return the words that carry meaning: without function words, pronouns, pointers and chatter."""
    ignored = FUNCTION_WORDS.get(detect_language(words), frozenset[str]()) | _PRONOUNS | _POINTERS | _CHATTER
    return [word for word in words if word not in ignored]


def _unit(vector: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    made = np.asarray(vector, np.float64)
    return made / (float(np.linalg.norm(made)) or 1.0)
