"""Looks for gaps in what was found, and plans the searches that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from llama_index_agentic_kb._aio import Call
from llama_index_agentic_kb._text import one_line
from llama_index_agentic_kb.account import ActivityLog
from llama_index_agentic_kb.errors import PlanningError
from llama_index_agentic_kb.guard.spotlighting import draw
from llama_index_agentic_kb.guard.text import plain_value, strip_invisible
from llama_index_agentic_kb.llm import repair_json, strip_code_fence
from llama_index_agentic_kb.planning.findings import PassageSet
from llama_index_agentic_kb.planning.model_calls import ModelCall, PassageReader, model_record
from llama_index_agentic_kb.planning.parsing import Proposal, read_proposals
from llama_index_agentic_kb.planning.plan_graph import PlannerSource
from llama_index_agentic_kb.planning.planner import describe_sources
from llama_index_agentic_kb.prompts import REVISION_TEMPLATE, as_data

__all__ = ["Reviser", "Revision"]

MAX_QUERY: Final = 200
"""Characters of a proposed query: enough for a missing fact, and little for a passage that wants to send data out."""

MAX_GAPS: Final = 10


@dataclass(slots=True)
class Revision(ModelCall):
    """What a look for gaps gave.

    Args:
        sufficient: Whether nothing is missing, as the model judges; None where it could not say.
        gaps: What is missing, in words.
        proposals: Searches for it: plain words, and sources.
        warnings: What of them was left out.
        usage: The bill.
        error: Why there is no verdict.
    """

    sufficient: bool | None = None
    gaps: list[str] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Reviser(PassageReader):
    """Judges with a language model whether the evidence is sufficient.

    The model has read retrieved text, which may say what to search. So what it proposes is bounded: plans and filters
    come only from the user's messages. A proposal is a short line of plain words and the names of allowed sources; it
    has no filter, builds on no other, and changes no planned search.

    Its arguments are those of ``PassageReader``.
    """

    default_template = REVISION_TEMPLATE

    async def revise(
        self,
        question: str,
        searches: str,
        passages: PassageSet,
        sources: Sequence[PlannerSource],
        *,
        limit: int,
        deadline: float | None,
        log: ActivityLog,
    ) -> Revision:
        """Ask once; a failure is reported, never raised.

        Args:
            question: What the evidence is for.
            searches: What was searched and found, one search a line.
            passages: The passages.
            sources: Those that may be searched.
            limit: Searches that may be proposed.
            deadline: ``time.monotonic()`` at which it is given up.
            log: The request's account; the call has a record in it.
        """
        revision = Revision()
        spotlight = draw(self.spotlighting)
        with model_record(log, self.model, "revision") as record:
            messages = self.template.format_messages(
                llm=self.model.llm,
                max_sub_queries=str(limit),
                sources=as_data(describe_sources(sources)),
                context_str=passages.as_prompt(spotlight),
                searches=as_data(searches),
                query_str=as_data(question),
            )
            try:
                reply = await self.model.chat(messages, deadline=deadline)
                revision.usage = reply.usage
                read = partial(_read, revision, spotlight.unmarked(reply.text))
                await Call(sync=read, deadline=deadline, what="reading the verdict")
            except Exception as error:  # noqa: BLE001 (without a verdict, what was found is what there is)
                revision.fail(error)
            revision.close(
                log,
                record,
                sub_queries=[proposal.query for proposal in revision.proposals],
                warning="; ".join([*revision.gaps, *revision.warnings]) or None,
            )
        return revision


def _read(revision: Revision, text: str) -> None:
    """Read a verdict into a revision.

    Raises:
        PlanningError: There is no verdict in the text.
    """
    body = strip_code_fence(text)
    start = body.find("{")
    value: Any = repair_json(body[start:]) if start >= 0 else None
    if not isinstance(value, dict) or not {"sufficient", "sub_queries", "gaps"} & value.keys():
        raise PlanningError(f"the model's reply holds no verdict: {one_line(text[:400], 80)!r}")
    gaps = value.get("gaps")
    revision.gaps = (
        [one_line(strip_invisible(str(gap)), 200) for gap in gaps[:MAX_GAPS]] if isinstance(gaps, list) else []
    )
    sufficient = value.get("sufficient")
    revision.sufficient = sufficient if isinstance(sufficient, bool) else None
    if not revision.sufficient and isinstance(value.get("sub_queries"), list):
        revision.proposals = _bounded(revision, read_proposals({"sub_queries": value["sub_queries"]}))


def _bounded(revision: Revision, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return what a proposal may have that retrieved text has had a say in."""
    if any(proposal.filter for proposal in proposals):
        revision.warnings.append("filters of the revision were left out: filters come only from the user's messages")
    plain = (
        replace(item, query=one_line(plain_value(item.query), MAX_QUERY), filter="", finds="", depends_on=())
        for item in proposals
    )
    return [item for item in plain if item.query]
