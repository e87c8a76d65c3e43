"""Response synthesizers: from a question and its evidence to a response.

    modes         one call, concurrent calls, or a chain of calls that improve the answer; no call for extracted data
    base          the base class of all modes, with LlamaIndex's public methods; nodes as passages
    draft         the state of one synthesis: prompts, model calls, token usage; objects instead of text
    passages      passages truncated, selected by budget, packed into prompts

To add a mode, subclass ``AgenticSynthesizer`` and add the class to the list of ``MODES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM

from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.synthesizers import modes
from llama_index_agentic_kb.synthesizers.base import AgenticSynthesizer as AgenticSynthesizer
from llama_index_agentic_kb.synthesizers.draft import Synthesis as Synthesis

MODES: Final[Mapping[str, type[AgenticSynthesizer]]] = MappingProxyType(
    {
        cls.mode: cls
        for cls in (
            modes.ExtractiveData,
            modes.AnswerSynthesis,
            modes.Refine,
            modes.Compact,
            modes.TreeSummarize,
            modes.SimpleSummarize,
            modes.Accumulate,
            modes.CompactAccumulate,
            modes.Generation,
            modes.NoText,
            modes.ContextOnly,
        )
    }
)
"""The class of each response mode."""


def get_response_synthesizer(
    llm: LLM | None = None,
    *,
    response_mode: str | Enum = "compact",
    callback_manager: CallbackManager | None = None,
    streaming: bool = False,
    **arguments: Any,
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
    cls = {_plain(name): cls for name, cls in MODES.items()}.get(_plain(asked))
    if cls is None:
        raise ConfigurationError(f"response_mode: {asked!r} is unknown; known are {', '.join(MODES)}")
    unused = {key for other in MODES.values() for key in other.default_templates.keys() - cls.default_templates.keys()}
    own = {key: value for key, value in arguments.items() if key not in unused}
    return cls(llm, callback_manager, streaming=streaming, **own)


def _plain(name: str) -> str:
    """Normalize a mode name: ``answerSynthesis``, ``answer_synthesis`` and ``answer-synthesis`` become the same."""
    return name.replace("_", "").replace("-", "").lower()
