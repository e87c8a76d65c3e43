"""Synthesizers: from a question and its evidence to a response.

    extractive       without a model: extractiveData, context_only, no_text; partial answers in place of late ones
    one_call         answerSynthesis, simple_summarize, generation
    refine           refine, compact: an answer improved from call to call
    tree_summarize   answers of answers
    accumulate       accumulate, compact_accumulate: an answer for each passage

    base             what modes share, with LlamaIndex's public methods
    draft            an answer in the making: prompts, calls, accounts
    passages         nodes as passages; cut, shared out, packed
    structured       objects instead of text

A new mode is a subclass of ``AgenticSynthesizer`` and a line in ``MODES``. Nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from llama_index_agentic_kb.errors import ConfigurationError

if TYPE_CHECKING:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from pydantic import BaseModel

    from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer as AgenticSynthesizer
    from llama_index_agentic_kb.synthesizers.base import Synthesis as Synthesis
    from llama_index_agentic_kb.synthesizers.refine import ProgramFactory

MODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "extractiveData": "extractive.ExtractiveData",
        "answerSynthesis": "one_call.AnswerSynthesis",
        "refine": "refine.Refine",
        "compact": "refine.Compact",
        "tree_summarize": "tree_summarize.TreeSummarize",
        "simple_summarize": "one_call.SimpleSummarize",
        "accumulate": "accumulate.Accumulate",
        "compact_accumulate": "accumulate.CompactAccumulate",
        "generation": "one_call.Generation",
        "no_text": "extractive.NoText",
        "context_only": "extractive.ContextOnly",
    }
)
"""The module and class of each mode."""

_HOMES = {"AgenticSynthesizer": "base", "Synthesis": "base"}
_HOMES |= {cls: module for module, _, cls in (where.partition(".") for where in MODES.values())}

__all__ = ["MODES", "get_response_synthesizer", *sorted(_HOMES)]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import what is used (PEP 562): the base, and the class of each mode."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def get_response_synthesizer(  # noqa: PLR0917 (LlamaIndex's signature)
    llm: LLM | None = None,
    prompt_helper: PromptHelper | None = None,
    chat_prompt_helper: ChatPromptHelper | None = None,
    text_qa_template: BasePromptTemplate | None = None,
    refine_template: BasePromptTemplate | None = None,
    summary_template: BasePromptTemplate | None = None,
    simple_template: BasePromptTemplate | None = None,
    chat_content_qa_template: BasePromptTemplate | None = None,
    chat_content_refine_template: BasePromptTemplate | None = None,
    chat_summary_template: BasePromptTemplate | None = None,
    response_mode: str | Enum = "compact",
    callback_manager: CallbackManager | None = None,
    use_async: bool = False,
    streaming: bool = False,
    structured_answer_filtering: bool = False,
    output_cls: type[BaseModel] | None = None,
    program_factory: ProgramFactory | None = None,
    verbose: bool = False,
    multimodal: bool = False,
    **settings: Any,
) -> AgenticSynthesizer:
    """Return a synthesizer; arguments and their order are those of LlamaIndex's function of this name.

    Args:
        llm: None is ``Settings.llm``, in modes that need one.
        prompt_helper: Its sizes are kept to; None asks the LLM's metadata.
        chat_prompt_helper: As LlamaIndex takes it.
        text_qa_template: Of answerSynthesis, refine, compact, simple_summarize and the accumulating modes.
        refine_template: Of refine and compact.
        summary_template: Of tree_summarize.
        simple_template: Of generation.
        chat_content_qa_template: Only multimodal synthesis would use it.
        chat_content_refine_template: Same.
        chat_summary_template: Same.
        response_mode: A name in ``MODES``, or a value of ``OutputMode`` or of LlamaIndex's ``ResponseMode``.
        callback_manager: None is ``Settings.callback_manager``.
        use_async: Taken and not needed: calls that can run side by side always do.
        streaming: Whether responses stream.
        structured_answer_filtering: Of refine and compact: steps whose passages don't satisfy are skipped.
        output_cls: The pydantic class of the object that is wanted in place of text.
        program_factory: Of refine and compact, with structured answer filtering.
        verbose: Whether each synthesis is logged.
        multimodal: Not supported: True is refused.
        settings: ``empty_response``, ``max_output_tokens``, ``retries``.

    Raises:
        ConfigurationError: The mode is unknown or can't do what is asked, or there is no LLM and it needs one.
    """
    del chat_content_qa_template, chat_content_refine_template, chat_summary_template, use_async
    cls = _mode_class(response_mode)
    templates: dict[str, Any] = {
        "text_qa_template": text_qa_template,
        "refine_template": refine_template,
        "summary_template": summary_template,
        "simple_template": simple_template,
    }
    if structured_answer_filtering or program_factory is not None:
        if "refine_template" not in cls.default_templates:
            raise ConfigurationError(f"structured_answer_filtering: mode {cls.mode!r} has no steps to filter")
        settings |= {"structured_answer_filtering": structured_answer_filtering, "program_factory": program_factory}
    return cls(
        llm,
        prompt_helper=prompt_helper,
        chat_prompt_helper=chat_prompt_helper,
        callback_manager=callback_manager,
        streaming=streaming,
        output_cls=output_cls,
        verbose=verbose,
        multimodal=multimodal,
        **{key: template for key, template in templates.items() if key in cls.default_templates},
        **settings,
    )


def _mode_class(response_mode: str | Enum) -> type[AgenticSynthesizer]:
    asked = response_mode.value if isinstance(response_mode, Enum) else response_mode
    known = {_plain(name): where for name, where in MODES.items()}
    where = known.get(_plain(str(asked)))
    if where is None:
        raise ConfigurationError(f"response_mode: {asked!r} is unknown; known are {', '.join(MODES)}")
    module, name = where.split(".")
    cls: type[AgenticSynthesizer] = getattr(import_module(f"llama_index_agentic_kb.synthesizers.{module}"), name)
    return cls


def _plain(name: str) -> str:
    """``answerSynthesis``, ``answer_synthesis`` and ``answer-synthesis`` are one name."""
    return name.replace("_", "").replace("-", "").lower()
