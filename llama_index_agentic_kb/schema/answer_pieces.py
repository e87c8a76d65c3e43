"""The pieces of a streamed answer, in their order."""

from __future__ import annotations

from typing import Literal, TypeAlias

from llama_index_agentic_kb.schema._model import Model
from llama_index_agentic_kb.schema.answer import Answer, AnswerReference, AnswerStep, Citation
from llama_index_agentic_kb.schema.sessions import Session

__all__ = ["AnswerPiece", "CitationPiece", "ReferencesPiece", "StepsPiece", "TextPiece", "WholePiece"]


class StepsPiece(Model):
    """The steps; first in a stream."""

    kind: Literal["steps"] = "steps"
    steps: list[AnswerStep]


class ReferencesPiece(Model):
    """All references; before the text."""

    kind: Literal["references"] = "references"
    references: list[AnswerReference]


class TextPiece(Model):
    """What comes next of the text."""

    kind: Literal["text"] = "text"
    text: str


class CitationPiece(Model):
    """What a claim that was told cites by its own markers; the whole answer has what the evidence bears out."""

    kind: Literal["citation"] = "citation"
    citation: Citation


class WholePiece(Model):
    """The whole answer; last. It takes the place of what was told before it."""

    kind: Literal["whole"] = "whole"
    answer: Answer
    session: Session | None = None
    """The session that keeps the turn, without its turns; None where none does."""


AnswerPiece: TypeAlias = StepsPiece | ReferencesPiece | TextPiece | CitationPiece | WholePiece
"""What a streamed answer comes in: steps, references, text and citations in turns, and the whole."""
