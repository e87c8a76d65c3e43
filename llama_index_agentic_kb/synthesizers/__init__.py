"""Synthesizers: from a question and its evidence to a response.

    modes            one call, or calls side by side: answerSynthesis, simple_summarize, accumulate, tree_summarize, ...
    refine           refine, compact: an answer improved from call to call
    extractive       without a model: extractiveData, context_only, no_text

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
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from llama_index_agentic_kb.errors import ConfigurationError

if TYPE_CHECKING:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from pydantic import BaseModel

    from llama_index_agentic_kb.guard.resilience import RetryPolicy
    from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer as AgenticSynthesizer
    from llama_index_agentic_kb.synthesizers.base import ProgramFactory
    from llama_index_agentic_kb.synthesizers.draft import Synthesis as Synthesis

MODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "extractiveData": "extractive.ExtractiveData",
        "answerSynthesis": "modes.AnswerSynthesis",
        "refine": "refine.Refine",
        "compact": "refine.Compact",
        "tree_summarize": "modes.TreeSummarize",
        "simple_summarize": "modes.SimpleSummarize",
        "accumulate": "modes.Accumulate",
        "compact_accumulate": "modes.CompactAccumulate",
        "generation": "modes.Generation",
        "no_text": "extractive.NoText",
        "context_only": "extractive.ContextOnly",
    }
)
"""The module and class of each mode."""

_HOMES = {"AgenticSynthesizer": "base", "Synthesis": "draft"}
_HOMES |= {cls: module for module, _, cls in (where.partition(".") for where in MODES.values())}

__all__ = ["MODES", "get_response_synthesizer", *sorted(_HOMES)]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import what is used (PEP 562): the base, and the class of each mode."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class OwnSettings(TypedDict, total=False):
    """The arguments of our synthesizers that LlamaIndex's function does not know; see ``AgenticSynthesizer``."""

    empty_response: str | None
    max_output_tokens: int | None
    retries: RetryPolicy | None
    spotlighting: str | None


class SynthesizerArguments(OwnSettings, total=False):
    """What ``get_response_synthesizer`` takes beside mode, streaming and callback manager."""

    llm: LLM | None
    prompt_helper: PromptHelper | None
    chat_prompt_helper: ChatPromptHelper | None
    text_qa_template: BasePromptTemplate | None
    refine_template: BasePromptTemplate | None
    summary_template: BasePromptTemplate | None
    simple_template: BasePromptTemplate | None
    chat_content_qa_template: BasePromptTemplate | None
    chat_content_refine_template: BasePromptTemplate | None
    chat_summary_template: BasePromptTemplate | None
    use_async: bool
    structured_answer_filtering: bool
    output_cls: type[BaseModel] | None
    program_factory: ProgramFactory | None
    verbose: bool
    multimodal: bool


def get_response_synthesizer(  # noqa: PLR0917 (LlamaIndex's signature)
    llm: LLM | None = None,
    prompt_helper: PromptHelper | None = None,
    chat_prompt_helper: ChatPromptHelper | None = None,
    text_qa_template: BasePromptTemplate | None = None,
    refine_template: BasePromptTemplate | None = None,
    summary_template: BasePromptTemplate | None = None,
    simple_template: BasePromptTemplate | None = None,
    chat_content_qa_template: BasePromptTemplate | None = None,  # noqa: ARG001 (of multimodal synthesis)
    chat_content_refine_template: BasePromptTemplate | None = None,  # noqa: ARG001 (same)
    chat_summary_template: BasePromptTemplate | None = None,  # noqa: ARG001 (same)
    response_mode: str | Enum = "compact",
    callback_manager: CallbackManager | None = None,
    use_async: bool = False,  # noqa: ARG001 (calls that can run side by side always do)
    streaming: bool = False,
    structured_answer_filtering: bool = False,
    output_cls: type[BaseModel] | None = None,
    program_factory: ProgramFactory | None = None,
    verbose: bool = False,
    multimodal: bool = False,
    **settings: Unpack[OwnSettings],
) -> AgenticSynthesizer:
    """Return a synthesizer; arguments and their order are those of LlamaIndex's function of this name.

    They are described at ``AgenticSynthesizer``. A template that the mode has no use for is let go, as in LlamaIndex.

    Args:
        llm: None is ``Settings.llm``, in modes that need one.
        prompt_helper: Its sizes are kept to.
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
        use_async: Taken and not needed.
        streaming: Whether responses stream.
        structured_answer_filtering: Of refine and compact.
        output_cls: The pydantic class of the object that is wanted in place of text.
        program_factory: Of refine and compact, with structured answer filtering.
        verbose: Whether each synthesis is logged.
        multimodal: Not supported: True is refused.
        settings: See ``OwnSettings``.

    Raises:
        ConfigurationError: The mode is unknown or can't do what is asked, or there is no LLM and it needs one.
    """
    asked = str(response_mode.value if isinstance(response_mode, Enum) else response_mode)
    known = {_plain(name): where for name, where in MODES.items()}
    if _plain(asked) not in known:
        raise ConfigurationError(f"response_mode: {asked!r} is unknown; known are {', '.join(MODES)}")
    cls: type[AgenticSynthesizer] = __getattr__(known[_plain(asked)].partition(".")[2])
    templates: dict[str, Any] = {
        "text_qa_template": text_qa_template,
        "refine_template": refine_template,
        "summary_template": summary_template,
        "simple_template": simple_template,
    }
    return cls(
        llm,
        callback_manager,
        prompt_helper,
        chat_prompt_helper,
        streaming=streaming,
        output_cls=output_cls,
        structured_answer_filtering=structured_answer_filtering,
        program_factory=program_factory,
        verbose=verbose,
        multimodal=multimodal,
        **{key: template for key, template in templates.items() if key in cls.default_templates},
        **settings,
    )


def _plain(name: str) -> str:
    """``answerSynthesis``, ``answer_synthesis`` and ``answer-synthesis`` are one name."""
    return name.replace("_", "").replace("-", "").lower()
