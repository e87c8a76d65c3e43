"""The steps on the way to an answer: what was searched, wave by wave, and which of the evidence each search found.

Everything is read off the plan and the account of what was really done; a model is not asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._text import excerpt, one_line
from llama_index_agentic_kb.answering.given_results import GIVEN_SOURCE
from llama_index_agentic_kb.answering.references import unit_relevance
from llama_index_agentic_kb.evidence.provenance import provenance, references
from llama_index_agentic_kb.guard.hidden import strip_invisible
from llama_index_agentic_kb.schema import (
    ActivityRecord,
    AgenticReasoningActivity,
    Finding,
    MissingPart,
    Outcome,
    QueryPlan,
    Reference,
    SourceActivity,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.schema.answer import (
    AnswerStep,
    AnswerStepAction,
    ChunkReference,
    SearchObservation,
    Snippet,
    StepState,
)
from llama_index_agentic_kb.schema.answer_query import ResultMode
from llama_index_agentic_kb.sources.selection import SelectedSource

__all__ = ["answer_steps"]

THOUGHT_CHARACTERS: Final = 1_000
SNIPPET_WORDS: Final = 30
SNIPPET_CHARACTERS: Final = 240


def answer_steps(
    plan: QueryPlan,
    records: Sequence[ActivityRecord],
    nodes: Sequence[NodeWithScore],
    missing: Sequence[MissingPart],
    *,
    selected: Mapping[str, SelectedSource],
    mode: ResultMode | None = None,
) -> list[AnswerStep]:
    """Give a step for each wave of searches, a revision's included, with an action for each query.

    An action's results are what of the evidence its search found; none where nothing of it was kept, and None where
    it failed or was not made. A step whose every search failed has failed. Its thought is what earlier steps found
    that it builds on; of the first step also why there was a plan, or none, of the last also why it came to that, or
    that it was the last.

    Args:
        plan: What was searched.
        records: The request's account.
        nodes: The evidence, as the retrieval gave it.
        missing: What could not be had.
        selected: The sources that were searched, by name; what they don't show as references is not observed.
        mode: ``chunks`` tells what was found as passages; else as documents with snippets.
    """
    searches = _Searches(records, missing)
    observed = _Observed(nodes, selected, as_chunks=mode is ResultMode.CHUNKS)
    waves: dict[int, list[SubQuery]] = {}
    for sub_query in plan.sub_queries:
        waves.setdefault(sub_query.wave, []).append(sub_query)
    steps = []
    shown = {one.node_id for one in references(nodes, selected)}
    hidden = {node.node.node_id for node in nodes} - shown
    thoughts = _thoughts(plan, records, sorted(waves), hidden)
    for wave in sorted(waves):
        asked = waves[wave]
        actions = [
            AnswerStepAction(query=one.query, results=observed.by(one) if searches.answered(one) else None)
            for one in asked
        ]
        lost = all(action.results is None for action in actions)
        steps.append(
            AnswerStep(
                state=StepState.FAILED if lost else StepState.SUCCEEDED,
                description=_description(asked, searches),
                thought=thoughts[wave],
                actions=actions,
            )
        )
    return steps


class _Searches:
    """How the searches of each sub-query ended."""

    def __init__(self, records: Iterable[ActivityRecord], missing: Iterable[MissingPart]) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}
        for record in records:
            if isinstance(record, SourceActivity):
                self._outcomes.setdefault(record.sub_query_id, []).append(record.outcome or Outcome.SKIPPED)
        for part in missing:
            if part.sub_query_id is not None and part.sub_query_id not in self._outcomes:
                self._outcomes[part.sub_query_id] = [part.outcome]

    def answered(self, sub_query: SubQuery) -> bool:
        return any(one in (Outcome.OK, Outcome.EMPTY) for one in self._outcomes.get(sub_query.id, ()))

    def count(self, sub_queries: Iterable[SubQuery]) -> tuple[int, int]:
        """Give how many searches were lost, of how many."""
        ended = [one for sub_query in sub_queries for one in self._outcomes.get(sub_query.id, [Outcome.SKIPPED])]
        return sum(one not in (Outcome.OK, Outcome.EMPTY) for one in ended), len(ended)


def _description(asked: Sequence[SubQuery], searches: _Searches) -> str:
    lost, made = searches.count(asked)
    told = _what_was_done(asked)
    if not lost:
        return told
    return f"{told} {lost} of {made} searches gave no answer." if made > 1 else f"{told} The search gave no answer."


def _what_was_done(asked: Sequence[SubQuery]) -> str:
    origins = {one.origin for one in asked}
    if all(one.sources == [GIVEN_SOURCE] for one in asked):
        return "Read the results that were given."
    if SubQueryOrigin.REVISION in origins:
        return "Search for what is missing."
    if asked[0].wave > 1:
        return "Search with what was found."
    if SubQueryOrigin.PLANNER in origins:
        return "Rephrase the query and search."
    return "Search the intents of the query." if SubQueryOrigin.INTENT in origins else "Search the query."


# -- thoughts --------------------------------------------------------------------------------------------------------


def _thoughts(
    plan: QueryPlan, records: Sequence[ActivityRecord], waves: Sequence[int], hidden: Collection[str]
) -> dict[int, str]:
    """Give the thought of each wave; what was read in a passage that is not shown is not told."""
    reasoning = next((one for one in reversed(records) if isinstance(one, AgenticReasoningActivity)), None)
    if reasoning is None or not waves:
        return dict.fromkeys(waves, "")
    lines: dict[int, list[str]] = {wave: [] for wave in waves}
    # Where signals decided about planning, the decision begins with that; the rest is why it went on, or stopped.
    why, stop = _halves(reasoning.decision or "") if reasoning.signals is not None else ("", reasoning.decision or "")
    lines[waves[0]] += [why] if why else []
    for finding in reasoning.findings or ():
        if finding.node_id not in hidden:
            lines[_wave_of(finding, plan, waves)].append(_told(finding, plan))
    lines[waves[-1]] += [stop] if stop else []
    return {wave: one_line("; ".join(told), THOUGHT_CHARACTERS) for wave, told in lines.items()}


def _halves(decision: str) -> tuple[str, str]:
    first, _, rest = decision.partition("; ")
    return first, rest


def _wave_of(finding: Finding, plan: QueryPlan, waves: Sequence[int]) -> int:
    """Give the wave that first builds on a finding; else that which found it; else the last."""
    own = next((one for one in plan.sub_queries if one.id == finding.sub_query_id), None)
    names = {finding.sub_query_id} | ({own.part_of} if own is not None and own.part_of else set())
    builds_on = [one.wave for one in plan.sub_queries if names & set(one.depends_on)]
    if builds_on:
        return min(builds_on)
    return waves[-1] if own is None else own.wave


def _told(finding: Finding, plan: QueryPlan) -> str:
    own = next((one for one in plan.sub_queries if one.id == finding.sub_query_id), None)
    wanted = finding.sub_query_id if own is None else own.finds or own.query
    return f"{one_line(wanted)}: {one_line(finding.value)}"


# -- observations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """A piece of evidence that may be shown."""

    shown: Reference
    found_by: frozenset[str]
    relevance: float | None


class _Observed:
    """What of the evidence each search found, in the order of the evidence."""

    def __init__(
        self, nodes: Sequence[NodeWithScore], selected: Mapping[str, SelectedSource], *, as_chunks: bool
    ) -> None:
        self._as_chunks = as_chunks
        self._kept = []
        for shown in references(nodes, selected):
            mark: dict[str, Any] = provenance(nodes[int(shown.id)]) or {}
            found_by = frozenset(one.get("sub_query", "") for one in mark.get("searches", ()))
            self._kept.append(_Kept(shown, found_by, unit_relevance(shown.reranker_score)))

    def by(self, sub_query: SubQuery) -> list[SearchObservation]:
        """Give the documents that a sub-query found, each once, with its passages."""
        found: dict[tuple[str, str], SearchObservation] = {}
        for kept in self._kept:
            if sub_query.id not in kept.found_by:
                continue
            shown = kept.shown
            observation = found.setdefault(
                (shown.knowledge_source_name, shown.doc_key),
                SearchObservation(document=shown.doc_key, uri=shown.url or "", title=shown.title),
            )
            content = "" if shown.source_data is None else shown.source_data.content
            if self._as_chunks:
                chunk = ChunkReference(chunk=shown.node_id, content=content, relevance_score=kept.relevance)
                observation.chunks.append(chunk)
            elif content.strip():
                observation.snippets.append(Snippet(snippet=_snippet(content, sub_query.query)))
        return list(found.values())


def _snippet(content: str, query: str) -> str:
    """Give a few plain words of a passage, those around the query's."""
    return one_line(excerpt(strip_invisible(content), query, SNIPPET_WORDS), SNIPPET_CHARACTERS)
