"""Decides whether a question needs a plan, from its wording and its first search results, without a model call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import MetadataMode

from llama_index_agentic_kb._text import normalize
from llama_index_agentic_kb.evidence.candidates import Fusion, best_of
from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.schema import RetrievalRequest
from llama_index_agentic_kb.schema.request import INSTRUCTING
from llama_index_agentic_kb.sources.fan_out import SourceSearch
from llama_index_agentic_kb.sources.search import node_key

SIMPLE_WORDS: Final = 8  # at most, of a simple question
FEW_WORDS: Final = 4  # at most, if it is not recognised as English
TOP: Final = 3  # number of top passages searched for the question's words
COVERED: Final = 0.75  # share of the question's words that strong evidence must contain

# Words that join or compare facts, in the most common languages; for other languages only the length counts.
_JOINING: Final = re.compile(
    r"\b(and|or|both|either|than|same|between|versus|vs|compared?|compare|difference|first|last|earlier|later|older|"
    r"younger|more|less|most|least|before|after|while|who|which|that|whose|where|when|if|because|why|how|"
    r"und|oder|beide|als|et|ou|y|o)\b"
)
# Openings that ask for a relation itself ("who is the director of ..."), not for a fact about the related thing.
_ASKS_FOR_IT: Final = re.compile(r"(?:who|what)(?:['\u2019]s| is| are| was| were)\s")
_ENGLISH: Final = re.compile(r"\b(?:the|of|is|are|were|do|does|did|has|have|who|what|where|when|which|how|a|to|for)\b")
# A yes/no question ("would a Pict be confused by Old English?") needs facts about each thing that it names.
_YES_OR_NO: Final = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|may|might|must)(?:n['\u2019]t)?\s"
)
_RELATIONS: Final = re.compile(r"\bof\b|['\u2019]s\b|s['\u2019]\s")
# Kinship words that combine two relations: a father's father, a spouse's mother.
_KINSHIP: Final = re.compile(
    r"\b(grand|great-grand|step|half-)\w+|\b\w+-in-law\b|\b(aunt|uncle|cousin|nephew|niece)s?\b"
)
_CJK: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_STOP: Final = (
    "a an the of in on at to for from by with and or is are was were be been do does did has have had who what which "
    "when where why how whose that this it its as about into than then there their his her he she they i you we can "
    "could will would should may might not no"
)


@dataclass(frozen=True, slots=True)
class Scope:
    """A question and its conversation.

    Args:
        question: The last user message.
        history: Earlier messages as (role, text) pairs, oldest first.
        intents: Search queries given by the caller, which need no planning and replace the question.
        classification: The classes to check the question for. Defaults to no classification.
        retrieval_instructions: The application's instructions for planning, with the system messages.
        answer_instructions: The application's instructions for the answer, with the system messages.
    """

    question: str
    history: tuple[tuple[str, str], ...] = ()
    intents: tuple[str, ...] = ()
    classification: ClassificationSpec | None = None
    retrieval_instructions: str = ""
    answer_instructions: str = ""

    @classmethod
    def of(
        cls,
        request: RetrievalRequest,
        memory: Sequence[ChatMessage] = (),
        classification: ClassificationSpec | None = None,
    ) -> Scope:
        """Return the scope of a request; ``memory`` is used as the history if the request has none.

        A copy of the question at the end of the memory is removed: some chat engines store it before they ask.
        """
        history = [(message.role, message.text) for message in request.history if message.text.strip()]
        history = [(role, text) for role, text in history if role not in INSTRUCTING]
        if not history:
            history = [(message.role.value, message.content or "") for message in memory]
            if history and history[-1][0] == "user" and history[-1][1].strip() == request.question:
                history.pop()
            history = [(role, text) for role, text in history if text.strip() and role in ("user", "assistant")]
        intents = tuple(intent.search for intent in request.intents or ())
        planning, answering = (
            "\n".join(filter(None, [(text or "").strip(), request.system]))
            for text in (request.retrieval_instructions, request.answer_instructions)
        )
        return cls(request.question, tuple(history), intents, classification, planning, answering)

    def without_answers(self) -> Scope:
        """Return the scope with only the user's own earlier messages: answers are made of passages."""
        return replace(self, history=tuple((role, text) for role, text in self.history if role == "user"))


def is_simple(scope: Scope) -> bool:
    """Return whether a question asks for a single fact, judged by its wording only; in doubt, False.

    A simple question is short, has no history, joins or compares nothing, is not a yes/no question and asks for at
    most one relation (not "the mother of the director of").
    """
    words = scope.question.split()
    if scope.history or not words or len(words) > SIMPLE_WORDS or "\n" in scope.question.strip():
        return False
    text = normalize(scope.question)
    if _YES_OR_NO.match(text) or _joins(text):
        return False
    return len(words) <= FEW_WORDS or _ENGLISH.search(text) is not None


@dataclass(frozen=True, slots=True)
class EvidenceStrength:
    """How well the search results of the unplanned question cover it.

    Args:
        reason: Why a plan is needed or not.
        signals: Values between 0 and 1: ``coverage``, the share of the question's words (without stop words) in the
            best passages; ``agreement``, the overlap of the top five dense and lexical results (1 if a source has only
            one list); ``found``, the share of sources with results.
        sufficient: Whether the evidence is strong enough to answer without a plan.
    """

    reason: str
    signals: dict[str, float]
    sufficient: bool


def evidence_strength(scope: Scope, searches: Sequence[SourceSearch], fusion: Fusion) -> EvidenceStrength:
    """Rate the evidence that the searches of the question itself found, one search per source.

    It is never sufficient for a question that joins several facts: high coverage may come from one fact alone.
    """
    best = best_of(searches, fusion)[:TOP]
    text = normalize("\n".join(one.node.node.get_content(MetadataMode.EMBED) for one in best))
    words = {*re.findall(r"\w+", normalize(scope.question))}.difference(_STOP.split())
    held = sum(word[: max(4, len(word) - 2)] in text for word in words)  # without endings: "directed" and "director"
    shares = []
    for search in searches:
        tops = [{node_key(node.node) for node in ranked.nodes[:5]} for ranked in search.lists if ranked.nodes]
        if len(tops) > 1:
            shares.append(len(tops[0] & tops[1]) / min(len(tops[0]), len(tops[1])))
    signals = {
        "coverage": round(held / len(words) if words else 0.0, 3),
        "agreement": round(sum(shares) / len(shares) if shares else 1.0, 3),
        "found": round(sum(bool(search.nodes) for search in searches) / max(1, len(searches)), 3),
    }
    if scope.history:
        weak = "the question follows a conversation"
    elif _joins(normalize(scope.question)):
        weak = "the question joins several facts"
    elif signals["coverage"] < COVERED:
        weak = "the best passages hold too few of the question's words"
    else:
        return EvidenceStrength("not planned: the question's own evidence is strong", signals, sufficient=True)
    return EvidenceStrength(f"planned: {weak}", signals, sufficient=False)


def _joins(text: str) -> bool:
    """Return whether a normalized question asks for more than one fact, or for a relation of a relation."""
    asks_for_it = _ASKS_FOR_IT.match(text) is not None
    return bool(
        _JOINING.search(" ".join(text.split()[1:]))
        or _KINSHIP.search(text)
        or len(_RELATIONS.findall(_ASKS_FOR_IT.sub("", text, count=1))) > asks_for_it
        or len(text.split()) > 2 * SIMPLE_WORDS
        or _CJK.search(text)
    )
