"""The offline scorers: exact features weighed by a logistic model, alone or with the shipped cross-encoder's reading.

What a score means was learned from labelled claims (docs/proof.md); the weights are data beside the cross-encoder's. A
score of 0.6 is where the shipped verdicts were measured.
"""

from __future__ import annotations

import math
import operator
import re
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, Protocol

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.features import (
    FEATURES,
    MAX_CHARACTERS,
    MAX_CLAIM,
    Corpus,
    Passage,
    Reading,
    Window,
    is_negated,
    numbers_of,
    words,
)
from llama_index_agentic_kb.grounding.scorers.base import (
    CITATION_THRESHOLD,
    ClaimScore,
    Evidence,
    Premise,
    Rival,
    verdict_of,
)
from llama_index_agentic_kb.grounding.scorers.small import calibration, small_model
from llama_index_agentic_kb.schema.grounding import ConflictKind, Span, Verdict
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language, split_words

__all__ = ["LexicalScorer", "PairReader", "SmallScorer", "bearing_spans", "corpus_of", "nearest_premises"]

_PAIRS: Final = 96
"""Pairs that the cross-encoder reads in one check; at least one a claim."""
MOST_WINDOWS: Final = 6
"""Windows of a claim that are read where the best says neither yes nor no."""
_NEAR: Final = 3
_WORTHWHILE: Final = 0.75
"""Share of the best window's coverage that another must have to be read as well."""
_READ: Final = words("english german french spanish italian dutch portuguese danish norwegian swedish finnish russian")
"""Languages whose words, endings and negation the features know."""
_UNREAD: Final = re.compile(  # scripts without spaces, or whose endings and negation the features do not know
    "[\u0530-\u06ff\u0900-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
)
_SHORT: Final = 12
_LONG: Final = 60
"""Sentences of a passage up to which it is short, and from which it is a long document."""
_MOSTLY: Final = 0.5
_SAME: Final = 0.5
"""Coverage from which a window speaks of the same as the claim."""
_LIKELY: Final = 0.5
_MISSING_NUMBER: Final = 0.1
"""Score of a claim in a language that is not read, one of whose numbers stands nowhere."""
_VERBATIM: Final = 0.95
_TELLING: Final = 2
"""Terms without which a sentence ("Yes.") says nothing of its own."""
_LEAST_VERBATIM: Final = 12
_YEAR: Final = re.compile(r"(?:1[0-9]|20)\d\d|month\d+")
_IDENTIFIER: Final = re.compile(r"\S*[\d_/.]\S*")
"""A title that names a file or a row and says nothing of the text."""
_SPEAKER: Final = words("i me my we us our you your ich wir sie je nous vous yo nosotros io noi")
_EVIDENCE: Final = words(
    "passage passages source sources document documents evidence context information text texts "
    "quelle quellen dokument dokumente textes fuente fuentes documentos fonti"
)
"""What an answer calls its reader, itself and its evidence."""


class PairReader(Protocol):
    """A model that reads evidence and claim side by side."""

    def logits(
        self, pairs: Sequence[tuple[str, str]], *, deadline: float | None = None
    ) -> list[tuple[float, float, float]]:
        """Return the logits of contradicted, neutral and supported for each pair."""
        ...


_COVERAGE_1: Final = FEATURES.index("coverage_1")
_WHOLE: Final = 0.95
"""Share of a claim's terms that one sentence must have to be read by itself."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A claim with its reading and the evidence that a model reads for it."""

    text: str
    reading: Reading


class LexicalScorer:
    """Scores claims by exact features and a logistic model, offline; the same claims always get the same scores.

    It tells what stands in the evidence from what does not. Who does what to whom, and paraphrases that share few
    words, are beyond it: such claims are at best partially supported, never contradicted. It reads English best; other
    European languages are supported only where all is found, and what it cannot read is ``notCheckable``.
    """

    name = "lexical"

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims on a thread; see ``ClaimScorer``."""
        work = partial(self.judge, [claim.said for claim in claims], premises, deadline=deadline)
        scores: list[ClaimScore] = await Call(sync=work, deadline=deadline, what=f"scorer {self.name}")
        return scores

    def judge(
        self, claims: Sequence[str], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Return the scores of claims, computed in this thread; what is said twice is scored once.

        Raises:
            DeadlineExceededError: It was late.
        """
        corpus = corpus_of(premises)
        known: dict[str, ClaimScore] = {}
        asked: list[_Asked] = []
        for claim in dict.fromkeys(claims):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"scorer {self.name}: late after {len(known) + len(asked)} claims")
            exact = _exact(claim[:MAX_CLAIM], corpus)
            if exact is not None:
                known[claim] = exact
            if exact is None or (exact.evidence and len(corpus.passages) > 1):  # others may say otherwise
                asked.append(_Asked(claim, corpus.read(claim)))
        for one, score in zip(asked, self._scored(asked, corpus, deadline), strict=True):
            known[one.text] = _verbatim(known[one.text], score) if one.text in known else _abstaining(one, score)
        return [known[claim] for claim in claims]

    def _scored(self, asked: Sequence[_Asked], corpus: Corpus, deadline: float | None) -> list[ClaimScore]:
        del deadline
        return [_by_features(one, corpus) for one in asked]


class SmallScorer(LexicalScorer):
    """Scores claims by the features and the shipped cross-encoder; English only, others by the features alone.

    Args:
        model: Reads the pairs; None is the shipped model.

    Raises:
        ConfigurationError: The shipped files are missing or changed (when first used).
    """

    name = "small"

    def __init__(self, model: PairReader | None = None) -> None:
        self.model = model

    def _scored(self, asked: Sequence[_Asked], corpus: Corpus, deadline: float | None) -> list[ClaimScore]:
        english = [one for one in asked if not _is_foreign(one)]
        read = iter(self._read(english, corpus, deadline))
        return [_by_features(one, corpus) if _is_foreign(one) else next(read) for one in asked]

    def _read(self, asked: Sequence[_Asked], corpus: Corpus, deadline: float | None) -> list[ClaimScore]:
        model = self.model or small_model()
        room = max(1, _PAIRS // max(1, len(asked)))
        near = [texts_of(one.reading)[: min(room, near_windows(one.reading))] for one in asked]
        read = _Reader(model, deadline)
        rows = read([(text, one.text) for one, texts in zip(asked, near, strict=True) for text in texts], near)
        # Where the best window says neither yes nor no, what is meant may be said elsewhere, in other words.
        rest = [
            texts_of(one.reading)[len(texts) : room] if row and decisive(row) is None else ()
            for one, texts, row in zip(asked, near, rows, strict=True)
        ]
        # Beside its neighbours a sentence that says just what a short claim says can look as if it said something else.
        alone = [_best_sentence(one.reading, corpus) for one in asked]
        further = [[*texts, *single] for texts, single in zip(rest, alone, strict=True)]
        more = read([(text, one.text) for one, texts in zip(asked, further, strict=True) for text in texts], further)
        readings = []
        for first, last, single in zip(rows, more, alone, strict=True):
            logits = [*first, *last[: len(last) - len(single)]]
            if single:
                logits[0] = max(logits[0], last[-1], key=lambda row: row[2] - row[0])
            readings.append(logits)
        return [_by_model(one, logits, corpus) for one, logits in zip(asked, readings, strict=True)]


class _Reader:
    """Reads the pairs of several claims at once, and deals out what came of them."""

    def __init__(self, model: PairReader, deadline: float | None) -> None:
        self._model = model
        self._deadline = deadline

    def __call__(
        self, pairs: Sequence[tuple[str, str]], by_claim: Sequence[Sequence[str]]
    ) -> list[list[tuple[float, float, float]]]:
        rows = iter(self._model.logits(pairs, deadline=self._deadline) if pairs else ())
        return [list(islice(rows, len(texts))) for texts in by_claim]


def corpus_of(premises: Sequence[Premise]) -> Corpus:
    """Return the passages taken apart; a title and attributes are part of what each says."""
    return Corpus([_passage(premise) for premise in premises])


def bearing_spans(claim: str, premise: Premise) -> tuple[Span, ...]:
    """Return the sentences of a passage that have most of a claim's words, best first."""
    windows = corpus_of([premise]).read(claim).windows
    return _spans(windows[0]) if windows else ()


def nearest_premises(claims: Sequence[str], premises: Sequence[Premise], most: int) -> list[list[int]]:
    """Return, for each claim, the passages that have most of its words."""
    if len(premises) <= most:
        return [list(range(len(premises))) for _ in claims]
    corpus = corpus_of(premises)
    found = [[window.passage for window in corpus.read(claim).windows[:most]] for claim in claims]
    return [numbers or list(range(most)) for numbers in found]


def _best_sentence(reading: Reading, corpus: Corpus) -> list[str]:
    """Return the best sentence of the best window, with its passage's head, where it has all terms of the claim."""
    if not reading.windows or not reading.windows[0].spans or reading.features[_COVERAGE_1] < _WHOLE:
        return []
    window = reading.windows[0]
    passage, (start, end) = corpus.passages[window.passage], window.spans[0]
    text = f"{passage.head} {passage.text[start:end]}".strip()
    return [text] if text != reading.evidence else []


def _passage(premise: Premise) -> Passage:
    title = "" if _IDENTIFIER.fullmatch(premise.title) else premise.title
    head = ". ".join(part for part in (title, *map(str, premise.attributes.values())) if part)
    return Passage(premise.text[:MAX_CHARACTERS], head + "." if head and not head.endswith(".") else head)


def _exact(claim: str, corpus: Corpus) -> ClaimScore | None:
    """Return what can be said of a claim without reading it: it stands there, or its language is not read."""
    plain = normalize(claim).rstrip(" .。!！")  # noqa: RUF001 (full width)
    if len(plain) >= _LEAST_VERBATIM or (plain and _UNREAD.search(plain)):
        for number, passage in enumerate(corpus.passages):
            place = normalize(passage.text).find(plain)
            if place >= 0 and _stands_alone(normalize(passage.text), place, len(plain)):
                spans = _spans(next((w for w in corpus.read(claim).windows if w.passage == number), None))
                return ClaimScore(_VERBATIM, Verdict.SUPPORTED, [Evidence(number, _VERBATIM, spans)])
    if _is_read(claim) and corpus.language in _READ:
        return None
    there = frozenset().union(*(numbers_of(unicodedata.normalize("NFKC", one.text)) for one in corpus.passages))
    if numbers_of(unicodedata.normalize("NFKC", claim)) - there:
        return ClaimScore(_MISSING_NUMBER, verdict_of(_MISSING_NUMBER))
    return ClaimScore(None, Verdict.NOT_CHECKABLE)


def _verbatim(exact: ClaimScore, read: ClaimScore) -> ClaimScore:
    """Return the score of a claim that stands in a passage, with what the other passages say of it."""
    own = exact.evidence[0].premise
    others = [one for one in read.evidence if one.premise != own and read.verdict is Verdict.SUPPORTED]
    rivals = [one for one in read.rivals if one.premise != own]
    return ClaimScore(exact.score, exact.verdict, [*exact.evidence, *others], rivals)


def _stands_alone(text: str, start: int, length: int) -> bool:
    """Return whether a stretch is a sentence of its own: a part of one may be denied by the rest."""
    before, after = text[:start].rstrip(), text[start + length :].lstrip()
    return (not before or before[-1] in ".!?。！？:;\n") and (not after or after[0] in ".!?。！？;")  # noqa: RUF001


def _is_read(text: str) -> bool:
    letters = sum(char.isalpha() for char in text)
    if letters and len(_UNREAD.findall(text)) * 4 > letters:
        return False
    return detect_language(split_words(text)) in _READ


def _abstaining(asked: _Asked, score: ClaimScore) -> ClaimScore:
    """Return a score, withdrawn where a claim that nothing supports speaks of the answer and not of the world.

    So do "Here is what I found." and "The sources do not say." What has a number or a name is held to it.
    """
    if score.score is None or score.score >= CITATION_THRESHOLD or asked.reading.named:
        return score
    said = frozenset(split_words(asked.text))
    denies_evidence = is_negated(asked.text) and said & _EVIDENCE
    if said & _SPEAKER or denies_evidence or asked.reading.telling < _TELLING:
        return ClaimScore(None, Verdict.NOT_CHECKABLE)
    return score


def _is_foreign(asked: _Asked) -> bool:
    """Return whether a claim, or what it is held against, is in another language than English."""
    shown = asked.reading.windows[0].text if asked.reading.windows else ""
    return detect_language(split_words(f"{asked.text} {asked.text} {shown}")) != DEFAULT_LANGUAGE


def _by_features(asked: _Asked, corpus: Corpus) -> ClaimScore:
    reading = asked.reading
    score = _logistic("lexical", reading.features)
    if _is_foreign(asked):
        named = dict(zip(FEATURES, reading.features, strict=True))
        differs = named["negation_differs"] or named["numbers_near"] < 1
        spoken = detect_language(split_words(asked.text))
        if (score >= CITATION_THRESHOLD and differs) or (score < CITATION_THRESHOLD and spoken != corpus.language):
            return ClaimScore(None, Verdict.NOT_CHECKABLE)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score))


def _by_model(asked: _Asked, logits: Sequence[tuple[float, float, float]], corpus: Corpus) -> ClaimScore:
    """Return the score of a claim whose windows a model read, the best first."""
    reading = asked.reading
    if not logits:
        return ClaimScore(0.0, verdict_of(0.0))
    scores = [_blended(reading, row) for row in logits]
    best = decisive(logits)
    best = least_neutral(logits) if best is None else best
    score = scores[best]
    least = calibration()["contradicted"]
    against = [number for number, row in enumerate(logits) if _softmax(row)[0] >= least]
    if long_document(reading.sentences) >= _MOSTLY:  # the window is a small part of it
        against = []
    differing = [number for number, row in enumerate(logits) if number in against or _differs(asked, number, row)]
    rivals = [_rival(asked.text, reading.windows[number], corpus, _softmax(logits[number])[0]) for number in differing]
    # What names nothing ("Its rocket is smaller.") may speak of any passage that has its words: all must deny it.
    meant = {best} if reading.named else {best, *range(min(near_windows(reading), len(logits)))}
    if score < CITATION_THRESHOLD and meant.issubset(against):
        shown = [
            Evidence(reading.windows[number].passage, _softmax(logits[number])[0], _spans(reading.windows[number]))
            for number in against
        ]
        return ClaimScore(score, Verdict.CONTRADICTED, shown, rivals)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score, scores, best), rivals)


def _differs(asked: _Asked, number: int, row: tuple[float, float, float]) -> bool:
    """Return whether a window speaks of the same with another number: a conflict, but not yet a contradiction."""
    window = asked.reading.windows[number]
    missing = numbers_of(asked.text) - numbers_of(window.text)
    return bool(missing) and window.coverage >= _SAME and _softmax(row)[0] >= _LIKELY


def decisive(logits: Sequence[tuple[float, float, float]]) -> int | None:
    """Return the first window where it says yes or no to the claim; None where the model finds neither."""
    contradicted, neutral, supported = logits[0]
    return 0 if max(contradicted, supported) > neutral else None


def least_neutral(logits: Sequence[tuple[float, float, float]]) -> int:
    """Return the window that says most of the claim, for or against it."""
    return min(range(len(logits)), key=lambda number: logits[number][1] - max(logits[number][0], logits[number][2]))


def _blended(reading: Reading, row: tuple[float, float, float]) -> float:
    """Return the score of a claim by the cross-encoder's reading and the features.

    In a short passage the window holds all that bears the claim, and the model's word counts; of a long document it
    is a part, and what the features find in all of it counts as well.
    """
    values = (*reading.features, *_margins(row))
    share = long_document(reading.sentences)
    return _sigmoid((1 - share) * _total("small", values) + share * _total("long", values))


def long_document(sentences: int) -> float:
    """Return how much of a long document a passage is, 0 to 1."""
    return min(1.0, max(0.0, math.log(max(1, sentences) / _SHORT) / math.log(_LONG / _SHORT)))


def _margins(row: tuple[float, float, float]) -> tuple[float, float]:
    """Return how far a pair's support stands above each of the rest, in logits."""
    contradicted, neutral, supported = row
    return supported - neutral, supported - contradicted


def texts_of(reading: Reading) -> tuple[str, ...]:
    """Return what the model may read for a claim: the best window (with its partner), then the others."""
    if not reading.windows:
        return ()
    return (reading.evidence, *(window.text for window in reading.windows[1:MOST_WINDOWS]))


def near_windows(reading: Reading) -> int:
    """Return how many windows are read in any case: the best, and those that agree or disagree with it."""
    if not reading.windows:
        return 0
    least = reading.windows[0].coverage * _WORTHWHILE
    return 1 + sum(window.coverage >= least for window in reading.windows[1:_NEAR])


def _evidence(reading: Reading, score: float, scores: Sequence[float] = (), best: int = 0) -> list[Evidence]:
    """Return how far each passage bears a claim: as the model read it, else by its share of the best coverage."""
    if not reading.windows:
        return []
    top = reading.windows[best].coverage or 1.0
    found = []
    for number, window in enumerate(reading.windows):
        if number == best or (number == reading.partner and best == 0):
            own = score
        elif number < len(scores):
            own = min(score, scores[number])
        else:
            own = score * min(1.0, window.coverage / top) ** 2
        found.append(Evidence(window.passage, own, _spans(window)))
    return sorted(found, key=lambda one: -one.score)


def _spans(window: Window | None) -> tuple[Span, ...]:
    return tuple(Span(start=start, end=end) for start, end in window.spans) if window else ()


def _rival(claim: str, window: Window, corpus: Corpus, strength: float) -> Rival:
    """Return what a window says against a claim: the number that differs, or the sentence."""
    span = Span(start=window.spans[0][0], end=window.spans[0][1])
    quote = span.of(corpus.passages[window.passage].text)
    own, other = numbers_of(claim) - numbers_of(window.text), numbers_of(quote) - numbers_of(claim)
    if own and other:
        kind = ConflictKind.DATE if all(map(_YEAR.fullmatch, own)) else ConflictKind.NUMBER
        return Rival(kind, claim, quote, window.passage, span, strength)
    return Rival(ConflictKind.OTHER, claim, quote, window.passage, span, strength)


def _logistic(name: str, values: Sequence[float]) -> float:
    return _sigmoid(_total(name, values))


def _total(name: str, values: Sequence[float]) -> float:
    model = calibration()[name]
    weights: list[float] = model["weights"]
    total: float = model["bias"] + sum(map(operator.mul, values, weights))
    return total


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


def _softmax(row: Sequence[float]) -> list[float]:
    highest = max(row)
    shares = [math.exp(value - highest) for value in row]
    return [share / sum(shares) for share in shares]
