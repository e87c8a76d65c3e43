"""Related questions: what a reader may ask next, and only what the evidence answers.

A language model proposes them in one call, each with the passage that answers it and the words of it that do. What it
says is checked without a model: the quote must stand in that passage, and the question must be about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb.errors import ConfigurationError, LLMError
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, draw
from llama_index_agentic_kb.guard.text import plain_value
from llama_index_agentic_kb.llm import Usage, mended_json, unfenced
from llama_index_agentic_kb.planning.model_calls import PassageReader
from llama_index_agentic_kb.prompts import RELATED_TEMPLATE, Passage, as_data, format_passages
from llama_index_agentic_kb.search.languages import FUNCTION_WORDS, detect_language
from llama_index_agentic_kb.search.tokenizing import split_words, stem_words
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.passages import fit, passages

__all__ = ["Related", "RelatedQuestion", "RelatedQuestions"]

MAX_REPLY: Final = 20_000
"""Characters of a reply that are read."""
MAX_QUESTION: Final = 200
"""Characters of a question; a longer one is left out."""
MOST_PASSAGES: Final = 30
MOST_TOKENS: Final = 6_000
"""Of all passages in the prompt; beyond them, the least important are left out."""
SPARE: Final = 2
"""Questions that are asked for beyond those wanted, in the place of those that don't stand."""
LEAST_WORDS: Final = 3
"""Words of a quote, below which it could stand anywhere; of scripts without spaces, pairs of characters."""
SAME: Final = 0.8
"""Share of common words (Jaccard) from which two questions are one."""

_ASKS: Final = re.compile(r"""[?？؟](?:["'”’」』)）]{0,2})$|(?:か|吗|呢|嗎)。?$""")  # noqa: RUF001 (other scripts)
_UNSPACED: Final = re.compile(
    r"(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff])\s+(?=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff])"
)
_SIGNS: Final = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‑": "-"})  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class RelatedQuestion:
    """A question, and what answers it.

    Args:
        question: One line, in the language of the question that it follows.
        ref_id: The place of the node that answers it.
        quote: The words of the node that do.
    """

    question: str
    ref_id: int
    quote: str


@dataclass(slots=True)
class Related:
    """What came of asking for related questions.

    Args:
        proposals: Those that stand, best first.
        usage: What the call billed.
        warnings: What failed, or was left out.
    """

    proposals: list[RelatedQuestion] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    warnings: list[str] = field(default_factory=list)

    @property
    def questions(self) -> list[str]:
        """The questions alone."""
        return [one.question for one in self.proposals]


class RelatedQuestions(PassageReader):
    """Proposes questions that the evidence of an answer can answer too.

    Its arguments are those of ``PassageReader``.
    """

    default_template = RELATED_TEMPLATE

    async def ask(
        self,
        question: str,
        nodes: Sequence[NodeWithScore],
        *,
        answer: str = "",
        count: int = 3,
        sources: Mapping[str, KnowledgeSource] | None = None,
        deadline: float | None = None,
    ) -> Related:
        """Ask once; whatever fails ends in fewer questions and a warning, never in an error.

        Left out is a question whose quote does not stand in the passage that it names, or is of fewer than three
        words; that shares no telling word with its passage; that is none, or longer than 200 characters; and that is
        the one asked, or another of the list, in nearly the same words.

        Args:
            question: What was asked.
            nodes: The evidence, best first; never changed. None of them: no question, and no call.
            answer: What was answered; it need not be asked again.
            count: Questions that are given at most, at least 1.
            sources: By name; their fields tell title and content of a node, as in the answer's own prompt.
            deadline: ``time.monotonic()`` at which it is given up; None waits.

        Raises:
            ConfigurationError: ``count`` is below 1.
        """
        if count < 1:
            raise ConfigurationError(f"count: at least 1 related question can be asked for, not {count}")
        related, spotlight = Related(), draw(self.spotlighting)
        if not nodes:
            return related
        try:
            show = partial(self._shown, nodes, sources, spotlight)
            shown: list[Passage] = await Call(sync=show, deadline=deadline, what="passages for related questions")
            messages = self._messages(question, answer, shown, count)
            reply = await self.model.chat(messages, deadline=deadline)
            related.usage = reply.usage
            choose = partial(_chosen, related, reply.text[:MAX_REPLY], shown, question, count)
            await Call(sync=choose, deadline=deadline, what="reading related questions")
        except Exception as error:  # noqa: BLE001 (an answer stands without the questions that may follow it)
            if isinstance(error, LLMError) and error.usage is not None:
                related.usage = error.usage
            related.proposals = []
            related.warnings.append(f"no related questions: {one_line(error_message(error), 200)}")
        return related

    def _shown(
        self, nodes: Sequence[NodeWithScore], sources: Mapping[str, KnowledgeSource] | None, spotlight: Spotlight
    ) -> list[Passage]:
        """Give the passages of the prompt: half of the model's window at most."""
        given = passages(nodes[:MOST_PASSAGES], sources, spotlight)
        return fit(given, min(MOST_TOKENS, self.model.context_window // 2)).kept

    def _messages(self, question: str, answer: str, shown: Sequence[Passage], count: int) -> list[ChatMessage]:
        turns = [f"user: {one_line(question, 2_000)}", f"assistant: {one_line(answer, 4_000)}"]
        return self.template.format_messages(
            llm=self.model.llm,
            max_questions=str(count + SPARE),
            context_str=format_passages(shown),
            conversation=as_data("\n".join(turns[: 2 if answer.strip() else 1])),
        )


# -- reading -------------------------------------------------------------------------------------------------------


def _chosen(related: Related, text: str, shown: Sequence[Passage], question: str, count: int) -> None:
    """Keep of a reply what stands; tell how many don't."""
    proposed = list(_proposals(text, shown[0].spotlight if shown else PLAIN))
    by_ref = {passage.ref_id: passage for passage in shown}
    taken = [_words(question)]
    for one in proposed:
        words = _words(one.question)
        passage = by_ref.get(one.ref_id)
        if passage is None or not _stands(one, passage) or any(_is_same(words, other) for other in taken):
            continue
        taken.append(words)
        related.proposals.append(one)
    left_out = len(proposed) - len(related.proposals)
    if left_out:
        told = "no passage was shown to answer them, or they were asked already"
        related.warnings.append(f"{left_out} of {len(proposed)} related questions were left out: {told}")
    del related.proposals[count:]


def _proposals(text: str, spotlight: Spotlight) -> Iterator[RelatedQuestion]:
    """Read the proposals of a reply, whatever its form: an object, a list, broken JSON.

    Args:
        text: The reply.
        spotlight: Its prompt's; signs that the model copied are taken out.

    Raises:
        LLMError: There is no list of them in it.
    """
    body = unfenced(text)
    start = min((at for at in (body.find("{"), body.find("[")) if at >= 0), default=-1)
    try:
        value: Any = mended_json(body[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = value.get("questions", value.get("related_questions"))
    if not isinstance(value, list):
        raise LLMError(f"the model's reply holds no questions: {one_line(text[:400], 80)!r}")
    for item in value:
        if isinstance(item, dict) and (one := _proposal(item, spotlight)) is not None:
            yield one


def _proposal(item: Mapping[str, Any], spotlight: Spotlight) -> RelatedQuestion | None:
    question, ref, quote = item.get("question"), item.get("ref", item.get("ref_id")), item.get("quote")
    digits = re.search(r"\d{1,6}", str(ref)[:40])
    if not isinstance(question, str) or not isinstance(quote, str) or digits is None:
        return None
    question, quote = spotlight.unmarked(question), spotlight.unmarked(quote)
    return RelatedQuestion(plain_value(question), int(digits.group()), " ".join(quote.split()))


# -- checking ------------------------------------------------------------------------------------------------------


def _stands(one: RelatedQuestion, passage: Passage) -> bool:
    """Whether it is a question, its quote stands in the passage as whole words, and it is about the passage."""
    if not one.question or len(one.question) > MAX_QUESTION or _ASKS.search(one.question) is None:
        return False
    quote = _folded(one.quote).strip(" .…\"'")
    if len(split_words(quote)) < LEAST_WORDS:
        return False
    return _holds(passage, quote) and _is_about(one.question, passage)


def _holds(passage: Passage, quote: str) -> bool:
    """Whether a passage says something in so many words; as it was shown, or as it is."""
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(quote)}(?![a-z0-9])")
    return any(pattern.search(_folded(text)) for text in (passage.content, as_data(passage.content)))


def _folded(text: str) -> str:
    """Give a form in which a quote and its source are equal: letters, spaces and typographic signs set aside."""
    return _UNSPACED.sub("", normalize(text.translate(_SIGNS)))


def _is_about(question: str, passage: Passage) -> bool:
    """Whether a passage has a telling word of a question, in any of its forms: what shares none can't answer it."""
    words = split_words(question)
    language = detect_language(words)
    ignored = FUNCTION_WORDS.get(language, frozenset[str]())
    telling = [word for word in words if word not in ignored] or words
    here = split_words(f"{passage.title} {passage.content}")
    return bool(_stems(telling, language) & _stems(here, language))


def _stems(words: Sequence[str], language: str) -> set[str]:
    return set(stem_words(words, language).split())


def _words(question: str) -> frozenset[str]:
    return frozenset(split_words(question))


def _is_same(one: frozenset[str], other: frozenset[str]) -> bool:
    return len(one & other) >= SAME * len(one | other)
