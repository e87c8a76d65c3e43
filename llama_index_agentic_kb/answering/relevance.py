"""The relevance gate: whether what was found is about what was asked.

Told without a model. By a calibrated reranker's scores where there are any; these may withhold an answer by themselves.
Else, and only where a strict gate is asked for, by the share of the question's words that the passages hold: words that
mean the same are not the same words ("What does it cost?", "Adult ticket: 12 EUR"), so that this alone would withhold
good answers. Measured with all-MiniLM-L6-v2 on 136 questions of three public sets, keyword-rich ones, over their own
corpus and over foreign ones: 5 % of the former and 83 % of the latter are below two fifths. Short, reworded questions
do worse: by hand-written ones, about half of those that could be answered.
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

MOST: Final = 20_000
"""Characters of each passage that are looked at."""
FEWEST: Final = 2
"""Words of a question, but for function words, below which their share tells nothing."""

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
        signal: What it was judged by: "coverage", "reranker", "none" (nothing was found), "unjudged" (there is
            no calibrated reranker, and the gate is not strict), "language" (question and
            passages may be in different ones, or are not written in words, so that counting words tells nothing).
        value: Of that signal; None without any.
    """

    reason: SkippedReason | None
    signal: str
    value: float | None = None


def judge_relevance(questions: Sequence[str], nodes: Sequence[NodeWithScore], *, strict: bool) -> Relevance:
    """Judge evidence.

    Args:
        questions: What was asked, and what was planned for it: one that the passages hold is enough.
        nodes: All evidence that the model is given, best first.
        strict: Whether little relevance is enough to withhold an answer (Google's ``ignoreLowRelevantContent: true``);
            else only a calibrated reranker can say so.

    Returns:
        OUT_OF_DOMAIN_QUERY_IGNORED where the evidence is about something else, NO_RELEVANT_CONTENT where there is none
        (no node has text), or, if strict, where it holds too little of what was asked.
    """
    if not any(node.node.get_content(MetadataMode.NONE).strip() for node in nodes):
        return Relevance(SkippedReason.NO_RELEVANT_CONTENT, "none")
    scores = [mark.get("reranker_score") for node in nodes if (mark := provenance(node)) is not None]
    known = [score for score in scores if score is not None]
    if known:
        return Relevance(_reason(max(known), UNRELATED, BARELY, strict=strict), "reranker", max(known))
    if not strict:
        return Relevance(None, "unjudged")
    text = normalize("\n".join(node.node.get_content(MetadataMode.EMBED)[:MOST] for node in nodes))
    shares = [_share(question, text) for question in questions]
    if not shares or None in shares:
        return Relevance(None, "language")
    best = max(share for share in shares if share is not None)
    return Relevance(_reason(best, OUT_OF_DOMAIN, IRRELEVANT, strict=True), "coverage", best)


def _share(question: str, text: str) -> float | None:
    """Give the share of a question's words in a text; None where it tells nothing."""
    if not _same_language(question, text):
        return None
    words = _words(question)
    telling = [word for word in words if word not in FUNCTION_WORDS.get(detect_language(words), ())]
    return word_coverage(" ".join(telling), text) if len(telling) >= FEWEST else None


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
