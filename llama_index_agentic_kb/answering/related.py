"""Related questions: follow-up questions that the evidence can answer.

A language model proposes them in one call, each with a passage and a quote that answers it. Each proposal is then
checked without a model: the quote must occur in that passage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import error_message, normalize, one_line
from llama_index_agentic_kb.errors import LLMError
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, Spotlighting, draw
from llama_index_agentic_kb.guard.text import plain_value
from llama_index_agentic_kb.llm import LanguageModel, read_json
from llama_index_agentic_kb.prompts import RELATED_TEMPLATE, Passage, as_data, format_passages
from llama_index_agentic_kb.search.tokenizing import split_words
from llama_index_agentic_kb.synthesizers.passages import fit, passages

COUNT: Final = 3
SPARE: Final = 2  # additional questions to request, as replacements for rejected ones
MAX_REPLY: Final = 20_000  # maximum characters of a reply to parse
MAX_QUESTION: Final = 200
MAX_PASSAGES: Final = 30
MAX_TOKENS: Final = 6_000  # maximum tokens of all passages in the prompt; the lowest-ranked passages are omitted
MIN_QUOTE_WORDS: Final = 3  # minimum words of a quote; pairs of characters in scripts without spaces
SAME: Final = 0.8  # word overlap (Jaccard index) from which two questions count as duplicates

_UNSPACED: Final = re.compile(
    r"(?<=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff])\s+(?=[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff])"
)
_SIGNS: Final = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‑": "-"})  # noqa: RUF001


async def related_questions(
    model: LanguageModel,
    question: str,
    nodes: Sequence[NodeWithScore],
    *,
    answer: str = "",
    spotlighting: Spotlighting | None = "delimit",
    deadline: float | None = None,
) -> tuple[list[str], list[str]]:
    """Return related questions, best first, and warnings, which failures become; without nodes no model is called."""
    if not nodes:
        return [], []
    try:
        limit = min(MAX_TOKENS, model.context_window // 2)
        pack = partial(fit, passages(nodes[:MAX_PASSAGES], None, draw(spotlighting)), limit)
        packed = await Call(sync=pack, deadline=deadline, what="passages for related questions")
        shown = [passage for group in packed.groups for passage in group]
        turns = [f"user: {one_line(question, 2_000)}", f"assistant: {one_line(answer, 4_000)}"]
        messages = RELATED_TEMPLATE.format_messages(
            llm=model.llm,
            max_questions=str(COUNT + SPARE),
            context_str=format_passages(shown),
            conversation=as_data("\n".join(turns[: 2 if answer.strip() else 1])),
        )
        reply = await model.chat(messages, deadline=deadline)
        choose = partial(_chosen, reply.text[:MAX_REPLY], shown, question)
        chosen: tuple[list[str], list[str]] = await Call(sync=choose, deadline=deadline, what="related questions")
    except Exception as error:  # noqa: BLE001 (the answer is valid without related questions)
        return [], [f"no related questions: {one_line(error_message(error), 200)}"]
    return chosen


def _chosen(text: str, shown: Sequence[Passage], question: str) -> tuple[list[str], list[str]]:
    """Return the accepted questions of a reply, and a warning that counts the rejected ones."""
    by_ref = {passage.ref_id: passage for passage in shown}
    asked, chosen = [frozenset(split_words(question))], []
    proposals = list(_proposals(text, shown[0].spotlight if shown else PLAIN))
    for proposal, ref_id, quote in proposals:
        words, passage = frozenset(split_words(proposal)), by_ref.get(ref_id)
        if passage is None or not 0 < len(proposal) <= MAX_QUESTION or not _holds(passage, quote):
            continue
        if any(len(words & other) >= SAME * len(words | other) for other in asked):
            continue
        asked.append(words)
        chosen.append(proposal)
    left_out = len(proposals) - len(chosen)
    why = "no passage was shown to answer them, or they were asked already"
    warnings = [f"{left_out} of {len(proposals)} related questions were left out: {why}"] if left_out else []
    return chosen[:COUNT], warnings


def _proposals(text: str, spotlight: Spotlight) -> Iterator[tuple[str, int, str]]:
    """Yield question, reference id and quote of each proposal; raise ``LLMError`` if the reply has no list of them."""
    value = read_json(text, "{[")
    if isinstance(value, dict):
        value = value.get("questions", value.get("related_questions"))
    if not isinstance(value, list):
        raise LLMError(f"the model's reply holds no questions: {one_line(text[:400], 80)!r}")
    for item in value:
        if not isinstance(item, dict):
            continue
        question, quote = item.get("question"), item.get("quote")
        digits = re.search(r"\d{1,6}", str(item.get("ref", item.get("ref_id")))[:40])
        if isinstance(question, str) and isinstance(quote, str) and digits is not None:
            yield plain_value(spotlight.unmarked(question)), int(digits.group()), spotlight.unmarked(quote)


def _holds(passage: Passage, quote: str) -> bool:
    """Return whether a passage, as stored or as in prompts, contains a quote of at least ``MIN_QUOTE_WORDS`` words."""
    folded = _folded(quote).strip(" .…\"'")
    if len(split_words(folded)) < MIN_QUOTE_WORDS:
        return False
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(folded)}(?![a-z0-9])")
    return any(pattern.search(_folded(text)) for text in (passage.content, as_data(passage.content)))


def _folded(text: str) -> str:
    """Normalize case, whitespace and punctuation, so that a quote matches its source."""
    return _UNSPACED.sub("", normalize(" ".join(text.translate(_SIGNS).split())))
