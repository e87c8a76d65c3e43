"""The relevance gate: whether what was found is about what was asked.

Told without a model: by a calibrated reranker's scores where there are any, else by the share of the question's words
that the best passages hold. Measured on questions over their own corpus and over foreign ones: 5 % of the questions
over their own corpus are below 0.4 and none of 100 below 0.2; over a foreign corpus 83 % and half of them are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llama_index.core.schema import MetadataMode, NodeWithScore

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.evidence.provenance import provenance
from llama_index_agentic_kb.planning.signals import word_coverage
from llama_index_agentic_kb.schema.answer import SkippedReason
from llama_index_agentic_kb.search.languages import DEFAULT_LANGUAGE, FUNCTION_WORDS, detect_language

__all__ = ["Relevance", "judge_relevance"]

TOP: Final = 5
"""Passages that are looked at."""
MOST: Final = 4_000
"""Characters of each that are looked at."""

OUT_OF_DOMAIN: Final = 0.2
"""Share of the question's words below which the passages are about something else."""
IRRELEVANT: Final = 0.4
"""The same below which nothing relevant is among them."""

UNRELATED: Final = 1.0
"""A calibrated reranker's score, 0 to 4, below which the best passage is about something else ..."""
BARELY: Final = 2.0
"""... and below which it holds nothing relevant."""

_WORD: Final = re.compile(r"\w+")
_UNSPACED: Final = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Thai, Lao, Burmese, Khmer, Chinese, Japanese."""
_ENGLISH: Final = frozenset(
    word
    for word in FUNCTION_WORDS[DEFAULT_LANGUAGE]
    if not any(word in words for language, words in FUNCTION_WORDS.items() if language != DEFAULT_LANGUAGE)
)


@dataclass(frozen=True, slots=True)
class Relevance:
    """What the gate says.

    Args:
        reason: Why no answer should be given; None lets the evidence through.
        signal: What it was judged by: "coverage", "reranker", "none" (nothing was found), "language" (question and
            passages may be in different ones, or are not written in words, so that counting words tells nothing).
        value: Of that signal; None without any.
    """

    reason: SkippedReason | None
    signal: str
    value: float | None = None


def judge_relevance(question: str, nodes: Sequence[NodeWithScore], *, strict: bool) -> Relevance:
    """Judge evidence.

    Args:
        question: What was asked.
        nodes: The evidence, best first.
        strict: Whether little relevance is enough to withhold an answer (Google's ``ignoreLowRelevantContent: true``);
            else only evidence that is about something else is.

    Returns:
        OUT_OF_DOMAIN_QUERY_IGNORED where the evidence is about something else, NO_RELEVANT_CONTENT where there is none,
        or, if strict, where it holds too little of what was asked.
    """
    if not nodes:
        return Relevance(SkippedReason.NO_RELEVANT_CONTENT, "none")
    scores = [mark.get("reranker_score") for node in nodes if (mark := provenance(node)) is not None]
    known = [score for score in scores if score is not None]
    if known:
        return Relevance(_reason(max(known), UNRELATED, BARELY, strict=strict), "reranker", max(known))
    text = normalize("\n".join(node.node.get_content(MetadataMode.EMBED)[:MOST] for node in nodes[:TOP]))
    if not _same_language(question, text):
        return Relevance(None, "language")
    coverage = word_coverage(question, text)
    return Relevance(_reason(coverage, OUT_OF_DOMAIN, IRRELEVANT, strict=strict), "coverage", coverage)


def _reason(value: float, unrelated: float, barely: float, *, strict: bool) -> SkippedReason | None:
    if value < unrelated:
        return SkippedReason.OUT_OF_DOMAIN_QUERY_IGNORED
    return SkippedReason.NO_RELEVANT_CONTENT if strict and value < barely else None


def _same_language(question: str, text: str) -> bool:
    """Whether a question is surely in the language of a text, whose words are set apart by spaces.

    A short question may look English and be in any language: it takes a function word that is English alone.
    """
    if _UNSPACED.search(question):
        return False
    words = _words(question)
    language = detect_language(words)
    if language == DEFAULT_LANGUAGE and not _ENGLISH.intersection(words):
        return False
    return language == detect_language(_words(text))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text[:MOST])]
