"""What has a language model read passages: the model, the prompt, and how passages are marked in it."""

from __future__ import annotations

from typing import ClassVar

from llama_index.core.prompts import BasePromptTemplate

from llama_index_agentic_kb.guard.spotlighting import Spotlighting
from llama_index_agentic_kb.llm import LanguageModel

__all__ = ["PassageReader"]


class PassageReader:
    """Asks a language model about passages.

    Args:
        model: The language model.
        template: The prompt; None is the class's ``default_template``.
        spotlighting: How passages are marked as data; see ``guard.spotlighting``.
    """

    default_template: ClassVar[BasePromptTemplate]

    def __init__(
        self,
        model: LanguageModel,
        template: BasePromptTemplate | None = None,
        *,
        spotlighting: Spotlighting | None = "delimit",
    ) -> None:
        self.model = model
        self.template = template or self.default_template
        self.spotlighting = spotlighting
