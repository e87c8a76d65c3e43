"""The part of an AnswerQueryRequest that says what is searched, or which results are brought along."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from llama_index_agentic_kb.schema.answer import AnswerReference, ChunkContent, ChunkReference, DocumentReference
from llama_index_agentic_kb.schema.answer_query import Boost, BoostControl, ControlPoint, DataStoreQuery, ResultMode
from llama_index_agentic_kb.wire.google_enums import BOOST_ATTRIBUTE, BOOST_INTERPOLATION, RESULT_MODE
from llama_index_agentic_kb.wire.google_fields import Int32, Number, Text, WireMessage, enum
from llama_index_agentic_kb.wire.google_filter import parse_filter
from llama_index_agentic_kb.wire.google_names import parse_parent

__all__ = ["SearchSpec", "provided_results", "search_fields"]

MAX_BOOSTS: Final = 20
_AT_LEAST_0: Final = Field(ge=0)
_BOOST: Final = Field(ge=-1, le=1)


class _ControlPoint(WireMessage):
    attribute_value: Text = ""
    boost_amount: Annotated[Number, _BOOST] = 0.0


class _BoostControlSpec(WireMessage):
    field_name: Text = ""
    attribute_type: Annotated[str | None, enum(BOOST_ATTRIBUTE)] = None
    interpolation_type: Annotated[str | None, enum(BOOST_INTERPOLATION)] = None
    control_points: list[_ControlPoint] = Field(default_factory=list)


class _ConditionBoostSpec(WireMessage):
    condition: Text = ""
    boost: Annotated[Number, _BOOST] = 0.0
    boost_control_spec: _BoostControlSpec | None = None


class _BoostSpec(WireMessage):
    condition_boost_specs: Annotated[list[_ConditionBoostSpec], Field(max_length=MAX_BOOSTS)] = Field(
        default_factory=list
    )


class _DataStoreSpec(WireMessage):
    data_store: Text = ""
    filter: Text = ""
    boost_spec: _BoostSpec = Field(default_factory=_BoostSpec)
    custom_search_operators: Text = ""
    num_results: Annotated[Int32, _AT_LEAST_0] = 0


class _SearchParams(WireMessage):
    max_return_results: Annotated[Int32, _AT_LEAST_0] = 0
    filter: Text = ""
    boost_spec: _BoostSpec = Field(default_factory=_BoostSpec)
    order_by: Text = ""
    search_result_mode: Annotated[ResultMode | None, enum(RESULT_MODE)] = None
    data_store_specs: list[_DataStoreSpec] = Field(default_factory=list)


class _Passage(WireMessage):
    page_identifier: Text = ""
    content: Text = ""


class _DocumentResult(WireMessage):
    document: Text = ""
    uri: Text = ""
    title: Text = ""
    document_contexts: list[_Passage] = Field(default_factory=list)
    extractive_segments: list[_Passage] = Field(default_factory=list)
    extractive_answers: list[_Passage] = Field(default_factory=list)


class _ChunkMetadata(WireMessage):
    uri: Text = ""
    title: Text = ""


class _ChunkResult(WireMessage):
    chunk: Text = ""
    content: Text = ""
    document_metadata: _ChunkMetadata = Field(default_factory=_ChunkMetadata)


class _SearchResult(WireMessage):
    ONEOFS: ClassVar = (("unstructuredDocumentInfo", "chunkInfo"),)

    unstructured_document_info: _DocumentResult | None = None
    chunk_info: _ChunkResult | None = None


class _SearchResultList(WireMessage):
    search_results: list[_SearchResult] = Field(default_factory=list)


class SearchSpec(WireMessage):
    """What is searched, or results in its place."""

    ONEOFS: ClassVar = (("searchParams", "searchResultList"),)

    search_params: _SearchParams | None = None
    search_result_list: _SearchResultList | None = None


def search_fields(spec: SearchSpec, list_fields: Collection[str]) -> dict[str, Any]:
    """Give the fields of an ``AnswerQuery`` that narrow and weigh the search.

    Raises:
        InvalidRequestError: A filter or a resource name can't be read.
    """
    params = spec.search_params
    if params is None:
        return {}
    at = "searchSpec.searchParams"
    return {
        "filters": parse_filter(params.filter, f"{at}.filter", list_fields=list_fields),
        "boosts": _boosts(params.boost_spec, at, list_fields),
        "order_by": params.order_by,
        "result_mode": params.search_result_mode,
        "data_stores": [
            _data_store(one, f"{at}.dataStoreSpecs.{position}", list_fields)
            for position, one in enumerate(params.data_store_specs)
        ],
    }


def _data_store(spec: _DataStoreSpec, at: str, list_fields: Collection[str]) -> DataStoreQuery:
    return DataStoreQuery(
        data_store=str(parse_parent(spec.data_store, f"{at}.dataStore")),
        filters=parse_filter(spec.filter, f"{at}.filter", list_fields=list_fields),
        boosts=_boosts(spec.boost_spec, at, list_fields),
        custom_search_operators=spec.custom_search_operators,
        max_results=spec.num_results or None,
    )


def _boosts(spec: _BoostSpec, at: str, list_fields: Collection[str]) -> list[Boost]:
    return [
        Boost(
            condition=parse_filter(
                one.condition, f"{at}.boostSpec.conditionBoostSpecs.{position}.condition", list_fields=list_fields
            ),
            amount=one.boost,
            control=_control(one.boost_control_spec),
        )
        for position, one in enumerate(spec.condition_boost_specs)
    ]


def _control(spec: _BoostControlSpec | None) -> BoostControl | None:
    if spec is None:
        return None
    points = [ControlPoint(value=point.attribute_value, amount=point.boost_amount) for point in spec.control_points]
    return BoostControl(field=spec.field_name, freshness=spec.attribute_type == "freshness", points=points)


def provided_results(spec: SearchSpec) -> list[AnswerReference] | None:
    """Give the results that were brought along, in their order; None where the sources are to be searched."""
    if spec.search_result_list is None:
        return None
    return [_reference(one) for one in spec.search_result_list.search_results]


def _reference(result: _SearchResult) -> AnswerReference:
    if result.chunk_info is not None:
        chunk = result.chunk_info
        return ChunkReference(
            chunk=chunk.chunk,
            content=chunk.content,
            uri=chunk.document_metadata.uri,
            title=chunk.document_metadata.title,
        )
    document = result.unstructured_document_info or _DocumentResult()
    # Google's order: segments only where there are no contexts; answers, deprecated, only where there is neither.
    passages = document.document_contexts or document.extractive_segments or document.extractive_answers
    return DocumentReference(
        document=document.document,
        uri=document.uri,
        title=document.title,
        chunks=[ChunkContent(content=one.content, page_identifier=one.page_identifier) for one in passages],
    )
