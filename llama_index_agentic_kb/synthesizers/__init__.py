"""Synthesizers: from a question and its evidence to a response, one mode a module.

    factory           get_response_synthesizer: the mode by its name
    extractive        extractiveData: the passages as JSON, no language model
    answer            answerSynthesis: one call, one cited answer
    refine · compact  an answer improved from call to call
    tree_summarize    answers of answers
    simple_summarize · accumulate · compact_accumulate · generation · no_text · context_only   as in LlamaIndex

    base              what modes share · responses: LlamaIndex's public methods around one flow
    draft             an answer in the making: prompts, calls, accounts · parallel: calls side by side
    passages          nodes as passages; cut, shared out, packed · structured: objects instead of text
    remarks           a refined answer, or a remark that nothing changed

Nothing is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index_agentic_kb.synthesizers.accumulate import Accumulate
    from llama_index_agentic_kb.synthesizers.answer import AnswerSynthesis
    from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer, Synthesis
    from llama_index_agentic_kb.synthesizers.compact import Compact
    from llama_index_agentic_kb.synthesizers.compact_accumulate import CompactAccumulate
    from llama_index_agentic_kb.synthesizers.context_only import ContextOnly
    from llama_index_agentic_kb.synthesizers.extractive import ExtractiveData
    from llama_index_agentic_kb.synthesizers.factory import MODES, get_response_synthesizer
    from llama_index_agentic_kb.synthesizers.generation import Generation
    from llama_index_agentic_kb.synthesizers.no_text import NoText
    from llama_index_agentic_kb.synthesizers.refine import Refine
    from llama_index_agentic_kb.synthesizers.simple_summarize import SimpleSummarize
    from llama_index_agentic_kb.synthesizers.tree_summarize import TreeSummarize

_MODULES = {
    "Accumulate": "accumulate",
    "AgenticSynthesizer": "base",
    "AnswerSynthesis": "answer",
    "Compact": "compact",
    "CompactAccumulate": "compact_accumulate",
    "ContextOnly": "context_only",
    "ExtractiveData": "extractive",
    "Generation": "generation",
    "MODES": "factory",
    "NoText": "no_text",
    "Refine": "refine",
    "SimpleSummarize": "simple_summarize",
    "Synthesis": "base",
    "TreeSummarize": "tree_summarize",
    "get_response_synthesizer": "factory",
}

__all__ = [
    "MODES",
    "Accumulate",
    "AgenticSynthesizer",
    "AnswerSynthesis",
    "Compact",
    "CompactAccumulate",
    "ContextOnly",
    "ExtractiveData",
    "Generation",
    "NoText",
    "Refine",
    "SimpleSummarize",
    "Synthesis",
    "TreeSummarize",
    "get_response_synthesizer",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
