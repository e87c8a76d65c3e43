"""Retrievals that are kept: replayed without a model, and held against a retriever as a regression test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from llama_index_agentic_kb._aio import run as perform
from llama_index_agentic_kb.errors import InvalidRequestError
from llama_index_agentic_kb.evaluation.dataset import EvaluationQuery
from llama_index_agentic_kb.evaluation.metering import Meter
from llama_index_agentic_kb.replay import RecordedLLM, RecordedReply, Recording
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import Message, RetrievalRequest

__all__ = ["RecordedRetrieval", "assert_same_evidence", "recorded_llm", "recorded_queries", "request_of"]


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
        meter = Meter()
        retriever.callback_manager.add_handler(meter)
        try:
            with meter.question() as metered:
                retrieval = perform(retriever.retrieval(asked))
        finally:
            retriever.callback_manager.remove_handler(meter)
        return cls.of(retriever, asked, retrieval, metered.replies)

    @classmethod
    def of(
        cls,
        retriever: AgenticRetriever,
        asked: RetrievalRequest,
        retrieval: Retrieval,
        replies: Sequence[RecordedReply],
    ) -> RecordedRetrieval:
        """Put together what was heard while a retriever worked."""
        effort = asked.retrieval_reasoning_effort or retriever.effort
        model = "none" if retriever.llm is None else str(retriever.llm.metadata.model_name)
        return cls(
            asked.to_dict(),
            Recording(question=asked.question, model=model, effort=effort.value, replies=list(replies)),
            [sub_query.query for sub_query in retrieval.plan.sub_queries],
            [node.node_id for node in retrieval.nodes],
            [record.to_dict() for record in retrieval.log.records],
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON; its folder is made where there is none."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        data = asdict(self) | {"recording": self.recording.model_dump()}
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
        except (OSError, ValueError, KeyError, TypeError) as error:
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


def request_of(query: EvaluationQuery) -> RetrievalRequest:
    """Give the request that a question of a set is, with the conversation before it."""
    turns = [*query.history, ("user", query.text)]
    return RetrievalRequest(messages=[Message.model_validate({"role": role, "content": text}) for role, text in turns])


def recorded_queries(folder: str | Path, effort: str) -> set[str]:
    """Give the ids of the questions that ``--record`` kept in a folder for an effort.

    Raises:
        InvalidRequestError: There are none.
    """
    ids = {unquote(file.stem) for file in (Path(folder) / effort).glob("*.json")}
    if not ids:
        raise InvalidRequestError(f"{folder}: no retrieval of effort {effort!r} was recorded here; run with --record")
    return ids


def recorded_llm(folder: str | Path, effort: str) -> RecordedLLM:
    """Give a model that says again what was said to all questions that were recorded in a folder for an effort.

    Raises:
        InvalidRequestError: A file holds no recorded retrieval.
    """
    files = sorted((Path(folder) / effort).glob("*.json"))
    recordings = [RecordedRetrieval.load(file).recording for file in files]
    replies = [reply for recording in recordings for reply in recording.replies]
    model = next((recording.model for recording in recordings), "nobody")
    return RecordedLLM(recording=Recording(question="", model=model, effort=effort, replies=replies))
