"""LlamaIndex's public methods of a synthesizer, around one flow for sync, async and streaming."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel

from llama_index_agentic_kb._aio import aiterate, arun, iterate, run
from llama_index_agentic_kb.account import GuardedCallbacks
from llama_index_agentic_kb.llm import Usage
from llama_index_agentic_kb.sources.base import KnowledgeSource

__all__ = ["FlowSynthesizer", "Synthesis"]

logger = logging.getLogger("llama_index_agentic_kb")
dispatcher = get_dispatcher(__name__)


@dataclass(slots=True)
class Synthesis:
    """What a synthesis gave.

    Args:
        text: The answer, with its ``[ref_id:N]`` markers, or the extracted data as JSON.
        output: The validated object, where one was asked for; ``text`` is its JSON.
        usage: What all calls billed together.
        dropped: How many passages fitted neither budget nor model.
        warnings: What the reader of the answer should know of how it was made.
        cut: Whether the model stopped before it was done, in any of its calls: the text may end too early.
        links_removed: Links that led to no reference, and were taken out of the model's replies.
    """

    text: str
    output: BaseModel | None = None
    usage: Usage = field(default_factory=Usage)
    dropped: int = 0
    warnings: list[str] = field(default_factory=list)
    cut: bool = False
    links_removed: int = 0


class FlowSynthesizer(GuardedCallbacks, BaseSynthesizer):
    """A ``BaseSynthesizer`` whose every public method performs the flow ``synthesis``.

    A streamed response's model is called as its tokens are read; the SYNTHESIZE event lasts as long.
    """

    mode: ClassVar[str]
    needs_nodes: ClassVar[bool] = True
    """Without nodes there is nothing to say, and no model is asked."""

    def synthesis(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        *,
        deadline: float | None = None,
        max_output_tokens: int | None = None,
        sources: Mapping[str, KnowledgeSource] | None = None,
        **response_kwargs: Any,
    ) -> Coroutine[Any, Any, Synthesis]:
        """Make the answer, emitting deltas of its text when streaming. For subclasses to define."""
        raise NotImplementedError

    # -- responses -------------------------------------------------------------------------------------------------

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes.

        Args:
            query: The question.
            nodes: The evidence: node N is ``[ref_id:N]``. Without any, the response is "Empty Response".
            additional_source_nodes: Told in the response behind the nodes, and not answered from.
            response_kwargs: Those of ``synthesis``; what is left are further variables of the templates.

        Returns:
            A ``Response``, a ``PydanticResponse`` with ``output_cls``, or a ``StreamingResponse``.

        Raises:
            SynthesisError: The language model failed; a streamed response raises it where it is read.
            DeadlineExceededError: The answer was not there in time.
        """
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes and self.needs_nodes:
            empty = self._empty_response_generator()
            response = StreamingResponse(empty) if self._streaming else Response(self._empty_response)
        else:
            sources = [*nodes, *(additional_source_nodes or [])]
            flow = self._responding(_bundle(query), nodes, sources, response_kwargs)
            if self._streaming:
                tokens: Generator[str, None, None] = iterate(flow, contextvars.copy_context())
                response = StreamingResponse(tokens, sources, self._metadata(sources))
            else:
                response = run(flow)
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes; see ``synthesize``. A streamed response is an ``AsyncStreamingResponse``."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes and self.needs_nodes:
            empty = self._empty_response_agenerator()
            response = AsyncStreamingResponse(empty) if self._streaming else Response(self._empty_response)
        else:
            sources = [*nodes, *(additional_source_nodes or [])]
            flow = self._responding(_bundle(query), nodes, sources, response_kwargs)
            if self._streaming:
                tokens: AsyncGenerator[str, None] = aiterate(flow, contextvars.copy_context())
                response = AsyncStreamingResponse(tokens, sources, self._metadata(sources))
            else:
                response = await arun(flow)
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    async def _responding(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        sources: list[NodeWithScore],
        response_kwargs: dict[str, Any],
    ) -> Response | PydanticResponse:
        manager, asked = self.callback_manager, {EventPayload.QUERY_STR.value: query.query_str}
        # Outside of any trace, each call of a language model would begin one of its own and have no parent.
        with manager.as_trace("synthesize"), manager.event(CBEventType.SYNTHESIZE, payload=asked) as event:
            synthesis = await self.synthesis(query, nodes, **response_kwargs)
            response = self._response(synthesis, sources)
            event.on_end(payload={EventPayload.RESPONSE.value: response})
        for warning in synthesis.warnings:  # the response has no place for them, and nothing is dropped silently
            logger.warning("%s: %s", self.mode, warning)
        return response

    def _response(self, synthesis: Synthesis, sources: list[NodeWithScore]) -> Response | PydanticResponse:
        metadata = self._metadata(sources)
        if synthesis.output is not None:
            return PydanticResponse(synthesis.output, source_nodes=sources, metadata=metadata)
        return Response(synthesis.text, source_nodes=sources, metadata=metadata)

    def _metadata(self, sources: Sequence[NodeWithScore]) -> dict[str, Any] | None:
        return self._get_metadata_for_response([node.node for node in sources])

    # -- texts -----------------------------------------------------------------------------------------------------

    @dispatcher.span
    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, for LlamaIndex code that has no nodes: text N is ``[ref_id:N]``.

        Args:
            query_str: The question.
            text_chunks: The evidence.
            response_kwargs: As in ``synthesize``.

        Returns:
            The text, the object with ``output_cls``, or a generator of tokens when streaming.

        Raises:
            SynthesisError: The language model failed.
            DeadlineExceededError: The answer was not there in time.
        """
        flow = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        if self._streaming:
            return iterate(flow, contextvars.copy_context())
        return _said(run(flow))

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts; see ``get_response``."""
        flow = self.synthesis(QueryBundle(query_str), _as_nodes(text_chunks), **response_kwargs)
        if self._streaming:
            return aiterate(flow, contextvars.copy_context())
        return _said(await arun(flow))


def _bundle(query: QueryType) -> QueryBundle:
    return QueryBundle(query) if isinstance(query, str) else query


def _as_nodes(texts: Sequence[str]) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"text {position}"), score=None)
        for position, text in enumerate(texts)
    ]


def _said(synthesis: Synthesis) -> str | BaseModel:
    return synthesis.text if synthesis.output is None else synthesis.output
