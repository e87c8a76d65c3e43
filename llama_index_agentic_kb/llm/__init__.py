"""Calls to language models, with a deadline, retries and token usage; the package calls models only through this.

A failed call and an unusable reply raise ``LLMError``; the planner and the synthesizers decide how to handle it.
``openai_compatible`` is not imported here, because it loads the OpenAI client.
"""

from llama_index_agentic_kb.llm.calls import (
    count_tokens,
    is_function_calling,
    model_name,
    of_any_name,
    resolve_llm,
    structured_output,
    tokens_of,
    warm_up_llm,
)
from llama_index_agentic_kb.llm.model import FALLBACK_CONTEXT_WINDOW, LanguageModel, billed, metered, recorded_calls
from llama_index_agentic_kb.llm.replies import (
    CUT_SHORT,
    Reply,
    Usage,
    parsed,
    read_json,
    refuses_form,
    repair_json,
    strip_code_fence,
)

__all__ = [
    "CUT_SHORT",
    "FALLBACK_CONTEXT_WINDOW",
    "LanguageModel",
    "Reply",
    "Usage",
    "billed",
    "count_tokens",
    "is_function_calling",
    "metered",
    "model_name",
    "of_any_name",
    "parsed",
    "read_json",
    "recorded_calls",
    "refuses_form",
    "repair_json",
    "resolve_llm",
    "strip_code_fence",
    "structured_output",
    "tokens_of",
    "warm_up_llm",
]
