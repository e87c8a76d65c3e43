"""The scorer without a model: words are aligned, and numbers, dates, names and negation must agree."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb.errors import DeadlineExceededError
from llama_index_agentic_kb.grounding.alignment.analysis import Analysis, analyze
from llama_index_agentic_kb.grounding.alignment.clauses import clauses_of
from llama_index_agentic_kb.grounding.alignment.joining import join
from llama_index_agentic_kb.grounding.alignment.pairing import Pairing, pair
from llama_index_agentic_kb.grounding.alignment.vocabulary import concept_of
from llama_index_agentic_kb.grounding.claims import Claim
from llama_index_agentic_kb.grounding.scorers.base import ClaimScore, Evidence, Premise, verdict_of
from llama_index_agentic_kb.grounding.scorers.parts import by_parts, may_matter
from llama_index_agentic_kb.grounding.scorers.rivals import rivals_of
from llama_index_agentic_kb.schema.grounding import Span, Verdict
from llama_index_agentic_kb.search.tokenizing import DEFAULT_LANGUAGE

__all__ = ["LexicalScorer", "bearing_spans", "nearest_premises"]

_MOST_PASSAGES: Final = 4
"""Passages that a claim is aligned with: those that have most of its words."""
_WORTHWHILE: Final = 0.65
"""Share of the best passage's words that another must have to be aligned with as well."""
_WHOLE: Final = 0.85
"""Coverage from which no second passage is looked for."""
MAX_CHARACTERS: Final = 50_000
"""Characters of a passage that claims are held against; what stands behind them is not read."""
MAX_CLAIM: Final = 1_000
"""Characters of a claim that are read: a sentence without end is no claim that a passage could bear out."""
_TELLING: Final = 60
"""Words from which a passage's own language is believed."""
_UNSURE: Final = frozenset([DEFAULT_LANGUAGE, "chinese", "japanese"])
_SOURCES: Final = (
    r"(?:(?:provided|given|above|retrieved|available|cited|supplied) )?(?:text|passage|article|context|document|source"
    r"|excerpt|information|evidence|search result)s?(?: provided| given)?"
)
_FRAME: Final = re.compile(
    rf"^\s*(?:(?:according to|based on|per|as per|as stated in|as mentioned in) (?:the|this|these|your) {_SOURCES},?\s+"
    rf"|(?:the|this|these) {_SOURCES} (?:also )?"
    r"(?:states?|says?|mentions?|notes?|explains?|indicates?|reports?) that\s+"
    r"|laut (?:dem|der|den) (?:text|artikel|dokument|quelle|quellen|dokumenten)\s+)",
    re.IGNORECASE,
)
_SMOOTHING: Final = 4.0


class LexicalScorer:
    """Scores claims by alignment, offline and without a download; the same claims always get the same scores.

    It reads what a sentence says by its words: paraphrases that share none are beyond it. English is served best; other
    languages have stemming, numbers, dates and negation, and fewer names and synonyms. Of each passage the first 50,000
    characters are read, of each claim 1,000.

    Args:
        passages: Passages that each claim is aligned with, those with most of its words; default 4.
    """

    name = "lexical"

    def __init__(self, *, passages: int = _MOST_PASSAGES) -> None:
        self.passages = passages

    async def score(
        self, claims: Sequence[Claim], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims on a thread; see ``ClaimScorer``."""
        work = partial(self.judge, [claim.plain for claim in claims], premises, deadline=deadline)
        scores: list[ClaimScore] = await Call(sync=work, deadline=deadline, what=f"scorer {self.name}")
        return scores

    def judge(
        self, claims: Sequence[str], premises: Sequence[Premise], *, deadline: float | None = None
    ) -> list[ClaimScore]:
        """Score claims here and now; what is said twice is scored once.

        Raises:
            DeadlineExceededError: It was late; a thread that nobody waits for any more stops here.
        """
        sources = analyzed(premises)
        corpus = _Corpus(sources)
        scores: dict[str, ClaimScore] = {}
        for claim in dict.fromkeys(claims):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceededError(f"scorer {self.name}: late after {len(scores)} claims")
            scores[claim] = self._judge(_unframed(claim[:MAX_CLAIM]), sources, corpus)
        return [scores[claim] for claim in claims]

    def _judge(self, text: str, sources: Sequence[Analysis], corpus: _Corpus) -> ClaimScore:
        """Score a claim as a whole, and one of several facts by its parts, where different passages bear them."""
        whole = self._whole(text, sources, corpus)
        if not corpus.languages or (whole.verdict is Verdict.SUPPORTED and _bears_alone(whole)):
            return whole
        clauses = clauses_of(text, corpus.languages[0])
        if len(clauses) < 2:  # noqa: PLR2004 (a part alone is the whole)
            return whole
        parts: list[ClaimScore] = []
        for left, clause in zip(range(len(clauses), 0, -1), clauses, strict=True):
            if not may_matter(whole, parts, left):
                return whole
            parts.append(self._whole(clause.text, sources, corpus, joins=False))
        return by_parts(whole, parts, clauses)

    def _whole(self, text: str, sources: Sequence[Analysis], corpus: _Corpus, *, joins: bool = True) -> ClaimScore:
        claims = {language: analyze(text, "", language) for language in corpus.languages}
        chosen = corpus.nearest(claims, self.passages)
        pairings = {
            number: pair(
                claims[sources[number].language], sources[number], corpus.weights, corpus.default, corpus.names
            )
            for number in chosen
        }
        ranked = sorted(pairings, key=lambda number: (-pairings[number].score, number))
        if not ranked:
            return ClaimScore(0.0, verdict_of(0.0))
        evidence = [_evidence(number, pairings[number], sources[number]) for number in ranked]
        best = pairings[ranked[0]]
        together = self._together(claims, sources, ranked, pairings, corpus) if joins else None
        score = best.score
        if together is not None and together[0] > score:
            score, evidence = together
        rivals = [rival for number in ranked for rival in rivals_of(text, number, pairings[number], sources[number])]
        return ClaimScore(score, verdict_of(score, contradicted=bool(rivals)), evidence, rivals)

    def _together(
        self,
        claims: dict[str, Analysis],
        sources: Sequence[Analysis],
        ranked: Sequence[int],
        pairings: dict[int, Pairing],
        corpus: _Corpus,
    ) -> tuple[float, list[Evidence]] | None:
        """Score a claim against its two best passages as one, where neither has all of it."""
        first = ranked[0]
        others = [number for number in ranked[1:] if sources[number].language == sources[first].language]
        if not others or pairings[first].coverage >= _WHOLE:
            return None
        second = max(others, key=lambda number: pairings[number].coverage)
        if not _adds(claims[sources[first].language], sources[first], sources[second]):
            return None
        joined = corpus.joined(first, second)
        both = pair(claims[joined.language], joined, corpus.weights, corpus.default, corpus.names)
        split = len(sources[first].sentences)
        parts = {
            first: [sentence for sentence in both.sentences if sentence < split],
            second: [sentence - split for sentence in both.sentences if sentence >= split],
        }
        evidence = [
            Evidence(number, both.score, _spans(sources[number], sentences))
            for number, sentences in parts.items()
            if sentences
        ]
        return both.score, evidence


def analyzed(premises: Sequence[Premise]) -> list[Analysis]:
    """Take passages apart; a short one, whose language shows little, is taken to be in that of the others."""
    sources = [_analyzed(premise) for premise in premises]
    if not sources:
        return []
    common = Counter(source.language for source in sources).most_common(1)[0][0]
    return [
        _analyzed(premise, common) if source.language != common and not _is_sure(source) else source
        for premise, source in zip(premises, sources, strict=True)
    ]


def _is_sure(source: Analysis) -> bool:
    """Whether a passage's own language is to be believed: few words of one that is not the default tell enough."""
    return source.language not in _UNSURE or len(source.tokens) >= _TELLING


def _unframed(claim: str) -> str:
    """Give a claim without "according to the text": whose words they are, the passages don't say."""
    rest = _FRAME.sub("", claim, count=1)
    return claim if rest in ("", claim) else rest[:1].upper() + rest[1:]


def _analyzed(premise: Premise, language: str | None = None) -> Analysis:
    return analyze(premise.text[:MAX_CHARACTERS], _about(premise), language)


def bearing_spans(claim: str, premise: Premise) -> tuple[Span, ...]:
    """Give the sentences of a passage that have most of a claim's words, best first."""
    source = _analyzed(premise)
    corpus = _Corpus([source])
    return _spans(source, pair(analyze(claim, "", source.language), source, corpus.weights, corpus.default).sentences)


def nearest_premises(claims: Sequence[str], premises: Sequence[Premise], most: int) -> list[list[int]]:
    """Give, for each claim, the passages that have most of its words."""
    if len(premises) <= most:
        return [list(range(len(premises))) for _ in claims]
    corpus = _Corpus(analyzed(premises))
    return [
        corpus.nearest({language: analyze(claim, "", language) for language in corpus.languages}, most)
        for claim in claims
    ]


class _Corpus:
    """What the passages of a call have in common: which words are rare, and where they stand."""

    def __init__(self, sources: Sequence[Analysis]) -> None:
        self._sources = sources
        self.languages = tuple(dict.fromkeys(source.language for source in sources))
        counts: Counter[str] = Counter()
        self._joined: dict[tuple[int, int], Analysis] = {}
        self._holders: dict[str, set[int]] = {}
        self._conceptual: dict[int, set[int]] = {}
        # A word that also stands in small letters is no name by itself ("Composer", "Film").
        self.names = {token.stem for source in sources for token in source.tokens if token.name}
        self.names -= {
            token.stem for source in sources for token in source.tokens if source.text[token.start].islower()
        }
        for number, source in enumerate(sources):
            for stem, places in source.places.items():
                counts[stem] += len({source.tokens[place].sentence for place in places})
                self._holders.setdefault(stem, set()).add(number)
            for stem in source.topic:
                self._holders.setdefault(stem, set()).add(number)
            for concept in source.concepts:
                self._conceptual.setdefault(concept, set()).add(number)
        total = sum(len(source.sentences) for source in sources) + _SMOOTHING
        # Karen Spärck Jones's inverse document frequency, over sentences.
        self.weights = {stem: math.log(1 + total / (count + 1)) for stem, count in counts.items()}
        self.default = math.log(1 + total)

    def joined(self, first: int, second: int) -> Analysis:
        """Give two passages as one."""
        known = self._joined.get((first, second))
        if known is None:
            known = self._joined[first, second] = join([self._sources[first], self._sources[second]])
        return known

    def nearest(self, claims: dict[str, Analysis], most: int) -> list[int]:
        """Give the passages that have most of a claim's words, by weight."""
        held: Counter[int] = Counter()
        for language, claim in claims.items():
            for stem in {token.stem for token in claim.tokens if token.content}:
                weight = self.weights.get(stem, self.default)
                holders = self._holders.get(stem) or set().union(
                    *(self._conceptual.get(concept, ()) for concept in concept_of(stem))
                )
                for number in holders:
                    if self._sources[number].language == language:
                        held[number] += weight  # type: ignore[assignment]  # weights are no whole numbers
        best = held.most_common(most)
        if not best:
            return list(range(min(most, len(self._sources))))
        return [number for number, weight in best if weight >= _WORTHWHILE * best[0][1]]


def _about(premise: Premise) -> str:
    return " ".join([premise.title, *(f"{value}" for value in premise.attributes.values())]).strip()


def _adds(claim: Analysis, first: Analysis, second: Analysis) -> bool:
    """Whether a passage has two words of a claim, or a number or name, that another one lacks."""
    new = {token.stem for token in claim.tokens if token.content} & second.places.keys() - first.places.keys()
    named = any(token.name for token in claim.tokens if token.stem in new)
    return named or len(new) > 1 or any(item.fact is not None for item in claim.items)


def _bears_alone(whole: ClaimScore) -> bool:
    """Whether no passage but one speaks of a claim."""
    return len(whole.evidence) == 1


def _evidence(number: int, pairing: Pairing, source: Analysis) -> Evidence:
    return Evidence(number, pairing.score, _spans(source, pairing.sentences))


def _spans(source: Analysis, sentences: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(start=start, end=end) for start, end in (source.sentences[number] for number in sentences))
