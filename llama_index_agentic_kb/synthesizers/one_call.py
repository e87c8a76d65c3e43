"""Modes of one call: ``answerSynthesis``, ``simple_summarize``, ``generation``."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.prompts import ANSWER_TEMPLATE, SIMPLE_TEMPLATE
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import fit, share

__all__ = ["AnswerSynthesis", "Generation", "SimpleSummarize"]


class AnswerSynthesis(AgenticSynthesizer):
    """Answers in one call and cites with ``[ref_id:N]`` markers.

    Passages are taken in order as long as they fit into the model's window; the one that overflows is cut at a
    sentence end, and what doesn't fit at all is counted. Template: ``text_qa_template``.
    """

    mode = "answerSynthesis"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.answer_at_once(fit, self.templates["text_qa_template"])


class SimpleSummarize(AgenticSynthesizer):
    """Answers in one call that holds a share of every passage; short passages leave room to the others.

    Template: ``text_qa_template``.
    """

    mode = "simple_summarize"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.answer_at_once(share, self.templates["text_qa_template"])


class Generation(AgenticSynthesizer):
    """Asks the model the question alone, also without nodes; its answer cites nothing. Template: ``simple_template``.

    The nodes stay the response's source nodes, as in LlamaIndex.
    """

    mode = "generation"
    needs_nodes = False
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"simple_template": SIMPLE_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.finish(self.templates["simple_template"], ())
