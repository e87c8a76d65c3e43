"""Retrievals that are kept: replayed without a model, and held against a retriever as a regression test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload

from llama_index_agentic_kb._flow import run as perform
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.replay import RecordedReply, Recording
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import RetrievalRequest

__all__ = [
    "ExchangeRecorder",
    "RecordedRetrieval",
    "assert_same_evidence",
]

_EVIDENCE_END = "</evidence>"


class ExchangeRecorder(BaseCallbackHandler):
    """A callback handler that keeps what a language model was asked and what it replied, in order.

    Use one recorder for one question at a time.
    """

    def __init__(self) -> None:
        super().__init__([], [])
        self.replies: list[RecordedReply] = []
        self._asked: dict[str, str] = {}

    def start_trace(self, trace_id: str | None = None) -> None:
        """Traces are none of its business."""

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        """Traces are none of its business."""

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **_: Any,
    ) -> str:
        """Keep what a call asked last: what stands before it is the same for every question."""
        del parent_id
        if event_type is CBEventType.LLM and payload is not None:
            messages = payload.get(EventPayload.MESSAGES)
            self._asked[event_id] = str((messages[-1].content if messages else payload.get(EventPayload.PROMPT)) or "")
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **_: Any
    ) -> None:
        """Keep the reply to a prompt, found again by what follows the evidence: that may come in another order."""
        asked = self._asked.pop(event_id, None)
        if event_type is not CBEventType.LLM or payload is None or asked is None:
            return
        response = payload.get(EventPayload.RESPONSE) or payload.get(EventPayload.COMPLETION)
        message = getattr(response, "message", None)
        content = message.content if message is not None else getattr(response, "text", None)
        when = asked.rpartition(_EVIDENCE_END)[2].strip() or asked
        if content:
            self.replies.append(RecordedReply(when=when, content=content))


@dataclass(slots=True)
class RecordedRetrieval:
    """One retrieval: the request, what the model replied, what was done, and what was found.

    Args:
        request: As JSON data.
        recording: The model's replies, for ``RecordedLLM``.
        plan: The queries that were searched.
        evidence: Ids of the nodes, best first.
        activity: The account, as data.
    """

    request: dict[str, Any]
    recording: Recording
    plan: list[str]
    evidence: list[str]
    activity: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def record(cls, retriever: AgenticRetriever, request: RetrievalRequest | str) -> RecordedRetrieval:
        """Retrieve once, and keep everything.

        Args:
            retriever: Its callback manager tells of the model's calls while this runs.
            request: A question, or a whole request.
        """
        asked = retriever.request_for(request) if isinstance(request, str) else request
        recorder = ExchangeRecorder()
        retriever.callback_manager.add_handler(recorder)
        try:
            retrieval = perform(retriever.retrieval(asked))
        finally:
            retriever.callback_manager.remove_handler(recorder)
        return cls.of(retriever, asked, retrieval, recorder)

    @classmethod
    def of(
        cls, retriever: AgenticRetriever, asked: RetrievalRequest, retrieval: Retrieval, recorder: ExchangeRecorder
    ) -> RecordedRetrieval:
        """Put together what a recorder heard while a retriever worked."""
        effort = asked.retrieval_reasoning_effort or retriever.effort
        model = "none" if retriever.llm is None else str(retriever.llm.metadata.model_name)
        return cls(
            asked.to_dict(),
            Recording(question=asked.question, model=model, effort=effort.value, replies=recorder.replies),
            [sub_query.query for sub_query in retrieval.plan.sub_queries],
            [node.node_id for node in retrieval.nodes],
            [record.to_dict() for record in retrieval.log.records],
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        data = {
            "request": self.request,
            "recording": self.recording.model_dump(),
            "plan": self.plan,
            "evidence": self.evidence,
            "activity": self.activity,
        }
        Path(path).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecordedRetrieval:
        """Read what ``save`` wrote.

        Raises:
            InvalidRequestError: The file holds no recorded retrieval.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            recording = Recording.model_validate(data["recording"])
            return cls(data["request"], recording, data["plan"], data["evidence"], data.get("activity", []))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"{path} holds no recorded retrieval ({error!r}); record it again") from error


def assert_same_evidence(recorded: RecordedRetrieval | str | Path, retriever: AgenticRetriever) -> None:
    """Retrieve again and hold what is found against a recording: a regression test.

    Args:
        recorded: The recording, or its file.
        retriever: Its model should be ``RecordedLLM(recording=recorded.recording)``, so that nothing else changes.

    Raises:
        AssertionError: Plan or evidence differ; the message tells what was gained and lost.
    """
    known = recorded if isinstance(recorded, RecordedRetrieval) else RecordedRetrieval.load(recorded)
    now = RecordedRetrieval.record(retriever, RetrievalRequest.parse(known.request))
    lost = [one for one in known.evidence if one not in now.evidence]
    gained = [one for one in now.evidence if one not in known.evidence]
    if lost or gained:
        raise AssertionError(f"{known.recording.question!r}: evidence lost {lost}, gained {gained}")
    if known.plan != now.plan:
        raise AssertionError(f"{known.recording.question!r}: planned {now.plan}, recorded was {known.plan}")
