from __future__ import annotations

import inspect
import subprocess
import sys
from enum import Enum

import pytest
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.response_synthesizers import get_response_synthesizer as cores
from pydantic import BaseModel

import llama_index_agentic_kb.synthesizers as room
from llama_index_agentic_kb.errors import ConfigurationError
from llama_index_agentic_kb.schema import OutputMode
from llama_index_agentic_kb.synthesizers import MODES, get_response_synthesizer
from llama_index_agentic_kb.testing import ScriptedLLM


class Thing(BaseModel):
    name: str


@pytest.mark.parametrize("mode", [*MODES, *OutputMode, *ResponseMode])
def test_every_mode_has_its_synthesizer(mode: str) -> None:
    """Our names, output modes and LlamaIndex's response modes all make the mode of that name."""
    name = mode.value if isinstance(mode, Enum) else mode
    synthesizer = get_response_synthesizer(ScriptedLLM(), response_mode=mode)
    assert synthesizer.mode == name
    assert type(synthesizer).__name__ in room.__all__


def test_an_unknown_mode_is_refused() -> None:
    """The message lists the known ones."""
    with pytest.raises(
        ConfigurationError, match="'haiku' is unknown; known are extractiveData, answerSynthesis, refine"
    ):
        get_response_synthesizer(ScriptedLLM(), response_mode="haiku")


def test_every_argument_of_llamaindex_is_taken() -> None:
    """By its name; the model comes first here too."""
    named = {*inspect.signature(get_response_synthesizer).parameters, *room.SynthesizerArguments.__annotations__}
    assert next(iter(inspect.signature(cores).parameters)) == "llm"
    assert set(inspect.signature(cores).parameters) <= named


def test_templates_go_where_they_are_used() -> None:
    """A template that the mode has no use for is let go, as in LlamaIndex."""
    template = PromptTemplate("mine")
    made = get_response_synthesizer(
        ScriptedLLM(), response_mode="tree_summarize", text_qa_template=template, summary_template=template
    )
    assert made.get_prompts() == {"summary_template": template}
    made = get_response_synthesizer(ScriptedLLM(), refine_template=template, chat_summary_template=template)
    assert made.get_prompts()["refine_template"] == template
    with pytest.raises(ConfigurationError, match="qa_template"):
        get_response_synthesizer(ScriptedLLM(), qa_template=template)  # type: ignore[call-arg]


def test_settings_of_our_own_go_through() -> None:
    """Budget and empty response are arguments too; what nobody knows is refused."""
    made = get_response_synthesizer(ScriptedLLM(), max_output_tokens=9, empty_response="None.", use_async=True)
    assert str(made.synthesize("?", [])) == "None."
    assert made.max_output_tokens == 9
    with pytest.raises(ConfigurationError, match="unknown argument: tone"):
        get_response_synthesizer(ScriptedLLM(), tone="dry")  # type: ignore[call-arg]


def test_what_a_mode_can_not_do_is_refused() -> None:
    """Rather than ignored."""
    with pytest.raises(ConfigurationError, match="structured_answer_filtering: mode 'accumulate' has no steps"):
        get_response_synthesizer(ScriptedLLM(), response_mode="accumulate", structured_answer_filtering=True)
    with pytest.raises(ConfigurationError, match="output_cls: mode 'extractiveData' makes text only"):
        get_response_synthesizer(response_mode="extractiveData", output_cls=Thing)
    with pytest.raises(ConfigurationError, match="multimodal"):
        get_response_synthesizer(ScriptedLLM(), multimodal=True)
    made = get_response_synthesizer(ScriptedLLM(), response_mode="refine", structured_answer_filtering=True)
    assert made.mode == "refine"


def test_the_room_is_light() -> None:
    """Importing the package loads no mode and no LlamaIndex; every name resolves."""
    code = (
        "import sys, llama_index_agentic_kb.synthesizers\n"
        "heavy = {'llama_index.core', 'pydantic', 'pysbd', 'tiktoken'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
    assert all(getattr(room, name) for name in dir(room))
    with pytest.raises(AttributeError, match="no attribute 'haiku'"):
        _ = room.haiku


@pytest.mark.parametrize("name", sorted({where.partition(".")[2] for where in MODES.values()}))
def test_classes_take_llama_index_s_arguments(name: str) -> None:
    """Those of its constructors, the first four by position; what is not needed is let go."""
    manager, helper = CallbackManager([]), PromptHelper(context_window=4_000)
    made = getattr(room, name)(
        ScriptedLLM(),
        manager,
        helper,
        None,
        streaming=True,
        use_async=True,
        response_padding_size=5,
        strict_truncation=True,
        chat_content_qa_template=PromptTemplate("x"),
    )
    assert made._streaming
    assert made._prompt_helper is helper
