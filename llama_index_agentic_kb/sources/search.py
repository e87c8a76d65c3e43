"""One search of one source: dense and lexical search run concurrently, each timed and with its own deadline.

If one of them fails or is late and the other finds something, its list contains the error and the search succeeds.
Results are cleaned, since user retrievers may return anything; index nodes are resolved, a few levels deep; and each
node is checked against the effective filter again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from operator import attrgetter, is_
from types import MemberDescriptorType, NoneType
from typing import Any, Final, TypeAlias

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from llama_index_agentic_kb._aio import Call, as_exception, start, wait
from llama_index_agentic_kb._text import error_message, one_line, without_surrogates
from llama_index_agentic_kb._types import JsonObject
from llama_index_agentic_kb.account import with_handlers
from llama_index_agentic_kb.errors import DeadlineExceededError, RetrievalError
from llama_index_agentic_kb.guard.resilience import CallProgress, ResilientCalls
from llama_index_agentic_kb.schema import FilterNode
from llama_index_agentic_kb.search.lexical import LexicalSearch, NotIndexedError
from llama_index_agentic_kb.sources.index import Traits
from llama_index_agentic_kb.sources.stores import search_notes

NodeKey: TypeAlias = tuple[str, str]
"""A node's id and text."""

MAX_INLINE: Final = 200
"""The maximum number of nodes that are checked on the event loop at a time: about 2 ms."""


@dataclass
class NodeList:
    """One ranked list of a search: a source may be searched by several methods."""

    kind: str  # "dense", "lexical", "hybrid" (the store's own), or "retriever" (any other)
    nodes: list[NodeWithScore]  # best first, all checked against the effective filter; the wrappers are new objects
    keys: list[NodeKey]  # of each node, computed once: LlamaIndex rebuilds a node's text at each call
    scale: Hashable | None = None  # shared by lists with comparable scores
    candidates: int = 0  # the number of results that the source returned
    dropped_by_filter: int = 0
    dropped_as_unusable: int = 0  # ``note`` says why
    elapsed_ms: int | None = None  # without embedding the query; None if it was not measured
    error: Exception | None = None  # why this method failed; the search continues with the other lists
    note: str | None = None  # such as that the search was exact, or repeated with more candidates
    shard: str | None = None  # the name of the shard that returned the list
    parts: tuple[NodeList, ...] = ()  # the lists of the shards of which this list was merged, failed ones included

    @cached_property
    def scores(self) -> list[float] | None:
        """The score of each node, in order; None if any node lacks one."""
        scores = list(map(attrgetter("score"), self.nodes))
        return None if None in scores else scores


def node_key(node: BaseNode) -> NodeKey:
    """Return a node's identity, its ID and text: nodes are equal only if both are."""
    return node.node_id, node.get_content(metadata_mode=MetadataMode.NONE)


def distinct_nodes(lists: Sequence[NodeList]) -> dict[NodeKey, NodeWithScore]:
    """Return the nodes of several lists by their keys, in order of first occurrence."""
    nodes: dict[NodeKey, NodeWithScore] = {}
    for ranked in lists:
        for key, node in zip(ranked.keys, ranked.nodes, strict=True):
            nodes.setdefault(key, node)
    return nodes


@dataclass(slots=True)
class PreparedSource:
    """A source's retriever for one effective filter, with everything that its searches need."""

    name: str
    retriever: BaseRetriever  # which applies the filter
    traits: Traits
    filters: FilterNode | None  # the effective filter
    passes: Callable[[Mapping[str, object]], bool] | None  # whether metadata pass it: each node is checked again
    calls: ResilientCalls
    lexical_calls: ResilientCalls  # in a bulkhead of their own: building a lexical index delays no dense search
    lexical: LexicalSearch | None
    is_private: bool  # whether some documents may be hidden from the caller: no count and no note may reveal them


async def search_source(
    source: PreparedSource,
    query: str,
    bundle: Callable[[], Awaitable[QueryBundle]],
    *,
    limit: int,
    progress: CallProgress,
) -> tuple[NodeList, ...]:
    """Search a prepared source by all its methods, each bounded by the context's deadline, for ``limit`` nodes each.

    Lexical search starts with the text of the query at once; dense search waits for ``bundle``, which has its vector.

    Raises:
        RetrievalError: The source did not return a list of nodes.
        DeadlineExceededError: The source did not answer in time.
        SourceUnavailableError: The source was not called: its circuit is open, or too many calls are waiting.
    """
    if source.lexical is None:
        return (await _dense_list(source, bundle, limit, progress),)
    both = (
        start(_dense_list(source, bundle, limit, progress)),
        start(_lexical_list(source, source.lexical, query, limit, progress)),
    )
    try:
        await wait(both)
    except asyncio.CancelledError:
        if progress.given_up is None:
            raise
        if task := asyncio.current_task():
            task.uncancel()
    finally:
        for job in both:
            job.cancel()
    dense, words = NodeList(source.traits.kind, [], [], source.traits.scale), NodeList("lexical", [], [])
    dense = both[0].result() if both[0].error is None else replace(dense, error=_given_up(both[0].error, progress))
    words = both[1].result() if both[1].error is None else replace(words, error=_given_up(both[1].error, progress))
    if dense.error is not None and not words.nodes:
        raise dense.error
    if isinstance(words.error, NotIndexedError):
        return (replace(dense, note="; ".join(filter(None, (dense.note, str(words.error))))),)
    return dense, words


def _given_up(error: BaseException, progress: CallProgress) -> Exception:
    """Return the error of a method that failed, or was stopped with its search."""
    if progress.given_up is not None and isinstance(error, DeadlineExceededError):
        return DeadlineExceededError(progress.given_up)
    return as_exception(error)


async def _dense_list(
    source: PreparedSource, bundle: Callable[[], Awaitable[QueryBundle]], limit: int, progress: CallProgress
) -> NodeList:
    query, traits, notes = await bundle(), source.traits, list[str]()
    started, retriever, what = time.monotonic(), with_handlers(source.retriever), f"source {source.name!r}"
    search_notes.set(notes)
    native = partial(retriever.aretrieve, query)
    call = Call(partial(retriever.retrieve, query), native if traits.native_async else None, what=what)
    try:
        found = await source.calls.call(call, progress)
    except NotImplementedError:  # by a sync door to a source that is async only
        if not traits.native_async:
            raise
        found = await source.calls.call(Call(native=native, what=what), progress)
    return await _checked(NodeList(traits.kind, [], [], traits.scale), found, source, query, limit, started, notes)


async def _lexical_list(
    source: PreparedSource, lexical: LexicalSearch, query: str, limit: int, progress: CallProgress
) -> NodeList:
    started, work = time.monotonic(), partial(lexical.search, query, limit, source.filters)
    call = Call(sync=work, what=f"lexical search of source {source.name!r}")
    found = await source.lexical_calls.call(call, progress)
    return await _checked(NodeList("lexical", [], []), found, source, QueryBundle(query), limit, started)


async def _checked(
    made: NodeList,
    found: object,
    source: PreparedSource,
    query: QueryBundle,
    limit: int,
    started: float,
    notes: Sequence[str] = (),
) -> NodeList:
    """Return an empty list filled with the found nodes that are valid and pass the filter.

    More than ``MAX_INLINE`` nodes are checked on a thread, so as not to block the event loop.
    """
    sift, checking = partial(_sift, made, source, limit), f"checking source {source.name!r}"
    if isinstance(found, (list, Sequence)) and len(found) > MAX_INLINE:
        every = cleaned = await source.calls.bulkhead.call(Call(sync=partial(sift, found), what=checking))
    else:
        every = cleaned = sift(found)
    if cleaned.index_nodes and getattr(source.retriever, _OURS, False):
        followed = await _followed(source, query, cleaned)
        distinct = {node.node.node_id: node for node in reversed(followed)}
        again = partial(sift, [*distinct.values()][::-1])
        many = len(distinct) > MAX_INLINE
        every = await source.calls.bulkhead.call(Call(sync=again, what=checking)) if many else again()
    if every.why is not None and not every:
        raise RetrievalError(f"source {source.name!r} returned no list of NodeWithScore: {every.why}")
    made.elapsed_ms = round(1000 * (time.monotonic() - started))
    if source.is_private:  # only passing nodes are counted; notes are omitted, since they may reveal hidden counts
        return made
    made.dropped_by_filter = len(every) - made.candidates
    made.candidates = cleaned.returned + max(0, len(every) - len(cleaned))
    made.dropped_as_unusable = cleaned.unusable
    made.note = "; ".join(filter(None, (*notes, cleaned.why))) or None
    return made


def _sift(made: NodeList, source: PreparedSource, limit: int, found: object) -> CleanNodes:
    """Return the valid nodes of an answer; those that pass the effective filter are the nodes of the list."""
    every, documents = clean_nodes(found), source.traits.documents
    made.nodes, made.keys, made.candidates = [], [], 0
    for node, key in zip(every, every.keys, strict=True):
        if documents is not None and node.node.ref_doc_id not in documents:  # many stores ignore them
            continue
        if source.passes is not None and not source.passes(node.node.metadata):
            continue
        made.candidates += 1
        if made.candidates <= limit:
            made.nodes.append(node)
            made.keys.append(key)
    return every


# -- what a source returned: flaws are repaired, or counted and reported ----------------------------------------------

MAX_NODES: Final = 10_000  # read from one answer
MAX_CHARACTERS: Final = 1_000_000  # of a node's text; longer text is cut
MAX_ID: Final = 10_000  # characters
MAX_FIELDS: Final = 1_000  # of metadata
MAX_ITEMS: Final = 100_000  # values within one metadata field, nested lists and mappings included
MAX_LEVELS: Final = 20  # of lists and mappings within one metadata field
MAX_BITS: Final = 10_000  # of an integer: Python refuses to convert more than 4,300 digits to text

_TYPES: Final[dict[str, type]] = {
    "relationships": dict,
    "excluded_embed_metadata_keys": list,
    "excluded_llm_metadata_keys": list,
    "text_template": str,
    "metadata_template": str,
    "metadata_separator": str,
}
"""The types that LlamaIndex's methods expect of a node's fields; code that bypasses pydantic may set any type."""

_EXPECTED: Final = [*_TYPES.values()]
_PLAIN: Final = (bool, float, NoneType)
_COLLECTIONS: Final = (Mapping, list, tuple, set, frozenset)


class CleanNodes(list[NodeWithScore]):
    """The valid nodes of an answer in new ``NodeWithScore`` objects; scores that are not finite become None."""

    unusable = 0
    """The number of invalid nodes that were left out."""
    returned = 0
    """The number of nodes that the source returned."""
    index_nodes = 0
    why: str | None = None
    """Why the first node was left out or cut; None if all nodes are valid."""

    keys: list[NodeKey]  # of each node
    checked: tuple[NodeWithScore, ...] = ()
    """The nodes as they were checked: a user's retriever may change the list."""


def clean_nodes(found: object) -> CleanNodes:
    """Check the result of a source; its own nodes are never changed, and checked ``CleanNodes`` are returned as is.

    Invalid nodes are left out and counted, with the reason; nodes that can be repaired are replaced by copies. If the
    result is not a list, or none of its items is a valid node, it is empty, with the reason.
    """
    if isinstance(found, CleanNodes) and len(found) == len(found.checked) and all(map(is_, found, found.checked)):
        return found
    made = CleanNodes()
    made.keys = []
    if isinstance(found, (str, bytes)) or not isinstance(found, (list, Sequence)):
        made.why = type(found).__name__
        return made
    made.returned = len(found)
    try:
        for item in islice(found, MAX_NODES):
            try:
                node, key, flaw = _usable(item)
                made.append(node)
                made.keys.append(key)
                made.index_nodes += isinstance(node.node, IndexNode)
                made.why = made.why or flaw
            except Exception as error:  # noqa: BLE001 (nodes are anybody's classes)
                made.unusable += 1
                made.why = made.why or f"a node can't be used: {error_message(error, 300)}"
    except Exception as error:  # noqa: BLE001 (so are lists)
        made.why = f"its list ended with {error_message(error, 300)}"
    if made.returned > MAX_NODES:
        made.why = made.why or f"only the first {MAX_NODES:,} of {made.returned:,} nodes were looked at"
    made.checked = tuple(made)
    return made


def _usable(item: Any) -> tuple[NodeWithScore, NodeKey, str | None]:
    """Return a node whose ID, text, metadata and score have the expected types, its key, and a note if it was cut."""
    node: Any = getattr(item, "node", None)
    if not isinstance(item, NodeWithScore) or not isinstance(node, BaseNode):
        raise TypeError(f"expected a NodeWithScore, got {type(item).__name__}")
    node_id: Any = node.node_id
    text: Any = node.text if type(node) is TextNode else node.get_content(metadata_mode=MetadataMode.NONE)
    if not isinstance(node_id, str) or not 0 < len(node_id) <= MAX_ID:
        raise TypeError(f"its id is no text of up to {MAX_ID:,} characters: {one_line(str(node_id), 50)!r}")
    if not isinstance(text, str):
        raise TypeError(f"its content is no text but {type(text).__name__}")
    flaw = f"a node of {len(text):,} characters was cut to {MAX_CHARACTERS:,}" if len(text) > MAX_CHARACTERS else None
    whole, whole_id, metadata = without_surrogates(text[:MAX_CHARACTERS]), without_surrogates(node_id), node.metadata
    update, key = JsonObject(), (node_id, text)
    if [*map(type, map(node.__dict__.get, _TYPES))] != _EXPECTED:
        update = _defaults(node)
    clean = _clean_metadata(metadata)
    if clean is not metadata:
        update["metadata"] = clean
    if whole_id is not node_id:
        update["id_"] = whole_id
    if update or whole is not text:
        node = node.model_copy(update=update)
        if whole is not text:
            node.set_content(whole)
        key = node_key(node)
    is_finite = type(item.score) is float and math.isfinite(item.score)
    return NodeWithScore(node=node, score=item.score if is_finite else _finite(item.score)), key, flaw


def _defaults(node: BaseNode) -> JsonObject:
    """Return the defaults of a node's fields whose values have other types than LlamaIndex's methods expect."""
    own, fields = node.__dict__, type(node).model_fields
    wrong = [name for name, kind in _TYPES.items() if name in fields and not isinstance(own.get(name), kind)]
    return {name: fields[name].get_default(call_default_factory=True) for name in wrong}


def _clean_metadata(metadata: object) -> JsonObject:
    """Return metadata with text keys and clean values; the same object if nothing needs repair."""
    if metadata is None:
        return {}
    if not isinstance(metadata, (dict, Mapping)):  # the abstract class is slow to ask
        raise TypeError(f"its metadata are no mapping but {type(metadata).__name__}")
    if len(metadata) > MAX_FIELDS:
        raise TypeError(f"its metadata have {len(metadata):,} fields; at most {MAX_FIELDS:,}")
    made = JsonObject()
    for key, value in metadata.items():
        name, kind = without_surrogates(str(key)), type(value)
        if kind is str:
            made[name] = without_surrogates(value[:MAX_CHARACTERS])
        elif kind is int and value.bit_length() <= MAX_BITS:
            made[name] = value
        else:
            made[name] = value if kind in _PLAIN else _clean_value(value)
    same = made.keys() == metadata.keys() and all(map(is_, made.values(), metadata.values()))
    return metadata if same and isinstance(metadata, dict) else made


def _clean_value(value: object) -> object:
    """Return a metadata value without lone surrogates; None, which passes no filter, if it can't be serialized."""
    if isinstance(value, str):
        return without_surrogates(value[:MAX_CHARACTERS])
    if not isinstance(value, _COLLECTIONS):
        return value if _has_words(value) else None
    if not _can_be_written(value):
        return None
    if isinstance(value, list):
        clean = [_clean_value(item) if isinstance(item, str) else item for item in value]
        return value if all(map(is_, clean, value)) else clean
    return value


def _can_be_written(value: object) -> bool:
    """Return whether a value is within ``MAX_ITEMS`` and ``MAX_LEVELS``, and all its items convert to text."""
    left, level = MAX_ITEMS, [value]
    for _ in range(MAX_LEVELS):
        left -= len(level)
        inner: list[object] = []
        for item in level:
            if isinstance(item, _COLLECTIONS):
                if len(item) + len(inner) > left:
                    return False
                inner += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            elif not _has_words(item):
                return False
        if not inner:
            return left >= 0
        level = inner
    return False


def _has_words(value: object) -> bool:
    if value is None or isinstance(value, (str, bytes, bool, float)):
        return True
    if isinstance(value, int):
        return value.bit_length() <= MAX_BITS
    try:
        return isinstance(str(value), str)
    except Exception:  # noqa: BLE001 (metadata hold anybody's objects)
        return False


def _finite(score: Any) -> float | None:
    """Return a score as a finite number; None if it is not finite or not a number."""
    if score is None or isinstance(score, bool):
        return None
    try:
        number = float(score)
    except Exception:  # noqa: BLE001 (scores are anybody's objects)
        return None
    return number if math.isfinite(number) else None


# -- index nodes ------------------------------------------------------------------------------------------------------

# LlamaIndex's own recursion has no bound: a node that points to its own retriever ends in a RecursionError, five
# levels of ten took 48 s (measured). It also follows ``obj`` from the store's metadata, so that whoever can write
# metadata can forge a node; here only live retrievers and query engines, and the index's own objects, are followed.

MAX_DEPTH: Final = 3  # to which index nodes are followed
MAX_FOLLOWED: Final = 32  # index nodes in one search; the rest are returned unchanged

_OURS: Final = "__agentic_kb_recursion__"  # pydantic would make a private attribute of a name with one underscore
_THEIRS: Final = "__agentic_kb_made_by_user__"
"""The attribute that marks a user's own retriever: its index nodes may also point to nodes, as in LlamaIndex."""
_VIEWED: Final = "_agentic_kb_viewed"
"""The slot of a view with the retriever, if its class has slots of its own."""


class _Unresolving:
    """Comes before a retriever's class, and returns its index nodes unresolved.

    The result is cleaned here, since LlamaIndex's next step would raise for one invalid node and lose the others.
    """

    def __init_subclass__(cls) -> None:
        """Do nothing: that of a user's class may take arguments, or register the new class."""

    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:  # noqa: ARG002
        return clean_nodes(nodes)

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return self._handle_recursive_retrieval(query_bundle, nodes)


@lru_cache(maxsize=256)
def _unresolving(kind: type[BaseRetriever], *, theirs: bool) -> type[BaseRetriever]:
    own: dict[str, object] = {_OURS: True, _THEIRS: theirs, "__module__": kind.__module__}
    slots = [name for base in kind.__mro__ for name, at in vars(base).items() if isinstance(at, MemberDescriptorType)]
    if slots:  # a subclass of a tuple or an integer can't have any
        own |= {"__slots__": (_VIEWED,), **{name: _forwarded(name) for name in slots}}
    return type(kind.__name__, (_Unresolving, kind), own)


def _forwarded(slot: str) -> property:
    """Return a slot of a view, whose value is that of the retriever."""
    return property(
        lambda view: getattr(getattr(view, _VIEWED), slot),
        lambda view, value: setattr(getattr(view, _VIEWED), slot, value),
        lambda view: delattr(getattr(view, _VIEWED), slot),
    )


def bounded(retriever: BaseRetriever, *, theirs: bool = True) -> BaseRetriever:
    """Return a view of a retriever that returns index nodes unresolved; it has the retriever's state, not a copy.

    This package then resolves them itself, up to ``MAX_DEPTH`` and ``MAX_FOLLOWED``. A user's own retriever
    (``theirs``) that overrides LlamaIndex's recursion is returned unchanged.
    """
    kind = type(retriever)
    own = (kind._handle_recursive_retrieval, kind._ahandle_recursive_retrieval)  # noqa: SLF001 (core has no other way)
    if theirs and own != (BaseRetriever._handle_recursive_retrieval, BaseRetriever._ahandle_recursive_retrieval):  # noqa: SLF001
        return retriever
    made = _unresolving(kind, theirs=theirs)
    view = made.__new__(made)
    view.__dict__ = retriever.__dict__
    if hasattr(made, _VIEWED):
        object.__setattr__(view, _VIEWED, retriever)
    return view


async def _followed(source: PreparedSource, query: QueryBundle, found: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return the nodes of a search with index nodes replaced by the results of their objects, within the limits."""
    nodes_too = getattr(source.retriever, _THEIRS, False)
    kinds = (BaseRetriever, BaseQueryEngine, *((BaseNode,) if nodes_too else ()))
    left, resolved = MAX_FOLLOWED, list[NodeWithScore]()
    seen = {id(source.retriever.__dict__)}  # of what was followed; a view has the state of its retriever
    waiting = deque((node, source.retriever.object_map, 0) for node in found)
    while waiting:
        node, objects, depth = waiting.popleft()
        target: Any = None
        if isinstance(node.node, IndexNode) and depth < MAX_DEPTH and left > 0:
            live = node.node.obj if isinstance(node.node.obj, kinds) else None
            target = objects.get(node.node.index_id, live)
        state = id(getattr(target, "__dict__", target))
        if target is None or state in seen:
            resolved.append(node)
            continue
        left -= 1
        if isinstance(target, BaseRetriever):
            seen.add(state)
            work = partial(target._retrieve, query)  # noqa: SLF001 (without core's recursion)
            inner = await source.calls.bulkhead.call(Call(sync=work, what="retriever behind an index node"))
            waiting.extendleft((one, target.object_map, depth + 1) for one in reversed([*inner]))
        elif isinstance(target, BaseQueryEngine):
            seen.add(state)
            ask = Call(sync=partial(target.query, query), what="query engine behind an index node")
            response: Any = await source.calls.bulkhead.call(ask)
            text = TextNode(text=str(response), metadata=response.metadata or {})
            resolved.append(NodeWithScore(node=text, score=node.score))
        elif isinstance(target, BaseNode):
            resolved.append(NodeWithScore(node=target, score=node.score))
        else:
            resolved.append(target if isinstance(target, NodeWithScore) else node)
    return resolved
