"""Google's ``Answer`` resource and its parts, written from ours.

Strictly v1: camelCase names, defaults left out, offsets in bytes of UTF-8 as decimal text, enums as names or numbers,
times in UTC, references as indices in decimal text. Everything that goes out passes ``validate_answer`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index_agentic_kb.schema.answer import (
    Answer,
    AnswerReference,
    AnswerStep,
    AnswerStepAction,
    ChunkReference,
    Citation,
    DocumentReference,
    GroundingSupport,
    SafetyRating,
    SearchObservation,
)
from llama_index_agentic_kb.wire.google_enums import (
    ANSWER_STATE,
    HARM_CATEGORY,
    HARM_PROBABILITY,
    HARM_SEVERITY,
    QUERY_CLASS,
    SKIPPED_REASON,
    STEP_STATE,
)
from llama_index_agentic_kb.wire.google_validation import validate_answer
from llama_index_agentic_kb.wire.google_values import Utf8Offsets, clean, float32, message, struct_value, timestamp

__all__ = [
    "encode_answer",
    "encode_citations",
    "encode_references",
    "encode_steps",
]


def encode_answer(answer: Answer, *, name: str | None = None, enum_as_int: bool = False) -> dict[str, Any]:
    """Give an answer's JSON, checked.

    Args:
        answer: The answer. Its ``language`` has no field in v1.
        name: Its resource name; None without a session.
        enum_as_int: Whether enums are numbers.

    Raises:
        InvalidAnswerError: It breaks a rule of the contract.
    """
    classified = [
        message({"type": QUERY_CLASS.encode(one.type, as_int=enum_as_int), "positive": one.positive})
        for one in answer.query_classifications or ()
    ]
    offsets = Utf8Offsets(answer.text)
    told = message(
        {
            "name": name,
            "state": ANSWER_STATE.encode(answer.state, as_int=enum_as_int),
            "answerText": clean(answer.text),
            "citations": encode_citations(answer.citations, offsets),
            "groundingSupports": _supports(answer.grounding_supports, offsets),
            "references": encode_references(answer.references),
            "relatedQuestions": [clean(question) for question in answer.related_questions],
            "steps": encode_steps(answer.steps, enum_as_int=enum_as_int),
            "queryUnderstandingInfo": message({"queryClassificationInfo": classified}),
            "answerSkippedReasons": [SKIPPED_REASON.encode(one, as_int=enum_as_int) for one in answer.skipped_reasons],
            "safetyRatings": [_safety_rating(one, enum_as_int=enum_as_int) for one in answer.safety_ratings],
        },
        {
            "groundingScore": answer.grounding_score,
            "createTime": timestamp(answer.created_at),
            "completeTime": timestamp(answer.completed_at),
        },
    )
    validate_answer(told)
    return told


def encode_citations(citations: Sequence[Citation], offsets: Utf8Offsets) -> list[dict[str, Any]]:
    """Give citations with their offsets in bytes."""
    return [message({**_span(one, offsets), "sources": _sources(one.sources)}) for one in citations]


def _supports(supports: Sequence[GroundingSupport], offsets: Utf8Offsets) -> list[dict[str, Any]]:
    return [
        message(
            {**_span(one, offsets), "sources": _sources(one.sources)},
            {"groundingScore": one.score, "groundingCheckRequired": one.check_required},
        )
        for one in supports
    ]


def _span(claim: Citation | GroundingSupport, offsets: Utf8Offsets) -> dict[str, str]:
    start = offsets.byte(claim.start)
    return {"startIndex": str(start) if start else "", "endIndex": str(offsets.byte(claim.end))}


def _sources(sources: Sequence[int]) -> list[dict[str, str]]:
    return [{"referenceId": str(source)} for source in sources]


def encode_references(references: Sequence[AnswerReference]) -> list[dict[str, Any]]:
    """Give references, each under the name of its kind."""
    return [_reference(one) for one in references]


def _reference(reference: AnswerReference) -> dict[str, Any]:
    if isinstance(reference, ChunkReference):
        return {"chunkInfo": _chunk_info(reference)}
    told = {"document": clean(reference.document), "uri": clean(reference.uri), "title": clean(reference.title)}
    if isinstance(reference, DocumentReference):
        chunks = [
            message(
                {"content": clean(one.content), "pageIdentifier": clean(one.page_identifier)},
                {"relevanceScore": float32(one.relevance_score)},
            )
            for one in reference.chunks
        ]
        fields = {**told, "chunkContents": chunks, "structData": struct_value(reference.metadata)}
        return {"unstructuredDocumentInfo": message(fields)}
    return {"structuredDocumentInfo": message({**told, "structData": struct_value(reference.data)})}


def _chunk_info(reference: ChunkReference) -> dict[str, Any]:
    document = {
        "document": clean(reference.document),
        "uri": clean(reference.uri),
        "title": clean(reference.title),
        "pageIdentifier": clean(reference.page_identifier),
        "structData": struct_value(reference.metadata),
    }
    return message({**_chunk(reference), "documentMetadata": message(document)})


def _chunk(reference: ChunkReference) -> dict[str, Any]:
    return message(
        {"chunk": clean(reference.chunk), "content": clean(reference.content)},
        {"relevanceScore": float32(reference.relevance_score)},
    )


def encode_steps(steps: Sequence[AnswerStep], *, enum_as_int: bool) -> list[dict[str, Any]]:
    """Give steps with their actions and what these observed."""
    return [
        message(
            {
                "state": STEP_STATE.encode(step.state, as_int=enum_as_int),
                "description": clean(step.description),
                "thought": clean(step.thought),
                "actions": [_action(action) for action in step.actions],
            }
        )
        for step in steps
    ]


def _action(action: AnswerStepAction) -> dict[str, Any]:
    search = None if action.query is None else message({"query": clean(action.query)})
    observed = None if action.results is None else message({"searchResults": [_result(one) for one in action.results]})
    return message({}, {"searchAction": search, "observation": observed})


def _result(result: SearchObservation) -> dict[str, Any]:
    snippets = [message({"snippet": clean(one.snippet), "snippetStatus": clean(one.status)}) for one in result.snippets]
    return message(
        {
            "document": clean(result.document),
            "uri": clean(result.uri),
            "title": clean(result.title),
            "snippetInfo": snippets,
            "chunkInfo": [_chunk(one) for one in result.chunks],
            "structData": struct_value(result.metadata),
        }
    )


def _safety_rating(rating: SafetyRating, *, enum_as_int: bool) -> dict[str, Any]:
    told = message(
        {
            "category": HARM_CATEGORY.encode(rating.category, as_int=enum_as_int),
            "probabilityScore": float32(rating.probability_score),
            "severityScore": float32(rating.severity_score),
            "blocked": rating.blocked,
        }
    )
    if rating.probability is not None:
        told["probability"] = HARM_PROBABILITY.encode(rating.probability, as_int=enum_as_int)
    if rating.severity is not None:
        told["severity"] = HARM_SEVERITY.encode(rating.severity, as_int=enum_as_int)
    return told
