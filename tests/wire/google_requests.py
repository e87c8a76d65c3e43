"""Generated AnswerQueryRequests, and what each must be read as, told field by field from the proto."""

from __future__ import annotations

from typing import Any

from google.cloud import discoveryengine_v1 as g
from hypothesis import strategies as st

from llama_index_agentic_kb.schema.answer_query import AnswerQuery
from llama_index_agentic_kb.schema.request import MAX_DOCUMENTS

R = g.AnswerQueryRequest
STORE = "projects/1/locations/global/collections/default_collection/dataStores/d"
CONFIGS = [
    "projects/p/locations/global/dataStores/d/servingConfigs/s",
    "projects/p/locations/global/collections/c/dataStores/d/servingConfigs/s",
    "projects/p/locations/global/collections/c/engines/e/servingConfigs/s",
]
WORDS = st.text(max_size=8)
FLAGS = st.booleans()
FILTERS = st.sampled_from(["", 'color: ANY("red", "a\\"b")', "year: IN(1969, 1972e) AND NOT (public = true)"])
BOOSTS = st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0])


def _some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=2)


_POINTS = st.builds(
    g.SearchRequest.BoostSpec.ConditionBoostSpec.BoostControlSpec.ControlPoint,
    attribute_value=WORDS,
    boost_amount=BOOSTS,
)
_CONTROLS = st.builds(
    g.SearchRequest.BoostSpec.ConditionBoostSpec.BoostControlSpec,
    field_name=WORDS,
    attribute_type=st.sampled_from([0, 1, 2]),
    interpolation_type=st.sampled_from([0, 1]),
    control_points=_some(_POINTS),
)
_BOOST_SPECS = st.builds(
    g.SearchRequest.BoostSpec,
    condition_boost_specs=_some(
        st.builds(
            g.SearchRequest.BoostSpec.ConditionBoostSpec,
            condition=FILTERS,
            boost=BOOSTS,
            boost_control_spec=st.none() | _CONTROLS,
        )
    ),
)
_STORES = st.builds(
    g.SearchRequest.DataStoreSpec,
    data_store=st.just(STORE),
    filter=FILTERS,
    boost_spec=st.none() | _BOOST_SPECS,
    custom_search_operators=WORDS,
    num_results=st.integers(0, MAX_DOCUMENTS),
)
_PARAMS = st.builds(
    R.SearchSpec.SearchParams,
    max_return_results=st.integers(0, MAX_DOCUMENTS),
    filter=FILTERS,
    boost_spec=st.none() | _BOOST_SPECS,
    order_by=WORDS,
    search_result_mode=st.sampled_from([0, 1, 2]),
    data_store_specs=_some(_STORES),
)
_RESULT = R.SearchSpec.SearchResultList.SearchResult
_DOCUMENT = _RESULT.UnstructuredDocumentInfo


def _passages(kind: Any) -> st.SearchStrategy[Any]:
    return _some(st.builds(kind, page_identifier=WORDS, content=WORDS))


_RESULTS = st.one_of(
    st.builds(
        _RESULT,
        unstructured_document_info=st.builds(
            _DOCUMENT,
            document=WORDS,
            uri=WORDS,
            title=WORDS,
            document_contexts=_passages(_DOCUMENT.DocumentContext),
            extractive_segments=_passages(_DOCUMENT.ExtractiveSegment),
            extractive_answers=_passages(_DOCUMENT.ExtractiveAnswer),
        ),
    ),
    st.builds(
        _RESULT,
        chunk_info=st.builds(
            _RESULT.ChunkInfo,
            chunk=WORDS,
            content=WORDS,
            document_metadata=st.none() | st.builds(_RESULT.ChunkInfo.DocumentMetadata, uri=WORDS, title=WORDS),
        ),
    ),
)
_SEARCH = st.one_of(
    st.none(),
    st.builds(R.SearchSpec, search_params=_PARAMS),
    st.builds(
        R.SearchSpec,
        search_result_list=st.builds(R.SearchSpec.SearchResultList, search_results=_some(_RESULTS)),
    ),
)
_GENERATION = st.builds(
    R.AnswerGenerationSpec,
    model_spec=st.none() | st.builds(R.AnswerGenerationSpec.ModelSpec, model_version=WORDS),
    prompt_spec=st.none() | st.builds(R.AnswerGenerationSpec.PromptSpec, preamble=WORDS),
    include_citations=FLAGS,
    answer_language_code=st.sampled_from(["", "de", "zh-Hant-TW"]),
    ignore_adversarial_query=FLAGS,
    ignore_non_answer_seeking_query=FLAGS,
    ignore_low_relevant_content=st.none() | FLAGS,
    ignore_jail_breaking_query=FLAGS,
)
_UNDERSTANDING = st.builds(
    R.QueryUnderstandingSpec,
    query_classification_spec=st.none()
    | st.builds(R.QueryUnderstandingSpec.QueryClassificationSpec, types=_some(st.integers(0, 5))),
    query_rephraser_spec=st.none()
    | st.builds(
        R.QueryUnderstandingSpec.QueryRephraserSpec,
        disable=FLAGS,
        max_rephrase_steps=st.integers(0, 5),
        model_spec=st.none()
        | st.builds(R.QueryUnderstandingSpec.QueryRephraserSpec.ModelSpec, model_type=st.sampled_from([0, 1, 2])),
    ),
    disable_spell_correction=FLAGS,
)
_END_USER = st.builds(
    R.EndUserSpec,
    end_user_metadata=_some(
        st.builds(
            R.EndUserSpec.EndUserMetaData,
            chunk_info=st.none()
            | st.builds(
                R.EndUserSpec.EndUserMetaData.ChunkInfo,
                content=WORDS,
                document_metadata=st.none()
                | st.builds(R.EndUserSpec.EndUserMetaData.ChunkInfo.DocumentMetadata, title=WORDS),
            ),
        )
    ),
)
_SAFETY = st.builds(
    R.SafetySpec,
    enable=FLAGS,
    safety_settings=_some(
        st.builds(R.SafetySpec.SafetySetting, category=st.integers(1, 5), threshold=st.integers(1, 5))
    ),
)
REQUESTS = st.builds(
    R,
    serving_config=st.sampled_from(CONFIGS),
    query=st.builds(g.Query, text=st.text(min_size=1, max_size=9).filter(str.strip), query_id=WORDS),
    session=st.sampled_from(["", "-", "a1"]).map(lambda one: one and f"{STORE}/sessions/{one}"),
    safety_spec=st.none() | _SAFETY,
    related_questions_spec=st.none() | st.builds(R.RelatedQuestionsSpec, enable=FLAGS),
    grounding_spec=st.none()
    | st.builds(R.GroundingSpec, include_grounding_supports=FLAGS, filtering_level=st.sampled_from([0, 1, 2])),
    answer_generation_spec=st.none() | _GENERATION,
    search_spec=_SEARCH,
    query_understanding_spec=st.none() | _UNDERSTANDING,
    user_pseudo_id=st.text(max_size=128),
    user_labels=st.dictionaries(st.text(min_size=1, max_size=63), st.text(max_size=63), max_size=3),
    end_user_spec=st.none() | _END_USER,
)
"""Every field of v1 but asynchronousMode, each there or not."""


def told(query: AnswerQuery) -> dict[str, Any]:
    """What a query was read as, in plain values."""
    return {
        "question": query.request.messages[0].text if query.request.messages else None,
        "query_id": query.query_id,
        "serving_config": query.serving_config,
        "session": query.session,
        "limit": query.request.max_output_documents,
        "minimal": query.request.retrieval_reasoning_effort == "minimal",
        "filter": query.filters is not None,
        "boosts": [_boost_told(one) for one in query.boosts],
        "order_by": query.order_by,
        "mode": query.result_mode.value if query.result_mode else "",
        "stores": [
            (
                one.data_store,
                one.filters is not None,
                [_boost_told(boost) for boost in one.boosts],
                one.custom_search_operators,
                one.max_results or 0,
            )
            for one in query.data_stores
        ],
        "results": None if query.search_results is None else [one.to_dict() for one in query.search_results],
        "end_user": [(one.content, one.title) for one in query.end_user_chunks],
        "classes": [one.name for one in query.classify],
        "rephrasing": (query.rephrasing.disabled, query.rephrasing.max_steps, query.rephrasing.large_model),
        "spell": query.spell_correction,
        "model": query.model_version,
        "preamble": query.preamble,
        "language": query.language or "",
        "citations": query.include_citations,
        "ignored": (
            query.ignore_adversarial_query,
            query.ignore_non_answer_seeking_query,
            query.ignore_jail_breaking_query,
            query.ignore_low_relevant_content,
        ),
        "related": query.related_questions,
        "supports": query.grounding_supports,
        "level": query.filtering_level.name if query.filtering_level else "UNSPECIFIED",
        "safety": (query.safety, [(one.category.name, one.threshold.name) for one in query.safety_settings]),
        "user": (query.user_pseudo_id, query.user_labels),
    }


def _boost_told(boost: Any) -> Any:
    control = boost.control and (
        boost.control.field,
        boost.control.freshness,
        [(one.value, one.amount) for one in boost.control.points],
    )
    return boost.condition is not None, boost.amount, control


def expected(sent: Any) -> dict[str, Any]:
    """What a request must be read as, from Google's own object."""
    spec, generation, understanding = sent.search_spec, sent.answer_generation_spec, sent.query_understanding_spec
    params, rephraser = spec.search_params, understanding.query_rephraser_spec
    types = [one for one in understanding.query_classification_spec.types if one]
    return {
        "question": sent.query.text,
        "query_id": sent.query.query_id,
        "serving_config": sent.serving_config,
        "session": sent.session.rsplit("/", 1)[-1] or None,
        "limit": params.max_return_results or 10,
        "minimal": rephraser.disable,
        "filter": bool(params.filter),
        "boosts": _boosts(params.boost_spec),
        "order_by": params.order_by,
        "mode": ["", "documents", "chunks"][params.search_result_mode],
        "stores": [
            (one.data_store, bool(one.filter), _boosts(one.boost_spec), one.custom_search_operators, one.num_results)
            for one in params.data_store_specs
        ],
        "results": _results(spec),
        "end_user": [
            (one.chunk_info.content, one.chunk_info.document_metadata.title)
            for one in sent.end_user_spec.end_user_metadata
            if "chunk_info" in one
        ],
        "classes": list(dict.fromkeys(one.name for one in types)),
        "rephrasing": (rephraser.disable, rephraser.max_rephrase_steps or 1, rephraser.model_spec.model_type != 1),
        "spell": not understanding.disable_spell_correction,
        "model": generation.model_spec.model_version,
        "preamble": generation.prompt_spec.preamble,
        "language": generation.answer_language_code,
        "citations": generation.include_citations,
        "ignored": (
            generation.ignore_adversarial_query,
            generation.ignore_non_answer_seeking_query,
            generation.ignore_jail_breaking_query,
            generation.ignore_low_relevant_content if "ignore_low_relevant_content" in generation else None,
        ),
        "related": sent.related_questions_spec.enable,
        "supports": sent.grounding_spec.include_grounding_supports,
        "level": sent.grounding_spec.filtering_level.name.removeprefix("FILTERING_LEVEL_"),
        "safety": (
            sent.safety_spec.enable,
            [
                (one.category.name.removeprefix("HARM_CATEGORY_"), one.threshold.name)
                for one in sent.safety_spec.safety_settings
            ],
        ),
        "user": (sent.user_pseudo_id, dict(sent.user_labels)),
    }


def _boosts(spec: Any) -> list[Any]:
    return [
        (
            bool(one.condition),
            one.boost,
            (
                one.boost_control_spec.field_name,
                one.boost_control_spec.attribute_type == 2,
                [(point.attribute_value, point.boost_amount) for point in one.boost_control_spec.control_points],
            )
            if "boost_control_spec" in one
            else None,
        )
        for one in spec.condition_boost_specs
    ]


def _results(spec: Any) -> list[dict[str, Any]] | None:
    if "search_result_list" not in spec:
        return None
    return [_result(one) for one in spec.search_result_list.search_results]


def _result(one: Any) -> dict[str, Any]:
    if "chunk_info" in one:
        chunk = one.chunk_info
        return {
            "kind": "chunk",
            "chunk": chunk.chunk,
            "content": chunk.content,
            "document": "",
            "uri": chunk.document_metadata.uri,
            "title": chunk.document_metadata.title,
            "pageIdentifier": "",
            "metadata": {},
        }
    info = one.unstructured_document_info
    passages = info.document_contexts or info.extractive_segments or info.extractive_answers
    return {
        "kind": "document",
        "document": info.document,
        "uri": info.uri,
        "title": info.title,
        "chunks": [{"content": part.content, "pageIdentifier": part.page_identifier} for part in passages],
        "metadata": {},
    }
