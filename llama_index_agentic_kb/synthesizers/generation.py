"""``generation``: the model alone, without evidence."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.prompts import SIMPLE_TEMPLATE
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Draft

__all__ = ["Generation"]


class Generation(AgenticSynthesizer):
    """Asks the model the question alone, also without nodes; its answer cites nothing. Template: ``simple_template``.

    The nodes stay the response's source nodes, as in LlamaIndex.
    """

    mode = "generation"
    needs_nodes = False
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {"simple_template": SIMPLE_TEMPLATE}

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        return draft.finish(self.templates["simple_template"], ())
