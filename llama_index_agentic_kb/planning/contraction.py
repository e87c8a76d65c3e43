"""Narrows the results of a question to the documents that the conversation is about (scope contraction).

    the message, its context, its query ─▶ documents near any of them: the scope ─▶ passages of others are left out

The whole corpus is searched, and its results are filtered: on Chroma a filter by document costs 20 to 100 times what
the search itself does (measured), and in a store the exact search of all vectors is as fast. So the search of the whole
corpus is at hand as a check: the best passages of each list are kept whatever the scope says, and the share of them
that is outside is reported. The scope is no permission: it is applied to what the caller may see.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import compress
from typing import Final, NamedTuple

import numpy as np
from llama_index.core.schema import NodeWithScore

from llama_index_agentic_kb._aio import Call, call_deadline, deadline_after, earliest
from llama_index_agentic_kb._text import error_message
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.account.logs import logger
from llama_index_agentic_kb.evidence.candidates import provenance
from llama_index_agentic_kb.schema import ScopedDocument, ScopeReason, ScopeState, SubQueryOrigin, Topic, TurnScope
from llama_index_agentic_kb.search.follow_up import DECAY, Compared
from llama_index_agentic_kb.search.prototypes import Floats, ScopeIndex, ScopeSettings, VectorReader, unit_rows
from llama_index_agentic_kb.sources.fan_out import FanOut, SourceSearch
from llama_index_agentic_kb.sources.search import NodeKey
from llama_index_agentic_kb.sources.vectors import model_name_of, vector_reader

SMALL_CORPUS: Final = 200  # number of documents below which a search is not narrowed
MIN_SCOPE: Final = 20
MAX_SHARE: Final = 0.25
"""Minimum number of documents in a scope, and their maximum share of all."""
SHIFT_MARGIN: Final = 0.7  # standard deviations by which a document may be farther from a message on a new topic
CANARIES: Final = 3  # number of passages of each list that are kept whatever the scope says
MAX_SECONDS: Final = 0.5
RECENT_DOCUMENTS: Final = 5
"""Number of a turn's documents that stay in the scope of the next turns."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """A turn's scope, as far as its documents were asked for."""

    documents: frozenset[tuple[str, str]] = frozenset()  # those asked for that are in it, as (source, document)
    sources: frozenset[str] = frozenset()  # the sources that it covers; documents of others are always in it
    total: int = 0  # the number of documents of these sources
    size: int = 0  # the number of documents in it; an estimate for a source of more than ``SAMPLE`` documents
    reason: ScopeReason | None = None  # why there is no scope

    def holds(self, source: str, document: str) -> bool:
        """Return whether a document is in the scope."""
        return source not in self.sources or (source, document) in self.documents


def contract(
    indexes: Mapping[str, ScopeIndex],
    views: Sequence[Floats],
    asked: Mapping[str, Collection[str]],
    kept: Collection[tuple[str, str]] = (),
    *,
    is_shift: bool = False,
) -> Contraction:
    """Return the scope of a turn: the documents that stand out by their similarity to any of its views.

    The views are the vectors of the message, which comes first, and of its context and its query. Of the documents that
    were ``asked`` for, by source, one stands out if its similarity is ``deviations`` standard deviations above the mean
    of all. The scope has about ``MIN_SCOPE`` documents at least, ``MAX_SHARE`` of all at most, and those of ``kept``.
    Of a large source, a sample stands for all documents, so that a turn costs the same whatever the size. A message
    that changes the topic (``is_shift``) stands alone, and its own scope is wider.
    """
    every = list(indexes.values())
    total = sum(len(index.documents) for index in every)
    if total < SMALL_CORPUS:
        return Contraction(total=total, reason=ScopeReason.SMALL_CORPUS)
    kept = {one for one in kept if one[0] in indexes}
    rows, settings = unit_rows(views), strictest(every)
    parts = {name: index.part({*asked.get(name, ()), *_of(kept, name)}) for name, index in indexes.items()}
    sampled, few = _similarities([index.sample for index in every], rows), _similarities(parts.values(), rows)
    if float(max(sampled.max(), few.max(initial=-1.0))) < settings.floor:
        return Contraction(total=total, reason=ScopeReason.LOW_SIMILARITY)
    weights = np.concatenate([index.weights for index in every])
    mean = np.average(sampled, axis=1, weights=weights)[:, None]
    deviation = np.maximum(np.sqrt(np.average((sampled - mean) ** 2, axis=1, weights=weights)), 1e-6)[:, None]
    margins = np.zeros((len(rows), 1))
    if is_shift:
        margins[0] = SHIFT_MARGIN  # of the message, the first view
    best = ((sampled - mean) / deviation + margins).max(axis=0, initial=-np.inf)
    count = max(MIN_SCOPE, min(int(weights[best >= settings.deviations].sum()), int(MAX_SHARE * total)))
    order = np.argsort(-best)
    least = best[order[min(int(np.searchsorted(np.cumsum(weights[order]), count)), len(order) - 1)]]
    stands = ((few - mean) / deviation + margins).max(axis=0, initial=-np.inf) >= least
    named = [(name, document) for name, part in parts.items() for document in part.documents]
    inside = set(compress(named, stands.tolist()))
    size = round(float(weights[best >= least].sum())) + len(kept - inside)
    return Contraction(frozenset(inside | kept), frozenset(indexes), total, size)


def _similarities(parts: Iterable[ScopeIndex], views: Floats) -> Floats:
    """Return a row per view, with the similarity of each document: means along rows are ten times as fast."""
    return np.ascontiguousarray(np.concatenate([one.similarities(views) for one in parts]).T)


def _of(documents: Iterable[tuple[str, str]], source: str) -> list[str]:
    return [document for name, document in documents if name == source]


def strictest(indexes: Iterable[ScopeIndex]) -> ScopeSettings:
    """Return the settings for several sources: those that keep the most documents, and report the fewest shifts."""
    listed = [astuple(index.settings) for index in indexes] or [astuple(ScopeSettings())]
    return ScopeSettings(*map(min, zip(*listed, strict=True)))


class Narrowing(NamedTuple):
    """How a turn was searched (None without a conversation), and the passages to leave out."""

    turn: TurnScope | None = None
    outside: frozenset[NodeKey] = frozenset()


class Conversation:
    """The conversation of one request: how its question is searched, and which results are kept."""

    def __init__(self, fan_out: FanOut, state: ScopeState | None, indexes: Mapping[str, ScopeIndex]) -> None:
        self._fan_out = fan_out  # without a ``follow_up`` if a model plans, which reads the conversation itself
        self._state = state or ScopeState()
        self._indexes = indexes  # by source

    async def narrow(self, searches: Sequence[SourceSearch], limit: int) -> Narrowing:
        """Return a record of how the turn was narrowed, and the found passages of other documents, to be left out.

        Only passages that the question itself found are left out, as long as ``limit`` passages remain.
        """
        made, follow_up = partial(TurnScope, turn=self._state.turn + 1), self._fan_out.follow_up
        if follow_up is None:
            return Narrowing(made(topic=Topic.UNKNOWN, reason=ScopeReason.PLANNED))
        if not follow_up.earlier:
            return Narrowing(made(reason=ScopeReason.NO_HISTORY))
        searches = [search for search in searches if search.sub_query.origin is SubQueryOrigin.QUESTION]
        group = await self._group(searches)
        if group is None:
            return Narrowing(made(topic=Topic.UNKNOWN, reason=ScopeReason.NO_INDEX))
        drift, expanded = round(group.compared.drift or 0.0, 4), group.compared.expanded
        turn = made(topic=group.topic, drift=drift, expanded=expanded)
        if not group.indexes:
            return Narrowing(turn.model_copy(update={"reason": ScopeReason.NO_INDEX}))
        started = time.monotonic()
        work = partial(self._contracted, group, searches)
        deadline = earliest(call_deadline(), deadline_after(MAX_SECONDS))
        try:
            scope = await Call(sync=work, deadline=deadline, what="scope")
        except Exception as error:  # noqa: BLE001 (a search that is not narrowed loses nothing)
            logger.warning("the search was not narrowed: %s", error_message(error))
            scope = Contraction(reason=ScopeReason.FAILED)
        changed, outside = _outside(searches, scope, limit)
        changed |= {"scope_ms": round(1000 * (time.monotonic() - started), 1), **_counts(searches, scope)}
        return Narrowing(turn.model_copy(update=changed), outside)

    async def _group(self, searches: Sequence[SourceSearch]) -> _Group | None:
        """Return what the model of the most indexes compares (vectors of several can't be), or None without vectors."""
        groups: dict[int, _Group] = {}  # by embedding model
        for name, source in {search.source.name: search.source for search in searches}.items():
            found = await self._fan_out.compared(source, MAX_SECONDS)
            if found is not None:
                model, compared = found
                index, group = self._indexes.get(name), groups.setdefault(id(model), _Group(compared, {}, []))
                if index is not None and index.model == model_name_of(model):
                    group.indexes[name] = index
                    group.readers.append((index.version, vector_reader(source)))
        return max(groups.values(), key=lambda one: len(one.indexes), default=None)

    def after(self, turn: TurnScope, nodes: Sequence[NodeWithScore]) -> ScopeState:
        """Return the state after a turn that found these passages."""
        marks = [((provenance(node) or {}).get("source"), _document(node)) for node in nodes]
        found = dict.fromkeys((str(source), document) for source, document in marks if source)
        documents = [ScopedDocument(source=source, document=document) for source, document in found]
        return self._state.after(turn, tuple(documents[:RECENT_DOCUMENTS]))

    def _contracted(self, group: _Group, searches: Sequence[SourceSearch]) -> Contraction:
        if group.is_stale:
            return Contraction(reason=ScopeReason.INDEX_STALE)
        kept = {(one.source, one.document) for listed in (self._state.pinned, *self._state.recent) for one in listed}
        asked: dict[str, set[str]] = {}
        for search in searches:
            asked.setdefault(search.source.name, set()).update(map(_document, search.nodes))
        # The vectors of the message, its context (earlier messages, last documents), and its own query.
        compared, latest = group.compared, self._state.recent[-1] if self._state.recent else ()
        own, query = unit_rows(np.array([compared.own, compared.query], np.float32))
        found = [(one.source, one.document) for one in latest]
        last = [index.part(_of(found, name)).prototypes for name, index in group.indexes.items()]
        rows, context = np.concatenate(last), own.copy()
        if compared.history is not None:
            context += DECAY * compared.history.astype(np.float32)
        if len(rows):
            context += DECAY * unit_rows(rows.mean(axis=0, keepdims=True))[0]
        return contract(group.indexes, [own, context, query], asked, kept, is_shift=group.topic is Topic.SHIFTED)


class _Group(NamedTuple):
    """What one embedding model compares: the question with its conversation, and with the sources that it searches."""

    compared: Compared
    indexes: dict[str, ScopeIndex]
    readers: list[tuple[str, VectorReader | None]]  # each index's version, and the reader of its source

    @property
    def topic(self) -> Topic:
        expanded, drift = self.compared.expanded, self.compared.drift or 0.0
        return Topic.CONTINUED if expanded or drift >= strictest(self.indexes.values()).shift else Topic.SHIFTED

    @property
    def is_stale(self) -> bool:
        """Whether a source changed after its index was made, or can't be read any more."""
        return any(reader is None or reader.version() != version for version, reader in self.readers)


def _document(node: NodeWithScore) -> str:
    return node.node.ref_doc_id or node.node.node_id


def _outside(searches: Sequence[SourceSearch], made: Contraction, limit: int) -> tuple[JsonObject, frozenset[NodeKey]]:
    """Return the fields to report, and the passages outside a scope; none if too few would remain."""
    if made.reason is not None:
        return {"reason": made.reason}, frozenset()
    best, inside, outside = list[bool](), set[NodeKey](), set[NodeKey]()
    for search in searches:
        for ranked in search.lists:
            held = [made.holds(search.source.name, _document(node)) for node in ranked.nodes]
            best += held[:CANARIES]
            for at, (key, is_held) in enumerate(zip(ranked.keys, held, strict=True)):
                (inside if is_held or at < CANARIES else outside).add(key)
    missed = {"scope_miss": round(1 - sum(best) / len(best), 3) if best else None}
    if len(inside) < limit:
        return {**missed, "reason": ScopeReason.TOO_SMALL}, frozenset()
    return missed, frozenset(outside - inside)


def _counts(searches: Sequence[SourceSearch], made: Contraction) -> JsonObject:
    """Return the numbers to report; if they would reveal hidden documents, none, and ``scope_miss`` is withdrawn."""
    if not made.total or any(search.source.permissions for search in searches):
        return {"scope_miss": None}
    return {"documents": made.total, "scope": made.size or None}
