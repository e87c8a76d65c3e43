"""Response synthesizers: from a question and its evidence to a response.

    modes            one call, or concurrent calls: answerSynthesis, simple_summarize, accumulate, tree_summarize, ...
                     no call: extractiveData, context_only, no_text
    refine           refine, compact: each call improves the previous answer

    base             the base class of all modes, with LlamaIndex's public methods
    draft            the state of one synthesis: prompts, model calls, token usage
    passages         nodes as passages; truncated, selected by budget, packed into prompts
    structured       objects instead of text

To add a mode, subclass ``AgenticSynthesizer`` and add a line to ``MODES``. Modules are imported on first use.
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
        "extractiveData": "modes.ExtractiveData",
        "answerSynthesis": "modes.AnswerSynthesis",
        "refine": "refine.Refine",
        "compact": "refine.Compact",
        "tree_summarize": "modes.TreeSummarize",
        "simple_summarize": "modes.SimpleSummarize",
        "accumulate": "modes.Accumulate",
        "compact_accumulate": "modes.CompactAccumulate",
        "generation": "modes.Generation",
        "no_text": "modes.NoText",
        "context_only": "modes.ContextOnly",
    }
)
"""The module and class name of each response mode."""

_HOMES = {"AgenticSynthesizer": "base", "Synthesis": "draft"}
_HOMES |= {cls: module for module, _, cls in (where.partition(".") for where in MODES.values())}

__all__ = ["MODES", "get_response_synthesizer", *sorted(_HOMES)]  # noqa: PLE0604 (a list of names, computed once)


def __getattr__(name: str) -> Any:
    """Import the base class or the class of a mode on first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class SynthesizerArguments(TypedDict, total=False):
    """Further arguments of ``get_response_synthesizer``; see ``AgenticSynthesizer``."""

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
    empty_response: str | None
    max_output_tokens: int | None
    retries: RetryPolicy | None
    spotlighting: str | None


def get_response_synthesizer(
    llm: LLM | None = None,
    *,
    response_mode: str | Enum = "compact",
    callback_manager: CallbackManager | None = None,
    streaming: bool = False,
    **arguments: Unpack[SynthesizerArguments],
) -> AgenticSynthesizer:
    """Return the synthesizer of a response mode, with the arguments of LlamaIndex's function, by name.

    Args:
        llm: The language model. Defaults to ``Settings.llm`` in modes that need one.
        response_mode: A name in ``MODES``, or a value of ``OutputMode`` or of LlamaIndex's ``ResponseMode``.
        callback_manager: The callback manager. Defaults to ``Settings.callback_manager``.
        streaming: Whether to stream responses.
        arguments: Further arguments of ``AgenticSynthesizer``. As in LlamaIndex, templates that the mode does not use
            are ignored.

    Raises:
        ConfigurationError: The mode is unknown, does not support an argument, or needs an LLM and none is configured.
    """
    asked = str(response_mode.value if isinstance(response_mode, Enum) else response_mode)
    known = {_plain(name): where for name, where in MODES.items()}
    if _plain(asked) not in known:
        raise ConfigurationError(f"response_mode: {asked!r} is unknown; known are {', '.join(MODES)}")
    cls: type[AgenticSynthesizer] = __getattr__(known[_plain(asked)].partition(".")[2])
    templates = {key for key in SynthesizerArguments.__annotations__ if key.endswith("_template")}
    unused = templates - cls.default_templates.keys()
    own: dict[str, Any] = {key: value for key, value in arguments.items() if key not in unused}
    return cls(llm, callback_manager, streaming=streaming, **own)


def _plain(name: str) -> str:
    """Normalize a mode name: ``answerSynthesis``, ``answer_synthesis`` and ``answer-synthesis`` become the same."""
    return name.replace("_", "").replace("-", "").lower()
