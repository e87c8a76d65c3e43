"""``simple_summarize``: one call over all passages, each cut to its share of the window."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.prompts import ANSWER_TEMPLATE
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft
from llama_index_agentic_kb.synthesizers.passages import share

__all__ = ["SimpleSummarize"]


class SimpleSummarize(AgenticSynthesizer):
    """Answers in one call that holds something of every passage; what short ones leave over goes to the others.

    Template: ``text_qa_template``.
    """

    mode = "simple_summarize"
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"text_qa_template": ANSWER_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.answer_at_once(share, self.templates["text_qa_template"])
