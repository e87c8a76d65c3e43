"""The offline scorers: exact features in a logistic model, alone or with the output of the shipped cross-encoder.

The models were trained on labelled claims (docs/proof.md); their weights are stored with the cross-encoder's. The
shipped verdicts were measured at a threshold of 0.6.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Final, Literal, Protocol

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.features import (
    EMOJI,
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
from llama_index_agentic_kb.grounding.scorers.base import ClaimScore, Evidence, Premise, Rival, verdict_of
from llama_index_agentic_kb.grounding.scorers.small import Row, calibration, small_model
from llama_index_agentic_kb.schema.grounding import CITATION_THRESHOLD, ConflictKind, Span, Verdict
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE, detect_language, split_words

_PAIRS: Final = 96  # maximum number of windows that are read in one check, but at least one for each claim
_MOST_WINDOWS: Final = 4  # maximum number of windows read for a claim if the best one is neutral
_WORTHWHILE: Final = 0.75  # minimum share of the best window's coverage at which another window is always read
_WHOLE: Final = 0.999  # minimum coverage of a window that has all of a claim's terms
_READ: Final = words("english german french spanish italian dutch portuguese danish norwegian swedish finnish russian")
"""Languages whose words, endings and negation the features support."""
_UNREAD: Final = re.compile(  # scripts without spaces, or with endings and negation that the features do not support
    "[\u0530-\u06ff\u0900-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
)
_SHORT: Final = 12
_LONG: Final = 60
"""Maximum sentences of a short passage (``_SHORT``), and minimum sentences of a long document (``_LONG``)."""
_MOSTLY: Final = 0.5
_SAME: Final = 0.5  # minimum coverage at which a window has the same subject as the claim
_LIKELY: Final = 0.5
_LEAST_SHARE: Final = 1e-6
_MISSING_NUMBER: Final = 0.1
"""Score of a claim in an unsupported language with a number that is missing from the evidence."""
_VERBATIM: Final = 0.95
_TELLING: Final = 2  # minimum number of terms of a sentence that makes a statement, unlike "Yes."
_LEAST_VERBATIM: Final = 12
_YEAR: Final = re.compile(r"(?:1[0-9]|20)\d\d")
_IDENTIFIER: Final = re.compile(r"\S*[\d_/.]\S*")
"""A title that is a file name or a row id and does not describe the text."""
_SPEAKER: Final = words("i me my we us our you your ich wir sie je nous vous yo nosotros io noi")
_EVIDENCE: Final = words(
    "passage passages source sources document documents evidence context information text texts "
    "quelle quellen dokument dokumente textes fuente fuentes documentos fonti"
)
"""Words with which an answer refers to its evidence."""
_GAP: Final = re.compile(
    r"(?:^(?:however, |but )?|[,;]? (?:but|and|though|although|while|yet) )(?:the|these) "
    r"(?:passage|source|document|text)s? (?:do|does)(?: not|n['\u2019]t) "
    r"(?:say|state|mention|name|tell|specify|indicate)\b(?!.*(?:[;,:(\u2013\u2014]|"
    r"\b(?:but|yet|although|though|because|while|and (?:it|he|she|they|the|this|that|there))\b))"
    r"(?P<asks> (?:(?:from|to|in|at|by|for|with|of|on|until|since) )?(?:wh|how|if))?",
    re.IGNORECASE,
)
"""A sentence, or its last clause, that says only what the evidence lacks; a clause with "that" would state more."""


class PairReader(Protocol):
    """A model that reads pairs of evidence and claim."""

    def logits(self, pairs: Sequence[tuple[str, str]], *, deadline: float | None = None) -> list[Row]:
        """Return the logits of "contradicted", "neutral" and "supported" for each pair."""
        ...


class LexicalScorer:
    """Scores claims by exact features and a logistic model, offline; the same claims always get the same scores.

    It detects whether a claim's terms are in the evidence. It can't check who does what to whom, nor paraphrases that
    share few words: such claims are at best partially supported, never contradicted. It works best for English. In
    other European languages, claims need all their terms; claims in unsupported languages are ``notCheckable``.
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
        """Return the scores of claims, computed in the calling thread; repeated claims are scored once."""
        claims = [_without_gap(claim) for claim in claims]
        corpus = corpus_of(premises)
        plain = [normalize(passage.text) for passage in corpus.passages]
        known: dict[str, ClaimScore] = {}
        asked: dict[str, Reading] = {}
        for claim in dict.fromkeys(claims):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"scorer {self.name}: late after {len(known.keys() | asked)} claims")
            exact = _exact(claim[:MAX_CLAIM], corpus, plain)
            if exact is not None:
                known[claim] = exact
            if exact is None or (exact.evidence and len(plain) > 1):  # other passages may contradict it
                asked[claim] = corpus.read(claim)
        for claim, score in self._scored(asked, corpus, deadline).items():
            if claim in known:  # found verbatim in one passage: add the other passages
                own = known[claim].evidence[0].premise
                borne = score.evidence if score.verdict is Verdict.SUPPORTED else []
                known[claim].evidence += [one for one in borne if one.premise != own]
                known[claim].rivals += [one for one in score.rivals if one.premise != own]
            elif _speaks_of_the_answer(claim, asked[claim], score):
                known[claim] = ClaimScore(None, Verdict.NOT_CHECKABLE)
            else:
                known[claim] = score
        return [known[claim] for claim in claims]

    def _scored(self, asked: Mapping[str, Reading], corpus: Corpus, deadline: float | None) -> Mapping[str, ClaimScore]:
        del deadline
        return {claim: _by_features(claim, reading, corpus) for claim, reading in asked.items()}


class SmallScorer(LexicalScorer):
    """Scores English claims by the features and the shipped cross-encoder, other claims by the features alone.

    ``model`` reads the pairs; it defaults to the shipped model, whose files are checked on first use.
    """

    name = "small"

    def __init__(self, model: PairReader | None = None) -> None:
        self.model = model

    def _scored(self, asked: Mapping[str, Reading], corpus: Corpus, deadline: float | None) -> Mapping[str, ClaimScore]:
        english = {claim: reading for claim, reading in asked.items() if not _is_foreign(claim, reading)}
        read = read_windows(self.model or small_model(), english, deadline) if english else []
        scores = {
            claim: _by_model(claim, reading, rows, corpus)
            for (claim, reading), rows in zip(english.items(), read, strict=True)
        }
        return {**super()._scored({one: asked[one] for one in asked if one not in english}, corpus, deadline), **scores}


def read_windows(model: PairReader, asked: Mapping[str, Reading], deadline: float | None = None) -> list[list[Row]]:
    """Return a model's logits for each claim's windows, best first; the best is also read as a single sentence."""
    room = max(1, _PAIRS // max(1, len(asked)))

    def read(texts: Sequence[Sequence[str]]) -> list[list[Row]]:
        pairs = [(text, claim) for claim, own in zip(asked, texts, strict=True) for text in own]
        rows = iter(model.logits(pairs, deadline=deadline) if pairs else ())
        return [list(islice(rows, len(own))) for own in texts]

    windows = [[window.text for window in reading.windows[: min(room, _MOST_WINDOWS)]] for reading in asked.values()]
    counts = [_near_windows(reading) for reading in asked.values()]
    alone = [[one.alone for one in reading.windows[:1] if one.alone and room > 1] for reading in asked.values()]
    found = read([[*texts[:count], *one] for texts, count, one in zip(windows, counts, alone, strict=True)])
    for rows, one in zip(found, alone, strict=True):
        if one:  # the sentence may be clearer than with its neighbours
            rows[0] = max(rows[0], rows.pop(), key=margin)
    # If the best window is neutral, another window may contain a paraphrase.
    rest = [
        texts[count:] if rows and rows[0][1] >= max(rows[0][0], rows[0][2]) else []
        for texts, count, rows in zip(windows, counts, found, strict=True)
    ]
    return [[*rows, *more] for rows, more in zip(found, read(rest), strict=True)]


def corpus_of(premises: Sequence[Premise]) -> Corpus:
    """Return the indexed passages, including titles and attributes."""
    passages = []
    for premise in premises:
        title = "" if _IDENTIFIER.fullmatch(premise.title) else premise.title
        head = ". ".join(part for part in (title, *map(str, premise.attributes.values())) if part)
        text = EMOJI.sub(" ", premise.text[:MAX_CHARACTERS])
        passages.append(Passage(text, head + "." if head and not head.endswith(".") else head))
    return Corpus(passages)


def bearing_spans(claim: str, premise: Premise) -> tuple[Span, ...]:
    """Return the sentences of a passage that have most of a claim's words, best first."""
    windows = corpus_of([premise]).read(claim).windows
    return windows[0].spans if windows else ()


def nearest_premises(claims: Sequence[str], premises: Sequence[Premise], most: int) -> list[list[int]]:
    """Return, for each claim, the indices of the passages with most of its words."""
    if len(premises) <= most:
        return [list(range(len(premises))) for _ in claims]
    corpus = corpus_of(premises)
    found = [[window.passage for window in corpus.read(claim).windows[:most]] for claim in claims]
    return [numbers or list(range(most)) for numbers in found]


# -- without a model ---------------------------------------------------------------------------------------------------


def _exact(claim: str, corpus: Corpus, plain: Sequence[str]) -> ClaimScore | None:
    """Return the score of a claim that is verbatim in the evidence or in an unsupported language, else None."""
    asked = normalize(claim).rstrip(" .。!！")  # noqa: RUF001 (full width)
    if len(asked) >= _LEAST_VERBATIM or (asked and _UNREAD.search(asked)):
        for number, text in enumerate(plain):
            place = text.find(asked)
            if place >= 0 and _stands_alone(text, place, place + len(asked)):
                windows = [window for window in corpus.read(claim).windows if window.passage == number]
                spans = windows[0].spans if windows else ()
                return ClaimScore(_VERBATIM, Verdict.SUPPORTED, [Evidence(number, _VERBATIM, spans)])
    letters = sum(map(str.isalpha, claim))
    is_read = len(_UNREAD.findall(claim)) * 4 <= letters and detect_language(split_words(claim)) in _READ
    if is_read and corpus.language in _READ:
        return None
    there = numbers_of(unicodedata.normalize("NFKC", "\n".join(one.text for one in corpus.passages)))
    if numbers_of(unicodedata.normalize("NFKC", claim)) - there:
        return ClaimScore(_MISSING_NUMBER, verdict_of(_MISSING_NUMBER))
    return ClaimScore(None, Verdict.NOT_CHECKABLE)


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a part of a text is a whole sentence: the rest of a sentence might negate it."""
    before, after = text[:start].rstrip(), text[end:].lstrip()
    return (not before or before[-1] in ".!?。！？:;\n") and (not after or after[0] in ".!?。！？;")  # noqa: RUF001


def _without_gap(claim: str) -> str:
    """Return a claim without a last clause that says only what the evidence lacks; empty if it says nothing else."""
    gap = _GAP.search(claim[:MAX_CLAIM])
    if gap is None or (gap.start() and not gap["asks"]):
        return claim
    return f"{claim[: gap.start()]}." if gap.start() else ""


def _speaks_of_the_answer(claim: str, reading: Reading, score: ClaimScore) -> bool:
    """Return whether a claim states nothing ("Yes."), or is unsupported and about the answer ("Here you are.")."""
    if reading.telling < _TELLING and not (reading.named or (reading.telling and reading.features[0])):
        return True
    if score.score is None or score.score >= CITATION_THRESHOLD or reading.named:
        return False
    said = frozenset(split_words(claim))
    return bool(said & _SPEAKER or (is_negated(claim) and said & _EVIDENCE)) or reading.telling < _TELLING


def _is_foreign(claim: str, reading: Reading) -> bool:
    """Return whether a claim or its best window is in another language than English."""
    shown = reading.windows[0].text if reading.windows else ""
    return detect_language(split_words(f"{claim} {claim} {shown}")) != DEFAULT_LANGUAGE


def _by_features(claim: str, reading: Reading, corpus: Corpus) -> ClaimScore:
    score = _sigmoid(_logit("lexical", reading.features))
    if _is_foreign(claim, reading):
        differs = reading.features[-1] or not reading.windows or reading.windows[0].coverage < _WHOLE
        spoken = detect_language(split_words(claim))
        if (score >= CITATION_THRESHOLD and differs) or (score < CITATION_THRESHOLD and spoken != corpus.language):
            return ClaimScore(None, Verdict.NOT_CHECKABLE)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score))


# -- with a model ------------------------------------------------------------------------------------------------------


def _near_windows(reading: Reading) -> int:
    """Return the number of windows always passed to the model: the best one, and the next if of similar coverage."""
    least = reading.windows[0].coverage * _WORTHWHILE if reading.windows else 0.0
    return 1 + sum(window.coverage >= least for window in reading.windows[1:2])


def margin(row: Row) -> float:
    """Return the margin of "supported" over "contradicted" in a model's logits; it chooses among windows."""
    return row[2] - row[0]


def _by_model(claim: str, reading: Reading, rows: Sequence[Row], corpus: Corpus) -> ClaimScore:
    """Return the score of a claim from the model's logits for its windows, best first."""
    if not rows:
        return ClaimScore(0.0, verdict_of(0.0))
    best = rows.index(max(rows, key=margin))
    scores, against = [blended(reading, row) for row in rows], denials(reading, rows)
    score, least, asked = scores[best], calibration()["contradicted"], numbers_of(claim)
    shown, rivals = [], []
    for window, strength in zip(reading.windows, against, strict=False):
        if strength >= least:
            shown.append(Evidence(window.passage, strength, window.spans))
        # The same subject without the claim's number is a conflict, not a contradiction.
        elif window.coverage < _SAME or strength < _LIKELY or not asked - numbers_of(window.text):
            continue
        rivals.append(_rival(claim, window, corpus, strength))
    # The window with most of the claim's words must contradict it as well: another may speak of something else.
    if score < CITATION_THRESHOLD and min(against[0], against[best]) >= least:
        return ClaimScore(score, Verdict.CONTRADICTED, shown, rivals)
    return ClaimScore(score, verdict_of(score), _evidence(reading, score, scores), rivals)


def denials(reading: Reading, rows: Sequence[Row]) -> list[float]:
    """Return the probability that each window contradicts a claim; 0 if windows are a small part of their passage."""
    return [softmax(row)[0] if long_document(reading) < _MOSTLY else 0.0 for row in rows]


def support(row: Row) -> float:
    """Return the log odds of "supported" for a row of logits."""
    share = min(max(softmax(row)[2], _LEAST_SHARE), 1 - _LEAST_SHARE)
    return math.log(share / (1 - share))


def blended(reading: Reading, row: Row) -> float:
    """Return the score of a claim from the cross-encoder's logits and the features.

    In a short passage the window contains all the evidence, so the cross-encoder decides. In a long document the
    window is only a part, so features of the whole document count as well.
    """
    share = long_document(reading)
    short = _logit("small", [support(row)])
    return _sigmoid((1 - share) * short + share * _logit("long", [*reading.features, support(row)]))


def long_document(reading: Reading) -> float:
    """Return the degree to which the best window's passage is a long document, 0 to 1."""
    return min(1.0, max(0.0, math.log(max(1, reading.sentences) / _SHORT) / math.log(_LONG / _SHORT)))


def _evidence(reading: Reading, score: float, scores: Sequence[float] = ()) -> list[Evidence]:
    """Return the evidence of all passages, best first; coverage determines scores that the model did not compute."""
    found = []
    for window, own in zip_longest(reading.windows, scores):
        share = min(1.0, window.coverage / (reading.windows[0].coverage or 1.0))
        found.append(Evidence(window.passage, score * share**2 if own is None else min(score, own), window.spans))
    return sorted(found, key=lambda one: -one.score)


def _rival(claim: str, window: Window, corpus: Corpus, strength: float) -> Rival:
    """Return a window's statement that differs from a claim, with the kind of difference."""
    quote = window.spans[0].of(corpus.passages[window.passage].text)
    own, other = numbers_of(claim) - numbers_of(window.text), numbers_of(quote) - numbers_of(claim)
    kind = ConflictKind.OTHER
    if own and other:
        kind = ConflictKind.DATE if all(map(_YEAR.fullmatch, own)) else ConflictKind.NUMBER
    return Rival(kind, claim, quote, window.passage, window.spans[0], strength)


def _logit(name: Literal["lexical", "small", "long"], values: Sequence[float]) -> float:
    model = calibration()[name]
    return math.fsum([model["bias"], *(value * weight for value, weight in zip(values, model["weights"], strict=True))])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


def softmax(row: Sequence[float]) -> list[float]:
    """Return the probabilities for a row of logits."""
    highest = max(row)
    shares = [math.exp(value - highest) for value in row]
    return [share / sum(shares) for share in shares]
