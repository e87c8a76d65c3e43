"""The parts of an ``Answer``: given results, references, steps, the resource itself, and the pieces of a stream.

Everything is derived from the plan, the evidence and the activity log, without further model calls. As in
``RetrievalResponse.references``, sources without ``includeReferences``, content if ``includeReferenceSourceData`` is
false, and permission metadata are omitted.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import (
    BaseNode,
    Document,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from llama_index_agentic_kb._text import excerpt, one_line, without_surrogates
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.evidence.candidates import PROVENANCE_KEY, provenance
from llama_index_agentic_kb.grounding.citations import MarkerCuts, MarkerFilter, Markers
from llama_index_agentic_kb.grounding.claims import Claim, split_claims
from llama_index_agentic_kb.guard.text import strip_invisible
from llama_index_agentic_kb.retriever import AgenticRetriever, Retrieval
from llama_index_agentic_kb.schema import (
    AgenticReasoningActivity,
    MissingPart,
    ModelQueryPlanningActivity,
    Outcome,
    ReasoningEffort,
    Reference,
    ResultsProcessing,
    RetrievalRequest,
    SourceActivity,
    SourceData,
    SubQuery,
    SubQueryOrigin,
)
from llama_index_agentic_kb.schema import answer as answers
from llama_index_agentic_kb.schema.activity import Confidence, QueryClassification, QueryPlan
from llama_index_agentic_kb.schema.grounding import GroundingLedger
from llama_index_agentic_kb.sources import KnowledgeSource

PAGE_KEYS: Final = ("page_label", "page_identifier", "pageIdentifier", "page_number", "page")
"""Metadata keys of a passage's page, in order of preference; LlamaIndex's PDF readers set ``page_label``."""
RECORD_KEYS: Final = ("struct_data", "structData")  # metadata keys of structured data: Google's name, in both spellings
CALIBRATED: Final = 4.0  # the maximum score of calibrated rerankers
MAX_RECORD: Final = 100_000  # maximum characters of a text to try to parse as a JSON record
MAX_LEVELS: Final = 20  # maximum nesting depth of a JSON record; deeper JSON is treated as text
MAX_VALUE: Final = 10_000  # maximum characters of a field as JSON; longer ones (such as sentence windows) are omitted
MAX_METADATA: Final = 50_000  # maximum total characters of the metadata fields; fields beyond it are omitted

MAX_THOUGHT: Final = 1_000
SNIPPET_WORDS: Final = 30
MAX_SNIPPET: Final = 240

SUB_QUESTION: Final = "sub-question"  # ``MissingPart.what`` of a part of the question without evidence
SUPPLIED_SOURCE: Final = "given_results"  # the name of the source of supplied results
MAX_NAME: Final = 1_000  # maximum characters of a result's name to use in a node id
_ANSWERED: Final = frozenset((Outcome.OK, Outcome.EMPTY))


# -- results of the caller: evidence in the given order, without any search (Google: searchResultList) -----------------


class SuppliedResults(KnowledgeSource):
    """A source that returns all supplied results, in the given order, for every query; each becomes one node."""

    def __init__(self, results: Sequence[answers.AnswerReference]) -> None:
        nodes: dict[str, TextNode] = {}
        for position, result in enumerate(results):
            name = result.chunk if isinstance(result, answers.ChunkReference) else result.document
            name = without_surrogates(name[:MAX_NAME]) or f"result-{position}"
            while name in nodes:
                name += f"#{position}"
            nodes[name] = _node(name, result)
        made = zip(nodes.values(), results, strict=True)
        self._made = {node.node_id: (node.text, result) for node, result in made}
        super().__init__(
            SUPPLIED_SOURCE,
            "Results that came with the question.",
            retriever=_SameNodes(list(nodes.values())),
            similarity_top_k=max(1, len(nodes)),
            native_async=True,
        )

    def result_of(self, node: BaseNode) -> answers.AnswerReference | None:
        """Return the result that a node was created from; None if there is none or the node's text was changed."""
        text, result = self._made.get(node.node_id, ("", None))
        return result if node.get_content(metadata_mode=MetadataMode.NONE) == text else None


def _node(node_id: str, result: answers.AnswerReference) -> TextNode:
    fields = {"title": result.title, "url": result.uri}
    own: JsonObject = {}
    if isinstance(result, answers.ChunkReference):
        text, own = result.content, result.metadata
        fields["page_identifier"] = result.page_identifier
    elif isinstance(result, answers.DocumentReference):
        text, own = "\n\n".join(chunk.content for chunk in result.chunks if chunk.content), result.metadata
    else:
        text = json.dumps(result.data, ensure_ascii=False, default=str) if result.data else ""
    metadata = {**own, **{key: value for key, value in fields.items() if value}}
    node = TextNode(id_=node_id, text=without_surrogates(text), metadata=metadata)
    if isinstance(result, answers.ChunkReference) and result.document:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=result.document)
    return node


class _SameNodes(BaseRetriever):
    """Returns the same nodes for every query, without scores."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self._nodes = list(nodes)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        del query_bundle
        return [NodeWithScore(node=node) for node in self._nodes]


def supplied_retriever(results: Sequence[answers.AnswerReference], like: AgenticRetriever) -> AgenticRetriever:
    """Return a retriever over supplied results only, with the model, options and callbacks of another."""
    names = ("llm", "max_runtime_in_seconds", "principal", "observer", "options", "callback_manager")
    return AgenticRetriever([SuppliedResults(results)], **{name: getattr(like, name) for name in names})


def supplied_request(request: RetrievalRequest, results: Sequence[answers.AnswerReference]) -> RetrievalRequest:
    """Return the request changed so that all results are returned in order, without planning."""
    changes: JsonObject = {"retrieval_reasoning_effort": ReasoningEffort.MINIMAL, "knowledge_source_params": []}
    changes |= {"results_processing": ResultsProcessing.NONE, "max_output_documents": max(1, len(results))}
    return request.model_copy(update=changes)


# -- references --------------------------------------------------------------------------------------------------------


def answer_references(retrieval: Retrieval) -> dict[str, answers.AnswerReference]:
    """Return the references of all evidence, cited or not, by the N of ``[ref_id:N]``; hidden ones leave gaps.

    A record is structured (an object under ``struct_data``, or JSON text, or metadata without text), a ``Document`` a
    document, any other node a chunk. The relevance score is a calibrated reranker's score divided by 4, else None.
    """
    return {shown.id: _reference(retrieval, shown) for shown in retrieval.references}


def _reference(retrieval: Retrieval, shown: Reference) -> answers.AnswerReference:
    node, source = retrieval.nodes[int(shown.id)], retrieval.selected[shown.knowledge_source_name].source
    relevance, data, inner = _unit_relevance(shown), shown.source_data, node.node
    supplied = source.result_of(inner) if isinstance(source, SuppliedResults) else None
    if supplied is not None:
        scored = relevance is not None and isinstance(supplied, answers.ChunkReference)
        return supplied.model_copy(update={"relevance_score": relevance}) if scored else supplied
    named: JsonObject = {"document": shown.doc_key, "uri": shown.url or "", "title": shown.title}
    # The kind must not depend on whether the content is shown.
    record = _record(data or source.source_data(node))
    if record is not None:
        return answers.StructuredReference(**named, data={} if data is None else _small_fields(record))
    body: JsonObject = {"relevance_score": relevance}
    if data is not None:
        body |= {"content": data.content, "page_identifier": _page(data.metadata)}
        named["metadata"] = _small_fields(data.metadata)
    if isinstance(inner, Document) or shown.doc_key == inner.node_id:
        return answers.DocumentReference(**named, chunks=[] if data is None else [answers.ChunkContent(**body)])
    return answers.ChunkReference(**named, **body, chunk=inner.node_id)


def _page(metadata: JsonMapping) -> str:
    pages = map(metadata.get, PAGE_KEYS)
    return next((str(page) for page in pages if isinstance(page, (str, int)) and str(page)), "")


def _unit_relevance(shown: Reference) -> float | None:
    return None if shown.reranker_score is None else min(1.0, max(0.0, shown.reranker_score / CALIBRATED))


def _record(data: SourceData) -> JsonMapping | None:
    """Return the structured data of a node, or None if the node is plain text."""
    for key in RECORD_KEYS:
        record = data.metadata.get(key)
        if isinstance(record, Mapping) and record:
            return record
    text = data.content.strip()
    if not text:
        return {key: value for key, value in data.metadata.items() if key != PROVENANCE_KEY} or None
    if not (text.startswith("{") and text.endswith("}") and len(text) <= MAX_RECORD):
        return None
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if value and _is_flat(value) else None


def _is_flat(value: object, level: int = 0) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return level < MAX_LEVELS and all(_is_flat(part, level + 1) for part in parts)


def _small_fields(fields: JsonMapping) -> JsonObject:
    """Return the fields without those that exceed the size limits, in their order."""
    kept: JsonObject = {}
    left = MAX_METADATA
    for key, value in fields.items():
        size = len(key) + len(json.dumps(value, ensure_ascii=False, default=str))
        if size <= min(MAX_VALUE, left):
            kept[key] = value
            left -= size
    return kept


# -- steps -------------------------------------------------------------------------------------------------------------


def answer_steps(retrieval: Retrieval, mode: answers.ResultMode | None = None) -> list[answers.AnswerStep]:
    """Return a step for each round of searches, including revisions, with an action for each query.

    The results of an action are the evidence that its search found (in mode ``chunks``, its passages). They are None
    if the search failed or was skipped. A step has failed if all its searches failed.
    """
    outcomes = _outcomes(retrieval)
    for part in retrieval.missing:
        if part.sub_query_id is not None:
            outcomes.setdefault(part.sub_query_id, [part.outcome])
    rounds = defaultdict[int, list[SubQuery]](list)
    for sub_query in retrieval.outcome.plan.sub_queries:
        rounds[sub_query.wave].append(sub_query)
    thoughts = _thoughts(retrieval, sorted(rounds))
    steps = []
    for number, planned in sorted(rounds.items()):
        step = answers.AnswerStep(state=answers.AnswerState.FAILED, thought=thoughts[number])
        for sub_query in planned:
            results = None
            if not _ANSWERED.isdisjoint(outcomes.get(sub_query.id, ())):
                results, step.state = _observations(sub_query, retrieval, mode), answers.AnswerState.SUCCEEDED
            step.actions.append(answers.AnswerStepAction(query=sub_query.query, results=results))
        ended = [outcome for one in planned for outcome in outcomes.get(one.id, [Outcome.SKIPPED])]
        step.description = _description(planned, ended)
        steps.append(step)
    return steps


def _outcomes(retrieval: Retrieval) -> dict[str, list[Outcome]]:
    """Return the outcomes of the searches by sub-query id; a search without remaining results is EMPTY."""
    outcomes = defaultdict[str, list[Outcome]](list)
    for record in retrieval.log.records:
        if isinstance(record, SourceActivity):
            is_empty = record.outcome is Outcome.OK and record.count == 0
            outcomes[record.sub_query_id].append(Outcome.EMPTY if is_empty else record.outcome or Outcome.SKIPPED)
    return outcomes


def _description(planned: Sequence[SubQuery], ended: Sequence[Outcome]) -> str:
    origins = {sub_query.origin for sub_query in planned}
    if all(sub_query.sources == [SUPPLIED_SOURCE] for sub_query in planned):
        done = "Read the results that were given."
    elif SubQueryOrigin.REVISION in origins:
        done = "Search for what is missing."
    elif planned[0].wave > 1:
        done = "Search with what was found."
    elif SubQueryOrigin.PLANNER in origins:
        done = "Rephrase the query and search."
    else:
        done = "Search the intents of the query." if SubQueryOrigin.INTENT in origins else "Search the query."
    lost = sum(outcome not in _ANSWERED for outcome in ended)
    which = f"{lost} of {len(ended)} searches" if len(ended) > 1 else "The search"
    return f"{done} {which} gave no answer." if lost else done


def _thoughts(retrieval: Retrieval, rounds: Sequence[int]) -> dict[int, str]:
    """Return the thought of each round; a finding stands in the first round that builds on it, else in its own."""
    reasoning = retrieval.log.last(AgenticReasoningActivity)
    if reasoning is None or not rounds:
        return dict.fromkeys(rounds, "")
    lines = defaultdict[int, list[str]](list)
    # If signals decided about planning, the decision starts with that reason, followed by the reason for stopping.
    decision = reasoning.decision or ""
    why, _, stop = decision.partition("; ") if reasoning.signals is not None else ("", "", decision)
    lines[rounds[0]].append(why)
    shown = set(map(attrgetter("node_id"), retrieval.references))
    hidden = set(map(attrgetter("node.node_id"), retrieval.nodes)) - shown
    for finding in reasoning.findings or ():
        if finding.node_id not in hidden:
            number, subject = _place(finding.sub_query_id, retrieval.outcome.plan)
            lines[rounds[-1] if number is None else number].append(f"{one_line(subject)}: {one_line(finding.value)}")
    lines[rounds[-1]].append(stop)
    return {number: one_line("; ".join(filter(None, lines[number])), MAX_THOUGHT) for number in rounds}


def _place(name: str, plan: QueryPlan) -> tuple[int | None, str]:
    """Return the round in which what a sub-query found stands, None if it is not planned, and what it looks for."""
    own = next((one for one in plan.sub_queries if one.id == name), None)
    names = {name, own and own.part_of}
    builds_on = [one.wave for one in plan.sub_queries if not names.isdisjoint(one.depends_on)]
    return min(builds_on, default=own.wave if own else None), own.finds or own.query if own else name


def _observations(
    sub_query: SubQuery, retrieval: Retrieval, mode: answers.ResultMode | None
) -> list[answers.SearchObservation]:
    """Return the documents found by a sub-query, without duplicates, in the order of the evidence."""
    found: dict[tuple[str, str], answers.SearchObservation] = {}
    for reference in retrieval.references:
        searches = (provenance(retrieval.nodes[int(reference.id)]) or {}).get("searches", ())
        if all(search.get("sub_query") != sub_query.id for search in searches):
            continue
        observation = found.setdefault(
            (reference.knowledge_source_name, reference.doc_key),
            answers.SearchObservation(document=reference.doc_key, uri=reference.url or "", title=reference.title),
        )
        data = reference.source_data
        content = "" if data is None else data.content
        if data is not None and not observation.metadata:
            observation.metadata = _small_fields(_record(data) or data.metadata)
        if mode is answers.ResultMode.CHUNKS:
            chunk = answers.ChunkReference(
                chunk=reference.node_id, content=content, relevance_score=_unit_relevance(reference)
            )
            observation.chunks.append(chunk)
        elif content.strip():
            words = excerpt(strip_invisible(content), sub_query.query, SNIPPET_WORDS)
            observation.snippets.append(answers.Snippet(snippet=one_line(words, MAX_SNIPPET)))
    return list(found.values())


_READ: Final = ("findings", Outcome.OK)  # purpose and outcome of a call in which passages were read for findings
_WHY: Final = {
    Outcome.TIMEOUT: "its searches gave no answer in time",
    Outcome.ERROR: "its searches failed",
    Outcome.DENIED: "it could not be searched",
    Outcome.SKIPPED: "it was not searched",
    Outcome.EMPTY: "nothing was found for it",
    Outcome.OK: "no passage that was found answers it",
}


def unanswered_parts(retrieval: Retrieval) -> list[MissingPart]:
    """Return the planned sub-queries without evidence: nothing was found, or others wait for an answer that is missing.

    The question itself is not reported here: if nothing at all is found, the evidence is reported as missing.
    """
    plan, outcomes = retrieval.outcome.plan, _outcomes(retrieval)
    parts = defaultdict[str, list[SubQuery]](list)
    for sub_query in plan.sub_queries:
        if sub_query.origin is not SubQueryOrigin.QUESTION:
            parts[sub_query.part_of or sub_query.id].append(sub_query)
    (waited_for, answered), missing = _waited_for(retrieval), []
    for name, branches in parts.items():
        outcome = _outcome([outcome for branch in branches for outcome in outcomes.get(branch.id, ())])
        is_open = name in waited_for and answered.isdisjoint((name, *(branch.id for branch in branches)))
        if outcome is not Outcome.OK or is_open:
            reason = f"{one_line(branches[0].query)}: {_WHY[outcome]}"
            ended_as = Outcome.EMPTY if outcome is Outcome.OK else outcome
            part = MissingPart(what=SUB_QUESTION, outcome=ended_as, reason=reason, sub_query_id=branches[0].id)
            missing.append(part)
    return missing


def _waited_for(retrieval: Retrieval) -> tuple[set[str], set[str]]:
    """Return the sub-queries that others wait for, if passages were read for their findings, and the answered ones."""
    found, planned = retrieval.outcome.findings, retrieval.outcome.plan.sub_queries
    for record in retrieval.log.records:
        if isinstance(record, ModelQueryPlanningActivity) and (record.purpose, record.outcome) == _READ:
            waited_for = {parent for sub_query in planned for parent in sub_query.depends_on}
            return waited_for, {one.sub_query_id for one in found if one.confidence is not Confidence.PARTIAL}
    return set(), set()


def _outcome(ended: Sequence[Outcome]) -> Outcome:
    """Return OK if one of several searches found something, else the first failure, else whether one was made."""
    if Outcome.OK in ended:
        return Outcome.OK
    nothing = Outcome.EMPTY if Outcome.EMPTY in ended else Outcome.SKIPPED
    return next((one for one in ended if one.failed), nothing)


def completed(
    answer: answers.Answer,
    query: answers.AnswerQuery,
    *,
    references: Mapping[str, answers.AnswerReference],
    ledger: GroundingLedger | None = None,
    classifications: Sequence[QueryClassification] | None = None,
) -> answers.Answer:
    """Return an answer with the references, citations and further parts that its query requests.

    A withheld answer has no citations or supports, since its text was replaced, but keeps its references.
    """
    ledger = ledger or GroundingLedger()
    checked = GroundingLedger() if answer.skipped_reasons else ledger
    checked.check_spans(answer.text)
    ids, scored = list(references), query.grounding_supports or query.filtering_level is not None
    judged = {classification.type: classification for classification in classifications or ()}
    parts = {
        "language": query.language,
        "grounding_score": ledger.grounding_score if scored else None,
        "citations": answers.ledger_citations(checked, ids) if query.include_citations else [],
        "grounding_supports": answers.ledger_supports(checked, ids) if query.grounding_supports else [],
        "references": list(references.values()),
        # None, rather than an empty list, if none of the requested classes was judged.
        "query_classifications": list(filter(None, map(judged.get, query.classify))) or None,
        "skipped_reasons": list(dict.fromkeys(answer.skipped_reasons)),
    }
    return answers.Answer(**{**dict(answer), **parts})


# -- pieces of a stream ------------------------------------------------------------------------------------------------

_ENDS: Final = frozenset(".!?]\n。！？")  # noqa: RUF001 (full-width ends of sentences)
"""Characters after which a claim may have ended."""
MAX_PARAGRAPH: Final = 8_000  # maximum characters of a paragraph with streamed citations; the final answer has them all
READS: Final = 20  # how often a paragraph is parsed again: whenever it has grown by a fraction of ``1 / READS``
_FENCE: Final = re.compile(r"^[ \t]{0,3}(?:`{3,}|~{3,})", re.MULTILINE)


class Pieces:
    """Converts streamed text to pieces: text without markers, and citations after each claim.

    A claim is cited once the next one has started, since markers may follow it. Spans refer to the text without
    markers. ``reference_ids`` are in the answer's order; other markers are ignored.
    """

    def __init__(self, reference_ids: Sequence[str], *, cite: bool) -> None:
        self._index = {int(reference): position for position, reference in enumerate(reference_ids)}
        self._markers = MarkerFilter(range(max(self._index, default=-1) + 1), Markers.STRIP)
        self._cite = cite
        self._raw = ""
        self._shown = ""
        self._base = 0  # start position of the current paragraph
        self._split = 0  # length of the answer when it was last parsed
        self._cited = 0  # number of claims of the current paragraph that are already cited

    def feed(self, delta: str) -> list[answers.TextPiece | answers.CitationPiece]:
        """Add a delta of the answer, including markers, and return the completed pieces."""
        self._raw += delta
        # Parsing again only after 5 % growth keeps the cost low.
        due = (len(self._raw) - self._split) * READS >= len(self._raw) - self._base
        return self._pieces(self._markers.feed(delta), cite=due and not _ENDS.isdisjoint(delta), whole=False)

    def close(self) -> list[answers.TextPiece | answers.CitationPiece]:
        """Return the remaining pieces after the last delta."""
        return self._pieces(self._markers.close(), cite=True, whole=True)

    def _pieces(self, shown: str, *, cite: bool, whole: bool) -> list[answers.TextPiece | answers.CitationPiece]:
        """Return a text, and with ``cite`` the citations of the claims that are complete; ``whole``: of all."""
        self._shown += shown
        pieces: list[answers.TextPiece | answers.CitationPiece] = [answers.TextPiece(text=shown)] if shown else []
        if not (self._cite and cite and len(self._raw) - self._base <= MAX_PARAGRAPH):
            return pieces
        cuts, base = MarkerCuts(self._raw), self._base
        self._split = len(self._raw)
        claims = split_claims(self._raw[base:])
        for claim in (claims if whole else claims[:-1])[self._cited :]:
            start, end = cuts.moved(base + claim.span.start, base + claim.span.end, self._shown)
            if end > len(self._shown):
                break
            self._cited += 1
            sources = [self._index[number] for number in claim.cited if number in self._index]
            if sources and start < end:
                pieces.append(answers.CitationPiece(citation=answers.Citation(start=start, end=end, sources=sources)))
        if self._cited < len(claims):
            self._go_on(claims)
        return pieces

    def _go_on(self, claims: Sequence[Claim]) -> None:
        """Go on in the paragraph of the next claim, but not within a code block, which may contain empty lines."""
        base = self._base
        end = self._raw.rfind("\n\n", base, base + claims[self._cited].span.start)
        if end >= 0 and not len(_FENCE.findall(self._raw, base, end)) % 2:
            self._base = end + 2
            self._cited = sum(claim.span.start >= self._base - base for claim in claims[: self._cited])
