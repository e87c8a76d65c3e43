"""Google's AnswerQueryRequest (Discovery Engine v1), read into an ``AnswerQuery``.

Every field of v1 is read; what this library can't act on is kept as data (``Boost.control``,
``custom_search_operators``). ``asynchronousMode`` is refused, as the live service does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field, ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.answer import HarmCategory, QueryClass
from llama_index_agentic_kb.schema.answer_query import (
    AnswerQuery,
    EndUserChunk,
    FilteringLevel,
    HarmBlockThreshold,
    Rephrasing,
    SafetySetting,
)
from llama_index_agentic_kb.schema.request import Message, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.wire.google_enums import (
    BLOCK_THRESHOLD,
    FILTERING_LEVEL,
    HARM_CATEGORY,
    QUERY_CLASS,
    REPHRASER_MODEL,
)
from llama_index_agentic_kb.wire.google_fields import Flag, Int32, Labels, Text, WireMessage, at_most, enum, load
from llama_index_agentic_kb.wire.google_names import parse_serving_config, parse_session_name
from llama_index_agentic_kb.wire.google_search_spec import SearchSpec, provided_results, search_fields

__all__ = ["decode_answer_query"]

DEFAULT_RESULTS: Final = 10
"""Google's ``maxReturnResults`` where it is not set."""
MAX_END_USER_CHARACTERS: Final = 8_000
MAX_USER_PSEUDO_ID: Final = 128


class Query(WireMessage):
    text: Text = ""
    query_id: Text = ""


class _SafetySetting(WireMessage):
    category: Annotated[HarmCategory | None, enum(HARM_CATEGORY)] = None
    threshold: Annotated[HarmBlockThreshold | None, enum(BLOCK_THRESHOLD)] = None


class _SafetySpec(WireMessage):
    enable: Flag = False
    safety_settings: list[_SafetySetting] = Field(default_factory=list)


class _RelatedQuestionsSpec(WireMessage):
    enable: Flag = False


class _GroundingSpec(WireMessage):
    include_grounding_supports: Flag = False
    filtering_level: Annotated[FilteringLevel | None, enum(FILTERING_LEVEL)] = None


class _ModelSpec(WireMessage):
    model_version: Text = ""


class _PromptSpec(WireMessage):
    preamble: Text = ""


class _AnswerGenerationSpec(WireMessage):
    model_spec: _ModelSpec = Field(default_factory=_ModelSpec)
    prompt_spec: _PromptSpec = Field(default_factory=_PromptSpec)
    include_citations: Flag = False
    answer_language_code: Text = ""
    ignore_adversarial_query: Flag = False
    ignore_non_answer_seeking_query: Flag = False
    ignore_low_relevant_content: Flag | None = None
    ignore_jail_breaking_query: Flag = False


_ClassType: TypeAlias = Annotated[QueryClass | None, enum(QUERY_CLASS)]


class _QueryClassificationSpec(WireMessage):
    types: list[_ClassType] = Field(default_factory=list)


class _RephraserModelSpec(WireMessage):
    model_type: Annotated[str | None, enum(REPHRASER_MODEL)] = None


class _QueryRephraserSpec(WireMessage):
    disable: Flag = False
    max_rephrase_steps: Annotated[Int32, Field(ge=0, le=5)] = 0
    model_spec: _RephraserModelSpec = Field(default_factory=_RephraserModelSpec)


class _QueryUnderstandingSpec(WireMessage):
    query_classification_spec: _QueryClassificationSpec = Field(default_factory=_QueryClassificationSpec)
    query_rephraser_spec: _QueryRephraserSpec = Field(default_factory=_QueryRephraserSpec)
    disable_spell_correction: Flag = False


class _EndUserDocumentMetadata(WireMessage):
    title: Text = ""


class _EndUserChunkInfo(WireMessage):
    content: Annotated[Text, at_most(MAX_END_USER_CHARACTERS)] = ""
    document_metadata: _EndUserDocumentMetadata = Field(default_factory=_EndUserDocumentMetadata)


class _EndUserMetaData(WireMessage):
    chunk_info: _EndUserChunkInfo | None = None


class _EndUserSpec(WireMessage):
    end_user_metadata: list[_EndUserMetaData] = Field(default_factory=list)


class _AnswerQueryRequest(WireMessage):
    serving_config: Text = ""
    query: Query = Field(default_factory=Query)
    session: Text = ""
    safety_spec: _SafetySpec = Field(default_factory=_SafetySpec)
    related_questions_spec: _RelatedQuestionsSpec = Field(default_factory=_RelatedQuestionsSpec)
    grounding_spec: _GroundingSpec = Field(default_factory=_GroundingSpec)
    answer_generation_spec: _AnswerGenerationSpec = Field(default_factory=_AnswerGenerationSpec)
    search_spec: SearchSpec = Field(default_factory=SearchSpec)
    query_understanding_spec: _QueryUnderstandingSpec = Field(default_factory=_QueryUnderstandingSpec)
    asynchronous_mode: Flag = False
    user_pseudo_id: Annotated[Text, at_most(MAX_USER_PSEUDO_ID)] = ""
    user_labels: Labels = Field(default_factory=dict)
    end_user_spec: _EndUserSpec = Field(default_factory=_EndUserSpec)


def decode_answer_query(
    body: Any, *, serving_config: str | None = None, list_fields: Collection[str] = ()
) -> AnswerQuery:
    """Read the request of ``:answer`` and ``:streamAnswer``.

    Args:
        body: JSON text, or its data.
        serving_config: The resource name in the request's path.
        list_fields: Metadata keys that hold lists; ``field: ANY("a")`` then looks at their items.

    Raises:
        InvalidRequestError: It is no such request, is out of a range, or asks for what can't be done; the message
            names the field.
    """
    sent = _AnswerQueryRequest.parse(load(body))
    if sent.asynchronous_mode:
        raise InvalidRequestError("asynchronousMode: asynchronous mode is deprecated.")
    if not sent.query.text.strip():
        raise InvalidRequestError("query.text: a question is needed")
    config = _agreed(serving_config, sent.serving_config)
    try:
        return AnswerQuery(
            request=_retrieval_request(sent),
            query_id=sent.query.query_id,
            serving_config=str(parse_serving_config(config)) if config else None,
            **_session_fields(sent),
            **search_fields(sent.search_spec, list_fields),
            search_results=provided_results(sent.search_spec),
            end_user_chunks=_end_user_chunks(sent),
            user_pseudo_id=sent.user_pseudo_id,
            user_labels=sent.user_labels,
            **_understanding_fields(sent.query_understanding_spec),
            **_generation_fields(sent.answer_generation_spec),
            related_questions=sent.related_questions_spec.enable,
            grounding_supports=sent.grounding_spec.include_grounding_supports,
            filtering_level=sent.grounding_spec.filtering_level,
            safety=sent.safety_spec.enable,
            safety_settings=_safety_settings(sent.safety_spec),
        )
    except ValidationError as error:
        raise InvalidRequestError(describe(error)) from error


def _agreed(path: str | None, body: str) -> str | None:
    if path and body and path != body:
        raise InvalidRequestError("servingConfig: the body names another one than the request's path")
    return path or body or None


def _retrieval_request(sent: _AnswerQueryRequest) -> RetrievalRequest:
    params = sent.search_spec.search_params
    rephraser = sent.query_understanding_spec.query_rephraser_spec
    return RetrievalRequest(
        messages=[Message.model_validate({"role": "user", "content": sent.query.text})],
        retrieval_reasoning_effort=ReasoningEffort.MINIMAL if rephraser.disable else None,
        max_output_documents=(params.max_return_results if params else 0) or DEFAULT_RESULTS,
    )


def _session_fields(sent: _AnswerQueryRequest) -> dict[str, Any]:
    if not sent.session:
        return {}
    name = parse_session_name(sent.session)
    return {"session": name.id, "session_name": str(name)}


def _understanding_fields(spec: _QueryUnderstandingSpec) -> dict[str, Any]:
    rephraser = spec.query_rephraser_spec
    wanted = [one for one in spec.query_classification_spec.types if one is not None]
    return {
        "classify": list(dict.fromkeys(wanted)),
        "rephrasing": Rephrasing(
            disabled=rephraser.disable,
            max_steps=rephraser.max_rephrase_steps or 1,
            large_model=rephraser.model_spec.model_type != "small",
        ),
        "spell_correction": not spec.disable_spell_correction,
    }


def _generation_fields(spec: _AnswerGenerationSpec) -> dict[str, Any]:
    return {
        "model_version": spec.model_spec.model_version,
        "preamble": spec.prompt_spec.preamble,
        "language": spec.answer_language_code or None,
        "include_citations": spec.include_citations,
        "ignore_adversarial_query": spec.ignore_adversarial_query,
        "ignore_non_answer_seeking_query": spec.ignore_non_answer_seeking_query,
        "ignore_jail_breaking_query": spec.ignore_jail_breaking_query,
        "ignore_low_relevant_content": spec.ignore_low_relevant_content,
    }


def _end_user_chunks(sent: _AnswerQueryRequest) -> list[EndUserChunk]:
    given = [one.chunk_info for one in sent.end_user_spec.end_user_metadata if one.chunk_info is not None]
    return [EndUserChunk(content=one.content, title=one.document_metadata.title) for one in given]


def _safety_settings(spec: _SafetySpec) -> list[SafetySetting]:
    settings = []
    for position, one in enumerate(spec.safety_settings):
        if one.category is None or one.threshold is None:
            raise InvalidRequestError(f"safetySpec.safetySettings.{position}: category and threshold are both needed")
        settings.append(SafetySetting(category=one.category, threshold=one.threshold))
    return settings
