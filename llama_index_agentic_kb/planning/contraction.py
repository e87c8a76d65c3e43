"""Narrows the results of a question to the documents that the conversation is about (scope contraction).

    the message, its context, its query ─▶ documents near any of them: the scope ─▶ passages of others are left out

The whole corpus is searched, and its results are filtered: on Chroma a filter by document costs 20 to 100 times what
the search itself does (measured), and in a store the exact search of all vectors is as fast. So the search of the whole
corpus is at hand as a check: the best passages of each list are kept whatever the scope says, and the share of them
that is outside is reported. The scope is no permission: it is applied to what the caller may see.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, Job, call_deadline, cancel, deadline_after, earliest, start, wait
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.evidence.candidates import provenance
from llama_index_agentic_kb.schema import ScopedDocument, ScopeReason, ScopeState, SubQueryOrigin, Topic, TurnScope
from llama_index_agentic_kb.search.embedding import Vector
from llama_index_agentic_kb.search.follow_up import DECAY, FollowUp
from llama_index_agentic_kb.search.prototypes import Floats, ScopeIndex, ScopeSettings, unit_rows
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.sources.fan_out import FanOut, SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey
from llama_index_agentic_kb.sources.vectors import model_name_of, vector_reader

SMALL_CORPUS: Final = 200  # number of documents below which a search is not narrowed
MIN_SCOPE: Final = 20
MAX_SHARE: Final = 0.25
"""Minimum number of documents in a scope, and their maximum share of all."""
CONTEXT_MARGIN: Final = 0.25
"""Standard deviations by which a document must be nearer to the context or the query than to the message itself."""
SHIFT_MARGIN: Final = 0.5
"""Standard deviations by which a document may be farther from a message that changes the topic."""
CANARIES: Final = 3  # number of passages of each list that are kept whatever the scope says
MAX_SECONDS: Final = 0.5
RECENT_DOCUMENTS: Final = 5
"""Number of a turn's documents that stay in the scope of the next turns."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """The documents of a scope, as (source, document)."""

    documents: frozenset[tuple[str, str]] = frozenset()
    sources: frozenset[str] = frozenset()
    """The sources that the scope covers; documents of others are always in it."""
    total: int = 0
    """The number of documents of these sources."""
    reason: ScopeReason | None = None
    """Why there is no scope; None if there is one."""

    def holds(self, source: str, node: NodeWithScore) -> bool:
        """Return whether a passage is in the scope."""
        return source not in self.sources or (source, _document(node)) in self.documents


def contract(
    indexes: Mapping[str, ScopeIndex],
    views: Sequence[Floats],
    kept: Iterable[tuple[str, str]] = (),
    *,
    is_shift: bool = False,
) -> Contraction:
    """Return the scope of a turn: the documents that stand out by their similarity to any of its views.

    A document stands out if its similarity is ``deviations`` standard deviations above the mean of all documents. The
    scope has between ``MIN_SCOPE`` documents and ``MAX_SHARE`` of all, and those of ``kept``.

    Args:
        indexes: The scope indexes of the searched sources, of one embedding model.
        views: The vectors of the message, which comes first, and of its context and its query.
        kept: Documents that stay in the scope, as (source, document).
        is_shift: Whether the message changes the topic: it then stands alone, and its own scope is wider.
    """
    total = sum(len(index.documents) for index in indexes.values())
    if total < SMALL_CORPUS:
        return Contraction(total=total, reason=ScopeReason.SMALL_CORPUS)
    rows = unit_rows(views)
    # a row per view: means along rows are ten times as fast
    similarity = np.ascontiguousarray(np.concatenate([index.similarities(rows) for index in indexes.values()]).T)
    settings = strictest([index.settings for index in indexes.values()])
    if float(similarity.max()) < settings.floor:
        return Contraction(total=total, reason=ScopeReason.LOW_SIMILARITY)
    mean, deviation = similarity.mean(axis=1, keepdims=True), similarity.std(axis=1, keepdims=True)
    standing: Floats = (similarity - mean) / np.maximum(deviation, 1e-6)
    standing[1:] -= CONTEXT_MARGIN
    if is_shift:
        standing[0] += SHIFT_MARGIN
    best: Floats = standing.max(axis=0)
    count = max(MIN_SCOPE, min(int((best >= settings.deviations).sum()), int(MAX_SHARE * total)))
    chosen = np.sort(np.argpartition(-best, count)[:count])
    documents, start = set(kept), 0
    for source, index in indexes.items():
        end = start + len(index.documents)
        own = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, end)] - start
        documents.update((source, index.documents[at]) for at in own.tolist())
        start = end
    return Contraction(frozenset(documents), frozenset(indexes), total)


def strictest(settings: Sequence[ScopeSettings]) -> ScopeSettings:
    """Return the settings for several sources: those that keep the most documents, and report the fewest shifts."""
    listed = settings or [ScopeSettings()]
    return ScopeSettings(
        min(one.deviations for one in listed), min(one.floor for one in listed), min(one.shift for one in listed)
    )


class Narrowing(NamedTuple):
    """How a turn was searched (None without a conversation), and the passages to leave out."""

    turn: TurnScope | None
    outside: frozenset[NodeKey] = frozenset()


NOT_NARROWED: Final = Narrowing(None)


class Conversation:
    """The conversation of one request: how its question is searched, and which results are kept.

    Args:
        follow_up: How the question is searched; None if a model plans, which reads the conversation itself.
        state: The state after the last turn; None if the caller keeps none.
        indexes: The scope indexes by source.
    """

    def __init__(self, follow_up: FollowUp | None, state: ScopeState | None, indexes: Mapping[str, ScopeIndex]) -> None:
        self._follow_up = follow_up or FollowUp("")
        self._planned = follow_up is None
        self._state = state or ScopeState()
        self._indexes = indexes
        self._measured: Job[tuple[TurnScope, Contraction | None]] | None = None

    def begin(self, fan_out: FanOut, searches: Sequence[SourceSearch]) -> None:
        """Compute the scope beside the first searches of the question, once ``fan_out`` has the query vectors."""
        searches = _of_question(searches)
        if self._measured is None and searches and self._follow_up.earlier:
            self._measured = start(self._measure(fan_out, searches))

    async def narrow(self, searches: Sequence[SourceSearch], limit: int) -> Narrowing:
        """Return how the turn was searched, and the passages outside its scope, which are to be left out.

        Of ``searches``, those of the question itself are narrowed, as long as ``limit`` passages are left.
        """
        number = self._state.turn + 1
        if self._planned:
            return Narrowing(TurnScope(turn=number, topic=Topic.UNKNOWN, reason=ScopeReason.PLANNED))
        if not self._follow_up.earlier:
            return Narrowing(TurnScope(turn=number, reason=ScopeReason.NO_HISTORY))
        if self._measured is None:  # nothing was searched
            return Narrowing(TurnScope(turn=number, topic=Topic.UNKNOWN, reason=ScopeReason.NO_INDEX))
        await wait([self._measured], deadline=deadline_after(2 * MAX_SECONDS))
        if not self._measured.done:  # the embedding model hangs
            await cancel(self._measured)
            return Narrowing(TurnScope(turn=number, topic=Topic.UNKNOWN, reason=ScopeReason.FAILED))
        turn, made = self._measured.result()
        if made is None:
            return Narrowing(turn)
        searches = _of_question(searches)
        changed, outside = _outside(searches, made, limit)
        if made.total and not any(search.source.permissions for search in searches):  # else counts would reveal some
            changed |= {"documents": made.total, "scope": len(made.documents) or None}
        else:
            changed.pop("scope_miss", None)
        return Narrowing(turn.model_copy(update=changed), outside)

    async def _measure(self, fan_out: FanOut, searches: Sequence[SourceSearch]) -> tuple[TurnScope, Contraction | None]:
        """Return the turn's drift and topic, and its scope; None without a scope index."""
        groups = await self._groups(fan_out, searches)
        drift, expanded = None, self._follow_up.expanded
        for vectors, _ in groups[:1]:
            drift = self._follow_up.drift(vectors.__getitem__)
            expanded = self._follow_up.settled(vectors.__getitem__).expanded
        shift = strictest([index.settings for _, indexes in groups for index in indexes.values()]).shift
        topic = Topic.CONTINUED if expanded or drift is None or drift >= shift else Topic.SHIFTED
        turn = TurnScope(
            turn=self._state.turn + 1,
            topic=Topic.UNKNOWN if drift is None else topic,
            drift=None if drift is None else round(drift, 4),
            expanded=expanded,
        )
        if not any(indexes for _, indexes in groups):
            return turn.model_copy(update={"reason": ScopeReason.NO_INDEX}), None
        started = time.monotonic()
        work = partial(self._contracted, groups, {one.source.name: one.source for one in searches}, turn.topic)
        deadline = earliest(call_deadline(), deadline_after(MAX_SECONDS))
        try:
            made = await Call(sync=work, deadline=deadline, what="scope contraction")
        except Exception as error:  # noqa: BLE001 (a search that is not narrowed loses nothing)
            logger.warning("the search was not narrowed: %s", error_message(error))
            made = Contraction(reason=ScopeReason.FAILED)
        return turn.model_copy(update={"scope_ms": round(1000 * (time.monotonic() - started), 1)}), made

    def after(self, turn: TurnScope, nodes: Sequence[NodeWithScore]) -> ScopeState:
        """Return the state after a turn that found these passages."""
        marks = [(provenance(node) or {}, _document(node)) for node in nodes]
        found = dict.fromkeys((str(mark["source"]), document) for mark, document in marks if mark.get("source"))
        documents = [ScopedDocument(source=source, document=document) for source, document in found]
        return self._state.after(turn, tuple(documents[:RECENT_DOCUMENTS]))

    async def _groups(
        self, fan_out: FanOut, searches: Sequence[SourceSearch]
    ) -> list[tuple[Mapping[str, Vector], dict[str, ScopeIndex]]]:
        """Return the query vectors of each embedding model, and the scope indexes of the sources that it searches."""
        groups: dict[int, tuple[Mapping[str, Vector], dict[str, ScopeIndex]]] = {}
        for name, source in {search.source.name: search.source for search in searches}.items():
            embedded = await fan_out.follow_up_vectors(source)
            if embedded is not None:
                model, vectors = embedded
                index = self._indexes.get(name)
                _, indexes = groups.setdefault(id(model), (vectors, {}))
                if index is not None and index.model == model_name_of(model):
                    indexes[name] = index
        return list(groups.values())

    def _contracted(
        self,
        groups: Sequence[tuple[Mapping[str, Vector], Mapping[str, ScopeIndex]]],
        sources: Mapping[str, KnowledgeSource],
        topic: Topic,
    ) -> Contraction:
        """Return the scope over all embedding models."""
        readers = {name: vector_reader(sources[name]) for _, indexes in groups for name in indexes}
        versions = {name: None if reader is None else reader.version() for name, reader in readers.items()}
        if any(versions[name] != index.version for _, indexes in groups for name, index in indexes.items()):
            return Contraction(reason=ScopeReason.INDEX_STALE)
        stay = {(one.source, one.document) for listed in (self._state.pinned, *self._state.recent) for one in listed}
        is_shift = topic is Topic.SHIFTED
        parts = [
            contract(indexes, self._views(vectors, indexes), stay, is_shift=is_shift)
            for vectors, indexes in groups
            if indexes
        ]
        made = [part for part in parts if part.reason is None]
        return Contraction(
            frozenset[tuple[str, str]]().union(*(part.documents for part in made)),
            frozenset[str]().union(*(part.sources for part in made)),
            sum(part.total for part in parts),
            None if made else parts[0].reason,
        )

    def _views(self, vectors: Mapping[str, Vector], indexes: Mapping[str, ScopeIndex]) -> list[Floats]:
        """Return the vectors of the message, its context (earlier messages, last documents), and its own query."""
        follow_up = self._follow_up.settled(vectors.__getitem__)
        own, query = unit_rows([vectors[follow_up.question], follow_up.vector(vectors.__getitem__)])
        context, history = own.copy(), follow_up.history(vectors.__getitem__)
        latest = self._state.recent[-1] if self._state.recent else ()
        last = {name: {one.document for one in latest if one.source == name} for name in indexes}
        rows = np.concatenate([index.prototypes_of(last[name]) for name, index in indexes.items()])
        if history is not None:
            context += DECAY * history.astype(np.float32)
        if len(rows):
            context += DECAY * unit_rows(rows.mean(axis=0, keepdims=True))[0]
        return [own, context] if follow_up.expanded is None else [own, context, query]


def _of_question(searches: Sequence[SourceSearch]) -> list[SourceSearch]:
    return [search for search in searches if search.sub_query.origin is SubQueryOrigin.QUESTION]


def _document(node: NodeWithScore) -> str:
    return node.node.ref_doc_id or node.node.node_id


def _outside(
    searches: Sequence[SourceSearch], made: Contraction, limit: int
) -> tuple[dict[str, Any], frozenset[NodeKey]]:
    """Return the fields to report, and the passages outside a scope; none if too few would remain."""
    if made.reason is not None:
        return {"reason": made.reason}, frozenset()
    best, inside, outside = list[bool](), set[NodeKey](), set[NodeKey]()
    for search in searches:
        for ranked in search.lists:
            held = [made.holds(search.source.name, node) for node in ranked.nodes]
            best += held[:CANARIES]
            for at, (key, is_held) in enumerate(zip(ranked.keys, held, strict=True)):
                (inside if is_held or at < CANARIES else outside).add(key)
    missed = {"scope_miss": round(1 - sum(best) / len(best), 3) if best else None}
    if len(inside) < limit:
        return {**missed, "reason": ScopeReason.TOO_SMALL}, frozenset()
    return missed, frozenset(outside - inside)
