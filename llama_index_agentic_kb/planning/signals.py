"""Whether a question needs a plan, by its form and by what it found by itself. No model is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.evidence.candidates import Fusion
from llama_index_agentic_kb.planning.findings import best_of
from llama_index_agentic_kb.planning.scope import Scope
from llama_index_agentic_kb.sources.base import node_key
from llama_index_agentic_kb.sources.fan_out import SourceSearch

__all__ = ["EvidenceStrength", "evidence_strength", "is_simple", "word_coverage"]

SIMPLE_WORDS: Final = 8
"""Words of the longest question that may be simple."""

FEW_WORDS: Final = 4
"""Words of the longest question that is simple in any language: the form of others is known of English alone."""

TOP: Final = 3
"""Passages that are looked at for the question's words."""

COVERED: Final = 0.75
"""Share of the question's words that strong evidence holds."""

# What joins two facts, or compares them, in the languages that users ask most in; others are judged by length alone.
_JOINING: Final = re.compile(
    r"\b(and|or|both|either|than|same|between|versus|vs|compared?|compare|difference|first|last|earlier|later|older|"
    r"younger|more|less|most|least|before|after|while|who|which|that|whose|where|when|if|because|why|how|"
    r"und|oder|beide|als|et|ou|y|o)\b"
)
# What asks for a relation itself ("who is the director of ..."), not for a fact about what it leads to.
_ASKS_FOR_IT: Final = re.compile(r"(?:who|what)(?:['\u2019]s| is| are| was| were)\s")
_ENGLISH: Final = re.compile(r"\b(?:the|of|is|are|were|do|does|did|has|have|who|what|where|when|which|how|a|to|for)\b")
# Whether something is so ("would a Pict be confused by Old English?") hangs on facts of each thing that it names.
_YES_OR_NO: Final = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|may|might|must)(?:n['\u2019]t)?\s"
)
_RELATIONS: Final = re.compile(r"\bof\b|['\u2019]s\b|s['\u2019]\s")
# One word, two relations: a father's father, a spouse's mother.
_KINSHIP: Final = re.compile(
    r"\b(grand|great-grand|step|half-)\w+|\b\w+-in-law\b|\b(aunt|uncle|cousin|nephew|niece)s?\b"
)
_CJK: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# fmt: off
_STOP: Final = frozenset((
    "a", "an", "the", "of", "in", "on", "at", "to", "for", "from", "by", "with", "and", "or", "is", "are",
    "was", "were", "be", "been", "do", "does", "did", "has", "have", "had", "who", "what", "which", "when",
    "where", "why", "how", "whose", "that", "this", "it", "its", "as", "about", "into", "than", "then",
    "there", "their", "his", "her", "he", "she", "they", "i", "you", "we", "can", "could", "will", "would",
    "should", "may", "might", "not", "no",
))
# fmt: on


def is_simple(scope: Scope) -> bool:
    """Return whether a question asks for one fact, by its form alone; where in doubt it does not.

    It is short, stands alone, has one interrogative at most and at its start, joins, compares and judges nothing, and
    asks for no more than one relation ("the mother of the director of", "where was the director of ... born").
    """
    words = scope.question.split()
    if scope.history or not words or len(words) > SIMPLE_WORDS or "\n" in scope.question.strip():
        return False
    text = normalize(scope.question)
    if _YES_OR_NO.match(text) or _joins(scope.question):
        return False
    return len(words) <= FEW_WORDS or _ENGLISH.search(text) is not None


@dataclass(frozen=True, slots=True)
class EvidenceStrength:
    """How well a question is served by what it found by itself.

    Args:
        sufficient: Whether no plan is needed.
        reason: Why, in words.
        signals: Each between 0 and 1: ``coverage``, the share of the question's words (but for stop words) in the best
            passages; ``agreement``, the overlap of the best five of each way of searching, 1 where there is one way;
            ``found``, the share of sources that found anything.
    """

    sufficient: bool
    reason: str
    signals: dict[str, float]


def evidence_strength(scope: Scope, searches: Sequence[SourceSearch], fusion: Fusion) -> EvidenceStrength:
    """Judge the searches of the question itself.

    A question that joins several facts is never judged by its evidence: one of its facts always looks well served.

    Args:
        scope: The question.
        searches: Its searches, one a source.
        fusion: How lists of different corpora are fused.
    """
    best = best_of(searches, fusion)[:TOP]
    text = normalize("\n".join(one.node.node.get_content(MetadataMode.EMBED) for one in best))
    signals = {
        "coverage": round(word_coverage(scope.question, text), 3),
        "agreement": round(_agreement(searches), 3),
        "found": round(sum(bool(search.nodes) for search in searches) / max(1, len(searches)), 3),
    }
    weak = None
    if scope.history:
        weak = "the question follows a conversation"
    elif _joins(scope.question):
        weak = "the question joins several facts"
    elif signals["coverage"] < COVERED:
        weak = "the best passages hold too few of the question's words"
    reason = "not planned: the question's own evidence is strong" if weak is None else f"planned: {weak}"
    return EvidenceStrength(weak is None, reason, signals)


def _joins(question: str) -> bool:
    """Return whether a question asks for more than one fact, or for a relation of a relation."""
    text = normalize(question)
    rest = " ".join(text.split()[1:])
    related = _RELATIONS.findall(_ASKS_FOR_IT.sub("", text, count=1))
    return bool(
        _JOINING.search(rest)
        or _KINSHIP.search(text)
        or len(related) > (1 if _ASKS_FOR_IT.match(text) else 0)
        or len(text.split()) > 2 * SIMPLE_WORDS
        or _CJK.search(text)
    )


def word_coverage(question: str, text: str) -> float:
    """Return the share of a question's words, but for stop words, that a normalised text holds, 0 to 1."""
    words = {word for word in re.findall(r"\w+", normalize(question)) if word not in _STOP}
    held = sum(word[: max(4, len(word) - 2)] in text for word in words)  # without endings: "directed" and "director"
    return held / len(words) if words else 0.0


def _agreement(searches: Sequence[SourceSearch]) -> float:
    """Return the mean overlap of the best five of two ways of searching one source."""
    shares = []
    for search in searches:
        best = [{node_key(node.node) for node in ranked.nodes[:5]} for ranked in search.lists if ranked.nodes]
        if len(best) > 1:
            shares.append(len(best[0] & best[1]) / min(len(best[0]), len(best[1])))
    return sum(shares) / len(shares) if shares else 1.0
