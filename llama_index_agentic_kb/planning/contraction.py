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
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from llama_index.core.schema import NodeWithScore
from numpy.typing import NDArray

from llama_index_agentic_kb._aio import Call, call_deadline, deadline_after, earliest
from llama_index_agentic_kb._text import error_message
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

    documents: frozenset[tuple[str, str]] = frozenset()
    """Those of the documents asked for that are in the scope, as (source, document)."""
    sources: frozenset[str] = frozenset()
    """The sources that the scope covers; documents of others are always in it."""
    total: int = 0
    """The number of documents of these sources."""
    size: int = 0
    """The number of documents in the scope; an estimate for a source of more than ``SAMPLE`` documents."""
    reason: ScopeReason | None = None
    """Why there is no scope; None if there is one."""

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

    A document stands out if its similarity is ``deviations`` standard deviations above the mean of all documents. The
    scope has about ``MIN_SCOPE`` documents at least, ``MAX_SHARE`` of all at most, and those of ``kept``. Of a large
    source, a sample of the documents stands for all, so that a turn costs the same whatever the size.

    Args:
        indexes: The scope indexes of the searched sources, of one embedding model.
        views: The vectors of the message, which comes first, and of its context and its query.
        asked: The documents that may be in the scope, by source.
        kept: Documents that stay in the scope, as (source, document).
        is_shift: Whether the message changes the topic: it then stands alone, and its own scope is wider.
    """
    total = sum(len(index.documents) for index in indexes.values())
    if total < SMALL_CORPUS:
        return Contraction(total=total, reason=ScopeReason.SMALL_CORPUS)
    kept = {one for one in kept if one[0] in indexes}
    rows, settings = unit_rows(views), strictest([index.settings for index in indexes.values()])
    parts = {name: index.part({*asked.get(name, ()), *_of(kept, name)}) for name, index in indexes.items()}
    # a row per view: means along rows are ten times as fast
    every, few = (
        np.ascontiguousarray(np.concatenate([one.similarities(rows) for one in listed]).T)
        for listed in ([index.sample for index in indexes.values()], parts.values())
    )
    if float(max(every.max(), few.max(initial=-1.0))) < settings.floor:
        return Contraction(total=total, reason=ScopeReason.LOW_SIMILARITY)
    weights = np.concatenate([_weights(index) for index in indexes.values()])
    mean = np.average(every, axis=1, weights=weights)[:, None]
    deviation = np.sqrt(np.average((every - mean) ** 2, axis=1, weights=weights))[:, None]
    margins = np.array([[SHIFT_MARGIN if is_shift else 0.0]] + [[0.0]] * (len(rows) - 1))
    best, standing = (
        ((part - mean) / np.maximum(deviation, 1e-6) + margins).max(axis=0, initial=-np.inf) for part in (every, few)
    )
    count = max(MIN_SCOPE, min(int(weights[best >= settings.deviations].sum()), int(MAX_SHARE * total)))
    order = np.argsort(-best)
    least = best[order[min(int(np.searchsorted(np.cumsum(weights[order]), count)), len(order) - 1)]]
    named = [(name, document) for name, part in parts.items() for document in part.documents]
    inside = {one for one, stands in zip(named, (standing >= least).tolist(), strict=True) if stands}
    size = round(float(weights[best >= least].sum())) + len(kept - inside)
    return Contraction(frozenset(inside | kept), frozenset(indexes), total, size)


def _of(documents: Iterable[tuple[str, str]], source: str) -> list[str]:
    return [document for name, document in documents if name == source]


def _weights(index: ScopeIndex) -> NDArray[np.float64]:
    """Return the number of documents that each of an index's sample stands for."""
    count = len(index.sample.documents)
    return np.full(count, len(index.documents) / max(1, count))


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
        fan_out: The request's searches; without a ``follow_up`` if a model plans, which reads the conversation itself.
        state: The state after the last turn; None if the caller keeps none.
        indexes: The scope indexes by source.
    """

    def __init__(self, fan_out: FanOut, state: ScopeState | None, indexes: Mapping[str, ScopeIndex]) -> None:
        self._fan_out = fan_out
        self._state = state or ScopeState()
        self._indexes = indexes

    async def narrow(self, searches: Sequence[SourceSearch], limit: int) -> Narrowing:
        """Return how the turn was searched, and the passages outside its scope, which are to be left out.

        Of ``searches``, those of the question itself are narrowed, as long as ``limit`` passages are left.
        """
        made, follow_up = partial(TurnScope, turn=self._state.turn + 1), self._fan_out.follow_up
        if follow_up is None:
            return Narrowing(made(topic=Topic.UNKNOWN, reason=ScopeReason.PLANNED))
        if not follow_up.earlier:
            return Narrowing(made(reason=ScopeReason.NO_HISTORY))
        searches = [search for search in searches if search.sub_query.origin is SubQueryOrigin.QUESTION]
        groups = await self._groups(searches)
        if not groups:
            return Narrowing(made(topic=Topic.UNKNOWN, reason=ScopeReason.NO_INDEX))
        compared, indexes = groups[0].compared, [index for group in groups for index in group.indexes.values()]
        drift, shift = compared.drift or 0.0, strictest([index.settings for index in indexes]).shift
        topic = Topic.CONTINUED if compared.expanded or drift >= shift else Topic.SHIFTED
        turn = made(topic=topic, drift=round(drift, 4), expanded=compared.expanded)
        if not indexes:
            return Narrowing(turn.model_copy(update={"reason": ScopeReason.NO_INDEX}))
        started = time.monotonic()
        deadline = earliest(call_deadline(), deadline_after(MAX_SECONDS))
        try:
            scope = await Call(sync=partial(self._contracted, groups, searches, topic), deadline=deadline, what="scope")
        except Exception as error:  # noqa: BLE001 (a search that is not narrowed loses nothing)
            logger.warning("the search was not narrowed: %s", error_message(error))
            scope = Contraction(reason=ScopeReason.FAILED)
        changed, outside = _outside(searches, scope, limit)
        changed["scope_ms"] = round(1000 * (time.monotonic() - started), 1)
        if scope.total and not any(search.source.permissions for search in searches):  # else counts would reveal some
            changed |= {"documents": scope.total, "scope": scope.size or None}
        else:
            changed.pop("scope_miss", None)
        return Narrowing(turn.model_copy(update=changed), outside)

    def after(self, turn: TurnScope, nodes: Sequence[NodeWithScore]) -> ScopeState:
        """Return the state after a turn that found these passages."""
        marks = [(provenance(node) or {}, _document(node)) for node in nodes]
        found = dict.fromkeys((str(mark["source"]), document) for mark, document in marks if mark.get("source"))
        documents = [ScopedDocument(source=source, document=document) for source, document in found]
        return self._state.after(turn, tuple(documents[:RECENT_DOCUMENTS]))

    async def _groups(self, searches: Sequence[SourceSearch]) -> list[_Group]:
        """Return the embedding models that the question was searched with."""
        groups: dict[int, _Group] = {}
        for name, source in {search.source.name: search.source for search in searches}.items():
            found = await self._fan_out.compared(source, MAX_SECONDS)
            if found is not None:
                model, compared = found
                index, group = self._indexes.get(name), groups.setdefault(id(model), _Group(compared, {}, []))
                if index is not None and index.model == model_name_of(model):
                    group.indexes[name] = index
                    group.readers.append((index.version, vector_reader(source)))
        return list(groups.values())

    def _contracted(self, groups: Sequence[_Group], searches: Sequence[SourceSearch], topic: Topic) -> Contraction:
        """Return the scope over all embedding models."""
        groups = [group for group in groups if group.indexes]
        if any(reader is None or reader.version() != version for group in groups for version, reader in group.readers):
            return Contraction(reason=ScopeReason.INDEX_STALE)
        kept = {(one.source, one.document) for listed in (self._state.pinned, *self._state.recent) for one in listed}
        asked: dict[str, set[str]] = {}
        for search in searches:
            asked.setdefault(search.source.name, set()).update(map(_document, search.nodes))
        parts = [
            contract(group.indexes, self._views(group), asked, kept, is_shift=topic is Topic.SHIFTED)
            for group in groups
        ]
        made = [part for part in parts if part.reason is None]
        return Contraction(
            frozenset[tuple[str, str]]().union(*(part.documents for part in made)),
            frozenset[str]().union(*(part.sources for part in made)),
            sum(part.total for part in parts),
            sum(part.size for part in made),
            None if made else parts[0].reason,
        )

    def _views(self, group: _Group) -> list[Floats]:
        """Return the vectors of the message, its context (earlier messages, last documents), and its own query."""
        compared, latest = group.compared, self._state.recent[-1] if self._state.recent else ()
        own, query = unit_rows(np.array([compared.own, compared.query], np.float32))
        found = [(one.source, one.document) for one in latest]
        last = [index.part(_of(found, name)).prototypes for name, index in group.indexes.items()]
        rows, context = np.concatenate(last), own.copy()
        if compared.history is not None:
            context += DECAY * compared.history.astype(np.float32)
        if len(rows):
            context += DECAY * unit_rows(rows.mean(axis=0, keepdims=True))[0]
        return [own, context, query]


class _Group(NamedTuple):
    """What one embedding model compares: the question with its conversation, and with the sources that it searches."""

    compared: Compared
    indexes: dict[str, ScopeIndex]
    readers: list[tuple[str, VectorReader | None]]
    """Each index's version, and the reader of its source."""


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
            held = [made.holds(search.source.name, _document(node)) for node in ranked.nodes]
            best += held[:CANARIES]
            for at, (key, is_held) in enumerate(zip(ranked.keys, held, strict=True)):
                (inside if is_held or at < CANARIES else outside).add(key)
    missed = {"scope_miss": round(1 - sum(best) / len(best), 3) if best else None}
    if len(inside) < limit:
        return {**missed, "reason": ScopeReason.TOO_SMALL}, frozenset()
    return missed, frozenset(outside - inside)
