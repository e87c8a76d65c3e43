"""A whole answer as a stream, in the order and the pieces of one that is being written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llama_index_agentic_kb.schema.answer import Answer, Session
from llama_index_agentic_kb.schema.answer_query import CitationPiece, ReferencesPiece, StepsPiece, TextPiece, WholePiece
from llama_index_agentic_kb.wire.google_answer import AnswerStream


def stream_answer(answer: Answer, session: Session | None = None, **options: Any) -> Iterator[bytes]:
    """The text claim by claim, each followed by its citations."""
    stream = AnswerStream(**options)
    yield stream.piece(StepsPiece(steps=answer.steps))
    yield stream.piece(ReferencesPiece(references=answer.references))
    sent = 0
    for citation in sorted(answer.citations, key=lambda one: one.end):
        yield stream.piece(TextPiece(text=answer.text[sent : max(sent, citation.end)]))
        sent = max(sent, citation.end)
        yield stream.piece(CitationPiece(citation=citation))
    yield stream.piece(TextPiece(text=answer.text[sent:]))
    yield stream.piece(WholePiece(answer=answer, session=session))
