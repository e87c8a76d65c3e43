"""Google's AnswerQueryRequest (Discovery Engine v1), read into an ``AnswerQuery``.

Every field of v1 is read; what this library can't act on is kept as data (``Boost.control``,
``custom_search_operators``). ``asynchronousMode`` is refused, as the live service does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from pydantic import ValidationError

from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.answer import (
    AnswerReference,
    ChunkContent,
    ChunkReference,
    DocumentReference,
    HarmCategory,
    QueryClass,
)
from llama_index_agentic_kb.schema.answer_query import (
    AnswerQuery,
    Boost,
    BoostControl,
    ControlPoint,
    DataStoreQuery,
    EndUserChunk,
    FilteringLevel,
    HarmBlockThreshold,
    Rephrasing,
    ResultMode,
    SafetySetting,
)
from llama_index_agentic_kb.schema.request import Message, ReasoningEffort, RetrievalRequest
from llama_index_agentic_kb.wire._proto import Fields, ProtoMessage, member, read
from llama_index_agentic_kb.wire.google_filter import parse_filter
from llama_index_agentic_kb.wire.google_names import parse_parent, parse_serving_config, parse_session_name

__all__ = ["decode_answer_query"]

DEFAULT_RESULTS: Final = 10
"""Google's ``maxReturnResults`` where it is not set."""
_SMALL_MODEL: Final = 1
_FRESHNESS: Final = 2


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
    sent = read("AnswerQueryRequest", body)
    if sent.asynchronous_mode:
        raise InvalidRequestError("asynchronousMode: asynchronous mode is deprecated.")
    if not sent.query.text.strip():
        raise InvalidRequestError("query.text: a question is needed")
    if serving_config and sent.serving_config not in ("", serving_config):
        raise InvalidRequestError("servingConfig: the body names another one than the request's path")
    if config := serving_config or sent.serving_config:
        parse_serving_config(config)
    session = parse_session_name(sent.session) if sent.session else None
    try:
        return AnswerQuery(
            request=_retrieval_request(sent),
            query_id=sent.query.query_id,
            serving_config=config or None,
            session=session.id if session else None,
            session_name=str(session) if session else None,
            user_pseudo_id=sent.user_pseudo_id,
            user_labels=dict(sent.user_labels),
            end_user_chunks=[
                EndUserChunk(content=one.chunk_info.content, title=one.chunk_info.document_metadata.title)
                for one in sent.end_user_spec.end_user_metadata
                if one.HasField("chunk_info")
            ],
            **_search_fields(sent.search_spec, list_fields),
            **_understanding_fields(sent.query_understanding_spec),
            **_generation_fields(sent.answer_generation_spec),
            related_questions=sent.related_questions_spec.enable,
            grounding_supports=sent.grounding_spec.include_grounding_supports,
            filtering_level=member(FilteringLevel, sent.grounding_spec.filtering_level),
            safety=sent.safety_spec.enable,
            safety_settings=_safety_settings(sent.safety_spec),
        )
    except ValidationError as error:
        raise InvalidRequestError(describe(error)) from error


def _retrieval_request(sent: ProtoMessage) -> RetrievalRequest:
    disabled = sent.query_understanding_spec.query_rephraser_spec.disable
    return RetrievalRequest(
        messages=[Message.model_validate({"role": "user", "content": sent.query.text})],
        retrieval_reasoning_effort=ReasoningEffort.MINIMAL if disabled else None,
        max_output_documents=sent.search_spec.search_params.max_return_results or DEFAULT_RESULTS,
    )


def _understanding_fields(spec: ProtoMessage) -> Fields:
    rephraser = spec.query_rephraser_spec
    classes = [found for one in spec.query_classification_spec.types if (found := member(QueryClass, one))]
    return {
        "classify": list(dict.fromkeys(classes)),
        "rephrasing": Rephrasing(
            disabled=rephraser.disable,
            max_steps=rephraser.max_rephrase_steps or 1,
            large_model=rephraser.model_spec.model_type != _SMALL_MODEL,
        ),
        "spell_correction": not spec.disable_spell_correction,
    }


def _generation_fields(spec: ProtoMessage) -> Fields:
    gate = "ignore_low_relevant_content"
    return {
        "model_version": spec.model_spec.model_version,
        "preamble": spec.prompt_spec.preamble,
        "language": spec.answer_language_code or None,
        "include_citations": spec.include_citations,
        "ignore_adversarial_query": spec.ignore_adversarial_query,
        "ignore_non_answer_seeking_query": spec.ignore_non_answer_seeking_query,
        "ignore_jail_breaking_query": spec.ignore_jail_breaking_query,
        gate: getattr(spec, gate) if spec.HasField(gate) else None,
    }


def _safety_settings(spec: ProtoMessage) -> list[SafetySetting]:
    settings = []
    for position, one in enumerate(spec.safety_settings):
        category, threshold = member(HarmCategory, one.category), member(HarmBlockThreshold, one.threshold)
        if category is None or threshold is None:
            raise InvalidRequestError(f"safetySpec.safetySettings.{position}: category and threshold are both needed")
        settings.append(SafetySetting(category=category, threshold=threshold))
    return settings


def _search_fields(spec: ProtoMessage, list_fields: Collection[str]) -> Fields:
    if spec.HasField("search_result_list"):
        return {"search_results": [_reference(one) for one in spec.search_result_list.search_results]}
    params, at = spec.search_params, "searchSpec.searchParams"
    return {
        "filters": parse_filter(params.filter, f"{at}.filter", list_fields=list_fields),
        "boosts": _boosts(params.boost_spec, at, list_fields),
        "order_by": params.order_by,
        "result_mode": member(ResultMode, params.search_result_mode),
        "data_stores": [
            _data_store(one, f"{at}.dataStoreSpecs.{position}", list_fields)
            for position, one in enumerate(params.data_store_specs)
        ],
    }


def _data_store(spec: ProtoMessage, at: str, list_fields: Collection[str]) -> DataStoreQuery:
    return DataStoreQuery(
        data_store=str(parse_parent(spec.data_store, f"{at}.dataStore")),
        filters=parse_filter(spec.filter, f"{at}.filter", list_fields=list_fields),
        boosts=_boosts(spec.boost_spec, at, list_fields),
        custom_search_operators=spec.custom_search_operators,
        max_results=spec.num_results or None,
    )


def _boosts(spec: ProtoMessage, at: str, list_fields: Collection[str]) -> list[Boost]:
    at = f"{at}.boostSpec.conditionBoostSpecs"
    return [
        Boost(
            condition=parse_filter(one.condition, f"{at}.{position}.condition", list_fields=list_fields),
            amount=one.boost,
            control=_control(one.boost_control_spec) if one.HasField("boost_control_spec") else None,
        )
        for position, one in enumerate(spec.condition_boost_specs)
    ]


def _control(spec: ProtoMessage) -> BoostControl:
    points = [ControlPoint(value=point.attribute_value, amount=point.boost_amount) for point in spec.control_points]
    return BoostControl(field=spec.field_name, freshness=spec.attribute_type == _FRESHNESS, points=points)


def _reference(result: ProtoMessage) -> AnswerReference:
    if result.HasField("chunk_info"):
        chunk = result.chunk_info
        about = chunk.document_metadata
        return ChunkReference(chunk=chunk.chunk, content=chunk.content, uri=about.uri, title=about.title)
    document = result.unstructured_document_info
    # Google's order: segments only where there are no contexts; answers, deprecated, only where there is neither.
    passages = document.document_contexts or document.extractive_segments or document.extractive_answers
    return DocumentReference(
        document=document.document,
        uri=document.uri,
        title=document.title,
        chunks=[ChunkContent(content=one.content, page_identifier=one.page_identifier) for one in passages],
    )
