"""What a knowledge base answers with an ``Answer``: whole or piece by piece, sync and async."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_index.core.base.llms.types import ChatMessage
from pydantic import ValidationError

from llama_index_agentic_kb._aio import aiterate, arun, iterate, run
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.schema import ActivityRecord, Message, RetrievalRequest
from llama_index_agentic_kb.schema._model import describe
from llama_index_agentic_kb.schema.answer_query import AnswerPiece, AnswerQuery
from llama_index_agentic_kb.schema.response import AnswerResponse

if TYPE_CHECKING:  # it loads what checks answers
    from llama_index_agentic_kb.answering.engine import AnswerEngine

__all__ = ["AnswerQueries", "Question"]

Question: TypeAlias = str | Sequence[ChatMessage | Message | Mapping[str, Any]] | RetrievalRequest | Mapping[str, Any]
"""What can be asked: a question, a conversation whose last message is the question, or a request (typed or wire)."""

Observer: TypeAlias = Callable[[ActivityRecord], None]


class AnswerQueries:
    """Answers as resources; a part of ``KnowledgeBase``."""

    def request(self, question: Question, **fields: Any) -> RetrievalRequest:
        """Give the request that a question stands for."""
        raise NotImplementedError

    def _answers(self) -> AnswerEngine:
        """Give what answers."""
        raise NotImplementedError

    def answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AnswerResponse:
        """Answer a question with an ``Answer``: citations and grounding as data, steps, references, and why not.

            response = kb.answer("How tall was the Saturn V?", related_questions=True)
            for support in response.answer.grounding_supports:
                print(response.text[support.start : support.end], support.score, support.sources)

        It never says by its text alone that there is no answer: ``answer.skipped_reasons`` tell why. Of a conversation
        that is given with a session, the last question alone becomes a turn.

        Args:
            question: What ``retrieve`` takes, or an ``AnswerQuery``.
            on_activity: Called with each activity record when it is opened and again when it is closed.
            fields: Fields of ``AnswerQuery`` (``session=``, ``preamble=``, ``filtering_level=``, ...), or of
                ``RetrievalRequest``. Unless ``question`` is an ``AnswerQuery``, citations and grounding supports are
                on.

        Raises:
            InvalidRequestError: The query can't be carried out as asked.
            DeniedError: There is no principal where one is needed, or the one may search no source.
            NotFoundError: The session is not there, or is another's.
            RetrievalError: No selected source could answer.
            SynthesisError: The language model failed while answering.
        """
        return run(self._answers().answer(self.query(question, **fields), observer=on_activity))

    async def aanswer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AnswerResponse:
        """Answer a question with an ``Answer``; see ``answer``."""
        return await arun(self._answers().answer(self.query(question, **fields), observer=on_activity))

    def stream_answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> Iterator[AnswerPiece]:
        """Answer a question piece by piece: steps, references, text and citations in turns, at last the response.

        An answer that may yet be withheld or repaired (``filtering_level``, safety, a policy on answers, ``repair``) is
        told in one piece, once it stands. See ``answer``.
        """
        query = self.query(question, **fields)  # refused here and not where it is read
        flow = self._answers().answer(query, observer=on_activity, streaming=True)
        return _in_turn(iterate(flow, contextvars.copy_context()))

    def astream_answer(
        self, question: Question | AnswerQuery, *, on_activity: Observer | None = None, **fields: Any
    ) -> AsyncIterator[AnswerPiece]:
        """Answer a question piece by piece; see ``stream_answer``."""
        query = self.query(question, **fields)
        flow = self._answers().answer(query, observer=on_activity, streaming=True)
        return _one_by_one(aiterate(flow, contextvars.copy_context()))

    def query(self, question: Question | AnswerQuery, **fields: Any) -> AnswerQuery:
        """Give the query that a question stands for, with this knowledge base's defaults.

        Raises:
            InvalidRequestError: A field doesn't fit; the message names it.
        """
        own = {name: fields.pop(name) for name in [*fields] if name in AnswerQuery.model_fields and name != "request"}
        if not isinstance(question, AnswerQuery):
            defaults = {"include_citations": True, "grounding_supports": True}
            return _parsed_query({"request": self.request(question, **fields), **defaults, **own})
        given = {name: getattr(question, name) for name in question.model_fields_set}
        return _parsed_query({**given, **own, "request": self.request(question.request, **fields)})


def _in_turn(several: Generator[list[AnswerPiece], None, None]) -> Iterator[AnswerPiece]:
    with closing(several) as lists:
        for pieces in lists:
            yield from pieces


async def _one_by_one(several: AsyncGenerator[list[AnswerPiece], None]) -> AsyncIterator[AnswerPiece]:
    async with aclosing(several) as lists:
        async for pieces in lists:
            for piece in pieces:
                yield piece


def _parsed_query(fields: dict[str, Any]) -> AnswerQuery:
    try:
        return AnswerQuery.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(describe(error)) from error
